"""Scores of prompts by products of 8-bit integers: what `prompt_precision="8bit"` computes.

A query is a row of integers from -127 to 127 times a scale of its own; a block of keys has one scale. The keys' mean is taken off first: it
is large beside what tells keys apart, and adds the same to every score of a query, so that weights do not depend on it (SageAttention,
arXiv 2410.02367). Here it is added again, unrounded, for all else that reads scores: softcap, sinks, log-sum-exps.

    score[i, j] = scale_q[i] scale_k[j] (integers_q[i] . integers_k[j]) + q[i] . mean

Any vector could stand for the mean: a sample of the keys is enough.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

KEY_BLOCK = 64  # keys that share a scale
SAMPLE = 1024  # keys, at most, whose mean is taken off
LARGEST = 127
SMALLEST = 2.0**-40  # magnitude that the largest integer stands for: products of two scales stay normal numbers


class QuantizedRows(NamedTuple):
    """Rows as `codes * scales[..., None]`. codes: `[..., N, D]`, integers from -127 to 127, held as floats, by which their products and
    sums are exact up to D = 1,024. scales: `[..., N]`, of each row."""

    codes: torch.Tensor
    scales: torch.Tensor


def quantize(rows: torch.Tensor, block: int = 1) -> QuantizedRows:
    """Rows `[..., N, D]`, of which `block` neighbours share a scale; ties are rounded to even. A row that is not finite makes its block
    NaN."""
    count = rows.shape[-2]
    blocks = torch.nn.functional.pad(rows, (0, 0, 0, -count % block)).unflatten(-2, (-1, block))
    largest = blocks.abs().amax((-2, -1)).clamp_min(SMALLEST)
    scales, steps = (t.repeat_interleave(block, -1)[..., :count] for t in (largest / LARGEST, largest.new_tensor(LARGEST) / largest))
    return QuantizedRows((rows * steps[..., None]).round(), scales)


def sample_mean(keys: torch.Tensor) -> torch.Tensor:
    """`[..., D]`: the mean of at most `SAMPLE` of keys `[..., N, D]`, as far apart as they fit in."""
    return keys[..., :: max(-(-keys.shape[-2] // SAMPLE), 1), :].mean(-2)


def as_products(q: torch.Tensor, keys: torch.Tensor, block: int = KEY_BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[HQ, M, D + 1]` and keys `[HK, N, D + 1]`, float32, whose products are the `scores` of queries `[HQ, M, D]` and keys
    `[HK, N, D]`: the last number is the query's product with the keys' mean."""
    q, keys = q.float(), keys.float()
    mean = sample_mean(keys)
    added = torch.einsum("hmd,hd->hm", q, mean.repeat_interleave(len(q) // len(keys), 0))
    rows, columns = quantize(q), quantize(keys - mean[:, None], block)
    rounded = [of.codes * of.scales[..., None] for of in (rows, columns)]
    return torch.cat([rounded[0], added[..., None]], -1), torch.cat([rounded[1], torch.ones_like(rounded[1][..., :1])], -1)


def scores(q: torch.Tensor, keys: torch.Tensor, block: int = KEY_BLOCK) -> torch.Tensor:
    """`[..., M, N]` of queries `[..., M, D]` and all the keys `[..., N, D]` that one of them reads."""
    mean = sample_mean(keys)
    rows, columns = quantize(q), quantize(keys - mean[..., None, :], block)
    products = rows.codes @ columns.codes.mT
    return products * rows.scales[..., None] * columns.scales[..., None, :] + q @ mean[..., None]
