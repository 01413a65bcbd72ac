"""2 bits: Lloyd-Max codes of the rotated row `y = H_D x`, `n = sqrt(sum y^2 + 1e-12)`, `z = y sqrt(D) / n`. The stored float32
is `n / D^1.5`, so that `y^ = D * stored * centroid`."""

from __future__ import annotations

import torch

from ...format import Codec, Format, register
from ...packing import pack, unpack
from ...spec import RowLayout
from ..device import codec_in, cpu_codec, hopper_codec
from ..int8 import LARGEST, quotient

BOUNDARIES = (-0.9816, 0.0, 0.9816)  # Lloyd-Max quantizer of N(0, 1) with four levels, as vLLM rounds it
CENTROIDS = (-1.5104, -0.4528, 0.4528, 1.5104)


def _sum_of_squares(y: torch.Tensor) -> torch.Tensor:
    """`[..., D]` -> `[..., 1]`, plane by plane in the order of additions that gives vLLM's bits: eight running sums,
    a tree, the planes."""
    squares = (y * y).unflatten(-1, (-1, 4)).mT  # [..., plane, D / 4]
    width = min(8, squares.shape[-1])
    running = sum(squares.unflatten(-1, (-1, width)).unbind(-2))
    while running.shape[-1] > 1:
        running = running[..., 0::2] + running[..., 1::2]
    return sum(running.unbind(-2))


def _encode(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    head_size = y.shape[-1]
    squares = (_sum_of_squares(y) + 1e-12).double()
    norm = squares.sqrt().float().clamp_max(LARGEST)  # torch's float32 sqrt is not correctly rounded on every CPU
    z = y * (y.new_tensor(head_size**0.5) / norm)
    codes = torch.bucketize(z.contiguous(), y.new_tensor(BOUNDARIES), right=True)
    return pack(codes, 2), quotient(norm, head_size**1.5)


def _decode(codes: torch.Tensor, stored: torch.Tensor, dtype: torch.dtype):
    values = unpack(codes, 2)
    head_size = values.shape[0] * values.shape[-1]
    return torch.tensor(CENTROIDS, dtype=dtype, device=codes.device)[values.int()], head_size * stored.to(dtype), None


INT2 = Codec(
    "int2",
    RowLayout(2, ("float32",)),
    encode=_encode,
    decode=_decode,
    map="hadamard",
    round_mapped=True,
    head_size_multiple=8,
    power_of_two=True,
    planes=4,
    triton=codec_in(__name__, "INT2"),
    hopper=hopper_codec(__file__, "Int2", table_bytes=1 << 16, integers=True),
    cpu=cpu_codec(operands=lambda head_size: head_size * torch.tensor(CENTROIDS, device="cpu")),
)
register(Format("int2", INT2, INT2, "Lloyd-Max, Hadamard"), "int2_per_token_head")
