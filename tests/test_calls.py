"""What a call refuses, alike whoever would serve it, and edges of what it takes: no queries, the widest window, caches made in inference
mode."""

from dataclasses import replace

import pytest
import torch

from quantkv import LayerMaps, LinearMap, PagedCache, PageStore, get_format, implementations, prepare_attend, prepare_write
from quantkv.calls import AttendCall
from quantkv.testing import LSE_BUDGET, SampleBatch, check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
READERS, WRITERS = implementations.NAMES, [name for name in implementations.NAMES if name not in implementations.READS_ONLY]


def batch(name="int4", queries=(2, 1), keys=(20, 9), **arguments):
    return SampleBatch.make(name, queries, keys, **{"head_size": 64, "dtype": torch.float32, "device": DEVICE, **arguments})


def prepared(b, **arguments):
    return prepare_attend(block_table=b.block_table, seq_lens=b.seq_lens, cu_seqlens_q=b.cu_seqlens_q, **arguments)


def served(implementation, call):
    if reason := implementations.refusal(implementation, call):
        pytest.skip(reason)


# ---- gradients


OPTIONS = {"sinks": (6,), "alibi_slopes": (6,), "qq_bias": (2, 2)}


@pytest.mark.parametrize("implementation", ["auto", *READERS])
@pytest.mark.parametrize("name", ["q", *OPTIONS])
def test_attention_has_no_gradients(name, implementation):
    """Refused, and nothing is computed; where no gradient is asked for, it is served."""
    b = batch()
    options = {n: torch.zeros(shape, device=DEVICE) for n, shape in OPTIONS.items() if n == name}
    attend, plain = prepared(b, implementation=implementation), {"q": b.q, **options}
    needing = {n: t.clone().requires_grad_() for n, t in plain.items() if n == name}
    out = torch.full_like(b.q, 7)
    with pytest.raises(ValueError, match=rf"{name}\.requires_grad=True: .*no_grad"):
        replace(b, q=needing.get("q", b.q)).attend(implementation=implementation, out=out, **(options | needing if name != "q" else {}))
    with pytest.raises(ValueError, match=rf"{name}\.requires_grad=True: .*no_grad"):
        attend(b.cache, needing.get("q", b.q), out=out, **{n: t for n, t in needing.items() if n != "q"})
    assert (out == 7).all()
    if implementation != "auto":
        served(implementation, b.call(**options))
    with torch.no_grad():
        attend(b.cache, needing.get("q", b.q), out=out, **{n: t for n, t in needing.items() if n != "q"})
    assert not out.requires_grad and (out != 7).any()
    out.fill_(7)
    with pytest.raises(ValueError, match=rf"{name}\.requires_grad=True: .*no_grad"):  # now that it is prepared
        attend(b.cache, needing.get("q", b.q), out=out, **{n: t for n, t in needing.items() if n != "q"})
    assert (out == 7).all()


@pytest.mark.parametrize("implementation", ["auto", *WRITERS])
@pytest.mark.parametrize("name", ["key", "value"])
def test_writes_have_no_gradients(name, implementation):
    b = batch()
    rows = {n: t.clone().requires_grad_(n == name) for n, t in (("key", b.key), ("value", b.value))}
    cache = PagedCache(b.cache.spec, b.cache.num_blocks, DEVICE)
    write = prepare_write(b.slots, implementation=implementation)
    for store in (lambda: cache.write(**rows, slot_mapping=b.slots, implementation=implementation), lambda: write(cache, **rows)):
        with pytest.raises(ValueError, match=rf"{name}\.requires_grad=True: .*no_grad"):
            store()
    assert not cache.buffer.any()
    try:
        with torch.no_grad():
            write(cache, **rows)
    except ValueError as error:
        pytest.skip(str(error))
    assert cache.buffer.any()
    cache.buffer.zero_()
    with pytest.raises(ValueError, match=rf"{name}\.requires_grad=True: .*no_grad"):
        write(cache, **rows)
    assert not cache.buffer.any()


