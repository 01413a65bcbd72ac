"""Many queries over a quantized cache: its keys and values go once through a bounded 16-bit scratch to dense attention.

With hundreds of queries attention is bound by arithmetic, and writing the rows out costs a few percent of it: 2 ns a key on
an H200, where 4,096 queries of 32 heads cost 100 ns. So the pages are dequantized slice by slice, the best dense kernel there
is (`backends.py`) runs on each slice, and log-sum-exps combine the results (`plan.py` cuts the batch). New tokens are read back like all
others, unless the call has own rows: these lie beside the others in the scratch, or are read where they lie (`own.py`).

A sink is one more term of the denominator, which follows from the log-sum-exp: the output is multiplied by `sigmoid(lse - sink)`. So every
backend has sinks. Windows and the softcap are the backend's own.

Segments beside one that holds all positions, full-precision tokens say, are written over its rows in the scratch.

Rows may stay in their mapped space, where a slice needs no product: `q . k^ = (A^-T q) . (y^ + A off)`, so q is mapped once, and
the combined output once. Where there are not many more rows than queries, the rows are mapped back as they are written out: one
product in a launch that waits for memory, instead of two launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...assumed import assumed
from ...calls import AttendCall, AttentionOptions
from ...maps import LayerMaps
from ...options import PROMPT_QUERIES
from ...reads import window_size
from ..hopper.host import launch
from . import backends, flash3, own
from .plan import Group, Reach, Round, groups
from .steps import Partial, TorchSteps
from .streams import Lanes

# Bounds of what a call takes beside its tensors, whatever the batch is. The first is of keys and values: 65,536 tokens of 8 heads of 128;
# 256 rows of a cache are written out at once however many bytes they have. The second is of mapped queries and of results that are to be
# combined or mapped: of 10,800 queries of 32 heads of 128 whose results are combined, of 32,500 others, and of half as many where two
# streams have some each. Queries that are neither mapped nor combined, and whose results go where they belong, need none.
SCRATCH_BYTES = 256 << 20
QUERY_BYTES = 512 << 20
MIN_QUERIES = PROMPT_QUERIES  # fewer do not pay for writing the rows out: measured over 2,048 and 16,384 keys
# Rows of a cache for each query row, at most, that are mapped back: 131,072 keys and values take 15 us longer then, and as many
# queries and outputs take 50 us to map.
MAPPED_BACK = 2


SUPPORTED: frozenset[str] = frozenset(("window", "chunk_lookback", "softcap", "sinks", "prompt_precision"))
QUERIES = range(MIN_QUERIES, 1 << 62)  # of a sequence, that this is made for
OWN_ROWS = "read"


def refusal(call: AttendCall) -> str | None:
    """Why `run` does not serve a call, None where it does: the one rule. Reads no tensor."""
    q, s, num_seqs, lengths = call.q, call.segments[0], call.batch.num_seqs, call.batch.lengths
    if s.key_start is not None or ((len(call.segments) > 1 or s.key_range is not None) and not s.complete):
        return "several segments, or a range of keys, of which the first does not hold all positions"
    if any((other.key_start is None) == (other.key_range is None) for other in call.segments[1:]):
        return "a second segment with neither key_start nor key_range, or with both"
    if call.out.dtype != q.dtype:
        return f"out of {call.out.dtype}: q's dtype is needed"
    if q.shape[0] < MIN_QUERIES * num_seqs and lengths is None:
        return f"{q.shape[0]} queries, fewer than {MIN_QUERIES} for each of {num_seqs} sequences"
    if lengths is not None and not all(queries >= MIN_QUERIES for queries, _ in lengths if queries):
        return f"a sequence has fewer than {MIN_QUERIES} queries"
    if _eight_bit(call) and lengths is None and num_seqs > 1:
        return f"prompt_precision: of several sequences without lengths: which have fewer than {MIN_QUERIES} queries is not known"
    if q.shape[0] == 0:
        return "no queries"
    if lengths is None and _capturing(q):
        return "the lengths would be read on the host, which a captured graph cannot do"
    reach = _reach(call.options, call.batch.max_seq_len)
    if 0 < reach.chunk < MIN_QUERIES:
        return f"chunks of {reach.chunk} tokens, fewer than {MIN_QUERIES}"
    sizes = (q.shape[2], s.head_size_v)
    if _choose(call, reach) is None:
        asked = [name for name, on in (("window", reach.window), ("softcap", call.options.softcap)) if on]
        asked += ["prompt_precision"] * _eight_bit(call)
        where = q.device.type if assumed() is None else assumed().name
        return f"no dense backend for {q.dtype} rows of {sizes[0]} and {sizes[1]} on {where}{' with ' * bool(asked)}{', '.join(asked)}"
    return None


def _eight_bit(call: AttendCall) -> bool:
    return call.options.prompt_precision == "8bit"


def _capturing(q: torch.Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def _reach(options: AttentionOptions, longest: int | None) -> Reach:
    """How far back queries see. longest: keys of the longest sequence, where it is known: a window that it fits in is none."""
    window, chunk = window_size(options)
    if longest is not None and longest <= max(window, chunk):
        return Reach()
    return Reach(window, chunk, max(options.chunk_lookback, 0))


def _choose(call: AttendCall, reach: Reach, lengths: Sequence[tuple[int, int]] = ()) -> str | None:
    """The fastest backend. lengths: those of the sequences, where they are known."""
    heads, size = call.q.shape[1:]
    needs = {
        "window": bool(reach.window),
        "softcap": call.options.softcap > 0,
        "alike": len({*lengths}) == 1,
        "eight_bit": _eight_bit(call),
    }
    served = [(queries, keys) for queries, keys in lengths if queries]
    pairs = sum(queries * (keys - queries // 2) for queries, keys in served)
    short = not needs["alike"] and pairs * heads * size < backends.WORTH_A_CALL * len(served)
    return backends.choose(call.q.device, call.q.dtype, size, call.segments[0].head_size_v, **needs, short=short, scale=call.scale)


def run(call: AttendCall) -> None:
    """Serve `call`, into its out and lse. Lengths that the host does not know are read from the device, which it waits for: 5 to 10 %
    of a chunk of 4,096 on an H200."""
    serve(call)


def prepare(call: AttendCall) -> Callable[[AttendCall], None]:
    """What serves every call of the same batch. Lengths that the host does not know are read when it runs, as by `run`."""
    plans: dict[Sequence[tuple[int, int]], PrefillPlan] = {}

    def launch(call: AttendCall) -> None:
        if call.batch.lengths is None and _capturing(call.q):
            raise ValueError("lengths=None: a captured graph cannot read them; prepare the call with the lengths of each sequence")
        lengths = call.batch.host_lengths()
        if lengths not in plans:
            plans.clear()
            plans[lengths] = plan(call, lengths=lengths)
        follow(call, plans[lengths])

    return launch


def serve(call: AttendCall, *, triton: bool | None = None, **how) -> None:
    """`run`, with what it would choose given: triton as of `follow`, the others as of `plan`."""
    follow(call, plan(call, **how), triton)


@dataclass(frozen=True)
class PrefillPlan:
    """What calls of one batch share. lanes: scratches, and streams. rows: of each scratch. few: keys, for so many queries, that they are
    mapped back. placed: what the launches of a round want on the device, `Round.ends` and `TorchSteps.blocks`; of one sequence only where
    the backend asks for it. sources: of each round, in a call with own rows. fresh: no page is read. kept: by calls for the next ones:
    launches of the steps, by what they are for, and numbers of the backend."""

    lengths: Sequence[tuple[int, int]]
    backend: str
    groups: list[Group]
    lanes: int
    rows: int
    few: bool
    placed: dict[Round, list[torch.Tensor]]
    sources: dict[Round, own.Sources] = field(default_factory=dict)
    fresh: bool = False
    kept: dict[Hashable, Any] = field(default_factory=dict)


def plan(
    call: AttendCall,
    *,
    backend: str | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
    query_bytes: int = QUERY_BYTES,
    lengths: Sequence[tuple[int, int]] | None = None,
    overlap: bool | None = None,
    together: bool | None = None,
) -> PrefillPlan:
    """Cut a call's batch. backend: of `backends.py`; None: the fastest for these rows. scratch_bytes, query_bytes: bounds, see
    `SCRATCH_BYTES`. lengths: (queries, keys) of each sequence; None: those of the batch. overlap: whether several rounds go on two streams
    (on a CPU: through two scratches); None: where no more rows are written out so. together: whether sequences share rounds; None: they do.
    In a captured graph neither, as nothing is copied to the device there."""
    q, (k, _, _, _, maps, *_) = call.q, call.segments[0]
    lengths = call.batch.host_lengths() if lengths is None else lengths
    fresh = call.own is not None and own.is_fresh(lengths)
    heads, sizes = k.codes.shape[2], (q.shape[2], call.segments[0].head_size_v)
    reach = _reach(call.options, max((keys for _, keys in lengths), default=0))
    backend = backend or _choose(call, reach, lengths)
    if backend is None:
        raise ValueError(f"q: no dense backend for {q.dtype} rows of {sizes[0]} and {sizes[1]} on {q.device.type}")
    free = not _capturing(q)
    streams = (1, 2) if free and (_has_streams(q) if overlap is None else overlap) else (1,)
    together = (True if together is None else together) and free and (backend != "flash3" or flash3.takes_many())
    few = heads * sum(keys for _, keys in lengths) <= MAPPED_BACK * q.shape[0] * q.shape[1]
    mapped = maps != LayerMaps() and not fresh and not (few and _cheap(maps, q))
    row_bytes = query_row_bytes(q.shape[1], sizes, q.element_size(), mapped, backends.BACKENDS[backend].into, _eight_bit(call))
    cuts: list[list[Group]] = []
    for lanes in streams:
        most = max(scratch_bytes // lanes // (heads * sum(sizes) * q.element_size()) // backends.PLANNED, 1) * backends.PLANNED
        single, several = (max(query_bytes // lanes // n, backends.PLANNED) for n in row_bytes)
        cuts.append(groups(lengths, backends.BACKENDS[backend].limits(most, single, several, together), reach))
    lanes = len(cuts) if len(_rounds(cuts[0])) > 1 and (overlap or _written(cuts[-1]) <= _written(cuts[0])) else 1
    found, rounds = cuts[lanes - 1], _rounds(cuts[lanes - 1])
    asked = free and backends.BACKENDS[backend].ends
    sources = {} if call.own is None else own.split(found, lengths)
    placed = _place([round for round in rounds if asked or len(round.reads) > 1], sources, sizes, q.device)
    return PrefillPlan(lengths, backend, found, lanes, max((round.room for round in rounds), default=0), few, placed, sources, fresh)


def _has_streams(q: torch.Tensor) -> bool:
    return q.is_cuda


def _rounds(found: list[Group]) -> list[Round]:
    return [round for group in found for round in group.rounds]


def _written(found: list[Group]) -> int:
    """Rows of keys that are written out. Two streams halve what a round has room for: queries that are cut for it read all keys again.
    That costs more than a stream hides, as a dense kernel's blocks fill a multiprocessor."""
    return sum(round.room for round in _rounds(found))


