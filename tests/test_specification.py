"""Small facts of the specification that no other test holds: each was found by a planted fault that was not seen (scripts/mutate.py)."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from quantkv import AttentionOptions, LayerMaps, LinearMap, PagedCache, get_format, prepare_write
from quantkv.formats.levels import levels
from quantkv.formats.turboquant import value_codec
from quantkv.implementations import batches
from quantkv.implementations.reference import plan
from quantkv.implementations.reference.write import encode
from quantkv.packing import interleave, pack, planes_of, unpack
from quantkv.reads import key_intervals
from quantkv.rounding import Rounding, unbiased
from quantkv.testing import SampleBatch

ALIASES = {
    "bf16": ["bfloat16"],
    "fp16": ["float16", "half"],
    "fp32": ["float32"],
    "fp8": ["fp8_e4m3", "fp8_per_tensor"],
    "fp8_e5m2": [],
    "fp8_token": ["fp8_per_token_head"],
    "int8": ["int8_per_token_head"],
    "int4": ["int4_per_token_head"],
    "int2": ["int2_per_token_head"],
    "tq_k8v4": ["turboquant_k8v4"],
    "tq4": ["turboquant_4bit_nc"],
    "tq_k3v4": ["turboquant_k3v4_nc"],
    "tq3": ["turboquant_3bit_nc"],
    **{name: [] for name in ("k8v4", "k8v2", "k4v2", "levels2", "levels3", "levels4", "levels5", "levels6", "levels8", "trellis2")},
}
BITS = {"tq_k8v4": (8, 4), "tq4": (4, 4), "tq_k3v4": (3, 4), "tq3": (3, 3), "fp8_e5m2": (8, 8), "fp8_token": (8, 8), "fp8": (8, 8)}
BITS |= {"k8v4": (8, 4), "k8v2": (8, 2), "k4v2": (4, 2)}
MULTIPLES = {  # of the head size of K; powers of two of at least that where there is a star
    **dict.fromkeys(("bf16", "fp16", "fp32"), "1"),
    **dict.fromkeys(("fp8", "fp8_e5m2", "fp8_token", "int8", "k8v4", "k8v2", "tq_k8v4"), "2"),
    **dict.fromkeys(("int4", "k4v2", "levels2", "levels3", "levels4", "levels5", "levels6", "levels8"), "8"),
    "int2": "8*",
    "trellis2": "16",
    **dict.fromkeys(("tq4", "tq_k3v4", "tq3"), "16*"),
}


@pytest.mark.parametrize("name", ALIASES)
def test_names(name):
    fmt = get_format(name)
    assert fmt.name == name and all(get_format(alias) is fmt for alias in ALIASES[name])
    bits = BITS.get(name) or ((int(name[-1]),) * 2 if not name.startswith(("bf", "fp")) else (int(name[2:]),) * 2)
    assert (fmt.k.row.code_bits, fmt.v.row.code_bits) == bits


@pytest.mark.parametrize("name", ["k8v8", "k4v4", "k2v4", "levels1", "levels7"])
def test_no_other_names(name):
    with pytest.raises(ValueError, match=f"format='{name}' is unknown"):
        get_format(name)


@pytest.mark.parametrize("name", MULTIPLES)
def test_head_sizes(name):
    codec, multiple, power = get_format(name).k, int(MULTIPLES[name].rstrip("*")), MULTIPLES[name].endswith("*")
    for size in range(1, 130):
        if size % multiple or (power and size & (size - 1)):
            with pytest.raises(ValueError, match=f"head_size={size}: {codec.name} takes"):
                codec.check_head_size(size)
        else:
            codec.check_head_size(size)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("lead", [(), (3,), (2, 3, 2, 2)])
def test_codes_of_any_width_and_any_number_of_axes(bits, lead):
    size = 2 * planes_of(bits)
    values = torch.randint(0, 2**bits, (*lead, size), generator=torch.Generator().manual_seed(bits))
    packed = pack(values, bits)
    number = sum(v << bits * i for i, v in enumerate(values.reshape(-1, size)[0].tolist()))
    assert packed.reshape(-1, packed.shape[-1])[0].tolist() == list(number.to_bytes(size * bits // 8, "little"))
    assert torch.equal(interleave(unpack(packed, bits)).long(), values)


@pytest.mark.parametrize("bits", [0, 9, 4.0, None])
def test_codes_of_other_widths_are_refused(bits):
    for call in (lambda: pack(torch.zeros(8, dtype=torch.int64), bits), lambda: unpack(torch.zeros(8, dtype=torch.uint8), bits)):
        with pytest.raises(ValueError, match=f"bits={bits}: codes of 1 to 8 bits"):
            call()


def test_int4_rows_below_zero_and_above_it():
    """The zero point is 15 where no number is above zero, 0 where none is below."""
    rows = torch.stack([torch.linspace(-15, 0, 16), torch.linspace(0, 15, 16)])[:, None]
    codes, stored = get_format("int4").k.encode(rows)
    assert (stored.view(torch.int32) & 15).flatten().tolist() == [15, 0]
    assert interleave(unpack(codes, 4)).tolist() == [[list(range(16))]] * 2


def test_intervals_of_ranges_and_windows_by_all_small_cases():
    """Every key that a query sees is in an interval; and without a clamp nothing else is."""
    length = 4
    for queries, window, causal, chunks, clamp in product(range(1, 5), range(6), (True, False), (-1, 0, 1), (True, False)):
        if window <= chunks:
            continue
        size = window // (chunks + 1) if chunks >= 0 else 0
        for start, end in product(range(-1, 5), range(-1, 6)):
            ranges = torch.tensor([[[start, end]]])
            options = AttentionOptions(causal, window, chunks, prefix_ranges=ranges, clamp_prefix_to_window=clamp)
            (intervals,) = key_intervals(options, [queries], [length])
            seen = set()
            for p, j in product(range(length - queries, length), range(length)):
                inside = not window or (p // size - j // size <= chunks if size else p - j < window and (causal or j - p < window))
                both = start < end and start <= p <= end and start <= j <= end
                if ((j <= p or not causal) and inside) or (both and (p - j < window or not (clamp and window))):
                    seen.add(j)
            given = {j for low, high in intervals for j in range(low, high)}
            assert seen <= given and (clamp or seen == given), (options, queries)


def test_a_bias_of_fewer_columns_than_queries():
    """The key behind its last column gets nothing, not the last column again."""
    b = SampleBatch.make("fp32", (4,), (9,), dtype=torch.float32)
    for columns in (1, 2, 3):
        bias = torch.full((4, columns), 3.0)
        padded = torch.nn.functional.pad(bias, (0, 4 - columns))
        expected = b.attend(qq_bias=padded)
        for got, want in zip(b.attend(qq_bias=bias), expected):
            assert torch.equal(got, want)


def test_one_query_each_over_tables_that_begin_elsewhere():
    """As many positions in each sequence, but fewer slots in one: what lies behind its last slot is not read."""
    cache = PagedCache(get_format("fp32").cache_spec(1, 8, block_size=8), 4)
    cache.buffer.fill_(0xFF)
    rows = torch.randn(18, 1, 8, generator=torch.Generator().manual_seed(0))
    cache.write(rows[:10], rows[:10], torch.arange(10))
    cache.write(rows[10:], rows[10:], torch.arange(16, 24))
    q, table = torch.ones(2, 1, 8), torch.tensor([[0, 1], [2, 3]])
    for lens, starts in (([10, 8], [0, 0]), ([10, 8], [0, 2]), ([10, 10], [0, 2])):
        out = cache.attend(q, block_table=table, seq_lens=torch.tensor(lens), key_start=torch.tensor(starts))
        for i, (length, start) in enumerate(zip(lens, starts)):
            held = rows[10 * i : 10 * i + length - start, 0].double()
            want = (held.sum(1) * 8**-0.5).softmax(0) @ held
            assert (out[i, 0].double() - want).abs().max() < 1e-5, (lens, starts, i)


def test_a_value_that_is_not_finite_reaches_only_the_queries_that_see_it():
    """Of several queries in one tile, with finite rows beside it."""
    b = SampleBatch.make("fp32", (3,), (9,), dtype=torch.float32)
    clean = b.attend()[0]
    value = b.value.clone()
    value[7] = float("nan")
    b.cache.write(b.key, value, b.slots, b.positions)
    out = b.attend()[0]
    assert torch.equal(out[0], clean[0]) and out[1:].isnan().all()


def mixed(**options):
    b = SampleBatch.make("int8", (1, 40, 1), (30, 60, 8), device="cpu")
    return b.call(lengths=((1, 30), (40, 60), (1, 8)), **options)


def test_a_batch_on_a_cpu_is_one_run():
    call = mixed()
    assert len(batches.runs_of(call)) == 3
    for one in (call, mixed(batch_invariant=True)):
        (run,) = batches.cut(one)
        assert run.call is one and run.tokens is None and run.of(call) is call


def test_a_run_of_another_layer_has_that_layers_options_and_its_own_sequences():
    causal = torch.tensor([True, False, True])
    call = mixed(causal=causal, sinks=torch.zeros(6))
    layer = call.with_tensors(call.q, call.out, call.lse, call.segments, replace(call.options, sinks=torch.ones(6)))
    for i, run in enumerate(batches.runs_of(call)):
        for given in (call, layer):
            own = run.of(given)
            assert torch.equal(own.options.causal, causal[i : i + 1]) and own.options.sinks is given.options.sinks
            assert own.q.shape[0] == (1, 40, 1)[i] and own.lse.shape == own.q.shape[:2]
            addresses = [own.batch.seq_lens.data_ptr(), own.segments[0].block_table.data_ptr(), own.batch.cu_seqlens_q.data_ptr()]
            assert all(address % 16 == 0 for address in addresses)


def test_damping_of_a_metric():
    """A ten-thousandth of the mean diagonal is added: it is in the bytes that rows rounded by a Hessian become."""
    rounding = Rounding.of(2 * torch.eye(4)[None])
    assert (rounding.gain.double() - 2.0002).abs().max() < 1e-6 and not rounding.feedback.any()


def test_an_unbiased_scale_is_within_a_factor_of_two():
    itself, dot = torch.tensor([1.0, 1.0, 1.0, 3.0, 7.0]), torch.tensor([7.0, 1.6, 0.8, 1.6, 1.0])
    torch.testing.assert_close(unbiased(itself, dot), torch.tensor([0.5, 0.625, 1.25, 1.875, 2.0]))


def test_a_prepared_write_judges_the_slots_that_it_is_filled_with_anew():
    cache, slots, row = PagedCache(get_format("int8").cache_spec(1, 8, block_size=8), 1), torch.arange(2), torch.ones(2, 1, 8)
    write = prepare_write(slots)
    write(cache, row, row)
    before = cache.buffer.clone()
    slots[1] = 8
    with pytest.raises(ValueError, match="slot_mapping=8: slots end at 7"):
        write(cache, 2 * row, row)
    assert torch.equal(cache.buffer, before)


def test_rows_have_no_scale_unless_one_is_given():
    rows = torch.tensor([[[1.0, -2.0]]])
    assert torch.equal(encode(rows, get_format("fp32").k)[0], rows)


def test_a_tile_is_no_larger_than_a_processors_cache(monkeypatch):
    """Neither its scores nor the rows that it gathers: sequences, then queries, are taken apart until they fit."""
    b = SampleBatch.make("fp32", (3, 3, 1, 20, 20), (40, 40, 40, 40, 200), dtype=torch.float32)
    call = b.call()
    heads, width = call.q.shape[1], call.segments[0].k.codes.shape[2] * call.q.shape[2]
    for room in (40 * width, 2 * 40 * width, 3 * 40 * width, 1 << 20):
        monkeypatch.setattr(plan, "TILE_ELEMENTS", room)
        tiles = [read.tile for read in plan.plan(call, call.segments[0])]
        for tile in tiles:
            count, rows = len(tile.seq_lens), len(tile.queries)
            assert count == 1 or count * tile.num_keys * max(width, heads * rows) <= room
            assert rows == 1 or count * tile.num_keys * heads * rows <= room
            long = tile.seqs == slice(4, 5) and tile.queries.stop < 20  # one of several tiles of the longest sequence: as many as fit
            assert not long or rows == max(1, room // (200 * heads))
        asked = [(s, i) for t in tiles for s in range(t.seqs.start, t.seqs.stop) for i in t.queries if i < (3, 3, 1, 20, 20)[s]]
        assert sorted(asked) == [(s, i) for s, n in enumerate((3, 3, 1, 20, 20)) for i in range(n)]
    assert len(tiles) == 1  # all of them fit


@pytest.mark.parametrize("name, value_map", [("int8", None), ("int8", 4.0), ("int8/fp8_token", None)])
@pytest.mark.parametrize("scales, head_size_v", [((2.0, 0.5), 16), ((2.0, 2.0), 16), ((1.0, 1.0), 8)])
def test_keys_and_values_are_encoded_each_with_their_own(name, scales, head_size_v, value_map):
    """Together only where nothing tells them apart: codec, map, scale or size."""
    fmt, generator = get_format(name), torch.Generator().manual_seed(1)
    eye = torch.eye(head_size_v)[None]
    maps = None if value_map is None else LayerMaps(v=LinearMap(value_map * eye, eye / value_map))
    cache = PagedCache(fmt.cache_spec(2, 16, head_size_v), 1, k_scale=scales[0], v_scale=scales[1], maps=maps)
    key, value = (torch.randn(5, 2, size, generator=generator) for size in (16, head_size_v))
    cache.write(key, value, torch.arange(5))
    sides = (cache.k, fmt.k, key / scales[0]), (cache.v, fmt.v, value / scales[1] * (value_map or 1))
    for side, codec, rows in sides:
        codes, meta = codec.encode(rows)
        assert torch.equal(side.codes[0, :5].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(side.meta[0, :5], meta)


LEVELS = {  # bits: the smallest and the largest above zero
    2: (0.452880859375, 1.5107421875),
    3: (0.2371826171875, 2.146484375),
    4: (0.12054443359375, 2.689453125),
    5: (0.060943603515625, 3.142578125),
    6: (0.030853271484375, 3.533203125),
    8: (0.00792694091796875, 4.203125),
}


@pytest.mark.parametrize("bits", LEVELS)
def test_levels_are_what_bytes_mean(bits):
    """Whatever they are best for: other ones would read every file that was written as something else."""
    table = levels(bits)
    assert (table[2**bits // 2].item(), table[-1].item()) == LEVELS[bits] and torch.equal(table, -table.flip(0))


def test_rows_of_one_number_keep_the_smallest_scale_that_vllm_does():
    """1e-8, of TurboQuant's values: 0.55 of it is nearer to one step than to none, 0.45 is not."""
    codes, stored = value_codec(4).encode(torch.tensor([[[0.0, 0.55e-8, 0.45e-8, 0.0]]]))
    assert interleave(unpack(codes, 4)).flatten().tolist() == [0, 1, 0, 0] and stored.flatten().tolist() == [0, 0]
