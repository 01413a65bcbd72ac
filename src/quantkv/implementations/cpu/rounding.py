"""Rows rounded by a Hessian by compiled kernels: threads, one head after the other, and rows that are not finite."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...rounding import Rounding
from .threads import in_parts

SMALLEST_PART = 1 << 20  # products with a Hessian's numbers that a thread works out: fewer are not worth waking one


def round_rows(
    kernel: Callable, reference: Callable, rows: torch.Tensor, rounding: Rounding, codes: int, *tables: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 `[T, HK, codes]` and scales `[T, HK, 1]` float32 of rows `[T, HK, D]` float32.

    kernel: of rows first to last, rows `[N, D]`, feedback `[H, D, D]` and gain `[H, D]`, row n being of head n % H, the tables, codes
        `[N, codes]` and scales `[N]`, which it fills. A scale is finite where all of its row is.
    reference: codes and scales of some of the rows and a `Rounding`: asked for rows whose scale is not finite.
    """
    tokens, heads, size = rows.shape
    given = rows.contiguous().view(-1, size).numpy()
    found, scales = rows.new_empty(tokens, heads, codes, dtype=torch.uint8), rows.new_empty(tokens, heads, 1)
    factors = rounding.feedback.contiguous().numpy(), rounding.gain.contiguous().numpy()
    arguments = given, *factors, *tables, found.view(-1, codes).numpy(), scales.view(-1).numpy()
    in_parts(len(given), SMALLEST_PART // size**2, lambda first, last: kernel(first, last, *arguments))
    if not np.isfinite(arguments[-1]).all():
        odd = ~scales.isfinite()[..., 0]
        some = odd.any(1)
        other = reference(rows[some], rounding)
        for to, source in zip((found, scales), other):
            to[odd] = source[odd[some]].to(to.dtype)
    return found, scales