# ---- numbers beyond what is computed with


@pytest.mark.parametrize("window", [2**30 + 1, 2**31 - 1, 2**63, 2**70])
def test_a_window_is_at_most_what_kernels_add_to_a_position(window):
    for more in ({}, {"chunk_lookback": 0}):
        with pytest.raises(ValueError, match=rf"window={window}: .* 1,073,741,824 "):
            batch().attend(window=window, **more)


@pytest.mark.parametrize("name", ["scale", "softcap", "output_scale"])
def test_an_integer_beyond_floats_is_no_finite_number(name):
    with pytest.raises(ValueError, match=f"{name}=1000"):
        batch().attend(**{name: 10**400})


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("implementation", READERS)
def test_the_widest_window_is_none(implementation, causal):
    b = batch("int8")
    served(implementation, b.call(causal=causal, window=1 << 30))
    check(b, b.attend(implementation=implementation, causal=causal, window=1 << 30), causal=causal)


@pytest.mark.parametrize("softcap", [513, 1e4, 1e39])
def test_a_softcap_is_at_most_what_kernels_compute(softcap):
    with pytest.raises(ValueError, match=r"softcap=.* at most 512 "):
        batch().attend(softcap=softcap)


@pytest.mark.parametrize("implementation", READERS)
def test_the_largest_softcap(implementation):
    """Kernels compute tanh from an exponential, to 2^-23 of 1: a score is off by 512 times as much, 6e-5, where 1e-4 is allowed."""
    b = batch("int8")
    served(implementation, b.call(softcap=512.0))
    (_, lse), (_, expected) = b.attend(implementation=implementation, softcap=512.0), b.oracle(softcap=512.0)
    assert (lse.cpu().double() - expected).abs().max() < LSE_BUDGET[torch.float32]


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU no tensor is read for a check")
@pytest.mark.parametrize("sink", [torch.inf, torch.nan])
@pytest.mark.parametrize("implementation", ["auto", *READERS])
def test_a_sink_is_less_than_infinity(implementation, sink):
    b, sinks = batch(), torch.zeros(6)
    attend = prepared(b, implementation=implementation)
    if implementation == "auto" or not implementations.refusal(implementation, b.call(sinks=sinks)):
        attend(b.cache, b.q, sinks=sinks)
    sinks[3] = sink
    for call in (lambda: b.attend(implementation=implementation, sinks=sinks), lambda: attend(b.cache, b.q, sinks=sinks)):
        with pytest.raises(ValueError, match=rf"sinks\[3\]={sink}: .*less than infinity"):
            call()


# ---- no queries


def of_each_head(key_mean):
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(2, 64, 64, generator=generator))[0].contiguous()
    table = torch.randn(1, 2, 64, generator=generator) if key_mean else None
    return LayerMaps(LinearMap(turn, turn.mT.contiguous(), table), LinearMap(turn, turn.mT.contiguous()))


@pytest.mark.parametrize("queries, keys", [((0, 0), (20, 9)), ((), ())], ids=["no queries", "no sequences"])
@pytest.mark.parametrize("key_mean", [False, True])
@pytest.mark.parametrize("implementation", ["auto", *READERS])
def test_no_queries(implementation, key_mean, queries, keys):
    b = batch(queries=(1, 1), maps=of_each_head(key_mean))
    count = len(keys)
    b = replace(b, q=b.q[:0], cu_seqlens_q=torch.zeros(count + 1, dtype=torch.int32, device=DEVICE))
    b = replace(b, seq_lens=b.seq_lens[:count], block_table=b.block_table[:count])
    if implementation != "auto":
        served(implementation, b.call(max_query_len=0))
    out, lse = b.attend(implementation=implementation, max_query_len=0)
    again = prepared(b, implementation=implementation, max_query_len=0)
    assert out.shape == again(b.cache, b.q).shape == again(b.cache, b.q).shape == (0, 6, 64) and lse.shape == (0, 6)


