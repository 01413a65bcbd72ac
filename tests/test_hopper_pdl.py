"""Attention that is launched right behind the write of its own tokens: on Hopper only who reads these waits for it."""

from types import SimpleNamespace

import pytest
import torch

import hopper_ways
from hopper_on_cpu import AVAILABLE, Device
from quantkv import PagedCache, get_format, ops, prepare_attend, prepare_write
from quantkv.implementations.hopper import attend as hopper
from quantkv.implementations.hopper.decode import unsplit as whole
from quantkv.implementations.hopper.decode import wgmma
from quantkv.testing import SampleBatch, check

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper_only = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
emulated = pytest.mark.skipif(not AVAILABLE, reason="needs g++")
CASES = {  # the first new token begins a tile, ends one, stands within one; several, in two tiles; none
    "one": ("int4", (1, 1, 1, 1), (257, 16, 40, 1), {}, {}),
    "several": ("int8", (2, 4, 1, 3), (33, 130, 48, 3), {"block_size": 64}, {}),
    "a window": ("tq3", (1, 3), (300, 95), {}, {"window": 50}),
    "small pages": ("int4", (2, 0, 1), (41, 20, 9), {"block_size": 8, "head_size": 64}, {}),
    "a range": ("bf16", (1, 2), (70, 90), {"num_kv_heads": 1}, {"key_range": torch.tensor([[5, 70], [33, 90]], dtype=torch.int32)}),
}

# Copies of 16 bytes by who has not waited: tiles before those with a new token, kv heads, copies of a tile; less rows outside of the range.
EARLY = {"one": 18 * 2 * 160, "several": 10 * 2 * 288, "a window": 6 * 2 * 128, "small pages": 3 * 2 * 96, "a range": 7 * 512 - 6 * 32}


