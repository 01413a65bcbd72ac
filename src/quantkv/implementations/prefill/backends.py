"""Dense attention over 16-bit rows, by whatever is here: `(out, log-sum-exp)`, so that calls over disjoint keys combine.

On a Hopper GPU our own kernel (`implementations/hopper/prefill/prefill.cu`) has all that calls need; with a window it is the fastest.
FlashAttention-3, where its package is installed or an engine loaded its operators, takes the same, and is up to 5 % faster without one,
11 % with a softcap (results/h200-prefill.json). Both align masks to the bottom right, so that a chunk sees its prefix and itself in one
call. cuDNN's kernels, as torch calls them, align the causal mask to the top left: the prefix and the chunk are two calls and a combine.
cuDNN's frontend, where it is installed, aligns masks to the bottom right and has windows. The flash kernel that torch brings has windows
too, and is slower than all of these.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from ...assumed import assumed
from ...under_way import wanted
from ..hopper import prefill
from ..reference import eight_bit as eight_bit_scores
from . import cudnn_graph, flash3
from .plan import ALL, CAUSAL, Limits, Mask, Round

aten = torch.ops.aten


# Queries times keys, heads and head size of a sequence, below which it is not called by itself. cuDNN as torch calls it takes sequences of
# several lengths one by one: 32 of about 512 tokens took 8,300 us on an H200, 260 each, and torch's flash kernel 640 for all. 8,192 tokens
# of 32 heads of 128 take cuDNN 1,020 us and the flash kernel 1,840 (results/h200-prefill.json); half as many save about what a call costs.
WORTH_A_CALL = 1 << 35
PLANNED = 256  # cuDNN plans each new pair of lengths for 36 ms: it gets multiples of this, so that plans are soon all made


@dataclass(frozen=True)
class Backend:
    """What a dense kernel takes. bottom_right, together: as in `plan.Limits`. windows, softcap: whether it has them. planned: whether
    lengths should be multiples of `PLANNED`. into: whether it puts its rows where it is told. token_major: whether the heads of a token
    lie together in the scratch, else the tokens of a head. ends: whether it wants `Round.ends` of a single sequence too. anywhere: whether
    rows of 16-byte chunks may have any strides. eight_bit: whether scores may be products of 8-bit integers."""

    bottom_right: bool
    together: str
    windows: bool
    softcap: bool
    planned: bool = False
    into: bool = False
    token_major: bool = False
    ends: bool = False
    anywhere: bool = False
    eight_bit: bool = False

    def limits(self, most: int, single: int, several: int, together: bool = True) -> Limits:
        """How its calls are cut; arguments as of `plan.Limits`. together: whether sequences may share a round at all."""
        planned = PLANNED if self.planned else 1
        return Limits(most, single, several, planned, self.bottom_right, self.together if together else "alone")


BACKENDS = {
    "flash3": Backend(True, "ragged", windows=True, softcap=True, into=True, ends=True, anywhere=True),
    "hopper": Backend(True, "ragged", windows=True, softcap=True, into=True, ends=True, anywhere=True, eight_bit=True),
    "cudnn graph": Backend(True, "ragged", windows=True, softcap=False, into=True, token_major=True, ends=True),
    "cudnn": Backend(False, "equal", windows=False, softcap=False, planned=True),
    "flash": Backend(True, "ragged", windows=True, softcap=False),
    "math": Backend(True, "ragged", windows=True, softcap=True, anywhere=True, eight_bit=True),
}


def planned(tokens: int) -> int:
    """The next multiple of `PLANNED`."""
    return -(-tokens // PLANNED) * PLANNED


def fitting(device: torch.device, dtype: torch.dtype, head_size: int, head_size_v: int, *, eight_bit: bool = False, **needs) -> list[str]:
    """Names of the backends that are here and take these rows, the fastest first. eight_bit: whether scores are products of 8-bit integers.
    needs: as of `_fitting`."""
    return [n for n in _fitting(device, dtype, head_size, head_size_v, **needs) if BACKENDS[n].eight_bit >= eight_bit]


def _fitting(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    head_size_v: int,
    *,
    window: bool = False,
    softcap: bool = False,
    alike: bool = False,
    short: bool = False,
    scale: float = 1.0,
) -> list[str]:
    """The same for scores of 16 bits. window, softcap: whether the call has one. alike: whether all its sequences have the same lengths,
    which torch calls cuDNN with at once; 1 to 15 % faster on an H200 than its frontend. short: whether its sequences, of several lengths,
    are not worth a call each, as of `WORTH_A_CALL`. scale: of scores; ours for Hopper looks for the largest score before it is multiplied
    by a scale, which must not turn it around."""
    gpu = assumed()
    if gpu is not None:
        if dtype not in (torch.bfloat16, torch.float16):
            return []
        return ["hopper"] if gpu.capability == (9, 0) and scale > 0 and prefill.takes(head_size, head_size_v) else ["flash"]
    if device.type == "cpu":
        return ["math"]
    if device.type != "cuda" or torch.version.hip or dtype not in (torch.bfloat16, torch.float16):
        return []
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0) or head_size % 8 or head_size_v % 8:
        return []
    same = head_size == head_size_v <= 256
    by_torch = max(head_size, head_size_v) <= 128 and torch.backends.cudnn.is_available()
    own = capability == (9, 0) and scale > 0 and prefill.takes(head_size, head_size_v)
    there = {
        **({"hopper": own} if window else {}),  # the place of a name is the first that it is given
        "flash3": capability[0] == 9 and same and flash3.takes(window=window, softcap=softcap),
        "hopper": own,
        **({"cudnn": by_torch} if alike else {}),
        "cudnn graph": max(head_size, head_size_v) <= (256 if capability[0] == 9 else 128) and cudnn_graph.package() is not None,
        **({"flash": same} if short else {}),
        "cudnn": by_torch,
        "flash": same,
    }
    return [n for n, here in there.items() if here and BACKENDS[n].windows >= window and BACKENDS[n].softcap >= softcap]


def choose(device: torch.device, dtype: torch.dtype, head_size: int, head_size_v: int, **needs) -> str | None:
    """The first of `fitting`, None where nothing takes these rows."""
    return next(iter(fitting(device, dtype, head_size, head_size_v, **needs)), None)


def takes_sinks(backend: str, sinks: torch.Tensor, lse: bool) -> bool:
    """Whether a backend adds sinks itself, where a call has one round. lse: whether log-sum-exps are asked for."""
    return backend == "hopper" or (backend == "flash3" and not lse and flash3.takes_sinks(sinks))


def attend(
    backend: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    round: Round,
    ends: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kept: dict[Hashable, Any] | None = None,
    eight_bit: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax(cap(scale * q . k)) . v` of every sequence of a round: rows `[M, HQ, D_V]` of q's dtype, natural log-sum-exp `[M, HQ]`
    float32.

    q: `[M, HQ, D]`, of all sequences. k, v: `[HK, N, D]`, `[HK, N, D_V]` of any strides, rows as `round.reads` says; HQ is a multiple of
    HK, and nothing is copied for it. round.mask: M and N are those of each sequence. backend: of `BACKENDS`; the round is cut by its
    limits. ends: `round.ends()` on the device, int32; None: made here, of a single sequence without a copy to the device. softcap: 0 for
    none. out: `[M, HQ, D_V]`, where the rows may be put; those that are returned lie there or elsewhere. sinks:
    where `takes_sinks`: of FlashAttention-3 the log-sum-exp is then not to be used. kept: numbers that a backend works out of a
    round's are kept here for the next call with the round; None: they are not. eight_bit: whether scores are
    products of 8-bit integers, by a backend that has them.
    """
    if backend != "hopper" and wanted() is not None:  # theirs is not to be compiled
        return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=torch.float32)
    if backend == "flash3":
        rows, lse = flash3.attend(q, k.transpose(0, 1), v.transpose(0, 1), scale, round, ends, softcap, out, sinks)
        return rows, lse.mT
    if backend == "hopper":
        ends = flash3.bounds(round, q.device) if ends is None else ends
        rows = None
        if eight_bit:
            from .eight_bit import rounded  # Triton

            rows = rounded(q, k, round, ends, prefill.config_of(q, k, v, round.mask, softcap, True).keys, kept)
        return prefill.attend(q, k, v, scale, round.longest[0], round.mask, ends, softcap, out, sinks, rows)
    if backend == "cudnn graph":
        ends = flash3.bounds(round, q.device) if ends is None else ends
        return cudnn_graph.attend(q, k.transpose(0, 1), v.transpose(0, 1), scale, round, ends, PLANNED, out, kept)
    if eight_bit:
        return _math(q, k, v, scale, round, ends, softcap, eight_bit_scores.KEY_BLOCK)
    return _CALLS[backend](q, k, v, scale, round, ends, softcap)


