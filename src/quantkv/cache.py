"""`PagedCache`: one layer's KV cache in pages, in any format."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, BinaryIO

import torch

from . import checks, ops, page_file
from .calls import AttendCall, AttentionOptions, Batch, OwnRows, PagedTensor, Segment, WriteCall
from .format import Codec
from .formats import get_format
from .implementations.reference.write import dequantize
from .maps import LayerMaps
from .spec import CacheSpec


class PagedCache:
    """K and V of one layer in `num_blocks` pages of `spec.block_size` tokens; in a format of latents (`Format.latent_spec`), the latents
    and their rotated dimensions, which stand for K and V in all that follows, but that attention reads the two as keys, latents as values.

    One uint8 buffer `[num_blocks, HK, page_bytes]` holds everything; `k` and `v` are strided views of it. Nothing about a
    token is stored elsewhere, so that pages can be copied, shared and saved by their bytes.

    buffer: memory to use instead of a new one, which an engine owns: uint8 `[num_blocks, HK, page_bytes]`, its last axis dense, its
        strides and its address multiples of 16 bytes. What was made in inference mode can be written to in that mode only.
    maps: linear maps of this layer in place of those that the format asks for.
    k_scale, v_scale: per-tensor scales; rows are divided by them before they are encoded.
    Errors: ValueError, before anything is written, naming the argument, its value and what is allowed.
    """

    @torch.inference_mode(False)  # a buffer born in inference mode could not be written to outside of it
    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int,
        device: torch.device | str = "cpu",
        *,
        buffer: torch.Tensor | None = None,
        maps: LayerMaps | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        checks.instance("spec", spec, CacheSpec, "a CacheSpec")
        checks.integer("num_blocks", num_blocks, 1, "at least one page")
        checks.instance("maps", maps, (LayerMaps, type(None)), "LayerMaps or None")
        checks.number("k_scale", k_scale, 0, above=True, note="a positive number")
        checks.number("v_scale", v_scale, 0, above=True, note="a positive number")
        self.spec, self.num_blocks = spec, num_blocks
        self.format = get_format(spec.format)
        if (self.format.k.row, self.format.v.row) != (spec.k, spec.v):
            checks.refuse("spec", spec, f"format {spec.format!r} stores {self.format.k.row} and {self.format.v.row} here")
        shape = (num_blocks, spec.num_kv_heads, spec.page_bytes)
        if buffer is None:
            buffer = torch.zeros(shape, dtype=torch.uint8, device=checks.place(device))
        checks.tensor("buffer", buffer, shape, (torch.uint8,))
        if buffer.stride(2) != 1 or buffer.stride(0) % 16 or buffer.stride(1) % 16 or buffer.data_ptr() % 16:
            allowed = "a dense last axis and multiples of 16 bytes are needed, at an address that is one"
            checks.refuse("buffer.stride()", buffer.stride(), allowed)
        self.buffer, self.device = buffer, buffer.device
        given = LayerMaps() if maps is None else maps
        default = LayerMaps.of(self.format, spec.head_size, spec.head_size_v, self.device)
        sides = (d if g is None else g.to(self.device) for g, d in ((given.k, default.k), (given.v, default.v)))
        self.maps = LayerMaps(*sides, given.calibration)
        self.maps.check_use(spec.latent)
        for side, map_, head_size in (("k", self.maps.k, spec.head_size), ("v", self.maps.v, spec.head_size_v)):
            if map_ is not None:
                map_.check(head_size, spec.num_kv_heads, side)
        codes_k, codes_v, meta_k, meta_v = spec.sections
        self.k = self._side(self.format.k, codes_k, meta_k, float(k_scale))
        self.v = self._side(self.format.v, codes_v, meta_v, float(v_scale))
        # What caches have in common that one prepared call serves: everything but their numbers and addresses.
        traits = (None if m is None else m.traits for m in (self.maps.k, self.maps.v))
        self.kind = (spec, buffer.shape, buffer.stride(), self.device, self.k.scale, self.v.scale, *traits)
        self.kind = _KINDS.setdefault(self.kind, self.kind)

    def __reduce__(self) -> tuple[Any, ...]:
        buffer = self.buffer  # a view of something larger would take all of that along
        buffer = buffer if buffer.untyped_storage().nbytes() == buffer.nbytes else buffer.clone(memory_format=torch.contiguous_format)
        return _restore, (type(self), self.spec, buffer, self.maps, self.k.scale, self.v.scale)

    @classmethod
    def wrap(cls, buffer: torch.Tensor, spec: CacheSpec, **options: Any) -> PagedCache:
        """A cache over memory that an engine owns: see `buffer`. Nothing is copied or cleared.

        A buffer of four axes is a layer's tensor as vLLM shapes it, `[num_blocks, HK, block_size, page_bytes / block_size]` of any dtype,
        in a layout that leaves a head's page one run of bytes: vLLM's LBHNC, BLHNC, BHLNC and LHBNC.
        """
        checks.instance("spec", spec, CacheSpec, "a CacheSpec")
        if not isinstance(buffer, torch.Tensor) or buffer.ndim != 4:
            checks.tensor("buffer", buffer, (None, spec.num_kv_heads, spec.page_bytes), (torch.uint8,))
        else:
            if buffer.stride(3) != 1 or buffer.stride(2) != buffer.shape[3]:
                checks.refuse("buffer.stride()", buffer.stride(), "a head's page must be one run of bytes")
            buffer = buffer.view(torch.uint8).flatten(2)
        if not buffer.shape[0]:
            checks.refuse("buffer.shape", tuple(buffer.shape), "at least one page is needed")
        return cls(spec, buffer.shape[0], buffer=buffer, **options)

    def _side(self, codec: Codec, codes: tuple[int, int], meta: tuple[int, int], scale: float) -> PagedTensor:
        def view(section: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
            offset, size = section
            t = self.buffer[:, :, offset : offset + size].view(dtype)
            return t.unflatten(2, (self.spec.block_size, -1)).transpose(1, 2)

        fields = view(meta, getattr(torch, codec.row.meta[0])) if codec.row.meta else None
        return PagedTensor(view(codes, codec.code_dtype), fields, scale).in_storage_of(self.buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer: everything that grows with the number of tokens."""
        return self.buffer.nbytes

    def segment(self, block_table: torch.Tensor, key_start: torch.Tensor | None = None, key_range: torch.Tensor | None = None) -> Segment:
        """The keys of every sequence that lie in this cache: see `Segment`."""
        return Segment(self.k, self.v, self.format, block_table, self.maps, key_start, key_range)

    def as_stored(self) -> PagedCache:
        """The same pages read without the maps: `as_stored().attend(q')` is attention of queries that went through A^-T already, and its
        output has yet to go through the A^-1 of values. For engines that multiply projections with these beforehand, which costs nothing:
        of latents, `W_UK @ maps.k.inverse` and `maps.k.inverse.mT @ W_UV`, rows from the left. ValueError for maps with key means."""
        if self.maps.by_position:
            checks.refuse("maps.k.key_mean", tuple(self.maps.k.key_mean.shape), "None is needed: scores depend on it")
        other = object.__new__(type(self))  # no copy.copy: that takes the rows along where the buffer is a part of something larger
        vars(other).update(vars(self), maps=LayerMaps())
        other.kind = (*self.kind[:-2], None, None)
        other.kind = _KINDS.setdefault(other.kind, other.kind)
        return other

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor | None = None,
        *,
        implementation: str = "auto",
    ) -> None:
        """Store `key [T, HK, D]` and `value [T, HK, D_V]` (bf16, fp16 or fp32, any strides) in slots `slot_mapping [T]`.

        Slot s is token `s % block_size` of page `s // block_size`; a negative slot skips its token. positions: int `[T]`,
        needed where the keys' map has key means. implementation: see `ops.write`.
        """
        ops.write(WriteCall(key, value, self.k, self.v, self.format, slot_mapping, self.maps, positions), implementation)

    def attend(
        self,
        q: torch.Tensor,
        *,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        scale: float | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        lengths: Sequence[tuple[int, int]] | None = None,
        key_start: torch.Tensor | None = None,
        key_range: torch.Tensor | None = None,
        own: tuple[torch.Tensor, torch.Tensor] | None = None,
        implementation: str = "auto",
        **options: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of `q [T, HQ, D]`, any strides, over the pages of each sequence -> `[T, HQ, D_V]` of q's dtype. Of latents, q is
        absorbed, for the latent and then for the rotated dimensions, D_V is the latent's, and scale must be given.

        block_table: int `[S, pages]`. seq_lens: int `[S]`, keys of each sequence, those of this call included.
        cu_seqlens_q: int `[S + 1]`, where each sequence's queries start; None: one query a sequence.
        scale: of the scores, `D ** -0.5` if None. out: put there instead of into a new tensor. return_lse: also the log-sum-exp
        `[T, HQ]` float32. max_query_len, max_seq_len, lengths: bounds that the host knows, see `Batch`. key_start, key_range: see
        `Segment`.
        own: `(key, value)`, the rows `[T, HK, D]`, `[T, HK, D_V]` of the tokens of q as given, see `OwnRows`: sequences with several
        queries read them in place of what their pages hold of these tokens. None: all is read from the pages.
        implementation: see `ops.attend`. options: fields of `AttentionOptions`.
        """
        checks.instance("q", q, torch.Tensor, "a tensor")
        batch = Batch.of(q, seq_lens, cu_seqlens_q, max_query_len, max_seq_len, lengths)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        segments = (self.segment(block_table, key_start, key_range),)
        call = AttendCall(q, segments, batch, scale, AttentionOptions.of(options), out, lse, OwnRows.given(own))
        ops.attend(call, implementation)
        return (call.out, lse) if return_lse else call.out

    def dequantize(
        self, slots: torch.Tensor, positions: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[T, HK, D]` and values `[T, HK, D_V]` that the slots `[T]` hold, mapped back. positions as in `write`.
        dtype: float32, float64, bfloat16 or float16."""
        checks.tensor("slots", slots, (None,), checks.INDEX_DTYPES, self.device)
        checks.in_range("slots", slots, 0, self.num_blocks * self.spec.block_size)
        if positions is not None:
            checks.tensor("positions", positions, slots.shape, checks.INDEX_DTYPES, self.device)
            checks.not_negative("positions", positions)
        elif self.maps.by_position:
            checks.refuse("positions", None, "the keys' map has a key mean for each bucket of positions")
        if dtype not in (*checks.ROW_DTYPES, torch.float64):
            checks.refuse("dtype", dtype, f"one of {', '.join(map(str, (*checks.ROW_DTYPES, torch.float64)))} is needed")
        sides = ((self.k, self.format.k, self.maps.k), (self.v, self.format.v, self.maps.v))
        return tuple(dequantize(*side, slots, positions, dtype) for side in sides)

    def gather(
        self,
        block_table: torch.Tensor,
        starts: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor],
        first: torch.Tensor | None = None,
        *,
        implementation: str = "auto",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `dequantize` gives, of whole stretches of sequences: tokens first[s] (None: 0), first[s] + 1, .. of sequence s are put into
        rows starts[s] to before starts[s + 1] of `out`, which is returned.

        block_table: int `[S, pages]`. starts: int `[S + 1]`, rising from 0. first: int `[S]`. out: `[N, HK, D]` and `[N, HK, D_V]` of one
        dtype, bfloat16, float16 or float32, their last axes dense; what is beyond the last row may hold anything afterwards.
        implementation: "auto", "triton" or "reference".
        """
        checks.tensor("block_table", block_table, (None, None), checks.INDEX_DTYPES, self.device)
        checks.tensor("starts", starts, (len(block_table) + 1,), checks.INDEX_DTYPES, self.device)
        if first is not None:
            checks.tensor("first", first, (len(block_table),), checks.INDEX_DTYPES, self.device)
        if not isinstance(out, tuple) or len(out) != 2:
            checks.refuse("out", type(out).__name__, "a tuple of rows of keys and of values is needed")
        for i, size in enumerate((self.spec.head_size, self.spec.head_size_v)):
            rows = None if i == 0 else len(out[0])
            checks.tensor(
                f"out[{i}]", out[i], (rows, self.spec.num_kv_heads, size), checks.ROW_DTYPES if i == 0 else (out[0].dtype,), self.device
            )
            if out[i].stride(2) != 1:
                checks.refuse(f"out[{i}].stride()", out[i].stride(), "a dense last axis is needed")
        if self.device.type == "cpu":
            self._check_stretches(block_table, starts, first, len(out[0]))
        ops.gather(self.segment(block_table), starts, first, out, implementation)
        return out

    def _check_stretches(self, block_table: torch.Tensor, starts: torch.Tensor, first: torch.Tensor | None, rows: int) -> None:
        """What reads tensors: there are as many rows, and every page that is read exists."""
        counts = starts.diff()
        if int(starts[0]) != 0 or int(counts.min() if len(counts) else 0) < 0 or int(starts[-1]) > rows:
            checks.refuse("starts", starts.tolist(), f"it rises from 0 to at most the {rows} rows of out")
        begins = [0] * len(counts) if first is None else first.tolist()
        for table, begin, count in zip(block_table, begins, counts.tolist()):
            low, high = begin // self.spec.block_size, -(-(begin + count) // self.spec.block_size)
            if count and (begin < 0 or high > len(table)):
                checks.refuse(
                    "first", begin, f"{count} tokens from there on; the table's {len(table)} pages hold {len(table) * self.spec.block_size}"
                )
            if count:
                checks.in_range("block_table", table[low:high], 0, self.num_blocks, f" (the cache has {self.num_blocks} pages)")

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy pages `source [N]` onto pages `target [N]`, every byte of every head: a shared prefix that is about to be
        written to. ValueError where a target is named twice: it cannot become both."""
        checks.tensor("source", source, (None,), checks.INDEX_DTYPES, self.device)
        checks.tensor("target", target, source.shape, checks.INDEX_DTYPES, self.device)
        for name, t in (("source", source), ("target", target)):
            checks.in_range(name, t, 0, self.num_blocks)
        checks.page_numbers(target, self.num_blocks, "target")
        self.buffer[target] = self.buffer[source]

    def save(self, file: str | os.PathLike[str] | BinaryIO, pages: Sequence[int] | None = None) -> None:
        """Write pages (all if None) to a page file, by its path or open for writing; see `page_file.save`."""
        page_file.save(self, file, pages)

    def load(self, file: str | os.PathLike[str] | BinaryIO, pages: Sequence[int] | None = None) -> None:
        """Read a page file into pages (0, 1, .. if None); see `page_file.load`."""
        page_file.load(self, file, pages)


_KINDS: dict[Any, Any] = {}  # one object for each kind of cache: compared by identity first, which is quick


def _restore(kind: type[PagedCache], spec: CacheSpec, buffer: torch.Tensor, maps: LayerMaps, k_scale: float, v_scale: float) -> PagedCache:
    """A cache from a pickle."""
    return kind.wrap(buffer, spec, maps=maps, k_scale=k_scale, v_scale=v_scale)
