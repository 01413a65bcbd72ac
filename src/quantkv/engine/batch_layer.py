"""One layer of a batch whose pages `Sequences` manages: what a forward pass stores in them, and the attention that reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from ..cache import PagedCache
from ..checks import ROW_DTYPES, number, refuse, tensor
from ..copies import CacheWithCopies
from ..format import Format
from ..formats import get_format
from ..geometry import Heads, Kind
from ..options import PRECISIONS, PROMPT_QUERIES, AttentionOptions
from .decode_metadata import DecodeMetadata, mask_summary
from .forward_metadata import to_device
from .layer import LayerAttention, PagedLayer
from .layer_config import LayerConfig
from .sequences import Sequences
from .warm_up import check_prompts

GROWTH = 1.25  # a pool that is full grows by this factor: what is allocated stays close to what is used


class BatchLayer:
    """A layer of an engine that has no block manager: queries, keys and values come as `[S, H, N, D]`, N tokens a sequence.

    requested: its format, by name or as one. sequences: the pages of the batch, which it shares with the layers of its kind.
    stored_dtype: what format "none" stores; None: what the model computes.
    prompt: "own": sequences with several new tokens read the rows of these as given; "stored": all is read from the pages.
    num_tokens: tokens a sequence to allocate pages for at once. prompt_precision: of the scores of sequences with many new tokens.
    index: its number in a pass. turn: passes that it went through.
    config: how its rows are stored, as far as that is known; it may be replaced until the first rows. pages: None before these.
    """

    def __init__(
        self,
        fmt: str | Format,
        sequences: Sequences,
        dtype: torch.dtype | None,
        prompt: str,
        num_tokens: int,
        prompt_precision: str = PRECISIONS[0],
    ) -> None:
        self.requested, self.stored_dtype, self.prompt, self.num_tokens = fmt, dtype, prompt, num_tokens
        self.prompt_precision, self._prompts = prompt_precision, None  # and of what prompts were checked
        self.sequences, self.index, self.turn = sequences, sequences.cache_positions.num_layers, 0
        sequences.cache_positions.num_layers += 1
        sequences.num_tokens = max(sequences.num_tokens, num_tokens)
        sequences.fixed = sequences.num_tokens > 0
        self.config = LayerConfig(get_format(fmt, dtype or torch.bfloat16))
        self.paged: PagedLayer | None = None
        self.pages: PagedCache | None = None
        self.is_initialized = False
        self._like: tuple[torch.Size, torch.dtype, dict[str, Any]] | None = None  # of the last query, and its options
        self._with_copies: PagedCache | CacheWithCopies | None = None  # its cache, where some of its pages have 16-bit copies
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None  # of the pass under way, where other layers read them too
        self._checked: tuple[Any, ...] | None = None  # shapes, types and options of the last call, which were found right

    @property
    def seen(self) -> int:
        """Tokens that it holds, padding included, as far as the host knows."""
        cache_positions = self.sequences.cache_positions
        return cache_positions.seen + (cache_positions.count if self.turn > cache_positions.turn else 0)

    @property
    def home(self) -> torch.device | None:
        """The device of its pages; None before the first pass."""
        return None if self.pages is None else self.pages.device

    @property
    def cache(self) -> PagedCache | CacheWithCopies:
        """Its pages, with the 16-bit copies in front of them where some tokens are at full precision."""
        pages, pool = self.pages, self.sequences.pool(self.pages.device)
        self.paged.pool = pool
        cache = self.paged.cache(pages)
        if cache is not pages and cache is not self._with_copies:
            self._with_copies = cache
            layers = [layer for layer in self.sequences.layers if layer.home == pages.device and layer._with_copies is not None]
            if layers[-1] is self:
                pool.watch(pages)
        return cache

    @property
    def written(self) -> list[torch.Tensor]:
        """What a pass of one token writes to, beside its `DecodeMetadata`."""
        cache, pool = self.cache, self.sequences.pools.get(self.home)
        return [self.pages.buffer] + ([cache.copies.buffer, pool.state, pool.copies] if isinstance(cache, CacheWithCopies) else [])

    @property
    def full_precision_nbytes(self) -> int:
        """Bytes of its 16-bit copies of full-precision tokens."""
        return 0 if self.paged is None else self.paged.copies_nbytes

    @property
    def geometry(self) -> Any:
        """Equal for layers whose prepared calls are the same."""
        return self.cache.kind, None if self._like is None else (self._like[0][1], self._like[1])

    @property
    def leads(self) -> bool:
        """Whether it is the first of the layers that share its `DecodeMetadata`."""
        return next(layer for layer in self.sequences.layers if layer.home == self.home) is self

    def _new_pages(self, key: torch.Tensor, value: torch.Tensor) -> PagedCache:
        """Pages for rows such as key and value, `[S, HK, N, D]`."""
        dtype, heads = self.stored_dtype or key.dtype, Heads(key.shape[1], key.shape[3], value.shape[3])
        self.config = self.config.with_format(get_format(self.requested, dtype), self.sequences.full_precision)
        self.paged = PagedLayer(self.config, heads, dtype)
        blocks = self.paged.spec(self.sequences.block_size).num_blocks(self.num_tokens) * key.shape[0]
        return self.paged.allocate(max(blocks, 1), self.sequences.block_size, key.device)

    def run(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any) -> torch.Tensor:
        """Store new rows, then attention over the pages -> `[S, N, HQ, D_V]`; 0 for padding on the left.

        mask: bool `[S, tokens]`, False for padding; or `mask_summary` of it; None: nothing is padded. options: scale, softcap and sinks.
        A call that is refused changes nothing. One that fails later leaves a cache that refuses everything until it is reset.
        """
        pages = self._new_pages(key, value) if self.pages is None else self.pages
        call = tuple((t.shape, t.dtype, t.device) for t in (query, key, value))
        call += tuple(id(v) if isinstance(v, torch.Tensor) else v for v in options.values())  # `_like` keeps them alive
        if call != self._checked:
            self._check(pages, query, key, value, **options)
            self._checked = call
        with self._under_way(pages, query.shape[0], query.shape[2], mask):
            self._like = query.shape, query.dtype, options
            return self._attend(query, (key, value), mask, **options)

    @contextmanager
    def _under_way(self, pages: PagedCache, batch_size: int, count: int, mask: torch.Tensor | None) -> Iterator[None]:
        """The pass over `count` new tokens of each sequence, for which the layer has pages and room. One that fails leaves a cache that
        refuses everything until it is reset. pages: where this is the first."""
        cache_positions = self.sequences.cache_positions
        cache_positions.enter(self.seen, batch_size, count, mask)
        self.pages, self.is_initialized = pages if self.pages is None else self.pages, True  # `enter` may have made them more
        try:
            self.make_room(self.sequences.table.num_pages, [])
            yield
            self.turn = cache_positions.turn + 1
            cache_positions.leave()
        except BaseException:
            cache_positions.failed = True
            raise

    def _attend(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
        mask: torch.Tensor | None = None,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.sequences.loaded:
            return self.decode(query, new, mask, scale=scale, softcap=softcap, sinks=sinks)
        step, cache = self.sequences.step(query.device), self.cache
        if new is not None:
            rows = tuple(_tokens(t) for t in new)
            step.write(cache, *rows)
            self._rows = rows if self.sequences.cache_positions.shared else None
        else:  # of a layer that reads what this one stored
            rows = self._rows
        key, value = rows if self.prompt == "own" and rows is not None else (None, None)
        shared = shared_options(self.sequences.kind, softcap, self.prompt_precision)
        out = step.attend(cache, _tokens(query), scale, shared, key=key, value=value, sinks=sinks)
        return out.unflatten(0, (query.shape[0], query.shape[2]))

    def decode(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        mask: torch.Tensor | None,
        leads: bool | None = None,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A pass of one token a sequence; nothing here depends on what a tensor holds. leads: whether this layer is the first of those
        that share a `DecodeMetadata`, and advances it; None: whichever comes first."""
        decoding = self.sequences.decodings[query.device]
        if leads is None:
            leads = new is not None and self._leads_now(decoding)
        if leads:
            decoding.advance(mask_summary(mask) if mask is not None and mask.ndim == 2 else mask, self.sequences.pools.get(query.device))
        cache, shared = self.cache, shared_options(self.sequences.kind, softcap)
        if new is not None:
            decoding.write(cache, *(_last(t) for t in new))
        out = decoding.attend(cache, _last(query), scale, shared, sinks=sinks)
        return (decoding.poison(out) if leads else out)[:, None]

    def _leads_now(self, decoding: DecodeMetadata) -> bool:
        """Whether it is the first in this pass of the layers that share `decoding`."""
        turn = self.sequences.cache_positions.turn
        first, decoding.turn = decoding.turn != turn, turn
        return first

    def store(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the new rows `[S, HK, N, D]` of the pass under way."""
        if not self.sequences.loaded:
            self.sequences.step(key.device).write(self.cache, _tokens(key), _tokens(value))
            return
        decoding, cache = self.sequences.decodings[key.device], self.cache
        if self._leads_now(decoding):
            decoding.advance(None, self.sequences.pools.get(key.device))
        decoding.write(cache, _last(key), _last(value))

    def warm_up(self) -> None:
        """Run what `decode` runs, for a token that is not stored."""
        if self._like is None:  # a copy of a cache
            return
        (_, heads, _, head_size), dtype, options = self._like
        batch_size, spec = self.sequences.decodings[self.home].batch_size, self.pages.spec
        query = torch.zeros(batch_size, heads, 1, head_size, dtype=dtype, device=self.home)
        new = (query.new_zeros(batch_size, spec.num_kv_heads, 1, size) for size in (spec.head_size, spec.head_size_v))
        self.decode(query, tuple(new), None, False, **options)

    def _check(
        self, pages: PagedCache, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, **options: Any
    ) -> None:
        """Refuse what write and attend would, before anything advances."""
        spec, batch_size, count = pages.spec, query.shape[0], query.shape[2]
        tensor("key", key, (batch_size, spec.num_kv_heads, count, spec.head_size), ROW_DTYPES, pages.device)
        tensor("value", value, (batch_size, spec.num_kv_heads, count, spec.head_size_v), (key.dtype,), pages.device)
        tensor("query", query, (None, None, None, self._query_size(pages)), ROW_DTYPES, pages.device)
        if query.shape[1] % spec.num_kv_heads:
            refuse("query.shape[1]", query.shape[1], f"a multiple of the {spec.num_kv_heads} kv heads is needed")
        given = AttentionOptions(**self.sequences.kind.options, **options, prompt_precision=self.prompt_precision)
        given.check({"S": batch_size, "HQ": query.shape[1]}, pages.device)
        if scale is not None:
            number("scaling", scale)
        like = query.shape[1], scale, query.dtype, given.softcap
        if count >= PROMPT_QUERIES and self._prompts != like:  # once: it takes a millisecond
            heads = Heads(spec.num_kv_heads, spec.head_size, spec.head_size_v)
            check_prompts(LayerAttention(query.shape[1], scale, given), heads, query.dtype, pages.device)
            self._prompts = like

    def _query_size(self, pages: PagedCache) -> int:
        """Numbers of a head's query, as it comes."""
        return pages.spec.head_size

    def make_room(self, num_pages: int, copies: list[tuple[int, int]]) -> None:
        """At least `num_pages` pages, and copies of those that are shared no longer."""
        if self.pages is None:
            return
        if num_pages > self.pages.num_blocks:
            old = self.pages
            self.pages = self.paged.allocate(max(num_pages, int(old.num_blocks * GROWTH)), old.spec.block_size, old.device)
            self.pages.buffer[: old.num_blocks] = old.buffer
        if copies:
            self.pages.copy_pages(*to_device(torch.tensor(copies, device="cpu").T.contiguous(), self.pages.device))
        if self._with_copies is not None:
            _ = self.cache  # as many copies as the pool has now


@cache
def shared_options(kind: Kind, softcap: float, prompt_precision: str = PRECISIONS[0]) -> AttentionOptions:
    """The options of attention that layers of a kind share."""
    return AttentionOptions(**kind.options, softcap=softcap, prompt_precision=prompt_precision)


def _tokens(states: torch.Tensor) -> torch.Tensor:
    """`[S, H, N, D]` -> `[S * N, H, D]`."""
    return states.transpose(1, 2).flatten(0, 1)


def _last(states: torch.Tensor) -> torch.Tensor:
    """`[S, H, 1, D]` -> `[S, H, D]`, dense: of the same strides in every pass."""
    return states[:, :, -1].contiguous()
