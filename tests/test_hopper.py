"""The Hopper decode kernel through ops, on a Hopper GPU; and, anywhere, the rule that says when it runs."""

import dataclasses

import pytest
import torch

from quantkv import LayerMaps, LinearMap, ops
from quantkv.calls import AttentionOptions, Segment
from quantkv.implementations.hopper import calls as hopper
from quantkv.maps import hadamard, named_map
from quantkv.testing import Batch, check

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper_only = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
HOPPER = {"implementation": "hopper"}
FORMATS = ["int8", "fp8_token", "int4", "int2", "k8v4", "k4v2", "tq_k8v4", "tq4", "tq_k3v4", "tq3", "tq4/int8", "int2/tq4"]
LENS = (700, 33, 1, 1300)  # ragged: several splits, part of a page, one token


def batch(name, queries=(1, 1, 1, 1), **arguments):
    plain = {"head_size": 128, "num_kv_heads": 8, "group": 4, "dtype": torch.bfloat16, "device": "cuda"}
    return Batch.make(name, queries, LENS, **{**plain, **arguments})


def run(b, **options):
    result = b.attend(**HOPPER, max_query_len=int(b.cu_seqlens_q.diff().max()), **options)
    check(b, result, **options)
    again = b.attend(**HOPPER, max_query_len=int(b.cu_seqlens_q.diff().max()), **options)
    assert all(torch.equal(x, y) for x, y in zip(result, again)), "two runs of one input differ"


@hopper_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_decode(name, dtype):
    run(batch(name, dtype=dtype))


@hopper_only
@pytest.mark.parametrize("name", FORMATS)
def test_much_work(name):
    """Enough pages for the kernels that little work does not get."""
    plain = {"head_size": 128, "num_kv_heads": 8, "group": 4, "dtype": torch.bfloat16, "device": "cuda"}
    run(Batch.make(name, (1, 1, 1, 1), (9000, 33, 1, 1300), **plain))


@hopper_only
@pytest.mark.parametrize("name", ["int4", "int8", "int2", "tq4", "tq3"])
@pytest.mark.parametrize("queries", [(2, 4, 1, 3), (8, 8, 1, 8)])
def test_several_queries(name, queries):
    run(batch(name, queries), window=500)


@hopper_only
@pytest.mark.parametrize("name", ["int4", "int8", "k8v4"])
@pytest.mark.parametrize(
    "options", [{"window": 100}, {"softcap": 20.0}, {"sinks": True}, {"window": 700, "softcap": 30.0, "sinks": True}], ids=str
)
def test_options(name, options):
    options = {**options, **({"sinks": torch.linspace(-2, 2, 32, device="cuda")} if "sinks" in options else {})}
    run(batch(name), **options)


@hopper_only
@pytest.mark.parametrize(
    "shape",
    [
        dict(head_size=64),
        dict(head_size=256),
        dict(num_kv_heads=1),
        dict(num_kv_heads=2, group=16),
        dict(num_kv_heads=3, group=6),
        dict(group=1),
        dict(block_size=32),
        dict(block_size=64),
        dict(block_size=128),
    ],
    ids=str,
)
def test_shapes(shape):
    run(batch("int4", **shape))


@hopper_only
def test_queries_of_a_wider_projection():
    """Queries that are columns of q, k and v together, as a model computes them."""
    b = batch("int4")
    wider = torch.cat([b.q, torch.full_like(b.q, float("nan"))], 1)
    run(dataclasses.replace(b, q=wider[:, : b.q.shape[1]]))


@hopper_only
def test_calibrated_maps():
    """A map for each head in place of the Hadamard, for K and for V."""
    generator = torch.Generator().manual_seed(1)
    maps = []
    for _ in range(2):
        a = torch.linalg.qr(torch.randn(8, 128, 128, generator=generator, dtype=torch.float64))[0] * (
            1 + torch.rand(8, 1, 128, generator=generator)
        )
        maps.append(LinearMap(a.float(), torch.linalg.inv(a).float()))
    run(batch("int4", maps=LayerMaps(*maps)))


@hopper_only
@pytest.mark.parametrize("name", ["int4", "int8", "int2", "tq4"])
def test_hadamard_with_signs(name):
    """What the kernels compute in registers, for either side."""
    maps = []
    for seed in range(2):
        signs = 1.0 - 2.0 * (torch.rand(128, generator=torch.Generator().manual_seed(seed)) < 0.5)
        a = hadamard(128).float() * signs / 128**0.5
        maps.append(LinearMap(a[None], a.mT[None].contiguous()))
    run(batch(name, maps=LayerMaps(*maps)))


