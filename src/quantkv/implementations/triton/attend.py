"""Attention by the Triton kernels: a launch for each segment, and one that combines them. Nothing here reads a tensor: splits come from
shapes and upper bounds, and what a split reads from the lengths on the device, so that a captured graph stays right when they change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...calls import AttendCall, Segment
from ...options import TENSORS

try:
    import triton
except ImportError:  # `refusal` says so
    triton = None
else:
    from . import latents, launch
    from .kernels.attend import attend_kernel
    from .kernels.combine import combine_kernel
    from .kernels.views import BatchView, Extras, Features, MapView, RowsView
    from .launch import Target
    from .tiling import FEW, WORDS_OF_HADAMARD, Tiling, combine_rows, split_count

SUPPORTED = frozenset((
    "causal", "window", "chunk_lookback", "softcap", "sinks", "alibi_slopes", "alibi_sqrt", "qq_bias", "prefix_ranges",
    "clamp_prefix_to_window", "output_scale", "batch_invariant",
))  # fmt: skip
OWN_ROWS = "dense"
LATENTS = True
COLUMNS = 128  # of a program that combines rows which no matrix maps back
SPLIT_TOKENS = 1024  # keys of a split where splits must not depend on the batch
ATTEND_PLACES = ("q.ptr", "k_pages.words", "k_pages.meta", "v_pages.words", "v_pages.meta", "k_map.matrix", "k_map.key_mean")
ADDED = tuple(name for name in TENSORS if name in SUPPORTED and name != "sinks")  # read beside keys; sinks are what combine adds
EXTRAS = (*ADDED, "key_start", "key_range")
SHARED_PLACES = ("batch.query_start", "batch.seq_lens", "batch.block_table", *(f"extras.{name}" for name in EXTRAS))
COMBINE_PLACES = ("out.ptr", "out_lse.ptr", "v_map.matrix", "sinks")


def refusal(call: AttendCall) -> str | None:
    """Why `run` does not serve a call; None where it does."""
    if triton is None:
        return "the package triton is missing: pip install 'quantkv[triton]'"
    return launch.refusal(call.q.device, [pair for s in call.segments for pair in ((s.k, s.fmt.k), (s.v, s.fmt.v))])


def run(call: AttendCall) -> None:
    """Serve `call`, into its out and lse."""
    if call.q.shape[0]:
        with launch.on_device(call.q.device):
            plan = AttendPlan.of(call)
            launch_all(call, plan, plan.partials(call))


def prepare(call: AttendCall) -> Callable[[AttendCall], None]:
    """What serves every call of the same shape. Its scratch memory lives as long as it: a captured graph needs it kept."""
    if call.q.shape[0] == 0:
        return run
    device, plan = call.q.device, AttendPlan.of(call)
    part = plan.partials(call)
    launches: list[launch.Launch] = []

    def serve(call: AttendCall) -> None:
        with launch.on_device(device):
            if launches and all(made.again(tensors, device.index) for made, tensors in zip(launches, _tensors(call, plan, part))):
                return
            launches[:] = launch_all(call, plan, part)

    return serve


# ---- how the work is cut


class Partials(NamedTuple):
    """What attend leaves for combine: normalised outputs in the values' mapped space and their base-2 log-sum-exp. Of latents that are
    mapped, also the queries to them, mapped, and the output before it is mapped back."""

    out: torch.Tensor  # [T, HQ, splits, D_V] float32
    lse: torch.Tensor  # [T, HQ, splits] float32
    query: torch.Tensor | None = None  # [T, HQ, D_V] of q's dtype
    mapped: torch.Tensor | None = None  # likewise; None: combine maps back


@dataclass(frozen=True)
class AttendPlan:
    """What calls of the same shape share.

    order: segments in the order in which they are combined, those whose values have a map first. splits: of the keys of each.
    one_block: no sequence has more queries than a tile. exact: queries are float32."""

    target: Target
    tiling: Tiling
    group: int
    blocks: int
    order: list[int]
    splits: list[int]
    single: bool
    one_block: bool
    exact: bool

    @classmethod
    def of(cls, call: AttendCall, num_splits: int | None = None) -> AttendPlan:
        """num_splits: of each segment, instead of the choice made here."""
        batch, first, invariant = call.batch, call.segments[0], call.options.batch_invariant
        target = Target.of(call.q.device)
        tokens, num_heads, head_size = call.q.shape
        heads, num_seqs, bound = first.k.codes.shape[2], batch.num_seqs, batch.max_query_len
        group, latent = num_heads // heads, first.fmt.latent
        longest = bound if bound is not None else tokens if num_seqs == 1 else -(-tokens // num_seqs)
        codes = [side.codes for s in call.segments for side in (s.k, s.v)]
        exact = call.q.dtype == torch.float32
        wide, queries = exact or torch.float32 in [c.dtype for c in codes], 1 if invariant else longest
        if latent:
            row_bytes = max(sum(side.codes.shape[3] * side.codes.element_size() for side in (s.k, s.v)) for s in call.segments)
            tiling = Tiling.of_latents(group, queries, triton.next_power_of_2(first.head_size_v), row_bytes, wide, bound != 1, target)
        else:
            row_bytes = max(c.shape[3] * c.element_size() for c in codes)
            codecs = [codec.triton() for s in call.segments for codec in (s.fmt.k, s.fmt.v)]
            tiling = Tiling.of(group, queries, max(head_size, first.head_size_v), row_bytes, wide, codecs, target)
        group, heads = group // tiling.parts, heads * tiling.parts  # as many tiles share the rows of a kv head
        single = bound == 1
        block_q = 1 if single else tiling.block_m // group
        one_block = (bound is not None or num_seqs == 1) and longest <= block_q
        blocks = num_seqs if one_block else tokens // block_q + num_seqs
        order = sorted(range(len(call.segments)), key=lambda i: call.segments[i].values[2] is None)
        splits = []
        for i in order:
            s = call.segments[i]
            keys = s.block_table.shape[1] * s.k.codes.shape[1]
            if batch.max_seq_len is not None:
                keys = min(keys, batch.max_seq_len)
            chosen = triton.cdiv(keys, SPLIT_TOKENS) if invariant else num_splits or split_count(blocks * heads, keys, tiling, target)
            splits.append(max(chosen, 1))
        return cls(target, tiling, group, blocks, order, splits, single, one_block, exact)

    def partials(self, call: AttendCall) -> Partials:
        """Room for the partials of a call: float32 outputs and log-sum-exps of each split."""
        tokens, num_heads = call.q.shape[:2]
        shape = (tokens, num_heads, sum(self.splits))
        found = Partials(*(call.q.new_empty(s, dtype=torch.float32) for s in ((*shape, call.out.shape[2]), shape)))
        if not call.segments[0].fmt.latent or latents.own_map(call) is None:
            return found
        rows = (tokens, num_heads, call.out.shape[2])
        return found._replace(query=call.q.new_empty(rows), mapped=call.q.new_empty(rows) if latents.mapped_apart(call) else None)

    def features(self, call: AttendCall, s: Segment) -> Features:
        """What the kernel is compiled for, of a call and one of its segments."""
        o = call.options
        chunk = o.window // (o.chunk_lookback + 1) if o.chunk_lookback >= 0 else 0
        return Features(
            s.k.codes.shape[2],
            causal=int(o.causal) if isinstance(o.causal, bool) else 2,
            window=0 if chunk else o.window,
            chunk=chunk,
            chunk_lookback=o.chunk_lookback if chunk else 0,
            softcap=float(o.softcap),
            alibi=0 if o.alibi_slopes is None else 1 + o.alibi_sqrt,
            qq_bias=o.qq_bias is not None,
            prefix=o.prefix_ranges is not None,
            prefix_window=o.window if o.clamp_prefix_to_window else 0,
            key_start=s.key_start is not None,
            key_range=s.key_range is not None,
            single=self.single,
            key_axis=self.tiling.key_axis,
            joined=self.tiling.block_m >= 64,
            by_page=self.tiling.by_page,
            one_loop=self.tiling.block_m >= 64 and self.target.has_matrix_descriptors,
            one_block=self.one_block,
            split_tiles=SPLIT_TOKENS // self.tiling.block_n if o.batch_invariant else 0,
            precision=self.target.precision,
        )


# ---- launches


def _tensors(call: AttendCall, plan: AttendPlan, part: Partials) -> list[tuple[torch.Tensor | None, ...]]:
    """What stands at the places of each launch: of each segment in order, and at COMBINE_PLACES; of mapped latents, before and after
    these, at those of what maps queries and output."""
    o, batch, q, dense = call.options, call.batch, launch.dense_rows(call.q), launch.dense
    latent = call.segments[0].fmt.latent
    parts = latents.query_parts(call) if latent else ()
    found = []
    if part.query is not None:
        found.append((parts[0], part.query, latents.own_map(call).operands.query))
    for i in plan.order:
        s = call.segments[i]
        table = s.block_table if s.block_table.stride(1) == 1 else s.block_table.contiguous()
        of_batch = (dense(batch.cu_seqlens_q), dense(batch.seq_lens), table)
        extras = (*(_extra(getattr(o, name)) for name in ADDED), dense(s.key_start), dense(s.key_range))
        if latent:
            own = latents.tensors(s, parts, part.query)
        else:
            own = (q, s.k.codes, s.k.meta, s.v.codes, s.v.meta, *_query_map(s, plan.tiling))
        found.append((*own, *of_batch, *extras))
    map_ = call.segments[plan.order[0]].values[2]
    operands = None if map_ is None else map_.operands
    if part.mapped is not None:
        return [*found, (part.mapped, call.lse, None, dense(o.sinks)), (part.mapped, call.out, operands.output)]
    inverse = None if operands is None else operands.output if operands.diagonal is None else operands.diagonal
    return [*found, (call.out, call.lse, inverse, dense(o.sinks))]


def _query_map(s: Segment, tiling: Tiling) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What queries to a segment's keys go through, and the mapped key means: a matrix, or the diagonal before Hadamard matrices where that
    is all there is to it and the tile is small; larger ones share what they read."""
    if s.maps.k is None:
        return None, None
    operands, words = s.maps.k.operands, s.stored_sizes[0] // s.fmt.k.triton().planes
    by_matrix = operands.diagonal is None or tiling.block_m > FEW or words > WORDS_OF_HADAMARD
    return operands.query if by_matrix else operands.diagonal, operands.mapped_key_mean


