"""The Triton kernels over latents against float64: interpreted where there is no GPU, compiled where there is one."""

import pytest
import torch

from latent_batches import SCALE, check_within, expected, make, queries
from quantkv.maps import LayerMaps, LinearMap
from quantkv.testing import FLOAT8_BUDGET, LSE_BUDGET, OUTPUT_BUDGET, relative_error

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RAGGED, FEW = ((4, 1, 3, 0, 2), (70, 1, 3, 9, 133)), ((1, 1, 1), (129, 16, 1))


def check(fmt, heads, shape=FEW, dtype=torch.float16, latent=64, budget=None, size=16, maps=None, scales=(), oracle=None, **options):
    cache, batch, (slots, _), _ = make(
        fmt, dtype=dtype, latent=latent, size=size, queries=shape[0], keys=shape[1], device=DEVICE, maps=maps, **dict(scales)
    )
    q = queries(cache, dtype, heads, sum(shape[0]))
    if max(shape[0]) == 1:
        options = {"max_query_len": 1, **options}
    out, lse = cache.attend(q, **batch, scale=SCALE, return_lse=True, implementation="triton", **options)
    given = {n: v for n, v in options.items() if n not in ("max_query_len", "max_seq_len", "output_scale", "batch_invariant")}
    want, want_lse = expected(cache, q, batch, slots, **(given if oracle is None else oracle))
    if options.get("output_scale"):
        want = (want / options["output_scale"]).clamp(-448, 448)
    check_within(out, lse, want, want_lse, dtype, budget)
    return out


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("fmt", ["int4", "int8"])
def test_decode_for_every_number_of_heads(fmt, heads):
    check(fmt, heads)


@pytest.mark.parametrize("fmt", ["levels4", "levels2", "fp8_token", "int2", "none", "tq4", "trellis2"])
def test_every_kind_of_codec(fmt):
    check(fmt, 16)


@pytest.mark.parametrize("queries", [2, 3, 4])
@pytest.mark.parametrize("heads", [8, 16, 128])
def test_several_queries(heads, queries):
    check("int4", heads, ((queries, queries), (queries, 75)), max_query_len=queries)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ragged_batches(dtype):
    check("int4", 16, RAGGED, dtype)


def test_sizes_of_deepseek():
    check("int4", 16, ((1, 1), (40, 33)), latent=512, dtype=torch.bfloat16)


def test_a_layer_of_float32():
    check("int8", 8, RAGGED, torch.float32)


@pytest.mark.parametrize("heads", [3, 20, 96])
def test_heads_that_are_no_power_of_two(heads):
    check("int4", heads)


@pytest.mark.parametrize("size", [8, 32, 64, 128])
def test_block_sizes(size):
    check("int4", 16, RAGGED, size=size)


@pytest.mark.parametrize("fmt", ["fp8_token", "none"])
def test_slots_that_nothing_wrote_are_not_multiplied(fmt):
    """A tile is a part of a page, whose end is NaN."""
    check(fmt, 16, ((1, 1), (70, 5)), size=64)


@pytest.mark.parametrize("options", [{"window": 20}, {"causal": False}, {"softcap": 3.0}, {"window": 24, "chunk_lookback": 1}])
def test_options(options):
    check("int4", 16, RAGGED, **options)


def test_output_in_8_bit_floats():
    check("int4", 16, output_scale=0.01, budget=FLOAT8_BUDGET)


def test_a_scale_of_the_layer():
    check("fp8", 16, scales={"k_scale": 0.25})


def test_a_map_of_the_layer():
    """No Hadamard matrix: in float32, and not orthogonal."""
    g = torch.Generator().manual_seed(3)
    matrix = torch.linalg.qr(torch.randn(64, 64, generator=g, dtype=torch.float64))[0] * torch.linspace(0.5, 2, 64)
    own = LayerMaps(LinearMap(matrix.float()[None], torch.linalg.inv(matrix).float()[None]))
    check("int8", 16, maps=own)


@pytest.mark.parametrize("small", [0, 1])
def test_parts_of_a_query_of_very_different_sizes(small):
    """They are read in units of their own, or one is small enough to be lost; and either may be zeros."""
    cache, batch, (slots, _), _ = make("int4", dtype=torch.float16, latent=64, size=16, keys=(40,), queries=(1,), device=DEVICE)
    q = queries(cache, torch.float16, 16, 1)
    (q[..., :64], q[..., 64:])[small].mul_(2.0**-14)
    q[:, 3] = 0
    q[:, 4, :64] = 0
    q[:, 5, 64:] = 0
    out = cache.attend(q, **batch, scale=SCALE, implementation="triton")
    want, _ = expected(cache, q, batch, slots)
    assert relative_error(out, want) <= OUTPUT_BUDGET[torch.float16]


