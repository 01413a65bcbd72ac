"""Attention by way of a dense kernel is attention over the cache: every codec, any lengths, any slices."""

import math
import os
from pathlib import Path

import pytest
import torch

import direct
import quantkv
from quantkv import LayerMaps, LinearMap, testing
from quantkv.bench import rivals
from quantkv.calls import AttendCall, Batch, Segment
from quantkv.formats import get_format
from quantkv.implementations import refusal
from quantkv.implementations.hopper.host import launch
from quantkv.implementations.prefill import attend as prefill
from quantkv.implementations.prefill import backends, cudnn_graph, flash3
from quantkv.implementations.prefill.plan import KeySlice

HEADS, HEAD_SIZE, BLOCK = 2, 64, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's kernels run where they can be compiled or interpreted.
TRITON = [False] + [True] * (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
DENSE = torch.float32 if DEVICE == "cpu" else torch.float16  # rows that a backend of its own choice takes
LENGTHS = ((40, 40), (1, 77), (33, 100))  # (queries, keys) of each sequence: no context, one query, a chunk


def batch(format_name, head_size=HEAD_SIZE, lengths=LENGTHS, maps=None, dtype=torch.float32, head_size_v=None):
    """A filled cache whose other slots hold NaN, and the arguments of attend over it."""
    torch.manual_seed(0)
    fmt = get_format(format_name)
    spec = fmt.cache_spec(HEADS, head_size, head_size_v, BLOCK)
    pages = [spec.num_blocks(keys) for _, keys in lengths]
    cache = quantkv.PagedCache(spec, sum(pages) + 3, DEVICE, maps=maps, k_scale=0.5, v_scale=2.0)
    cache.buffer.fill_(0xFF)
    order = torch.randperm(cache.num_blocks, device=DEVICE)
    table = torch.full((len(lengths), max(pages)), -1, device=DEVICE)
    for s, (_, keys) in enumerate(lengths):
        table[s, : pages[s]], order = order[: pages[s]], order[pages[s] :]
        position = torch.arange(keys, device=DEVICE)
        slots = table[s, position // BLOCK] * BLOCK + position % BLOCK
        key, value = torch.randn(2, keys, HEADS, head_size, device=DEVICE) + 0.3
        value = value[..., : spec.head_size_v]
        cache.write(key.to(dtype), value.to(dtype), slots, position)
    counts = torch.tensor([n for n, _ in lengths], device=DEVICE)
    q = torch.randn(int(counts.sum()), 2 * HEADS, head_size, device=DEVICE)
    arguments = {
        "cu_seqlens_q": torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        "seq_lens": torch.tensor([keys for _, keys in lengths], device=DEVICE),
        "block_table": table,
        "scale": head_size**-0.5,
        "maps": cache.maps,
    }
    return cache, q.to(dtype), arguments


def serve(q, k, v, fmt, *, block_table, maps, out=None, lengths=None, cu_seqlens_q, seq_lens, scale, **how):
    """By the prefill path, whatever it would choose."""
    segment = Segment(k, v, fmt, block_table, maps)
    call = direct.attend_call(q, [segment], cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens, scale=scale, out=out, lengths=lengths)
    prefill.serve(call, **how)
    return call.out, call.lse


def compare(cache, q, arguments, bound, **how):
    sides = (cache.k, cache.v, cache.format)
    out, lse = serve(q, *sides, **arguments, backend="math", **how)
    expected, sums = direct.attend(q, *sides, **arguments, dtype=torch.float64)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert (out - expected).norm() <= bound * expected.norm()
    assert (lse - sums).abs().max() <= bound * sums.abs().max()


@pytest.fixture(autouse=True)
def fine_cuts(monkeypatch):
    monkeypatch.setattr(backends, "PLANNED", 32)


# A row, a mapped query, a part and the result are each rounded once: to float32, by sums of up to 100 terms.
FLOAT32 = 100 * 2.0**-24


@pytest.mark.parametrize("triton", TRITON)
@pytest.mark.parametrize("slice_tokens,mask,back", [(32, "top left", 0), (64, "bottom right", 1000), (1 << 16, "bottom right", 0)])
def test_equals_attention_over_the_cache(codecs_of, slice_tokens, mask, back, triton, monkeypatch):
    """32 tokens a slice: queries and keys are both cut; 64: a slice holds some of the context and the queries' own keys. Queries
    are mapped, or rows are mapped back."""
    monkeypatch.setattr(prefill, "MAPPED_BACK", back)
    cache, q, arguments = batch(codecs_of)
    token_bytes = 2 * HEADS * HEAD_SIZE * q.dtype.itemsize
    compare(cache, q, arguments, FLOAT32, triton=triton, scratch_bytes=slice_tokens * token_bytes)


@pytest.mark.parametrize("triton", TRITON)
@pytest.mark.parametrize("dtype,back", [(torch.bfloat16, 0), (torch.float16, 1000)])
def test_16_bit_rows(codecs_of, dtype, back, triton, monkeypatch):
    """Four roundings to the query's dtype: keys, mapped queries, values, output. A score of this batch, |q||k| / 8 with rows of
    norm 8, has a standard deviation of 1, so rounding it relatively by eps changes a probability by about eps."""
    monkeypatch.setattr(prefill, "MAPPED_BACK", back)
    cache, q, arguments = batch(codecs_of, dtype=dtype)
    compare(cache, q, arguments, 4 * torch.finfo(dtype).eps, triton=triton)


@pytest.mark.parametrize("triton", TRITON)
def test_a_block_table_in_columns(triton):
    """Pages of a sequence need not be neighbours in its memory."""
    cache, q, arguments = batch("int8", lengths=((40, 100), (33, 70)))
    table = arguments["block_table"]
    arguments["block_table"] = table.t().contiguous().t()
    assert arguments["block_table"].stride(1) != 1
    compare(cache, q, arguments, FLOAT32, triton=triton)


GPU = pytest.mark.skipif(DEVICE == "cpu", reason="what runs there is a GPU's kernels; tests/test_prefill_rounds.py plays them on a CPU")
BACKENDS = pytest.mark.parametrize("backend", ["cudnn", "cudnn graph", "flash", "flash3", "hopper"])


def skip_unless_here(backend):
    if backend == "flash3":
        if "QUANTKV_PEERS" in os.environ:  # as `quantkv bench --peers` takes it
            rivals.load_flash3(Path(os.environ["QUANTKV_PEERS"]))
        if not flash3.takes():
            pytest.skip("FlashAttention-3 is not here")
    if backend == "hopper" and launch.elsewhere(torch.device("cuda")):
        pytest.skip("our kernel is for Hopper")
    if backend == "cudnn graph" and cudnn_graph.package() is None:
        pytest.skip("cuDNN's frontend is not here")


@GPU
@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(backend, dtype, monkeypatch):
    """Ragged queries are padded to a planned size; a ragged rest of the prefix joins them. One rounding more
    than above: the kernels round probabilities."""
    skip_unless_here(backend)
    monkeypatch.setattr(backends, "PLANNED", 256)
    cache, q, arguments = batch("int4", 128, lengths=((300, 1100), (256, 768), (130, 130)), dtype=dtype)
    sides = (cache.k, cache.v, cache.format)
    expected, sums = direct.attend(q, *sides, **arguments, dtype=torch.float64)
    for scratch_bytes in (prefill.SCRATCH_BYTES, 1):  # whole sequences, and slices of a planned size
        for overlap in (True, False):
            out, lse = serve(q, *sides, **arguments, backend=backend, scratch_bytes=scratch_bytes, overlap=overlap)
            assert (out - expected).norm() <= 5 * torch.finfo(dtype).eps * expected.norm()
            of_a_row = (out - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert of_a_row.max() <= 5 * torch.finfo(dtype).eps
            assert (lse - sums).abs().max() <= 5 * torch.finfo(dtype).eps * sums.abs().max()


@GPU
@BACKENDS
@pytest.mark.parametrize("name", ["window", "window of one", "chunks", "softcap", "sinks", "all"])
@pytest.mark.parametrize("head_size", [64, 128])
def test_options_on_a_gpu(backend, name, head_size, monkeypatch):
    """Each with several sequences, whole and in slices, over which events order two streams; captured, too. What is allowed is the error of
    float32 attention over the same 16-bit rows, and half a kernel's budget: what rounded scores and probabilities leave."""
    skip_unless_here(backend)
    monkeypatch.setattr(backends, "PLANNED", 256)
    sinks = torch.linspace(-2, 3, 6, device=DEVICE).bfloat16()
    given = {
        "window": {"window": 300},
        "window of one": {"window": 1},
        "chunks": {"window": 512, "chunk_lookback": 1},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": sinks},
        "all": {"window": 130, "softcap": 3.0, "sinks": sinks},
    }[name]
    served = backends.BACKENDS[backend]
    if ("window" in given and "chunk_lookback" not in given) > served.windows or ("softcap" in given) > served.softcap:
        pytest.skip(f"{backend} has no {name}")
    b = testing.SampleBatch.make(
        "int4", (300, 0, 700, 1, 128), (1100, 9, 700, 600, 130), head_size=head_size, dtype=torch.bfloat16, device=DEVICE
    )
    expected, sums = b.oracle(**given)

    def check(call, allowed):
        assert testing.relative_error(call.out, expected) <= allowed
        finite = sums.isfinite()
        assert torch.equal(finite, call.lse.cpu().isfinite())
        assert (call.lse.cpu().double() - sums)[finite].abs().max() <= testing.LSE_BUDGET[torch.bfloat16]

    for scratch_bytes in (prefill.SCRATCH_BYTES, 1):
        call = b.call(**given)
        prefill.follow(call, prefill.plan(call, backend="math", scratch_bytes=scratch_bytes))
        allowed = testing.relative_error(call.out, expected) + testing.OUTPUT_BUDGET[torch.bfloat16] / 2
        check(call, 2 * testing.OUTPUT_BUDGET[torch.bfloat16])  # rows and mapped queries are rounded, in place of scores and probabilities
        plan = prefill.plan(call, backend=backend, scratch_bytes=scratch_bytes)
        for _ in range(3):
            call.out.fill_(math.nan)
            prefill.follow(call, plan)
            check(call, allowed)
    without = call.with_tensors(call.q, torch.full_like(call.out, math.nan), None, call.segments)
    prefill.serve(without, backend=backend)  # sinks by the kernel itself, where it has them
    assert testing.relative_error(without.out, call.out) <= testing.OUTPUT_BUDGET[torch.bfloat16]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill.follow(call, plan)
    call.out.fill_(math.nan)
    graph.replay()
    check(call, allowed)


def random_maps(heads):
    torch.manual_seed(1)
    forward = torch.linalg.qr(torch.randn(2, heads, HEAD_SIZE, HEAD_SIZE, dtype=torch.float64))[0]
    forward = forward * torch.linspace(0.5, 3, HEAD_SIZE, dtype=torch.float64)[:, None] * 10
    inverse = forward.inverse().float()
    key_mean = torch.randn(1, heads, HEAD_SIZE)
    key, value = (LinearMap(f.float(), i, o) for f, i, o in zip(forward, inverse, (torch.cat([key_mean, -key_mean]), None)))
    return LayerMaps(key, value)


@pytest.mark.parametrize("triton", TRITON)
@pytest.mark.parametrize("back", [0, 1000])
@pytest.mark.parametrize("name", ["levels4", "levels3/int8"])
def test_keys_that_are_stored_without_their_offset(name, back, triton, monkeypatch):
    """Some are, some are not, whether rows are mapped back or queries are mapped."""
    monkeypatch.setattr(prefill, "MAPPED_BACK", back)
    maps = quantkv.LayerMaps.of(get_format(name), HEAD_SIZE, HEAD_SIZE)
    key_mean = 0.3 * torch.randn(2, HEADS, HEAD_SIZE, generator=torch.Generator().manual_seed(2)) + 0.3
    cache, q, arguments = batch(name, maps=LayerMaps(LinearMap(maps.k.forward, maps.k.inverse, key_mean), maps.v))
    scales = cache.k.meta[cache.k.meta.isfinite()]
    assert 0.1 < (scales < 0).float().mean() < 0.9
    compare(cache, q, arguments, FLOAT32, triton=triton)


@pytest.mark.parametrize("triton", TRITON)
@pytest.mark.parametrize("back", [0, 1000])
@pytest.mark.parametrize("head_size,head_size_v", [(80, 80), (64, 32), (256, 256)])
def test_head_sizes(head_size, head_size_v, back, triton, monkeypatch):
    """Sizes that are no power of two, values of another size than keys, and those that a tile splits."""
    monkeypatch.setattr(prefill, "MAPPED_BACK", back)
    cache, q, arguments = batch("int8/int4", head_size, head_size_v=head_size_v)
    compare(cache, q, arguments, 4 * FLOAT32, triton=triton, scratch_bytes=1)


@pytest.mark.parametrize("triton", [False] + [True] * (DEVICE == "cpu" and len(TRITON) > 1))
@pytest.mark.parametrize("lengths", [LENGTHS, ((40, 700),)])
def test_a_program_of_several_blocks(lengths, triton, monkeypatch):
    """What large rows are mapped back by is read once for many of them; the last blocks of a program may be none."""
    monkeypatch.setattr(prefill, "MAPPED_BACK", 1000)
    monkeypatch.setattr(prefill, "_cheap", lambda maps, q: True)
    cache, q, arguments = batch("int4", 256, lengths=lengths)
    compare(cache, q, arguments, 4 * FLOAT32, triton=triton)


@pytest.mark.parametrize("triton", TRITON)
@pytest.mark.parametrize("back", [0, 1000])
def test_a_sign_map_and_an_offset(back, triton, monkeypatch):
    """The map that a format asks for, and key means: what may be mapped back as it is written out."""
    monkeypatch.setattr(prefill, "MAPPED_BACK", back)
    own = LayerMaps.of(get_format("tq4"), HEAD_SIZE, HEAD_SIZE)
    maps = LayerMaps(LinearMap(own.k.forward, own.k.inverse, torch.randn(3, HEADS, HEAD_SIZE)))
    compare(*batch("tq4", lengths=((70, 250),), maps=maps), FLOAT32, triton=triton)


@pytest.mark.parametrize("triton", TRITON)
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("name", ["int4", "int8/tq4"])
def test_any_map_and_offset(name, heads, triton):
    """Two buckets of key means, a third from positions beyond the table; bounds grow by the maps' condition, 6."""
    lengths = ((70, 150),)
    compare(*batch(name, lengths=lengths, maps=random_maps(heads)), 6 * FLOAT32, triton=triton, scratch_bytes=1)


def test_fp16_scratch_stays_in_range():
    """A map that multiplies rows by 2^12 would overflow fp16: rows are stored divided by it."""
    eye = torch.eye(HEAD_SIZE)[None]
    maps = LayerMaps(LinearMap(eye * 4096, eye / 4096), LinearMap(eye * 4096, eye / 4096))
    cache, q, arguments = batch("int8", maps=maps, dtype=torch.float16)
    cache2, _, arguments2 = batch("int8", dtype=torch.float16)
    out, lse = serve(q, cache.k, cache.v, cache.format, **arguments)
    plain, _ = serve(q, cache2.k, cache2.v, cache2.format, **arguments2)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    assert (out - plain).norm() <= 4 * torch.finfo(torch.float16).eps * plain.norm()


def test_lengths_from_the_host():
    """Known lengths are not read from the device, and a prepared call reads them once."""
    assert Batch(None, None, lengths=LENGTHS).host_lengths() == LENGTHS
    cache, q, arguments = batch("int4", dtype=DENSE)
    sides = (cache.k, cache.v, cache.format)
    expected = serve(q, *sides, **arguments)
    for got, want in zip(serve(q, *sides, **arguments, lengths=LENGTHS), expected):
        assert torch.equal(got, want)


def test_writes_into_out():
    cache, q, arguments = batch("int4", dtype=DENSE)
    target = torch.full_like(q, math.nan)
    out, _ = serve(q, cache.k, cache.v, cache.format, **arguments, out=target)
    assert out is target and torch.isfinite(target).all()


def test_rows_without_a_backend_are_refused(monkeypatch):
    monkeypatch.setattr(backends, "choose", lambda *args, **asked: None)
    cache, q, arguments = batch("int4")
    with pytest.raises(ValueError, match=r"q: no dense backend for torch\.float32 rows of 64 and 64"):
        serve(q, cache.k, cache.v, cache.format, **arguments)


def test_the_rule():
    cache, q, _ = batch("int4", lengths=((prefill.MIN_QUERIES, prefill.MIN_QUERIES),), dtype=DENSE)

    def why(q=q, seqs=1, lengths=None):
        ends = torch.linspace(0, len(q), seqs + 1, device=DEVICE).int()
        tables = torch.zeros(seqs, 64, dtype=torch.int32, device=DEVICE)
        if lengths:
            ends = torch.tensor([0, *(n for n, _ in lengths)], device=DEVICE).cumsum(0).int()
        lens = torch.tensor([n for _, n in lengths], device=DEVICE) if lengths else ends.diff().long()
        batch = Batch(ends, lens, lengths=lengths)
        call = AttendCall(q, (cache.segment(tables),), batch)
        return refusal("prefill", call)

    assert why() is None
    assert "fewer" in why(q[1:]) and "fewer" in why(seqs=2)
    assert why(q.repeat(40, 1, 1), seqs=40) is None
    n = prefill.MIN_QUERIES
    assert why(q.repeat(2, 1, 1), 2, lengths=((n, n), (n, n + 9))) is None
    assert "fewer" in why(q.repeat(2, 1, 1), 2, lengths=((n - 1, n), (n + 1, n + 9)))


def test_backends():
    cpu = torch.device("cpu")
    assert backends.choose(cpu, torch.bfloat16, 96, 64) == "math"
    assert backends.choose(torch.device("meta"), torch.bfloat16, 128, 128) is None


@pytest.mark.parametrize("triton", TRITON)
@pytest.mark.parametrize("slice_tokens,back", [(32, 0), (64, 1000), (1 << 16, 0)])
@pytest.mark.parametrize("name", ["int8", "tq3", "int4", "int4 with key means"])
def test_segments_beside_one_that_holds_all_positions(name, slice_tokens, back, triton, monkeypatch):
    """Exact first and latest tokens of some sequences: as by the reference, which reads three segments."""
    monkeypatch.setattr(prefill, "MAPPED_BACK", back)
    name, key_means = name.split()[0], "key means" in name
    own = quantkv.PagedCache(get_format(name).cache_spec(HEADS, HEAD_SIZE), 1).maps
    maps = LayerMaps(LinearMap(own.k.forward, own.k.inverse, torch.randn(3, HEADS, HEAD_SIZE))) if key_means else None
    cache, q, arguments = batch(name, maps=maps)
    exact = quantkv.PagedCache(
        get_format("fp32").cache_spec(HEADS, HEAD_SIZE, block_size=BLOCK), 12, DEVICE, v_scale=2.0 if cache.maps.v is None else 1.0
    )
    exact.buffer.fill_(0xFF)
    slots = torch.randperm(exact.num_blocks, device=DEVICE)[:, None] * BLOCK + torch.arange(BLOCK, device=DEVICE)
    exact.write(*torch.randn(2, 12 * BLOCK, HEADS, HEAD_SIZE, device=DEVICE), slots.flatten())
    lens, end = arguments["seq_lens"], torch.tensor([40, 48, 100], device=DEVICE)  # a sequence of which nothing is exact, but the first
    begin = torch.tensor([16, 0, 32], device=DEVICE)
    pages = slots[:, 0] // BLOCK
    main = cache.segment(arguments["block_table"], None, torch.stack([begin, end], 1))._replace(complete=True)
    first = exact.segment(pages[:6].view(3, 2), None, torch.stack([torch.zeros_like(begin), begin], 1))
    latest = exact.segment(pages[6:12].view(3, 2), end)
    common = {"cu_seqlens_q": arguments["cu_seqlens_q"], "seq_lens": lens, "scale": arguments["scale"]}
    call = direct.attend_call(q, [main, latest, first], **common)
    expected, sums = direct.attend_segments(q, [main, latest, first], **common, dtype=torch.float64)
    prefill.serve(call, backend="math", triton=triton, scratch_bytes=slice_tokens * 2 * HEADS * HEAD_SIZE * 4)
    assert (call.out - expected).norm() <= FLOAT32 * expected.norm()
    assert (call.lse - sums).abs().max() <= FLOAT32 * sums.abs().max()


@pytest.mark.parametrize("triton", TRITON)
def test_exact_rows_that_the_table_has_no_room_for_are_not_looked_for(triton):
    """Numbers of another step, over which engines run kernels before there are sequences: nothing is written over."""
    pages = quantkv.PagedCache(get_format("int4").cache_spec(2, 64), 40, DEVICE)
    copies = quantkv.PagedCache(get_format("none", torch.float32).cache_spec(2, 64), 2, DEVICE)
    copies.buffer.fill_(0xFF)
    table, start = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    steps = prefill._steps(triton)((pages.k, pages.v), pages.format, pages.maps, 2)
    scratch = [torch.ones(2, 600, 64, device=DEVICE) for _ in range(2)]
    steps.patch(copies.segment(table, start), KeySlice(0, 1, 0, 600, 0, 600), 600, scratch)
    assert all(bool((t == 1).all()) for t in scratch)
