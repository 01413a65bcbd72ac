"""Refusals: each raises ValueError naming the argument, its value and what is allowed. Pure Python; `checks.py` has those of tensors."""

from __future__ import annotations

import math
from numbers import Real
from typing import NoReturn


def refuse(argument: str, value: object, allowed: str) -> NoReturn:
    """Raise the ValueError that every check raises: argument, its value, what is allowed."""
    raise ValueError(f"{argument}={value}: {allowed}")


def number(
    argument: str, value: float, low: float = -math.inf, above: bool = False, note: str = "a finite number", high: float = math.inf
) -> None:
    """Check that a number is finite, at least `low` (`above`: larger), and at most `high`."""
    try:
        finite = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond floats
        finite = False
    if not finite or not low <= value <= high or (above and value == low):
        refuse(argument, value, f"{note} is needed")


def integer(argument: str, value: int, low: int, note: str, high: float = math.inf) -> None:
    """Check that an integer is at least `low`, and at most `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        refuse(argument, value, f"{note} is needed")
