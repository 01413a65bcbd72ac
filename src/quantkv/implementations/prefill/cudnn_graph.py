"""cuDNN's attention by the package of its frontend (nvidia-cudnn-frontend), which says more than torch's operators can: masks aligned to
the bottom right, windows, and sequences of any lengths. So a chunk sees its prefix and itself in one call, as with FlashAttention-3.

A plan is made for the longest sequences rounded up, as one takes tens of milliseconds; the lengths themselves are read on the device.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Hashable
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .plan import Mask, Round

PLANS = 256  # plans of a thread
KINDS = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}
OLDEST = (1, 13)  # release of the frontend whose arguments these are


class Shape(NamedTuple):
    """What a plan is made for. queries, keys: of the longest sequence, planned. rows, results: strides of a token and a head."""

    dtype: torch.dtype
    sequences: int
    queries: int
    keys: int
    heads: tuple[int, int]  # of queries, and of keys
    sizes: tuple[int, int]
    rows: tuple[int, int]
    results: tuple[int, int]
    mask: Mask
    scale: float


@cache
def package() -> ModuleType | None:
    """The frontend, None where it is not here or too old."""
    try:
        cudnn = importlib.import_module("cudnn")
        release = tuple(int(part) for part in cudnn.__version__.split(".")[:2])
    except (AttributeError, ImportError, OSError, RuntimeError, ValueError):
        return None
    return cudnn if release >= OLDEST else None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    round: Round,
    ends: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    planned: int,
    out: torch.Tensor | None,
    kept: dict[Hashable, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[M, HQ, D_V]`, in out where it is given, and log-sum-exp `[M, HQ]`. q: `[M, HQ, D]`; k, v: `[N, HK, D]`, `[N, HK, D_V]`, dense.
    ends: `round.ends()` on the device. planned: lengths are rounded up to multiples of it. kept: as of
    `backends.attend`."""
    out = q.new_empty(*q.shape[:2], v.shape[2]) if out is None else out
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    lengths = [-(-n // planned) * planned for n in round.longest]
    heads, sizes = (q.shape[1], k.shape[1]), (q.shape[2], v.shape[2])
    strides = q.stride()[:2], out.stride()[:2]
    shape = Shape(q.dtype, len(round.reads), *lengths, heads, sizes, *strides, round.mask, scale)
    rows = tuple(t.stride(0) for t in (q, k, v, out, lse))
    numbers = None if kept is None else kept.get((round, rows))
    if numbers is None:
        numbers = _numbers(ends, rows)
        if kept is not None:
            kept[round, rows] = numbers
    tensors = (q, k, v, out, lse, *numbers)
    graph, names, workspace_bytes = _kept().graph(shape, q.device)
    workspace = q.new_empty(max(workspace_bytes, 1), dtype=torch.uint8)
    graph.execute(dict(zip(names, tensors, strict=True)), workspace, handle=_kept().on_stream(q.device))
    return out, lse


def _numbers(ends: tuple[torch.Tensor, torch.Tensor, torch.Tensor], strides: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Queries and keys of each sequence, and where its rows of q, k, v, out and log-sum-exps begin; their strides are in numbers."""
    queries, keys, used = ends
    q, k, v, out, lse = strides
    by_query, by_key = queries * _column((q, out, lse), queries.device), keys * _column((k, v), keys.device)
    return queries.diff(), used, by_query[0], *by_key, *by_query[1:]


@lru_cache(maxsize=64)
def _column(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)[:, None]


class _Kept(threading.local):
    """A handle for each device, and plans, of a thread: cuDNN does not say that threads may share them."""

    def __init__(self) -> None:
        self.handles: dict[torch.device, Any] = {}
        self.graph = lru_cache(maxsize=PLANS)(lambda shape, device: build(shape, {"handle": self.on_stream(device)}))

    def on_stream(self, device: torch.device) -> Any:
        """The handle, told which stream is the present one."""
        if device not in self.handles:
            with torch.cuda.device(device):
                self.handles[device] = package().create_handle()
        package().set_stream(handle=self.handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
        return self.handles[device]


@cache
def _kept() -> _Kept:
    return _Kept()


def build(shape: Shape, target: dict[str, Any], *, plans: bool = True) -> tuple[Any, list[Any], int]:
    """A graph, its tensors in the order of `attend`, and bytes of its workspace. target: the GPU, as arguments of a graph. plans: whether
    it is to run."""
    cudnn = package()
    kind = getattr(cudnn.data_type, KINDS[shape.dtype])
    whole, number = cudnn.data_type.FLOAT, cudnn.data_type.INT32
    graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=whole, compute_data_type=whole, **target)
    s, m, n, (hq, hk), (d, dv) = shape.sequences, shape.queries, shape.keys, shape.heads, shape.sizes

    def numbers(name: str, count: int) -> Any:
        return graph.tensor(name=name, dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=number)

    def rows(name: str, dim: tuple[int, ...], token: int, head: int) -> tuple[Any, Any]:
        made = graph.tensor(name=name, dim=list(dim), stride=[dim[2] * token, head, token, 1], data_type=kind)
        offsets = numbers(f"{name} from", s + 1)
        made.set_ragged_offset(offsets)
        return made, offsets

    q, q_from = rows("queries", (s, hq, m, d), *shape.rows)
    k, k_from = rows("keys", (s, hk, n, d), hk * d, d)
    v, v_from = rows("values", (s, hk, n, dv), hk * dv, dv)
    counts = [numbers("counts of queries", s), numbers("counts of keys", s)]
    bounds = {}
    if shape.mask.left >= 0:
        bounds["diagonal_band_left_bound"] = shape.mask.left + 1  # with the key on the diagonal
    if shape.mask.right >= 0:
        bounds["diagonal_band_right_bound"] = shape.mask.right
    out, lse = graph.sdpa(
        name="attention",
        q=q,
        k=k,
        v=v,
        attn_scale=shape.scale,
        generate_stats=True,
        use_padding_mask=True,
        seq_len_q=counts[0],
        seq_len_kv=counts[1],
        diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT,
        **bounds,
    )
    out_from, lse_from = numbers("results from", s + 1), numbers("sums from", s + 1)
    token, head = shape.results
    out.set_output(True).set_dim([s, hq, m, dv]).set_stride([m * token, head, token, 1]).set_ragged_offset(out_from)
    lse.set_output(True).set_data_type(whole).set_dim([s, hq, m, 1]).set_stride([m * hq, 1, hq, 1]).set_ragged_offset(lse_from)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    if plans:
        graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
    tensors = [q, k, v, out, lse, *counts, q_from, k_from, v_from, out_from, lse_from]
    return graph, tensors, graph.get_workspace_size() if plans else 0
