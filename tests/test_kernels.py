"""The Triton kernels against the reference: interpreted where there is no GPU, compiled where there is one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import direct
from quantkv import Format, LayerMaps, LinearMap, available_formats, format, get_format
from quantkv.calls import AttentionOptions, PagedTensor, Segment
from quantkv.formats import turboquant
from quantkv.testing import SampleBatch, check, relative_error
from segments import evened

pytest.importorskip("triton")

import triton
import triton.language as tl

from quantkv.formats.turboquant import triton as uniform
from quantkv.implementations.triton import attend, launch, tiling
from quantkv.implementations.triton.kernels.codes import unpack_codes
from quantkv.implementations.triton.kernels.views import TritonCodec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = {"implementation": "triton"}
MIXED = ["int8/int2", "tq3/int4", "fp8/turboquant_3bit_nc", "int4/fp8_token", "fp16/int4", "turboquant_4bit_nc/int8"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DECODE, VERIFY, RAGGED = ((1, 1), (40, 90)), ((4, 4), (40, 33)), ((1, 7, 25), (37, 7, 60))


def batch(name, shape, **arguments):
    return SampleBatch.make(name, *shape, **{"device": DEVICE, "dtype": DTYPES.get(name, torch.float16), **arguments})


# ---- write


@pytest.mark.parametrize("head_size", [64, 128])
def test_encode_gives_the_reference_bytes(format_name, head_size):
    """Codes equal byte for byte; where a rotation or a sum rounds differently, a share that FORMATS.md bounds, counted."""
    b = batch(format_name, ((1,), (40,)), head_size=head_size)
    k, v = b.cache.k, b.cache.v
    if b.cache.format.k.triton().encode is None:
        with pytest.raises(ValueError, match=f"{format_name}: its rows have no code in Triton"):
            b.cache.write(b.key, b.value, b.slots, **TRITON)
        return
    expected = [t.clone() for t in (k.codes.view(torch.uint8), v.codes.view(torch.uint8))]
    meta = [None if s.meta is None else s.meta.clone() for s in (k, v)]
    b.cache.buffer.fill_(255)
    slots = b.slots.clone()
    slots[7] = -1  # skipped: its slot stays poisoned
    b.cache.write(b.key, b.value, slots, **TRITON)
    at = (b.slots // 16, b.slots % 16)
    kept = slots >= 0
    for side, codes, fields, codec in zip((k, v), expected, meta, (b.cache.format.k, b.cache.format.v)):
        assert bool((side.codes.view(torch.uint8)[at][~kept] == 255).all())
        differing = (side.codes.view(torch.uint8)[at][kept] != codes[at][kept]).float().mean().item()
        rotated = codec.map != "none"
        assert differing <= (0.004 if rotated and (DEVICE == "cuda" or b.q.dtype == torch.float32) else 0.001 if rotated else 0.0)
        if fields is not None:  # the last bit of a scale
            torch.testing.assert_close(side.meta[at][kept].float(), fields[at][kept].float(), rtol=2e-3 if rotated else 0, atol=0)


# Shares of the bytes of mapped rows, and of their fields, that may differ from the reference's, by codec (docs/formats.md).
LEVELS = [f"levels{bits}" for bits in (2, 3, 4, 5, 6, 8)]
BYTES_BOUND = {"int4": 4e-3, "int2": 4e-3, "tq4": 7e-4, "tq3": 7e-4, **dict.fromkeys(LEVELS, 7e-4)}
FIELDS_BOUND = {"int4": 0.25, "int2": 0.25, "tq4": 7e-4, "tq3": 7e-4, **dict.fromkeys(LEVELS, 5e-3)}


def of_a_code(codec, head_size):
    """How much the scale of a row follows one number on the other side of a boundary between levels: their dot product with the row
    changes by boundary times gap, of about head_size."""
    if codec.name not in LEVELS:
        return 0.0
    numbers = codec.triton().table(head_size)
    count = (len(numbers) + 1) // 2
    return 1.1 * (numbers[count:].abs() * numbers[:count].diff()).max().item() / head_size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["int8", "fp8_token", "fp8", "int4", "int2", "tq4", "tq3", *LEVELS])
def test_bytes_of_many_rows(name, dtype):
    """Where a row is not mapped, all bytes are those of the reference on a CPU; where it is, all but a share, counted."""
    tokens, heads = (4096, 8) if DEVICE == "cuda" else (64, 2)
    b = batch(name, ((1,), (tokens,)), dtype=dtype, head_size=128, num_kv_heads=heads)
    expected = [(s.codes.view(torch.uint8).clone(), None if s.meta is None else s.meta.clone()) for s in (b.cache.k, b.cache.v)]
    b.cache.buffer.fill_(255)
    b.cache.write(b.key, b.value, b.slots, **TRITON)
    at = b.slots // 16, b.slots % 16
    for side, (codes, fields), codec in zip((b.cache.k, b.cache.v), expected, (b.cache.format.k, b.cache.format.v)):
        differing = (side.codes.view(torch.uint8)[at] != codes[at]).float().mean().item()
        assert differing <= BYTES_BOUND.get(codec.name, 0.0)
        if fields is not None:
            assert (side.meta[at] != fields[at]).float().mean().item() <= FIELDS_BOUND.get(codec.name, 0.0)
            torch.testing.assert_close(side.meta[at].float(), fields[at].float(), rtol=max(4e-3, of_a_code(codec, 128)), atol=0)


@pytest.mark.parametrize("mode", ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "turboquant_3bit_nc"])
def test_golden_bytes(mode):
    """Bytes that the reference engine's own kernels wrote."""
    golden = load_file(Path(__file__).parent / "data" / "d64_bf16.safetensors")
    fmt = get_format(mode)
    sides = []
    for codec in (fmt.k, fmt.v):
        codes = torch.zeros(8, 16, 2, codec.row.code_bytes(64) // codec.code_dtype.itemsize, dtype=codec.code_dtype)
        sides.append(
            PagedTensor(codes.to(DEVICE), torch.zeros(8, 16, 2, len(codec.row.meta), dtype=getattr(torch, codec.row.meta[0])).to(DEVICE))
        )
    arguments = [golden[n].to(DEVICE) for n in ("key", "value", "slot_mapping")]
    direct.write(*arguments[:2], *sides, fmt, arguments[2], **TRITON)
    if mode.startswith("turboquant"):
        slot = torch.cat([t for s in sides for t in (s.codes, s.meta.view(torch.uint8))], -1).cpu()
        expected = golden[f"{mode}.kv_cache"][..., : slot.shape[-1]]
        pairs = [(slot, expected)]
    else:
        pairs = [(s.codes.cpu().view(torch.uint8), golden[f"{mode}.{n}_cache"]) for s, n in zip(sides, ("key", "value"))]
        pairs += [(s.meta[..., 0].cpu(), golden[f"{mode}.{n}_scale_cache"]) for s, n in zip(sides, ("k", "v"))]
    for got, want in pairs:
        differing = (got.reshape(want.shape) != want).float().mean().item()
        assert differing <= (0.004 if DEVICE == "cuda" else 0.0)


def test_write_takes_any_strides():
    b = batch("int4", ((1,), (40,)))
    expected = b.cache.buffer.clone()
    packed = torch.stack([b.key, b.value], 2).to(DEVICE)  # [T, HK, 2, D], as a fused projection leaves it
    b.cache.buffer.fill_(255)
    b.cache.write(packed[:, :, 0], packed[:, :, 1], b.slots, **TRITON)
    assert (b.cache.buffer != expected).float().mean() <= 0.004


# ---- attend


@pytest.mark.parametrize("shape", [DECODE, RAGGED], ids=["decode", "ragged"])
@pytest.mark.parametrize("name", [*available_formats(), *MIXED])
def test_formats(name, shape):
    b = batch(name, shape)
    check(b, b.attend(**TRITON, max_query_len=max(shape[0])))


def options_of(heads):
    generator = torch.Generator().manual_seed(1)
    slopes, sinks, bias = (torch.rand(*s, generator=generator) for s in ((heads,), (heads,), (12, 12)))
    ranges = torch.tensor([[[2, 10], [30, 50], [0, 0]], [[5, 5], [20, 28], [3, 6]]], dtype=torch.int32)
    return {
        "not causal": {"causal": False},
        "causal per sequence": {"causal": torch.tensor([True, False]), "window": 9},
        "window": {"window": 7},
        "window, not causal": {"window": 7, "causal": False},
        "chunked lookback": {"window": 16, "chunk_lookback": 1},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": sinks * 4},
        "alibi": {"alibi_slopes": slopes},
        "sqrt alibi, softcap": {"alibi_slopes": slopes, "alibi_sqrt": True, "softcap": 5.0},
        "query-query bias": {"qq_bias": bias},
        "prefix ranges": {"prefix_ranges": ranges},
        "prefix ranges, window": {"prefix_ranges": ranges, "window": 5},
        "prefix ranges, clamped": {"prefix_ranges": ranges, "window": 5, "clamp_prefix_to_window": True},
        "float8 output": {"output_scale": 0.05},
        "range of positions": {"key_range": torch.tensor([[5, 30], [4, 20]], dtype=torch.int32), "causal": False},
    }


@pytest.mark.parametrize("shape", [((3, 12), (40, 33)), ((1, 1), (40, 33))], ids=["chunk", "decode"])
@pytest.mark.parametrize("name", list(options_of(6)))
def test_options(name, shape):
    options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options_of(6)[name].items()}
    b = batch("int4" if name in ("sinks", "float8 output", "softcap") else "int8", shape)
    check(b, b.attend(**TRITON, max_query_len=max(shape[0]), **options), **options)


