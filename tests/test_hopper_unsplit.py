"""The Hopper decode kernel of calls that are unsplit: blocks or clusters have a (sequence, kv head) each, there is one launch, no
partials in memory. On a Hopper GPU, and its sources run on a CPU."""

import dataclasses

import pytest
import torch

import hopper_ways
from hopper_on_cpu import AVAILABLE, Device
from quantkv import ops
from quantkv.implementations.hopper import attend as hopper
from quantkv.implementations.hopper.decode import unsplit, warps
from quantkv.testing import OUTPUT_BUDGET, SampleBatch, check, relative_error

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper_only = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
emulated = pytest.mark.skipif(not AVAILABLE, reason="needs g++")
SINKS = torch.linspace(-2, 2, 8)
RANGES = torch.tensor([[40, 60], [0, 0], [3, 20]], dtype=torch.int32)


def batch(name, queries, lens, **shape):
    return SampleBatch.make(name, queries, lens, **{"head_size": 128, "num_kv_heads": 2, "group": 4, "dtype": torch.bfloat16, **shape})


CASES = {  # format, queries, lengths, multiprocessors, shape, options; then blocks and warps of a (sequence, kv head)
    "a cluster of four": ("int4", (1,), (2000,), 8, {}, {}, 4, 8),
    "of two, the last block with few tiles": ("int4", (1, 1), (210, 170), 9, {}, {"sinks": SINKS}, 2, 8),
    "of two, a table of codes": ("int2", (1,), (180,), 4, {}, {}, 2, 8),
    "of two, three bits": ("tq3", (1,), (190,), 4, {}, {}, 2, 8),
    "of two, two codes a byte": ("tq4", (1,), (170,), 4, {}, {}, 2, 8),
    "fewer tiles than warps": ("int8", (1,), (120,), 2, {}, {}, 1, 8),
    "more blocks than have tiles": ("int4", (1, 1, 0), (130, 5, 0), 13, {"num_kv_heads": 1, "group": 8}, {}, 2, 8),
    "a block each": ("tq3", (1, 1), (90, 100), 4, {}, {}, 1, 8),
    "windows": ("int4", (1,) * 5, (300, 17, 500, 33, 1), 3, {"head_size": 64}, {"window": 50, "sinks": SINKS}, 1, 2),
    "a warp each": ("int2", (1, 0, 1, 1, 1, 1, 1), (60, 0, 100, 33, 1, 16, 48), 2, {}, {"softcap": 20.0}, 1, 1),
    "chunks": ("fp8_token", (1, 2, 1), (300, 70, 130), 6, {}, {"window": 64, "chunk_lookback": 1}, 1, 8),
    "several groups of packed rows": ("int4", (4, 2), (100, 120), 8, {"head_size": 256, "group": 3}, {}, 1, 8),
    "16-bit rows": ("bf16", (2, 1), (200, 210), 8, {"num_kv_heads": 1, "group": 3}, {}, 2, 8),
    "queries that see no key": ("int4", (1, 2, 1), (170, 200, 20), 12, {}, {"key_range": RANGES}, 2, 8),
    "smaller Hadamard matrices": ("int4", (1,), (460,), 8, {"head_size": 96, "head_size_v": 176}, {}, 4, 8),
    "other sizes": ("int8", (1,), (500,), 8, {"head_size": 80, "head_size_v": 96, "block_size": 8}, {}, 4, 8),
    # Queries that wait in shared memory, of which each warp maps some for all that have the (sequence, kv head).
    "16 packed rows": ("int4", (1,), (700,), 2, {"num_kv_heads": 1, "group": 16}, {}, 2, 8),
    "16 packed rows, a warp each": ("int4", (1, 1, 0, 1, 1), (60, 33, 0, 16, 100), 2, {"group": 16}, {"sinks": SINKS.repeat(4)}, 1, 1),
    "12 packed rows put together": ("int4", (3, 3, 1, 2, 3, 0), (60, 40, 33, 70, 100, 0), 3, {"head_size": 96}, {}, 1, 2),
    "24 packed rows, partials over queries": ("trellis2", (3, 2, 3, 1), (60, 90, 33, 70), 2, {"head_size": 64, "group": 8}, {}, 1, 2),
    "wide rows": ("int4", (1, 1, 1), (100, 50, 90), 1, {"head_size": 512, "num_kv_heads": 1, "group": 8}, {}, 1, 2),
    "wide rows, by integers": ("int4", (1, 1, 1), (100, 50, 90), 1, {"head_size": 512, "num_kv_heads": 1}, {}, 1, 2),
}


