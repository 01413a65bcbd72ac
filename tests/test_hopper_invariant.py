"""Hopper's kernels where a sequence is cut by itself (`batch_invariant`), where windows are chunks, and where a layer has a scale: on a
Hopper GPU; and, anywhere, their sources run on a CPU."""

import dataclasses
import itertools

import pytest
import torch

import hopper_ways
from hopper_on_cpu import AVAILABLE, Device
from quantkv import PagedCache
from quantkv.calls import AttendCall
from quantkv.calls import Batch as Lengths
from quantkv.implementations import batches
from quantkv.implementations.hopper import attend as hopper
from quantkv.implementations.hopper.decode import combine, warps, wgmma
from quantkv.implementations.hopper.host import launch
from quantkv.testing import POISON, SampleBatch, check
from segments import Part, Several, calibrated, exact, run, signed

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper_only = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
emulated = pytest.mark.skipif(not AVAILABLE, reason="needs g++")


@pytest.fixture(autouse=True)
def warpgroups_of_few_packed_rows(monkeypatch):
    """Tested from fewer packed query rows on than they are chosen from."""
    monkeypatch.setattr(wgmma, "MANY_PACKED_ROWS", 9)


VERIFY = (2, 4, 1, 3)


def part_of(call, members, max_query_len=None, max_seq_len=None, wider=0):
    """The call of some of the sequences, in this order. wider: pages that their tables have room for besides."""
    starts = call.batch.cu_seqlens_q.tolist()
    tokens = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in members])
    counts = torch.tensor([0, *(starts[s + 1] - starts[s] for s in members)])
    index = torch.tensor(members, device=call.q.device)

    def of(t):
        return None if t is None else t[index].contiguous()

    segments = tuple(
        s._replace(
            block_table=torch.nn.functional.pad(of(s.block_table), (0, wider), value=-(2**30)),
            key_start=of(s.key_start),
            key_range=of(s.key_range),
        )
        for s in call.segments
    )
    most = int(counts.max()) if max_query_len is None else max_query_len
    batch = Lengths(counts.cumsum(0).int().to(call.q.device), of(call.batch.seq_lens), most, max_seq_len)
    q = call.q[tokens.to(call.q.device)]
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return AttendCall(q, segments, batch, call.scale, call.options, None, lse), tokens


def assert_invariant(call, serve, monkeypatch):
    """The bits of each sequence: alone, in another order, among other sequences, with other bounds and a wider table; combined by warps
    and by blocks, and unsplit."""
    monkeypatch.setattr(combine, "by_blocks", lambda *_: False)
    hopper_ways.split(monkeypatch)
    serve(call)
    monkeypatch.setattr(combine, "by_blocks", lambda *_: True)
    hopper_ways.split(monkeypatch, False)
    count = call.batch.num_seqs
    lens = call.batch.seq_lens.tolist()
    longest = max(lens)
    others = [([s], None, lens[s] + 5, 0) for s in range(count)]
    others += [(list(range(count))[::-1], 8, None, 40), ([0, count - 1, 1, count - 1], None, 4 * longest, 7)]
    for members, most, longest, wider in others:
        part, tokens = part_of(call, members, most, longest, wider)
        serve(part)
        assert torch.equal(part.out.cpu(), call.out.cpu()[tokens]), members
        assert torch.equal(part.lse.cpu(), call.lse.cpu()[tokens]), members


# ---- the sources, run on a CPU


CASES = [
    ("int4", dict(group=4), {}),
    ("tq4", dict(group=3, maps=calibrated(1, 64)), dict(window=300, softcap=30.0)),  # a matrix, a bias, key means
    # consumer warpgroups, of 16 packed_rows: two groups of them for two queries
    ("int8/levels4", dict(group=12, block_size=8), dict(window=90)),
    ("fp8", dict(group=8, head_size=96), dict(window=300, chunk_lookback=1)),
]


@emulated
@pytest.mark.parametrize("name, shape, options", CASES, ids=[case[0] for case in CASES])
def test_a_sequence_is_cut_by_itself(name, shape, options, monkeypatch, tmp_path):
    b = SampleBatch.make(name, VERIFY, (300, 33, 1, 650), **{"head_size": 64, "num_kv_heads": 1, "dtype": torch.bfloat16, **shape})
    call = b.call(max_query_len=4, batch_invariant=True, **options)
    device = Device(monkeypatch, tmp_path, 11)
    busy = itertools.cycle((11, 1, 15, 1))
    monkeypatch.setattr(launch, "multiprocessors", lambda index: next(busy))  # a worker has one partial, or several of some sequences
    assert_invariant(call, device.serve, monkeypatch)
    alike = {
        dataclasses.replace(config, unsplit=False, partial_capacity=0, packed_rows=8, warps=8)
        for config in device.compiled
        if config.worker_warps == 1
    }
    assert len(alike) == (shape["group"] <= 8)
    check(b, (call.out, call.lse), **options)


