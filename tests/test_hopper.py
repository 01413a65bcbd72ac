"""The Hopper decode kernel through ops, on a Hopper GPU; and, anywhere, the rule that says when it runs."""

import ctypes
import dataclasses

import pytest
import torch

from quantkv import LayerMaps, LinearMap, implementations
from quantkv.implementations.hopper import attend as hopper
from quantkv.implementations.hopper.host import launch
from quantkv.implementations.hopper.host.records import pages_of
from quantkv.maps import hadamard, named_map
from quantkv.testing import SampleBatch, check
from segments import evened

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper_only = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
HOPPER = {"implementation": "hopper"}
FORMATS = ["int8", "fp8_token", "int4", "int2", "k8v4", "k4v2", "tq_k8v4", "tq4", "tq_k3v4", "tq3", "tq4/int8", "int2/tq4"]
LEVELS = ["levels2", "levels3", "levels4", "levels5", "levels6", "levels8"]
FORMATS += [*LEVELS, "levels4/levels2", "levels3/int8", "int4/levels6"]
FORMATS += ["trellis2", "int8/trellis2", "tq4/trellis2"]
LENS = (700, 33, 1, 1300)  # ragged: several splits, part of a page, one token


def batch(name, queries=(1, 1, 1, 1), **arguments):
    plain = {"head_size": 128, "num_kv_heads": 8, "group": 4, "dtype": torch.bfloat16, "device": "cuda"}
    return SampleBatch.make(name, queries, LENS, **{**plain, **arguments})


def run(b, **options):
    most = int(b.cu_seqlens_q.diff().max())
    result, again = (b.attend(**HOPPER, max_query_len=most, **options) for _ in range(2))
    check(b, result, **options)
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
    run(SampleBatch.make(name, (1, 1, 1, 1), (9000, 33, 1, 1300), **plain))


@hopper_only
@pytest.mark.parametrize("name", ["int4", "int8", "int2", "tq4", "tq3", *LEVELS, "trellis2"])
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
    """Queries that are packed query rows of q, k and v together, as a model computes them."""
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
@pytest.mark.parametrize("name", ["levels4", "levels3", "trellis2", "int8", "int4"])
def test_hadamard_matrices_and_steps(name):
    """Of each head its own, as presets have them."""
    maps = evened(heads=8, buckets=40)
    run(batch(name, maps=maps))
    run(batch(name, (4, 2, 1, 3), maps=maps), window=300, softcap=30.0)


@hopper_only
@pytest.mark.parametrize("heads,buckets", [(8, 40), (1, 3)])  # the second table is shared, and ends before the keys do
@pytest.mark.parametrize("name", ["int4", "int8", "tq4"])
def test_key_means(name, heads, buckets):
    generator = torch.Generator().manual_seed(2)
    offset = torch.randn(buckets, heads, 128, generator=generator)
    for a in (hadamard(128)[None] / 128**0.5, torch.linalg.qr(torch.randn(heads, 128, 128, generator=generator, dtype=torch.float64))[0]):
        maps = LayerMaps(LinearMap(a.float(), torch.linalg.inv(a).float(), offset))
        run(batch(name, maps=maps))
        run(batch(name, (4, 2, 1, 3), maps=maps), window=300, softcap=30.0)


