"""From tensors to kernel launches: what the Triton kernels are compiled for, their tiles and splits, and their arguments."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from ...calls import AttentionOptions, Segment, Side
from ...format import Codec, Format
from ...maps import LayerMaps, LinearMap
from .kernels.attend import attend_kernel
from .kernels.combine import combine_kernel
from .kernels.views import BatchView, Extras, Features, MapView, PagesView, RowPlan, RowsView, TritonCodec
from .kernels.write import write_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SPLIT_TOKENS = 1024  # keys of a split where splits must not depend on the batch


class Target(NamedTuple):
    """What the kernels are compiled for."""

    ptx: int  # compute capability of an NVIDIA GPU, 10 x major + minor; 0: no inline PTX
    precision: str  # of float32 dots
    processors: int

    @classmethod
    def of(cls, device: torch.device) -> Target:
        if INTERPRETED or device.type != "cuda":
            return cls(0, "ieee", 8)
        return _gpu_target(device.index if device.index is not None else torch.cuda.current_device())


@lru_cache
def _gpu_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return Target(0, "ieee", properties.multi_processor_count)
    return Target(10 * properties.major + properties.minor, "tf32x3", properties.multi_processor_count)


# ---- what a side is compiled for, and its pages


def device_codec(codec: Codec, ptx: int = 0, exact: bool = False) -> TritonCodec:
    """The Triton half of `codec`, with inline PTX where a GPU of capability `ptx` takes it. exact: planes are not rounded to 16 bits.
    ValueError if there is none."""
    if codec.triton is None:
        raise ValueError(f"implementation='triton': codec {codec.name} has no Triton half")
    device = codec.triton()
    if exact and device.exact is not None:
        unpack, operand = device.exact
        return replace(device, unpack=unpack, operand=operand, program=None, exponents=())
    return device if device.program is None or ptx >= device.program.capability else replace(device, program=None)


def row_plan(
    codec: Codec, head_size: int, map_: LinearMap | None, scale: float, pages: PagesView, target: Target, exact: bool = False
) -> RowPlan:
    return RowPlan(
        device_codec(codec, target.ptx, exact),
        head_size,
        map_ is not None,
        map_ is not None and map_.offset is not None,
        codec.round_mapped,
        scale != 1.0,
        math.gcd(16, pages.stride_page, pages.stride_slot, pages.stride_head),
    )


@lru_cache
def _table(codec: Codec, head_size: int, device: torch.device) -> torch.Tensor | None:
    numbers = codec.triton().table
    return None if numbers is None else numbers(head_size).float().to(device)


def _word_dtype(codes: torch.Tensor, word_bytes: int, stored: bool) -> torch.dtype:
    """What a kernel sees a row's bytes as: whole words, or bytes where no integer is as long as a word. Words of three bytes are read
    from triples of int32 where rows lie on and are made of such."""
    if codes.element_size() == word_bytes:
        return codes.dtype
    if word_bytes == 3 and not stored:
        places = (codes.data_ptr(), codes.storage_offset(), codes.shape[3], *codes.stride()[:3])
        return torch.uint8 if any(n * codes.element_size() % 4 for n in places[1:]) or places[0] % 4 else torch.int32
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(word_bytes, torch.uint8)


def pages(side: Side, codec: Codec, head_size: int, stored: bool = False) -> PagesView:
    """The views of one side, to read or to be `stored`. ValueError where its rows are not made of whole, aligned words."""
    codes, meta, word_bytes = side.codes, side.meta, codec.triton().word_bytes
    word = _word_dtype(codes, word_bytes, stored)
    if codes.stride(3) != 1 or (meta is not None and meta.shape[3] > 1 and meta.stride(3) != 1):
        raise ValueError(f"cache strides {codes.stride()}: the bytes of a row, and its metadata, must lie one after the other")
    try:
        words = codes.view(word)
    except RuntimeError as error:
        raise ValueError(
            f"cache strides {codes.stride()}, storage offset {codes.storage_offset()}: {codec.name} rows are read "
            f"in words of {word_bytes} bytes, to which they must be aligned"
        ) from error
    fields = (None, 0, 0, 0) if meta is None else (meta, *meta.stride()[:3])
    return PagesView(words, *words.stride()[:3], *fields, _table(codec, head_size, codes.device))


def _matrix(matrix: torch.Tensor) -> tuple[torch.Tensor, int]:
    return matrix, 0 if matrix.shape[0] == 1 else matrix.stride(0)


def _offset(offset: torch.Tensor | None) -> tuple:
    if offset is None:
        return ()
    offset = offset if offset.stride(2) == 1 else offset.contiguous()
    return offset, offset.stride(0), 0 if offset.shape[1] == 1 else offset.stride(1), offset.shape[0]


def _dense(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.contiguous()


def _rows(t: torch.Tensor) -> RowsView:
    t = t if t.stride(2) == 1 else t.contiguous()
    return RowsView(t, *t.stride()[:2])


# ---- write


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    k: Side,
    v: Side,
    fmt: Format,
    slot_mapping: torch.Tensor,
    maps: LayerMaps,
    positions: torch.Tensor | None,
) -> None:
    """Launch `write_kernel`; arguments as in `reference.write`."""
    target = Target.of(key.device)
    tokens, heads, head_size = key.shape
    if tokens == 0:
        return
    sides = ((fmt.k, key, maps.k, k), (fmt.v, value, maps.v, v))
    views = [pages(side, codec, rows.shape[2], stored=True) for codec, rows, _, side in sides]
    plans = [row_plan(codec, rows.shape[2], map_, side.scale, view, target) for (codec, rows, map_, side), view in zip(sides, views)]
    kernel_maps = [MapView() if m is None else MapView(*_matrix(m.operands.forward), *_offset(m.offset)) for m in (maps.k, maps.v)]
    factors = [1.0 if m is None else m.operands.forward_factor for m in (maps.k, maps.v)]
    block_t, num_warps = write_tile(tokens * heads, max(head_size, value.shape[2]), maps.k is not None or maps.v is not None, target)
    write_kernel[(triton.cdiv(tokens, block_t), heads, 2)](
        _rows(key),
        _rows(value),
        *views,
        *kernel_maps,
        _dense(slot_mapping),
        _dense(positions),
        tokens,
        *factors,
        k.scale,
        v.scale,
        PAGE=k.codes.shape[1],
        BLOCK_T=block_t,
        K=plans[0],
        V=plans[1],
        PRECISION=target.precision,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )  # a fused multiply-add rounds other bits


def write_tile(rows: int, head_size: int, mapped: bool, target: Target) -> tuple[int, int]:
    """Tokens of a tile, and warps. A map is a dot, which takes 16 rows or more."""
    if rows <= 64 * target.processors:
        return 16 if mapped else 4, 4
    return (64, 4) if head_size <= 128 else (32, 4)


# ---- attend


class Tiling(NamedTuple):
    """How attend cuts its work."""

    block_m: int  # rows of a tile: queries x heads of a group
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, group: int, max_query_len: int, head_size: int, row_bytes: int, wide: bool) -> Tiling:
        """head_size, row_bytes: the larger of K's and V's. wide: dots are in float32, which takes small tiles. The numbers were
        measured on an H200 at head size 128."""
        rows = triton.next_power_of_2(group * max_query_len)
        if wide:
            return cls(max(16, triton.next_power_of_2(group), min(rows, 32)), 32 if head_size <= 128 else 16, 4, 2)
        block_m = max(16, triton.next_power_of_2(group), min(128 if head_size <= 128 else 64, rows))
        warps = {16: 1, 32: 2, 64: 4, 128: 8}[block_m] * (1 if head_size <= 128 else 2 if head_size <= 256 else 4)
        block_n, stages = 64 if head_size <= 128 else 32, 3
        if block_m == 16 and head_size <= 128:  # decode: as many bytes in flight as registers and shared memory allow
            if row_bytes > 128:
                warps = 2
            else:
                block_n, stages = 32, 5
        return cls(block_m, block_n, min(warps, 8), stages)


def split_count(tiles: int, max_keys: int, tiling: Tiling, target: Target) -> int:
    """Splits of the keys that fill the GPU once, each with work for at least four tiles."""
    programs = target.processors * max(8 // tiling.num_warps, 1)
    return max(1, min(programs // tiles, max_keys // (4 * tiling.block_n)))


class Partials(NamedTuple):
    """What attend leaves for combine: normalised outputs in V's mapped space and their base-2 log-sum-exp."""

    out: torch.Tensor  # [T, HQ, splits, D_V] float32
    lse: torch.Tensor  # [T, HQ, splits] float32


