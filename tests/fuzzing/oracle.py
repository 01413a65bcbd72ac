"""Attention as docs/attention.md says it, in numpy and float64, written from that document alone: it shares nothing with the package."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

DEFAULTS = dict(
    causal=True,
    window=0,
    chunk_lookback=-1,
    softcap=0.0,
    sinks=None,
    alibi_slopes=None,
    alibi_sqrt=False,
    qq_bias=None,
    prefix_ranges=None,
    clamp_prefix_to_window=False,
    output_scale=None,
    batch_invariant=False,
    prompt_precision="16bit",
)


class Answer(NamedTuple):
    """out `[n, HQ, D_V]` before an output scale, lse `[n, HQ]`, and seen `[n, L]`, of the queries of one sequence. score_size,
    value_size `[n, HQ]`: the largest sum of magnitudes in a score and the largest number in a value, by which a rounding is measured."""

    out: np.ndarray
    lse: np.ndarray
    seen: np.ndarray
    score_size: np.ndarray
    value_size: np.ndarray


def seen_keys(s: int, queries: int, keys: int, held: np.ndarray, options: dict) -> np.ndarray:
    """What the queries of sequence s see, `[n, L]`: the table of the section "What a query sees". held: `[L]`, what some segment reads."""
    given = DEFAULTS | options
    p = (keys - queries + np.arange(queries))[:, None]
    j = np.arange(keys)[None, :]
    causal = given["causal"] if isinstance(given["causal"], bool) else bool(given["causal"][s])
    window, lookback = given["window"], given["chunk_lookback"]
    ordinary = (j <= p) if causal else np.ones((queries, keys), bool)
    if lookback >= 0:
        size = window // (lookback + 1)
        ordinary = ordinary & (p // size - j // size <= lookback)
    elif window > 0:
        ordinary = ordinary & (p - j < window)
        if not causal:
            ordinary = ordinary & (j - p < window)
    inside = np.zeros_like(ordinary)
    if given["prefix_ranges"] is not None:
        for start, end in given["prefix_ranges"][s]:
            if start < end:
                inside |= (start <= p) & (p <= end) & (start <= j) & (j <= end)
        if given["clamp_prefix_to_window"] and window > 0:
            inside &= p - j < window
    return (ordinary | inside) & held[None, :]


def sequence(s: int, q: np.ndarray, keys: np.ndarray, values: np.ndarray, held: np.ndarray, scale: float | None, options: dict) -> Answer:
    """The queries `q [n, HQ, D]` of sequence s over `keys [L, HK, D]` and `values [L, HK, D_V]`, as they read back; what is not held
    may be anything."""
    given = DEFAULTS | options
    (n, heads, size), length = q.shape, len(keys)
    group = heads // keys.shape[1]
    scale = size**-0.5 if scale is None else scale
    seen = seen_keys(s, n, length, held, options)
    keys, values = (np.where(held[:, None, None], t, 0.0).repeat(group, 1) for t in (keys, values))  # [L, HQ, ..]
    score = scale * np.einsum("nhd,lhd->hnl", q, keys)
    lengths = np.einsum("nh,lh->hnl", np.sqrt((q * q).sum(2)), np.sqrt((keys * keys).sum(2)))
    weighed = np.where(seen, abs(scale) * lengths, 0.0)
    if given["softcap"] > 0:
        score = given["softcap"] * np.tanh(score / given["softcap"])
    position, context, j = (length - n + np.arange(n))[:, None], length - n, np.arange(length)[None, :]
    if given["alibi_slopes"] is not None:
        slope = np.asarray(given["alibi_slopes"], np.float64)[:, None, None]
        distance = -np.sqrt(np.maximum(position - j, 0)) if given["alibi_sqrt"] else (j - context) + 0 * position
        score = score + slope * distance
        weighed = weighed + np.where(seen, abs(slope * distance), 0.0)
    if given["qq_bias"] is not None:
        bias = np.asarray(given["qq_bias"], np.float64)
        column = j - context
        inside = (column >= 0) & (column < bias.shape[1])
        score = score + np.where(inside, bias[np.arange(n)[:, None], np.clip(column, 0, bias.shape[1] - 1)], 0.0) if length else score
    score = np.where(seen, score, -np.inf)
    sinks = None if given["sinks"] is None else np.asarray(given["sinks"], np.float64)[:, None]
    top = score.max(2, initial=-np.inf)  # [HQ, n]
    if sinks is not None:
        top = np.maximum(top, sinks)
    shift = np.where(np.isfinite(top), top, 0.0)
    weight = np.exp(score - shift[..., None])
    total = weight.sum(2) + (0.0 if sinks is None else np.exp(sinks - shift))
    with np.errstate(divide="ignore"):
        lse = shift + np.log(total)
    weight = weight / np.where(total > 0, total, 1.0)[..., None]
    out = np.einsum("hnl,lhd->nhd", weight, values)
    reach = np.where(seen[None], np.abs(values).max(2, initial=0.0).T[:, None, :], 0.0)
    return Answer(out, lse.T, seen, weighed.max(2, initial=0.0).T, reach.max(2, initial=0.0).T)


def as_e4m3(x: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """`clamp(x / scale, -448, 448)`, and half of the step that float8_e4m3fn has there: how far the nearest number may be."""
    clamped = np.clip(x / scale, -448, 448)
    exponent = np.floor(np.log2(np.maximum(np.abs(clamped), 2.0**-6)))
    return clamped, 2.0 ** (exponent - 3) / 2