@emulated
def test_warpgroups_with_several_partials_of_a_sequence(monkeypatch, tmp_path):
    b = SampleBatch.make("int4", (1, 1), (1500, 700), head_size=64, num_kv_heads=1, group=12, dtype=torch.bfloat16)
    call = b.call(max_query_len=1, batch_invariant=True)
    main = hopper.Plan(call, 1).main
    assert main.resident < main.partial_slots == 6 and main.config.worker_warps == 4
    Device(monkeypatch, tmp_path, 1).serve(call)
    check(b, (call.out, call.lse))


@emulated
@pytest.mark.parametrize("whole, window", [(False, 0), (True, 0), (True, 850)])
def test_a_prepared_call_has_room_for_the_longest_that_it_serves(whole, window, monkeypatch, tmp_path):
    """Calls of one shape may have other bounds of lengths, and what was prepared for one of them serves all."""
    monkeypatch.setattr(warps, "PARTIAL_LEAST", 2), monkeypatch.setattr(warps, "PARTIAL_MOST", 2)
    hopper_ways.split(monkeypatch, not whole)
    b = SampleBatch.make("int4", (1,), (1000,), head_size=64, num_kv_heads=1, group=4, dtype=torch.bfloat16)
    long = b.call(max_query_len=1, max_seq_len=1000, batch_invariant=True, window=window)
    short = b.call(max_query_len=1, batch_invariant=True, window=window)
    object.__setattr__(short, "batch", dataclasses.replace(short.batch, max_seq_len=600))
    assert hopper._shape(short) == hopper._shape(long)
    Device(monkeypatch, tmp_path, 4)
    prepared = hopper.prepare(short)
    assert (prepared.plan.main.unsplit is not None) == whole
    prepared(long)
    check(b, (long.out, long.lse), window=window)


@emulated
@pytest.mark.parametrize("others", [2, 4])
def test_empty_packed_rows_decide_nothing(others, monkeypatch, tmp_path):
    """The first tile has one key that the only query sees, and none that queries behind it would: alone, no packed query row stands for
    these."""
    b = SampleBatch.make("int4", (1, others), (395, 100), head_size=64, num_kv_heads=1, group=4, dtype=torch.bfloat16)
    b.q.mul_(0.25)  # no score is so much larger than the first that weights begin anew
    call = b.call(max_query_len=others, batch_invariant=True, window=300)
    device = Device(monkeypatch, tmp_path, 2)
    alone, _ = part_of(call, [0], 1)
    device.serve(call), device.serve(alone)
    assert [config.packed_rows for config in device.compiled] == [4 * others, 4]
    assert torch.equal(alone.out[0], call.out[0]) and torch.equal(alone.lse[0], call.lse[0])


@emulated
def test_segments_are_cut_by_themselves(monkeypatch, tmp_path):
    """One of which few rows would be read by the combine kernel, if the table were not wider than that."""
    lens = (90, 33, 1, 250)
    several = Several.make(exact("int4", lens, 30), (1, 1, 1, 1), lens, num_kv_heads=1, head_size=64, batch_invariant=True)
    device = Device(monkeypatch, tmp_path, 9)
    assert_invariant(several.call, device.serve, monkeypatch)
    several.check()


@emulated
@pytest.mark.parametrize("lens", [(1500, 470, 20), (1100, 1)], ids=str)
def test_as_many_partials_on_both_sides(lens, monkeypatch, tmp_path):
    """Also of sequences that have enough for all warps, and of those that would have too many tiles of one accumulator: where the kernel
    made more partials than there is room for, some would be lost."""
    for name, value in (("PARTIAL_LEAST", 1), ("PARTIAL_MOST", 2), ("PARTIALS_ENOUGH", 48), ("MAX_TILES", 3)):
        monkeypatch.setattr(warps, name, value)
    device = Device(monkeypatch, tmp_path, 3, max_tiles=3)
    b = SampleBatch.make("int4", (1,) * len(lens), lens, head_size=64, num_kv_heads=2, group=2, dtype=torch.bfloat16)
    call = b.call(max_query_len=1, max_seq_len=max(lens), batch_invariant=True)
    assert hopper.Plan(call, 3).main.partial_slots == {1500: 48, 1100: 24}[lens[0]]
    device.serve(call)
    check(b, (call.out, call.lse))