def features(
    options: AttentionOptions, num_kv_heads: int, single: bool, joined: bool, one_block: bool, split_tiles: int, target: Target
) -> Features:
    o = options
    chunk = o.window // (o.chunk_lookback + 1) if o.chunk_lookback >= 0 else 0
    return Features(
        num_kv_heads,
        causal=int(o.causal) if isinstance(o.causal, bool) else 2,
        window=0 if chunk else o.window,
        chunk=chunk,
        chunk_lookback=o.chunk_lookback if chunk else 0,
        softcap=float(o.softcap),
        alibi=0 if o.alibi_slopes is None else 1 + o.alibi_sqrt,
        qq_bias=o.qq_bias is not None,
        prefix=o.prefix_ranges is not None,
        prefix_clamped=o.clamp_prefix_to_window,
        key_start=o.key_start is not None,
        key_range=o.key_range is not None,
        single=single,
        joined=joined,
        one_block=one_block,
        split_tiles=split_tiles,
        precision=target.precision,
    )


def _extras(o: AttentionOptions) -> Extras:
    causal = None if isinstance(o.causal, bool) else _dense(o.causal).view(torch.uint8)
    bias = (None, 0, 0, 0) if o.qq_bias is None else (_dense(o.qq_bias), o.qq_bias.shape[1], *o.qq_bias.shape)
    ranges = (None, 0) if o.prefix_ranges is None else (_dense(o.prefix_ranges), o.prefix_ranges.shape[1])
    return Extras(causal, _dense(o.alibi_slopes), *bias, *ranges, _dense(o.key_start), _dense(o.key_range))