def new_rows(b):
    """Addresses of what is stored of the queries' own tokens."""
    found = []
    for s, (count, length) in enumerate(zip(b.cu_seqlens_q.diff().tolist(), b.seq_lens.tolist())):
        for token in range(length - count, length):
            page, row = b.block_table[s, token // b.cache.spec.block_size], token % b.cache.spec.block_size
            for t in (b.cache.k.codes, b.cache.v.codes, b.cache.k.meta, b.cache.v.meta):
                found += [] if t is None else [t[page, row, head].data_ptr() for head in range(t.shape[2])]
    return found


@emulated
@pytest.mark.parametrize("unsplit, on_device", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("case", CASES)
def test_new_rows_are_waited_for(case, unsplit, on_device, monkeypatch, tmp_path):
    """And no warp waits before it comes to them. on_device: that the call is unsplit is found there."""
    name, queries, lens, shape, options = CASES[case]
    hopper_ways.split(monkeypatch, not unsplit)
    for name_of_limit, tiles in (("MOST_TILES_RAGGED", 0 if on_device else 100), ("SPARE_TILES", 100), ("SPARE_TILES_OF_FEW", 100)):
        monkeypatch.setattr(whole, name_of_limit, tiles)
    monkeypatch.setattr(whole, "MOST_OF_SHARE", 100)
    device = Device(monkeypatch, tmp_path, 1 if unsplit else 4)  # long runs, and short ones
    b = SampleBatch.make(name, queries, lens, **{"head_size": 128, "num_kv_heads": 2, "group": 4, "dtype": torch.bfloat16, **shape})
    device.unwritten = new_rows(b)
    call = b.call(max_query_len=max(queries), max_seq_len=max(lens), **options)
    behind = hopper.Prepared(call, after_write=True)
    assert (behind.plan.main.unsplit is not None) == unsplit and behind.plan.main.config.pdl_after_write
    assert behind.plan.main.config.either == (on_device and case != "a window")  # which bounds the tiles of each
    call.out.fill_(float("nan"))
    behind(call)
    assert device.early_copies() == EARLY[case]
    check(b, (call.out, call.lse), **options)


@emulated
def test_who_has_no_read_behind_a_write(monkeypatch, tmp_path):
    Device(monkeypatch, tmp_path, 2)
    monkeypatch.setattr(hopper, "_kernels", lambda *_: [SimpleNamespace(threads=384)] * 3)
    b = SampleBatch.make("int4", (5, 4), (70, 90), head_size=128, group=4, dtype=torch.bfloat16)
    call = b.call(max_query_len=5)
    assert hopper.prepare(call).plan.main.config.worker_warps == wgmma.WORKER_WARPS and hopper.prepare(call).after_write is None
    few = SampleBatch.make("int4", (1, 1), (70, 90), head_size=128, group=4, dtype=torch.bfloat16)
    assert hopper.prepare(few.call(max_query_len=1)).after_write is not None
    assert hopper.prepare(few.call(max_query_len=1, batch_invariant=True)).after_write is None


class Recorded:
    def __init__(self, name, log, starts_next=False, after_write=None):
        self.name, self.log, self.starts_next, self.after_write = name, log, starts_next, after_write

    def __call__(self, call):
        self.log.append(self.name)


@pytest.mark.parametrize("starts_next, has_behind, last", [(True, True, "behind"), (False, True, "attend"), (True, False, "attend")])
def test_a_joint_call_launches_the_write_first(starts_next, has_behind, last, monkeypatch):
    log = []
    behind = Recorded("behind", log) if has_behind else None
    launches = {True: Recorded("write", log, starts_next), False: Recorded("attend", log, after_write=behind)}
    monkeypatch.setattr(ops, "prepare", lambda call, implementation: launches[hasattr(call, "slot_mapping")])
    b = SampleBatch.make("int4", (1, 1), (20, 30))
    attend = prepare_attend(block_table=b.block_table, seq_lens=b.seq_lens)
    write = prepare_write(b.slots[:2])
    for _ in range(2):
        attend(b.cache, b.q, new=(write, b.key[:2], b.value[:2]))
    attend(b.cache, b.q)
    assert log == ["write", last] * 2 + ["attend"]


def test_a_joint_call_is_a_write_and_a_read():
    b = SampleBatch.make("int4", (1, 2), (20, 40))
    key, value = torch.randn(2, 3, 2, 64, generator=torch.Generator().manual_seed(0)).half()
    slots = torch.stack([b.block_table[s, t // 16].long() * 16 + t % 16 for s, t in ((0, 19), (1, 38), (1, 39))])
    other = PagedCache(get_format("int4").cache_spec(2, 64), b.cache.num_blocks)
    other.buffer.copy_(b.cache.buffer)
    write = prepare_write(slots, implementation="reference")
    attend = prepare_attend(block_table=b.block_table, seq_lens=b.seq_lens, cu_seqlens_q=b.cu_seqlens_q, implementation="reference")
    joint = attend(b.cache, b.q, new=(write, key, value))
    write(other, key, value)
    assert torch.equal(b.cache.buffer, other.buffer) and torch.equal(attend(other, b.q), joint)


def test_what_is_refused_writes_nothing():
    b = SampleBatch.make("int4", (1, 1), (20, 30))
    before = b.cache.buffer.clone()
    attend = prepare_attend(block_table=b.block_table, seq_lens=b.seq_lens, implementation="reference")
    new = prepare_write(b.slots[:2]), -b.key[:2], b.value[:2]
    for _ in range(2):
        with pytest.raises(ValueError, match="out"):
            attend(b.cache, b.q, out=b.q.new_empty(3, 1, 1), new=new)
        assert torch.equal(b.cache.buffer, before)
        attend(b.cache, b.q)
    for wrong in (new[0], new[:2], (attend, *new[1:])):
        with pytest.raises(ValueError, match="new"):
            attend(b.cache, b.q, new=wrong)
    assert torch.equal(b.cache.buffer, before)


@hopper_only
@pytest.mark.parametrize("lens", [(2049,), (16, 700, 33), (4096,) * 4], ids=str)
def test_steps_on_a_gpu(lens):
    """Layer after layer, captured too: each reads what it has just written, and writes over nothing that another reads."""
    made = [SampleBatch.make("int4", (1,) * len(lens), lens, head_size=128, group=4, dtype=torch.bfloat16, device="cuda") for _ in range(6)]
    last = [n - 1 for n in lens]
    slots = torch.stack([made[0].block_table[s, n // 16].long() * 16 + n % 16 for s, n in enumerate(last)])
    write = prepare_write(slots)
    attend = prepare_attend(block_table=made[0].block_table, seq_lens=made[0].seq_lens, max_query_len=1, max_seq_len=max(lens))
    rows = [torch.randn(2, len(lens), 2, 128, device="cuda").bfloat16() for _ in made]
    outs = [torch.empty_like(b.q) for b in made]

    def step():
        for b, (key, value), out in zip(made, rows, outs):
            attend(b.cache, b.q, out=out, new=(write, key, value))

    def expected():
        return [attend(b.cache, b.q) for b in made]  # of what the step wrote

    step()
    assert all(torch.equal(a, b) for a, b in zip(outs, expected()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for i in range(20):
        for pair in rows:
            pair.normal_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outs, expected())), i
