"""Memory that the layers of one forward pass use in turn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class Scratch:
    """Uninitialized memory that the next call hands out again: fresh pages cost more than what is written to them."""

    def __init__(self) -> None:
        self._held: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of this shape, with what the last user left in it; it is the same memory for the next one."""
        size = math.prod(shape)
        held = self._held.get((dtype, device))
        if held is None or len(held) < size:
            with torch.inference_mode(False):  # what was born in inference mode could not be written to outside of it
                held = self._held[dtype, device] = torch.empty(size, dtype=dtype, device=device)
        return held[:size].view(shape)
