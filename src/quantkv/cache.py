"""`PagedCache`: one layer's KV cache in pages, in any format."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch

from . import checks, ops, page_file
from .calls import AttentionOptions, Memo, Side
from .format import Codec
from .formats import get_format
from .implementations import reference
from .maps import LayerMaps
from .spec import CacheSpec


class PagedCache:
    """K and V of one layer in `num_blocks` pages of `spec.block_size` tokens.

    One uint8 buffer `[num_blocks, HK, page_bytes]` holds everything; `k` and `v` are strided views of it. Nothing about a
    token is
    stored elsewhere, so that pages can be copied, shared and saved by their bytes.

    maps: linear maps of this layer in place of those that the format asks for.
    k_scale, v_scale: per-tensor scales; rows are divided by them before they are encoded.
    Errors: ValueError, before anything is written, naming the argument, its value and what is allowed.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int,
        device: torch.device | str = "cpu",
        *,
        maps: LayerMaps | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        if num_blocks < 1:
            checks.refuse("num_blocks", num_blocks, "at least one page is needed")
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if not scale > 0:
                checks.refuse(name, scale, "a positive number is needed")
        self.spec, self.num_blocks = spec, num_blocks
        self.format = get_format(spec.format)
        self.buffer = torch.zeros(num_blocks, spec.num_kv_heads, spec.page_bytes, dtype=torch.uint8, device=device)
        self.device = self.buffer.device
        given = LayerMaps() if maps is None else maps
        default = LayerMaps.of(self.format, spec.head_size, spec.head_size_v, self.device)
        self.maps = LayerMaps(*(d if g is None else g.to(self.device) for g, d in ((given.k, default.k), (given.v, default.v))))
        codes_k, codes_v, meta_k, meta_v = spec.sections
        self.k = self._side(self.format.k, codes_k, meta_k, k_scale)
        self.v = self._side(self.format.v, codes_v, meta_v, v_scale)

    def _side(self, codec: Codec, codes: tuple[int, int], meta: tuple[int, int], scale: float) -> Side:
        def view(section: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
            offset, size = section
            t = self.buffer[:, :, offset : offset + size].view(dtype)
            return t.unflatten(2, (self.spec.block_size, -1)).transpose(1, 2)

        fields = view(meta, getattr(torch, codec.row.meta[0])) if codec.row.meta else None
        return Side(view(codes, codec.code_dtype), fields, scale).in_storage_of(self.buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer: everything that grows with the number of tokens."""
        return self.buffer.nbytes

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor | None = None,
        *,
        implementation: str = "auto",
        memo: Memo | None = None,
    ) -> None:
        """Store `key [T, HK, D]` and `value [T, HK, D_V]` (bf16, fp16 or fp32, any strides) in slots `slot_mapping [T]`.

        Slot s is token `s % block_size` of page `s // block_size`; a negative slot skips its token. positions: int `[T]`,
        needed where the keys' map has an offset. implementation: see `ops.write`. memo: see `Memo`.
        """
        s, tokens = self.spec, key.shape[0]
        checks.tensor("key", key, (None, s.num_kv_heads, s.head_size), checks.ROW_DTYPES, self.device)
        checks.tensor("value", value, (tokens, s.num_kv_heads, s.head_size_v), (key.dtype,), self.device)
        checks.tensor("slot_mapping", slot_mapping, (tokens,), checks.INDEX_DTYPES, self.device)
        if positions is not None:
            checks.tensor("positions", positions, (tokens,), checks.INDEX_DTYPES, self.device)
        memo = Memo() if memo is None else memo
        if self.device.type == "cpu" and tokens:
            largest = memo.once("largest slot", lambda: int(slot_mapping.max()))
            if largest >= self.num_blocks * s.block_size:
                checks.refuse("slot_mapping", largest, f"slots end at {self.num_blocks * s.block_size - 1}")
        ops.write(
            key,
            value,
            self.k,
            self.v,
            self.format,
            slot_mapping,
            maps=self.maps,
            positions=positions,
            implementation=implementation,
            memo=memo,
        )

    def attend(
        self,
        q: torch.Tensor,
        *,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        scale: float | None = None,
        return_lse: bool = False,
        max_query_len: int | None = None,
        implementation: str = "auto",
        batch_invariant: bool = False,
        memo: Memo | None = None,
        **options: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of `q [T, HQ, D]` over the pages of each sequence -> `[T, HQ, D_V]` of q's dtype.

        block_table: int `[S, pages]`. seq_lens: int `[S]`, keys of each sequence, those of this call included.
        cu_seqlens_q: int `[S + 1]`, where each sequence's queries start; None: one query a sequence.
        scale: of the scores, `D ** -0.5` if None. return_lse: also the log-sum-exp `[T, HQ]` float32.
        max_query_len, implementation, batch_invariant: see `ops.attend`. memo: see `Memo`. options: fields of
        `AttentionOptions`.
        """
        s, num_seqs = self.spec, seq_lens.shape[0]
        checks.tensor("q", q, (None, None, s.head_size), checks.ROW_DTYPES, self.device)
        if q.shape[1] % s.num_kv_heads:
            checks.refuse("q.shape[1]", q.shape[1], f"a multiple of the {s.num_kv_heads} kv heads is needed")
        if cu_seqlens_q is None:
            if q.shape[0] != num_seqs:
                checks.refuse("cu_seqlens_q", None, f"{q.shape[0]} queries for {num_seqs} sequences: say where each starts")
            cu_seqlens_q, max_query_len = torch.arange(num_seqs + 1, device=self.device, dtype=torch.int32), 1
        unknown = options.keys() - AttentionOptions.__dataclass_fields__.keys()
        if unknown:
            checks.refuse("options", sorted(unknown), f"allowed: {', '.join(AttentionOptions.__dataclass_fields__)}")
        opts = AttentionOptions(**options)
        memo = Memo() if memo is None else memo
        check = lambda: self._check_batch(q.shape[:2], cu_seqlens_q, seq_lens, block_table, opts)
        memo.once(("batch fits", q.shape[:2], self.num_blocks, s.block_size), check)
        out, lse = ops.attend(
            q,
            self.k,
            self.v,
            self.format,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            block_table=block_table,
            scale=s.head_size**-0.5 if scale is None else scale,
            options=opts,
            maps=self.maps,
            max_query_len=max_query_len,
            implementation=implementation,
            batch_invariant=batch_invariant,
            memo=memo,
            return_lse=return_lse,
        )
        return (out, lse) if return_lse else out

    def _check_batch(
        self,
        queries: tuple[int, int],
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        opts: AttentionOptions,
    ) -> None:
        """On a CPU also what reads tensors: lengths fit the table, and the pages that are read exist."""
        num_tokens, num_heads = queries
        num_seqs = seq_lens.shape[0]
        checks.tensor("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), checks.INDEX_DTYPES, self.device)
        checks.tensor("seq_lens", seq_lens, (None,), checks.INDEX_DTYPES, self.device)
        checks.tensor("block_table", block_table, (num_seqs, None), checks.INDEX_DTYPES, self.device)
        checks.options(opts, num_seqs, num_heads, self.device)
        if self.device.type != "cpu":
            return
        starts, lengths, size = cu_seqlens_q.tolist(), seq_lens.tolist(), self.spec.block_size
        counts = [b - a for a, b in itertools.pairwise(starts)]
        if starts[0] != 0 or starts[-1] != num_tokens or min(counts, default=0) < 0:
            checks.refuse("cu_seqlens_q", starts, f"it rises from 0 to the {num_tokens} queries")
        if any(length < count for length, count in zip(lengths, counts)):
            checks.refuse("seq_lens", lengths, f"a sequence holds at least its queries, {counts}")
        begins = [0] * len(lengths) if opts.key_start is None else opts.key_start.tolist()
        pages = [-(-(length - begin) // size) for length, begin in zip(lengths, begins)]
        if max(pages, default=0) > block_table.shape[1]:
            checks.refuse("block_table.shape[1]", block_table.shape[1], f"the longest sequence needs {max(pages)} pages")
        # A sliding window lets an engine give pages back: what lies wholly behind every query's window is not looked at.
        window = opts.window if opts.prefix_ranges is None else 0
        oldest = [length - count - window - begin if window else 0 for length, count, begin in zip(lengths, counts, begins)]
        for row, first, last in zip(block_table, oldest, pages):
            checks.in_range(
                "block_table", row[max(first, 0) // size : max(last, 0)], 0, self.num_blocks, f" (the cache has {self.num_blocks} pages)"
            )

    def dequantize(
        self, slots: torch.Tensor, positions: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[T, HK, D]` and values `[T, HK, D_V]` that the slots `[T]` hold, mapped back. positions as in `write`."""
        checks.tensor("slots", slots, (None,), checks.INDEX_DTYPES, self.device)
        checks.in_range("slots", slots, 0, self.num_blocks * self.spec.block_size)
        if positions is None and self.maps.k is not None and self.maps.k.offset is not None:
            checks.refuse("positions", None, "the keys' map has an offset for each bucket of positions")
        sides = ((self.k, self.format.k, self.maps.k), (self.v, self.format.v, self.maps.v))
        return tuple(reference.dequantize(*side, slots, positions, dtype) for side in sides)

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy pages `source [N]` onto pages `target [N]`, every byte of every head: a shared prefix that is about to be
        written to."""
        for name, t in (("source", source), ("target", target)):
            checks.tensor(name, t, (source.shape[0],), checks.INDEX_DTYPES, self.device)
            checks.in_range(name, t, 0, self.num_blocks)
        self.buffer[target] = self.buffer[source]

    def save(self, path: str | os.PathLike[str], pages: Sequence[int] | None = None) -> None:
        """Write pages (all if None) to a page file; see `page_file.save`."""
        page_file.save(self, path, pages)

    def load(self, path: str | os.PathLike[str], pages: Sequence[int] | None = None) -> None:
        """Read a page file into pages (0, 1, .. if None); see `page_file.load`."""
        page_file.load(self, path, pages)
