"""Forward metadata: what the layers of one forward pass have in common, as prepared calls that each layer only launches."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from ..cache import PagedCache
from ..calls import Batch
from ..copies import CacheWithCopies, CopiedPages, FullPrecisionStep
from ..formats import get_format
from ..options import AttentionOptions
from ..prepared import PreparedAttend, PreparedWrite


class ForwardMetadata:
    """A forward pass of S sequences, the same for all layers that share page tables.

    batch: the queries and keys of each sequence. block_table: int32 `[S, pages]`.
    slots: int `[T]`, where the new rows go; a negative one skips its row. None: each write says.
    positions: int `[T]`, where the new tokens stand in their sequences; None for a pass that stores no keys with a mean by position.
    num_tokens: rows of queries and outputs that are no padding; None: all.
    prefix_ranges: int32 `[S, R, 2]`, positions of images whose tokens see each other, inclusive; None: there are none.
    num_pages: pages that the block table may name; 0: as many as the cache has.
    full_precision: what the pass reads at full precision; None: nothing. See `advance_full_precision`.
    lent: the pass's own rows of layers whose pages other layers read, by the layer. See `own_rows`.
    Tensors are read when a layer runs, so they may be filled anew for another pass of the same shape.
    """

    def __init__(
        self,
        batch: Batch,
        block_table: torch.Tensor,
        slots: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        *,
        num_tokens: int | None = None,
        prefix_ranges: torch.Tensor | None = None,
        num_pages: int = 0,
        full_precision: FullPrecisionStep | None = None,
    ) -> None:
        self.batch, self.block_table, self.slots, self.positions = batch, block_table, slots, positions
        self.num_tokens, self.prefix_ranges, self.num_pages, self.full_precision = num_tokens, prefix_ranges, num_pages, full_precision
        self.lent: dict[Hashable, dict[str, torch.Tensor]] = {}
        self._writes: dict[Any, PreparedWrite] = {}
        self._attends: dict[Any, PreparedAttend] = {}

    def advance_full_precision(self, pool: CopiedPages) -> None:
        """Before the first layer: which pages have a 16-bit copy in this pass, into `full_precision`, which is made where there is none."""
        if self.full_precision is None:
            self.full_precision = FullPrecisionStep(pool.tokens, pool.block_size, self.batch.num_seqs, len(self.slots), pool.device)
        pool.advance(self.block_table, self.batch.seq_lens, self.batch.cu_seqlens_q, self.slots, self.full_precision)

    def write(
        self,
        cache: PagedCache | CacheWithCopies,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor | None = None,
        mean: torch.Tensor | None = None,
    ) -> None:
        """Store the new rows of a layer, `[T, HK, D]` and `[T, HK, D_V]`; rows beyond the slots are padding.

        slots: of the layers that share this page table; None: those of the pass. mean: `[D]`, taken off the keys first."""
        slots = self.slots if slots is None else slots
        count, by_position = len(slots), cache.maps.by_position
        kind = id(slots), by_position
        if kind not in self._writes:
            self._writes[kind] = PreparedWrite(slots, self.positions[:count] if by_position else None, full_precision=self.full_precision)
        if count != key.shape[0]:
            key, value = key[:count], value[:count]
        self._writes[kind](cache, key, value, mean)

    def attend(
        self,
        cache: PagedCache | CacheWithCopies,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        scale: float | None = None,
        options: AttentionOptions = AttentionOptions(),
        *,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        mean: torch.Tensor | None = None,
        **per_layer: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of a layer's `q [T, HQ, D]` -> `[T, HQ, D_V]`, after `write`.

        scale, options: of the layer. Layers with the same ones share what is prepared. `clamp_prefix_to_window` counts where there are
        images. per_layer: its sinks and alibi_slopes. out: put there instead of into a new tensor. q in two parts, mean: as of
        `PreparedAttend`.
        key, value: the pass's own rows as `write` takes them, which sequences with several queries read as given, in place of what the
        pages hold of them; those of another layer where its pages are read. None: everything is read from the pages.
        """
        prepared = self._attends.get((scale, options))
        if prepared is None:
            prepared = self._attends[scale, options] = PreparedAttend(
                self.batch, self.block_table, scale, self._with_images(options), full_precision=self.full_precision
            )
        count, own = self.num_tokens, None if key is None or self.batch.max_query_len == 1 else (key, value)
        if count is not None:
            q = tuple(t[:count] for t in q) if isinstance(q, tuple) else q[:count]
            out, own = None if out is None else out[:count], own and (key[:count], value[:count])
        return prepared(cache, q, out=out, own=own, mean=mean, **per_layer)

    def own_rows(
        self, owner: Hashable, key: torch.Tensor | None, value: torch.Tensor | None, lends: bool = False
    ) -> dict[str, torch.Tensor]:
        """The pass's own rows, `key` and `value` as `attend` takes them; none where each sequence has one query.

        owner: the layer whose pages are read. key, value: its rows; None: another layer stored them, and lent them to this one. lends: they
        are lent to others, as copies: what comes later in a graph may take their memory.
        """
        if self.batch.max_query_len == 1:
            return {}
        if key is None:
            return self.lent.get(owner, {})
        rows = {"key": key, "value": value}
        if lends:
            rows = self.lent[owner] = {name: t.clone() for name, t in rows.items()}
        return rows

    def as_given(self, cache: PagedCache | CacheWithCopies, key: torch.Tensor, value: torch.Tensor) -> PagedCache:
        """New pages that hold the pass's own rows as given, and nothing else; key and value as `write` takes them."""
        pages = cache.pages if isinstance(cache, CacheWithCopies) else cache
        plain = get_format("none", key.dtype).cache_spec(key.shape[1], key.shape[2], value.shape[2], pages.spec.block_size)
        own = PagedCache(plain, self.num_pages or pages.num_blocks, key.device)
        self.write(own, key, value)
        return own

    def _with_images(self, options: AttentionOptions) -> AttentionOptions:
        if self.prefix_ranges is None:
            return replace(options, clamp_prefix_to_window=False) if options.clamp_prefix_to_window else options
        return replace(options, prefix_ranges=self.prefix_ranges)


def is_capturing() -> bool:
    """Whether what is called now will run again without the host: it is being compiled, or captured."""
    return torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def to_device(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`; the host does not wait."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)