def _extra(value: torch.Tensor | bool | None) -> torch.Tensor | None:
    """An option's tensor as kernels read it, bools as bytes; None for a plain value."""
    if not isinstance(value, torch.Tensor):
        return None
    return launch.dense(value.view(torch.uint8) if value.dtype == torch.bool else value)


def launch_all(call: AttendCall, plan: AttendPlan, part: Partials) -> list[launch.Launch]:
    """The launches of a call, made once."""
    given, segments = _tensors(call, plan, part), [call.segments[i] for i in plan.order]
    launches, first_split, plain_scale = [], 0, segments[-1].values[0].scale
    heads = segments[0].k.codes.shape[2]
    if part.query is not None:
        factor = latents.outer_factor(latents.own_map(call))
        launches.append(latents.map_launch(*given.pop(0), factor, heads, plan.target))
    for s, count in zip(segments, plan.splits):
        side, _, map_ = s.values
        v_factor = 1.0 if map_ is not None else side.scale / plain_scale
        launches.append(_attend_launch(call, plan, part, s, given.pop(0), first_split, count, v_factor))
        first_split += count
    (side, _, map_), (out, lse, matrix, sinks) = segments[0].values, given.pop(0)
    mapped_splits = sum(count for s, count in zip(segments, plan.splits) if s.values[2] is not None)
    factors = 1.0 if map_ is None else side.scale * map_.operands.inverse_factor, plain_scale
    if part.mapped is not None:  # all are mapped back by what follows
        mapped_splits, factors = 0, (1.0, side.scale * latents.inner_factor(map_))
    rows = 1 if call.options.batch_invariant else None
    combining = Combining(out, lse, heads, matrix, mapped_splits, *factors, sinks, call.options.output_scale, rows)
    launches.append(combine_launch(part, combining, plan.target))
    if part.mapped is not None:
        launches.append(latents.map_launch(*given.pop(0), latents.outer_factor(map_), heads, plan.target))
    for made in launches:
        made()
    return launches