@emulated
def test_partials_fit_their_room_and_lengths_may_be_beyond_their_bound(monkeypatch, tmp_path):
    """Every length from few tiles to many: partials lie where they have room (`Device` sees to that). What is longer than its bound gets a
    wrong answer, in its own place."""
    device = Device(monkeypatch, tmp_path, 2)
    lens = (*range(1, 1300, 161), 1040, 1024, 512, 513)
    b = SampleBatch.make("int2", (1,) * len(lens), lens, num_kv_heads=1, group=1, dtype=torch.bfloat16)
    call = b.call(max_query_len=1, max_seq_len=max(lens), batch_invariant=True)
    device.serve(call)
    check(b, (call.out, call.lse))
    real = b.seq_lens.clone()
    b.seq_lens.clamp_(max=500)
    broken = b.call(max_query_len=1, max_seq_len=600, batch_invariant=True)
    b.seq_lens.copy_(real)  # as in a graph that was captured
    device.serve(broken)
    kept = real <= 512
    assert torch.equal(broken.out[kept], call.out[kept])


def test_room_for_partials(monkeypatch):
    """As many as `Sequences.partials` makes, of any length up to the one that there is room for."""
    b = SampleBatch.make("int4", (1,), (20,), head_size=128, num_kv_heads=1, dtype=torch.bfloat16)
    tiles = [1, 9, 19, 20, 59, 60, 119, 120, 528, 529, 1056, 1057, 33792, 33793, 1572864, 1572865]
    expected = [1, 1, 1, 2, 5, 6, 6, 12, 12, 24, 24, 48, 768, 1536, 1536, 3072]
    eight = [1, 19, 20, 79, 80, 159, 160, 704, 705, 45056, 45057, 1048576, 1048577]  # warps
    of_eight = [1, 1, 2, 7, 8, 8, 16, 16, 32, 1024, 1024, 1024, 2048]
    kv_tiles = [1, 5, 6, 17, 18, 35, 36, 528, 529, 8448, 8449, 98304, 98305]
    of_warpgroups = [1, 1, 2, 5, 6, 6, 12, 12, 24, 192, 384, 384, 768]
    monkeypatch.setattr(wgmma, "MANY_PACKED_ROWS", 17)
    for group, lines, found in ((4, tiles, expected), (12, eight, of_eight), (17, kv_tiles, of_warpgroups)):
        wide = dataclasses.replace(b, q=b.q[:, :1].expand(1, group, 128).contiguous())
        (config,) = hopper.configurations(wide.call(max_query_len=1, batch_invariant=True))
        assert [config.partials(16 * config.worker_warps * n) for n in lines] == found
        assert [config.partials(16 * config.worker_warps * n - 15) for n in lines] == found
        room = [config.partials(16 * config.worker_warps * n) for n in range(1, 3000)]
        assert room == sorted(room)  # no shorter sequence has more
    assert [dataclasses.replace(config, kv_heads=8).partials(64 * n) for n in (1056, 1057, 4000)] == [24, 48, 48]


CHUNKS = [
    ("int4", VERIFY, dict(window=150, chunk_lookback=2, softcap=20.0)),
    ("tq3", (8, 8, 1, 8), dict(window=99, chunk_lookback=0)),  # consumer warpgroups
]


@emulated
@pytest.mark.parametrize("name, queries, options", CHUNKS, ids=[case[0] for case in CHUNKS])
def test_chunks(name, queries, options, monkeypatch, tmp_path):
    b = SampleBatch.make(name, queries, (300, 33, 1, 129), head_size=128, num_kv_heads=2, group=4, dtype=torch.bfloat16)
    call = b.call(max_query_len=max(queries), **options)
    Device(monkeypatch, tmp_path, 2, 4).serve(call)
    check(b, (call.out, call.lse), **options)


@emulated
@pytest.mark.parametrize("by_combine", [True, False])
def test_chunks_go_by_position(by_combine, monkeypatch, on_cpu):
    """Where slots do not begin at position 0: in a decode kernel, and where the combine kernel attends."""
    hopper_ways.by_decode(monkeypatch, not by_combine)
    lens = (150, 33, 1, 250)
    several = Several.make(exact("int4", lens, 40), VERIFY, lens, window=66, chunk_lookback=1)
    assert (hopper._exact(several.call) is not None) == by_combine
    on_cpu(several)


@emulated
def test_chunks_of_ranges(on_cpu):
    lens = (150, 33, 1, 250)
    on_cpu(Several.make([Part("int4", None, [(5, 140), (0, 0), (0, 1), (77, 200)])], VERIFY, lens, window=50, chunk_lookback=0))


