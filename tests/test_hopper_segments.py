"""The Hopper decode kernel where a sequence's keys are some of a cache's, or lie in several caches: on a Hopper GPU, and, of each kind a
few, its sources run on a CPU."""

import pytest
import torch

import hopper_ways
from hopper_on_cpu import AVAILABLE
from quantkv import ops
from quantkv.implementations.hopper import attend as hopper
from quantkv.testing import SampleBatch, check
from segments import DECODE, LENS, LONG, PLAIN, SINKS, SINKS_32, VERIFY, WIDE, Part, Several, calibrated, evened, exact, run, signed

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper_only = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
emulated = pytest.mark.skipif(not AVAILABLE, reason="needs g++")
FORMATS = ["int4", "int8", "int2", "k8v4", "tq4", "tq3", "fp8_token", "none"]


# ---- the sources, run on a CPU


@emulated
@pytest.mark.parametrize(
    "name, queries, shape",
    [
        ("bf16", DECODE, dict(head_size=64, group=3)),
        ("fp16", VERIFY, dict(dtype=torch.float16, softcap=20.0)),
        ("fp16", DECODE, dict(head_size=256)),
        ("bf16", WIDE, dict(window=200, num_kv_heads=1)),
        ("bf16", VERIFY, dict(maps=calibrated(), block_size=64)),
        ("bf16/int4", DECODE, dict(maps=signed())),
        ("int4/bf16", VERIFY, dict()),
    ],
    ids=["group of 3", "fp16, softcap", "head size 256", "wide, window", "calibrated", "signs", "16-bit values"],
)
def test_16_bit_rows_on_a_cpu(name, queries, shape, on_cpu):
    """With stretches of few tiles: what is held of a sequence is read back in the order in which it was written."""
    maps = shape.pop("maps", None)
    on_cpu(Several.make([Part(name, maps=maps)], queries, LENS, **shape), 1, max_tiles=3)
    shape["maps"] = maps


@emulated
@pytest.mark.parametrize("size", [2.0**40, 2.0**-40])
def test_16_bit_values_of_any_size(size, on_cpu):
    several = Several.make([Part("bf16")], DECODE, LENS, num_kv_heads=1)
    for call in several:
        call.segments[0].v.codes.nan_to_num_(0).mul_(size)
    on_cpu(several)


RANGES = [(5, 290), (0, 0), (0, 1), (77, 90)]


@emulated
@pytest.mark.parametrize(
    "name, queries, options",
    [("int4", VERIFY, {"window": 200}), ("tq4", DECODE, {}), ("fp8_token", DECODE, {"softcap": 20.0}), ("bf16", VERIFY, SINKS)],
    ids=str,
)
def test_key_range_on_a_cpu(name, queries, options, on_cpu):
    """Tiles that begin or end in between; a sequence of which nothing is left, and one whose pages begin late."""
    on_cpu(Several.make([Part(name, None, RANGES)], queries, LENS, **options), max_tiles=5)


@emulated
@pytest.mark.parametrize("name, queries, options", [("int2", DECODE, {}), ("bf16", VERIFY, {"window": 100})], ids=str)
def test_key_start_on_a_cpu(name, queries, options, on_cpu):
    """A sequence whose keys all lie before the first slot, and one that begins in the middle of nothing."""
    on_cpu(Several.make([Part(name, (16, 40, 0, 333))], queries, LENS, **options), max_tiles=5)


@emulated
def test_key_start_and_range_on_a_cpu(on_cpu):
    on_cpu(Several.make([Part("int8", (16, 0, 0, 300), [(20, 100), (3, 200), (0, 9), (100, 499)])], VERIFY, LENS))


@emulated
@pytest.mark.parametrize(
    "name, queries, multiprocessors, shape",
    [
        ("int4", DECODE, 2, SINKS),
        ("int2", VERIFY, 2, dict(window=200)),
        ("int8", DECODE, 64, dict(softcap=20.0)),
        ("tq4", DECODE, 64, dict(dtype=torch.float16)),
        ("k8v4", WIDE, 1, dict(num_kv_heads=1)),
        ("none", DECODE, 2, dict(head_size=64)),
    ],
    ids=str,
)
def test_full_precision_tokens_on_a_cpu(name, queries, multiprocessors, shape, on_cpu):
    """Beside quantized ones, combined by either kernel: lengths without any quantized token, and of one token."""
    dtype = shape.get("dtype", torch.bfloat16)
    on_cpu(Several.make(exact(name, LENS), queries, LENS, **{"dtype": dtype, **shape}), multiprocessors)


@emulated
@pytest.mark.parametrize("multiprocessors", [2, 64])
@pytest.mark.parametrize("maps", [calibrated(), signed(), evened()], ids=["matrix", "hadamard", "evened"])
def test_full_precision_tokens_with_maps_on_a_cpu(maps, multiprocessors, on_cpu):
    """First tokens as well: three segments, the values of two of them unmapped."""
    on_cpu(Several.make(exact("int4", LENS, 30, 16, maps=maps), VERIFY, LENS, **SINKS), multiprocessors)