def _cudnn(q, k, v, scale, round, ends, softcap):
    """Sequences of one length, as a batch."""
    batch = (len(round.reads), -1)
    own = q.unflatten(0, batch).transpose(1, 2)  # [S, HQ, M, D]
    rows, lse = aten._scaled_dot_product_cudnn_attention(
        own, *(t.unflatten(1, batch).transpose(0, 1) for t in (k, v)), None, True, 0.0, round.mask == CAUSAL, False, scale=scale
    )[:2]
    lse = lse.reshape(*own.shape[:2], -1)[..., : own.shape[2]]
    return rows.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def _flash(q, k, v, scale, round, ends, softcap):
    """What torch brings of FlashAttention-2; its masks are aligned to the bottom right."""
    if len(round.reads) == 1 and round.mask in (ALL, CAUSAL):
        batch = (q.transpose(0, 1)[None], k[None], v[None])
        rows, lse = aten._scaled_dot_product_flash_attention(*batch, 0.0, round.mask == CAUSAL, False, scale=scale)[:2]
        return rows[0].transpose(0, 1), lse.reshape(q.shape[1], -1)[:, : q.shape[0]].mT
    queries, keys, used = flash3.bounds(round, q.device) if ends is None else ends
    left, right = (None if n < 0 else n for n in round.mask)
    rows, lse = aten._flash_attention_forward(
        *(q, k.transpose(0, 1), v.transpose(0, 1), queries, keys, *round.longest, 0.0, False, False),
        scale=scale,
        window_size_left=left,
        window_size_right=right,
        seqused_k=used,
    )[:2]
    if lse.shape != (q.shape[1], q.shape[0]):
        raise RuntimeError(f"log-sum-exps of shape {tuple(lse.shape)} of torch {torch.__version__}: {(q.shape[1], q.shape[0])} is expected")
    return rows, lse.mT


