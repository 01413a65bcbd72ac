"""The Hopper combine kernels: rows of few and of many, and blocks that take turns at a sequence's packed query rows; their source run on a
CPU."""

from dataclasses import replace

import pytest
import torch

import hopper_ways
from hopper_on_cpu import AVAILABLE, Device
from quantkv.implementations.hopper import attend as hopper
from quantkv.implementations.hopper.decode import combine
from quantkv.testing import SampleBatch, check

emulated = pytest.mark.skipif(not AVAILABLE, reason="needs g++")


@pytest.fixture(autouse=True)
def partials(monkeypatch):
    hopper_ways.split(monkeypatch)


@emulated
@pytest.mark.parametrize(
    "multiprocessors, kv_heads, group, lens, by_blocks, warps",
    [
        (2, 1, 12, (700,), False, 4),
        (4, 1, 20, (700,), False, 4),
        (7, 1, 32, (1000,), False, 4),
        (15, 2, 16, (2000, 5), False, 4),
        (2, 1, 4, (700,), True, 4),
        (7, 1, 4, (1000,), True, 4),
        (15, 2, 4, (2000, 5), True, 4),
        (20, 1, 4, (2700,), True, 8),
        (40, 1, 4, (5200,), True, 8),
    ],
)
def test_rows_of_so_many_partials(multiprocessors, kv_heads, group, lens, by_blocks, warps, monkeypatch, tmp_path):
    """A warp loads two together, or four, or eight, or has several such batches; of a block each has some of a row's, or all of it."""
    device = Device(monkeypatch, tmp_path, multiprocessors)
    b = SampleBatch.make("int4", (1,) * len(lens), lens, head_size=128, num_kv_heads=kv_heads, group=group, dtype=torch.bfloat16)
    call = b.call(max_query_len=1)
    plan = hopper.Plan(call, multiprocessors)
    assert (plan.combine.by_blocks, plan.combine.threads) == (by_blocks, 32 * warps) and plan.main.decode_grid == (multiprocessors, 1, 1)
    assert hopper.prepare(call).launches[-1].threads == 32 * warps
    device.serve(call)
    check(b, (call.out, call.lse))


@emulated
def test_warps_that_are_not_there_have_nothing(monkeypatch, tmp_path):
    """What a block of eight left in shared memory is not added to what one of four comes to."""
    device, threads = Device(monkeypatch, tmp_path, 16), []
    for lens in ((2000,), (300, 290, 310), (2000,)):
        b = SampleBatch.make("int4", (1,) * len(lens), lens, head_size=128, num_kv_heads=1, group=4, dtype=torch.bfloat16)
        call = b.call(max_query_len=1)
        threads.append(hopper.Plan(call, 16).combine.threads)
        device.serve(call)
        check(b, (call.out, call.lse))
    assert threads == [256, 128, 256] and len(device.compiled) == 1


def test_who_has_a_block_of_four_warps_for_each_row():
    """Where all rows have one at once, and the combine kernel does nothing else."""

    def of(sequences, multiprocessors, **changed):
        config = replace(hopper.configurations(plain.call(max_query_len=1))[0], **changed)
        made = combine.launched(config, sequences, 4, 6, multiprocessors)
        return made.by_blocks, made.threads

    plain = SampleBatch.make("int4", (1, 1), (40, 40), head_size=128, num_kv_heads=2, group=4, dtype=torch.bfloat16)
    assert of(8, 128) == (True, 256) and of(9, 128) == of(64, 128) == (True, 128) and of(65, 128) == (False, 128)
    for changed in (dict(segments=2), dict(exact=16), dict(value_map="MATRIX")):
        assert not of(64, 128, **changed)[0] and of(8, 128, **changed) == (True, 256)


@emulated
@pytest.mark.parametrize("name, queries, group, grid", [("int4", (8, 5, 8, 1), 4, (4, 2, 2)), ("bf16", (5, 8, 1, 3), 3, (4, 2, 2))])
def test_blocks_that_take_turns(name, queries, group, grid, monkeypatch, tmp_path):
    """A sequence may have packed query rows in each turn, in some, or in the first alone."""
    monkeypatch.setattr(combine, "BLOCKS", 16)
    device = Device(monkeypatch, tmp_path, 1)
    b = SampleBatch.make(name, queries, (90, 33, 40, 20), head_size=64, num_kv_heads=2, group=group, dtype=torch.bfloat16)
    call = b.call(max_query_len=max(queries))
    call.out.fill_(float("nan"))
    assert hopper.Plan(call, 1).combine.grid == grid
    device.serve(call)
    check(b, (call.out, call.lse))


def test_who_takes_turns(monkeypatch):
    def grid(multiprocessors, queries=(16, 16), head_size=128, **maps):
        b = SampleBatch.make("int4", queries, (40, 40), head_size=head_size, num_kv_heads=2, group=4, dtype=torch.bfloat16, **maps)
        return hopper.Plan(b.call(max_query_len=max(queries)), multiprocessors).combine.grid

    assert grid(8) == (2, 2, 16) and grid(7) == (2, 2, 8) and grid(2) == (2, 2, 4) and grid(1, (1, 1)) == (2, 2, 1)
