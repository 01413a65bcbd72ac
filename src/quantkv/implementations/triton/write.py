"""Writes by the Triton kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ...calls import WriteCall
from ...format import Codec
from ...maps import LinearMap, rounding_of

try:
    import triton
except ImportError:  # `refusal` says so
    triton = None
else:
    from . import launch
    from .kernels.write import write_kernel
    from .launch import Target

PLACES = (
    "key.ptr", "value.ptr", "k_pages.words", "k_pages.meta", "v_pages.words", "v_pages.meta",
    "k_map.matrix", "k_map.key_mean", "k_map.feedback", "k_map.gain", "v_map.matrix", "v_map.feedback", "v_map.gain",
    "slot_mapping", "positions",
)  # fmt: skip


def refusal(call: WriteCall) -> str | None:
    """Why `run` does not serve a call; None where it does."""
    if triton is None:
        return "the package triton is missing: pip install 'quantkv[triton]'"
    for codec, map_ in ((call.fmt.k, call.maps.k), (call.fmt.v, call.maps.v)):
        if rounding_of(codec, map_) is not None and codec.cubic is None:
            return f"maps: a Hessian, and {codec.name} has no Triton kernel that rounds by one"
    return launch.refusal(call.key.device, ((call.k, call.fmt.k), (call.v, call.fmt.v)), stored=True)


def run(call: WriteCall) -> None:
    """Serve `call`."""
    if call.key.shape[0]:
        with launch.on_device(call.key.device):
            _launch_of(call)()


def prepare(call: WriteCall) -> Callable[[WriteCall], None]:
    """What serves every call of the same shape. The first launch compiles."""
    if call.key.shape[0] == 0:
        return run
    device = call.key.device
    launches: list[launch.Launch] = []

    def serve(call: WriteCall) -> None:
        with launch.on_device(device):
            if launches and launches[0].again(_tensors(call), device.index):
                return
            again = _launch_of(call)
            again()
            launches[:] = [again]

    return serve


def _tensors(call: WriteCall) -> tuple[torch.Tensor | None, ...]:
    """What stands at PLACES."""
    k_map, v_map = call.maps.k, call.maps.v
    return (
        launch.dense_rows(call.key),
        launch.dense_rows(call.value),
        call.k.codes,
        call.k.meta,
        call.v.codes,
        call.v.meta,
        None if k_map is None else k_map.operands.forward,
        None if k_map is None else launch.dense_rows(k_map.key_mean),
        *_rounding(call.fmt.k, k_map),
        None if v_map is None else v_map.operands.forward,
        *_rounding(call.fmt.v, v_map),
        launch.dense(call.slot_mapping),
        launch.dense(call.positions),
    )


def _rounding(codec: Codec, map_: LinearMap | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Feedback and gain."""
    rounding = rounding_of(codec, map_)
    return (None, None) if rounding is None else (rounding.feedback, rounding.gain)


def _launch_of(call: WriteCall) -> launch.Launch:
    target = Target.of(call.key.device)
    tokens, heads, head_size = call.key.shape
    key, value, *_, k_matrix, k_key_mean, _, _, v_matrix, _, _, slot_mapping, positions = _tensors(call)
    sides = ((call.fmt.k, key, call.maps.k, call.k), (call.fmt.v, value, call.maps.v, call.v))
    views = [launch.pages(side, codec, rows.shape[2], stored=True) for codec, rows, _, side in sides]
    plans = [launch.row_plan(codec, rows.shape[2], map_, side.scale, view, target) for (codec, rows, map_, side), view in zip(sides, views)]
    roundings = [rounding_of(codec, map_) for codec, _, map_, _ in sides]
    plans = [plan if r is None else replace(plan, cubic=codec.cubic) for plan, r, (codec, *_) in zip(plans, roundings, sides)]
    mapped = call.maps.k is not None or call.maps.v is not None
    block_t, num_warps = write_tile(tokens * heads, max(head_size, value.shape[2]), mapped, roundings != [None, None], target)
    arguments = {
        "key": launch.rows_view(key),
        "value": launch.rows_view(value),
        "k_pages": views[0],
        "v_pages": views[1],
        "k_map": launch.map_view(k_matrix, k_key_mean, roundings[0]),
        "v_map": launch.map_view(v_matrix, None, roundings[1]),
        "slot_mapping": slot_mapping,
        "positions": positions,
        "num_tokens": tokens,
        **{f"{n}_factor": 1.0 if m is None else m.operands.forward_factor for n, m in (("k", call.maps.k), ("v", call.maps.v))},
        "k_scale": call.k.scale,
        "v_scale": call.v.scale,
        "PAGE": call.k.codes.shape[1],
        "BLOCK_T": block_t,
        "K": plans[0],
        "V": plans[1],
        "PRECISION": target.precision,
    }
    options = {"num_warps": num_warps, "enable_fp_fusion": False}  # a fused multiply-add rounds other bits
    return launch.Launch(write_kernel, (triton.cdiv(tokens, block_t), heads, 2), arguments, options, PLACES)


def write_tile(rows: int, head_size: int, mapped: bool, rounded: bool, target: Target) -> tuple[int, int]:
    """Tokens of a tile, and warps. A map is a dot, which takes 16 rows or more; rounding by a Hessian holds each of them four times."""
    if rounded:
        return 16, 4 if head_size <= 128 else 8
    if rows <= 64 * target.processors:
        return 16 if mapped else 4, 4
    return (64, 4) if head_size <= 128 else (32, 4)
