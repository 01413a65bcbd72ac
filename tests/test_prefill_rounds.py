"""How the prefill path cuts a batch into calls of a kernel, and what these give: options, sequences of all lengths, bounds, the order of
events."""

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import prefill_backends
import quantkv
from quantkv import testing
from quantkv.calls import AttendCall
from quantkv.calls import Batch as CallBatch
from quantkv.formats import get_format
from quantkv.implementations import refusal
from quantkv.implementations.prefill import attend as prefill
from quantkv.implementations.prefill import backends, cudnn_graph, flash3

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="backends are played on a CPU; tests/test_prefill.py runs them on a GPU")
TRITON = [False] + [True] * (os.environ.get("TRITON_INTERPRET") == "1")
HEADS, HEAD_SIZE, GROUP = 2, 16, 3
SINKS = torch.linspace(-2, 3, HEADS * GROUP)
# No context, a chunk, one query of many keys, nothing at all, a chunk that is its own context's length, two of one length.
QUERIES, KEYS = (40, 33, 1, 0, 64, 32, 32), (40, 100, 77, 9, 128, 32, 32)
OPTIONS = {
    "plain": {},
    "window": {"window": 37},
    "window of one": {"window": 1},
    "window beyond all": {"window": 4096},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": SINKS},
    "chunks": {"window": 40, "chunk_lookback": 0},
    "chunks and one before": {"window": 60, "chunk_lookback": 1},
    "all": {"window": 20, "softcap": 1.5, "sinks": SINKS},
}
TAKES = {"flash3 operator": OPTIONS, "flash3 package": OPTIONS, "hopper": OPTIONS, "math": OPTIONS}
TAKES["flash"] = TAKES["cudnn graph"] = [name for name, given in OPTIONS.items() if "softcap" not in given]
TAKES["cudnn"] = ["plain", "window beyond all", "sinks", "chunks", "chunks and one before"]
KIND = {
    "flash3 operator": "operator",
    "flash3 package": "package",
    "hopper": "hopper",
    "flash": "torch",
    "cudnn": "torch",
    "cudnn graph": "graph",
    "math": "none",
}
NAME = {"flash3 operator": "flash3", "flash3 package": "flash3"}
ROW = HEADS * 2 * HEAD_SIZE * 4  # bytes of a key and its value


@pytest.fixture(autouse=True)
def fine_cuts(monkeypatch):
    monkeypatch.setattr(backends, "PLANNED", 32)
    monkeypatch.setattr(prefill, "MIN_QUERIES", 1)


def make(format_name="int8", queries=QUERIES, keys=KEYS, **how):
    how = {"head_size": HEAD_SIZE, "num_kv_heads": HEADS, "group": GROUP, "dtype": torch.float32, **how}
    return testing.SampleBatch.make(format_name, queries, keys, **how)


@pytest.mark.parametrize("rows,query_bytes,overlap", [(1 << 16, 1 << 20, False), (96, 1 << 20, True), (64, 1, False), (32, 1, True)])
@pytest.mark.parametrize("backend,name", [(backend, name) for backend, names in TAKES.items() for name in names])
def test_options(backend, name, rows, query_bytes, overlap, monkeypatch):
    """Every option over sequences of all lengths, whole, in slices and in chunks: output and log-sum-exp against float64."""
    b, options = make(), OPTIONS[name]
    call = b.call(**options)
    call.out.fill_(torch.nan)
    with prefill_backends.installed(monkeypatch, KIND[backend]) as calls:
        assert refusal("prefill", call) is None
        how = {"scratch_bytes": rows * ROW * (1 + overlap), "query_bytes": query_bytes, "overlap": overlap}
        prefill.serve(call, backend=NAME.get(backend, backend), **how)
        assert {kind for kind, *_ in calls} == {NAME.get(backend, backend)} - {"math"}
    testing.check(b, (call.out, call.lse), **options)


