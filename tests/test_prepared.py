"""Prepared calls: what they may keep of the call that they were made with, and what they must read anew; threads that share them."""

import gc
import threading
from dataclasses import replace

import pytest
import torch

from quantkv import CacheSpec, LayerMaps, LinearMap, PagedCache, get_format, implementations, ops, prepare_attend, prepare_write
from quantkv.testing import SampleBatch, check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
READERS = [name for name in implementations.NAMES if name != "prefill"]


def batch(name="int4", queries=(1, 1), keys=(40, 23), **arguments):
    return SampleBatch.make(name, queries, keys, **{"head_size": 64, "dtype": torch.float32, "device": DEVICE, **arguments})


def prepared(b, **arguments):
    return prepare_attend(block_table=b.block_table, seq_lens=b.seq_lens, cu_seqlens_q=b.cu_seqlens_q, **arguments)


# ---- what lies in tensors is read when a call runs


BEFORE_AND_AFTER = {
    "causal": (torch.tensor([True, False]), torch.tensor([False, True])),
    "prefix_ranges": (torch.tensor([[[3, 39]], [[0, 0]]]), torch.tensor([[[0, 0]], [[2, 22]]])),
    "key_start": (torch.tensor([0, 0]), torch.tensor([16, 3])),
    "key_range": (torch.tensor([[0, 40], [4, 23]]), torch.tensor([[9, 17], [0, 5]])),
}


@pytest.mark.parametrize("name", BEFORE_AND_AFTER)
@pytest.mark.parametrize("implementation", READERS)
def test_what_a_tensor_says_is_read_when_a_call_runs(implementation, name):
    before, after = (t.to(DEVICE) for t in BEFORE_AND_AFTER[name])
    # A query that is not the last: what causality and ranges say of it makes a difference. One for each sequence: a decode, which is kept.
    b = batch(queries=(2, 0))
    held, others = before.clone(), {"window": 3} if name == "prefix_ranges" else {}
    call = b.call(**{name: before}, **others)
    if implementations.refusal(implementation, call):
        pytest.skip("this call is another implementation's")
    attend = prepared(b, implementation=implementation, **{name: held}, **others)
    for now in (before, after, before):
        held.copy_(now)
        check(b, attend(b.cache, b.q, return_lse=True), **{name: now}, **others)


@pytest.mark.parametrize("known", [False, True])
def test_dense_attention_reads_lengths_that_the_host_does_not_know(known):
    """Of a batch whose lengths the host knows they are those; else they are the device's, when the call runs."""
    b = batch("int8", (130, 130), (170, 140), dtype=torch.float16)
    lens = b.seq_lens.clone()
    attend = prepared(replace(b, seq_lens=lens), implementation="prefill", **({"lengths": [(130, 170), (130, 140)]} if known else {}))
    check(b, attend(b.cache, b.q, return_lse=True))
    if not known:
        lens.copy_(torch.tensor([140, 130]))
        check(replace(b, seq_lens=lens), attend(b.cache, b.q, return_lse=True))


# ---- what a call keeps, and for which calls