@pytest.mark.parametrize("head_sizes", [(80, 80), (96, 64), (128, 128), (192, 128), (256, 256), (32, 32), (512, 512)], ids=str)
def test_head_sizes(head_sizes):
    for name in ("int4", "int8"):
        b = batch(name, ((1, 3), (20, 35)), head_size=head_sizes[0], head_size_v=head_sizes[1])
        check(b, b.attend(**TRITON))


@pytest.mark.parametrize("group", [1, 5, 16, 64])
def test_groups(group):
    b = batch("int4", VERIFY, group=group, num_kv_heads=1)
    check(b, b.attend(**TRITON, max_query_len=4))


@pytest.mark.parametrize("block_size", [8, 64, 256])
def test_block_sizes(block_size):
    b = batch("int4", RAGGED, block_size=block_size)
    check(b, b.attend(**TRITON))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dtypes(dtype):
    b = batch("int4", RAGGED, dtype=dtype)
    check(b, b.attend(**TRITON))


@pytest.mark.parametrize("spared", [0, 64])
@pytest.mark.parametrize("name", ["int4", "int8/int2", "tq4/levels2", "fp8_token"])
def test_tiles_as_on_other_gpus(name, spared, monkeypatch):
    """Where tensor cores want more rows keys run across also for few queries; codes are then centred one by one, or not."""
    monkeypatch.setattr(launch.Target, "turns", False)
    monkeypatch.setattr(tiling, "SPARED", spared)
    b = batch(name, DECODE, dtype=torch.bfloat16)
    assert attend.AttendPlan.of(b.call(max_query_len=1)).tiling[6:8] == (spared > 0, True)
    check(b, b.attend(**TRITON, max_query_len=1))