def query_row_bytes(
    num_heads: int, sizes: tuple[int, int], itemsize: int, mapped: bool = True, into: bool = False, eight_bit: bool = False
) -> tuple[int, int]:
    """Bytes of a query that one round serves: mapped, its result, the log-sum-exp; and of one whose rounds are combined: three results that
    are there at once, and the combined one in float32. sizes: of a key and a value. mapped: whether queries or results are. into: whether
    the kernel puts its results where it is told. eight_bit: whether queries are rounded to 8 bits."""
    size, size_v = sizes
    alone = size * mapped + size_v * (mapped or not into)
    rounded = (size + 8) * eight_bit
    return num_heads * (itemsize * alone + 4 + rounded), num_heads * (itemsize * (size + 3 * size_v) + 4 * size_v + 16 + rounded)


def most_scratch_bytes(num_tokens: int, num_heads: int, sizes: tuple[int, int], itemsize: int, eight_bit: bool = False) -> int:
    """Most bytes that a call takes beside its tensors, whatever its lengths are. sizes: of a key and a value. eight_bit: whether keys are
    rounded to 8 bits too, with a mean for each sequence."""
    size, tokens = sizes[0], num_tokens * max(query_row_bytes(num_heads, sizes, itemsize, eight_bit=eight_bit))
    keys = SCRATCH_BYTES // (sum(sizes) * itemsize) * (size + 4) + -(-num_tokens // MIN_QUERIES) * num_heads * size * 4
    return SCRATCH_BYTES + min(tokens, QUERY_BYTES) + keys * eight_bit


