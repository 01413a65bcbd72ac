"""Pages in memory that others own, in whatever layout, and copies of pages from one cache to another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from . import checks
from .cache import PagedCache
from .calls import PagedTensor, Segment
from .format import Format
from .maps import LayerMaps
from .page_meaning import PageMeaning
from .spec import CacheSpec


@dataclass(frozen=True)
class PageViews:
    """One layer's pages where an engine has put them: K and V as strided views, what their bytes mean, and the layer's maps.

    `quantkv.vllm_api.page_views` makes one of a tensor of vLLM's.
    """

    k: PagedTensor
    v: PagedTensor
    format: Format
    maps: LayerMaps

    @property
    def num_blocks(self) -> int:
        """Pages of the tensor."""
        return self.k.codes.shape[0]

    @property
    def spec(self) -> CacheSpec:
        """Its geometry; where the bytes of a page lie is the engine's own."""
        (size, heads), sides = self.k.codes.shape[1:3], ((self.format.k, self.k), (self.format.v, self.v))
        return self.format.cache_spec(heads, *(codec.head_size(side.codes) for codec, side in sides), block_size=size)

    @property
    def device(self) -> torch.device:
        """Where the tensor lies."""
        return self.k.codes.device

    def segment(self, block_table: torch.Tensor) -> Segment:
        """The keys of every sequence that lie in these pages, to attend to them where they are: see `Segment`."""
        return Segment(self.k, self.v, self.format, block_table, self.maps)


def copy_pages_between(
    source: PagedCache | PageViews, target: PagedCache | PageViews, pages: Iterable[int], target_pages: Iterable[int] | None = None
) -> None:
    """Copy `pages` of `source` onto `target_pages` (the same numbers if None) of `target`, in order: the codes and metadata of every
    token and head, byte for byte, from one layout and device to another.

    ValueError, with nothing copied, where one side is no cache and no views, where page numbers are not distinct pages of their cache, or
    where a byte would not mean the same in the target: another format, another number of tokens in a page, other heads, head sizes, scales
    or maps.
    """
    for name, side in (("source", source), ("target", target)):
        checks.instance(name, side, (PagedCache, PageViews), "a PagedCache or PageViews")
    pages = checks.page_numbers(pages, source.num_blocks, "pages")
    targets = checks.page_numbers(pages if target_pages is None else target_pages, target.num_blocks, "target_pages")
    if len(targets) != len(pages):
        checks.refuse("target_pages", len(targets), f"a page is needed for each of the {len(pages)} to copy")
    PageMeaning.of(target).check_same(PageMeaning.of(source), "source ", "the target's is")
    index, into = (torch.tensor(n, dtype=torch.int64, device=c.device) for n, c in ((pages, source), (targets, target)))
    for theirs, ours in zip(_bytes(source), _bytes(target)):
        ours[into] = theirs[index].to(target.device)


def _bytes(cache: PagedCache | PageViews) -> list[torch.Tensor]:
    """Codes and metadata of K and V as bytes: what they hold as numbers may be NaN."""
    return [t.view(torch.uint8) for side in (cache.k, cache.v) for t in (side.codes, side.meta) if t is not None]
