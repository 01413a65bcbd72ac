"""Dense attention over 16-bit rows, by what PyTorch brings: `(out, log-sum-exp)`, so that calls over disjoint keys merge.

On an H200 cuDNN reaches what FlashAttention-3 does, 600 to 690 TFLOP/s as the clock allows, and PyTorch's flash kernel 334
(a chunk of 4,096 over 16,384 cached, 32 heads of 128), so nothing beyond torch is asked for.
"""

from __future__ import annotations

import math

import torch

aten = torch.ops.aten


PLANNED = 256  # cuDNN plans each new pair of lengths for 36 ms: it gets multiples of this, so that plans are soon all made


def planned(tokens: int) -> int:
    """The next multiple of `PLANNED`."""
    return -(-tokens // PLANNED) * PLANNED


def choose(device: torch.device, dtype: torch.dtype, head_size: int, head_size_v: int) -> str | None:
    """Name of the fastest backend for these rows, None where none takes them."""
    if device.type == "cpu":
        return "math"
    if device.type != "cuda" or torch.version.hip or dtype not in (torch.bfloat16, torch.float16):
        return None
    if torch.cuda.get_device_capability(device) < (8, 0) or head_size % 8 or head_size_v % 8:
        return None
    if max(head_size, head_size_v) <= 128 and torch.backends.cudnn.is_available():
        return "cudnn"
    return "flash" if head_size == head_size_v <= 256 else None


def attend(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax(scale * q . k) . v`: out `[M, HQ, D_V]` of q's dtype, natural log-sum-exp `[M, HQ]` float32.

    q: `[M, HQ, D]`. k, v: `[HK, N, D]`, `[HK, N, D_V]`; HQ is a multiple of HK, and nothing is copied for it.
    causal: query i sees keys 0 to i; M = N then. backend: what `choose` returned.
    """
    if backend == "cudnn" and (q.shape[0] % PLANNED or k.shape[1] % PLANNED) and q.shape[2] == v.shape[2]:
        backend = "flash"
    out, lse = _BACKENDS[backend](q.transpose(0, 1)[None], k[None], v[None], scale, causal)
    return out[0].transpose(0, 1), lse.reshape(q.shape[1], -1)[:, : q.shape[0]].mT


def _cudnn(q, k, v, scale, causal):
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]


def _flash(q, k, v, scale, causal):
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _math(q, k, v, scale, causal):
    """In float32, the log-sum-exp included: what CPU kernels do not all return."""
    grouped = q.float().unflatten(1, (k.shape[1], -1))
    score = scale * (grouped @ k.float()[:, :, None].mT)
    if causal:
        score = score.masked_fill(score.new_ones(score.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    lse = torch.logsumexp(score, -1)
    out = torch.exp(score - lse[..., None]) @ v.float()[:, :, None]
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


_BACKENDS = {"cudnn": _cudnn, "flash": _flash, "math": _math}
