"""Linear maps and key means in the order in which the decode kernel reads them, kept as long as the map lives."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ....maps import LinearMap, MapOperands
from ..codec import HopperCodec

T = TypeVar("T")
_KEPT = WeakTensorKeyDictionary()


def kept(tensor: torch.Tensor, use: Hashable, make: Callable[[], T]) -> T:
    """What `make` returned the first time, as long as the tensor lives."""
    known = _KEPT.setdefault(tensor, {})
    if use not in known:
        known[use] = make()
    return known[use]


@dataclass(frozen=True)
class KernelMap:
    """A linear map as the kernels read it, times `gain`."""

    kind: str  # NO_MAP, HADAMARD, EVENED, MATRIX
    data: torch.Tensor | None
    gain: float

    @staticmethod
    def hadamard(operands: MapOperands) -> KernelMap:
        """`H diag(d)` for queries, `diag(d) H` for outputs, H in blocks (`MapOperands.diagonal`). Data: the sign bits [1, D] of signs,
        None where none is set; of steps powers of two up to 1 with their signs, [HK or 1, D] bfloat16."""
        if operands.signs is None:
            largest = operands.diagonal.abs().max().item()
            return KernelMap("EVENED", (operands.diagonal / largest).bfloat16(), largest * operands.inverse_factor)
        bits = operands.diagonal.to(torch.bfloat16).view(torch.int16) & -0x8000
        return KernelMap("HADAMARD", bits if bool(bits.any()) else None, operands.inverse_factor)

    @staticmethod
    def matrix(matrix: torch.Tensor, key: HopperCodec | None = None) -> KernelMap:
        """`matrix` [HK or 1, D, D]. A key map's rows and columns come in the order in which keys of codec `key` are unpacked;
        a value map (None) keeps its own."""
        if key is not None:
            extra = key.dimensions(matrix.shape[-1]) - matrix.shape[-1]  # of no key
            matrix = torch.nn.functional.pad(matrix, (0, extra, 0, extra))
            matrix = matrix[:, key_order(key, matrix.shape[-1]).flatten().to(matrix.device)]
        return KernelMap("MATRIX", *tiles(matrix, key))

    @property
    def address(self) -> int | None:
        """Address of its matrices, or of what stands beside Hadamard matrices; None where nothing does."""
        return None if self.data is None else self.data.data_ptr()

    @property
    def head_stride(self) -> int:
        """Numbers from what one head has to the next; 0 where all heads share one."""
        return self.data.stride(0) if self.data is not None and self.data.shape[0] > 1 else 0


HADAMARDS = ("HADAMARD", "EVENED")  # kinds of maps that are Hadamard matrices and a diagonal
NO_MAP = KernelMap("NO_MAP", None, 1.0)


@dataclass(frozen=True)
class KernelKeyMeans:
    """The rows of a table of key means as the kernels read them, times `gain`: groups of 16, the last of them all copies of the last
    row."""

    data: torch.Tensor
    groups: int
    gain: float

    @staticmethod
    def of(mapped: torch.Tensor, key: HopperCodec) -> KernelKeyMeans:
        """`mapped` [buckets, HK or 1, D]: A times the key means, for keys of codec `key`."""
        buckets, _, head_size = mapped.shape
        groups, D = -(-buckets // 16) + 1, key.dimensions(head_size)
        rows = mapped[torch.arange(16 * groups, device=mapped.device).clamp_max(buckets - 1)].transpose(0, 1)
        rows = torch.nn.functional.pad(rows, (0, D - head_size))
        rows[..., key_order(key, D)[1::2].flatten().to(rows.device)] *= key.odd_unit  # by which the query was divided
        data, gain = tiles(rows, key)
        return KernelKeyMeans(data, groups, gain)

    @property
    def head_stride(self) -> int:
        """Numbers from one head's table to the next; 0 where all heads share one."""
        return self.data.stride(0) if self.data.shape[0] > 1 else 0


def key_order(key: HopperCodec, dimensions: int) -> torch.Tensor:
    """[D / 8, 4, 2] with D `dimensions`, those of unpacked keys: the dimension in register j of lane c, low and high half."""
    half, (j, lane, which) = key.half, (torch.arange(n, device="cpu") for n in (dimensions // 8, 4, 2))
    first = j // half * 2 * half + j % half  # key_dim(j) in lanes.cuh
    return first.view(-1, 1, 1) + lane.view(4, 1) * (dimensions // 4) + which * half


def tiles(matrix: torch.Tensor, key: HopperCodec | None) -> tuple[torch.Tensor, float]:
    """`matrix` [H, 16 n, D] as fp16 [H, n, W / 32, 2, 8, 4, 8], in the order in which `multiply` loads it, W the next multiple of 32 with
    zeros behind D, and the power of two that was taken out so that the largest entry is at most 1. Columns in the order of keys of
    codec `key`, or their own."""
    size = matrix.shape[-1]
    D = -(-size // 32) * 32
    matrix = torch.nn.functional.pad(matrix, (0, D - size))
    if key is not None:
        order = torch.cat([key_order(key, size), torch.arange(size, D, device="cpu").view(-1, 4, 2)])
        matrix = matrix[..., order.view(D // 32, 4, 4, 2).transpose(1, 2).flatten().to(matrix.device)]
    gain = 2.0 ** math.ceil(math.log2(max(matrix.abs().max().item(), 2.0**-100)))
    return (matrix / gain).half().unflatten(-1, (D // 32, 4, 8)).unflatten(1, (-1, 2, 8)).permute(0, 1, 4, 2, 3, 5, 6).contiguous(), gain


def kind(map_: LinearMap | None) -> str:
    """What the kernels are compiled for."""
    if map_ is None:
        return "NO_MAP"
    operands = map_.operands
    return "HADAMARD" if operands.signs is not None else "MATRIX" if operands.diagonal is None else "EVENED"


def map_of(map_: LinearMap | None, key: HopperCodec | None) -> KernelMap | None:
    """The inverse of a layer's map: for queries of keys of codec `key`, or for outputs (None)."""
    if map_ is None:
        return None
    operands = map_.operands
    if kind(map_) in HADAMARDS:
        return kept(map_.inverse, "hadamard", lambda: KernelMap.hadamard(operands))
    return kept(map_.inverse, key, lambda: KernelMap.matrix(map_.inverse if key is None else map_.inverse.mT, key))


def key_means_of(map_: LinearMap | None, key: HopperCodec) -> KernelKeyMeans | None:
    """A map's key means as the kernel reads them, kept with the map; None where it has none."""
    if map_ is None or map_.key_mean is None:
        return None
    table = map_.operands.mapped_key_mean
    return kept(table, key, lambda: KernelKeyMeans.of(table, key))