def _place(
    rounds: list[Round], sources: dict[Round, own.Sources], sizes: tuple[int, int], device: torch.device
) -> dict[Round, list[torch.Tensor]]:
    """Numbers of the rounds, and of the sources of such of several sequences, on the device, by one copy that nothing waits for; each list
    at an address that is a multiple of 16."""
    steps, flat, slices = _steps(device.type == "cuda"), [], {}
    several = [round for round in rounds if len(round.reads) > 1]
    parts = [part for round in several for part in sources.get(round, (round,)) if part is not None]
    for round in dict.fromkeys((*rounds, *parts)):
        slices[round] = []
        for numbers in (*(round.ends() if round in rounds else ([],) * 3), steps.blocks(round, sizes) if round in parts else []):
            slices[round].append(slice(len(flat), len(flat) + len(numbers)))
            flat += numbers + [0] * (-len(numbers) % 4)
    if not flat:
        return {}
    there = torch.tensor(flat, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda").to(device, non_blocking=True)
    return {round: [there[part] for part in of_round] for round, of_round in slices.items()}


def follow(call: AttendCall, plan: PrefillPlan, triton: bool | None = None) -> None:
    """Serve a call by a plan. triton: whether Triton kernels move the rows (else PyTorch); None: on an accelerator."""
    q, out, (k, v, fmt, block_table, maps, *_) = call.q, call.out, call.segments[0]
    heads, sizes = k.codes.shape[2], (q.shape[2], call.segments[0].head_size_v)
    triton = (q.is_cuda or assumed() is not None) if triton is None else triton
    maps = LayerMaps() if plan.fresh else maps
    steps = _steps(triton)((k, v), fmt, maps, heads, plan.few and _cheap(maps, q), plan.kept)
    capturing = _capturing(q)
    lanes = Lanes(q.device, 1 if capturing else plan.lanes)  # a graph gets the order of one stream
    kept = plan.kept if not capturing else None  # what is made in a graph is made when it runs
    keys = heads * plan.rows * sizes[0]  # numbers of a scratch; values follow
    total, waiting, count, served = None, None, 0, backends.BACKENDS[plan.backend]
    given = {round: own.in_place(steps, call.own, found, q.dtype) for round, found in plan.sources.items()} if served.anywhere else {}
    rows = keys + heads * plan.rows * sizes[1] if not given or None in given.values() else 0
    scratch = [q.new_empty(rows) for _ in range(lanes.count)]

    sinks = call.options.sinks
    inside = sinks is not None and backends.takes_sinks(plan.backend, sinks, call.lse is not None)

    def settle(group: Group, index: int, part: Partial, done) -> None:
        """Combine the result of a round into those before it, and finish the group after the last one: on the caller's stream."""
        nonlocal total
        lanes.wait(0, done)
        if index + 1 == len(group.rounds):
            later = None if inside and len(group.rounds) == 1 else sinks
            steps.finish(total, part, _of(out, group.tokens), _of(call.lse, group.tokens), later)
            total = None
        else:
            total = part if total is None else steps.combine(total, part)

    for group in plan.groups:
        rows = made = None
        # Nothing but sinks is left to do to rows that are where they belong.
        ready = served.into and len(group.rounds) == 1 and steps.maps[1] is None
        for index, round in enumerate(group.rounds):
            lane, count = count % lanes.count, count + 1
            ends = _ends(plan, round, capturing)
            with lanes.on(lane):
                sources = plan.sources.get(round, own.Sources(round, None))
                sliced = given.get(round)
                if sliced is None:
                    sliced = [_rows_of(scratch[lane], at, heads, round.room, n, served.token_major) for at, n in zip((0, keys), sizes)]
                    if sources.stored is not None:
                        steps.gather(block_table, sources.stored, sliced, _blocks(plan, sources.stored, triton))
                        for other in call.segments[1:]:
                            for read in sources.stored.reads:
                                steps.patch(other, read, plan.lengths[read.sequence][1], sliced)
                    if sources.own is not None:
                        own.lay(steps, call.own, sources, sliced, _blocks(plan, sources.own, triton))
                if rows is None:
                    rows = _queries(steps, q, group)
                    made = lanes.mark(lane)
                else:
                    lanes.wait(lane, made)
                    lanes.lend(rows, lane)
                target = _of(out, group.tokens) if ready else None
                added = sinks if inside and len(group.rounds) == 1 else None
                how = (call.options.softcap, target, added, kept, _eight_bit(call))
                found = backends.attend(plan.backend, rows, *sliced, call.scale, round, ends, *how)
                for t in found:
                    lanes.lend(t, 0)
                if group.front or group.back:
                    found = [t[group.front : group.front + group.tokens.stop - group.tokens.start] for t in found]
                part = Partial(*found)
                done = lanes.mark(lane)
            if waiting is not None:
                settle(*waiting)
            waiting = (group, index, part, done)
            if lanes.count == 1:
                settle(*waiting)
                waiting = None
    if waiting is not None:
        settle(*waiting)


def _of(t: torch.Tensor | None, tokens: slice) -> torch.Tensor | None:
    """The rows of some tokens: t itself where these are all."""
    return t if t is None or (tokens.start == 0 and tokens.stop == t.shape[0]) else t[tokens]


def _rows_of(scratch: torch.Tensor, first: int, heads: int, rows: int, size: int, token_major: bool) -> torch.Tensor:
    """`[HK, rows, size]` of a scratch, from its number `first` on."""
    return scratch.as_strided((heads, rows, size), (size, heads * size, 1) if token_major else (rows * size, size, 1), first)


def _ends(plan: PrefillPlan, round: Round, capturing: bool) -> list[torch.Tensor] | None:
    """`Round.ends`. A graph makes those of one sequence itself, and needs no plan that lives as long as it."""
    if round not in plan.placed or (capturing and len(round.reads) == 1):
        return None
    return plan.placed[round][:3]


def _blocks(plan: PrefillPlan, round: Round, triton: bool) -> torch.Tensor | None:
    """`TorchSteps.blocks`."""
    blocks = plan.placed[round][3] if triton and round in plan.placed else None
    return None if blocks is None or not blocks.shape[0] else blocks


def _queries(steps: TorchSteps, q: torch.Tensor, group: Group) -> torch.Tensor:
    """The mapped queries of a group. Rows before and behind them, which are computed for a planned shape's sake and dropped, are those of
    other sequences where q has them and there is no map."""
    first, last = group.tokens.start - group.front, group.tokens.stop + group.back
    there = steps.maps[0] is None and first >= 0 and last <= q.shape[0]
    rows = _of(q, slice(first, last) if there else group.tokens)
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    return rows if there else steps.map_query(rows, group.front, group.back)


def _cheap(maps: LayerMaps, q: torch.Tensor) -> bool:
    """Whether a product by every matrix is one 16-bit dot of a tile: entries 0 and +-f only, and no more of them than shared memory holds:
    128 in a row everywhere, 256 on Hopper, where rows are bf16 as the matrix is."""
    inverses = [map_.operands.output for map_ in (maps.k, maps.v) if map_ is not None]
    wide = q.dtype == torch.bfloat16 and q.is_cuda and launch.is_hopper(launch.device_index(q.device))
    return all(inverse.dtype == torch.bfloat16 and inverse.shape[-1] <= (256 if wide else 128) for inverse in inverses)


def _steps(triton: bool) -> type[TorchSteps]:
    if not triton:
        return TorchSteps
    from .triton_steps import TritonSteps

    return TritonSteps