@hopper_only
@pytest.mark.parametrize("queries", [(1, 1, 1, 1), (8, 8, 1, 8)])
@pytest.mark.parametrize("name", [*LEVELS, "levels4/int4"])
def test_keys_that_are_stored_without_their_offset(name, queries):
    """Some are, some are not."""
    generator = torch.Generator().manual_seed(2)
    offset = 0.2 * torch.randn(9, 8, 128, generator=generator)
    for a in (hadamard(128)[None] / 128**0.5, torch.linalg.qr(torch.randn(8, 128, 128, generator=generator, dtype=torch.float64))[0]):
        b = batch(name, queries, maps=LayerMaps(LinearMap(a.float(), torch.linalg.inv(a).float(), offset)))
        assert 0.1 < (b.cache.k.meta[b.slots // 16, b.slots % 16] < 0).float().mean() < 0.9
        run(b)
        run(b, window=300, softcap=30.0)


@hopper_only
@pytest.mark.parametrize("name", ["levels4", "levels8/levels2"])
@pytest.mark.parametrize("head_size", [64, 256])
def test_levels_at_other_head_sizes(name, head_size):
    run(batch(name, head_size=head_size))


@hopper_only
@pytest.mark.parametrize("name", ["levels3", "levels5", "levels6"])
def test_odd_widths_at_256_dimensions(name):
    run(batch(name, (2, 4, 1, 3), head_size=256))


@hopper_only
@pytest.mark.parametrize(
    "make", [lambda t: t.repeat_interleave(3)[::3], lambda t: t[:1].expand(32), torch.Tensor.bfloat16, torch.Tensor.half]
)
def test_sinks_of_any_strides_and_dtype(make):
    run(batch("int4"), sinks=make(torch.linspace(-2, 2, 32, device="cuda")))


@hopper_only
@pytest.mark.parametrize("name", ["five_bits", "five_bits/int4", "tq3/five_bits"])
def test_a_format_outside_the_package(name, five):
    run(batch(name))
    run(batch(name, (2, 4, 1, 3), head_size=256), window=500, softcap=20.0)


@hopper_only
def test_queries_of_any_strides():
    """Each head followed by what is not to be read."""
    b = batch("int4", (2, 4, 1, 3))
    wider = torch.cat([b.q, torch.full_like(b.q, float("nan"))], 2)
    run(dataclasses.replace(b, q=wider[:, :, : b.q.shape[2]]))


@hopper_only
@pytest.mark.parametrize("name", ["int4", "int8", "tq3"])
def test_long_runs_within_a_sequence(name, monkeypatch):
    """More than 1,024 tiles for each warp: its accumulator begins anew, and again, with what it held kept beside it."""
    monkeypatch.setattr(launch, "multiprocessors", lambda index: 1)
    b = SampleBatch.make(name, (1, 2), (500_000, 100), head_size=128, num_kv_heads=1, group=2, dtype=torch.bfloat16, device="cuda")
    call = b.call(max_query_len=2)
    plan = hopper.Plan(call, 1)
    assert plan.main.resident * 1024 * 16 * 2 < 500_000
    hopper.run(call)
    check(b, (call.out, call.lse))


@hopper_only
def test_prepared_launches_serve_every_layer():
    """Other caches, queries, outputs, maps of one kind and sinks; whatever runs in between."""
    signs = 1.0 - 2.0 * (torch.rand(128, generator=torch.Generator().manual_seed(3)) < 0.5)
    a = hadamard(128).float() * signs
    other = LayerMaps(LinearMap(a[None], a.mT[None].contiguous() / 128))
    layers = [batch("int4"), batch("int4", seed=5), batch("int4", maps=other, seed=6)]
    sinks = [torch.linspace(-2, 2, 32, device="cuda") * i for i in range(3)]
    first = layers[0].call(max_query_len=1, sinks=sinks[0])
    serve = hopper.prepare(first)
    for b, sink in zip(layers, sinks):
        call = b.call(max_query_len=1, sinks=sink)
        batch("int8").attend(**HOPPER, max_query_len=1)  # in the same scratch
        layer = first.with_tensors(call.q, call.out, None, call.segments, call.options)
        serve(dataclasses.replace(layer, batch=call.batch))
        alone = b.attend(**HOPPER, max_query_len=1, sinks=sink)
        assert torch.equal(call.out, alone[0])
        check(b, alone, sinks=sink)


@hopper_only
@pytest.mark.parametrize("max_seq_len", [1300, 4096])
def test_a_bound_of_lengths(max_seq_len):
    run(batch("int4"), max_seq_len=max_seq_len)


@hopper_only
@pytest.mark.parametrize("lens", [(0, 1, 15, 16, 17), (9000,), tuple(range(0, 600, 9))], ids=["tiny", "one", "many"])
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_lengths(lens, kv_heads):
    """Runs of warps that begin, lie and end in one sequence, or pass over several, empty ones among them."""
    queries = tuple(min(n, 1) for n in lens)
    b = SampleBatch.make("int4", queries, lens, head_size=128, num_kv_heads=kv_heads, group=4, dtype=torch.bfloat16, device="cuda")
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
    assert implementations.resolve(b.call(max_query_len=1)) == ("hopper", {})
    name, reasons = implementations.resolve(b.call(max_query_len=1, alibi_slopes=torch.ones(32, device="cuda")))
    assert name == "triton" and "alibi_slopes" in reasons["hopper"]


def test_elsewhere_it_is_refused_by_name():
    b = SampleBatch.make("int4", (1,), (20,), device="cpu")
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
        assert LinearMap(torch.linalg.inv(changed.double()).float(), changed).operands.signs is None
        assert LinearMap(forward.repeat(2, 1, 1), inverse.repeat(2, 1, 1)).operands.signs is None
    assert LinearMap(torch.eye(64)[None], torch.eye(64)[None]).operands.signs is None


@pytest.mark.parametrize("name,served", [("int4", True), ("int8/tq3", True), ("fp16", True), ("fp8", True), ("fp32", False)])
def test_pages_of_records_are_recognised(name, served):
    """The rule's view of a cache: its buffer where both sides are records in it, and nothing else."""
    b = SampleBatch.make(name, (1,), (20,), head_size=128)
    k, v = b.cache.k, b.cache.v
    assert pages_of(k, v) is b.cache.buffer
    assert pages_of(k._replace(base=None), v) is None
    single = SampleBatch.make(name, (1,), (20,), head_size=128, num_kv_heads=1).cache
    assert pages_of(single.k, single.v) is single.buffer
    moved = k._replace(codes=k.codes[:, 1:])
    assert pages_of(moved, v) is None
    assert (hopper._unsupported(b.call(max_query_len=1)) is None) == served


def test_what_the_rule_refuses():
    """On any Hopper GPU: by shapes, types and what is asked for."""
    b = SampleBatch.make("int4", (1, 2), (20, 30), head_size=128, dtype=torch.bfloat16)
    assert hopper._unsupported(b.call(max_query_len=2)) is None
    assert "max_query_len=None" in hopper._unsupported(b.call())
    assert "max_query_len=17" in hopper._unsupported(b.call(max_query_len=17))
    assert "key_range" in hopper._unsupported(b.call(max_query_len=2, key_range=torch.tensor([[0, 5], [0, 5]])))
    assert hopper._unsupported(b.call(max_query_len=2, key_start=torch.zeros(2, dtype=torch.int32))) is None
    assert "float32" in hopper._unsupported(dataclasses.replace(b, q=b.q.float()).call(max_query_len=2))
    shifted = torch.zeros(b.q.numel() + 1, dtype=b.q.dtype)[1:].view(b.q.shape)
    assert "16 bytes" in hopper._unsupported(dataclasses.replace(b, q=shifted).call(max_query_len=2))
    wide = dataclasses.replace(b, block_table=b.block_table.long())
    assert "block_table" in hopper._unsupported(wide.call(max_query_len=2))
    sliced = dataclasses.replace(b, block_table=torch.cat([b.block_table, b.block_table], 1)[:, : b.block_table.shape[1]])
    assert hopper._unsupported(sliced.call(max_query_len=2)) is None
    scaled = b.call(max_query_len=2)
    segment = scaled.segments[0]
    other = scaled.with_tensors(scaled.q, scaled.out, None, (segment._replace(k=segment.k._replace(scale=2.0)),))
    assert hopper._unsupported(other) is None  # beside those of each row


def plan_of(lens, max_seq_len=None, name="int4", width=None, **shape):
    """How a batch is cut on 132 multiprocessors. One page stands for all."""
    b = SampleBatch.make(name, (1,), (16,), **{"head_size": 128, "num_kv_heads": 8, "group": 4, "dtype": torch.bfloat16, **shape})
    width = -(-max(lens) // 16) if width is None else width
    table = torch.zeros(1, 1, dtype=torch.int32).expand(len(lens), width).contiguous()
    table[:, 1:] = -1
    starts = torch.arange(len(lens) + 1, dtype=torch.int32)
    q = b.q.expand(len(lens), -1, -1).contiguous()
    few = dataclasses.replace(b, q=q, cu_seqlens_q=starts, seq_lens=torch.ones(len(lens), dtype=torch.int32), block_table=table)
    return hopper.Plan(few.call(max_query_len=1, max_seq_len=max_seq_len), 132)


@pytest.mark.parametrize("name", ["int4", "int8", "tq4"])
@pytest.mark.parametrize("sequences, length", [(392, 8192), (400, 8192), (800, 8192), (98, 32768), (100, 32768), (1, 1 << 20)])
def test_no_more_blocks_than_are_resident(name, sequences, length):
    """However much there is to read: a block more would wait for all others, and double the time."""
    plan = plan_of((length,) * sequences, name=name)
    assert plan.main.decode_grid[0] * plan.main.decode_grid[1] <= 132 * plan.main.config.blocks_per_sm
    assert plan.main.resident == plan.main.decode_grid[0] * plan.main.config.warps


def test_scratch_follows_the_batch_and_not_the_block_table():
    most = 4 << 20
    wide = plan_of((1024,) * 256, width=131072 // 16)
    assert wide.scratch_bytes == (132 * 16 + 256 * 8) * 4 * (2 * 128 + 16)  # a partial of each warp and of each (sequence, kv head)
    assert plan_of((1024,) * 256, 1024, width=131072 // 16).scratch_bytes <= wide.scratch_bytes
    assert plan_of((64,) * 2, 64, width=131072 // 16).scratch_bytes < 300_000
    assert plan_of((64,) * 2, width=131072 // 16).scratch_bytes < most


def test_arguments_are_read_from_the_header():
    """Names and types, once: a pointer takes 8 bytes, and what follows lies where the device looks for it."""
    attend, write = (launch.arguments(name) for name in ("AttendArguments", "WriteArguments"))
    assert len(attend._fields_) == 58 and len(write._fields_) == 20
    for name, offset in (("partials", 88), ("q_token", 96), ("page_stride", 112), ("table_width", 120), ("value_gain", 180)):
        assert getattr(attend, name).offset == offset
    for name, offset, size in (
        ("key_start", 184, 8),
        ("other_partials", 200, 24),
        ("other_resident", 272, 12),
        ("other_workers", 284, 12),
        ("exact_scale", 348, 4),
        ("q_rotated", 384, 8),
        ("after_decode", 416, 4),
    ):
        assert (getattr(attend, name).offset, getattr(attend, name).size) == (offset, size)
    assert ctypes.sizeof(attend) == 416 + 8 and ctypes.sizeof(write) == 8 * 16 + 4 * 4