@emulated
def test_no_key_is_seen_anywhere(on_cpu):
    on_cpu(Several.make([Part("int4", None, [(0, 0)] * 2), Part("none", [9, 40])], (1, 1), (9, 12), **SINKS))


@emulated
def test_the_order_of_the_kernels_is_free(monkeypatch, on_cpu):
    """That of the smaller segment may come last; both outputs are the same to the bit."""
    outs, told, launch = [], [], hopper.Prepared._launch
    monkeypatch.setattr(hopper.Prepared, "_launch", lambda made, call: (told.append(made), launch(made, call)))
    hopper_ways.by_decode(monkeypatch)
    for small_first in (True, False):
        hopper_ways.small_last(monkeypatch, not small_first)
        several = Several.make(exact("int4", LENS), DECODE, LENS)
        configs, (launched, _) = hopper.configurations(several.call), hopper._orders(several.call)
        assert launched == ([1, 0] if small_first else [0, 1])
        assert all(config.several_decodes for config in configs)  # one kernel, whichever order
        on_cpu(several)
        outs.append(several.call.out)
        after = {i: read.arguments.after_decode for i, read in told[-1].reads.items()}
        assert after == {launched[0]: 0, launched[1]: 1}  # the first waits for what came before
    assert torch.equal(*outs)


# ---- on a Hopper GPU


@hopper_only
@pytest.mark.parametrize("queries", [DECODE, VERIFY, WIDE])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp16", torch.bfloat16)])
def test_16_bit_rows(name, dtype, head_size, queries):
    options = dict(window=300, softcap=20.0, **SINKS_32) if queries == VERIFY else {}  # each is another kernel to compile
    run(Several.make([Part(name)], queries, LONG, **PLAIN, dtype=dtype, head_size=head_size, **options))


@hopper_only
@pytest.mark.parametrize("name", ["bf16", "bf16/int4", "int4/bf16"])
def test_16_bit_rows_with_maps(name):
    for maps in (calibrated(8), signed()):
        run(Several.make([Part(name, maps=maps)], VERIFY, LONG, **PLAIN))


@hopper_only
@pytest.mark.parametrize(
    "shape", [dict(block_size=64), dict(num_kv_heads=1), dict(num_kv_heads=2, group=16), dict(num_kv_heads=3, group=6)]
)
def test_16_bit_rows_of_other_shapes(shape):
    run(Several.make([Part("bf16")], DECODE, LONG, **{**PLAIN, **shape}))
    run(Several.make([Part("bf16")], VERIFY, (9000, 33, 1, 1300), **{**PLAIN, **shape}))


@hopper_only
@pytest.mark.parametrize("queries", [DECODE, VERIFY])
@pytest.mark.parametrize("name", FORMATS)
def test_key_range(name, queries):
    ranges = [(5, 690), (0, 0), (0, 1), (77, 1200)]
    run(Several.make([Part(name, None, ranges)], queries, LONG, **PLAIN))
    run(Several.make([Part(name, None, ranges)], queries, LONG, **PLAIN, window=600, **SINKS_32))


@hopper_only
@pytest.mark.parametrize("name", FORMATS)
def test_key_start(name):
    run(Several.make([Part(name, (16, 40, 0, 333))], VERIFY, LONG, **PLAIN))
    run(Several.make([Part(name, (16, 0, 0, 300), [(20, 100), (3, 200), (0, 9), (100, 1299)])], DECODE, LONG, **PLAIN, window=1100))


@hopper_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_full_precision_tokens(name, dtype):
    run(Several.make(exact(name, LONG), DECODE, LONG, **PLAIN, dtype=dtype))
    run(Several.make(exact(name, LONG, 40, 16), DECODE, LONG, **PLAIN, dtype=dtype, **SINKS_32))


@hopper_only
@pytest.mark.parametrize("queries", [VERIFY, WIDE])
@pytest.mark.parametrize(
    "name, head_size",
    [("int4", 64), ("int4", 128), ("int4", 256), ("int8", 128), ("int2", 128), ("k8v4", 128), ("none", 64), ("none", 128), ("none", 256)],
)
def test_full_precision_tokens_and_several_queries(name, head_size, queries):
    options = dict(softcap=30.0, **SINKS_32) if queries == VERIFY else dict(window=500)
    run(Several.make(exact(name, LONG), queries, LONG, **PLAIN, head_size=head_size, **options))


@hopper_only
@pytest.mark.parametrize("lens", [LONG, (30000,)], ids=["four", "one"])
@pytest.mark.parametrize("name", ["int4", "int8", "tq4"])
def test_full_precision_tokens_with_maps(name, lens):
    for maps in (calibrated(8, buckets=30), signed(), evened(heads=8, buckets=30)):
        for queries in ((1,) * len(lens), (2, 4, 1, 3)[: len(lens)]):
            run(Several.make(exact(name, lens, 24, 16, maps=maps), queries, lens, **PLAIN, **SINKS_32))