def scaled(b, k_scale, v_scale):
    """The same rows in a cache with scales of the layer."""
    c = b.cache
    cache = PagedCache(c.spec, c.buffer.shape[0], k_scale=k_scale, v_scale=v_scale, maps=c.maps)
    cache.buffer.fill_(POISON)
    cache.write(b.key.cpu(), b.value.cpu(), b.slots.cpu(), b.positions.cpu(), implementation="reference")
    if b.q.device.type == "cpu":
        return dataclasses.replace(b, cache=cache)
    on_device = PagedCache(c.spec, c.buffer.shape[0], b.q.device, k_scale=k_scale, v_scale=v_scale, maps=c.maps)
    on_device.buffer.copy_(cache.buffer)
    return dataclasses.replace(b, cache=on_device)


SCALED = [
    ("fp8_e5m2", VERIFY, dict(head_size=80), 3.1, 0.02),
    ("fp8", (8, 8, 1, 8), dict(head_size=64), 0.37, 1.0),  # consumer warpgroups
    ("fp8/int4", VERIFY, dict(head_size=128), 2.0, 0.41),  # values with a map
    ("int4", VERIFY, dict(head_size=128, maps=calibrated()), 0.3, 2.9),  # keys with a mean, which is not scaled
]


@emulated
@pytest.mark.parametrize(
    "name, queries, shape, k_scale, v_scale", SCALED, ids=[f"{name}-{len(queries)}-{k}" for name, queries, _, k, _ in SCALED]
)
def test_scales_of_a_layer(name, queries, shape, k_scale, v_scale, monkeypatch, tmp_path):
    b = scaled(SampleBatch.make(name, queries, (140, 33, 8, 200), num_kv_heads=2, group=4, dtype=torch.bfloat16, **shape), k_scale, v_scale)
    call = b.call(max_query_len=max(queries), window=150)
    Device(monkeypatch, tmp_path, 1, 4).serve(call)
    check(b, (call.out, call.lse), window=150)


@emulated
def test_small_values_keep_their_bits(monkeypatch, tmp_path):
    """Outputs of rows without scales may be of any size: each has its own factor."""
    b = SampleBatch.make("fp8_e5m2", (1, 1), (400, 90), head_size=64, dtype=torch.bfloat16)
    b.cache.write(b.key, b.value * 1e-3, b.slots, b.positions, implementation="reference")
    call = b.call(max_query_len=1)
    Device(monkeypatch, tmp_path, 1).serve(call)
    check(b, (call.out, call.lse))


@emulated
def test_a_prepared_call_takes_the_scales_of_each_layer(monkeypatch, tmp_path):
    layers = [
        scaled(SampleBatch.make("fp8", (1, 1), (40, 90), head_size=64, dtype=torch.bfloat16), *scales)
        for scales in ((0.5, 2.0), (1.5, 3.0))
    ]
    Device(monkeypatch, tmp_path, 1)
    calls = [b.call(max_query_len=1) for b in layers]
    serve = hopper.prepare(calls[0])
    for b, call in zip(layers, calls):
        serve(call)
        check(b, (call.out, call.lse))


# ---- who serves it


def test_what_is_served():
    b = SampleBatch.make("fp8", (1, 1), (20, 30), head_size=128, num_kv_heads=1, group=4, dtype=torch.bfloat16)
    assert hopper._unsupported(b.call(max_query_len=1)) is None
    assert hopper._unsupported(b.call(max_query_len=8, batch_invariant=True)) is None
    assert "1 to 8 queries" in hopper._unsupported(b.call(max_query_len=9, batch_invariant=True))


INVARIANT = {"batch_invariant": True}


@pytest.mark.parametrize(
    "name, head_size, group, options, packed_rows",
    [
        ("int4", 128, 4, INVARIANT, (4, 4, 8, 16)),
        ("tq4", 256, 4, INVARIANT, (4, 4, 8, 8)),
        ("int4", 128, 5, INVARIANT, (8, 8, 16, 16)),
        ("int4", 128, 16, INVARIANT, (16, 16, 16, 16)),
        ("int4", 128, 4, {}, None),
    ],
)
def test_the_kernel_does_not_depend_on_the_batch(name, head_size, group, options, packed_rows):
    """Neither on how much there may be to read nor on how many queries others have, which decide about plain calls; but for the packed
    query rows that a warp serves together, where more of them come to the same bits."""
    b = SampleBatch.make(name, (1,), (20,), head_size=head_size, num_kv_heads=8, group=group, dtype=torch.bfloat16)
    call = b.call(max_query_len=1, **options)
    more = [part_of(call, [0] * 64, most, None, wider)[0] for most, wider in ((1, 1 << 12), (2, 0), (8, 0))]
    config, *others = (hopper.configurations(each)[0] for each in (call, *more))
    if packed_rows is None:
        assert config not in others
    else:
        assert tuple(each.packed_rows for each in (config, *others)) == packed_rows
        assert all(dataclasses.replace(each, packed_rows=config.packed_rows, warps=config.warps) == config for each in others)


