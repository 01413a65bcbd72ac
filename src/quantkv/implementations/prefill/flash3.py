"""FlashAttention-3, as an engine's torch operators or as its package: whichever is here."""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from types import ModuleType

import torch

from .plan import ALL, CAUSAL, Mask, Round

Ends = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def takes(*, window: bool = False, softcap: bool = False) -> bool:
    """Whether it is here, and has what a call needs. An engine may load its operators at any time: looked for at each call."""
    if _operators():
        return True
    package = _package()
    asked = {name for name, needed in (("window_size", window), ("softcap", softcap)) if needed}
    return package is not None and asked <= _parameters("flash_attn_func")


def takes_many() -> bool:
    """Whether it takes sequences of several lengths, apart from each other, in one call."""
    return _operators() or (hasattr(_package(), "flash_attn_varlen_func") and "seqused_k" in _parameters("flash_attn_varlen_func"))


def takes_sinks(sinks: torch.Tensor) -> bool:
    """Whether an engine's operator takes them, exactly: bf16 `[HQ]`, of at most 64 heads. What it says of log-sum-exps then is not used."""
    return _operators() and sinks.dtype == torch.bfloat16 and len(sinks) <= 64 and sinks.is_contiguous()


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    round: Round,
    ends: Ends | None,
    softcap: float,
    out: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[M, HQ, D]`, log-sum-exp `[HQ, M]`. q, k, v: `[M, HQ, D]`, `[N, HK, D]` of all sequences of a round; the rest as of
    `backends.attend`. An engine's operator puts its rows into out."""
    if _operators():
        return _operator(q, k, v, scale, round, bounds(round, q.device) if ends is None else ends, softcap, out, sinks)
    options = {"softmax_scale": scale, "causal": round.mask == CAUSAL}
    if round.mask not in (ALL, CAUSAL):
        options["window_size"] = tuple(round.mask)
    if softcap:
        options["softcap"] = softcap
    # Older releases always return the log-sum-exp, newer ones on request.
    if len(round.reads) == 1:
        more = {"return_attn_probs": True} if "return_attn_probs" in _parameters("flash_attn_func") else {}
        rows, lse = _package().flash_attn_func(q[None], k[None], v[None], **options, **more)[:2]
        return rows[0], lse[0]
    queries, keys, used = bounds(round, q.device) if ends is None else ends
    more = {"return_attn_probs": True} if "return_attn_probs" in _parameters("flash_attn_varlen_func") else {}
    batch = {
        "cu_seqlens_q": queries,
        "cu_seqlens_k": keys,
        "seqused_k": used,
        "max_seqlen_q": round.longest[0],
        "max_seqlen_k": round.longest[1],
    }
    return _package().flash_attn_varlen_func(q, k, v, **batch, **options, **more)[:2]


def bounds(round: Round, device: torch.device) -> Ends:
    """`round.ends()` on the device, int32. Of a single sequence nothing is copied there, so that a graph can be captured."""
    queries, keys, used = round.ends()
    if len(round.reads) > 1:
        return tuple(torch.tensor(t, dtype=torch.int32, device=device) for t in (queries, keys, used))
    two = [torch.arange(0, n + 1, n, dtype=torch.int32, device=device) for n in (queries[1], keys[1])]
    return *two, torch.full((1,), used[0], dtype=torch.int32, device=device)


def _operators() -> bool:
    return hasattr(torch.ops._vllm_fa3_C, "fwd")


def _operator(q, k, v, scale, round: Round, ends: Ends, softcap: float, out, sinks):
    """The engine's build takes ragged batches only."""
    queries, keys, used = ends
    mask: Mask = round.mask
    # q k v | k_new v_new q_v | out | cu_seqlens q k k_new | seqused q k | max_seqlen q k | page table, kv_batch_idx, leftpad_k |
    # rotary cos sin seqlens | descales | scale causal window softcap | rotary interleaved, scheduler, splits, pack_gqa: query heads
    # that share keys in one tile, 3 % faster on an H200 | sm margin, sinks, a context-parallel world of one
    return torch.ops._vllm_fa3_C.fwd(
        q,
        k,
        v,
        None,
        None,
        None,
        out,
        queries,
        keys,
        None,
        None,
        used if len(round.reads) > 1 else None,
        *round.longest,
        *[None] * 9,
        scale,
        mask == CAUSAL,
        *((-1, -1) if mask == CAUSAL else mask),
        softcap,
        True,
        None,
        1,
        True,
        0,
        sinks,
        1,
        0,
        None,
    )[:2]


@cache
def _package() -> ModuleType | None:
    try:
        return importlib.import_module("flash_attn_interface")
    except (ImportError, OSError, RuntimeError):
        return None


@cache
def _parameters(name: str) -> set[str]:
    return set(inspect.signature(getattr(_package(), name)).parameters)
