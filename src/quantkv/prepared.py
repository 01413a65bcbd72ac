"""Calls prepared once for each batch and shared by the layers of a step: each layer then only launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import get_ident
from typing import Any

import torch

from . import checks, deprecated, ops
from .autocast import given_dtypes
from .cache import PagedCache
from .calls import AttendCall, Batch, OwnRows, Segment, WriteCall
from .copies import CacheWithCopies, FullPrecisionStep, as_segments
from .options import PER_LAYER, AttentionOptions, goes_by_position
from .own import few_queries


def _same(name: str, t: torch.Tensor, like: torch.Tensor) -> None:
    checks.tensor(name, t, like.shape, (like.dtype,), like.device)
    checks.no_gradient(name, t)


class PreparedWrite:
    """A write into the same slots of one cache after the other: `write(cache, key, value)`.

    The first call for a kind of cache and of rows (shape, dtype, strides) is checked and prepared; later ones only launch. Slots and
    positions are read when it runs, so their tensors may be filled anew for the next step. Threads may share it: each prepares for itself.
    """

    def __init__(
        self,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor | None = None,
        implementation: str = "auto",
        full_precision: FullPrecisionStep | None = None,
    ) -> None:
        self.slot_mapping, self.positions, self.implementation, self.full_precision = (
            slot_mapping,
            positions,
            implementation,
            full_precision,
        )
        self._prepared: dict[Any, tuple[WriteCall, ops.Launch]] = {}

    def __call__(
        self, cache: PagedCache | CacheWithCopies, key: torch.Tensor, value: torch.Tensor, mean: torch.Tensor | None = None
    ) -> None:
        """Store `key [T, HK, D]` and `value [T, HK, D_V]`; in a cache with copies in both. mean: `[D]` of their dtype, taken off every
        key row first."""
        if not isinstance(cache, CacheWithCopies):
            self._store(cache, key, value, mean)
            return
        if self.full_precision is None:
            checks.refuse("full_precision", None, "a write to a cache with copies needs the step that says which tokens have one")
        self._store(cache.pages, key, value, mean, cache.copies)
        cache.stored(self.slot_mapping, self.full_precision)

    def _store(
        self, cache: PagedCache, key: torch.Tensor, value: torch.Tensor, mean: torch.Tensor | None = None, copies: PagedCache | None = None
    ) -> bool:
        """Whether what is launched next may overlap it. copies: where 16-bit copies of the rows go."""
        checks.instance("key", key, torch.Tensor, "a tensor")
        checks.instance("value", value, torch.Tensor, "a tensor")
        aligned = (key.data_ptr() % 16, value.data_ptr() % 16)
        shape = (get_ident(), cache.kind, key.shape, key.stride(), key.dtype, value.shape, value.stride(), value.dtype, key.device, aligned)
        shape += (mean is None, None if copies is None else copies.kind)
        known = self._prepared.get(shape)
        if known is None:
            second = None
            if copies is not None:
                slots = self.full_precision.slots[: len(self.slot_mapping)]
                second = WriteCall(key, value, copies.k, copies.v, copies.format, slots, copies.maps)
            call = WriteCall(key, value, cache.k, cache.v, cache.format, self.slot_mapping, cache.maps, self.positions, mean, second)
            known = self._prepared[shape] = call, ops.prepare(call, self.implementation)
        else:
            if key.requires_grad or value.requires_grad:
                checks.no_gradient("key", key), checks.no_gradient("value", value)
            first = known[0]
            if copies is not None:
                copies = first.copies.with_tensors(key, value, copies.k, copies.v, copies.maps)
            call = first.with_tensors(key, value, cache.k, cache.v, cache.maps, mean=mean, copies=copies)
        given_dtypes(key, known[1], call)
        return getattr(known[1], "starts_next", False)


def _launch(launch: ops.Launch, call: AttendCall, cache: PagedCache | CacheWithCopies, new: tuple | None) -> None:
    """Attention, behind the write of `new`, if there is one. Between the two nothing is launched."""
    if new is not None:
        write, key, value = new
        behind = getattr(launch, "after_write", None)  # prepared before anything runs
        if isinstance(cache, CacheWithCopies):
            write(cache, key, value)
        elif write._store(cache, key, value) and behind is not None:
            launch = behind
    given_dtypes(call.q, launch, call)
    if call.mean is not None and not getattr(launch, "takes_parts_and_mean", False):
        call.out.add_(call.mean)


class PreparedAttend:
    """Attention of one batch over one cache after the other: `out = attend(cache, q)`.

    Batch, block table and options are those it was made with. The first call for a kind of cache and of queries is checked, an
    implementation is chosen, its grid, scratch memory and arguments are worked out; a later one costs little more than its launches.
    Block table, lengths and options are read when it runs, so their tensors may be filled anew for the next step. Only the upper bounds
    must hold, and `lengths`, where given, are those of every step.

    Threads may share it: each prepares for itself, and has scratch memory of its own. On a GPU a thread uses it on one stream, or lets
    the streams wait for each other.
    """

    def __init__(
        self,
        batch: Batch,
        block_table: torch.Tensor,
        scale: float | None = None,
        options: AttentionOptions = AttentionOptions(),
        key_start: torch.Tensor | None = None,
        key_range: torch.Tensor | None = None,
        implementation: str = "auto",
        full_precision: FullPrecisionStep | None = None,
    ) -> None:
        if full_precision is not None and (key_start is not None or key_range is not None):
            checks.refuse("full_precision", full_precision, "key_start and key_range are its own")
        self.batch, self.block_table, self.scale, self.options = batch, block_table, scale, options
        self.ranges, self.implementation, self.full_precision = (key_start, key_range), implementation, full_precision
        self._prepared: dict[Any, tuple[AttendCall, ops.Launch]] = {}

    def __call__(
        self,
        cache: PagedCache | CacheWithCopies,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        new: tuple[PreparedWrite, torch.Tensor, torch.Tensor] | None = None,
        own: tuple[torch.Tensor, torch.Tensor] | None = None,
        mean: torch.Tensor | None = None,
        **options: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of `q [T, HQ, D]`, any strides, over the pages of `cache` -> `[T, HQ, D_V]` of q's dtype, put into out where it is
        given; with return_lse also the log-sum-exp `[T, HQ]` float32. options: this layer's sinks, alibi_slopes or qq_bias.
        q may be two parts, whose numbers follow each other: those for latents, and those for their rotated dimensions. mean: `[D_V]` of
        q's dtype, which every output is given back: what latents were stored without.

        new: `(write, key, value)`: `write(cache, key, value)` is called first, for the tokens of q and no others; on a Hopper GPU only what
        reads their rows then waits for it.

        own: `(key, value)`, the rows of the tokens of q as given, which sequences with several queries read: see `PagedCache.attend`."""
        parts = q if isinstance(q, tuple) else None
        for t in parts or (q,):
            checks.instance("q", t, torch.Tensor, "a tensor")
        q = parts[0] if parts else q
        if new is not None and not (isinstance(new, tuple) and len(new) == 3 and isinstance(new[0], PreparedWrite)):
            checks.refuse("new", type(new).__name__, "a tuple (write, key, value) is needed, write of prepare_write")
        rows = OwnRows.given(own)
        given = tuple(name for name, t in options.items() if t is not None)
        target = None if out is None else (out.stride(), out.dtype)
        shape = (get_ident(), cache.kind, q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % 16, target, return_lse, given)
        shape += (None if rows is None else rows.traits, mean is None)
        shape += () if parts is None else (parts[1].shape, parts[1].stride(), parts[1].dtype, parts[1].data_ptr() % 16)
        known = self._prepared.get(shape)
        if known is None:
            q = torch.cat(parts, 2) if parts else q
            out, lse = self._first(shape, cache, q, out, return_lse, new, rows, {name: options[name] for name in given}, parts, mean)
        else:
            first, launch = known
            as_given = getattr(launch, "takes_parts_and_mean", False)
            q, parts = (torch.cat(parts, 2), None) if parts and not as_given else (q, parts)
            if q.requires_grad:
                checks.no_gradient("q", q)
            for name, t in () if rows is None else rows._asdict().items():
                checks.no_gradient(f"own.{name}", t)
            out = torch.empty_strided(first.out.shape, first.out.stride(), dtype=first.out.dtype, device=q.device) if out is None else out
            if out.shape != first.out.shape:
                checks.refuse("out.shape", tuple(out.shape), f"{tuple(first.out.shape)} is needed")
            lse = torch.empty_like(first.lse) if return_lse else None
            for name in given:
                _same(name, options[name], getattr(first.options, name))
            layer = first.options
            if given:
                layer = replace(layer, **{name: options[name] for name in given})
                if not q.is_cuda:
                    layer.check_values()
            segments, few = self._segments(cache, layer, rows)
            _launch(launch, first.with_tensors(q, out, lse, segments, layer, rows, few, parts, mean), cache, new)
        return (out, lse) if return_lse else out

    def _segments(
        self, cache: PagedCache | CacheWithCopies, options: AttentionOptions, rows: OwnRows | None
    ) -> tuple[tuple[Segment, ...], tuple[Segment, ...] | None]:
        """What the call reads, and what its runs of few queries read in place of it: `AttendCall.segments` and `few`."""
        given, by_position = (cache, self.block_table, self.ranges, self.full_precision), goes_by_position(options)
        many = not few_queries(self.batch.max_query_len, rows)
        some_few = many and not by_position and self.batch.lengths is not None and isinstance(cache, CacheWithCopies)
        return as_segments(*given, by_position or many), as_segments(*given, False) if some_few else None

    def call(
        self,
        cache: PagedCache | CacheWithCopies,
        q: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        rows: OwnRows | None,
        options: AttentionOptions,
        parts: tuple[torch.Tensor, torch.Tensor] | None = None,
        mean: torch.Tensor | None = None,
    ) -> AttendCall:
        """The call that is prepared for a cache, tensors as in `AttendCall`."""
        segments, few = self._segments(cache, options, rows)
        return AttendCall(q, segments, self.batch, self.scale, options, out, lse, rows, few, parts, mean)

    def _first(
        self, shape, cache: PagedCache | CacheWithCopies, q, out, return_lse: bool, new, rows, given: dict[str, torch.Tensor], parts, mean
    ):
        unknown = given.keys() - set(PER_LAYER)
        if unknown:
            checks.refuse("options", sorted(unknown), f"those of a layer are {', '.join(PER_LAYER)}")
        options = replace(self.options, **given) if given else self.options
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        call = self.call(cache, q, out, lse, rows, options, parts, mean)
        launch = ops.prepare(call, self.implementation)
        self._prepared[shape] = call, launch
        _launch(launch, call, cache, new)
        return call.out, call.lse


@deprecated.keywords(exact="full_precision")
def prepare_attend(
    *,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    scale: float | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    lengths: Sequence[tuple[int, int]] | None = None,
    key_start: torch.Tensor | None = None,
    key_range: torch.Tensor | None = None,
    implementation: str = "auto",
    full_precision: FullPrecisionStep | None = None,
    **options: Any,
) -> PreparedAttend:
    """A call of `PagedCache.attend` for all layers of a step: `attend(cache, q)` serves each. Arguments as there.

    full_precision: what the step reads exactly, for caches with copies; None: they are read quantized."""
    batch = Batch.of(None, seq_lens, cu_seqlens_q, max_query_len, max_seq_len, lengths)
    return PreparedAttend(batch, block_table, scale, AttentionOptions.of(options), key_start, key_range, implementation, full_precision)


@deprecated.keywords(exact="full_precision")
def prepare_write(
    slot_mapping: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    implementation: str = "auto",
    full_precision: FullPrecisionStep | None = None,
) -> PreparedWrite:
    """A call of `PagedCache.write` for all layers of a step: `write(cache, key, value)` serves each. Arguments as there.

    full_precision: which tokens have copies, for caches with copies."""
    return PreparedWrite(slot_mapping, positions, implementation, full_precision)