@pytest.mark.parametrize("name, bound", [("max_query_len", "a"), ("max_query_len", 1.0), ("max_query_len", -1), ("max_seq_len", True)])
def test_a_bound_is_a_number_of_tokens_also_where_the_call_knows_it_better(name, bound):
    """Without cu_seqlens_q a sequence has one query, so that this bound was not looked at; beside lengths it was compared with a number."""
    b = batch(queries=(1, 1))
    places = dict(block_table=b.block_table, seq_lens=b.seq_lens)
    for lengths in (None, [(1, 20), (1, 9)]):
        given = {**places, "lengths": lengths, name: bound}
        for call in (lambda given: b.cache.attend(b.q, **given), lambda given: prepare_attend(**given)(b.cache, b.q)):
            with pytest.raises(ValueError, match=f"^{name}={bound}: None or a number of tokens is needed"):
                call(given)
            with pytest.raises(ValueError, match=f"^{name}={bound}: None or a number of tokens is needed"):
                call({**given, "cu_seqlens_q": b.cu_seqlens_q})


# ---- inference mode


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_a_cache_made_in_inference_mode_is_used_outside_of_it(implementation, tmp_path):
    b = batch("int4", (1, 1))
    with torch.inference_mode():
        cache = PagedCache(b.cache.spec, b.cache.num_blocks, DEVICE)
        wrapped = PagedCache.wrap(torch.zeros_like(b.cache.buffer), b.cache.spec)  # an engine's own, which is of inference mode
        write, attend = prepare_write(b.slots, implementation=implementation), prepared(b, implementation=implementation)
        write(cache, b.key, b.value)
        expected = attend(cache, b.q).clone()
        store = PageStore([cache], 2)
        write(wrapped, b.key, b.value)
    assert not cache.buffer.is_inference() and wrapped.buffer.is_inference()
    cache.buffer.zero_()
    write(cache, b.key, b.value)
    assert torch.equal(attend(cache, b.q), expected) and torch.equal(cache.buffer, wrapped.buffer)
    other = PagedCache(b.cache.spec, b.cache.num_blocks, DEVICE)
    other.write(b.key, b.value, b.slots, implementation=implementation)
    assert torch.equal(cache.buffer, other.buffer)
    stored = store.store([1])
    cache.copy_pages(torch.tensor([0], device=DEVICE), torch.tensor([1], device=DEVICE))
    store.load(stored, [1]).wait()
    assert torch.equal(cache.buffer, other.buffer)
    other.save(tmp_path / "pages.safetensors")
    cache.buffer.zero_()
    cache.load(tmp_path / "pages.safetensors")
    assert torch.equal(cache.buffer, other.buffer)


def test_maps_that_were_made_in_inference_mode_serve_outside_of_it():
    """The formats' own are made once, by whoever asks first."""
    size = 48  # of which no other test makes the map
    with torch.inference_mode():
        PagedCache(get_format("int4").cache_spec(2, size), 1)
    b = batch(head_size=size)
    assert not b.cache.maps.k.forward.is_inference()
    check(b, b.attend())


# ---- segments


def test_segments_share_the_map_of_values_and_their_scale():
    for name in ("int4", "fp8"):  # with a map, without
        b = batch(name)
        (segment,) = b.call().segments
        halves = [segment._replace(key_range=torch.tensor(r, device=DEVICE)) for r in ([[0, 5], [0, 5]], [[5, 20], [5, 9]])]
        scaled = halves[1]._replace(v=halves[1].v._replace(scale=2.0))
        AttendCall(b.q, tuple(halves), b.call().batch)
        with pytest.raises(ValueError, match="share it and its scale"):
            AttendCall(b.q, (halves[0], scaled), b.call().batch)
    mapped = batch("int4").call().segments[0]
    plain = batch("fp32").call().segments[0]
    plain = plain._replace(v=plain.v._replace(scale=2.0))
    AttendCall(b.q, (mapped, plain), b.call().batch)  # one with a map and one without need not share a scale
