"""16-bit copies of the tokens that are read exactly, in front of the pages of a cache.

Every token is quantized into its page. Some pages have a copy, a page of 16-bit rows in a small pool, found by the number of the
page. Which ones is worked out once a step, on the device, from the block table alone: an engine keeps no state for it. A page that was
moved, shared or computed elsewhere has no copy, and is read quantized.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import checks, deprecated
from .assumed import assumed
from .cache import PagedCache
from .calls import Segment
from .copied_rows import put_copies
from .formats import get_format
from .full_precision import FullPrecisionTokens
from .full_precision_step import FullPrecisionStep, check_made_for
from .options import goes_by_position  # noqa: F401  an old name of `shadow`
from .own import FEW_QUERIES  # noqa: F401  likewise


@deprecated.attributes(num_shadows="num_copies", shadow_of="copy_of")
class CopiedPages:
    """Which pages have a copy, for all layers that share block tables: on the device, and changed by its operations alone.

    tokens: which are exact. num_seqs: sequences for which the pool has room (`FullPrecisionTokens.copies_needed`); where more are in use,
        those that have a copy keep it.
    num_blocks: pages of a cache. `make_room` adds more of both.
    copy_of: int64 `[num_blocks + 1]`, the copy of each page, -1 for none; owner: int64 `[P + 1]`, the page of each copy, or -1;
        stamp: int64 `[P + 1]`, the step in which it was last of interest; now: int64, the step. The last entries are for what is to be
        dropped.
    A copy is believed only where the K rows beside it, as the cache that `watch` names stored them, are those of the page: whoever
    overwrites a page behind our back changes them. That should be the last of the layers, whose rows depend on the whole context.
    """

    def __init__(
        self, tokens: FullPrecisionTokens, block_size: int, num_seqs: int, num_blocks: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        self.device = check_made_for(tokens, block_size, num_seqs, device)
        checks.integer("num_blocks", num_blocks, 0, "a number of pages")
        self.tokens, self.block_size = tokens, block_size
        self.sink, self.recent = tokens.copied_pages(block_size)
        self.watched: PagedCache | None = None
        self._launches: Any = None
        with torch.inference_mode(False):
            self.copies = torch.zeros(0, dtype=torch.uint8, device=self.device)  # [P + 1, HK, block_size, bytes] of rows of `watched`
            self._column = torch.arange(self.sink + self.recent, device=self.device)
            self._within = torch.arange(block_size, device=self.device)
        self.state: torch.Tensor | None = None
        self._resize(tokens.copies_needed(block_size, num_seqs), num_blocks)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _launches=None)
        self._views()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_launches"}

    def _resize(self, num_copies: int, num_blocks: int) -> None:
        old = () if self.state is None else (self.now[None], self.owner[:-1], self.stamp[:-1], self.copy_of[:-1])
        with torch.inference_mode(False):
            self.state = torch.full((1 + 2 * (num_copies + 1) + num_blocks + 1,), -1, device=self.device)
            self.num_copies, self.num_blocks = num_copies, num_blocks
            self._views()
            self.now.zero_(), self.stamp.zero_()
            for new, held in zip((self.now[None], self.owner, self.stamp, self.copy_of), old):
                new[: len(held)] = held
            if len(self.copies):
                self.copies = torch.cat([self.copies, self.copies.new_zeros(num_copies + 1 - len(self.copies), *self.copies.shape[1:])])

    def _views(self) -> None:
        """Everything lies in one tensor, so that whoever captured a graph over it can tell that it is another."""
        count = self.num_copies + 1
        self.now, self.owner, self.stamp = self.state[0], self.state[1 : 1 + count], self.state[1 + count : 1 + 2 * count]
        self.copy_of = self.state[1 + 2 * count :]

    def make_room(self, num_seqs: int, num_blocks: int) -> None:
        """For at least so many sequences and pages."""
        num_copies = max(self.tokens.copies_needed(self.block_size, num_seqs), self.num_copies)
        if num_copies > self.num_copies or num_blocks > self.num_blocks:
            self._resize(num_copies, max(num_blocks, self.num_blocks))

    def watch(self, pages: PagedCache) -> None:
        """Keep copies of the K rows that `pages` stores. ValueError for pages of another size."""
        self.check_pages(pages)
        known, self.watched, self._launches = self.watched, pages, None
        self.make_room(0, pages.num_blocks)
        if known is None or known.spec != pages.spec:
            heads, size, width = pages.spec.num_kv_heads, self.block_size, sum(rows.shape[3] for rows in _rows(pages))
            with torch.inference_mode(False):
                self.copies = torch.zeros(self.num_copies + 1, heads, size, width, dtype=torch.uint8, device=self.device)

    def check_pages(self, pages: PagedCache) -> None:
        """ValueError unless these are pages of its size."""
        checks.instance("pages", pages, PagedCache, "a PagedCache")
        if pages.spec.block_size != self.block_size:
            checks.refuse("pages.spec.block_size", pages.spec.block_size, f"full_precision has pages of {self.block_size} tokens")

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Rows of the watched pages, and their copies."""
        rows = _rows(self.watched)
        return zip(rows, self.copies.split([t.shape[3] for t in rows], 3))

    def clear(self) -> None:
        """No page has a copy any more."""
        self.copy_of.fill_(-1), self.owner.fill_(-1), self.stamp.fill_(0)

    def forget(self, pages: torch.Tensor) -> None:
        """Pages `[N]`, int64, have no copy any more."""
        copy = self.copy_of[pages]
        self.copy_of[pages] = -1
        self._put(copy >= 0, copy, owner=-1, stamp=0)

    def _put(self, where: torch.Tensor, copy: torch.Tensor, owner: torch.Tensor | int, stamp: torch.Tensor | int) -> None:
        index = torch.where(where, copy, self.num_copies)
        for state, value in ((self.owner, owner), (self.stamp, stamp)):
            state[index] = value if isinstance(value, torch.Tensor) else torch.full_like(index, value)

    def _assign(self, where: torch.Tensor, page: torch.Tensor, copy: torch.Tensor | int) -> None:
        self.copy_of[torch.where(where, page, self.num_blocks)] = torch.where(where, copy, -1)

    def advance(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        slot_mapping: torch.Tensor,
        step: FullPrecisionStep,
    ) -> None:
        """Before the step in which `slot_mapping [T]` is written to and read by queries `cu_seqlens_q [S + 1]`: which pages it reads
        exactly, into `step`. block_table: int `[S, pages]`. seq_lens: int `[S]`, keys, the new ones included.

        Nothing here waits for the device or depends on what a tensor holds, so that it can be captured in a graph. Whatever else changes
        pages that this step reads must have done so before. ValueError for shapes, dtypes and devices that do not fit, or another step.
        """
        self._check_step(block_table, seq_lens, cu_seqlens_q, slot_mapping, step)
        size, sink = self.block_size, self.sink
        kernels = kernels_of(self.device, sink + self.recent)
        if kernels is not None and block_table.numel():
            self._advance_by(kernels, block_table, seq_lens, cu_seqlens_q, slot_mapping, step)
            return
        step.slots.fill_(-1)
        if not block_table.shape[1]:  # no sequence holds a token
            return
        length, new = seq_lens.long()[:, None], cu_seqlens_q.long().diff()[:, None]
        base = self.tokens.first_recent_page(length, size)
        index = torch.where(self._column < sink, self._column, base + (self._column - sink))  # [S, pages of interest]
        held = index * size < length
        page = block_table.gather(1, torch.where(held, index, 0).clamp_max(block_table.shape[1] - 1)).long()
        page = torch.where(held & (page >= 0) & (page < self.num_blocks), page, self.num_blocks)
        self.now += 1
        self._doubt(page, index, length - new)
        self._claim(page, index, length, new, cu_seqlens_q, slot_mapping)
        copy = self.copy_of[page]
        self._lay_out(copy, held, base, length, new, step)
        if len(slot_mapping):
            slots = slot_mapping.long()
            copy = self.copy_of[torch.where(slots >= 0, slots // size, self.num_blocks).clamp_max(self.num_blocks)]
            step.slots[: len(slots)] = torch.where(copy >= 0, copy * size + slots % size, -1)

    def _check_step(self, block_table, seq_lens, cu_seqlens_q, slot_mapping, step: FullPrecisionStep) -> None:
        checks.instance("step", step, FullPrecisionStep, "a FullPrecisionStep")
        step.check(self.tokens, self.block_size)
        device = self.state.device  # "cuda" with its number
        checks.tensor("block_table", block_table, (None, None), checks.INDEX_DTYPES, device)
        count = len(block_table)
        checks.tensor("seq_lens", seq_lens, (count,), checks.INDEX_DTYPES, device)
        checks.tensor("cu_seqlens_q", cu_seqlens_q, (count + 1,), checks.INDEX_DTYPES, device)
        checks.tensor("slot_mapping", slot_mapping, (None,), checks.INDEX_DTYPES, device)
        for name, given, room in (("block_table", count, len(step.between)), ("slot_mapping", len(slot_mapping), len(step.slots))):
            if given > room:
                checks.refuse(f"{name}.shape[0]", given, f"step has room for {room}")

    def _advance_by(self, kernels: Any, block_table, seq_lens, cu_seqlens_q, slot_mapping, step: FullPrecisionStep) -> None:
        given = {
            "table": block_table if block_table.stride(1) == 1 else block_table.contiguous(),
            "seq_lens": seq_lens.contiguous(),
            "ends": cu_seqlens_q.contiguous(),
            "state": self.state,
            "slots": slot_mapping.contiguous(),
            "wrong": step.scratch[0],
            "claims": step.scratch[1],
            "width": block_table.shape[1],
            "sequences": len(seq_lens),
            "tokens": len(slot_mapping),
            "num_slots": len(step.slots),
            "num_copies": self.num_copies,
            "num_blocks": self.num_blocks,
            "watched_blocks": 0 if self.watched is None else self.watched.num_blocks,
        }
        given["table_stride"] = given["table"].stride(0)
        rows = () if self.watched is None else tuple(_rows(self.watched))
        places = kernels.Step(step.slots, step.between, *step.recent, *(step.sink or (None,) * 2), *(step.joined or (None,) * 3))
        compiled = {"N": self.sink + self.recent, "SINK": self.sink, "RECENT": self.tokens.recent, "PAGE": self.block_size}
        self._launches_by(kernels).advance(given, rows, self.copies, places, compiled)

    def _launches_by(self, kernels: Any) -> Any:
        if self._launches is None:
            self._launches = kernels.Launches()
        return self._launches

    def _doubt(self, page: torch.Tensor, index: torch.Tensor, stored: torch.Tensor) -> None:
        """Forget 16-bit copies of pages `[S, N]` that do not hold what was stored. stored: `[S, 1]`, tokens that were before this step."""
        if self.watched is None:
            return
        copy = self.copy_of[page]
        known, real = copy.clamp_min(0), page.clamp_max(self.watched.num_blocks - 1)
        before = index[..., None] * self.block_size + self._within < stored[..., None]  # [S, N, block_size]
        differs = torch.zeros_like(before)
        for rows, copies in self._pairs():
            differs |= (rows[real] != copies[known]).any(-1).any(2)
        wrong = (differs & before).any(-1) & (copy >= 0)
        self._assign(wrong, page, -1)
        self._put(wrong, copy, owner=-1, stamp=0)

    def _claim(self, page, index, length, new, cu_seqlens_q, slot_mapping) -> None:
        """Give a copy to the pages of which this step writes the first slot: the n-th takes the n-th oldest copy, unless that is
        in use."""
        size, copy = self.block_size, self.copy_of[page]
        self.stamp[torch.where(copy >= 0, copy, self.num_copies)] = self.now
        if not len(slot_mapping):
            return
        own = index * size - (length - new)  # the first slot, among the sequence's new tokens: who shares the page does not claim it too
        token = (cu_seqlens_q[:-1, None] + own).clamp(0, len(slot_mapping) - 1)
        written = (own >= 0) & (page < self.num_blocks) & (slot_mapping[token.long()] == page * size)
        once = (self._column < self.sink) | (index >= self.sink)  # a page that is of the first and of the latest
        claim = (written & once & (copy < 0)).flatten()
        page = page.flatten()
        oldest = torch.sort(self.stamp[:-1], stable=True).indices
        rank = claim.cumsum(0) - 1
        taken = oldest[rank.clamp(0, self.num_copies - 1)]
        claim = claim & (rank < self.num_copies) & (self.stamp[taken] < self.now)
        before = self.owner[taken]
        self._assign(claim & (before >= 0), before, -1)
        self._assign(claim, page, taken)
        self._put(claim, taken, page, self.now.expand_as(taken))

    def _lay_out(self, copy, held, base, length, new, step: FullPrecisionStep) -> None:
        """Fill `step`. All in pages `[S, 1]`: begin, how many of the first have a copy; end, from where on all have one."""
        size, sink = self.block_size, self.sink
        pages = (length + size - 1) // size
        copied = copy >= 0
        begin = copied[:, :sink].long().cumprod(1).sum(1, keepdim=True)
        missing = held[:, sink:] & ~copied[:, sink:]
        end = base + (missing * (self._column[sink:] - sink + 1)).amax(1, keepdim=True)
        end = torch.maximum(end, begin)
        full_precision_from = torch.where((end < pages) | (begin == pages), end * size, length)
        recent = (end - base + self._column[: self.recent]).clamp_max(self.recent - 1) + sink
        copy = copy.clamp_min(0)
        step.recent[0].copy_(copy.gather(1, recent))
        step.recent[1].copy_(full_precision_from[:, 0])
        step.between.copy_(torch.cat([begin * size, full_precision_from], 1))
        if step.sink is None:
            return
        step.sink[0].copy_(copy[:, :sink])
        step.sink[1].copy_(torch.cat([torch.zeros_like(begin), begin * size], 1))
        if step.joined is None:
            return
        # The first stand right before the latest: every query must be beyond them. Where one is not, they are read quantized.
        begin = begin * ((full_precision_from <= length - new + 1) | (end == begin))
        table, key_start, between = step.joined
        column = torch.where(self._column < begin, self._column, (end - base - begin + self._column).clamp_max(self.recent - 1) + sink)
        table.copy_(copy.gather(1, column))
        key_start.copy_((full_precision_from - begin * size)[:, 0])
        between.copy_(torch.cat([begin * size, full_precision_from], 1))

    def note(self, slot_mapping: torch.Tensor, step: FullPrecisionStep) -> None:
        """After the watched cache stored the rows of the step: keep copies of them. Where a slot is below 0 no row was stored."""
        kernels = kernels_of(self.device, self.sink + self.recent)
        if kernels is not None and len(slot_mapping):
            counts = {"tokens": len(slot_mapping), "num_copies": self.num_copies}
            rows = tuple(_rows(self.watched))
            self._launches_by(kernels).note(
                {"slots": slot_mapping.contiguous(), "copy_slots": step.slots, **counts}, rows, self.copies, self.block_size
            )
            return
        slots, copies = slot_mapping.long(), step.slots[: len(slot_mapping)].long()
        target = torch.where((copies >= 0) & (slots >= 0), copies // self.block_size, self.num_copies)
        page, within = slots.clamp_min(0) // self.block_size, slots % self.block_size
        for rows, kept in self._pairs():
            kept[target, :, within] = rows[page, :, within]


@deprecated.attributes(shadow="copies", exact="full_precision")
class CacheWithCopies:
    """One layer's cache with the 16-bit pages in front of it. `prepare_write` and `prepare_attend` take it in place of a `PagedCache`.

    pages: of all tokens. copies: `full_precision.num_copies` pages, see `cache_of_copies`. full_precision: which pages have one.
    """

    def __init__(self, pages: PagedCache, copies: PagedCache, full_precision: CopiedPages) -> None:
        for name, given, kind in (
            ("pages", pages, PagedCache),
            ("copies", copies, PagedCache),
            ("full_precision", full_precision, CopiedPages),
        ):
            checks.instance(name, given, kind, f"a {kind.__name__}")
        spec, own = pages.spec, copies.spec
        expected = (spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.block_size)
        if (own.num_kv_heads, own.head_size, own.head_size_v, own.block_size) != expected:
            checks.refuse("copies.spec", own, f"pages are {spec}")
        full_precision.check_pages(pages)
        if copies.num_blocks < full_precision.num_copies:
            allowed = f"at least full_precision.num_copies={full_precision.num_copies} pages are needed"
            checks.refuse("copies.num_blocks", copies.num_blocks, allowed)
        self.pages, self.copies, self.full_precision = pages, copies, full_precision
        self.device, self.maps, self.kind = pages.device, pages.maps, (pages.kind, copies.kind)

    def stored(self, slot_mapping: torch.Tensor, step: FullPrecisionStep) -> None:
        """The rows of the step are in the pages."""
        if self.full_precision.watched is self.pages:
            self.full_precision.note(slot_mapping, step)

    def as_stored(self) -> CacheWithCopies:
        """The same read without the maps, see `PagedCache.as_stored`. ValueError unless both are of latents: other copies have no map."""
        if not self.pages.spec.latent:
            checks.refuse("pages.spec.format", self.pages.spec.format, "latents are needed: copies of keys and values are not mapped")
        return CacheWithCopies(self.pages.as_stored(), self.copies.as_stored(), self.full_precision)

    def gather(
        self,
        block_table: torch.Tensor,
        starts: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor],
        first: torch.Tensor | None,
        step: FullPrecisionStep | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `PagedCache.gather` gives, and of tokens that the step reads at full precision their copies. step: of these sequences;
        None: it reads none so."""
        self.pages.gather(block_table, starts, out, first)
        if step is not None:
            put_copies(self.copies, step, starts, first, out)
        return out

    def segments(self, block_table: torch.Tensor, step: FullPrecisionStep, apart: bool) -> tuple[Segment, ...]:
        """What a step reads. apart: each key at its own position, for many queries and for options that go by position."""
        step.check(self.full_precision.tokens, self.full_precision.block_size)
        if step.joined is not None and not apart:
            table, key_start, between = step.joined
            return self.pages.segment(block_table, None, between), self.copies.segment(table, key_start)
        pages = self.pages.segment(block_table, None, step.between)._replace(complete=True)
        found = [pages, self.copies.segment(*step.recent)]
        if step.sink is not None:
            found.append(self.copies.segment(step.sink[0], None, step.sink[1]))
        return tuple(found)


def cache_of_copies(
    pages: PagedCache, num_copies: int, dtype: torch.dtype, buffer: torch.Tensor | None = None, device: torch.device | None = None
) -> PagedCache:
    """Pages of `dtype` for the 16-bit copies of `pages`, on their device or another. Those of latents are rotated as their pages are, so
    that queries which an engine has rotated beforehand read both; those of keys and values are as given."""
    spec = pages.spec
    plain = get_format("none", dtype)
    plain = plain.latents(dtype) if spec.latent else plain
    own = plain.cache_spec(spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.block_size)
    if spec.latent:
        given = {"maps": pages.maps, "k_scale": pages.k.scale, "v_scale": pages.v.scale}
    else:
        given = {"v_scale": pages.v.scale if pages.maps.v is None else 1.0}  # what segments without a map share
    return PagedCache(own, num_copies, device or pages.device, buffer=buffer, **given)


def with_room_for_one(pages: PagedCache, tokens: FullPrecisionTokens, dtype: torch.dtype) -> CacheWithCopies:
    """`pages` with room for the 16-bit copies of one sequence: what kernels are compiled over while an engine has no pool."""
    pool = CopiedPages(tokens, pages.spec.block_size, 1, device=pages.device)
    return CacheWithCopies(pages, cache_of_copies(pages, pool.num_copies, dtype), pool)


def kernels_of(device: torch.device, columns: int) -> Any:
    """The module of the kernels that do on a device what `CopiedPages` does by torch's operations, with so many pages of interest of a
    sequence; None where there are none."""
    if device.type != "cuda" and assumed() is None:
        return None
    from .implementations.triton import copies

    return copies if copies.serves(columns) else None


def _rows(pages: PagedCache) -> list[torch.Tensor]:
    """K's codes, and its metadata where it has any, as bytes `[num_blocks, HK, block_size, bytes]`."""
    codes, _, meta, _ = pages.spec.sections
    return [pages.buffer[:, :, offset : offset + size].unflatten(2, (pages.spec.block_size, -1)) for offset, size in (codes, meta) if size]


def as_segments(cache: Any, block_table: torch.Tensor, ranges: tuple, step: FullPrecisionStep | None, apart: bool) -> tuple[Segment, ...]:
    """What is read of a cache, with 16-bit copies or without."""
    if not isinstance(cache, CacheWithCopies):
        return (cache.segment(block_table, *ranges),)
    if step is None:  # nothing says what is exact
        return (cache.pages.segment(block_table, *ranges),)
    return cache.segments(block_table, step, apart)
