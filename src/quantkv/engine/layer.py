"""One layer as an engine has it: its pages, the 16-bit copies in front of them, and what its calls of attention have in common."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from ..cache import PagedCache
from ..copies import CacheWithCopies, CopiedPages, cache_of_copies
from ..geometry import Heads
from ..options import AttentionOptions, goes_by_position
from ..spec import CacheSpec
from .layer_config import UNQUANTIZED, LayerConfig


@dataclass(frozen=True)
class LayerAttention:
    """What a layer's calls of attention have in common.

    num_heads: query heads of this rank. scale: of the scores; None: `D ** -0.5`. options: those that are no tensors.
    sinks, alibi_slopes: float `[HQ]`, on any device; None: it has none.
    own_rows: whether sequences with several queries read their own rows as given, see `PagedCache.attend`.
    """

    num_heads: int
    scale: float | None = None
    options: AttentionOptions = AttentionOptions()
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    own_rows: bool = True

    @property
    def by_position(self) -> bool:
        """Whether more than causality depends on where a key stands."""
        return goes_by_position(self.options) or self.alibi_slopes is not None

    def over(self, config: LayerConfig) -> LayerAttention:
        """The same over pages of rows that are stored so: pages that keep rows as they are hold the same numbers, and all is read there."""
        return replace(self, own_rows=False) if config.format.name in UNQUANTIZED else self

    def with_sinks(self, sinks: torch.Tensor | None) -> LayerAttention:
        """The same with the sinks of a layer whose engine gives them with each call."""
        return self if sinks is None else replace(self, sinks=sinks)

    def tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Its sinks and slopes by name, those that it has, on a device."""
        given = {"sinks": self.sinks, "alibi_slopes": self.alibi_slopes}
        return {name: t.detach().to(device) for name, t in given.items() if t is not None}


class PagedLayer:
    """One layer's pages, whoever owns their memory.

    config: how rows are stored. heads: kv heads of this rank. dtype: of queries, keys and values, and of the 16-bit copies.
    scales: per-tensor scales of K and V. owner: the layer whose pages it reads; None: they are its own.
    pool: which pages have a 16-bit copy; None: none has one. copies: the 16-bit copies.
    """

    def __init__(self, config: LayerConfig, heads: Heads, dtype: torch.dtype, scales: tuple[float, float] = (1.0, 1.0)) -> None:
        self.config, self.heads, self.dtype, self.scales = config, heads, dtype, scales
        self.owner: PagedLayer | None = None
        self.pool: CopiedPages | None = None
        self.copies: PagedCache | None = None
        self._with_copies: CacheWithCopies | None = None

    def kind(self, attention: LayerAttention) -> Hashable:
        """Equal for layers that the same kernels serve."""
        traits = tuple(None if map_ is None else map_.traits for map_ in (self.config.maps.k, self.config.maps.v))
        given = attention.sinks is None, attention.alibi_slopes is None, attention.own_rows
        return self.config.format.name, attention.num_heads, self.heads, attention.options, traits, given

    def spec(self, block_size: int) -> CacheSpec:
        """Geometry of pages of `block_size` tokens."""
        return self.config.format.cache_spec(*self.heads, block_size)

    def wrap(self, buffer: torch.Tensor, block_size: int) -> PagedCache:
        """The layer's pages in an engine's memory: see `PagedCache.wrap`."""
        k_scale, v_scale = self.scales
        return PagedCache.wrap(buffer, self.spec(block_size), maps=self.config.maps, k_scale=k_scale, v_scale=v_scale)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> PagedCache:
        """Pages in new memory."""
        k_scale, v_scale = self.scales
        return PagedCache(self.spec(block_size), num_blocks, device, maps=self.config.maps, k_scale=k_scale, v_scale=v_scale)

    def reserve_copies(self, block_size: int, num_seqs: int, device: torch.device) -> None:
        """Take the memory of the 16-bit copies of `num_seqs` sequences now, before an engine gives the rest of the GPU to pages.

        Rotations stay on the CPU until there are pages. An engine may take this memory from a pool of its weights, which it forgets while
        it sleeps and loads again. Copies are written before they are read; a rotation would be gone for good.
        """
        if self.config.full_precision is not None:
            count = self.config.full_precision.copies_needed(block_size, num_seqs)
            pages = self.allocate(1, block_size, torch.device("cpu"))
            self._hold(pages.as_stored() if pages.spec.latent else pages, count, device)

    def cache(self, pages: PagedCache) -> PagedCache | CacheWithCopies:
        """Pages of the layer as its calls take them: with the 16-bit copies in front of them, where the pool's pages have some."""
        owner = self.owner or self
        pool = owner.pool
        if pool is None or owner.config.full_precision is None:
            return pages
        held, found = owner.copies, self._with_copies
        if held is None or held.spec.block_size != pages.spec.block_size or held.num_blocks < pool.num_copies:  # than when it was taken
            held = owner._hold(pages, pool.num_copies)
        elif held.spec.latent and held.maps.k is not pages.maps.k:  # which its copies share
            held = owner._hold(pages, held.num_blocks)
        if found is None or found.pages is not pages or found.full_precision is not pool or found.copies is not held:
            found = self._with_copies = CacheWithCopies(pages, held, pool)
        return found

    @property
    def copies_nbytes(self) -> int:
        """Bytes of its 16-bit copies."""
        return 0 if self.copies is None else self.copies.nbytes

    def _hold(self, pages: PagedCache, count: int, device: torch.device | None = None) -> PagedCache:
        """Room for `count` copies, on the device of their pages or another; those that are there stay."""
        old, self.copies = self.copies, None
        with torch.inference_mode(False):  # as pages: written to in any mode
            same = old is not None and old.num_blocks == count and old.spec.block_size == pages.spec.block_size
            self.copies = cache_of_copies(pages, count, self.dtype, old.buffer if same else None, device)
            if not same and old is not None and old.spec == self.copies.spec and old.num_blocks <= count:
                self.copies.buffer[: old.num_blocks] = old.buffer
        return self.copies
