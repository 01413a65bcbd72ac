"""Rounding by a Hessian on Hopper: what its kernel is compiled for, and the Hessian in the order in which it is read."""

from __future__ import annotations

from ctypes import sizeof
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ....rounding import CANDIDATES, Rounding
from ..codec import literal
from ..host import launch
from ..host.operands import kept
from .of_rows import OfRows

if TYPE_CHECKING:
    from . import WriteConfig

SOURCE = Path(__file__).with_name("round.cu")
BLOCK = 16  # dimensions that a lane rounds on its own
WARPS = {64: (4, 3), 128: (4, 3), 256: (6, 1)}  # of a block, and blocks of an SM, by head size: so that memory and registers suffice
FEW = 2048  # rows of K up to which a block is one warp: there are fewer warps than an SM has places


def feedback_bytes(head_size: int) -> int:
    """Feedback of one head: products of 16 x 16 in fp16, then a block's gains and its own feedback in float32."""
    blocks = head_size // BLOCK
    return blocks * (blocks + 1) // 2 * BLOCK * BLOCK * 2 + blocks * BLOCK * (BLOCK + 1) // 2 * 4


def rounding_bytes(head_size: int) -> int:
    """Shared memory that a warp rounds in: levels in fp16 of 32 lanes, products in float32 of 8 rows."""
    return 32 * 2 * head_size + 8 * 4 * head_size


def _laid_out(rounding: Rounding) -> torch.Tensor:
    """For block j, steps 0 to j: what dimensions 16 i on feed to those of the block, negated; the last with ones on its diagonal."""
    device, size = rounding.feedback.device, rounding.feedback.shape[-1]
    feedback = rounding.feedback.half()
    whole = -(feedback + torch.eye(size, dtype=torch.float16, device=device))
    lane, register, half = (torch.arange(n, device=device) for n in (32, 4, 2))
    g, c = lane // 4, lane % 4
    target = (4 * (g // 2) + g % 2)[:, None, None] + 2 * (register // 2)[:, None]  # of the block's dimensions; [32, 4, 1]
    source = 2 * c[:, None, None] + 8 * (register % 2)[:, None] + half  # [32, 4, 2]
    steps, coefficients = [], []
    gain = rounding.gain / rounding.gain.amax(-1, keepdim=True)
    for j in range(size // BLOCK):
        steps += [whole[:, BLOCK * j + target, BLOCK * i + source].flatten(1) for i in range(j + 1)]
        own = -feedback[:, BLOCK * j : BLOCK * (j + 1), BLOCK * j : BLOCK * (j + 1)].float()
        for i in range(BLOCK):
            coefficients += [gain[:, BLOCK * j + i, None], own[:, i + 1 :, i]]
    return torch.cat([torch.cat(steps, 1).contiguous().view(torch.uint8), torch.cat(coefficients, 1).contiguous().view(torch.uint8)], 1)


@cache
def numbers_of(cubic: tuple[float, float], bits: int) -> dict[str, list[float]]:
    """What `Odd` in rounded.cuh takes. Boundary s, counted from the middle, is s (p + b s^2); its inverse is fitted at the boundaries."""
    (a, b), half, steps = cubic, 2 ** (bits - 1), 2**bits - 1
    middle, p = steps / 2, a + 0.75 * b
    s = torch.arange(1, half, dtype=torch.float64, device="cpu")
    boundary = s * (p + b * s * s)
    terms = {2: 1, 3: 3}.get(bits, 5)
    place = torch.linalg.lstsq(torch.stack([boundary ** (2 * k + 1) for k in range(terms)], 1), s[:, None]).solution[:, 0]
    return {
        "LEVEL": [-a * middle - b * middle**3, a + 3 * b * middle**2, -3 * b * middle, b],
        "PLACE": (place if bits > 4 else place / steps).tolist(),
        "REFINE": [middle * (a + b * middle**2), p, b, 1 / steps],
    }


@dataclass(frozen=True)
class RoundConfig(OfRows):
    """What one compiled kernel is made for. rows: of the sides that it writes; their codecs have a `cubic`."""

    rows: WriteConfig
    source = SOURCE

    @staticmethod
    def of(rows: WriteConfig, hessian: bool, count: int) -> RoundConfig:
        """For `count` rows of K, whose errors cost by a Hessian."""
        return RoundConfig(replace(rows, warps=1 if count <= FEW else WARPS[rows.head_size][0]))

    @staticmethod
    def feedback_of(rounding: Rounding) -> torch.Tensor:
        """uint8 `[HK or 1, feedback_bytes]` as rounded.cuh reads it, kept as long as the rounding."""
        return kept(rounding.feedback, "rounded", lambda: _laid_out(rounding))

    @property
    def resident(self) -> int:
        """Blocks of an SM."""
        return 1 if self.rows.warps == 1 else WARPS[self.rows.head_size][1]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the Hessian's feedback, and each warp's rows."""
        return feedback_bytes(self.rows.head_size) + self.rows.warps * rounding_bytes(self.rows.head_size)

    def macros(self) -> dict[str, object]:
        """What the kernel is compiled with: the numbers that host and device share."""
        rows = self.rows
        macros = rows.macros() | {
            "ARGUMENT_BYTES": sizeof(launch.arguments("RoundArguments")),
            "HOST_FEEDBACK_BYTES": feedback_bytes(rows.head_size),
            "HOST_ROUNDING_BYTES": rounding_bytes(rows.head_size),
            "CANDIDATES": ", ".join(map(literal, CANDIDATES)),
            "RESIDENT": self.resident,
            "SAME_LEVELS": int((rows.key.cubic, rows.key.row) == (rows.value.cubic, rows.value.row)),
        }
        for name, codec in (("KEY", rows.key), ("VALUE", rows.value)):
            if codec.cubic is not None:
                numbers = numbers_of(codec.cubic, codec.row.code_bits)
                macros |= {f"{name}_{part}": ", ".join(map(literal, values)) for part, values in numbers.items()}
        return macros