def test_parts_whose_ratio_float32_does_not_hold():
    cache, batch, _, _ = make("int4", dtype=torch.bfloat16, latent=64, size=16, keys=(40,), queries=(1,), device=DEVICE)
    q = queries(cache, torch.bfloat16, 16, 1)
    q[:, :4, :64] = 0
    q[..., 64:] *= 2.0**40
    out = cache.attend(q, **batch, scale=SCALE * 2.0**-40, implementation="triton")
    want = cache.attend(q, **batch, scale=SCALE * 2.0**-40, implementation="reference")
    assert relative_error(out, want) <= OUTPUT_BUDGET[torch.bfloat16]


def test_the_same_bits_alone_and_in_a_batch():
    cache, batch, _, _ = make("int4", dtype=torch.float16, latent=64, size=16, keys=(300, 40, 7), queries=(1, 1, 1), device=DEVICE)
    q = queries(cache, torch.float16, 16, 3)
    together = cache.attend(q, **batch, scale=SCALE, implementation="triton", batch_invariant=True)
    for s in range(3):
        one = {"block_table": batch["block_table"][s : s + 1], "seq_lens": batch["seq_lens"][s : s + 1]}
        alone = cache.attend(q[s : s + 1], **one, scale=SCALE, implementation="triton", batch_invariant=True)
        assert torch.equal(alone[0], together[s])


def test_rows_of_a_step_as_given():
    cache, batch, _, rows = make("int4", dtype=torch.float16, latent=64, size=16, keys=(30, 5), queries=(4, 5), device=DEVICE)
    q = queries(cache, torch.float16, 16, 9)
    at = torch.tensor([*range(26, 30), *range(30, 35)], device=DEVICE)
    own = tuple(t[at] for t in rows)
    out = cache.attend(q, **batch, scale=SCALE, own=own, implementation="triton")
    want = cache.attend(q, **batch, scale=SCALE, own=own, implementation="reference")
    assert relative_error(out, want) <= OUTPUT_BUDGET[torch.float16]


@pytest.mark.parametrize("fmt", ["int4", "levels4", "none"])
def test_writes(fmt):
    cache, _, (slots, _), rows = make(fmt, dtype=torch.float16, latent=64, size=16, keys=(40, 3), queries=(1, 1), device=DEVICE)
    want = [t.double() for t in cache.dequantize(slots)]
    cache.buffer.zero_()
    cache.write(*rows, slots, implementation="triton")
    for got, expected_rows in zip(cache.dequantize(slots), want):
        assert relative_error(got, expected_rows) <= 2.0**-6  # of a few rows one code is another


def test_prepared_calls_launch_again():
    from quantkv import prepare_attend

    cache, batch, (slots, _), rows = make("int4", dtype=torch.float16, latent=64, size=16, keys=(40, 3), queries=(1, 1), device=DEVICE)
    attend = prepare_attend(**batch, scale=SCALE, implementation="triton", max_query_len=1)
    q = queries(cache, torch.float16, 16, 2)
    for _ in range(2):
        assert relative_error(attend(cache, q), expected(cache, q, batch, slots)[0]) <= OUTPUT_BUDGET[torch.float16]
        cache.write(*(t.flip(0) for t in rows), slots, implementation="reference")
        q = q.flip(1)


def test_splits_of_wide_rows_are_combined_by_columns():
    check("int8", 4, ((1,), (700,)), latent=256, max_seq_len=700)


def test_sinks():
    """Rows of 512 columns, of several splits and of one; no matrix, and one."""
    for fmt in ("none", "int4"):
        cache, batch, _, _ = make(fmt, dtype=torch.float16, latent=512, size=16, keys=(200, 3), queries=(1, 1), device=DEVICE)
        q, sinks = queries(cache, torch.float16, 4, 2), torch.linspace(-2, 2, 4, device=DEVICE)
        given = {**batch, "scale": SCALE, "sinks": sinks, "return_lse": True, "max_query_len": 1}
        (out, lse), (want, want_lse) = (cache.attend(q, **given, implementation=name) for name in ("triton", "reference"))
        assert relative_error(out, want) <= OUTPUT_BUDGET[torch.float16]
        assert (lse - want_lse).abs().max() <= LSE_BUDGET[torch.float16]