@pytest.mark.parametrize("rows,overlap", [(1 << 16, False), (64, True)])
@pytest.mark.parametrize("backend,name", [(backend, name) for backend in TAKES for name in ("plain", "all") if name in TAKES[backend]])
@pytest.mark.parametrize("fresh", [False, True])
def test_own_rows(fresh, backend, name, rows, overlap, monkeypatch):
    """Whole, in slices, and in planned lengths: rows as given, of a fused projection, beside those of pages or alone. Pages hold no
    number where own rows stand."""
    b, options = make(keys=QUERIES) if fresh else make(), OPTIONS[name]
    counts, ends = b.cu_seqlens_q.diff(), b.seq_lens.cumsum(0)
    index = torch.cat([torch.arange(end - n, end) for n, end in zip(counts.tolist(), ends.tolist())])
    fused = torch.zeros(len(index), HEADS, 3 * HEAD_SIZE)
    key, value = fused[..., HEAD_SIZE : 2 * HEAD_SIZE], fused[..., 2 * HEAD_SIZE :]
    key.copy_(b.key[index]), value.copy_(b.value[index])
    expected = b.oracle(own=(key, value), **options)
    replaced = b.slots[index[counts.repeat_interleave(counts) > 1]]
    for side in (b.cache.k, b.cache.v):
        side.meta[replaced // 16, replaced % 16] = torch.nan
    call = b.call(own=(key, value), lengths=tuple(zip(counts.tolist(), b.seq_lens.tolist())), **options)
    call.out.fill_(torch.nan)
    with prefill_backends.installed(monkeypatch, KIND[backend]):
        plan = prefill.plan(call, backend=NAME.get(backend, backend), scratch_bytes=rows * ROW * (1 + overlap), overlap=overlap)
        for triton in (False, True) if backend in ("hopper", "cudnn", "cudnn graph") and TRITON[-1] else (False,):
            prefill.follow(call, plan, triton)
    assert testing.relative_error(call.out, expected[0]) < 1e-5
    finite = expected[1].isfinite()
    assert torch.equal(finite, call.lse.isfinite()) and (call.lse - expected[1])[finite].abs().max() < 1e-4


@pytest.mark.parametrize("rows", [1 << 16, 64])
@pytest.mark.parametrize("asked", ["out", "out and lse", "float32"])
def test_sinks_by_the_kernel(asked, rows, monkeypatch):
    """FlashAttention-3 takes them itself where no log-sum-exp is asked for, no results are combined and nothing is rounded for it."""
    sinks = SINKS if asked == "float32" else SINKS.bfloat16()
    b, takes, given = make(), [], []
    call = b.call(sinks=sinks, window=70)
    if asked != "out and lse":
        call = call.with_tensors(call.q, call.out, None, call.segments)
    attend = backends.attend
    monkeypatch.setattr(backends, "attend", lambda *args: given.append((len(args[5].reads), args[9])) or attend(*args))
    with prefill_backends.installed(monkeypatch, "operator"):
        prefill.serve(call, backend="flash3", scratch_bytes=rows * ROW, overlap=False)
        takes = [own is not None for _, own in given]
        monkeypatch.setattr(backends, "takes_sinks", lambda *given: False)
        again = call.with_tensors(call.q, torch.empty_like(call.out), call.lse, call.segments)
        prefill.serve(again, backend="flash3", scratch_bytes=rows * ROW, overlap=False)
    assert (
        any(takes) == (asked == "out") and (rows == 64 or all(takes) == any(takes)) and all(own is None for _, own in given[len(takes) :])
    )
    expected = b.oracle(sinks=sinks, window=70)[0]
    assert max(testing.relative_error(c.out, expected) for c in (call, again)) < 1e-5


@pytest.mark.parametrize("rows", [1 << 16, 64])
def test_sinks_by_our_kernel(rows, monkeypatch):
    """It takes them where no results are combined, whatever they are, and whether the log-sum-exp is asked for or not."""
    b, given, attend = make(), [], backends.attend
    call = b.call(sinks=SINKS, window=70)
    monkeypatch.setattr(backends, "attend", lambda *args: given.append(args[9]) or attend(*args))
    with prefill_backends.installed(monkeypatch, "hopper"):
        prefill.serve(call, backend="hopper", scratch_bytes=rows * ROW, overlap=False)
    assert any(own is not None for own in given) and all(own is not None for own in given) == (rows > 64)
    testing.check(b, (call.out, call.lse), sinks=SINKS, window=70)


@pytest.mark.parametrize("triton", TRITON)
@pytest.mark.parametrize("name,back,rows", [("int4", 0, 64), ("int4", 1000, 1 << 16), ("tq3", 0, 1 << 16), ("fp8", 0, 64)])
@pytest.mark.parametrize("token_major", [False, True])
def test_steps_of_several_sequences(name, back, rows, token_major, triton, monkeypatch):
    """Pages of many sequences in one launch; combined, with sinks, and mapped back or not; either order of what is written out."""
    monkeypatch.setattr(prefill, "MAPPED_BACK", back)
    monkeypatch.setitem(backends.BACKENDS, "math", replace(backends.BACKENDS["math"], token_major=token_major))
    b, options = make(name, head_size=64), {"sinks": SINKS.to(torch.bfloat16), "window": 70}
    call = b.call(**options)
    prefill.serve(call, triton=triton, scratch_bytes=rows * 4 * ROW)
    testing.check(b, (call.out, call.lse), **options)


@pytest.mark.parametrize("backend", ["flash3 operator", "hopper", "flash", "cudnn", "cudnn graph", "math"])
def test_rows_of_any_strides(backend, monkeypatch):
    """Queries as a slice of a fused projection, and an output that is a slice too."""
    b, (hq, size) = make(queries=(40, 33), keys=(40, 100)), (HEADS * GROUP, HEAD_SIZE)
    call = b.call()
    fused, wide = torch.zeros(73, hq + 4, size), torch.full((73, hq + 1, size + 8), torch.nan)
    fused[:, :hq] = b.q
    call = call.with_tensors(fused[:, :hq], wide[:, :hq, :size], call.lse, call.segments)
    with prefill_backends.installed(monkeypatch, KIND[backend]):
        prefill.serve(call, backend=NAME.get(backend, backend))
    testing.check(b, (call.out, call.lse))
    assert wide[:, hq:].isnan().all() and wide[..., size:].isnan().all()
    call = call.with_tensors(b.q.permute(2, 1, 0).contiguous().permute(2, 1, 0), call.out, call.lse, call.segments)
    with prefill_backends.installed(monkeypatch, KIND[backend]):
        prefill.serve(call, backend=NAME.get(backend, backend))
    testing.check(b, (call.out, call.lse))


def test_a_chunked_prompt_is_the_whole():
    """A prompt in chunks, each over what was cached before it."""
    whole = make(queries=(200,), keys=(200,))
    options = {"window": 90, "sinks": SINKS, "softcap": 3.0}
    expected, sums = whole.oracle(**options)
    for first, stop in ((0, 64), (64, 65), (65, 190), (190, 200)):
        segment = whole.cache.segment(whole.block_table)
        lens = torch.tensor([0, stop - first]).int(), torch.tensor([stop]).int()
        lse = torch.empty(stop - first, HEADS * GROUP)
        call = AttendCall(whole.q[first:stop], (segment,), CallBatch(*lens), None, quantkv.options.AttentionOptions(**options), None, lse)
        prefill.serve(call, scratch_bytes=64 * ROW)
        assert testing.relative_error(call.out, expected[first:stop]) < 1e-5
        assert (call.lse - sums[first:stop]).abs().max() < 1e-4


@pytest.mark.parametrize("backend", ["flash3 operator", "hopper", "flash", "cudnn", "cudnn graph", "math"])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_not_finite_stays_with_its_sequence(backend, overlap, monkeypatch):
    """A tile reads on into the next sequence's rows, with probabilities of zero: there must be nothing there."""
    b = make("none", queries=(40, 33, 64), keys=(40, 100, 64))
    call, expected = b.call(), b.oracle()[0]
    with prefill_backends.installed(monkeypatch, KIND[backend]):
        for slot in (b.slots[41], b.slots[150]):  # of the second sequence, and of the third
            b.cache.v.codes[slot // 16, slot % 16].view(torch.float32)[:] = torch.inf
        prefill.serve(call, backend=NAME.get(backend, backend), overlap=overlap)
    assert testing.relative_error(call.out[:40], expected[:40]) < 1e-5
    assert not call.out[40:].isfinite().all()


def test_sequences_share_calls(monkeypatch):
    """32 sequences of some lengths are one call; of one length, by cuDNN, too."""
    lengths = [(33 + s % 5, 33 + s % 5) for s in range(32)]
    for backend, sizes in (
        ("flash3 operator", lengths),
        ("flash", lengths),
        ("cudnn graph", lengths),
        ("cudnn", [(64, 64)] * 5),
        ("cudnn", [(64, 128)] * 5),
    ):
        b = make(queries=[n for n, _ in sizes], keys=[n for _, n in sizes])
        call = b.call()
        with prefill_backends.installed(monkeypatch, KIND[backend]) as calls:
            prefill.serve(call, backend=NAME.get(backend, backend), scratch_bytes=1 << 26)
            assert len(calls) == (2 if backend == "cudnn" and sizes[0][1] > 64 else 1)
        testing.check(b, (call.out, call.lse))
        with prefill_backends.installed(monkeypatch, KIND[backend]) as calls:
            prefill.serve(call, backend=NAME.get(backend, backend), scratch_bytes=1 << 26, together=False)
            assert len(calls) >= len(sizes)


def test_cudnn_gets_planned_lengths(monkeypatch):
    """Whatever the lengths: what the context has over joins the queries' own keys."""
    b = make(queries=(33, 70, 32), keys=(100, 75, 96))
    call = b.call()
    with prefill_backends.installed(monkeypatch, "torch") as calls:
        prefill.serve(call, backend="cudnn")
        assert {kind for kind, *_ in calls} == {"cudnn"}
        assert all(q[2] % 32 == k[2] % 32 == 0 for _, q, k, _ in calls)
    testing.check(b, (call.out, call.lse))


@pytest.mark.parametrize("backend", ["math", "flash3 operator", "cudnn", "cudnn graph"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rows", [96, 400])
def test_memory_is_bounded(backend, overlap, rows, monkeypatch):
    """What a call takes beside its tensors does not depend on the batch: keys and values, and what queries need, counted as it lives."""
    scratch_bytes, query_bytes, alive, most = rows * ROW * 2, 160 * 2016, {}, {"scratch": 0, "queries": 0}

    def count(kind, t):
        storage = t.untyped_storage()
        alive[storage._cdata, kind] = storage
        held = {key: s for key, s in alive.items() if torch._C._storage_Use_Count(key[0]) > 1}  # somebody beside this list has it
        alive.clear()
        alive.update(held)
        most[kind] = max(most[kind], sum(s.nbytes() for (_, of), s in held.items() if of == kind))

    attend = backends.attend

    def counted(backend, q, k, v, *rest):
        for t in (k, v):
            count("scratch", t)
        result = attend(backend, q, k, v, *rest)
        for t in (q, *result):
            if t.untyped_storage().data_ptr() not in (call.q.data_ptr(), call.out.data_ptr()):
                count("queries", t)
        return result

    combine = prefill.TorchSteps.combine

    def counted_combine(self, a, b):
        combined = combine(self, a, b)
        for t in combined:
            count("queries", t.float() if t.dtype != torch.float32 else t)
        return combined

    monkeypatch.setattr(prefill.TorchSteps, "combine", counted_combine)
    monkeypatch.setattr(backends, "attend", counted)
    for queries, keys in (((700,), (900,)), ((33,) * 20, (60,) * 20), ((1,) * 40, (300,) * 40)):
        b = make("int4", queries=queries, keys=keys)
        call = b.call(sinks=SINKS)
        with prefill_backends.installed(monkeypatch, KIND[backend]):
            prefill.serve(call, backend=NAME.get(backend, backend), scratch_bytes=scratch_bytes, query_bytes=query_bytes, overlap=overlap)
        testing.check(b, (call.out, call.lse), sinks=SINKS)
    assert 0 < most["scratch"] <= scratch_bytes and 0 < most["queries"] <= query_bytes


@pytest.mark.parametrize("queries,keys,lanes,rounds", [(8192, 139264, 1, 3), (2048, 139264, 2, 5), (8192, 65536, 1, 1)])
def test_two_streams_write_no_more_rows_than_one(queries, keys, lanes, rounds, monkeypatch):
    """With half of the memory, 8,192 queries were cut in two, and each half read all keys; 2,048 are not. (queries, keys) of Llama-3-8B."""
    monkeypatch.setattr(prefill, "_has_streams", lambda q: True)
    pages = quantkv.PagedCache(get_format("int8").cache_spec(8, 128), 1)
    q = torch.empty(queries, 32, 128, dtype=torch.bfloat16)
    batch = CallBatch(*(torch.tensor(n, dtype=torch.int32) for n in ([0, queries], [keys])), lengths=((queries, keys),))
    call = AttendCall(q, (pages.segment(torch.zeros(1, keys // 16, dtype=torch.int32)),), batch)
    plan = prefill.plan(call, backend="flash3")
    assert plan.lanes == lanes and [len(group.rounds) for group in plan.groups] == [rounds]
    assert prefill.plan(call, backend="flash3", overlap=True).lanes == 1 + (rounds > 1)
    assert prefill.plan(call, backend="flash3", overlap=False).lanes == 1


def test_a_graph_that_is_captured_gets_one_stream_and_no_copies(monkeypatch):
    """Each sequence has its own calls then; numbers that are on the device already, from a call that was prepared before, are used."""
    b = make()
    call, told = b.call(), b.call(lengths=tuple(zip(QUERIES, KEYS)))
    with prefill_backends.installed(monkeypatch, "operator") as calls:
        prepared = prefill.prepare(told)
        prepared(told)
        told.out.zero_()
        calls.clear()
        monkeypatch.setattr(prefill, "_capturing", lambda q: True)
        monkeypatch.setattr(torch, "tensor", lambda *args, **kwargs: pytest.fail("a copy to the device"))
        prefill.serve(call, backend="flash3", overlap=True, scratch_bytes=96 * ROW)
        before = len(calls)
        prefill.serve(call, backend="flash3")
        assert len(calls) - before == len(QUERIES) - 1, "a call for each that has queries"
        assert prefill.plan(call, backend="flash3", overlap=True, scratch_bytes=96 * ROW).lanes == 1
        assert len(calls) > len(QUERIES) - 1
        prepared(told)
        with pytest.raises(ValueError, match="lengths=None: a captured graph cannot read them"):
            prefill.prepare(call)(call)
    monkeypatch.undo()
    testing.check(b, (told.out, told.lse))


def test_layers_share_what_is_prepared(monkeypatch):
    """The lengths are read once; numbers on the device lie at addresses that are multiples of 16."""
    b = make()
    call = b.call(lengths=tuple(zip(QUERIES, KEYS)))
    with prefill_backends.installed(monkeypatch, "operator"):
        prepared = prefill.plan(call, backend="flash3")
        assert all(t.data_ptr() % 16 == 0 for tensors in prepared.placed.values() for t in tensors) and prepared.placed
        monkeypatch.setattr(CallBatch, "host_lengths", lambda self: pytest.fail("lengths are read again"))
        for sign in (1, -1):
            layer = call.with_tensors(sign * call.q, torch.full_like(call.out, torch.nan), torch.empty_like(call.lse), call.segments)
            prefill.follow(layer, prepared)
            want = b.oracle() if sign > 0 else testing.compute(layer, torch.float64)
            assert testing.relative_error(layer.out, want[0]) < 1e-5


def test_what_is_refused(monkeypatch):
    """Each by name, before anything runs."""
    monkeypatch.setattr(prefill, "MIN_QUERIES", 32)
    b = make(queries=(40, 32), keys=(40, 64))
    lengths = ((40, 40), (32, 64))
    why = lambda **given: refusal("prefill", b.call(**given))
    assert why() is None and why(lengths=lengths, window=9, softcap=1.0, sinks=SINKS) is None
    assert "alibi_slopes: not supported" in why(alibi_slopes=SINKS) and "causal: not supported" in why(causal=False)
    assert "prefix_ranges" in why(prefix_ranges=torch.zeros(2, 1, 2, dtype=torch.int32)) and "output_scale" in why(output_scale=1.0)
    assert "batch_invariant" in why(batch_invariant=True) and "qq_bias" in why(qq_bias=torch.zeros(40, 1))
    assert "chunks of 20 tokens, fewer than 32" in why(window=20, chunk_lookback=0) and why(window=4000, chunk_lookback=1) is None
    assert "key" in why(key_range=torch.tensor([[0, 40], [0, 64]])) and "key" in why(key_start=torch.tensor([0, 0]))
    monkeypatch.setattr(backends, "choose", lambda *args, window, softcap, **needs: None if softcap or window else "math")
    assert why(window=4000, lengths=lengths) is None, "a window that all keys fit in is none"
    assert why(window=9).endswith("on cpu with window") and why(window=9, softcap=1.0).endswith("with window, softcap")
    few = make(queries=(40, 0, 31), keys=(40, 5, 64))
    assert "fewer than 32" in refusal("prefill", few.call(lengths=((40, 40), (0, 5), (31, 64))))
    few = make(queries=(40, 0, 32), keys=(40, 5, 64))
    assert refusal("prefill", few.call(lengths=((40, 40), (0, 5), (32, 64)))) is None


def test_who_is_chosen(monkeypatch):
    """By the GPU, the rows, and what the call has: a kernel without it is passed over."""
    gpu, half = torch.device("cuda"), torch.float16
    capability = lambda *found: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    needs = ({}, {"window": True}, {"softcap": True}, {"window": True, "softcap": True})
    chosen = lambda *sizes, dtype=half: [backends.choose(gpu, dtype, *sizes, **need) for need in needs]
    for kind in ("operator", "package"):
        with prefill_backends.installed(monkeypatch, kind):
            capability(9, 0)
            assert chosen(128, 128) == chosen(256, 256) == ["flash3"] * 4
            assert chosen(128, 64) == ["cudnn", None, None, None] and chosen(128, 128, dtype=torch.float32) == [None] * 4
            capability(8, 0)
            assert chosen(128, 128) == ["cudnn", "flash", None, None] and chosen(256, 256) == ["flash", "flash", None, None]
    with prefill_backends.installed(monkeypatch, "graph"):
        capability(9, 0)
        assert chosen(128, 128) == chosen(256, 192) == ["cudnn graph", "cudnn graph", None, None]
        assert backends.choose(gpu, half, 128, 128, short=True) == "cudnn graph"
        assert backends.choose(gpu, half, 128, 128, alike=True) == "cudnn"  # torch's calls are faster where all lengths are the same
        assert (
            backends.choose(gpu, half, 128, 128, alike=True, window=True)
            == backends.choose(gpu, half, 256, 256, alike=True)
            == "cudnn graph"
        )
        capability(8, 0)
        assert chosen(128, 128)[0] == "cudnn graph" and chosen(256, 256)[0] == "flash"
        monkeypatch.setattr(backends.cudnn_graph, "package", lambda: None)
        assert chosen(128, 128)[0] == "cudnn"
    with prefill_backends.installed(monkeypatch, "none"):
        capability(9, 0)
        assert chosen(128, 128) == ["cudnn", "flash", None, None]
        assert backends.choose(gpu, half, 128, 128, short=True) == "flash" and backends.choose(gpu, half, 128, 64, short=True) == "cudnn"
        capability(7, 5)
        assert chosen(128, 128) == [None] * 4
    with prefill_backends.installed(monkeypatch, "hopper"):
        capability(9, 0)
        assert chosen(128, 128) == chosen(192, 128) == ["hopper"] * 4 and chosen(72, 72) == ["cudnn", "flash", None, None]
        assert backends.choose(gpu, half, 128, 128, alike=True) == backends.choose(gpu, half, 128, 128, short=True) == "hopper"
        assert backends.choose(gpu, half, 128, 128, scale=-1.0) == backends.choose(gpu, half, 128, 128, scale=0.0) == "cudnn"
        monkeypatch.setattr(flash3, "_operators", lambda: True)
        assert chosen(128, 128) == ["flash3", "hopper", "flash3", "hopper"]  # ours is faster with a window
        capability(10, 0)
        assert chosen(128, 128) == ["cudnn", "flash", None, None]
    monkeypatch.setattr(prefill_backends, "flash_attn_func", lambda q, k, v, softmax_scale=None, causal=False: None)
    with prefill_backends.installed(monkeypatch, "package"):  # an old release
        capability(9, 0)
        assert chosen(128, 128) == ["flash3", "flash", None, None] and flash3.takes_many()


@pytest.mark.parametrize(
    "lengths, short",
    [
        ([(512, 512)] * 32, False),  # alike: one call for all of them
        ([(512, 512)] * 31 + [(544, 544)], True),
        ([(8192, 8192), (4096, 4096)], False),
        ([(4096, 4096), (4095, 4095)], True),  # 8.4 million pairs each
        ([(512, 8192 * 4), (0, 7), (512, 8192 * 2)], False),  # who has no queries does not count
        ([(512, 8192), (0, 7), (512, 8192 * 2)], True),
        ([(16384, 16384)] + [(512, 512)] * 8, False),  # in the mean
        ([(16384, 16384)] + [(512, 512)] * 31, True),
    ],
)
def test_short_sequences_share_a_call(lengths, short, monkeypatch):
    """cuDNN as torch calls it takes sequences of several lengths one by one; where these are short the flash kernel takes all at once."""
    asked = []
    monkeypatch.setattr(backends, "choose", lambda *args, **needs: asked.append(needs) or "math")
    # The lengths are of 32 heads of 128.
    monkeypatch.setattr(backends, "WORTH_A_CALL", backends.WORTH_A_CALL * HEADS * GROUP * HEAD_SIZE // (32 * 128))
    monkeypatch.setattr(prefill, "groups", lambda *args: [])
    call = make(queries=(40,), keys=(40,)).call()
    prefill.plan(call, lengths=lengths)
    assert [needs["short"] for needs in asked] == [short]
    monkeypatch.setattr(backends, "WORTH_A_CALL", 0)
    prefill.plan(call, lengths=lengths)
    assert asked[-1]["short"] is False


@pytest.mark.parametrize("release,taken", [("1.12.3", False), ("1.13.0", True), ("2.0", True), ("main", False)])
def test_releases_of_the_frontend(release, taken, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(__version__=release))
    assert (cudnn_graph.package.__wrapped__() is not None) == taken
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert cudnn_graph.package.__wrapped__() is None


def test_exact_rows_beside_options():
    """Segments written over the first one's rows, under a window and sinks: as by the reference."""
    b = make("int4", queries=(40, 64), keys=(100, 64), dtype=torch.float32)
    exact = quantkv.PagedCache(get_format("fp32").cache_spec(HEADS, HEAD_SIZE), 4, v_scale=b.cache.v.scale)
    exact.write(*torch.randn(2, 64, HEADS, HEAD_SIZE), torch.arange(64))
    begin, last = torch.tensor([16, 0]), torch.tensor([84, 48])
    main = b.cache.segment(b.block_table, None, torch.stack([begin, last], 1))._replace(complete=True)
    first = exact.segment(torch.tensor([[0], [1]]), None, torch.stack([torch.zeros_like(begin), begin], 1))
    latest = exact.segment(torch.tensor([[2], [3]]), last)
    plain = b.call(window=50, sinks=SINKS)
    call = AttendCall(b.q, (main, latest, first), plain.batch, None, plain.options, None, plain.lse)
    expected, sums = testing.compute(call, torch.float64)
    prefill.serve(call, scratch_bytes=64 * ROW, overlap=True)
    assert testing.relative_error(call.out, expected) < 1e-5 and (call.lse - sums).abs().max() < 1e-4
