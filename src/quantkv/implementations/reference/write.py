"""Rows into pages and back in plain PyTorch, on any device: what every kernel is compared with, and the CPU path."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from ...autocast import given_dtypes
from ...calls import PagedTensor, WriteCall
from ...format import Codec
from ...kept import Kept
from ...maps import LinearMap, rounding_of
from ...rounding import Rounding

LARGEST = torch.finfo(torch.float32).max
Places = tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor]]


def refusal(call: WriteCall) -> str | None:
    """Always None: the reference serves every call, anywhere."""
    return None


def run(call: WriteCall) -> None:
    """Serve `call`."""
    prepare(call)(call)


def prepare(call: WriteCall) -> Callable[[WriteCall], None]:
    """What serves every call with the same slots: where rows go is kept."""
    places = Kept(lambda call: _places(call.slot_mapping, call.k.codes.shape[1]))
    return lambda call: _write(call, places.of(call))


def _write(call: WriteCall, places: Places) -> None:
    (kept, at), (key, value), positions = places, (call.key, call.value), call.positions
    if kept is not None:
        key, value = key[kept], value[kept]
        positions = None if positions is None else positions[kept]
    k, v, fmt, maps = call.k, call.v, call.fmt, call.maps
    if fmt.k is fmt.v and maps.k is maps.v and positions is None and k.scale == v.scale and key.shape == value.shape:
        both = encode(torch.cat((key, value)), fmt.k, maps.k, None, k.scale)  # rows are encoded one by one: half the calls
        encoded = zip(*(itertools.repeat(None, 2) if t is None else t.chunk(2) for t in both))
    else:
        encoded = encode(key, fmt.k, maps.k, positions, k.scale), encode(value, fmt.v, maps.v, positions, v.scale)
    for side, (codes, meta) in zip((k, v), encoded):
        as_integers(side.codes)[at] = as_integers(codes)
        if meta is not None:
            side.meta[at] = meta


def _places(slot_mapping: torch.Tensor, block_size: int) -> Places:
    """Which tokens are stored (None: all), and their pages and places there."""
    kept = slot_mapping >= 0
    if bool(kept.all()):
        kept = None
    else:
        slot_mapping = slot_mapping[kept]
    return kept, (slot_mapping // block_size, slot_mapping % block_size)


def as_integers(t: torch.Tensor) -> torch.Tensor:
    """The same storage as integers: 8-bit floats cannot be indexed or masked everywhere."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 and t.is_floating_point() else t


def encode_mapped(codec: Codec, rows: torch.Tensor, rounding: Rounding | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and metadata of mapped rows `[T, HK, D]` float32, by the Hessian of `rounding` where there is one."""
    return codec.encode(rows) if rounding is None else codec.encode_in(rows, rounding)


def encode(
    rows: torch.Tensor,
    codec: Codec,
    map_: LinearMap | None = None,
    positions: torch.Tensor | None = None,
    scale: float = 1.0,
    apply: Callable = LinearMap.apply,
    encode_mapped: Callable = encode_mapped,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and metadata of `rows [T, HK, D]`: `codec.encode(A (rows - key_mean) / scale)`. positions: int `[T]`, for key means.
    apply, encode_mapped: what does as `LinearMap.apply` and `encode_mapped` do.

    A signed codec stores the negative of `A rows` where that is shorter than `A (rows - key_mean)`, and a negative scale."""
    y, alone = rows.detach().float(), None
    if map_ is not None:
        dtype = rows.dtype if codec.round_mapped else torch.float32
        if map_.key_mean is not None and codec.signed:
            alone = apply(map_, y, dtype).float()
        y = apply(map_, y if map_.key_mean is None else y - map_.key_mean_rows(positions), dtype).float()
    if alone is not None:
        alone_is_shorter = alone.square().sum(-1, keepdim=True) < y.square().sum(-1, keepdim=True)
        y = torch.where(alone_is_shorter, -alone, y)
    codes, meta = encode_mapped(codec, divided(y, scale, codec), rounding_of(codec, map_))
    return codes, meta if alone is None else torch.where(alone_is_shorter, -meta, meta)


def divided(rows: torch.Tensor, scale: float, codec: Codec) -> torch.Tensor:
    """Rows over a side's scale. Of finite ones nothing that is not finite is stored, where the codec's scales could be."""
    if scale == 1.0:
        return rows
    rows = rows / scale
    return rows.clamp(-LARGEST, LARGEST) if codec.row.meta else rows


def apply_map(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`matrix[h] @ rows[t, h]` for matrix `[H or 1, D, D]` and rows `[T, H, D]`, in the dtype of the rows."""
    matrix = matrix.to(rows.dtype)
    return rows @ matrix[0].mT if matrix.shape[0] == 1 else (rows.transpose(0, 1) @ matrix.mT).transpose(0, 1)


def dequantize(
    side: PagedTensor,
    codec: Codec,
    map_: LinearMap | None,
    slots: torch.Tensor,
    positions: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The rows `[T, HK, D]` that slots `[T]` hold: `A^-1 y^ + key_mean`. positions: int `[T]`, for key means."""
    return given_dtypes(side.codes, _dequantize, side, codec, map_, slots, positions, dtype)


def _dequantize(side, codec, map_, slots, positions, dtype) -> torch.Tensor:
    block_size = side.codes.shape[1]
    at = (slots // block_size, slots % block_size)
    codes = as_integers(side.codes)[at].view(side.codes.dtype)
    rows = codec.dequantize(codes, None if side.meta is None else side.meta[at], dtype) * side.scale
    if map_ is not None:
        rows = apply_map(map_.inverse, rows)
        if map_.key_mean is not None:
            rows = rows + stored_key_mean(side, codec, map_, slots, positions).to(dtype)
    return rows


def stored_key_mean(side: PagedTensor, codec: Codec, map_: LinearMap, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What belongs to the keys in slots `[T]`, at positions `[T]`, beside what is stored: `[T, HK or 1, D]`, of a map with key means."""
    key_mean, block_size = map_.key_mean_rows(positions), side.codes.shape[1]
    return key_mean * (side.meta[slots // block_size, slots % block_size][..., :1] >= 0) if codec.signed else key_mean
