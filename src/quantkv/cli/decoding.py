"""Greedy decoding, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .readers import last_logits


@dataclass(frozen=True)
class Step:
    """One generated token and the probabilities `[vocabulary]` that it was the likeliest of."""

    token: int
    probabilities: torch.Tensor


@torch.inference_mode()
def greedy(model: Any, ids: torch.Tensor, cache: Any, max_new_tokens: int, ends: set[int]) -> Iterator[Step]:
    """The likeliest token, over and over, up to and with an end token or up to `max_new_tokens`."""
    ids = ids[None].to(model.device)
    for _ in range(max_new_tokens):
        logits = last_logits(model, ids, 1, cache)[0, -1]
        token = int(logits.argmax())
        yield Step(token, logits.float().softmax(-1).cpu())
        if token in ends:
            return
        ids = ids.new_tensor([[token]])