def test_only_calls_alike_share_what_is_prepared(monkeypatch):
    """A launch may keep shapes, strides, dtypes and alignment of every tensor of the call that it was prepared for."""

    def traits(call):
        names = ("q", "out", "lse") if hasattr(call, "q") else ("key", "value")
        sides = [s for seg in call.segments for s in (seg.k, seg.v)] if hasattr(call, "q") else [call.k, call.v]
        rows = [getattr(call, name) for name in names]
        pages = [t for s in sides for t in (s.codes, s.meta)]
        described = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in (*rows, *pages)]
        return described, [s.scale for s in sides], [rows[0].data_ptr() % 16, names[0] == "key" and rows[1].data_ptr() % 16]

    def prepare(call, implementation):
        made_for = traits(call)

        def launch(call):
            assert traits(call) == made_for

        return launch

    monkeypatch.setattr(ops, "prepare", prepare)
    b = batch()
    size = b.cache.num_blocks
    caches = [PagedCache(b.cache.spec, size, DEVICE, k_scale=k, v_scale=v) for k, v in ((1.0, 1.0), (1.0, 2.0), (2.0, 1.0))]
    caches += [PagedCache(b.cache.spec, size + more, DEVICE) for more in (1, 2)]
    wide = torch.zeros(size, 2, 2 * b.cache.spec.page_bytes, dtype=torch.uint8, device=DEVICE)
    caches.append(PagedCache.wrap(wide[..., : b.cache.spec.page_bytes], b.cache.spec))
    attend, write = prepared(b), prepare_write(b.slots[:2])

    def views(rows):
        """The same rows in other places: dense, with gaps, tokens inside of heads, and off an address of 16 bytes."""
        gaps = torch.zeros(*rows.shape[:2], rows.shape[2] + 3, dtype=rows.dtype, device=DEVICE)[..., 1 : 1 + rows.shape[2]]
        turned = torch.zeros(rows.shape[1], rows.shape[0], rows.shape[2], dtype=rows.dtype, device=DEVICE).transpose(0, 1)
        odd = torch.zeros(rows.numel() + 1, dtype=rows.dtype, device=DEVICE)[1:].view(rows.shape)
        return rows, gaps, turned, odd, rows.half()

    key, value = b.key[:2], b.value[:2]
    for _ in range(2):
        for cache in caches:
            for q in views(b.q):
                for out in (None, *(o for o in views(torch.zeros_like(b.q)) if o.dtype == q.dtype)):
                    for return_lse in (False, True):
                        attend(cache, q, out=out, return_lse=return_lse)
            for k in views(key):
                write(cache, k, value.to(k.dtype))
            for v in views(value):
                write(cache, key.to(v.dtype), v)


