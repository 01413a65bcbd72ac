"""One layer of a quantized cache, as transformers asks for it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ...checks import refuse
from ...engine.batch_layer import BatchLayer
from ...engine.decode_metadata import DecodeMetadata
from ...engine.forward_metadata import is_capturing
from ...engine.sequences import Sequences
from ...format import Format
from .compiled import HANDED, decode_layer, known_by, pass_layer
from .lazy_kv import LazyKV, PagedLength
from .made_for import MadeFor

UNKNOWN = -1  # tokens, where the device alone knows how many: an attention that takes it for a length fails at once


class QuantizedLayer(BatchLayer, CacheLayerMixin):
    """One layer of a `QuantizedCache`; its pages are those of `sequences`, which it shares with the layers of its kind."""

    is_croppable = True
    supports_early_init = False
    latent = 0  # size of the vector that it keeps in place of keys and values

    def __init__(self, fmt: str | Format, sequences: Sequences, *options: Any, **named: Any) -> None:
        CacheLayerMixin.__init__(self)
        BatchLayer.__init__(self, fmt, sequences, *options, **named)
        self.is_sliding = sequences.kind.window > 0
        self.made_for: MadeFor | None = None
        self.weights: torch.Tensor | None = None  # of the key projection that its calibration was made with
        self.is_new = True  # no attention module was seen
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None
        self.updates = 0
        self.places: list[torch.Tensor] = []  # where what is `written` begins: of the same sizes however many pages there are
        self._enter()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "token": None, "unknown": None, "places": [], "_like": None, "_rows": None, "_checked": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._enter()

    def _enter(self) -> None:
        """Be known to the layers of the same kind, and to operators."""
        self.sequences.join(self)
        self.unknown = PagedLength.of(UNKNOWN, self.sequences.windows)  # made here: in torch 2.11 no compiled pass can make one
        self.token = torch.empty(16, dtype=torch.uint8, device="cpu")
        known_by(self.token, self)

    def forget_pass(self) -> None:
        """Be as far as all layers are: what it took for a pass under way is gone."""
        self.turn, self._new = self.sequences.cache_positions.turn, None

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile passes of one token: pages for them are there, and no sequence outgrew them. `generate` asks
        before each, which is when to see that one would."""
        if not self.index and not is_capturing():
            self.sequences.cache_positions.watch()
        return self.sequences.static

    @property
    def record_past(self) -> bool:
        """Whether a crop may take back tokens that have left the window; transformers' name."""
        return self.sequences.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.sequences.record_past = value

    def activate_past_recording(self) -> None:
        """Keep what a later crop may need; transformers' name."""
        self.record_past = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate pages for rows of this kind."""
        self.pages = self._new_pages(key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Take `[S, HK, N, D]` keys and values; they are stored when the attention function gets what this returns."""
        if torch.compiler.is_compiling():
            HANDED.give(self)
            return key_states, value_states
        self.take(key_states, value_states)
        return LazyKV.of(key_states, self), LazyKV.of(value_states, self)

    def take(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """`update`, for an attention call that follows at once."""
        self._new, self.updates = (key_states, value_states), self.updates + 1

    def is_shared(self, update: int | None) -> bool:
        """Whether the rows of that update are stored, and asked for once more in their forward pass."""
        return self._new is None and update == self.updates

    def traced(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """`attend`, of rows that `update` was given, while torch.compile follows."""
        sequences = self.sequences
        if not (sequences.cache_positions.ready and query.shape[2] == 1):
            return pass_layer(query, key, value, mask, self.token, sinks, scale, softcap, self.index)
        decoding = sequences.decodings[query.device]
        if query.shape[0] != decoding.batch_size:
            refuse("batch size", query.shape[0], f"the cache holds {decoding.batch_size} sequences; reset it or take another")
        sequences.cache_positions.follow(self.index)
        if mask is None and sequences.cache_positions.padded:
            refuse("attention_mask", None, "this cache holds padded sequences: the mask must say where, in every call")
        return decode_layer(query, key, value, mask, [decoding.place, *self.places], sinks, scale, softcap, self.index)

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, update: int | None = None, **options: Any) -> torch.Tensor:
        """Store the new rows, then attention of `query [S, HQ, N, D]` over the pages -> `[S, N, HQ, D_V]`; 0 for padding on the left.

        update: which update brought the new rows. The rows of the last one can be read again in its forward pass, by layers that share
        keys and values. None: rows that were not read yet.
        A call that is refused changes nothing. One that fails later leaves a cache that refuses everything until it is reset.
        """
        if self.is_shared(update):  # Gemma 4 drops tokens whose output is not asked for before these layers: the last ones stay
            left_out = self.sequences.cache_positions.count - query.shape[2]
            return self._attend(torch.nn.functional.pad(query, (0, 0, left_out, 0)), **options)[:, left_out:]
        if self._new is None or self._new[0].shape[2] != query.shape[2]:
            raise RuntimeError("keys: each cache update is followed by one attention call over the same tokens")
        cache_positions = self.sequences.cache_positions
        if query.shape[2] == 1 and is_capturing() and cache_positions.ready:
            new, self._new = self._new, None
            cache_positions.follow(self.index)
            return self.decode(query, new, mask, self.leads, **options)
        cache_positions.catch_up()
        (key, value), self._new = self._new, None
        return self.run(query, key, value, mask, **options)

    def loaded(self, decoding: DecodeMetadata) -> None:
        """The next pass may run without the host, over `decoding` and the pages as they are."""
        known_by(decoding.place, self)
        written = self.written
        if [t.data_ptr() for t in written] != [t.data_ptr() for t in self.places]:
            with torch.inference_mode(False):
                self.places = [t.view(-1).view(torch.uint8)[:16] for t in written]
            for place in self.places:
                torch._dynamo.mark_static_address(place, guard=False)

    def get_seq_length(self) -> int | torch.Tensor:
        """Tokens that were seen, padding included."""
        cache_positions = self.sequences.cache_positions
        return cache_positions.counter if cache_positions.remote else self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys of a mask."""
        if self.sequences.cache_positions.remote or torch.compiler.is_compiling():
            return self.unknown, 0
        return PagedLength.of(self.seen + query_length, self.sequences.windows, self.made_for), 0

    def get_max_length(self) -> int:
        """Tokens that it has room for; -1: it grows."""
        return self.num_tokens if self.is_compileable else -1
