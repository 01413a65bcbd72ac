"""Keys and values as given: bf16, fp16, fp32. The exact cache that the others are compared with."""

from __future__ import annotations

import torch

from ...format import Codec, Format, register
from ...spec import RowLayout
from ..device import codec_in, cpu_codec, hopper_codec

CUDA_HALVES = {
    dtype: hopper_codec(__file__, f"Plain16<{str(dtype is torch.bfloat16).lower()}>", latents=True, rotated=True)
    for dtype in (torch.bfloat16, torch.float16)
}


def _plain(name: str, dtype: torch.dtype) -> Codec:
    return Codec(
        name,
        RowLayout(8 * dtype.itemsize),
        encode=lambda y: (y.to(dtype), None),
        decode=lambda codes, meta, dtype: (codes, None, None),
        code_dtype=dtype,
        triton=codec_in(__name__, name.upper()),
        hopper=CUDA_HALVES.get(dtype),
        cpu=cpu_codec(),
    )


BF16, FP16, FP32 = (_plain(name, dtype) for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)))
register(Format("bf16", BF16, BF16, "as given"), "bfloat16")
register(Format("fp16", FP16, FP16, "as given"), "float16", "half")
register(Format("fp32", FP32, FP32, "as given"), "float32")