def _attend_launch(
    call: AttendCall, plan: AttendPlan, part: Partials, s: Segment, tensors, first_split: int, count: int, v_factor: float
) -> launch.Launch:
    query_start, seq_lens, table, *given = tensors[-len(SHARED_PLACES) :]
    tiling, extras = plan.tiling, dict(zip(EXTRAS, given))
    bias, ranges = extras["qq_bias"], extras["prefix_ranges"]
    if bias is not None:
        extras |= {"qq_stride": bias.shape[1], "qq_rows": bias.shape[0], "qq_cols": bias.shape[1]}
    extras |= {"num_ranges": 0 if ranges is None else ranges.shape[1], "v_factor": v_factor}
    shared = {
        "part": part.out,
        "lse": part.lse,
        "batch": BatchView(query_start, seq_lens, table, table.stride(0)),
        "extras": Extras(**extras),
        "num_seqs": call.batch.num_seqs,
        "first_split": first_split,
        "all_splits": part.lse.shape[2],
    }
    grid = (plan.blocks * s.k.codes.shape[2] * tiling.parts, count)
    if s.fmt.latent:
        features = plan.features(call, s)
        return latents.attend_launch(call, s, tensors, tiling, plan.group, plan.target, shared, features, grid, SHARED_PLACES)
    q, *_, matrix, key_mean = tensors[: len(ATTEND_PLACES)]
    sizes = (call.q.shape[2], s.head_size_v)
    views = [launch.pages(side, codec, size) for side, codec, size in zip((s.k, s.v), (s.fmt.k, s.fmt.v), sizes)]
    plans = [
        launch.row_plan(codec, size, map_, side.scale, view, plan.target, plan.exact, call.q.dtype if tiling.lean else None)
        for codec, size, map_, side, view in zip((s.fmt.k, s.fmt.v), sizes, (s.maps.k, s.maps.v), (s.k, s.v), views)
    ]
    plans[0] = replace(plans[0], hadamard=launch.hadamard_size(matrix))
    arguments = {
        "q": launch.rows_view(q),
        "part": shared.pop("part"),
        "lse": shared.pop("lse"),
        "k_pages": views[0],
        "v_pages": views[1],
        "k_map": launch.map_view(matrix, key_mean),
        **shared,
        "scale": call.scale * (1.0 if s.maps.k is None else s.maps.k.operands.inverse_factor),
        "k_scale": s.k.scale,
        "GROUP": plan.group,
        "PAGE": s.k.codes.shape[1],
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "K": plans[0],
        "V": plans[1],
        "F": plan.features(call, s),
    }
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    return launch.Launch(attend_kernel, grid, arguments, options, (*ATTEND_PLACES, *SHARED_PLACES))