def attend(
    q: torch.Tensor,
    segments: Sequence[Segment],
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    options: AttentionOptions,
    max_query_len: int | None,
    batch_invariant: bool,
    num_splits: int | None = None,
) -> None:
    """Launch `attend_kernel` for each segment and one `combine_kernel`, into out `[T, HQ, D_V]` and lse `[T, HQ]`.

    Nothing here reads a tensor: splits come from shapes, and what a split reads from the lengths on the device, so that a
    captured graph stays right when they change. num_splits: of each segment, instead of the table's choice."""
    target = Target.of(q.device)
    tokens, num_heads, head_size = q.shape
    heads, head_size_v, num_seqs = segments[0].k.codes.shape[2], out.shape[2], seq_lens.shape[0]
    if tokens == 0:
        return
    group = num_heads // heads
    longest = max_query_len if max_query_len is not None else tokens if num_seqs == 1 else -(-tokens // num_seqs)
    sides = [(side.codes, codec) for s in segments for side, codec in ((s.k, s.fmt.k), (s.v, s.fmt.v))]
    exact = q.dtype == torch.float32
    wide = exact or torch.float32 in [codes.dtype for codes, _ in sides]
    tiling = Tiling.of(
        group,
        1 if batch_invariant else longest,
        max(head_size, head_size_v),
        max(codes.shape[3] * codes.element_size() for codes, _ in sides),
        wide,
    )
    single = max_query_len == 1
    block_q = 1 if single else tiling.block_m // group
    one_block = (max_query_len is not None or num_seqs == 1) and longest <= block_q
    blocks = num_seqs if one_block else tokens // block_q + num_seqs
    segments = sorted(segments, key=lambda s: s.maps.v is None)  # combine takes the mapped ones first
    splits = []
    for s in segments:
        max_keys = s.block_table.shape[1] * s.k.codes.shape[1]
        fixed = triton.cdiv(max_keys, SPLIT_TOKENS) if batch_invariant else num_splits
        splits.append(fixed or split_count(blocks * heads, max_keys, tiling, target))
    part = Partials(
        torch.empty(tokens, num_heads, sum(splits), head_size_v, dtype=torch.float32, device=q.device),
        torch.empty(tokens, num_heads, sum(splits), dtype=torch.float32, device=q.device),
    )
    first_split = 0
    for s, count in zip(segments, splits):
        k_map, factor = MapView(), 1.0
        if s.maps.k is not None:
            operands = s.maps.k.operands
            k_map, factor = MapView(*_matrix(operands.query), *_offset(operands.mapped_offset)), operands.inverse_factor
        table = s.block_table if s.block_table.stride(1) == 1 else s.block_table.contiguous()
        o = replace(options, key_start=s.key_start, key_range=s.key_range)
        k_pages, v_pages = pages(s.k, s.fmt.k, head_size), pages(s.v, s.fmt.v, head_size_v)
        attend_kernel[(blocks * heads, count)](
            _rows(q),
            *part,
            k_pages,
            v_pages,
            k_map,
            BatchView(_dense(cu_seqlens_q), _dense(seq_lens), table, table.stride(0)),
            _extras(o),
            num_seqs,
            first_split,
            sum(splits),
            scale * factor,
            s.k.scale,
            GROUP=group,
            PAGE=s.k.codes.shape[1],
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            K=row_plan(s.fmt.k, head_size, s.maps.k, s.k.scale, k_pages, target, exact),
            V=row_plan(s.fmt.v, head_size_v, s.maps.v, s.v.scale, v_pages, target, exact),
            F=features(o, heads, single, tiling.block_m >= 64, one_block, SPLIT_TOKENS // tiling.block_n if batch_invariant else 0, target),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        first_split += count
    mapped = [s for s in segments if s.maps.v is not None]
    combine(
        part,
        out,
        lse,
        heads,
        mapped[0].maps.v if mapped else None,
        sum(splits[: len(mapped)]),
        mapped[0].v.scale if mapped else 1.0,
        segments[-1].v.scale,
        options,
        rows_per_program=1 if batch_invariant else None,
    )


def combine(
    part: Partials,
    out: torch.Tensor,
    lse: torch.Tensor,
    num_kv_heads: int,
    v_map: LinearMap | None,
    mapped_splits: int,
    mapped_scale: float,
    plain_scale: float,
    options: AttentionOptions,
    rows_per_program: int | None = None,
) -> None:
    """Merge partials into out and lse: the first mapped_splits of them through v_map; each kind times its per-tensor scale."""
    tokens, num_heads, splits, head_size = part.out.shape
    target, group = Target.of(out.device), num_heads // num_kv_heads
    rows = rows_per_program or (1 if tokens * num_heads < 16 * target.processors else 4 if splits > 1 else 16)
    kernel_map = MapView()
    if mapped_splits:
        kernel_map, mapped_scale = MapView(*_matrix(v_map.operands.output)), mapped_scale * v_map.operands.inverse_factor
    combine_kernel[(triton.cdiv(tokens * group, rows), num_kv_heads)](
        *part,
        _rows(out.view(torch.uint8) if options.output_scale is not None else out),
        lse,
        kernel_map,
        _dense(options.sinks),
        tokens * group,
        splits,
        mapped_splits,
        mapped_scale,
        plain_scale,
        options.output_scale or 1.0,
        GROUP=group,
        D=head_size,
        WIDTH=max(16, triton.next_power_of_2(head_size)),
        ROWS=rows,
        MAPPED=mapped_splits > 0,
        PLAIN=mapped_splits < splits,
        PRECISION=target.precision,
        num_warps=4,
    )