def test_prompts_beside_decodes_are_runs_of_their_own():
    """So that who serves a sequence does not depend on the others; dense, which has no fixed cut, takes none of them."""
    b = SampleBatch.make("int8", (1, 40, 1, 200, 8), (30, 60, 8, 200, 9))
    call = b.call(lengths=((1, 30), (40, 60), (1, 8), (200, 200), (8, 9)), batch_invariant=True)
    assert [run.tokens for run in batches.runs_of(call)] == [slice(0, 1), slice(1, 41), slice(41, 42), slice(42, 242), slice(242, 250)]
    two = b.call(lengths=((1, 30), (40, 60), (1, 8), (200, 200), (8, 9)))
    assert len(batches.runs_of(two)) == 5


# ---- on a Hopper GPU

LENS = (700, 33, 1, 5000, 9000, 129)


@hopper_only
@pytest.mark.parametrize("queries", [(1,) * 6, (2, 4, 1, 3, 8, 1)], ids=["one", "few"])
@pytest.mark.parametrize(
    "name, shape",
    [
        ("int4", dict(group=4)),
        ("int4", dict(group=16, head_size=64)),
        ("tq4", dict(group=5, maps=calibrated(2))),
        ("int2", dict(group=8, head_size=256)),
        ("none", dict(group=2)),
        ("levels4", dict(group=12, maps=signed())),
    ],
    ids=["warps", "warpgroups", "matrix", "wide", "rows", "signs"],
)
def test_bits(name, shape, queries, monkeypatch):
    b = SampleBatch.make(name, queries, LENS, **{"head_size": 128, "num_kv_heads": 2, "dtype": torch.bfloat16, "device": "cuda", **shape})
    for options in ({}, {"window": 600}, {"window": 1000, "chunk_lookback": 1, "softcap": 20.0}):
        call = b.call(max_query_len=max(queries), batch_invariant=True, **options)
        assert_invariant(call, lambda call: hopper.prepare(call)(call), monkeypatch)
        check(b, (call.out, call.lse), **options)


@hopper_only
def test_bits_of_segments(monkeypatch):
    several = Several.make(exact("int4", LENS, 30, 16), (1,) * 6, LENS, num_kv_heads=2, device="cuda", batch_invariant=True)
    assert_invariant(several.call, lambda call: hopper.prepare(call)(call), monkeypatch)
    several.check()


@hopper_only
@pytest.mark.parametrize("name", ["int4", "int8", "levels4", "none"])
@pytest.mark.parametrize("queries", [(1, 1, 1, 1), VERIFY, (8, 8, 1, 8)], ids=str)
def test_chunks_on_a_gpu(name, queries):
    b = SampleBatch.make(name, queries, (700, 33, 1, 1300), head_size=128, num_kv_heads=2, group=4, dtype=torch.bfloat16, device="cuda")
    for options in (dict(window=512, chunk_lookback=0), dict(window=150, chunk_lookback=2, softcap=20.0)):
        check(b, b.attend(implementation="hopper", max_query_len=max(queries), **options), **options)


@hopper_only
def test_chunks_of_segments_on_a_gpu():
    lens = (700, 33, 1, 1300)
    run(Several.make(exact("int4", lens, 40), VERIFY, lens, num_kv_heads=2, device="cuda", window=300, chunk_lookback=1))


@hopper_only
@pytest.mark.parametrize(
    "name, queries, shape, k_scale, v_scale", SCALED, ids=[f"{name}-{len(queries)}-{k}" for name, queries, _, k, _ in SCALED]
)
def test_scales_on_a_gpu(name, queries, shape, k_scale, v_scale):
    b = SampleBatch.make(name, queries, (700, 33, 8, 1300), num_kv_heads=2, group=4, dtype=torch.bfloat16, device="cuda", **shape)
    b = scaled(b, k_scale, v_scale)
    for options in ({}, {"window": 150}):
        check(b, b.attend(implementation="hopper", max_query_len=max(queries), **options), **options)
