"""What quantkv's kernels are compared with on a CPU: PyTorch over 16-bit rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from .contestants import Contestant
from .problem import Entry, Problem

STORES = torch.bfloat16  # of a problem's rows, as they are
DENSE = "dense cache"


def rivals() -> list[Contestant]:
    """One for every kind of shape."""
    return [
        Contestant("SDPA", "bf16", _attend, kinds=("decode", "verify", "step", "prefill")),
        Contestant("index_copy_", "bf16", _write, kinds=("write",)),
    ]


def _attend(problem: Problem) -> Entry:
    """PyTorch's attention over a dense cache `[B, HK, L, D]`. The query heads of a kv head are queries of it: nothing is repeated."""
    s, device = problem.shape, problem.device
    group = s.HQ // s.HK
    q = problem.q.view(s.B, s.Q, s.HK, group, s.D).permute(0, 2, 3, 1, 4).reshape(s.B, s.HK, group * s.Q, s.D)
    k, v = (rows.view(s.B, s.L, s.HK, -1).transpose(1, 2).contiguous() for rows in (problem.key, problem.value))
    new, mask = [t[:, :, s.L - s.N :].clone() for t in (k, v)] if s.N else [], None
    if s.Q > 1 or s.W:
        distance = torch.arange(s.L - s.Q, s.L, device=device)[:, None] - torch.arange(s.L, device=device)
        mask = (distance >= 0) & (distance < (s.W or s.L))
        mask = mask.repeat(group, 1)
    for t in (k, v) if s.N else ():
        t[:, :, s.L - s.N :] *= -1  # what is not written before it is read shows

    def call() -> torch.Tensor:
        for cache, rows in zip((k, v), new):
            cache[:, :, s.L - s.N :] = rows
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=problem.scale)
        return out.view(s.B, s.HK, group, s.Q, -1).permute(0, 3, 1, 2, 4).reshape(s.B * s.Q, s.HQ, -1)

    written_bytes = 2 * sum(t.nbytes for t in new)
    return Entry(call, _rows(problem, k, v), problem.plain_bytes(STORES.itemsize) + written_bytes, graph=False, note=DENSE)


def _write(problem: Problem) -> Entry:
    """Rows copied to where they belong in a cache `[T, HK, D]`."""
    new = [rows[problem.new] for rows in (problem.key, problem.value)]
    caches = [torch.full_like(rows, torch.nan) for rows in (problem.key, problem.value)]

    def call() -> None:
        for cache, rows in zip(caches, new):
            cache.index_copy_(0, problem.new, rows)

    by_head = (t.view(1, -1, *t.shape[1:]).transpose(1, 2) for t in caches)
    return Entry(call, _rows(problem, *by_head), 2 * sum(t.nbytes for t in new), graph=False, note=DENSE)


def _rows(problem: Problem, k: torch.Tensor, v: torch.Tensor) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """What lies in dense caches `[B, HK, L, D]`, by slot."""

    def rows(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = problem.token_of[slots]
        return tuple(t.transpose(1, 2).flatten(0, 1)[tokens].double() for t in (k, v))

    return rows
