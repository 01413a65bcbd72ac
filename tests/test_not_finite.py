"""Numbers that are not finite, or very large, in the Triton kernels: each stays with the queries that see it."""

import itertools

import pytest
import torch

from quantkv.testing import SampleBatch, relative_error

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = {"implementation": "triton"}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def batch(name, shape, **arguments):
    return SampleBatch.make(name, *shape, **{"device": DEVICE, "dtype": DTYPES.get(name, torch.float16), **arguments})


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e4])
def test_a_query_does_not_disturb_others_of_its_tile(value):
    """Also where it is finite, but so large that 16 bits held the others as zeros in its unit."""
    b = batch("int4", ((5,), (60,)))
    b.q[:] *= 2.0**-12
    expected, expected_lse = b.attend(**TRITON)
    b.q[2, 4] = value
    out, lse = b.attend(**TRITON)
    others = torch.ones(5, 6, dtype=torch.bool, device=DEVICE)
    others[2, 4] = False
    assert torch.equal(out[others], expected[others]) and torch.equal(lse[others], expected_lse[others])
    assert bool(out[2, 4].isnan().all()) == (value != 3e4)


@pytest.mark.parametrize(
    "name", ["bf16", "fp16", "fp8", "fp8_e5m2", "fp8_token", "int8", "int4", "int2", "tq4", "tq3", "tq_k8v4", "levels5"]
)
def test_what_a_query_does_not_see_does_not_reach_it(name):
    """0 x NaN: the last ten of twenty queries see a row that is not finite, the first ten are in the same tile and do not."""
    b = batch(name, ((20,), (60,)))
    expected, expected_lse = b.attend(**TRITON)
    bytes_, slot = b.cache.buffer.clone(), b.slots[50:51]
    for value, side in itertools.product((float("nan"), float("inf")), "kv"):
        b.cache.buffer.copy_(bytes_)
        rows = {"k": b.key[50:51].clone(), "v": b.value[50:51].clone()}
        rows[side].fill_(value)
        b.cache.write(*rows.values(), slot, **TRITON)
        meta = (b.cache.k if side == "k" else b.cache.v).meta
        if meta is not None:  # minima and maxima of a GPU pass over NaN
            meta[slot // 16, slot % 16] = value
        out, lse = b.attend(**TRITON)
        torch.testing.assert_close(out[:10], expected[:10], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse[:10], expected_lse[:10], rtol=2e-3, atol=2e-3)
        if meta is not None or value != float("inf") or name in ("bf16", "fp16"):  # 8-bit floats saturate
            assert not out[10:].isfinite().all(), f"what is no number was lost: {value} in {side}"


@pytest.mark.parametrize("options", [{"window": 6}, {"window": 12, "chunk_lookback": 1}, {"causal": False, "window": 6}], ids=str)
@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_what_lies_outside_a_window_does_not_reach_a_query(name, options):
    b = batch(name, ((20,), (60,)))  # queries at positions 40 to 59
    expected, _ = b.attend(**TRITON, **options)
    b.value[45] = float("nan")
    b.cache.write(b.key, b.value, b.slots, **TRITON)
    if b.cache.v.meta is not None:
        b.cache.v.meta[b.slots[45] // 16, b.slots[45] % 16] = float("nan")
    out, _ = b.attend(**TRITON, **options)
    sees = out.isnan().all(-1).all(-1).cpu()
    position = torch.arange(40, 60)
    if "chunk_lookback" in options:
        seen = (position >= 45) & (position // 6 - 45 // 6 <= 1)
    else:
        seen = (position - 45 < 6) & ((position >= 45) if options.get("causal", True) else (45 - position < 6))
    assert torch.equal(sees, seen)
    torch.testing.assert_close(out[~sees], expected[~sees], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_finite_rows_are_stored_as_finite_ones(format_name, dtype):
    """Rows of the largest fp16 number, whose rotation no fp16 holds, and of 2^66, whose squares no float32 holds."""
    b = batch(format_name, ((4,), (20,)), dtype=dtype, head_size=128)
    size = 2.0**15 if format_name == "fp16" else 65504.0 if dtype == torch.float16 else 2.0**66
    b.key[10:] = b.value[10:] = size
    b.key[11] *= torch.where(torch.arange(128, device=DEVICE) % 3 > 0, 1.0, -1.0).to(dtype)
    written = all(codec.triton().encode is not None for codec in (b.cache.format.k, b.cache.format.v))
    for implementation in ("reference", "triton") if written else ("reference",):
        b.cache.buffer.fill_(255)
        b.cache.write(b.key, b.value, b.slots, implementation=implementation)
        at = b.slots // 16, b.slots % 16
        for side, codec in ((b.cache.k, b.cache.format.k), (b.cache.v, b.cache.format.v)):
            codes = side.codes.view(torch.uint8)[at].view(side.codes.dtype)
            meta = None if side.meta is None else side.meta[at]
            assert meta is None or meta.isfinite().all()
            assert codec.dequantize(codes, meta, torch.float64).isfinite().all()


def test_a_large_row_does_not_hide_small_ones_from_earlier_queries():
    """Values 65504 times larger, one token later: finite, and as saturating leaves them. The weights of earlier queries keep their bits."""
    b = batch("int8", ((20,), (60,)))
    b.value[50:] = 60000.0
    b.value[:50] = b.value[:50] / 8
    b.cache.write(b.key, b.value, b.slots, implementation="reference")
    out, _ = b.attend(**TRITON)
    expected, _ = b.oracle()
    assert relative_error(out[:10], expected[:10]) <= 2e-3