@pytest.mark.parametrize("options", [{}, {"window": 20}], ids=str)
@pytest.mark.parametrize("name", ["levels8", "fp8_token/int4", "bf16"])
def test_one_loop_over_all_tiles(name, options, monkeypatch):
    """As where tensor cores are told where matrices lie; every tile is masked then, also those that lie before all queries."""
    monkeypatch.setattr(launch.Target, "has_matrix_descriptors", True)
    b = batch(name, ((1, 7, 40), (137, 7, 300)), dtype=torch.bfloat16)
    call = b.call(max_query_len=40, **options)
    plan = attend.AttendPlan.of(call)
    assert plan.tiling.block_m >= 64 and plan.features(call, call.segments[0]).one_loop
    check(b, b.attend(**TRITON, max_query_len=40, **options), **options)


@pytest.mark.parametrize("capability, one", [(80, False), (89, False), (90, True), (100, True), (120, False), (0, False)])
def test_which_gpus_have_matrix_descriptors(capability, one):
    assert launch.Target(capability, "ieee", 100).has_matrix_descriptors == one


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_rows_of_16_bits_in_tiles_of_few_queries(name, monkeypatch):
    monkeypatch.setattr(tiling, "WIDE_NUMBERS", 3)
    b = batch(name, VERIFY)
    check(b, b.attend(**TRITON, max_query_len=4))


