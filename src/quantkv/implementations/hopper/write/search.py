"""Rows whose codes are searched for, on Hopper: what the kernel is compiled for, and a metric in the order in which it is read."""

from __future__ import annotations

from ctypes import sizeof
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ....rounding import Rounding
from ..host import launch
from ..host.launch import Kernel
from ..host.nvrtc import compile_cubin
from ..host.operands import kept, tiles

if TYPE_CHECKING:
    from . import WriteConfig

SOURCE = Path(__file__).with_name("search.cu")
ROWS = 8  # of a block: a warp each
CHAIN, BLOCK = 64, 8  # dimensions that hang together, and that one product feeds


def metric_bytes(head_size: int) -> int:
    """Of one head, as weighed.cuh lays it out."""
    inside = (CHAIN // BLOCK) ** 2 // 4 * 256
    return 4 * head_size**2 + head_size // CHAIN * inside + head_size // BLOCK * BLOCK * (BLOCK + 1) * 4


def metric_of(rounding: Rounding) -> torch.Tensor:
    """uint8 `[HK or 1, metric_bytes]`, kept as long as the rounding."""
    return kept(rounding.feedback, "searched", lambda: _laid_out(rounding))


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
    parts = (tiles(rounding.metric, None)[0].flatten(1), (between * unit).flatten(1), torch.cat(inside, 1), torch.cat(blocks, 1).float())
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


@dataclass(frozen=True)
class SearchConfig:
    """What one compiled kernel is made for. rows: of the sides that it writes. metric: errors cost by one."""

    rows: WriteConfig
    metric: bool

    @staticmethod
    def of(rows: WriteConfig, metric: bool) -> SearchConfig:
        """The configuration for rows of a write's, in a metric or plainly."""
        return SearchConfig(replace(rows, warps=ROWS), metric)

    @property
    def shared_bytes(self) -> int:
        """Of `Block` in search.cu."""
        return 1088 + 34 * self.rows.head_size + (29184 + 96 * self.rows.head_size if self.metric else 6144)

    def macros(self) -> dict[str, object]:
        """What the kernel is compiled with: the numbers that host and device share."""
        return self.rows.macros() | {
            "ARGUMENT_BYTES": sizeof(launch.arguments("RoundArguments")),
            "METRIC": int(self.metric),
            "HOST_METRIC_BYTES": metric_bytes(self.rows.head_size),
            "SHARED_BYTES": self.shared_bytes,
        }

    def cubin(self) -> bytes:
        """Compiled, once."""
        return compile_cubin(SOURCE, self.macros(), (codec.hopper().source for codec in (self.rows.key, self.rows.value)))


@cache
def kernel(config: SearchConfig, index: int) -> Kernel:
    """The kernel of a configuration on a device, compiled and loaded once."""
    return Kernel(launch.load(config.cubin(), index), "search_kernel", 32 * ROWS, config.shared_bytes, index)
