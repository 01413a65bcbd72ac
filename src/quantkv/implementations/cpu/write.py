"""Writes on a CPU: rows are mapped by a compiled kernel, and encoded by one where their codec has it. The bytes are the reference's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...calls import Kept, PagedTensor, WriteCall
from ...format import Codec
from ...maps import LinearMap, rounding_of
from ..reference import write as reference
from . import sides
from .compiling import missing

ROUNDINGS = (torch.float32, torch.bfloat16, torch.float16)  # by the numbers of `rows`


def refusal(call: WriteCall) -> str | None:
    """Why a call is not for these kernels, in words; None where it is."""
    if call.key.device.type != "cpu":
        return f"key lies on {call.key.device}: CPUs only"
    if reason := missing():
        return reason
    for side, codec, map_ in _sides(call):
        if reason := sides.refusal(side, codec):
            return reason
        if map_ is not None and (map_.key_mean is not None or map_.block_signs is None):
            return "maps of Hadamard matrices with entries of +-1 and without key means only"
    if all(map_ is None and codec.cpu().encode is None for _, codec, map_ in _sides(call)):
        return f"{call.fmt.name} has neither a map nor a compiled encoder: there is nothing to gain"
    return None


def _sides(call: WriteCall) -> tuple[tuple[PagedTensor, Codec, LinearMap | None], ...]:
    return (call.k, call.fmt.k, call.maps.k), (call.v, call.fmt.v, call.maps.v)


def run(call: WriteCall) -> None:
    """Serve `call`."""
    prepare(call)(call)


def prepare(call: WriteCall) -> Callable[[WriteCall], None]:
    """What serves every call with the same slots: where rows go is kept."""
    places = Kept(_places)

    def launch(call: WriteCall) -> None:
        (kept, at), given = places.of(call), [call.key.detach(), call.value.detach()]
        if kept is not None:
            given = [t[kept] for t in given]
        (k, codec, map_), (v, *others) = _sides(call)
        if others[0] is codec and others[1] is map_ and k.scale == v.scale and given[0].shape == given[1].shape:
            encoded = _encode(torch.cat(given), codec, map_, k.scale)  # rows are encoded one by one: half the calls
            half = len(given[0])
            encoded = encoded and [[t if t is None else t[part] for t in encoded] for part in (slice(half), slice(half, None))]
        else:
            encoded = [_encode(rows, *parts, side.scale) for rows, (side, *parts) in zip(given, _sides(call))]
        if encoded is None or None in encoded:  # what is not finite has bytes, too, and the reference says which
            return reference.run(call)
        for side, (codes, meta) in zip((k, v), encoded):
            _bytes(side.codes)[at] = codes
            if meta is not None:
                side.meta.numpy()[at] = meta

    return launch


def _places(call: WriteCall) -> tuple[np.ndarray | None, tuple[np.ndarray, np.ndarray]]:
    """Which tokens are stored (None: all), and their pages and places there."""
    slots = call.slot_mapping.numpy()
    kept = np.flatnonzero(slots >= 0)
    return None if len(kept) == len(slots) else kept, np.divmod(slots[kept], call.k.codes.shape[1])


def _bytes(t: torch.Tensor) -> np.ndarray:
    return t.view(torch.uint8).numpy()


def _encode(given: torch.Tensor, codec: Codec, map_: LinearMap | None, scale: float) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Bytes of codes `[T, HK, code_bytes]` and metadata `[T, HK, fields]` of rows `[T, HK, D]`; None where a mapped one is not finite."""
    y = given.float()
    if map_ is not None:
        from .rows import map_rows

        signs, source = map_.block_signs, y.contiguous()
        dtype = given.dtype if codec.round_mapped else torch.float32
        y, size = torch.empty_like(source), len(signs)
        arguments = source.view(-1, size).numpy(), signs.numpy(), size & -size, ROUNDINGS.index(dtype), torch.finfo(dtype).max
        if not map_rows(*arguments, y.view(-1, size).numpy()):
            return None
    y = reference.divided(y, scale, codec)
    rounding, encode = rounding_of(codec, map_), codec.cpu().encode
    if rounding is not None or encode is None:
        codes, meta = codec.encode(y) if rounding is None else codec.encode_in(y, rounding)
        return _bytes(codes.contiguous()), None if meta is None else meta.numpy()
    codes = np.empty((*y.shape[:2], codec.row.code_bytes(y.shape[2])), np.uint8)
    meta = np.empty((*y.shape[:2], len(codec.row.meta)), codec.row.meta[0])
    encode()(y.view(-1, y.shape[2]).numpy(), codes.reshape(-1, codes.shape[2]), meta.reshape(-1, meta.shape[2]))
    return codes, meta