@triton.jit
def sixteenths(words, table, PLAN: tl.constexpr):
    """Codes as they are, those of odd planes divided by 16: as a program leaves them that masks them in place."""
    codes = unpack_codes(words, PLAN)
    return codes[0].to(tl.float16), codes[1].to(tl.float16) / 16, codes[2].to(tl.float16), codes[3].to(tl.float16) / 16


def test_zeros_are_in_the_unit_of_each_plane(monkeypatch):
    """What is taken off the sums of values, and off scores, of codes that come out in units of their own."""
    device = get_format("int4").k.triton()
    half = replace(device, lean=replace(device.lean, unpack=sixteenths, exponents=(0, 4, 0, 4)))
    codec = replace(get_format("int4").k, name="any", triton=lambda: half)
    monkeypatch.setitem(format._FORMATS, "any", Format("any", codec, codec))
    b = batch("any", VERIFY)
    check(b, b.attend(**TRITON, max_query_len=4))


@pytest.mark.parametrize("name", ["int2", "levels2"])
def test_levels_that_are_rounded_meet_bfloat16_alone(name):
    """-10, -3, 3 and 10 stand for four levels to 1 in 1,000: enough for queries of 8 bits, not for others."""
    codec = get_format(name).k
    rounded = codec.triton().lean
    assert launch.device_codec(codec, lean=torch.bfloat16) == replace(rounded, program=None)
    assert launch.device_codec(codec, lean=torch.float16) == launch.device_codec(codec) != launch.device_codec(codec, lean=torch.bfloat16)


