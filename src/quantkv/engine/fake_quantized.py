"""Attention of whole sequences in which every query sees the rows that a decoding step at its position would read, without pages."""

from __future__ import annotations

import math

import torch

from ..calls import PagedTensor
from ..format import Codec
from ..full_precision import BLOCK_SIZE, FullPrecisionTokens
from ..geometry import Kind
from ..implementations.reference import eight_bit
from ..implementations.reference.write import dequantize, encode
from ..maps import LinearMap
from ..options import PRECISIONS, PROMPT_QUERIES, AttentionOptions
from .observed import unseen

QUERIES_AT_ONCE = 256


def fake_quantized(rows: torch.Tensor, codec: Codec, map_: LinearMap | None) -> torch.Tensor:
    """`rows [HK, N, D]` of positions 0 to N - 1, written to a page and read back: float32."""
    rows = rows.transpose(0, 1).contiguous()
    at = torch.arange(rows.shape[0], device=rows.device)
    codes, meta = encode(rows, codec, map_, at)
    page = PagedTensor(codes[None], None if meta is None else meta[None])
    return dequantize(page, codec, map_, at, at).transpose(0, 1)


def full_precision_from(positions: torch.Tensor, latest: int) -> torch.Tensor:
    """From where a query at each of `positions` reads exactly: the page in which the latest `latest` of its tokens begin."""
    return FullPrecisionTokens(recent=latest).first_recent_page(positions + 1, BLOCK_SIZE) * BLOCK_SIZE


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stored: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    full_precision: FullPrecisionTokens | None = None,
    kind: Kind = Kind(),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    prompt: int = 0,
    prompt_precision: str = PRECISIONS[0],
) -> torch.Tensor:
    """Causal attention of `query [HQ, N, D]`, position i over positions 0 to i, to `[N, HQ, D_V]` float32.

    key, value: `[HK, N, D]`, `[HK, N, D_V]`: the exact rows. stored: the same as they come back from pages. prompt: so many first queries
    read exact rows alone, with scores of prompt_precision.
    """
    if prompt:
        told = query[:, :prompt], key[:, :prompt], value[:, :prompt]
        if prompt_precision != PRECISIONS[0] and prompt >= PROMPT_QUERIES:
            told = *eight_bit.as_products(*told[:2]), told[2]
        whole = attend(*told, told[1:], scale, None, kind, softcap, sinks)
    heads, count = key.shape[0], query.shape[1]
    query = (query.float() * scale).unflatten(0, (heads, -1))  # [HK, G, N, D]
    groups = query.shape[1]
    key, value = key.float(), value.float()
    stored_key, stored_value = stored
    latest, first = (0, 0) if full_precision is None else (full_precision.recent, full_precision.sink_tokens(BLOCK_SIZE))
    if first:
        head, tail = slice(None, first), slice(first, None)
        stored_key = torch.cat([key[:, head], stored_key[:, tail]], 1)
        stored_value = torch.cat([value[:, head], stored_value[:, tail]], 1)
    out = query.new_empty(count, heads * groups, value.shape[-1])
    position = torch.arange(count, device=query.device)
    if prompt:
        out[:prompt] = whole
    for start in range(prompt, count, QUERIES_AT_ONCE):
        stop = min(count, start + QUERIES_AT_ONCE)
        seen = slice(kind.first_seen(start), stop)
        rows, keys = position[start:stop, None], position[None, seen]
        block = query[:, :, start:stop].flatten(1, 2)
        score = (block @ stored_key[:, seen].mT).unflatten(1, (groups, -1))
        if latest:
            near = slice(max(int(full_precision_from(position[start], latest)), seen.start), stop)
            left = near.start - seen.start
            is_exact = position[None, near] >= full_precision_from(rows, latest)
            nearby = (block @ key[:, near].mT).unflatten(1, (groups, -1))
            score[..., left:] = torch.where(is_exact, nearby, score[..., left:])
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        score.masked_fill_(unseen(AttentionOptions(**kind.options), rows, keys), -math.inf)
        if sinks is None:
            weight = score.softmax(-1)
        else:
            column = sinks.float().view(heads, groups, 1, 1).expand(*score.shape[:3], 1)
            weight = torch.cat([score, column], -1).softmax(-1)[..., :-1]
        if latest:
            from_exact = (weight[..., left:] * is_exact).flatten(1, 2) @ value[:, near]
            weight[..., left:].masked_fill_(is_exact, 0)
            result = weight.flatten(1, 2) @ stored_value[:, seen] + from_exact
        else:
            result = weight.flatten(1, 2) @ stored_value[:, seen]
        out[start:stop] = result.view(heads * groups, stop - start, -1).transpose(0, 1)
    return out
