"""A few 16-bit rows beside quantized ones, which the Hopper combine kernel attends to: on a Hopper GPU, and its sources run on a CPU."""

import pytest
import torch

import hopper_ways
from hopper_on_cpu import AVAILABLE
from quantkv import LayerMaps, PagedCache, get_format, ops
from quantkv.implementations.hopper import attend as hopper
from segments import DECODE, LENS, LONG, PLAIN, SINKS, VERIFY, WIDE, Part, Several, calibrated, exact, run, signed

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper_only = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
emulated = pytest.mark.skipif(not AVAILABLE, reason="needs g++")


@emulated
@pytest.mark.parametrize(
    "name, latest, queries, multiprocessors, shape",
    [
        ("int4", 100, VERIFY, 2, dict(softcap=20.0)),
        ("int4", 100, DECODE, 64, SINKS),
        ("int2", 24, DECODE, 64, dict(head_size=64, dtype=torch.float16)),
        ("int8", 100, WIDE, 2, dict(window=60, group=3, num_kv_heads=1)),
        ("int4", 24, DECODE, 2, dict(head_size=256)),
        ("int4", 60, VERIFY, 64, dict(block_size=64, maps=calibrated())),
        ("int4", 60, WIDE, 2, dict(block_size=32, maps=calibrated(1), num_kv_heads=1)),
        ("int4", 24, VERIFY, 2, dict(maps=signed(), window=30)),
    ],
    ids=str,
)
def test_a_few_exact_rows_have_no_kernel(name, latest, queries, multiprocessors, shape, on_cpu):
    """The combine kernels attend to them: of more tiles than they have warps, of packed query rows that are no multiple of theirs."""
    parts = exact(name, LENS, latest, block_size=shape.get("block_size", 16), maps=shape.get("maps"))
    several = Several.make(parts, queries, LENS, **{key: value for key, value in shape.items() if key != "maps"})
    assert hopper._exact(several.call) == 1 and len(hopper.configurations(several.call)) == 1
    on_cpu(several, multiprocessors)


@emulated
@pytest.mark.parametrize("multiprocessors", [2, 64])
def test_exact_rows_that_come_first_and_have_a_range(multiprocessors, on_cpu):
    """One sequence has none of them, another has no quantized token."""
    starts, ranges = (200, 0, 0, 400), [(230, 300), (0, 0), (0, 1), (400, 493)]
    parts = [Part("bf16", starts, ranges), Part("int4", None, [(0, 230), (0, 33), (0, 0), (0, 400)])]
    several = Several.make(parts, VERIFY, LENS, **SINKS)
    assert hopper._exact(several.call) == 0
    on_cpu(several, multiprocessors)


@hopper_only
@pytest.mark.parametrize("name", ["int4", "int2", "fp8_token"])
@pytest.mark.parametrize("latest", [24, 100])
@pytest.mark.parametrize("queries", [DECODE, VERIFY, WIDE])
def test_either_kernel_attends_to_full_precision_tokens(queries, latest, name, monkeypatch):
    """By the combine kernel, or a kernel of their own."""
    for by_combine in (True, False):
        hopper_ways.by_decode(monkeypatch, not by_combine)
        several = Several.make(exact(name, LONG, latest), queries, LONG, **PLAIN)
        assert len(hopper.configurations(several.call)) == 2 - by_combine
        run(several)
    run(Several.make(exact(name, (9000,), latest), queries[1:2], (9000,), **PLAIN))


@hopper_only
@pytest.mark.parametrize("by_combine", [True, False])
def test_rows_that_were_just_written_are_read(by_combine, monkeypatch):
    """Steps one after the other, each of which writes the latest row anew with a kernel that the next one overlaps."""
    hopper_ways.by_decode(monkeypatch, not by_combine)
    lens = (30000, 700)
    call = Several.make(exact("int4", lens), (1, 1), lens, **PLAIN).call
    latest = call.segments[1]
    cache = PagedCache.wrap(latest.k.base, get_format("none").cache_spec(8, 128, block_size=16))
    last = call.batch.seq_lens - 1 - latest.key_start
    slots = latest.block_table.gather(1, (last // 16)[:, None].long())[:, 0].long() * 16 + last % 16
    rows = [torch.randn(2, 2, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(7)]

    def step(i, implementation, between):
        cache.write(*rows[i], slots, implementation=implementation)
        between()
        ops.attend(call, "hopper")
        return call.out.clone()

    expected = [step(i, "reference", torch.cuda.synchronize) for i in range(7)]
    found = [step(i % 7, "hopper", lambda: None) for i in range(210)]
    assert all(torch.equal(out, expected[i % 7]) for i, out in enumerate(found))


def test_which_segment_has_no_kernel():
    """Of two, one of a few rows of the queries' type as given, from some position on."""

    def full_precision_of(parts, lens=(20, 300), **shape):
        return hopper._exact(Several.make(parts, (1, 1), lens, **shape).call)

    lens = (20, 300)
    assert full_precision_of(exact("int4", lens)) == 1 and full_precision_of(exact("int4", lens)[::-1]) == 0
    assert full_precision_of(exact("int4", lens, 120)) == 1 and full_precision_of(exact("int4", lens, 130)) is None, "more than 128 rows"
    assert full_precision_of(exact("int4", lens, 24, 16)) is None, "three segments"
    assert full_precision_of(exact("int4", lens), dtype=torch.float16) == 1
    assert full_precision_of([Part("int4", None, [(0, 0), (0, 288)]), Part("fp16", [0, 288])]) is None, "of another type than the queries"
    assert full_precision_of([Part("int4", None, [(0, 0), (0, 288)]), Part("bf16", [0, 288], maps=LayerMaps(signed().v, None))]) is None, (
        "mapped"
    )
    assert full_precision_of([Part("int4", [16, 288]), Part("bf16", None, [(0, 16), (0, 288)])]) is None, "no key_start"
    wide = dict(head_size=256, num_kv_heads=1)
    assert full_precision_of(exact("int4", lens, maps=signed(256)), **wide) == 1
    assert full_precision_of(exact("int4", lens, maps=calibrated(1, 256)), **wide) is None, "shared memory"
