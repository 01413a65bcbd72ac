"""2 bits by a trellis: a code of 4 bits and the one before it, 8 bits of the row, say two numbers, so that a row of 2 bits a number chooses
among many more of them than one that rounds each number, and loses a third less.

A row, mapped by a randomized Hadamard matrix, is a string of 4-bit codes, lowest bits of a byte first; every 64 dimensions a chain of
codes begins, as after a code of 0. Numbers 2 i and 2 i + 1 are `PAIRS[code[i - 1], code[i]]` times one fp16 scale a row, which is unbiased
and, for keys, has the sign that it has in `levels`. (Trellis-coded quantization: Marcellin and Fischer 1990; with a look-up of a sliding
window: QTIP, arXiv 2406.11235.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from ...format import Codec, Format, register
from ...packing import interleave, pack, unpack
from ...rounding import Rounding, root_mean_square, unbiased
from ...spec import RowLayout
from ..device import codec_in, cpu_codec, hopper_codec
from ..levels import stored_scale
from .pairs import PAIRS
from .search import CHAIN, STATES, search

WIDE = 1.1  # by a Hessian: rows are aimed at with the errors of others on top


@cache
def pairs(device: str = "cpu") -> torch.Tensor:
    """`[16, 16, 2]` float32, numbers of fp16: by the code before and the code."""
    return torch.frombuffer(bytearray(bytes.fromhex(PAIRS)), dtype=torch.float16).view(STATES, STATES, 2).float().to(device)


def words() -> torch.Tensor:
    """`[256]` int32, as decoders look them up: the two fp16 numbers of a code and of the one before it, which is the index's low half."""
    return pairs("cpu").half().transpose(0, 1).contiguous().view(torch.int32).flatten()


def _numbers(head_size: int) -> dict[str, list[int] | list[float]]:
    """What `hopper.cuh` reads."""
    return {"TRELLIS_PAIRS": [word & 0xFFFFFFFF for word in words().tolist()], "TRELLIS_WIDE": [WIDE]}


def _search(rows: torch.Tensor, rounding: Rounding | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[T, HK, D / 2]` and scales `[T, HK, 1]` of rows `[T, HK, D]`."""
    size = root_mean_square(rows) * (1.0 if rounding is None else WIDE)
    unit = rows / size
    codes, rounded = search(unit, pairs(str(rows.device)), rounding)
    weighted = unit if rounding is None else rounding.weigh(unit)
    dots = ((weighted * t).sum(-1, keepdim=True) for t in (unit, rounded))
    return codes, size * unbiased(*dots)


def _encode(
    y: torch.Tensor, rounding: Rounding | None = None, search: Callable[[], Callable] = lambda: _search
) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = search()(y.reshape(-1, 1, y.shape[-1]) if rounding is None else y, rounding)
    return pack(codes, 4).view(*y.shape[:-1], y.shape[-1] // 4), stored_scale(scale).view(*y.shape[:-1], 1)


def _decode(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype):
    code = interleave(unpack(codes, 4)).int()
    before = torch.nn.functional.pad(code[..., :-1], (1, 0))
    before[..., :: CHAIN // 2] = 0
    return pairs(str(codes.device))[before, code].flatten(-2).to(dtype), scale.to(dtype), None


def _compiled() -> Callable:
    return partial(_encode, search=codec_in(__name__, "search", "cpu"))


TRELLIS2 = Codec(
    "trellis2",
    RowLayout(2, ("float16",)),
    _encode,
    _decode,
    encode_in=_encode,
    signed=True,
    map="rht",
    head_size_multiple=16,
    triton=codec_in(__name__, "TRELLIS"),
    hopper=hopper_codec(
        __file__,
        "Trellis",
        writer=codec_in(__name__, "TrellisConfig", "hopper"),
        table_bytes=1 << 16,
        values_by_table=True,
        step=CHAIN,
        numbers=_numbers,
    ),
    cpu=cpu_codec(operands=lambda head_size: words().view(torch.float16).view(-1, 2), chain=CHAIN, encode=_compiled, encode_in=_compiled),
)
register(Format("trellis2", TRELLIS2, TRELLIS2, "2 bits by a trellis of 16 states, one scale a row"))
