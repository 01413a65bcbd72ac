"""Writes on a CPU: the reference's, with compiled maps and encoders where there are any. Rounded by a Hessian, rows cost what they do by
the reference; else their bytes are the reference's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...calls import PagedTensor, WriteCall
from ...format import Codec
from ...kept import Kept
from ...maps import LinearMap, rounding_of
from ...rounding import Rounding
from ..reference import write as reference
from . import sides
from .compiling import missing

Encoded = tuple[torch.Tensor, torch.Tensor | None]
ROUNDINGS = (torch.float32, torch.bfloat16, torch.float16)  # by the numbers of `rows`


def refusal(call: WriteCall) -> str | None:
    """Why a call is not for these kernels, in words; None where it is."""
    if call.key.device.type != "cpu":
        return f"key lies on {call.key.device}: CPUs only"
    if reason := missing():
        return reason
    for side, codec, _ in _sides(call):
        if reason := sides.refusal(side, codec):
            return reason
    if not any(_gains(codec, map_) for _, codec, map_ in _sides(call)):
        return f"{call.fmt.name} has neither a compiled map nor a compiled encoder: there is nothing to gain"
    return None


def _gains(codec: Codec, map_: LinearMap | None) -> bool:
    """Whether anything of a side's writes is compiled."""
    backend = codec.cpu()
    encoder = backend.encode if rounding_of(codec, map_) is None else backend.encode_in
    return encoder is not None or (map_ is not None and map_.block_signs is not None)


def _sides(call: WriteCall) -> tuple[tuple[PagedTensor, Codec, LinearMap | None], ...]:
    return (call.k, call.fmt.k, call.maps.k), (call.v, call.fmt.v, call.maps.v)


def run(call: WriteCall) -> None:
    """Serve `call`."""
    prepare(call)(call)


def prepare(call: WriteCall) -> Callable[[WriteCall], None]:
    """What serves every call with the same slots: where rows go is kept."""
    places = Kept(_places)

    def launch(call: WriteCall) -> None:
        (kept, at), given, positions = places.of(call), [call.key.detach(), call.value.detach()], call.positions
        if kept is not None:
            given = [t[kept] for t in given]
            positions = None if positions is None else positions[kept]
        (k, codec, map_), (v, *others) = _sides(call)
        alike = others[0] is codec and others[1] is map_ and (map_ is None or map_.key_mean is None)
        if alike and k.scale == v.scale and given[0].shape == given[1].shape:
            both = _encode(torch.cat(given), codec, map_, None, k.scale)  # rows are encoded one by one: half the calls
            encoded = zip(*((None, None) if t is None else t.chunk(2) for t in both))
        else:
            encoded = [_encode(rows, *parts, positions, side.scale) for rows, (side, *parts) in zip(given, _sides(call))]
        for side, (codes, meta) in zip((k, v), encoded):
            _bytes(side.codes)[at] = _bytes(codes)
            if meta is not None:
                side.meta.numpy()[at] = meta.numpy()

    return launch


def _places(call: WriteCall) -> tuple[np.ndarray | None, tuple[np.ndarray, np.ndarray]]:
    """Which tokens are stored (None: all), and their pages and places there."""
    slots = call.slot_mapping.numpy()
    kept = np.flatnonzero(slots >= 0)
    return None if len(kept) == len(slots) else kept, np.divmod(slots[kept], call.k.codes.shape[1])


def _bytes(t: torch.Tensor) -> np.ndarray:
    return (t if t.dtype is torch.uint8 else t.view(torch.uint8)).numpy()


def _encode(rows: torch.Tensor, codec: Codec, map_: LinearMap | None, positions: torch.Tensor | None, scale: float) -> Encoded:
    """Codes `[T, HK, code bytes]` and metadata `[T, HK, fields]` of rows `[T, HK, D]`."""
    return reference.encode(rows, codec, map_, positions, scale, _map, _encode_mapped)


def _map(map_: LinearMap, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`LinearMap.apply`, of float32 numbers that are numbers of dtype."""
    signs = map_.block_signs
    if signs is None:
        return map_.apply(rows, dtype)
    from .rows import map_rows

    source, size = rows.contiguous(), len(signs)
    mapped = torch.empty_like(source)
    arguments = source.view(-1, size).numpy(), signs.numpy(), size & -size, ROUNDINGS.index(dtype), torch.finfo(dtype).max
    return mapped if map_rows(*arguments, mapped.view(-1, size).numpy()) else map_.apply(rows, dtype)


def _encode_mapped(codec: Codec, rows: torch.Tensor, rounding: Rounding | None) -> Encoded:
    backend = codec.cpu()
    if rounding is None:
        return (backend.encode() if backend.encode else codec.encode)(rows)
    return (backend.encode_in() if backend.encode_in else codec.encode_in)(rows, rounding)
