"""Calls of attention with any geometry, formats, maps, segments and options together, against the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from quantkv import (
    AttendCall,
    AttentionOptions,
    Batch,
    LayerMaps,
    LinearMap,
    PagedCache,
    available_formats,
    get_format,
    ops,
    prepare_attend,
)
from quantkv.implementations import READS_ONLY
from quantkv.reads import key_intervals

from . import oracle
from .announced import announced

SHARE = 8

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PLAIN = tuple(DTYPES)
NOWHERE = -(2**30)  # a page: an address to crash on
SIZES = (16, 32, 48, 64, 80)
UNIT = 2.0**-24  # of float32: half of its last place


@dataclass(frozen=True)
class Part:
    """A segment. low, high: of each sequence, the positions that are read; begin: its key_start. None: all, from 0."""

    format: str
    key_range: tuple[tuple[int, int], ...] | None = None
    begin: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Case:
    """A call in plain data, from which everything is made; so that what fails can be printed and typed again."""

    seed: int
    lens: tuple[int, ...]
    queries: tuple[int, ...]
    parts: tuple[Part, ...]
    heads: int = 1
    group: int = 1
    head_size: int = 16
    head_size_v: int = 16
    block_size: int = 8
    dtype: str = "fp32"
    index: str = "int32"
    maps: str = "own"  # of the formats; "dense": other matrices; "key means": with key means, too
    scales: tuple[float, float] = (1.0, 1.0)
    entry: str = "call"  # or "cache", "prepared"
    bounds: tuple[str, ...] = ()
    strided: bool = False
    not_finite: str = ""  # "key", "value" or "query": of one token or query
    scale: float | None = None
    options: dict[str, Any] = field(default_factory=dict)


def sizes_of(names: list[str]) -> st.SearchStrategy[tuple[int, int]]:
    def fits(codec, size):
        return not size % codec.head_size_multiple and not (codec.power_of_two and size & (size - 1))

    formats = [get_format(name) for name in names]
    return st.tuples(*(st.sampled_from([n for n in SIZES if all(fits(getattr(f, side), n) for f in formats)]) for side in "kv"))


@st.composite
def options_of(draw, lens, queries) -> dict[str, Any]:
    """Some options, tensors as True: they follow from the seed."""
    options: dict[str, Any] = {}
    causal = draw(st.sampled_from([True, True, False, "each"]))
    if causal == "each":
        options["causal"] = tuple(draw(st.booleans()) for _ in lens)
    elif not causal:
        options["causal"] = False
    longest = max(lens, default=0)
    if draw(st.booleans()):
        options["window"] = draw(st.integers(1, longest + 2))
        if draw(st.integers(0, 2)) == 0:
            options["chunk_lookback"] = draw(st.integers(0, min(3, options["window"] - 1)))
    if draw(st.integers(0, 2)) == 0:
        options["softcap"] = draw(st.sampled_from([0.5, 2.0, 30.0]))
    for name in ("sinks", "alibi_slopes", "qq_bias"):
        if draw(st.integers(0, 3)) == 0:
            options[name] = True
    if "alibi_slopes" in options and draw(st.booleans()):
        options["alibi_sqrt"] = True
    if "qq_bias" in options:
        options["qq_bias"] = (max(queries, default=0) + draw(st.integers(0, 2)), draw(st.integers(1, 6)))
    if draw(st.integers(0, 3)) == 0:
        count, place = draw(st.integers(0, 3)), st.integers(-1, longest + 2)
        options["prefix_ranges"] = tuple(tuple((draw(place), draw(place)) for _ in range(count)) for _ in lens)
        options["clamp_prefix_to_window"] = draw(st.booleans())
    if draw(st.integers(0, 4)) == 0:
        options["output_scale"] = draw(st.sampled_from([0.004, 0.1, 3.0]))
    if draw(st.integers(0, 4)) == 0:
        options["batch_invariant"] = True
    return options


@st.composite
def parts_of(draw, name, lens, block_size) -> tuple[Part, ...]:
    way = draw(st.sampled_from(["whole", "whole", "ranged", "started", "split"]))
    if way == "whole":
        return (Part(name),)
    if way == "ranged":
        return (Part(name, tuple((draw(st.integers(0, n + 1)), draw(st.integers(0, n + 3))) for n in lens)),)
    if way == "started":
        return (Part(name, None, tuple(draw(st.integers(0, n + 1)) for n in lens)),)
    second = draw(st.sampled_from([name, *PLAIN]))
    cuts = [sorted(draw(st.integers(0, n)) for _ in range(2)) for n in lens]
    ranges = [tuple((0, a) for a, _ in cuts), tuple(map(tuple, cuts)), tuple((b, n) for (_, b), n in zip(cuts, lens))]
    parts = []
    for key_range, fmt in zip(ranges, (second, name, second)):
        begin = tuple(draw(st.integers(max(low - 2 * block_size, 0), low)) for low, _ in key_range) if draw(st.booleans()) else None
        parts.append(Part(fmt, key_range, begin))
    return tuple(parts)


@st.composite
def cases(draw) -> Case:
    fmt = draw(st.sampled_from(available_formats()))
    fmt = fmt if draw(st.booleans()) else f"{fmt}/{draw(st.sampled_from(available_formats()))}"
    lens = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
    queries = tuple(draw(st.integers(0, min(n, 5))) if draw(st.booleans()) else min(n, 1) for n in lens)
    block_size = draw(st.sampled_from([8, 16, 24]))
    parts = draw(parts_of(fmt, lens, block_size))
    head_size, head_size_v = draw(sizes_of([p.format for p in parts]))
    entry = draw(st.sampled_from(["cache", "prepared", "call"])) if len(parts) == 1 else "call"
    return Case(
        seed=draw(st.integers(0, 2**16)),
        lens=lens,
        queries=queries,
        parts=parts,
        heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        head_size=head_size,
        head_size_v=head_size_v,
        block_size=block_size,
        dtype=draw(st.sampled_from(PLAIN)),
        index=draw(st.sampled_from(["int32", "int64"])),
        maps=draw(st.sampled_from(["own", "own", "dense", "key means"])),
        scales=draw(st.sampled_from([(1.0, 1.0), (0.5, 2.0), (3.0, 0.25)])),
        entry=entry,
        bounds=tuple(draw(st.sets(st.sampled_from(["max_query_len", "max_seq_len", "lengths"])).map(sorted))),
        strided=draw(st.booleans()),
        not_finite=draw(st.sampled_from(["", "", "", "key", "value", "query"])),
        scale=draw(st.sampled_from([None, None, 0.3, -0.1])),
        options=draw(options_of(lens, queries)),
    )


class Made:
    """A case as tensors, with what its keys and values read back as: keys, values `[L, HK, D]` and held `[L]` of each sequence."""

    def __init__(self, case: Case, implementation: str = "reference", device: str = "cpu") -> None:
        self.case, self.device, self.implementation = case, device, implementation
        self.rng = np.random.default_rng(case.seed)
        self.index = getattr(torch, case.index)
        self.maps = self._maps()
        self.keys = [np.full((n, case.heads, case.head_size), np.nan) for n in case.lens]
        self.values = [np.full((n, case.heads, case.head_size_v), np.nan) for n in case.lens]
        self.held = [np.zeros(n, bool) for n in case.lens]
        self.broken = [np.zeros(n, bool) for n in case.lens]
        self.rows = [(self._rows(n, case.heads, case.head_size), self._rows(n, case.heads, case.head_size_v)) for n in case.lens]
        if case.not_finite in ("key", "value"):
            for s, n in enumerate(case.lens):
                if n:
                    at = n - 1 - int(self.rng.integers(min(n, 8)))  # often between queries
                    self.rows[s][case.not_finite == "value"][at, :, int(self.rng.integers(8))] = self.rng.choice([np.nan, np.inf, -np.inf])
                    self.broken[s][at] = True
        self.options = self._options()
        self.visible = [
            oracle.seen_keys(s, queries, n, np.ones(n, bool), self._plain(self.options)).any(0)
            for s, (queries, n) in enumerate(zip(case.queries, case.lens))
        ]
        self._check_intervals()
        self.segments, self.caches = [], []
        for part in case.parts:
            self._segment(part)
        self.starts = torch.tensor([0, *case.queries]).cumsum(0).to(self.index)
        self.q = self._tensor(self._rows(sum(case.queries), case.heads * case.group, case.head_size, 1.0))
        if case.not_finite == "query" and len(self.q):
            self.q[int(self.rng.integers(len(self.q)))] = float("nan")

    def _check_intervals(self) -> None:
        """What is worked out on the host says at least which keys are seen."""
        options = AttentionOptions.of(self.options)
        for visible, intervals in zip(self.visible, key_intervals(options, self.case.queries, self.case.lens)):
            within = np.zeros(len(visible), bool)
            for low, high in intervals:
                assert 0 <= low < high <= len(visible), intervals
                within[low:high] = True
            assert within[visible].all(), f"{intervals} leave out {np.flatnonzero(visible & ~within)}"

    def _rows(self, tokens: int, heads: int, size: int, spread: float = 2.0) -> torch.Tensor:
        """Normal numbers of sizes that differ from row to row, with rows of zeros and constants and a channel that is large."""
        rows = self.rng.standard_normal((tokens, heads, size)) * 2.0 ** self.rng.uniform(-spread, spread / 2, (tokens, heads, 1))
        rows[..., 3] *= 4
        kind = self.rng.integers(0, 24, tokens)
        rows[kind == 0], rows[kind == 1] = 0, 0.75
        return torch.from_numpy(rows).to(DTYPES[self.case.dtype])

    def _tensor(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows as they are, or as a view with gaps."""
        if not self.case.strided:
            return rows.to(self.device)
        wide = torch.full((rows.shape[1], rows.shape[0], rows.shape[2] + 3), float("nan"), dtype=rows.dtype)
        view = wide.transpose(0, 1)[..., 1 : 1 + rows.shape[2]]
        view.copy_(rows)
        return view.to(self.device)

    def _map(self, size: int, key_mean: bool) -> LinearMap:
        shared = bool(self.rng.integers(2))
        heads = 1 if shared else self.case.heads
        turn = np.linalg.qr(self.rng.standard_normal((heads, size, size)))[0] * self.rng.uniform(0.7, 1.4, (heads, 1, size))
        forward = torch.from_numpy(turn).float()
        inverse = torch.linalg.inv(forward.double()).float()
        table = torch.from_numpy(self.rng.standard_normal((2, 1 if shared else self.case.heads, size))).float() if key_mean else None
        return LinearMap(forward, inverse, table)

    def _maps(self) -> LayerMaps | None:
        if self.case.maps == "own":
            return None
        return LayerMaps(self._map(self.case.head_size, self.case.maps == "key means"), self._map(self.case.head_size_v, False))

    def _segment(self, part: Part) -> None:
        case, size = self.case, self.case.block_size
        spec = get_format(part.format).cache_spec(case.heads, case.head_size, case.head_size_v, size)
        begins = part.begin or [0] * len(case.lens)
        ranges = part.key_range or [(0, n) for n in case.lens]
        held = [range(max(low, b), max(min(high, n), low, b)) for (low, high), b, n in zip(ranges, begins, case.lens)]
        pages = [-(-(h.stop - b) // size) if h else 0 for h, b in zip(held, begins)]
        spare = int(self.rng.integers(1, 3))
        table = np.full((len(held), max(pages, default=0) + spare), NOWHERE)
        order = self.rng.permutation(sum(pages) + spare)
        cache = PagedCache(
            spec, len(order), maps=self._own_maps(spec, part), k_scale=case.scales[0], v_scale=case.scales[1], device=self.device
        )
        cache.buffer.fill_(0xFF)
        slots, positions, key, value = [], [], [], []
        for s, (h, b) in enumerate(zip(held, begins)):
            own, order = order[: pages[s]], order[pages[s] :]
            needed = [j for j in h if self.visible[s][j]] or [h.stop]
            first = (needed[0] - b) // size  # pages before it are wholly behind what any query sees
            table[s, first : len(own)] = own[first:]
            at = np.array(h, int)
            slots.append(own[(at - b) // size] * size + (at - b) % size if len(at) else at)
            positions.append(at)
            key.append(self.rows[s][0][at]), value.append(self.rows[s][1][at])
        slots, positions = (np.concatenate([*t, []]) for t in (slots, positions))
        key, value = _joined(key, self), _joined(value, self, 1)
        for some in np.array_split(self.rng.permutation(len(slots)), 2):  # out of order, in two calls; skipped tokens among them
            given = slots[some].copy()
            skipped = self.rng.random(len(some)) < 0.2
            given[skipped] = -1
            for where in (given, np.where(skipped, slots[some], -1 - slots[some])):
                self._write(cache, key[some], value[some], where, positions[some])
        at = torch.from_numpy(slots).long()
        k, v = cache.dequantize(at.to(self.device), torch.from_numpy(positions).long().to(self.device), torch.float64)
        for s, h in enumerate(held):
            at = np.array(h, int)
            self.keys[s][at], self.values[s][at] = k[: len(at)].cpu().numpy(), v[: len(at)].cpu().numpy()
            k, v = k[len(at) :], v[len(at) :]
            assert not self.held[s][at].any(), "segments are disjoint"
            self.held[s][at] = True
        key_start = None if part.begin is None else self._integers(part.begin)
        key_range = None if part.key_range is None else self._integers(part.key_range).view(-1, 2)
        self.caches.append(cache)
        self.segments.append(cache.segment(self._integers(table), key_start, key_range))

    def _own_maps(self, spec, part: Part) -> LayerMaps | None:
        """Of a split call, the plain segments have none."""
        return None if len(self.case.parts) > 1 and part.format in PLAIN else self.maps

    def _integers(self, values) -> torch.Tensor:
        return torch.as_tensor(np.array(values, np.int64)).to(self.device, self.index)

    def _write(self, cache, key, value, slots, positions) -> None:
        by_position = cache.maps.by_position or bool(self.rng.integers(2))
        given = self._integers(positions) if by_position else None
        writer = "auto" if self.implementation in READS_ONLY else self.implementation
        cache.write(self._tensor(key), self._tensor(value), self._integers(slots), given, implementation=writer)

    def _options(self) -> dict[str, Any]:
        options, num_heads = dict(self.case.options), self.case.heads * self.case.group
        if isinstance(options.get("causal"), tuple):
            options["causal"] = torch.tensor(options["causal"], dtype=torch.bool, device=self.device)
        for name, spread in (("sinks", 1.0), ("alibi_slopes", 0.2)):
            if name in options:
                options[name] = torch.from_numpy(self.rng.standard_normal(num_heads) * spread).float().to(self.device)
        if "qq_bias" in options:
            bias = self.rng.standard_normal(options["qq_bias"])
            bias[self.rng.random(bias.shape) < 0.15] = -np.inf
            options["qq_bias"] = torch.from_numpy(bias).float().to(self.device)
        if "prefix_ranges" in options:
            ranges = np.array(options["prefix_ranges"], np.int64).reshape(len(self.case.lens), -1 if self.case.lens else 1, 2)
            options["prefix_ranges"] = self._integers(ranges)
        return options

    def _plain(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: t.cpu().numpy() if isinstance(t, torch.Tensor) else t for name, t in options.items()}

    def bounds(self) -> dict[str, Any]:
        pairs, most, spare = list(zip(self.case.queries, self.case.lens)), max(self.case.queries, default=0), int(self.rng.integers(2))
        if self.device != "cpu" and "qq_bias" in self.options:  # there a bias needs a row for each query of the bound
            spare = min(spare, len(self.options["qq_bias"]) - most)
        all_of_them = {
            "max_query_len": most + spare,
            "max_seq_len": max(self.case.lens, default=0) + int(self.rng.integers(2)),
            "lengths": pairs,
        }
        return {name: all_of_them[name] for name in self.case.bounds}

    def serve(self) -> tuple[torch.Tensor, torch.Tensor]:
        case, segment = self.case, self.segments[0]
        lens, starts, q = self._integers(case.lens), self.starts.to(self.device), self.q
        how = dict(implementation=self.implementation)
        places = dict(block_table=segment.block_table, key_start=segment.key_start, key_range=segment.key_range)
        batch = dict(seq_lens=lens, cu_seqlens_q=starts)
        if case.entry == "cache":
            return self.caches[0].attend(q, **batch, **places, **self.bounds(), scale=case.scale, return_lse=True, **how, **self.options)
        if case.entry == "prepared":
            attend = prepare_attend(**batch, **places, **self.bounds(), scale=case.scale, **how, **self.options)
            attend(self.caches[0], self._tensor(q.cpu() + 1), return_lse=True)
            return attend(self.caches[0], q, return_lse=True)
        dtype = torch.float8_e4m3fn if "output_scale" in case.options else q.dtype
        out = torch.empty(q.shape[0], q.shape[1], case.head_size_v + 2, dtype=dtype, device=self.device)[..., : case.head_size_v]
        lse = torch.full(q.shape[:2], float("nan"), device=self.device)
        call = AttendCall(
            q, tuple(self.segments), Batch.of(q, lens, starts, **self.bounds()), case.scale, AttentionOptions.of(self.options), out, lse
        )
        return ops.attend(call, self.implementation)

    def check(self, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """AssertionError unless every number is the oracle's, up to what roundings leave."""
        case, options, first = self.case, self._plain(self.options), 0
        assert out.shape == (sum(case.queries), case.heads * case.group, case.head_size_v)
        assert lse is None or lse.shape == out.shape[:2]
        got, got_lse, q = (None if t is None else t.float().cpu().numpy().astype(float) for t in (out, lse, self.q))
        for s, n in enumerate(case.queries):
            mine, first = slice(first, first + n), first + n
            keys, values = (np.where(self.broken[s][:, None, None], 0.0, t[s]) for t in (self.keys, self.values))
            want = oracle.sequence(s, np.nan_to_num(q[mine]), keys, values, self.held[s], case.scale, options)
            whole = ~(want.seen & self.broken[s]).any(1) & np.isfinite(q[mine]).all((1, 2))
            self._compare(
                s, got[mine][whole], (want.lse if lse is None else got_lse[mine])[whole], oracle.Answer(*(t[whole] for t in want))
            )

    def _compare(self, s: int, got: np.ndarray, got_lse: np.ndarray, want: oracle.Answer) -> None:
        case, options = self.case, oracle.DEFAULTS | self.case.options
        widest = max(case.head_size, case.head_size_v)
        # Two products of D terms each, in float32; an integer's zero point and matrices of condition 2 on top: 16 D roundings of the
        # largest sum. In the softmax an error of a score is one of a weight.
        score_error = 16 * widest * UNIT * (want.score_size + 1)
        kept = np.isfinite(want.lse)
        assert np.array_equal(kept, np.isfinite(got_lse)), f"sequence {s}: log-sum-exps {got_lse}, expected {want.lse}"
        assert (got_lse[~kept] == -np.inf).all(), f"sequence {s}: a query without a key has the log-sum-exp {got_lse[~kept]}"
        wrong = abs(np.where(kept, got_lse, 0) - np.where(kept, want.lse, 0)) > score_error
        assert not wrong.any(), f"sequence {s}: log-sum-exps {got_lse[wrong]}, expected {want.lse[wrong]}"
        error = ((2 * score_error + 64 * UNIT * np.sqrt(widest)) * want.value_size)[..., None] + 1e-30
        expected = want.out
        if options["output_scale"] is None:
            error = error + torch.finfo(DTYPES[case.dtype]).eps / 2 * abs(expected) + torch.finfo(DTYPES[case.dtype]).smallest_normal
        else:
            error = error / options["output_scale"]
            expected, _ = oracle.as_e4m3(expected, options["output_scale"])
            error = error * 1.01 + oracle.as_e4m3(abs(expected) + error, 1.0)[1] * 1.01
        wrong = ~(abs(got - expected) <= error)
        assert not wrong.any(), (
            f"sequence {s}, query and head {np.argwhere(wrong)[0][:2]}: {got[wrong][:4]}, expected {expected[wrong][:4]}"
        )


def _joined(parts: list[torch.Tensor], made: Made, side: int = 0) -> torch.Tensor:
    case = made.case
    empty = torch.zeros(0, case.heads, (case.head_size, case.head_size_v)[side], dtype=DTYPES[case.dtype])
    return torch.cat([*parts, empty])


def check(case: Case, implementation: str = "reference", device: str = "cpu") -> None:
    """The target: a valid call gives the oracle's numbers, and asks for no page that no query sees; or it is `Refused`."""
    with announced(implementation):
        made = Made(case, implementation, device)
        out, lse = made.serve()
    made.check(out, lse)
