"""The cubic as kernels compute it, in fp16: `gain * (t (root + t^2))`, t in units of 2^bits codes, so that no number on the way is
subnormal. One fused multiply-add and one product for each number; the gain, in float32, is the scale's."""

from __future__ import annotations

import math
from functools import cache

import torch

from . import CUBICS, boundaries, levels

CANDIDATES = 40  # neighbours in fp16 of the exact root that are tried, on either side


@cache
def cubic(bits: int) -> tuple[float, float]:
    """root, a number of fp16, and gain, for which levels so computed are nearest to the specification's, weighted as N(0, 1) has them."""
    a, b = CUBICS[bits]
    right, at = levels(bits).double(), boundaries(bits).double()
    below = torch.cat([at.new_zeros(1), (1 + torch.erf(at / math.sqrt(2))) / 2, at.new_ones(1)])
    weight = below.diff()
    t = (torch.arange(2**bits, dtype=torch.float64, device="cpu") - (2**bits - 1) / 2) / 2**bits
    exact = torch.tensor(a / b / 4**bits, dtype=torch.float16, device="cpu")
    found = []
    for step in range(-CANDIDATES, CANDIDATES + 1):
        root = (exact.view(torch.int16) + step).view(torch.float16).double()
        made = (t * (t * t + root).half().double()).half().double()
        gain = (weight * made * right).sum() / (weight * made * made).sum()
        error = (weight * (gain * made - right).square()).sum()
        found.append((error.item(), root.item(), gain.item()))
    return min(found)[1:]
