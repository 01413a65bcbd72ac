"""The TurboQuant presets. Keys of 3 or 4 bits: Lloyd-Max codes of the unit vector after a normalised Hadamard and an fp16 norm;
the reader scales the centroid vector back to unit length ("nc", norm correction). Values of 3 or 4 bits: uniform between the
row's minimum and maximum, not rotated, with an fp16 scale and minimum. Source: TurboQuant (arXiv 2504.19874), as vLLM stores it."""

from __future__ import annotations

import torch

from ...format import Codec, Format, register
from ...packing import pack, planes_of, unpack
from ...spec import RowLayout
from ..device import codec_in, cpu_codec, hopper_codec
from ..fp8 import plain_fp8
from ..int8 import LARGEST_HALF, quotient

# Positive half of the levels for N(0, 1). vLLM solves Lloyd-Max by the trapezoidal rule (200 intervals a cell, tails to 10.5 sigma,
# 200 rounds); its levels are up to 0.08 % off the exact ones, and its bytes need them. tests/test_formats.py derives both. No codec has
# 2 bits: vLLM gives the table to whoever asks for it.
LEVELS = {
    2: (0.4525719274, 1.5095586113),
    3: (0.2449835925, 0.7556454989, 1.3431800019, 2.1503495389),
    4: (0.1284276607, 0.3881377909, 0.6568799185, 0.9424482433, 1.2562575697, 1.6178817596, 2.0684471187, 2.7309222188),
}
NORM_EPSILON = 1e-8


def centroids(bits: int, head_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sorted levels `[2**bits]` of the quantizer of N(0, 1 / head_size)."""
    half = torch.tensor(LEVELS[bits], dtype=torch.float64, device="cpu") / head_size**0.5
    return torch.cat([-half.flip(0), half]).to(dtype)


def book_table(bits: int, head_size: int) -> torch.Tensor:
    """The levels for N(0, 1), `2**bits`, then the midpoints between those for N(0, 1 / head_size). A kernel divides by the length of the
    row that it decodes, so that the levels that it reads may be of any size."""
    levels = centroids(bits, head_size)
    return torch.cat([centroids(bits, 1), (levels[:-1] + levels[1:]) / 2])


CODEBOOKS = {3: {"table_bytes": 1 << 13}, 4: {"table_bytes": 1 << 16, "warps": 8}}  # of `hopper.cuh`
UNIFORM = {4: {"half": 4, "odd_unit": 16.0}}


def _levels(head_size: int) -> dict[str, list[float]]:
    """What `hopper.cuh` reads."""
    return {f"LEVELS_{bits}": centroids(bits, head_size).tolist() for bits in CODEBOOKS}


def key_codec(bits: int) -> Codec:
    """Codes of the unit vector and its norm."""

    def encode(y):
        norm = y.norm(dim=-1, keepdim=True)
        levels = centroids(bits, y.shape[-1]).to(y.device)
        unit = (y / (norm + NORM_EPSILON)).contiguous()
        codes = torch.bucketize(unit, (levels[:-1] + levels[1:]) / 2, right=True)
        return pack(codes, bits), norm.clamp_max(LARGEST_HALF).half()

    def decode(codes, norm, dtype):
        values = unpack(codes, bits)
        unit = centroids(bits, values.shape[0] * values.shape[-1], dtype).to(codes.device)[values.int()]
        length = unit.square().sum((0, -1)).sqrt()[..., None]
        return unit, norm.to(dtype) / length, None

    return Codec(
        f"tq{bits}",
        RowLayout(bits, ("float16",)),
        encode,
        decode,
        map="hadamard_unit",
        power_of_two=True,
        head_size_multiple=16,
        planes=planes_of(bits),
        triton=codec_in(__name__, f"TQ{bits}"),
        hopper=hopper_codec(__file__, f"Codebook<{bits}>", values=False, numbers=_levels, **CODEBOOKS[bits]),
        cpu=cpu_codec(operands=lambda head_size: centroids(bits, head_size), unit_length=True),
    )


def value_codec(bits: int) -> Codec:
    """Codes between the row's minimum and maximum."""
    top = 2**bits - 1

    def encode(y):
        low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
        scale = quotient(high - low, top).clamp_min(1e-8)
        codes = torch.trunc((y - low) / scale + 0.5).clamp(0, top)
        return pack(codes, bits), torch.cat([scale, low], -1).clamp(-LARGEST_HALF, LARGEST_HALF).half()

    def decode(codes, meta, dtype):
        scale, low = meta.to(dtype).split(1, -1)
        return unpack(codes, bits), scale, low

    return Codec(
        f"u{bits}",
        RowLayout(bits, ("float16", "float16")),
        encode,
        decode,
        head_size_multiple=16,
        planes=planes_of(bits),
        triton=codec_in(__name__, f"U{bits}"),
        hopper=hopper_codec(__file__, f"Uniform<{bits}>", numbers=_levels, **UNIFORM.get(bits, {})),
        cpu=cpu_codec(),
    )


KEY8 = plain_fp8("tq8", torch.float8_e4m3fn, "E4M3", scaled=False)  # no scale, not even the layer's
KEY4, KEY3, VALUE4, VALUE3 = key_codec(4), key_codec(3), value_codec(4), value_codec(3)

register(Format("tq_k8v4", KEY8, VALUE4, "e4m3 keys"), "turboquant_k8v4")
register(Format("tq4", KEY4, VALUE4, "norm-corrected"), "turboquant_4bit_nc")
register(Format("tq_k3v4", KEY3, VALUE4, "norm-corrected"), "turboquant_k3v4_nc")
register(Format("tq3", KEY3, VALUE3, "norm-corrected"), "turboquant_3bit_nc")