def test_the_rows_of_a_step_are_written_before_they_are_read():
    """`new` is the write of the tokens of q; what else it may be is refused, in each call."""
    b = batch()
    attend, expected = prepared(b), prepared(b)(b.cache, b.q)
    empty = PagedCache(b.cache.spec, b.cache.num_blocks, DEVICE)
    write = prepare_write(b.slots)
    for wrong in ((b.key, write, b.value), (write, b.key), write, [write, b.key, b.value]):
        with pytest.raises(ValueError, match=r"new=.*: a tuple \(write, key, value\) is needed"):
            attend(empty, b.q, new=wrong)
    assert not empty.buffer.any()
    for _ in range(2):
        empty.buffer.zero_()
        torch.testing.assert_close(attend(empty, b.q, new=(write, b.key, b.value)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("starts_next", [False, True])
def test_what_reads_rows_waits_for_them_only_behind_their_own_write(starts_next, monkeypatch):
    """A write that lets what follows begin is followed by the launch that waits; any other by the plain one."""
    launched = []

    def prepare(call, implementation):
        def launch(call):
            launched.append("write" if hasattr(call, "key") else "attend")

        launch.starts_next, launch.after_write = starts_next, lambda call: launched.append("waits")
        return launch

    monkeypatch.setattr(ops, "prepare", prepare)
    b = batch()
    prepared(b)(b.cache, b.q, new=(prepare_write(b.slots), b.key, b.value))
    assert launched == ["write", "waits" if starts_next else "attend"]


def test_a_known_call_checks_what_it_is_given():
    b = batch()
    attend, write = prepared(b), prepare_write(b.slots)
    attend(b.cache, b.q, out=torch.empty_like(b.q)), write(b.cache, b.key, b.value)
    for out in (torch.empty(3, *b.q.shape[1:], device=DEVICE), torch.empty_like(b.q)[:, :1]):
        with pytest.raises(ValueError, match=r"out.shape=\("):
            attend(b.cache, b.q, out=out)
    for key, value, name in ((b.key, "rows", "value"), (None, b.value, "key")):
        with pytest.raises(ValueError, match=f"{name}=(str|NoneType): a tensor is needed"):
            write(b.cache, key, value)


def test_caches_of_one_kind_differ_in_numbers_and_addresses_alone():
    spec = get_format("int4").cache_spec(2, 64)
    turned = LinearMap(torch.eye(64)[None], torch.eye(64)[None])
    plain = PagedCache(spec, 3)
    assert plain.kind is PagedCache(spec, 3).kind
    others = [
        PagedCache(spec, 4),
        PagedCache(spec, 3, k_scale=2.0),
        PagedCache(spec, 3, v_scale=2.0),
        PagedCache(get_format("int4").cache_spec(2, 64, block_size=32), 3),
        PagedCache(get_format("int8").cache_spec(2, 64), 3),
        PagedCache(spec, 3, maps=LayerMaps(k=turned)),
        PagedCache(spec, 3, maps=LayerMaps(v=turned)),
        PagedCache.wrap(torch.zeros(3, 2, 2 * spec.page_bytes, dtype=torch.uint8)[..., : spec.page_bytes], spec),
    ]
    assert isinstance(spec, CacheSpec) and len({id(c.kind) for c in (plain, *others)}) == 1 + len(others)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_a_map_is_not_taken_for_one_that_is_gone(implementation):
    """Python gives the id of an object that is gone to another one."""
    if implementation == "cpu":
        pytest.importorskip("numba")

    def layer(map_):
        return batch("int8", device="cpu", maps=LayerMaps(map_, map_))

    def turn(seed):
        turned = torch.linalg.qr(torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(seed)))[0].contiguous()
        return LinearMap(turned, turned.mT.contiguous())

    b, maps = layer(turn(0)), [turn(1)]
    attend = prepared(b, implementation=implementation)
    attend(b.cache, b.q, return_lse=True)  # what the first call is of is kept, anyway
    attend(layer(maps[0]).cache, b.q, return_lse=True)
    gone = id(maps.pop())
    gc.collect()
    others = [object.__new__(LinearMap)]
    while id(others[-1]) != gone and len(others) < 5000:
        others.append(object.__new__(LinearMap))
    vars(others[-1]).update(vars(turn(2)))
    other = layer(others[-1])
    check(other, attend(other.cache, other.q, return_lse=True))


# ---- threads


def test_threads_may_share_a_prepared_call():
    """Each has scratch memory of its own: rows that are large enough for torch to let another thread run in between."""
    b, layers = batch("int4", keys=(600, 300)), []
    for scale in (1.0, -1.0, 3.0):
        cache = PagedCache(b.cache.spec, b.cache.num_blocks, DEVICE)
        cache.write(scale * b.key, scale * b.value, b.slots)
        layers.append(replace(b, cache=cache))
    expected = [layer.attend(implementation="reference")[0] for layer in layers]
    attend = prepared(b, implementation="reference")
    start, wrong, errors = threading.Barrier(3), [0] * 3, []

    def work(i):
        try:
            start.wait()
            for _ in range(10):
                wrong[i] += not torch.equal(attend(layers[i].cache, layers[i].q), expected[i])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and wrong == [0, 0, 0]


def test_each_thread_has_what_it_prepared(monkeypatch):
    """Scratch is of the launch: a launch is used by the thread that made it, and by no other."""
    owners = {}

    def prepare(call, implementation):
        made_in = threading.get_ident()

        def launch(call):
            assert threading.get_ident() == made_in
            owners[made_in] = owners.get(made_in, 0) + 1

        return launch

    monkeypatch.setattr(ops, "prepare", prepare)
    b = batch()
    attend, write, errors = prepared(b), prepare_write(b.slots[:2]), []

    def work():
        try:
            for _ in range(2):
                write(b.cache, b.key[:2], b.value[:2])
                attend(b.cache, b.q)
        except AssertionError as error:
            errors.append(error)

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors and list(owners.values()) == [4, 4]