@dataclass(frozen=True)
class Combining:
    """What partials are combined into, and how: the first mapped_splits of them through the matrix, which may be the diagonal beside
    Hadamard matrices, times mapped_factor, the others times plain_factor. out: `[M, HQ, D]`; lse: `[M, HQ]`. rows: of a program; None: by
    the number of rows."""

    out: torch.Tensor
    lse: torch.Tensor | None
    num_kv_heads: int
    matrix: torch.Tensor | None
    mapped_splits: int
    mapped_factor: float
    plain_factor: float
    sinks: torch.Tensor | None = None
    output_scale: float | None = None
    rows: int | None = None


def combine_launch(part: Partials, into: Combining, target: Target) -> launch.Launch:
    """The launch of the combine kernel."""
    tokens, num_heads, splits, head_size = part.out.shape
    group = num_heads // into.num_kv_heads
    out, lse, output_scale = into.out, into.lse, into.output_scale
    width, mapped = max(16, triton.next_power_of_2(head_size)), into.mapped_splits > 0
    own = width if mapped or width <= COLUMNS else COLUMNS  # of columns; a matrix maps whole rows
    rows = into.rows or combine_rows(tokens * num_heads, splits, target)
    arguments = {
        "part": part.out,
        "lse": part.lse,
        "out": launch.rows_view(out if output_scale is None else out.view(torch.uint8)),
        "out_lse": RowsView(None, 0, 0) if lse is None else launch.rows_view(lse),
        "v_map": MapView() if into.matrix is None else launch.map_view(into.matrix),
        "sinks": into.sinks,
        "num_rows": tokens * group,
        "splits": splits,
        "mapped_splits": into.mapped_splits,
        "mapped_factor": into.mapped_factor,
        "plain_factor": into.plain_factor,
        "output_scale": output_scale or 1.0,
        "GROUP": group,
        "D": head_size,
        "WIDTH": width,
        "OWN": own,
        "ROWS": rows,
        "MAPPED": (-launch.hadamard_size(into.matrix) or 1) if mapped else 0,
        "PLAIN": into.mapped_splits < splits,
        "PRECISION": target.precision,
    }
    grid = (triton.cdiv(tokens * group, rows), into.num_kv_heads, width // own)
    return launch.Launch(combine_kernel, grid, arguments, {"num_warps": 4}, COMBINE_PLACES)
