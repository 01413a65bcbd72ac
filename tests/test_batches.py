"""A mixed batch, cut into runs: each has one kind of sequences, and together they are the whole."""

from dataclasses import replace

import pytest
import torch

from quantkv import ops
from quantkv.implementations import batches
from quantkv.implementations.prefill import attend as prefill
from quantkv.testing import SampleBatch, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONG = prefill.MIN_QUERIES
QUERIES = (1, 1, 4, 40, LONG, LONG + 9, 1, 0)
KEYS = (30, 7, 20, 60, LONG + 3, LONG + 9, 16, 5)
HEADS = 4


def mixed(**options):
    b = SampleBatch.make("int8", QUERIES, KEYS, num_kv_heads=2, group=2, dtype=torch.float16, device=DEVICE)
    return b, b.call(lengths=tuple(zip(QUERIES, KEYS)), **options)


OPTIONS = {
    "plain": lambda: {},
    "window and softcap": lambda: {"window": 12, "softcap": 3.0, "sinks": torch.linspace(-1, 1, HEADS, device=DEVICE)},
    "of each sequence": lambda: {"causal": torch.tensor([True, False] * 4, device=DEVICE)},
    "ranges": lambda: {"key_range": torch.tensor([[2, n] for n in KEYS], device=DEVICE)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_runs_are_the_whole(name):
    b, call = mixed(**OPTIONS[name]())
    runs = batches.runs_of(call)
    assert [run.tokens.stop - run.tokens.start for run in runs] == [6, 40, 2 * LONG + 9, 1]
    assert [run.call.batch.max_query_len for run in runs] == [4, 40, LONG + 9, 1]
    for run in runs:
        ops.attend(run.call, "reference")
    expected, lse = b.oracle(**OPTIONS[name]())
    assert relative_error(call.out, expected) < 2e-3
    assert (call.lse.cpu() - lse).nan_to_num(0).abs().max() < 1e-2


def test_tensors_of_runs_are_aligned():
    """A kernel is compiled anew for an address that is no multiple of 16."""
    _, call = mixed(**OPTIONS["ranges"]())
    for run in batches.runs_of(call):
        (segment,) = run.call.segments
        tensors = (run.call.batch.cu_seqlens_q, run.call.batch.seq_lens, segment.block_table, segment.key_range)
        assert [t.data_ptr() % 16 for t in tensors] == [0] * 4


def test_a_run_of_another_layer():
    _, call = mixed()
    other, out = torch.randn_like(call.q), torch.full_like(call.out, torch.nan)
    layer = call.with_tensors(other, out, None, call.segments)
    for run in batches.runs_of(call):
        ops.prepare(run.call, "reference")(run.of(layer))
    whole = call.with_tensors(other, torch.empty_like(out), None, call.segments)
    ops.attend(whole, "reference")
    assert relative_error(out, whole.out) < 1e-3


def test_runs_read_what_their_tensors_hold_when_they_run():
    """Of the pages, ranges and masks of a batch some runs have copies, for the sake of addresses."""
    keys = tuple(zip(QUERIES, KEYS))
    causal = torch.tensor([True] * 8, device=DEVICE)
    ranges = torch.tensor([[0, n] for n in KEYS], dtype=torch.int32, device=DEVICE)
    b = SampleBatch.make("int8", QUERIES, KEYS, num_kv_heads=2, group=2, dtype=torch.float16, device=DEVICE)
    table = b.block_table.clone()
    call = replace(b, block_table=table).call(lengths=keys, causal=causal, key_range=ranges)
    launches = [(run, ops.prepare(run.call, "reference")) for run in batches.runs_of(call)]
    assert any(run.copies for run, _ in launches)
    for _ in range(2):
        for run, launch in launches:
            launch(run.of(call))
        expected, _ = b.oracle(causal=causal.clone(), key_range=ranges.clone())
        assert relative_error(call.out, expected) < 2e-3
        # The same tokens in other pages, all of them seen, but for the first two.
        moved = torch.arange(b.cache.num_blocks - 1, -1, -1, device=DEVICE)
        b.cache.copy_pages(torch.arange(b.cache.num_blocks, device=DEVICE), moved)
        table.copy_(torch.where(table >= 0, b.cache.num_blocks - 1 - table, table))
        b = replace(b, block_table=table)
        causal.fill_(False), ranges[:, 0].fill_(2)


@pytest.mark.parametrize("queries", [(0, 40), (40, 0), (0, 0, 3)])
def test_a_run_beside_sequences_without_queries_is_a_part(queries, monkeypatch):
    """It is the only one that is served, and what was prepared for it was launched with the tensors of the whole batch."""
    monkeypatch.setattr(batches, "cut", batches.runs_of)
    keys = tuple(50 + 7 * i for i in range(len(queries)))
    b = SampleBatch.make("int8", queries, keys, num_kv_heads=2, group=2, dtype=torch.float16, device=DEVICE)
    call = b.call(lengths=tuple(zip(queries, keys)))
    seen, prepare = [], ops.implementations.prepare
    monkeypatch.setattr(
        ops.implementations, "prepare", lambda name, call: lambda of: (seen.append(of.batch.num_seqs), prepare(name, call)(of))
    )
    ops.prepare(call, "auto")(call)
    assert seen == [len(run.call.batch.lengths) for run in batches.runs_of(call)]
    assert relative_error(call.out, b.oracle()[0]) < 2e-3


@pytest.mark.parametrize("lengths", [((1, 9), (2, 9)), ((LONG, LONG),) * 20])
def test_a_batch_of_one_kind_is_not_cut(lengths):
    """Long prompts neither, however many there are."""
    b = SampleBatch.make("int8", *zip(*lengths), head_size=16, num_kv_heads=1, group=1)
    call = b.call(lengths=lengths)
    assert [run.call for run in batches.runs_of(call)] == [call]
