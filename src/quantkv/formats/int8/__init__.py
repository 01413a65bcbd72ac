"""8-bit integers with a float32 scale for each (token, head): `scale = max(absmax / 127, 1e-6)`, `x^ = code * scale`."""

from __future__ import annotations

import torch

from ...format import Codec, Format, register
from ...spec import RowLayout
from ..device import codec_in, cpu_codec, hopper_codec

SMALLEST_SCALE = 1e-6  # keeps a row of zeros finite
LARGEST = torch.finfo(torch.float32).max  # what is stored of finite rows is finite, and so is attention over it
LARGEST_HALF = torch.finfo(torch.float16).max


def round_half_away(x: torch.Tensor) -> torch.Tensor:
    """Nearest integer, halves away from zero: what `(x +- 0.5).to(int)` gives in vLLM's kernels."""
    return torch.add(x, x.sign(), alpha=0.5).trunc_()


def quotient(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """x / divisor, rounded once: on a GPU torch multiplies by the reciprocal of a number, but divides by a tensor."""
    return x / (torch.full_like(x, divisor) if x.is_cuda else divisor)


def absmax_scale(y: torch.Tensor, largest_code: float) -> torch.Tensor:
    """`[..., D]` float32 -> scale `[..., 1]` that maps the row's largest magnitude to `largest_code`."""
    return quotient(y.abs().amax(-1, keepdim=True), largest_code).clamp_min(SMALLEST_SCALE)


def decode_scaled(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype):
    """Codes that are numbers, times the row's scale."""
    return codes, scale.to(dtype), None


def _encode(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = absmax_scale(y, 127.0)
    return round_half_away(y * scale.reciprocal()).clamp_(-128, 127).to(torch.int8), scale


INT8 = Codec(
    "int8",
    RowLayout(8, ("float32",)),
    encode=_encode,
    decode=decode_scaled,
    code_dtype=torch.int8,
    head_size_multiple=2,
    triton=codec_in(__name__, "INT8"),
    hopper=hopper_codec(__file__, "Int8", half=2, integers=True, latents=True, rotated=True),
    cpu=cpu_codec(),
)
register(Format("int8", INT8, INT8, "a scale for each (token, head)"), "int8_per_token_head")