def random_map(heads, size, seed, buckets=None):
    """Well-conditioned, another for each head; key means as large as the rows."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.linalg.qr(torch.randn(heads, size, size, generator=generator))[0] * torch.linspace(0.5, 2, size)
    key_mean = None if buckets is None else torch.randn(buckets, 1, size, generator=generator) * 2
    return LinearMap(a, torch.linalg.inv(a.double()).float(), key_mean)


@pytest.mark.parametrize("name", ["int4", "int8", "tq3/int2"])
def test_any_map_and_offset(name):
    """Nothing in a kernel may assume a Hadamard matrix; what a key mean adds to the scores is exact."""
    maps = LayerMaps(random_map(2, 64, 0, buckets=2), random_map(2, 64, 1))
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    b = batch(name, ((3, 12), (40, 150)), maps=maps)
    check(b, b.attend(**TRITON, softcap=20.0, sinks=sinks), softcap=20.0, sinks=sinks)
    before = [s.codes.view(torch.uint8).clone() for s in (b.cache.k, b.cache.v)]
    b.cache.write(b.key, b.value, b.slots, b.positions, **TRITON)
    for side, codes in zip((b.cache.k, b.cache.v), before):
        assert (side.codes.view(torch.uint8) != codes).float().mean() <= 0.004


STEPPED = [("levels4", 64), ("int4", 96), ("tq3/int2", 64), ("int8", 128), ("levels2", 24), ("levels4", 80)]


@pytest.mark.parametrize("queries", [(1, 1), (3, 12)])
@pytest.mark.parametrize("name, head_size", STEPPED)
def test_maps_of_hadamard_matrices_and_steps(name, head_size, queries):
    """Of each head its own, as presets have them: few queries and outputs go through butterflies, many queries through a matrix."""
    maps = evened(head_size)
    assert maps.k.operands.diagonal.shape == (2, head_size)
    b = batch(name, (queries, (40, 150)), head_size=head_size, maps=maps, dtype=torch.bfloat16)
    check(b, b.attend(**TRITON))


@pytest.mark.parametrize(
    "name, head_size",
    [*((name, 64) for name in ("levels4", "levels2/int4", "levels5", "levels8", "trellis2")), ("levels4", 80), ("trellis2", 80)],
)
def test_keys_that_are_stored_without_their_offset(name, head_size):
    """Some are, some are not: what reads them adds the key mean to the others alone, and what writes them chooses as the reference does."""
    maps = LayerMaps(random_map(2, head_size, 0, buckets=3), None)
    maps.k.key_mean.mul_(0.15)
    maps = LayerMaps(LinearMap(maps.k.forward, maps.k.inverse, maps.k.key_mean), None)
    b = batch(name, ((3, 12), (40, 150)), head_size=head_size, maps=maps)
    stored = b.cache.k.meta[b.slots // 16, b.slots % 16].clone()
    assert 0.1 < (stored < 0).float().mean() < 0.9
    check(b, b.attend(**TRITON))
    if b.cache.format.k.triton().encode is None:
        return
    before = b.cache.k.codes.clone()
    b.cache.buffer.fill_(255)
    b.cache.write(b.key, b.value, b.slots, b.positions, **TRITON)
    again = b.cache.k.meta[b.slots // 16, b.slots % 16]
    assert torch.equal(again < 0, stored < 0)
    torch.testing.assert_close(again, stored, rtol=2e-3, atol=0)
    at = b.slots // 16, b.slots % 16
    assert (b.cache.k.codes[at] != before[at]).float().mean() <= 2e-3


@pytest.mark.parametrize("name", ["int8", "tq4"])
def test_offsets_go_by_position_not_by_slot(name):
    """A cache whose first slot holds position 16: tiles of keys straddle the buckets of key means of 64 positions."""
    b = batch(name, ((2,), (150,)), maps=LayerMaps(random_map(2, 64, 0, buckets=3), None))
    read = torch.tensor([[16, 150]], dtype=torch.int32, device=DEVICE)
    start = torch.tensor([16], dtype=torch.int32, device=DEVICE)
    table = b.block_table.t().contiguous().t()[:, 1:]  # any strides
    call = {"block_table": table, "seq_lens": b.seq_lens, "cu_seqlens_q": b.cu_seqlens_q, "return_lse": True}
    check(b, b.cache.attend(b.q, **call, key_start=start, key_range=read, **TRITON), key_range=read)


WORDS = [(bits, size) for bits in range(1, 8) for size in range(1, 9) if 8 * size % bits == 0 and 8 * size // bits in (1, 2, 4, 8, 16)]


@pytest.mark.parametrize("bits,word_bytes", WORDS, ids=lambda n: str(n))
def test_words_of_any_size(bits, word_bytes, monkeypatch):
    """The same bytes, cut into words of any number of bytes that holds a power of two of whole codes."""
    half = TritonCodec(
        8 * word_bytes // bits, uniform.uniform_encode, uniform.uniform_unpack, uniform.uniform_affine, word_bytes=word_bytes, num_meta=2
    )
    codec = replace(turboquant.value_codec(bits), name="any", triton=lambda: half)
    monkeypatch.setitem(format._FORMATS, "any", Format("any", codec, codec))
    b = batch("any", ((1, 3), (37, 21)))
    check(b, b.attend(**TRITON))
    expected = b.cache.buffer.clone()
    b.cache.buffer.fill_(255)
    b.cache.write(b.key, b.value, b.slots, **TRITON)
    assert torch.equal(b.cache.buffer, expected)


@pytest.mark.parametrize("name", ["fp8", "bf16", "tq_k8v4"])
def test_softcap_of_keys_without_metadata(name):
    b = batch(name, RAGGED)
    check(b, b.attend(**TRITON, softcap=0.5), softcap=0.5)
    assert relative_error(b.attend(**TRITON)[0], b.oracle(softcap=0.5)[0]) > 0.05


@pytest.mark.parametrize("name", ["tq3", "tq4", "tq4/tq3", "int4/int2", "levels3", "levels8/levels5", "trellis2"])
@pytest.mark.parametrize("group", [3, 64])
def test_float32_queries_meet_float32_levels(name, group):
    b = batch(name, ((1, 3), (37, 40)), dtype=torch.float32, group=group, num_kv_heads=1)
    check(b, b.attend(**TRITON))


@pytest.mark.parametrize("stride", [0, 2])
@pytest.mark.parametrize("option", ["sinks", "alibi_slopes"])
def test_strided_options(option, stride):
    """Every second number of a tensor, or one number for all heads."""
    numbers = torch.linspace(0.1, 2, 12, device=DEVICE)
    b = batch("int8", ((1, 3), (40, 33)))
    given = numbers[3:4].expand(6) if stride == 0 else numbers[::2]
    assert given.stride() == (stride,)
    check(b, b.attend(**TRITON, **{option: given}), **{option: given})


@pytest.mark.parametrize("layout", ["last axis strided", "expanded"])
def test_offsets_of_any_strides(layout):
    table = torch.randn(3, 1, 128, generator=torch.Generator().manual_seed(0)) * 2
    key_mean = table[..., ::2] if layout == "last axis strided" else table[..., :1].expand(3, 1, 64)
    eye, written = torch.eye(64)[None], []
    for given in (key_mean, key_mean.contiguous()):
        b = batch("int8", ((2,), (150,)), maps=LayerMaps(LinearMap(eye, eye, given), None))
        check(b, b.attend(**TRITON))
        by_reference = b.cache.buffer.clone()
        b.cache.buffer.fill_(255)
        b.cache.write(b.key, b.value, b.slots, b.positions, **TRITON)
        written.append(b.cache.buffer.clone())
    assert torch.equal(*written)
    # On a GPU a row that is mapped may round to another code, and its scale to another last bit.
    assert (written[0] != by_reference).float().mean() <= (0 if DEVICE == "cpu" else 0.004)


# ---- what must not matter


def test_one_token_reads_back_as_it_is_stored(format_name):
    b = batch(format_name, ((1,), (1,)), group=1)
    _, value = b.cache.dequantize(b.slots)
    assert relative_error(b.attend(**TRITON)[0], value) <= (2e-3 if b.q.dtype != torch.bfloat16 else 6e-3)


def test_batch_pages_and_padding_change_no_bit():
    """Alone or in a batch, whatever the order of the pages and the width of the block table: the same bits, when asked for."""
    shape = ((1, 3, 1), (90, 33, 1100))
    b = batch("int4", shape, num_kv_heads=1)
    together, lse = b.attend(**TRITON, batch_invariant=True)
    for s, (first, last) in enumerate([(0, 1), (1, 4), (4, 5)]):
        out, alone = b.cache.attend(
            b.q[first:last],
            block_table=b.block_table[s : s + 1],
            seq_lens=b.seq_lens[s : s + 1],
            cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE),
            return_lse=True,
            batch_invariant=True,
            **TRITON,
        )
        assert torch.equal(out, together[first:last])
        assert torch.equal(alone, lse[first:last])


def test_chunks_of_a_prompt_give_what_the_whole_gives():
    b = batch("int4", ((40,), (40,)))
    whole, _ = b.attend(**TRITON)
    parts = []
    for first, last in ((0, 9), (9, 32), (32, 40)):
        ends = {"seq_lens": torch.tensor([last], device=DEVICE), "cu_seqlens_q": torch.tensor([0, last - first], device=DEVICE)}
        parts.append(b.cache.attend(b.q[first:last], block_table=b.block_table, **ends, **TRITON))
    assert relative_error(torch.cat(parts), whole) <= 1e-3


def test_splits_are_combined():
    b = batch("tq4", ((1, 2), (300, 700)), num_kv_heads=1)
    options = {"sinks": torch.ones(3, device=DEVICE)}
    for splits in (1, 5, 16):
        call = b.call(max_query_len=2, **options)
        call.out.fill_(float("nan"))
        plan = attend.AttendPlan.of(call, num_splits=splits)
        attend.launch_all(call, plan, plan.partials(call))
        check(b, (call.out, call.lse), **options)


def test_segments_of_a_sequence_in_several_caches():
    """Exact first and latest tokens in a 16-bit cache, the rest quantized: one combine, sinks once."""
    exact, quantized = batch("fp16", ((2,), (100,)), seed=3), batch("int4", ((2,), (100,)), seed=3)
    ranges = [torch.tensor([r], dtype=torch.int32, device=DEVICE) for r in ([0, 8], [8, 80], [80, 100])]
    start = torch.tensor([80], dtype=torch.int32, device=DEVICE)
    segments = [
        Segment(c.cache.k, c.cache.v, c.cache.format, table, c.cache.maps, first, positions)
        for c, table, first, positions in (
            (exact, exact.block_table, None, ranges[0]),
            (quantized, quantized.block_table, None, ranges[1]),
            (exact, exact.block_table[:, 5:].contiguous(), start, ranges[2]),  # its first slot holds position 80
        )
    ]
    call = {"cu_seqlens_q": exact.cu_seqlens_q, "seq_lens": exact.seq_lens, "scale": 0.125}
    call["options"] = AttentionOptions(sinks=torch.ones(6, device=DEVICE), window=60)
    (out, lse), (expected, expected_lse) = (
        direct.attend_segments(exact.q, segments, **call, implementation=i) for i in ("triton", "reference")
    )
    assert relative_error(out, expected) <= 2e-3
    torch.testing.assert_close(lse, expected_lse, atol=1e-2, rtol=0)


@pytest.mark.parametrize("name", ["int8", "tq4"])
def test_foreign_layouts(name):
    """Token-major slots with the metadata inline and padding behind, one buffer for several layers, at a key mean."""
    b = batch(name, RAGGED)
    expected, _ = b.attend(**TRITON)
    parts = [t for s in (b.cache.k, b.cache.v) for t in (s.codes, s.meta)]
    sizes = [t.shape[-1] * t.element_size() for t in parts]
    slot = -(-sum(sizes) // 16) * 16 + 16
    layers = torch.full((b.cache.num_blocks, 3, 16, 2, slot), 255, dtype=torch.uint8, device=DEVICE)
    views = [v.view(t.dtype) for v, t in zip(layers[:, 1, ..., : sum(sizes)].split(sizes, -1), parts)]
    for view, t in zip(views, parts):
        view.view(torch.uint8).copy_(t.view(torch.uint8))
    c = b.cache
    call = {"cu_seqlens_q": b.cu_seqlens_q, "seq_lens": b.seq_lens, "block_table": b.block_table, "scale": c.spec.head_size**-0.5}
    out, _ = direct.attend(b.q, PagedTensor(*views[:2]), PagedTensor(*views[2:]), c.format, **call, **TRITON)
    assert torch.equal(out, expected)


# ---- refusals


def test_what_cannot_run_is_refused_by_name(monkeypatch):
    b = batch("int8", DECODE)
    with pytest.raises(ValueError, match="implementation='cuda'"):
        b.attend(implementation="cuda")
    codes = torch.zeros(16, 16, 2, 65, dtype=torch.int8, device=DEVICE)[..., 1:]
    side = PagedTensor(codes, torch.zeros(16, 16, 2, 1, device=DEVICE))
    call = {"cu_seqlens_q": b.cu_seqlens_q, "seq_lens": b.seq_lens, "block_table": b.block_table, "scale": 1.0}
    with pytest.raises(ValueError, match="words of 2 bytes"):
        direct.attend(b.q, side, side, get_format("int8"), **call, **TRITON)
    if DEVICE == "cpu":
        monkeypatch.setattr("quantkv.implementations.triton.launch.INTERPRETED", False)
        with pytest.raises(ValueError, match=r"implementation='triton'.*need a GPU"):
            b.attend(**TRITON)


def test_rows_of_zero_tokens():
    b = batch("int4", DECODE)
    b.cache.write(b.key[:0], b.value[:0], b.slots[:0], **TRITON)
    empty = {"seq_lens": b.seq_lens[:0], "block_table": b.block_table[:0], "cu_seqlens_q": b.cu_seqlens_q[:1]}
    assert b.cache.attend(b.q[:0], **empty, **TRITON).shape == (0, 6, 64)


def test_rows_of_dequantized_values_are_kept():
    """Every byte that an 8-bit float can hold comes out as it went in, NaN included."""
    codes = torch.arange(256, dtype=torch.uint8).view(4, 1, 64)
    b = batch("fp8", ((1, 1, 1, 1), (1, 1, 1, 1)), group=1, num_kv_heads=1)
    at = (b.slots // 16, b.slots % 16)
    b.cache.v.codes.view(torch.uint8)[at] = codes.to(DEVICE)
    out, _ = b.attend(**TRITON)
    expected = codes.view(torch.float8_e4m3fn).to(torch.float16)
    assert torch.equal(out.cpu().nan_to_num(12345.0), expected.nan_to_num(12345.0))


@pytest.mark.parametrize("range_", [(23, 21), (21, 21), (0, 0)])
def test_a_range_of_no_keys_reads_no_page(range_):
    """The pages around it may be anyone's, or none. With an end before its beginning, or within a page."""
    b = batch("fp8", ((1, 2), (40, 31)), block_size=16)
    table = torch.full_like(b.block_table, 1 << 30)
    ranges = torch.tensor([range_] * 2, dtype=torch.int32, device=DEVICE)
    out, lse = replace(b, block_table=table).attend(implementation="triton", key_range=ranges)
    assert (out == 0).all() and (lse == -torch.inf).all()