@hopper_only
@pytest.mark.parametrize("heads,buckets", [(8, 40), (1, 3)])  # the second table is shared, and ends before the keys do
@pytest.mark.parametrize("name", ["int4", "int8", "tq4"])
def test_key_offsets(name, heads, buckets):
    generator = torch.Generator().manual_seed(2)
    offset = torch.randn(buckets, heads, 128, generator=generator)
    for a in (hadamard(128)[None] / 128**0.5, torch.linalg.qr(torch.randn(heads, 128, 128, generator=generator, dtype=torch.float64))[0]):
        maps = LayerMaps(LinearMap(a.float(), torch.linalg.inv(a).float(), offset))
        run(batch(name, maps=maps))
        run(batch(name, (4, 2, 1, 3), maps=maps), window=300, softcap=30.0)


@hopper_only
@pytest.mark.parametrize("lens", [(0, 1, 15, 16, 17), (9000,), tuple(range(0, 600, 9))], ids=["tiny", "one", "many"])
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_lengths(lens, kv_heads):
    """Runs of warps that begin, lie and end in one sequence, or pass over several, empty ones among them."""
    b = Batch.make("int4", (1,) * len(lens), lens, head_size=128, num_kv_heads=kv_heads, group=4, dtype=torch.bfloat16, device="cuda")
    run(b)


@hopper_only
def test_captured_graph_follows_the_lengths():
    b = batch("int4")
    b.attend(**HOPPER, max_query_len=1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = b.attend(**HOPPER, max_query_len=1)
    for lens in ((5, 33, 1, 900), (700, 1, 1, 1300)):
        b.seq_lens.copy_(torch.tensor(lens))
        graph.replay()
        check(b, result)


@hopper_only
def test_auto_takes_it_and_says_why_not():
    b = batch("int4")
    segment = Segment(b.cache.k, b.cache.v, b.cache.format, b.block_table, b.cache.maps)
    call = dict(cu_seqlens_q=b.cu_seqlens_q, seq_lens=b.seq_lens, max_query_len=1)
    assert ops.resolve("auto", b.q, [segment], b.q, **call) == ("hopper", {})
    name, reasons = ops.resolve("auto", b.q, [segment], b.q, **call, options=AttentionOptions(alibi_slopes=torch.ones(32, device="cuda")))
    assert name == "triton" and "alibi_slopes" in reasons["hopper"]


def test_elsewhere_it_is_refused_by_name():
    b = Batch.make("int4", (1,), (20,), device="cpu")
    with pytest.raises(ValueError, match=r"implementation='hopper': tensors are on cpu: a Hopper GPU is needed"):
        b.attend(**HOPPER, max_query_len=1)


def test_a_hadamard_matrix_is_recognised():
    """By its entries, whatever its factor and signs; a matrix with one sign changed, or for each head its own, is not one."""
    for kind in ("hadamard", "hadamard_unit", "rht"):
        forward, inverse = (m.float()[None] for m in named_map(kind, 64))
        signs = LinearMap(forward, inverse).operands.signs
        assert torch.equal(hadamard(64) * signs, inverse[0].mT.sign())
        changed = inverse.clone()
        changed[0, 5, 3] *= -1
        assert LinearMap(forward, changed).operands.signs is None
        assert LinearMap(forward.repeat(2, 1, 1), inverse.repeat(2, 1, 1)).operands.signs is None
    assert LinearMap(torch.eye(64)[None], torch.eye(64)[None]).operands.signs is None


@pytest.mark.parametrize("name,served", [("int4", True), ("int8/tq3", True), ("fp8", False), ("bf16", False)])
def test_pages_of_records_are_recognised(name, served):
    """The rule's view of a cache: its buffer where both sides are records in it, and nothing else."""
    b = Batch.make(name, (1,), (20,), head_size=128)
    k, v = b.cache.k, b.cache.v
    assert hopper._pages(k, v) is b.cache.buffer
    assert hopper._pages(k._replace(base=None), v) is None
    single = Batch.make(name, (1,), (20,), head_size=128, num_kv_heads=1).cache
    assert hopper._pages(single.k, single.v) is single.buffer
    moved = k._replace(codes=k.codes[:, 1:])
    assert hopper._pages(moved, v) is None
    assert (b.cache.format.k.name in hopper.KEYS and b.cache.format.v.name in hopper.VALUES) == served
