"""Attention as design texts define it, one query and one key at a time, in Python floats: slow, and independent of the
package."""

import math

import torch


def attention(
    q,
    keys,
    values,
    *,
    context,
    scale,
    causal=True,
    window=0,
    chunk_lookback=-1,
    softcap=0.0,
    sink=None,
    slope=None,
    alibi_sqrt=False,
    qq_bias=None,
    prefix_ranges=(),
    clamp_prefix_to_window=False,
    key_range=None,
):
    """One head of one sequence. q `[n, D]`, keys `[L, D]`, values `[L, D_V]`, float64 -> out `[n, D_V]`, lse `[n]`."""
    out, lse = (torch.zeros(q.shape[0], values.shape[1], dtype=torch.float64), torch.full((q.shape[0],), -math.inf, dtype=torch.float64))
    for i in range(q.shape[0]):
        position, scores = context + i, {}
        for j in range(keys.shape[0]):
            back = True
            if chunk_lookback >= 0:
                size = window // (chunk_lookback + 1)
                back = position // size - j // size <= chunk_lookback
            elif window > 0:
                back = position - j < window
            seen = back and (j <= position or not causal)
            if window > 0 and chunk_lookback < 0 and not causal:
                seen = seen and j - position < window
            for start, end in prefix_ranges:
                if start < end and start <= position <= end and start <= j <= end:
                    seen = seen or position - j < window or not (clamp_prefix_to_window and window > 0)
            if key_range is not None:
                seen = seen and key_range[0] <= j < key_range[1]
            if not seen:
                continue
            score = scale * float(q[i] @ keys[j])
            if softcap > 0:
                score = softcap * math.tanh(score / softcap)
            if slope is not None:
                score += slope * (-math.sqrt(max(position - j, 0)) if alibi_sqrt else j - context)
            if qq_bias is not None and 0 <= j - context < qq_bias.shape[1]:
                score += float(qq_bias[i, j - context])
            scores[j] = score
        terms = list(scores.values()) + ([] if sink is None else [sink])
        if not terms:
            continue
        top = max(terms)
        total = sum(math.exp(t - top) for t in terms)
        lse[i] = top + math.log(total)
        for j, score in scores.items():
            out[i] += math.exp(score - top) / total * values[j]
    return out, lse
