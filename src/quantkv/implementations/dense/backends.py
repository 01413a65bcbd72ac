"""Dense attention over 16-bit rows, by whatever is here: `(out, log-sum-exp)`, so that calls over disjoint keys merge.

FlashAttention-3, where its package is installed or an engine loaded its operators, aligns the causal mask to the bottom right,
so that a chunk sees its prefix and itself in one call: 4,096 queries of 32 heads of 128 over 16,384 keys take 1,310 us on an
H200, and 1,420 over pages of 16-bit rows. PyTorch's own kernels align it to the top left: the prefix and the chunk are two calls
and a merge, 1,470 us by cuDNN.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from functools import cache

import torch

aten = torch.ops.aten


PLANNED = 256  # cuDNN plans each new pair of lengths for 36 ms: it gets multiples of this, so that plans are soon all made
BOTTOM_RIGHT = ("flash3", "math")  # backends whose causal mask lets the last query see the last key, however many keys there are


def planned(tokens: int) -> int:
    """The next multiple of `PLANNED`."""
    return -(-tokens // PLANNED) * PLANNED


def choose(device: torch.device, dtype: torch.dtype, head_size: int, head_size_v: int) -> str | None:
    """Name of the fastest backend for these rows, None where none takes them."""
    if device.type == "cpu":
        return "math"
    if device.type != "cuda" or torch.version.hip or dtype not in (torch.bfloat16, torch.float16):
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0) or head_size % 8 or head_size_v % 8:
        return None
    if capability[0] == 9 and head_size == head_size_v <= 256 and _flash3_call() is not None:
        return "flash3"
    if max(head_size, head_size_v) <= 128 and torch.backends.cudnn.is_available():
        return "cudnn"
    return "flash" if head_size == head_size_v <= 256 else None


def attend(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax(scale * q . k) . v`: out `[M, HQ, D_V]` of q's dtype, natural log-sum-exp `[M, HQ]` float32.

    q: `[M, HQ, D]`. k, v: `[HK, N, D]`, `[HK, N, D_V]`; HQ is a multiple of HK, and nothing is copied for it.
    causal: query i sees keys 0 to N - M + i; M = N but for the backends of `BOTTOM_RIGHT`. backend: what `choose` returned.
    out: `[M, HQ, D_V]`, where the rows may be put; those that are returned lie there or elsewhere.
    """
    if backend == "flash3":
        rows, lse = _flash3_call()(q, k.transpose(0, 1), v.transpose(0, 1), scale, causal, out)
        return rows, lse.mT
    if backend == "cudnn" and (q.shape[0] % PLANNED or k.shape[1] % PLANNED) and q.shape[2] == v.shape[2]:
        backend = "flash"
    rows, lse = _BACKENDS[backend](q.transpose(0, 1)[None], k[None], v[None], scale, causal)
    return rows[0].transpose(0, 1), lse.reshape(q.shape[1], -1)[:, : q.shape[0]].mT


def _cudnn(q, k, v, scale, causal):
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]


def _flash(q, k, v, scale, causal):
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _math(q, k, v, scale, causal):
    """In float32, the log-sum-exp included: what CPU kernels do not all return."""
    grouped = q.float().unflatten(1, (k.shape[1], -1))
    score = scale * (grouped @ k.float()[:, :, None].mT)
    if causal:
        queries, keys = score.shape[-2:]
        score = score.masked_fill(score.new_ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries), -math.inf)
    lse = torch.logsumexp(score, -1)
    out = torch.exp(score - lse[..., None]) @ v.float()[:, :, None]
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


_BACKENDS = {"cudnn": _cudnn, "flash": _flash, "math": _math}


def _flash3_call() -> Callable | None:
    """FlashAttention-3 as `(q, k, v, scale, causal, out or None) -> out, lse`, rows `[N, heads, D]`, lse `[HQ, M]`; None where it is
    neither installed nor loaded. An engine may load its operators at any time: looked for at each call."""
    return _flash3_operator if hasattr(torch.ops._vllm_fa3_C, "fwd") else _flash3_package()


def _flash3_operator(q, k, v, scale, causal, out):
    """The engine's build takes ragged batches only: one of a single sequence. It puts its rows into out."""
    queries, keys = len(q), len(k)
    ends = [torch.arange(0, n + 1, n, dtype=torch.int32, device=q.device) for n in (queries, keys)]
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
        *ends,
        None,
        None,
        None,
        queries,
        keys,
        *[None] * 9,
        scale,
        causal,
        -1,
        -1,
        0.0,
        True,
        None,
        1,
        True,
        0,
        None,
        1,
        0,
        None,
    )[:2]


@cache
def _flash3_package() -> Callable | None:
    try:
        attention = importlib.import_module("flash_attn_interface").flash_attn_func
    except (ImportError, OSError, RuntimeError):
        return None
    # Older releases always return the log-sum-exp, newer ones on request.
    more = {"return_attn_probs": True} if "return_attn_probs" in inspect.signature(attention).parameters else {}

    def call(q, k, v, scale, causal, out):
        rows, lse = attention(q[None], k[None], v[None], softmax_scale=scale, causal=causal, **more)[:2]
        return rows[0], lse[0]

    return call
