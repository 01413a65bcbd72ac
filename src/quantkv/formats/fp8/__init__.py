"""8-bit floats. Per tensor (e4m3, e5m2): no metadata, the layer's scale is an argument of write and attend. Per
(token, head): `scale = max(absmax / 448, 1e-6)`, `code = e4m3(x / scale)`, in float32. Rounding: to nearest even,
saturating."""

from __future__ import annotations

import torch

from ...format import Codec, Format, register
from ...spec import RowLayout
from ..device import codec_in, cpu_codec, hopper_codec
from ..int8 import absmax_scale, decode_scaled


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 -> 8-bit float; what is too large becomes the largest finite value, NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def _encode_token(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = absmax_scale(y, 448.0)
    return cast(y * (1.0 / scale), torch.float8_e4m3fn), scale


def plain_fp8(name: str, dtype: torch.dtype, device: str, scaled: bool = True) -> Codec:
    """Codes are the numbers themselves: nothing is stored beside them. scaled: the layer has a scale of them; else they are keys alone."""
    return Codec(
        name,
        RowLayout(8),
        encode=lambda y: (cast(y, dtype), None),
        decode=lambda codes, meta, dtype: (codes, None, None),
        code_dtype=dtype,
        head_size_multiple=2,
        triton=codec_in(__name__, device),
        hopper=hopper_codec(__file__, device, values=scaled, per_tensor=scaled),
        cpu=cpu_codec(),
    )


E4M3 = plain_fp8("fp8_e4m3", torch.float8_e4m3fn, "E4M3")
E5M2 = plain_fp8("fp8_e5m2", torch.float8_e5m2, "E5M2")
FP8_TOKEN = Codec(
    "fp8_token",
    RowLayout(8, ("float32",)),
    encode=_encode_token,
    decode=decode_scaled,
    code_dtype=torch.float8_e4m3fn,
    head_size_multiple=2,
    triton=codec_in(__name__, "E4M3_TOKEN"),
    hopper=hopper_codec(__file__, "E4M3Token"),
    cpu=cpu_codec(),
)

register(Format("fp8", E4M3, E4M3, "per tensor, e4m3"), "fp8_e4m3", "fp8_per_tensor")
register(Format("fp8_e5m2", E5M2, E5M2, "per tensor, e5m2"))
register(Format("fp8_token", FP8_TOKEN, FP8_TOKEN, "e4m3, a scale for each (token, head)"), "fp8_per_token_head")
