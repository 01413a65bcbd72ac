"""The kernel that writes trellis-coded rows on Hopper: what it is compiled for, and a Hessian in the order in which it is read."""

from __future__ import annotations

from ctypes import sizeof
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...implementations.hopper.host import launch
from ...implementations.hopper.host.operands import kept, tiles
from ...implementations.hopper.write import WriteConfig
from ...rounding import Rounding

SOURCE = Path(__file__).with_name("trellis.cu")
ROWS = 8  # of a block: a warp each
CHAIN, BLOCK = 64, 8  # dimensions that hang together, and that one product feeds


def hessian_bytes(head_size: int) -> int:
    """Bytes of one head's Hessian, as viterbi_hessian.cuh lays it out."""
    inside = (CHAIN // BLOCK) ** 2 // 4 * 256
    return 4 * head_size**2 + head_size // CHAIN * inside + head_size // BLOCK * BLOCK * (BLOCK + 1) * 4


def _laid_out(rounding: Rounding) -> torch.Tensor:
    feedback, size = rounding.feedback, rounding.feedback.shape[-1]
    chain = torch.arange(size, device=feedback.device) // CHAIN
    between, unit = tiles(feedback * (chain[:, None] != chain), None)
    lane, register, half = (torch.arange(n, device=feedback.device) for n in (32, 2, 2))
    target = (lane // 4)[:, None, None]
    source = (2 * (lane % 4))[:, None, None] + 8 * register[:, None] + half  # [32, 2, 2]
    inside, blocks = [], []
    gain = rounding.gain / rounding.gain.amax(-1, keepdim=True)
    for start in range(0, size, CHAIN):
        for block in range(CHAIN // BLOCK):
            first = BLOCK * block
            for k in range((block + 1) // 2):
                fed = feedback[:, start + first + target, start + 16 * k + source] * (16 * k + source < first)
                inside.append(fed.half().flatten(1))
    for first in range(0, size, BLOCK):
        some = slice(first, first + BLOCK)
        blocks += [feedback[:, some, some].mT.flatten(1), gain[:, some]]
    parts = (tiles(rounding.hessian, None)[0].flatten(1), (between * unit).flatten(1), torch.cat(inside, 1), torch.cat(blocks, 1).float())
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


@dataclass(frozen=True)
class TrellisConfig:
    """What one compiled kernel is made for. rows: of the sides that it writes. hessian: errors cost by one."""

    rows: WriteConfig
    hessian: bool
    source = SOURCE
    tokens_of_block = ROWS
    threads = 32 * ROWS

    @staticmethod
    def of(rows: WriteConfig, hessian: bool, count: int = 0) -> TrellisConfig:
        """For rows of a write, any number of them."""
        return TrellisConfig(replace(rows, warps=ROWS), hessian)

    @staticmethod
    def feedback_of(rounding: Rounding) -> torch.Tensor:
        """uint8 `[HK or 1, hessian_bytes]`, kept as long as the rounding."""
        return kept(rounding.feedback, "trellis", lambda: _laid_out(rounding))

    @property
    def shared_bytes(self) -> int:
        """Size of `Block` in trellis.cu."""
        return 1088 + 34 * self.rows.head_size + (29184 + 96 * self.rows.head_size if self.hessian else 6144)

    def macros(self) -> dict[str, object]:
        """What the kernel is compiled with: the numbers that host and device share."""
        return self.rows.macros() | {
            "ARGUMENT_BYTES": sizeof(launch.arguments("RoundArguments")),
            "HESSIAN": int(self.hessian),
            "HOST_HESSIAN_BYTES": hessian_bytes(self.rows.head_size),
            "SHARED_BYTES": self.shared_bytes,
        }

    def cubin(self) -> bytes:
        """Compiled, once."""
        return self.rows.compiled(self)