def calls_of(case, device="cpu"):
    name, queries, lens, _, shape, options, *_ = CASES[case]
    b = batch(name, queries, lens, device=device, **shape)
    options = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    return b, b.call(max_query_len=max(queries), max_seq_len=max(lens), **options), options


@emulated
@pytest.mark.parametrize("case", CASES)
def test_on_a_cpu(case, monkeypatch, tmp_path):
    multiprocessors, (blocks, warps) = CASES[case][3], CASES[case][-2:]
    device = Device(monkeypatch, tmp_path, multiprocessors)
    b, call, options = calls_of(case)
    found = hopper.Plan(call, multiprocessors).main.unsplit
    assert found is not None and (found.blocks, found.warps) == (blocks, warps)
    assert len(hopper.prepare(call).launches) == 1
    call.out.fill_(float("nan")), call.lse.fill_(float("nan"))
    device.serve(call)
    check(b, (call.out, call.lse), **options)


@emulated
@pytest.mark.parametrize("head_size", [64, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("group", [4, 8, 12, 16])
def test_every_way_to_hold_queries(head_size, group, monkeypatch, tmp_path):
    """As integers or not, in registers or spilled, put together in shared memory, shared by the warps of a (sequence, kv head): by head
    size and packed query rows."""
    b = batch("int4", (1, 1), (40, 70), head_size=head_size, num_kv_heads=1, group=group)
    call = b.call(max_query_len=1, max_seq_len=70)
    assert hopper.Plan(call, 1).main.unsplit is not None
    Device(monkeypatch, tmp_path, 1).serve(call)
    check(b, (call.out, call.lse))


@emulated
def test_lengths_beyond_their_bound(monkeypatch, tmp_path):
    """Longer runs than their bound, each of several stretches, are held between them."""
    device = Device(monkeypatch, tmp_path, 5, max_tiles=2)
    b = batch("int4", (1, 1), (700, 900))
    call = b.call(max_query_len=1)
    object.__setattr__(call, "batch", dataclasses.replace(call.batch, max_seq_len=300))
    assert hopper.Plan(call, 5).main.unsplit is not None
    device.serve(call)
    check(b, (call.out, call.lse))


@emulated
@pytest.mark.parametrize("whole", [True, False])
def test_stretches_whose_values_differ_in_size(whole, monkeypatch, tmp_path):
    """A stretch of small values behind one of large ones is no reason to hold the large ones in units in which they overflow."""
    hopper_ways.split(monkeypatch, not whole)
    b = batch("int4", (1,), (700,), num_kv_heads=1)
    tiles = torch.randint(2, (44,), generator=torch.Generator().manual_seed(0))
    sizes = torch.where(tiles.repeat_interleave(16)[:700] == 1, 2.0**13, 2.0**-10).to(b.value.dtype)
    b.cache.write(b.key, b.value * sizes[:, None, None], b.slots, b.positions, implementation="reference")
    call = b.call(max_query_len=1)
    Device(monkeypatch, tmp_path, 1, max_tiles=2).serve(call)
    check(b, (call.out, call.lse))


@emulated
def test_smaller_clusters_where_few_are_held(monkeypatch, tmp_path):
    device = Device(monkeypatch, tmp_path, 8)
    device.clusters = lambda blocks: 1 if blocks > 2 else 4
    b = batch("int4", (1,), (250,))
    call = b.call(max_query_len=1)
    prepared = hopper.prepare(call)
    assert prepared.plan.main.unsplit.blocks == 2 and prepared.launches[0].cluster == 2 and prepared.plan.main.decode_grid == (4, 1, 1)
    device.serve(call)
    check(b, (call.out, call.lse))


INVARIANT = {  # queries and lengths, multiprocessors, shape and options; then blocks and warps of a (sequence, kv head), and its partials
    "a cluster": ((1, 1), (900, 880), 8, {}, {}, 2, 12, 48),
    "a cluster, groups of packed rows": ((4, 3), (500, 510), 4, dict(num_kv_heads=1, group=3), {}, 2, 12, 24),
    "several beside each other": ((1,) * 3, (330, 325, 330), 1, {}, {}, 1, 2, 6),
    "a warp each": ((1,) * 6, (190, 200) * 3, 1, dict(head_size=128, group=1), {}, 1, 1, 6),
    "windows": ((1, 1, 0), (300, 17, 0), 1, dict(group=5), dict(window=120, softcap=25.0), 1, 2, 4),
    "queries without a key": ((1, 2), (170, 200), 1, {}, dict(key_range=torch.tensor([[40, 60], [0, 0]], dtype=torch.int32)), 1, 3, 6),
}


@emulated
@pytest.mark.parametrize("case", INVARIANT)
def test_where_the_cut_is_invariant(case, monkeypatch, tmp_path):
    """One launch has the bits of two."""
    queries, lens, multiprocessors, shape, options, blocks, num_warps, partials = INVARIANT[case]
    for name, value in (("PARTIAL_LEAST", 2), ("PARTIAL_MOST", 2)):
        monkeypatch.setattr(warps, name, value)
    b = SampleBatch.make("int4", queries, lens, **{"head_size": 64, "num_kv_heads": 2, "group": 4, "dtype": torch.bfloat16, **shape})
    call = b.call(lengths=tuple(zip(queries, lens)), batch_invariant=True, **options)
    device, found = Device(monkeypatch, tmp_path, multiprocessors), []
    for whole in (False, True):
        hopper_ways.split(monkeypatch, not whole)
        call.out.fill_(float("nan")), call.lse.fill_(float("nan"))
        device.serve(call)
        found.append((call.out.clone(), call.lse.clone()))
    main = hopper.Plan(call, multiprocessors).main
    assert len(hopper.prepare(call).launches) == 1 and (main.unsplit.blocks, main.unsplit.warps, main.partial_slots) == (
        blocks,
        num_warps,
        partials,
    )
    check(b, found[0], **options)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@emulated
@pytest.mark.parametrize("lens", [(290, 1500), (1500, 290)], ids=str)
def test_lengths_that_are_beyond_the_bound_of_an_invariant_cut(lens, monkeypatch, tmp_path):
    """What is longer than its bound gets a wrong answer, in its own place."""
    monkeypatch.setattr(warps, "PARTIAL_LEAST", 2), monkeypatch.setattr(warps, "PARTIAL_MOST", 2)
    b = batch("int4", (1, 1), lens, head_size=64)
    call = b.call(max_query_len=1, batch_invariant=True)
    object.__setattr__(call, "batch", dataclasses.replace(call.batch, max_seq_len=300, lengths=((1, 300), (1, 300))))
    assert hopper.Plan(call, 1).main.unsplit.of_block == 4
    Device(monkeypatch, tmp_path, 1).serve(call)
    expected, kept = b.oracle()[0], lens.index(290)
    assert relative_error(call.out[kept], expected[kept]) <= OUTPUT_BUDGET[torch.bfloat16]


def meta_call(sequences, tokens, heads=(32, 8), head_size=128, queries=1, shortest=None, **options):
    """Of a shape, on tensors that hold nothing: the plan looks at no other. shortest: tokens of a sequence, where lengths are known."""
    b = batch("int4", (queries,) * 2, (64, 64), num_kv_heads=heads[1], group=heads[0] // heads[1], head_size=head_size)
    call = b.call(max_query_len=queries, **options)
    (segment,) = call.segments
    segment = segment._replace(block_table=torch.zeros(1, -(-tokens // 16), dtype=torch.int32).expand(sequences, -1))
    lengths = None if shortest is None else ((queries, shortest),) + ((queries, tokens),) * (sequences - 1)
    lens = dataclasses.replace(call.batch, seq_lens=torch.zeros(sequences, dtype=torch.int32), max_seq_len=tokens, lengths=lengths)
    object.__setattr__(call, "segments", (segment,)), object.__setattr__(call, "batch", lens)
    return call


CHOSEN = [  # on 132 multiprocessors: blocks and warps of a (sequence, kv head)
    (dict(sequences=1, tokens=2048), (16, 8)),
    (dict(sequences=1, tokens=4096), (16, 8)),
    (dict(sequences=2, tokens=0), (1, 1)),  # a table without pages
    (dict(sequences=4, tokens=4096), (4, 8)),
    (dict(sequences=1, tokens=65536), (16, 12)),
    (dict(sequences=1, tokens=131072), (16, 12)),
    (dict(sequences=8, tokens=32768), (2, 12)),  # lengths that may differ: the device decides
    (dict(sequences=8, tokens=32768, shortest=32768), (2, 12)),
    (dict(sequences=8, tokens=32768, shortest=25000), (2, 12)),  # the longest is above their mean by a 33rd of it
    (dict(sequences=8, tokens=32768, shortest=24000), None),
    (dict(sequences=4, tokens=32768, shortest=100), None),
    (dict(sequences=64, tokens=8192, shortest=8192), (1, 3)),
    (dict(sequences=64, tokens=8192, heads=(8, 1), shortest=8000), (2, 12)),
    (dict(sequences=128, tokens=1024, shortest=1024), (1, 2)),  # of 16 warps: of 12 each would have one
    (dict(sequences=24, tokens=8192, heads=(8, 1), shortest=8192), (5, 8)),
    (dict(sequences=64, tokens=16384, heads=(64, 8), head_size=64, window=128), (1, 3)),
    (dict(sequences=32, tokens=16384, heads=(32, 16), window=1024), (1, 3)),
    (dict(sequences=400, tokens=16384, heads=(64, 8), head_size=64, window=128), None),  # more (sequence, kv head)s than warps
    (dict(sequences=67, tokens=16384, window=1024), None),  # warps for which there is none
    # Warps have whole partials where the cut is a sequence's own: 12, 12, 192, 48, 48, 12, 32, 6 and 12 of them.
    (dict(sequences=1, tokens=2048, batch_invariant=True), (10, 12)),
    (dict(sequences=4, tokens=4096, batch_invariant=True, shortest=4096), (4, 12)),
    (dict(sequences=1, tokens=131072, batch_invariant=True), (16, 12)),
    (dict(sequences=8, tokens=32768, batch_invariant=True, shortest=32768), (2, 12)),
    (dict(sequences=8, tokens=32768, batch_invariant=True), None),
    (dict(sequences=64, tokens=8192, batch_invariant=True, shortest=8192), (1, 3)),
    (dict(sequences=32, tokens=16384, heads=(32, 2), batch_invariant=True, shortest=16384), (2, 8)),
    (dict(sequences=128, tokens=1024, batch_invariant=True, shortest=1024), (1, 1)),  # of 8 warps
    # shared memory does not hold so many packed query rows
    (dict(sequences=64, tokens=8192, batch_invariant=True, shortest=8192, queries=4), None),
]


@pytest.mark.parametrize("shape, chosen", CHOSEN, ids=str)
def test_which_calls_are_unsplit(shape, chosen, monkeypatch):
    found = hopper.Plan(meta_call(**shape), 132).main.unsplit
    assert chosen == (None if found is None else (found.blocks, found.warps))
    hopper_ways.split(monkeypatch)
    plan = hopper.Plan(meta_call(**shape), 132)
    assert plan.main.unsplit is None and not plan.main.config.unsplit


def test_warps_of_a_block():
    """More only where the call is unsplit with these alone."""
    plans = [hopper.Plan(meta_call(sequences, 1024, shortest=1024), 132).main.config for sequences in (128, 64)]
    assert [(config.warps, config.unsplit) for config in plans] == [(16, True), (12, True)]
    ragged = hopper.Plan(meta_call(20, 4096, shortest=100), 132).main
    assert ragged.config.warps == 12 and ragged.unsplit is None


def test_warps_where_the_device_decides(monkeypatch):
    """Those by which even lengths are shared most evenly, if any do. Other numbers of sequences may have others: they are compiled too."""
    plans = [hopper.Plan(meta_call(sequences, 8192), 132).main for sequences in (64, 112, 128, 160, 24, 340)]
    found = [(plan.config.warps, plan.unsplit and plan.unsplit.warps) for plan in plans]
    assert found == [(12, 3), (16, 2), (16, 2), (12, 1), (12, None), (12, None)]
    monkeypatch.setattr(hopper.launch, "device_index", lambda device: 0)
    monkeypatch.setattr(hopper.launch, "multiprocessors", lambda index: 132)
    for sequences in (64, 24):
        compiled = hopper.compiled_for(meta_call(sequences, 8192))
        assert {(config.warps, config.either) for config in compiled} == {(12, True), (16, True)}


def test_a_cluster_of_16_is_one_of_8_where_that_is_the_largest():
    call = meta_call(1, 2048)
    assert hopper.Plan(call, 132, 8).main.decode_grid == (64, 1, 1)
    assert hopper.Plan(call, 132).main.decode_grid == (128, 1, 1)


def test_few_pairs_have_short_runs():
    """Combining them takes less time than that of many (sequence, kv head)s, so fewer tiles are as long."""
    assert hopper.Plan(meta_call(1, 8192), 132).main.unsplit.blocks == 16
    assert hopper.Plan(meta_call(1, 8192), 132, 8).main.unsplit is None
    assert hopper.Plan(meta_call(16, 2048, shortest=2048), 132).main.unsplit.blocks == 1


@pytest.mark.parametrize("name, fits", [("int2", False), ("int4", True)])
def test_what_combiners_come_to_fits_in_place_of_the_rings(name, fits):
    """Of 16 packed query rows, in float32: more than a warp's ring of 2-bit tiles, 4,352 bytes against 3,840."""
    b = batch(name, (4, 4), (64, 64), num_kv_heads=8, head_size=64)
    (config,) = hopper.configurations(b.call(max_query_len=4, batch_invariant=True))
    found = unsplit.Unsplit(blocks=1, warps=1, of_block=config.warps, partials=1)
    assert config.packed_rows == 16 and found.has_capacity(config) == fits
    assert dataclasses.replace(found, warps=2, of_block=config.warps // 2).has_capacity(config)


def test_calls_of_even_lengths_have_kernels_of_their_own():
    even, ragged = (meta_call(8, 32768, shortest=shortest) for shortest in (32768, 100))
    assert hopper._shape(even) == hopper._shape(meta_call(8, 32768, shortest=32000)) != hopper._shape(ragged)


def test_what_a_device_without_large_clusters_needs_is_compiled_too(monkeypatch):
    monkeypatch.setattr(hopper.launch, "device_index", lambda device: 0)
    monkeypatch.setattr(hopper.launch, "multiprocessors", lambda index: 132)
    call = meta_call(1, 8192)
    assert sorted((config.warps, config.either) for config in hopper.compiled_for(call)) == [(8, False), (8, True)]
    assert hopper.scratch_bytes(call) == hopper.Plan(call, 132, 1).scratch_bytes > hopper.Plan(call, 132).scratch_bytes


# ---- on a GPU


@hopper_only
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case):
    b, call, options = calls_of(case, "cuda")
    ops.attend(call, "hopper")
    check(b, (call.out, call.lse), **options)
    first = call.out.clone(), call.lse.clone()
    ops.attend(call, "hopper")
    assert torch.equal(call.out, first[0]) and torch.equal(call.lse, first[1]), "two runs of one input differ"


EITHER = {  # queries, lengths, multiprocessors, shape, whether the device finds that the call is unsplit
    "as long as each other": ((1,) * 3, (330, 320, 310), 6, {}, True),
    "one is longer by little": ((1,) * 3, (330, 250, 330), 6, {}, True),
    "one is much longer": ((1,) * 3, (900, 20, 33), 6, {}, False),
    "two have no key": ((0, 0, 1), (0, 0, 900), 6, {}, False),
    "more blocks than whole clusters": ((1,) * 4, (900, 890, 880, 900), 9, {"num_kv_heads": 1}, True),
    "two packed rows' groups": ((4, 2, 1), (300, 310, 320), 12, {"head_size": 256, "group": 3}, True),
    "a warp each": ((1,) * 8, (170, 140) * 4, 2, {"head_size": 64}, True),
    "a warp each, one is longer": ((1,) * 8, (170,) * 7 + (700,), 2, {"head_size": 64}, False),
    "16 packed rows": ((1,) * 2, (700, 650), 4, {"num_kv_heads": 1, "group": 16}, True),
    "40 sequences, some shorter": ((1,) * 40, (400,) * 32 + (16,) * 8, 6, {"head_size": 64, "num_kv_heads": 1}, False),
}
LESS_OFTEN = {"16 packed rows": ("int4", "levels4"), "40 sequences, some shorter": ("int4",)}  # than with each format


@emulated
@pytest.mark.parametrize("case, name", [(case, name) for case in EITHER for name in LESS_OFTEN.get(case, ("int4", "levels4", "bf16"))])
def test_lengths_that_the_host_does_not_know(case, name, monkeypatch, tmp_path):
    """The device comes to what the host would have, with the bits of the way that it takes; both launches are there either way."""
    queries, lens, multiprocessors, shape, found = EITHER[case]
    b, device = batch(name, queries, lens, **shape), Device(monkeypatch, tmp_path, multiprocessors)
    monkeypatch.setattr(unsplit, "MOST_TILES_RAGGED", 0), monkeypatch.setattr(unsplit, "MOST_OF_SHARE", 2)
    call = b.call(max_query_len=max(queries), max_seq_len=4096)
    outputs = {}
    for spare in (None, 1 << 20, -(1 << 20)):
        with monkeypatch.context() as patch:
            if spare is not None:
                patch.setattr(unsplit, "SPARE_TILES", spare), patch.setattr(unsplit, "SPARE_TILES_OF_FEW", spare)
            hopper_ways.split(patch, False)
            prepared = hopper.prepare(call)
            assert prepared.plan.main.config.either and len(prepared.launches) == 2
            call.out.fill_(float("nan")), call.lse.fill_(float("nan"))
            device.serve(call)
        check(b, (call.out, call.lse))
        outputs[spare] = call.out.clone(), call.lse.clone()
    alike = {spare: all(map(torch.equal, outputs[None], outputs[spare])) for spare in outputs}
    assert alike == {None: True, 1 << 20: found, -(1 << 20): not found}


def test_which_calls_the_device_decides():
    """Those that would be unsplit if their lengths were even, of which the host does not know."""
    even, ragged = (batch("int4", (1,) * 8, lens) for lens in ((2500,) * 8, (2500,) * 7 + (100,)))

    def of(b=even, **given):
        part = hopper.Plan(b.call(max_query_len=1, **given), 16).main
        return part.unsplit and part.unsplit.spare, part.config.unsplit, part.config.either

    assert of() == of(ragged) == of(max_seq_len=100_000) == (3, True, True)
    assert of(lengths=[(1, 2500)] * 8) == (None, True, False)
    assert of(ragged, lengths=[(1, 2500)] * 7 + [(1, 100)]) == (None, True, True)  # by the same kernel, which is told
    assert of(batch_invariant=True) == (None, False, False)
    short = batch("int4", (1,) * 8, (60,) * 7 + (9,))
    assert of(short) == (None, True, False)  # short runs, whoever is longer


@emulated
def test_a_call_that_is_split_says_so_to_the_device(monkeypatch, tmp_path):
    """By the kernel of calls on which the device decides: it looks at no lengths, so there may be any number of (sequence, kv head)s."""
    device, lens = Device(monkeypatch, tmp_path, 4), (500, 20, 33, 300)
    monkeypatch.setattr(unsplit, "MOST_TILES_RAGGED", 0)
    b = batch("int4", (1,) * 4, lens)
    calls = [b.call(max_query_len=1, lengths=[(1, n) for n in lens]), b.call(max_query_len=1, max_seq_len=max(lens))]
    spare = [hopper.prepare(call).main.arguments.unsplit_spare for call in calls]
    assert spare == [unsplit.NEVER, unsplit.SPARE_TILES_OF_FEW] and unsplit.NEVER < 0
    for call in calls:
        part = hopper.Plan(call, 4).main
        assert (part.unsplit is None) == (call.batch.lengths is not None) and part.config.either
        call.out.fill_(float("nan")), call.lse.fill_(float("nan"))
        device.serve(call)
        check(b, (call.out, call.lse))


@emulated
def test_a_device_that_holds_fewer_clusters_than_it_has_blocks_for(monkeypatch, tmp_path):
    """Groups of multiprocessors are no multiples of a cluster: whatever lengths turn out to be, no cluster waits for another to end. Where
    not all (sequence, kv head)s have one at once, clusters are smaller."""
    device, found = Device(monkeypatch, tmp_path, 27), {}
    monkeypatch.setattr(unsplit, "MOST_TILES_RAGGED", 0), monkeypatch.setattr(unsplit, "MOST_OF_SHARE", 9)
    for clusters_of_five, lens in ((3, (600, 590)), (2, (600, 590)), (2, (600, 60)), (1, (600, 590))):
        device.clusters = lambda blocks, n=clusters_of_five: n if blocks == 5 else 27 // blocks
        b = batch("int4", (1, 1), lens, num_kv_heads=1)
        call = b.call(max_query_len=1, max_seq_len=1024)
        part = hopper.prepare(call).plan.main
        found[clusters_of_five, lens[1]] = part.unsplit.blocks, part.decode_grid[0], part.config.either
        call.out.fill_(float("nan")), call.lse.fill_(float("nan"))
        device.serve(call)
        check(b, (call.out, call.lse))
    assert found == {(3, 590): (5, 15, True), (2, 590): (5, 10, True), (2, 60): (5, 10, True), (1, 590): (3, 15, True)}
