"""2 to 8 bits: the row, mapped by a randomized Hadamard matrix, is about Gaussian; each number becomes the nearest of 2^bits levels of
N(0, 1) times one fp16 scale a row.

`level(code) = t (a + b t^2)` with `t = code - (2^bits - 1) / 2`: an odd cubic, so that a decoder needs no table. a and b make the mean
squared error of N(0, 1) least: it is that of the best quantizer (Lloyd-Max) at 2 bits, and 0.2, 2, 6 and 11 % more at 3, 4, 5 and 6.

The scale is such that row and rounded row have the product that the row has with itself (RaBitQ's estimator, arXiv 2405.12497): a key
that matches a query is not scored too low. With a Hessian, codes are rounded in it (`rounding.py`), to the same bytes.

A key may be stored without its map's key mean: then its codes are those of the row's negative, and the scale is negative too, so that
`scale * level` is the row in either case, and the sign says whether the key mean belongs to it.
"""

from __future__ import annotations

from functools import cache, partial

import torch

from ...format import Codec, Format, register
from ...packing import pack, planes_of, unpack
from ...rounding import Rounding, root_mean_square, round_to_levels, unbiased
from ...spec import RowLayout
from ..device import codec_in, cpu_codec, hopper_codec
from ..int8 import LARGEST_HALF

SMALLEST_HALF = 2.0**-24
CUBICS = {  # bits: (a, b)
    2: (0.8928868433, 0.0506925426),
    3: (0.4714552328, 0.0115848438),
    4: (0.2405073340, 0.00209752915),
    5: (0.1218273482, 0.00033675956),
    6: (0.0617059981, 5.08610267e-05),
    8: (0.0158595491, 1.05207584e-06),
}


@cache
def levels(bits: int) -> torch.Tensor:
    """The levels `[2**bits]` float32, rising: numbers of fp16, which decoders may hold them in."""
    a, b = CUBICS[bits]
    t = torch.arange(2**bits, dtype=torch.float64, device="cpu") - (2**bits - 1) / 2
    return (t * (a + b * t * t)).half().float()


@cache
def boundaries(bits: int) -> torch.Tensor:
    """Halfway between the levels: `[2**bits - 1]` float32."""
    table = levels(bits)
    return (table[1:] + table[:-1]) / 2


def table_of(bits: int, head_size: int) -> torch.Tensor:
    """The levels, then the boundaries: what kernels write by. They are the same for every head size."""
    return torch.cat([levels(bits), boundaries(bits)])


READS = {  # of `hopper.cuh`, how keys lie in registers
    2: {"table_bytes": 1 << 16, "integers": True},
    3: {"table_bytes": 1 << 13},
    4: {"table_bytes": 1 << 16, "latents": True},
    5: {"half": 16},
    6: {"half": 16},
    8: {"half": 2},
}


def _numbers(head_size: int) -> dict[str, tuple[float, ...]]:
    """What `hopper.cuh` reads."""
    from .arithmetic import cubic

    return {f"CUBIC_{bits}": (*cubic(bits), *CUBICS[bits]) for bits in CUBICS}


def stored_scale(scale: torch.Tensor) -> torch.Tensor:
    """As fp16; never zero, so that it has a sign."""
    return scale.clamp(SMALLEST_HALF, LARGEST_HALF).half()


def codec(bits: int) -> Codec:
    """Rows of K or V."""

    def encode(y):
        table = levels(bits).to(y.device)
        size = root_mean_square(y)
        unit = y / size
        codes = torch.bucketize(unit.contiguous(), boundaries(bits).to(y.device))
        scale = size * unbiased(unit.square().sum(-1, keepdim=True), (unit * table[codes]).sum(-1, keepdim=True))
        return pack(codes, bits), stored_scale(scale)

    def encode_in(y, rounding: Rounding, round_to_levels=round_to_levels):
        codes, scale = round_to_levels(y, rounding, levels(bits).to(y.device))
        return pack(codes, bits), stored_scale(scale)

    def compiled_encode_in():
        return partial(encode_in, round_to_levels=codec_in(__name__, "round_to_levels", "cpu")())

    def decode(codes, scale, dtype):
        values = codes if bits == 8 else unpack(codes, bits)
        return levels(bits).to(codes.device, dtype)[values.int()], scale.to(dtype), None

    return Codec(
        f"levels{bits}",
        RowLayout(bits, ("float16",)),
        encode,
        decode,
        encode_in=encode_in,
        cubic=CUBICS[bits],
        signed=True,
        map="rht",
        head_size_multiple=8,
        planes=planes_of(bits),
        triton=codec_in(__name__, f"LEVELS{bits}"),
        hopper=hopper_codec(__file__, f"Levels<{bits}>", numbers=_numbers, **READS[bits]),
        cpu=cpu_codec(operands=lambda head_size: levels(bits), encode_in=compiled_encode_in),
    )


for _bits in CUBICS:
    _codec = codec(_bits)
    register(Format(_codec.name, _codec, _codec, "nearest levels of a Gaussian, one scale a row"))