def _math(q, k, v, scale, round, ends, softcap, key_block=0):
    """In float32, the log-sum-exp included: what CPU kernels do not all return."""
    found, start = [], 0
    for read in round.reads:
        rows = slice(read.at, read.at + read.count)
        found.append(
            math_attention(q[start : start + read.queries], k[:, rows], v[:, rows], scale, round.mask, softcap, key_block=key_block)
        )
        start += read.queries
    rows, lse = (torch.cat(parts) for parts in zip(*found))
    return rows.to(q.dtype), lse


def math_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: Mask = ALL,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float32,
    key_block: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence in a dtype that is kept: rows `[M, HQ, D_V]`, log-sum-exp `[M, HQ]`; zeros and -inf for a query that sees no key.
    key_block: keys of a scale, where scores are products of 8-bit integers; 0: they are not."""
    grouped = q.transpose(0, 1).to(dtype).unflatten(0, (k.shape[0], -1))
    keys = k.to(dtype)[:, None]
    score = scale * (eight_bit_scores.scores(grouped.float(), keys.float(), key_block).to(dtype) if key_block else grouped @ keys.mT)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    queries, keys = score.shape[-2:]
    ahead = torch.arange(keys, device=q.device) - torch.arange(keys - queries, keys, device=q.device)[:, None]  # key - query
    for bound, beyond in ((mask.left, -ahead), (mask.right, ahead)):
        if bound >= 0:
            score = score.masked_fill(beyond > bound, -torch.inf)
    lse = torch.logsumexp(score, -1)
    weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    out = weight @ v.to(dtype)[:, None]
    return out.flatten(0, 1).transpose(0, 1), lse.flatten(0, 1).T


_CALLS = {"cudnn": _cudnn, "flash": _flash, "math": _math}
