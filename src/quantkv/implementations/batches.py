"""A batch of several kinds of sequences, cut into runs that one implementation serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from ..assumed import assumed
from ..calls import AttendCall, Batch
from ..own import few_queries
from . import NAMES, module

MOST_RUNS = 8  # of a batch, for the sake of prompts that read no page


@dataclass(frozen=True)
class Run:
    """Neighbouring sequences of a call, as a call of their own.

    tokens: their queries; None: the run is the whole call. copies: tensors of the run's call that are copies, with what they copy.
    few: whether it reads the call's `few` in place of its segments."""

    call: AttendCall
    tokens: slice | None = None
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    few: bool = False

    def of(self, call: AttendCall) -> AttendCall:
        """The same run of another call of the same shape: of another layer, or of the same batch with other numbers in its tensors."""
        if self.tokens is None:
            return call
        for own, given in self.copies:
            own.copy_(given)
        segments = tuple(
            s._replace(block_table=own.block_table, key_start=own.key_start, key_range=own.key_range)
            for s, own in zip(call.few if self.few else call.segments, self.call.segments)
        )
        options = {**self.call.options.per_sequence(), "prompt_precision": self.call.options.prompt_precision}
        options = call.options if call.options is self.call.options else replace(call.options, **options)
        return self.call.with_tensors(*_rows(call, self.tokens), segments, options, call.own and call.own.of(self.tokens))


def cut(call: AttendCall) -> list[Run]:
    """The runs of a call on a GPU whose lengths the host knows: sequences that decode or verify, those with a long prompt, and what is in
    between, as they stand one after the other. Anything else is one run."""
    if call.batch.lengths is None or not (call.q.device.type == "cuda" or assumed()):
        return [Run(call)]
    return runs_of(call)


def runs_of(call: AttendCall) -> list[Run]:
    """`cut`, wherever the tensors are."""
    lengths, names = call.batch.lengths, NAMES
    if call.options.batch_invariant:  # who serves a sequence must not depend on the others
        names = [name for name in NAMES if "batch_invariant" in module(name, "attend").SUPPORTED]
    kinds = [(_kind(queries, names), "") for queries, _ in lengths]
    if call.own is not None:
        told = [_reads(queries, keys) for queries, keys in lengths]
        if len([*groupby(told)]) > MOST_RUNS:  # prompts with a context and without, in turns
            told = ["both" if what == "own rows" else what for what in told]
        kinds = [(kind, what) for (kind, _), what in zip(kinds, told)]
    ends, runs = 0, []
    for _, group in groupby(range(len(lengths)), key=kinds.__getitem__):
        members = list(group)
        seqs = slice(members[0], members[-1] + 1)
        tokens = slice(ends, ends + sum(queries for queries, _ in lengths[seqs]))
        ends = tokens.stop
        runs.append((seqs, tokens))
    if len(runs) < 2:
        return [Run(call)]
    return [_part(call, seqs, tokens) for seqs, tokens in runs if tokens.start < tokens.stop]


def _kind(queries: int, names: Sequence[str]) -> str:
    """The implementation, one of these, that is made for sequences of so many queries."""
    return next(name for name in names if queries in getattr(module(name, "attend"), "QUERIES", range(1 << 62)))


def _reads(queries: int, keys: int) -> str:
    """What a sequence reads in a call with own rows: a run whose sequences all read pages alone, or no pages, is served as such."""
    return "pages" if queries < 2 else "own rows" if queries == keys else "both"


def _rows(call: AttendCall, tokens: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return call.q[tokens], call.out[tokens], None if call.lse is None else call.lse[tokens]


def _part(call: AttendCall, seqs: slice, tokens: slice) -> Run:
    batch, copies = call.batch, []
    starts = batch.cu_seqlens_q[seqs.start : seqs.stop + 1] - batch.cu_seqlens_q[seqs.start]

    def sliced(t):
        if t is None:
            return None
        given = t[seqs]
        if given.data_ptr() % 16 == 0:
            return given
        # Kernels are compiled for addresses that are multiples of 16: another variant for every odd start would stall a server.
        copies.append((given.clone(), given))
        return copies[-1][0]

    part = Batch(starts, sliced(batch.seq_lens), lengths=batch.lengths[seqs], chunks=batch.chunks)
    copies.clear()  # that of the lengths stays right: they are the same in every call
    few = call.few is not None and few_queries(part.max_query_len, call.own)
    segments = tuple(
        s._replace(block_table=sliced(s.block_table), key_start=sliced(s.key_start), key_range=sliced(s.key_range))
        for s in (call.few if few else call.segments)
    )
    options = replace(call.options, **{name: sliced(t) for name, t in call.options.per_sequence().items()})
    q, out, lse = _rows(call, tokens)
    own = None if call.own is None else call.own.of(tokens)
    return Run(AttendCall(q, segments, part, call.scale, options, out, lse, own), tokens, tuple(copies), few)
