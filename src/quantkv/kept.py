"""What a prepared call keeps of the numbers in its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Kept(Generic[T]):
    """What a prepared call works out of its tensors' numbers on the host: `work(call)`, kept for as long as they hold the same ones.

    A prepared call may keep two things of the call that it was made with. The first is its shape: shapes, strides, dtypes, alignment,
    scales and options that are no tensors, which `PreparedAttend` and `PreparedWrite` have in their keys. The second is what this class
    keeps; `numbers` of the call says which tensors it is of. Everything else is read when the call runs."""

    def __init__(self, work: Callable[[Any], T]) -> None:
        self._work, self._numbers = work, None

    def of(self, call: Any) -> T:
        """What is kept of this call. ValueError where its tensors hold other numbers than when it was checked, and illegal ones."""
        numbers = call.numbers()
        if self._numbers is None or not all(map(torch.equal, self._numbers, numbers)):
            if self._numbers is not None:  # else the call was checked where it was made
                call.check_values()
            self._value, self._numbers = self._work(call), [t.clone() for t in numbers]
        return self._value
