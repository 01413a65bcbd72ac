"""What the kernels are told of a side of a cache: addresses, strides and traits, as numbers; and its map, as one matrix."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from ... import maps
from ...calls import PagedTensor
from ...format import Codec
from ...maps import LinearMap
from ...packing import planes_of


class Description(NamedTuple):
    """numbers: int64, by the names in `kernels`. operands: the memory that one of them is the address of."""

    numbers: np.ndarray
    operands: torch.Tensor | None

    def of(self, side: PagedTensor) -> np.ndarray:
        """The same, of another side of the same shape."""
        from .kernels import CODES, META

        numbers = self.numbers.copy()
        numbers[CODES] = side.codes.data_ptr()
        numbers[META] = 0 if side.meta is None else side.meta.data_ptr()
        return numbers


def refusal(side: PagedTensor, codec: Codec) -> str | None:
    """Why the kernels cannot read or write a side, in words."""
    if codec.cpu is None:
        return f"{codec.name} has no codec for CPUs"
    if any(t is not None and t.shape[-1] > 1 and t.stride(-1) != 1 for t in (side.codes, side.meta)):
        return "codes and metadata of a row must be dense"
    return None


def described(side: PagedTensor, codec: Codec) -> Description:
    """Everything but the addresses."""
    from . import kernels

    backend, bits, numbers = codec.cpu(), codec.row.code_bits, np.zeros(kernels.NUMBERS, np.int64)
    size = codec.head_size(side.codes)
    operands = _operands(codec, size)
    planes = planes_of(bits) if bits < 8 else 1
    strides = (kernels.PAGE, kernels.TOKEN, kernels.HEAD), (kernels.META_PAGE, kernels.META_TOKEN, kernels.META_HEAD)
    for names, t in zip(strides, (side.codes, side.meta)):
        if t is not None:
            numbers[list(names)] = [n * t.dtype.itemsize for n in t.stride()[:3]]
    traits = {
        kernels.SIZE: size,
        kernels.BITS: bits,
        kernels.PLANES: planes,
        kernels.WORD_BYTES: bits * planes // 8,
        kernels.OPERANDS: 0 if operands is None else operands.data_ptr(),
        kernels.SIGN: 128 if codec.code_dtype == torch.int8 else 0,
        kernels.FIELDS: len(codec.row.meta),
        kernels.HALVES: _every(torch.float16).data_ptr() if "float16" in codec.row.meta else 0,
        kernels.ZERO_POINT: backend.zero_point_bits,
        kernels.UNIT_LENGTH: backend.unit_length,
        kernels.SIGNED: codec.signed,
        kernels.CHAIN: backend.chain,
        kernels.HEADS: side.codes.shape[2],
        kernels.BUCKET_BITS: (maps.KEY_MEAN_BUCKET - 1).bit_length(),  # position >> bits: the row of a table of key means
    }
    for name, number in traits.items():
        numbers[name] = number
    return Description(numbers, operands)


@cache
def _every(dtype: torch.dtype) -> torch.Tensor:
    """What each bit pattern of a float of 8 or 16 bits stands for, float32."""
    integer = torch.uint8 if dtype.itemsize == 1 else torch.int16
    patterns = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32, device="cpu").to(integer)
    return patterns.view(dtype).float()


@cache
def _operands(codec: Codec, head_size: int) -> torch.Tensor | None:
    """The operand of each code, float32; None where the kernels turn the code itself into a number."""
    backend, bits, dtype = codec.cpu(), codec.row.code_bits, codec.code_dtype
    if backend.operands is not None:
        return backend.operands(head_size).float().contiguous()
    if dtype.is_floating_point:
        return None if dtype == torch.float32 else _every(dtype)
    return None if bits in (4, 8) else torch.arange(2.0**bits, device="cpu")


def query_matrix(map_: LinearMap | None, planes: int, scale: float) -> torch.Tensor | None:
    """What queries are multiplied with before they meet keys, `[HK or 1, D, D]` float32: the map, their order in planes, the scale.
    None: the scale alone is left to do."""
    if map_ is None:
        return None
    matrix = (map_.inverse.double() * scale).float()
    return matrix.unflatten(-1, (-1, planes)).mT.flatten(-2).contiguous()


def output_matrix(map_: LinearMap | None, planes: int, scale: float) -> torch.Tensor | None:
    """What sums of values, in planes, are multiplied with: `[HK or 1, D_V, D_V]` float32. None: order and scale are left to do."""
    matrix = query_matrix(map_, planes, scale)
    return None if matrix is None else matrix.mT.contiguous()
