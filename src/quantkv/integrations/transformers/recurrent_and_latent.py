"""Layers that keep something else than keys and values, or more."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from ...checks import refuse
from ...format import Format
from ...formats import get_format
from .layers import QuantizedLayer


class HybridLayer(LinearAttentionLayer, QuantizedLayer):
    """A layer with attention beside a convolution or recurrence: keys and values in pages, the states as transformers keeps them."""

    @property
    def is_compileable(self) -> bool:
        """Never: its states are transformers' own."""
        return False

    def __init__(self, *args: Any, number_of_states: int) -> None:
        QuantizedLayer.__init__(self, *args)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


class LatentLayer(QuantizedLayer):
    """A layer whose keys and values are computed from one latent vector a token (DeepSeek's MLA): it keeps that vector, in the K half
    of the format, and the key's rotated dimensions, at 16 bits. They are read back whole in each forward pass, and the model's own
    attention follows, with transformers' mask: padding is stored like any token.

    latent: size of the vector.
    """

    is_compileable = False

    def __init__(self, *args: Any, latent: int) -> None:
        super().__init__(*args)
        self.latent = latent

    @torch.compiler.disable
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Store latents `[S, 1, N, latent]` and rotated dimensions `[S, 1, N, R]`; returns those of all tokens, read back."""
        if key_states.shape[1] != 1 or key_states.shape[3] != self.latent:
            refuse("key_states.shape", tuple(key_states.shape), f"one head of config.kv_lora_rank={self.latent} is needed")
        new, batch_size, before = (key_states, value_states), key_states.shape[0], self.seen
        if self.pages is None:
            self.requested = self._format(self.stored_dtype or key_states.dtype)
        pages, cache_positions = self._new_pages(*new) if self.pages is None else self.pages, self.sequences.cache_positions
        cache_positions.enter(self.seen, batch_size, key_states.shape[2], None)
        self.pages, self.is_initialized = pages if self.pages is None else self.pages, True
        try:
            self.make_room(self.sequences.table.num_pages, [])
            self.store(key_states, value_states)
            self.turn = cache_positions.turn + 1
            cache_positions.leave()
        except BaseException:
            cache_positions.failed = True
            raise
        own = self.prompt == "own" and key_states.shape[2] > 1
        if own and not before:
            return new
        positions = torch.arange(self.seen, device=key_states.device).repeat(batch_size)
        rows = self.pages.dequantize(self._slots(key_states.device), positions, dtype=key_states.dtype)
        read = tuple(states.unflatten(0, (batch_size, self.seen)).transpose(1, 2) for states in rows)
        return tuple(torch.cat([t[:, :, :before], given], 2) for t, given in zip(read, new)) if own else read

    def _format(self, dtype: torch.dtype) -> Format:
        fmt, plain = get_format(self.requested, dtype), get_format("none", dtype)
        return fmt if fmt.k is plain.k else fmt.latents(dtype)

    def _slots(self, device: torch.device) -> torch.Tensor:
        """Where the tokens of all sequences are, `[S * seen]`."""
        table, size = torch.tensor(self.sequences.table.rows, device=device), self.pages.spec.block_size
        return (table[:, :, None] * size + torch.arange(size, device=device)).flatten(1)[:, : self.seen].flatten()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys of a mask."""
        return self.seen + query_length, 0
