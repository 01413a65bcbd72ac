"""torch.autocast, left out: what is computed here has the dtypes that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def given_dtypes(t: torch.Tensor, compute: Callable[..., T], *arguments: Any) -> T:
    """`compute(*arguments)`, in which torch computes in the dtypes of its operands on the device of `t`, whatever `torch.autocast` says."""
    kind = "cuda" if t.is_cuda else t.device.type
    if not torch.is_autocast_enabled(kind):  # a context costs more than all that a prepared call does beside its launch
        return compute(*arguments)
    with torch.autocast(kind, enabled=False):
        return compute(*arguments)