@hopper_only
@pytest.mark.parametrize("small_first", [True, False, None])
@pytest.mark.parametrize("lens", [(1,), (5, 20), (0, 1, 15, 16, 17), (24, 25, 40, 41), (9000,), tuple(range(0, 600, 9))], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_lengths(lens, kv_heads, small_first, monkeypatch):
    """Sequences that are shorter than what is exact, or have no token at all. None: by the combine kernel."""
    hopper_ways.small_last(monkeypatch, small_first is False)
    hopper_ways.by_decode(monkeypatch, small_first is not None)
    queries = tuple(min(n, 1) for n in lens)
    run(Several.make(exact("int4", lens), queries, lens, num_kv_heads=kv_heads, device="cuda"))


@hopper_only
@pytest.mark.parametrize("small_first", [True, False, None])
def test_kernels_that_overlap_wait_for_each_other(small_first, monkeypatch):
    """Calls one after the other over the same scratch, of which each must find what the one before it left in q."""
    hopper_ways.small_last(monkeypatch, small_first is False)
    hopper_ways.by_decode(monkeypatch, small_first is not None)
    lens = (30000, 700)
    several = Several.make(exact("int4", lens), (1, 1), lens, **PLAIN)
    ops.attend(several.call, "hopper")
    expected = several.call.out.clone()
    chained = several.call.with_tensors(several.call.q.clone(), several.call.out, None, several.call.segments)
    for _ in range(200):
        chained.q.zero_()
        chained.q.copy_(several.call.q)
        chained.out.fill_(float("nan"))
        ops.attend(chained, "hopper")
        assert torch.equal(chained.out, expected)


@hopper_only
def test_a_captured_graph_follows_lengths_starts_and_ranges():
    """Of any length that the block tables have room for, by what the device holds when the graph runs."""
    first = Several.make(exact("int4", LONG), DECODE, LONG, **PLAIN)
    ops.attend(first.call, "hopper")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.attend(first.call, "hopper")
    for lens, split in (((5, 20, 1, 900), (5, 0, 0, 900)), ((690, 1, 1, 1270), (680, 1, 0, 1264)), (LONG, (672, 0, 0, 1264))):
        for call in first:  # what is between the segments nobody reads; what both have would count twice
            quantized, latest = call.segments
            call.batch.seq_lens.copy_(torch.tensor(lens))
            quantized.key_range[:, 1] = torch.minimum(torch.tensor(split), latest.key_start.cpu()).to(call.q.device)
        graph.replay()
        first.check()


@hopper_only
def test_auto_takes_several_segments_and_16_bits():
    from quantkv import implementations

    several = Several.make(exact("int4", LONG), DECODE, LONG, **PLAIN)
    assert implementations.resolve(several.call) == ("hopper", {})
    b = SampleBatch.make("bf16", DECODE, LONG, head_size=128, dtype=torch.bfloat16, device="cuda")
    assert implementations.resolve(b.call(max_query_len=1)) == ("hopper", {})
    check(b, b.attend(max_query_len=1))


# ---- the rule that says when it runs


def test_what_the_rule_refuses():
    lens = (20, 300)

    def reason(parts, **shape):
        return hopper._unsupported(Several.make(parts, (1, 1), lens, **shape).call)

    assert reason(exact("int4", lens)) is None and reason(exact("int4", lens, 24, 16)) is None
    assert reason([Part("int4", None, [(0, 0)] * 2)] * 5) == "5 segments: at most 4"
    assert "key means" in reason([Part("int4", [0, 0], maps=signed())])
    assert reason([Part("int4", None, [(0, 9)] * 2, maps=signed())]) is None
    assert "bfloat16" in reason([Part("bf16")], dtype=torch.float32)
    assert "need queries of it" in reason([Part("bf16")], dtype=torch.float16)
    assert reason([Part("fp16")], dtype=torch.float16) is None and reason([Part("fp16")]) is None
    assert "fp32" in reason([Part("fp32")])
    several = Several.make(exact("int4", lens), (1, 1), lens).call
    for i, name in ((0, "key_range"), (1, "key_start")):
        segments = list(several.segments)
        segments[i] = segments[i]._replace(**{name: getattr(segments[i], name).long()})
        assert name in hopper._unsupported(several.with_tensors(several.q, several.out, None, tuple(segments)))


def test_the_small_segment_takes_few_blocks(monkeypatch):
    """And what may follow waits for nobody: the last to be launched combines, or the one with the values' map."""
    lens = (2048,) * 2
    several = Several.make(exact("int4", lens), (1, 1), lens, num_kv_heads=8)
    hopper_ways.by_decode(monkeypatch)
    plan = hopper.Plan(several.call, 132)
    quantized, latest = plan.parts.values()
    assert plan.launched == [1, 0] and plan.combined == [0, 1]
    assert latest.decode_grid[0] <= 16 and quantized.decode_grid[0] * quantized.config.warps <= plan.main.resident
    assert latest.config.several_decodes and quantized.config.several_decodes
    assert (quantized.config.segments, quantized.config.mapped_segments, latest.config.segments) == (2, 1, 1)
    assert latest.scratch_begin == quantized.scratch_bytes and plan.scratch_bytes == quantized.scratch_bytes + latest.scratch_bytes
