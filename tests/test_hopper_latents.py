"""The Hopper kernel over latents against float64, on a Hopper GPU or else by its source run on a CPU; and what it is compiled to."""

import re
from dataclasses import replace

import pytest
import torch

from hopper_on_cpu import AVAILABLE, Device
from latent_batches import SCALE, make, queries
from quantkv import get_format, implementations
from quantkv.calls import AttendCall, Batch
from quantkv.copies import cache_of_copies
from quantkv.implementations.hopper import attend as hopper
from quantkv.implementations.hopper.decode.latents import LatentConfig
from quantkv.implementations.hopper.host import launch
from quantkv.implementations.hopper.host.sass import is_product, kernels, step
from quantkv.implementations.reference.attend import compute
from quantkv.maps import LayerMaps, LinearMap
from quantkv.options import AttentionOptions
from quantkv.testing import LSE_BUDGET, OUTPUT_BUDGET, relative_error
from segments import evened

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = "cuda" if ON_HOPPER else "cpu"
runs = pytest.mark.skipif(not (ON_HOPPER or AVAILABLE), reason="needs a Hopper GPU, or g++")
LENS, DECODE = (90, 33, 1, 260), (1, 1, 1, 1)


def call_of(cache, batch, q, longest, **options):
    """With room for results that are NaN until they are written."""
    out = q.new_full((*q.shape[:2], cache.spec.head_size), torch.nan)
    lse = q.new_full(q.shape[:2], torch.nan, dtype=torch.float32)
    own = Batch(batch["cu_seqlens_q"], batch["seq_lens"], longest)
    return AttendCall(q, (cache.segment(batch["block_table"]),), own, SCALE, AttentionOptions(**options), out, lse)


def cache_of(fmt, lens, counts, dtype=torch.bfloat16, size=64, latent=512, device="cpu"):
    """What `latent_batches.make` gives for rows of DeepSeek's sizes."""
    return make(fmt, dtype=dtype, latent=latent, rope=64, size=size, keys=lens, queries=counts, device=device)


def batch_of(fmt, heads, lens=LENS, counts=DECODE, dtype=torch.bfloat16, device="cpu", size=64, latent=512, pages=0, **options):
    """A call over latents, and what it has to give. pages: for which a sequence has room, at least."""
    cache, batch, (slots, _), _ = cache_of(fmt, lens, counts, dtype, size, latent, device)
    room = max(pages - batch["block_table"].shape[1], 0)
    batch["block_table"] = torch.nn.functional.pad(batch["block_table"], (0, room), value=-(2**30))
    q = queries(cache, dtype, heads, sum(counts))
    return call_of(cache, batch, q, max(counts), **options), exact(cache, q, lens, counts, slots, **options)


def exact(cache, q, lens, counts, slots, **options):
    """Outputs and log-sum-exps in float64 of what the cache holds, on the CPU."""
    return exact_of_rows(*(t[:, 0].cpu() for t in cache.dequantize(slots, dtype=torch.float64)), q, lens, counts, **options)


def exact_of_rows(latents, rotated, q, lens, counts, window=0, softcap=0.0, sinks=None):
    """The same of rows: latents, and their rotated dimensions."""
    token, key, out, lse, q = 0, 0, [], [], q.cpu()
    for n, count in zip(lens, counts):
        rows = torch.cat([latents[key : key + n], rotated[key : key + n]], 1)
        score = q[token : token + count].double() @ rows.T * SCALE
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        behind = torch.arange(n - count, n)[:, None] - torch.arange(n)
        score = score.masked_fill((behind < 0)[:, None] | (window > 0) & (behind >= window)[:, None], -torch.inf)
        total = score.logsumexp(2)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.double().cpu())
        out.append((score - total[..., None]).exp() @ latents[key : key + n])
        lse.append(total)
        token, key = token + count, key + n
    return torch.cat(out), torch.cat(lse)


def check(call, want):
    out, lse = want
    for s in range(len(call.q)):  # each token: a wrong one does not hide among many
        assert relative_error(call.out[s], out[s]) <= OUTPUT_BUDGET[call.q.dtype], s
    assert (call.lse.double().cpu() - lse).abs().max() <= LSE_BUDGET[call.q.dtype]


def run(monkeypatch, folder, call, multiprocessors=1, max_tiles=1024):
    """Serve it by the GPU, or by a stand-in of so many multiprocessors, each with at most `max_tiles` tiles at once."""
    assert all(isinstance(config, LatentConfig) for config in hopper.configurations(call))
    if ON_HOPPER:
        implementations.run("hopper", call)
    else:
        Device(monkeypatch, folder, multiprocessors, max_tiles).serve(call)


def serve(monkeypatch, folder, *given, multiprocessors=1, max_tiles=1024, **arguments):
    call, want = batch_of(*given, device=DEVICE, **arguments)
    assert [config.workers for config in hopper.configurations(call)] == [2 if "pages" in arguments else 1]
    run(monkeypatch, folder, call, multiprocessors, max_tiles)
    check(call, want)


@runs
@pytest.mark.parametrize("fmt", ["int4", "int8", "levels4", "none"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_numbers_of_heads(fmt, heads, monkeypatch, tmp_path):
    serve(monkeypatch, tmp_path, fmt, heads, *((LENS, DECODE) if heads <= 32 else ((70, 5), (1, 1))))


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("implementation", ["hopper", "triton"])
@pytest.mark.parametrize("fmt", ["int4", "int4+int8", "none"])
def test_a_captured_call_follows_lengths_and_pages(fmt, implementation):
    cache, batch, (slots, _), _ = cache_of(fmt, LENS, DECODE, device=DEVICE)
    q = queries(cache, torch.bfloat16, 16, len(DECODE))
    call, graph, slots = call_of(cache, batch, q, 1), torch.cuda.CUDAGraph(), slots.split(LENS)
    implementations.run(implementation, call)  # compiles
    with torch.cuda.graph(graph):
        implementations.run(implementation, call)
    for order, lens in (((0, 1, 2, 3), LENS), ((3, 0, 2, 1), (199, 64, 1, 33)), ((1, 3, 0, 2), (1, 33, 200, 1))):
        batch["block_table"].copy_(batch["block_table"][list(order)]), batch["seq_lens"].copy_(torch.tensor(lens))
        slots = [slots[s] for s in order]
        call.out.fill_(torch.nan), call.lse.fill_(torch.nan)
        graph.replay()
        check(call, exact(cache, q, lens, DECODE, torch.cat([own[:n] for own, n in zip(slots, lens)])))


@runs
@pytest.mark.parametrize(
    "heads, arguments",
    [
        (16, dict(counts=(2, 4, 1, 3))),  # two groups of packed query rows, of some of which a sequence has none
        (8, dict(counts=(3, 1, 1, 2), softcap=2.0, window=100)),
        (128, dict(lens=(70, 5), counts=(2, 2))),
        (16, dict(lens=(900, 3, 700), counts=(1, 1, 1), multiprocessors=2, max_tiles=8)),  # partials of several workers, and stretches
        (16, dict(pages=65)),  # two warpgroups of a block, as of much work
        (16, dict(lens=(900, 3, 0, 520, 700), counts=(1, 1, 0, 1, 1), pages=90, multiprocessors=13)),  # 25 of 26 have a run
        (32, dict(lens=(900, 3, 700), counts=(1, 2, 1), pages=90, multiprocessors=2, max_tiles=8)),
        (16, dict(lens=(90, 0, 40, 33), counts=(1, 0, 0, 1))),  # sequences without queries, or keys
        (5, dict(sinks=torch.linspace(-3, 3, 5, device=DEVICE))),
        (16, dict(size=16, dtype=torch.float16)),
        (16, dict(size=8, window=70)),  # pages of which a tile has two
        (16, dict(size=128)),
    ],
    ids=str,
)
def test_batches(heads, arguments, monkeypatch, tmp_path):
    serve(monkeypatch, tmp_path, "int4", heads, **arguments)


@runs
@pytest.mark.parametrize(
    "fmt, heads, arguments",
    [
        ("int4+int8", 16, {}),
        ("int4+int8", 16, dict(dtype=torch.float16)),
        ("int4+int8", 8, dict(counts=(3, 1, 1, 2), softcap=2.0, window=100)),
        ("int4+int8", 128, dict(lens=(70, 5), counts=(2, 2))),
        ("int4+int8", 16, dict(lens=(900, 3, 0, 520, 700), counts=(1, 1, 0, 1, 1), pages=90, multiprocessors=13)),
        ("int4+int8", 16, dict(size=8)),  # pages of which a tile has two
        ("levels4+int8", 16, {}),
        ("levels4+int8", 40, dict(size=8, dtype=torch.float16)),
        ("int8+int8", 16, {}),
        ("none+int8", 16, {}),
        ("int8+int8", 64, dict(lens=(70, 5), counts=(1, 1))),
    ],
    ids=str,
)
def test_rotated_dimensions_at_8_bits(fmt, heads, arguments, monkeypatch, tmp_path):
    serve(monkeypatch, tmp_path, fmt, heads, **arguments)


@runs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_of_rotated_dimensions(dtype, monkeypatch, tmp_path):
    """Each of 255 codes at each place, in rows of all sizes: of zeros, of fewer than the smallest scale stands for, and of large numbers;
    beside latents of zeros, too."""
    lens = (300,)
    cache, batch, (slots, _), (latents, rotated) = cache_of("int4+int8", lens, (1,), dtype=dtype, device=DEVICE)
    codes = (torch.arange(300)[:, None] * 64 + torch.arange(64)) % 255 - 127
    codes[:, 0] = 127  # so that the scale is what the row is multiplied by
    sizes = torch.tensor([0, 1e-7, 1e-3, 1.0, 40.0]).repeat(60) / 127
    rows = (codes * sizes[:, None])[:, None].to(rotated)
    latents = latents * (torch.arange(300) % 7 > 0)[:, None, None].to(latents)
    cache.write(latents, rows, slots, implementation="reference")
    call = call_of(cache, batch, queries(cache, dtype, 16, 1) / 16, 1)
    run(monkeypatch, tmp_path, call)
    check(call, exact(cache, call.q, lens, (1,), slots))


@pytest.mark.parametrize(
    "sequences, heads, workers", [(8, 16, 264), (48, 16, 264), (64, 16, 256), (128, 16, 256), (500, 16, 264), (16, 128, 64), (32, 64, 128)]
)
def test_runs_that_are_whole(sequences, heads, workers):
    """Where few workers are left without one, runs of sequences of one length end where these do."""
    cache, batch, _, _ = cache_of("int4", (64,), (1,))
    batch["block_table"] = batch["block_table"][:, :1].repeat(sequences, 32768 // 64)
    batch["seq_lens"], batch["cu_seqlens_q"] = torch.ones(sequences, dtype=torch.int32), torch.arange(sequences + 1, dtype=torch.int32)
    part = hopper.Plan(call_of(cache, batch, queries(cache, torch.bfloat16, heads, sequences), 1), 132).main
    assert (part.resident, part.decode_grid[0]) == (workers, workers // part.config.workers)


def test_runs_beside_copies_are_of_all_workers():
    call, _ = with_copies("int4", 16, (200,) * 64, (1,) * 64)
    assert [part.resident for part in hopper.Plan(call, 132).parts.values()] == [264, 132]


@runs
@pytest.mark.parametrize("fmt", ["int4", "int8", "levels4", "none"])
def test_maxima_that_rise(fmt, monkeypatch, tmp_path):
    """Later keys are larger, so that weights are rescaled from KV tile to KV tile."""
    cache, batch, (slots, _), rows = cache_of(fmt, (400,), (1,), device=DEVICE)
    cache.write(*(t * torch.linspace(0.1, 3, 400)[:, None, None].to(t) for t in rows), slots, implementation="reference")
    call = call_of(cache, batch, queries(cache, torch.bfloat16, 16, 1), 1)
    run(monkeypatch, tmp_path, call)
    check(call, exact(cache, call.q, (400,), (1,), slots))


@runs
@pytest.mark.parametrize("fmt", ["int4", "int8", "int4+int8", "levels4"])
def test_queries_of_any_size(fmt, monkeypatch, tmp_path):
    """Where they are integers each packed query row has a unit of its own: others may be a million times as large, zero, or not finite,
    which changes none of its bits."""
    cache, batch, (slots, _), _ = cache_of(fmt, LENS, DECODE, device=DEVICE)
    q = queries(cache, torch.bfloat16, 16, len(DECODE))
    q *= torch.logspace(-6, 0.5, 16, device=DEVICE).bfloat16()[:, None]
    q[:, 3], q[:, 5, 7] = 0, 20
    call = call_of(cache, batch, q, 1)
    run(monkeypatch, tmp_path, call)
    check(call, exact(cache, q, LENS, DECODE, slots))
    finite = call.out.clone()
    q[1, 11, 500], q[3, 2, 30] = torch.inf, torch.nan
    run(monkeypatch, tmp_path, call)
    good = torch.ones(q.shape[:2], dtype=torch.bool, device=DEVICE)
    good[1, 11] = good[3, 2] = False
    assert torch.equal(call.out[good], finite[good])


@runs
@pytest.mark.parametrize("fmt", ["int4", "int8"])
def test_largest_sums_of_integers(fmt, monkeypatch, tmp_path):
    """Every number of a query and of a key is as large as it may be, of one sign or of both: 512 products fit in 32 bits."""
    cache, batch, (slots, _), (latents, rotated) = cache_of(fmt, (70,), (1,), device=DEVICE)
    cache = cache.as_stored()
    signs = torch.where(torch.arange(512, device=DEVICE) % 3 > 0, 1.0, -1.0)
    rows = signs * torch.tensor([1.0, -1.0], device=DEVICE).repeat(35)[:, None]
    cache.write(rows[:, None].to(latents), rotated, slots, implementation="reference")
    q = queries(cache, torch.bfloat16, 16, 1)
    q[..., :512] = signs.bfloat16() * torch.linspace(-0.5, 0.5, 16, device=DEVICE).bfloat16()[:, None]
    call = call_of(cache, batch, q, 1)
    run(monkeypatch, tmp_path, call)
    check(call, exact(cache, q, (70,), (1,), slots))


@runs
def test_queries_that_are_mapped_before(monkeypatch, tmp_path):
    """Of an engine whose projections hold the rotation."""
    cache, batch, (slots, _), _ = cache_of("int4", LENS, DECODE, device=DEVICE)
    q, inverse = queries(cache, torch.bfloat16, 16, len(LENS)), cache.maps.k.inverse[0]
    q[..., :512] = (q[..., :512].float() @ inverse).bfloat16()
    call = call_of(cache.as_stored(), batch, q, 1)
    run(monkeypatch, tmp_path, call)
    forward = torch.linalg.inv(inverse.double().cpu())
    out, lse = exact(cache, torch.cat([q[..., :512].double().cpu() @ forward, q[..., 512:].double().cpu()], 2), LENS, DECODE, slots)
    check(call, (out @ forward.T, lse))


@runs
def test_some_of_the_keys(monkeypatch, tmp_path):
    """Positions outside of a range are not read: their pages are nowhere."""
    cache, batch, (slots, _), _ = cache_of("int4", (200, 70), (1, 1), device=DEVICE)
    call = call_of(cache, batch, queries(cache, torch.bfloat16, 16, 2), 1)
    call.segments[0].block_table[0, :2] = -(2**30)
    key_range = torch.tensor([[130, 190], [0, 70]], dtype=torch.int32, device=DEVICE)
    run(monkeypatch, tmp_path, replace(call, segments=(call.segments[0]._replace(key_range=key_range),)))
    check(call, exact(cache, call.q, (60, 70), (1, 1), torch.cat([slots[130:190], slots[200:]])))


def with_copies(fmt, heads, lens, counts, recent=24, size=64, **options):
    """A call over latents whose latest tokens are read from copies at 16 bits, from a page on that begins at a multiple of 16; and what
    it has to give."""
    cache, batch, (slots, _), rows = cache_of(fmt, lens, counts, size=size, device=DEVICE)
    copies = cache_of_copies(cache, 3 * len(lens), torch.bfloat16)
    copies.buffer.fill_(0xFF)
    starts = [max(n - recent, 0) // 16 * 16 for n in lens]
    table = torch.arange(3 * len(lens), dtype=torch.int32, device=DEVICE).flip(0).view(len(lens), 3)
    read = [t.clone() for t in cache.dequantize(slots, dtype=torch.float64)]
    first = 0
    for s, n in enumerate(lens):
        places, copied = torch.arange(n - starts[s], device=DEVICE), slice(first + starts[s], first + n)
        to = table[s, places // size].long() * size + places % size
        copies.write(*(t[copied] for t in rows), to, implementation="reference")
        for t, own in zip(read, copies.dequantize(to, dtype=torch.float64)):
            t[copied] = own
        first += n
    ranges = torch.tensor([[0, start] for start in starts], dtype=torch.int32, device=DEVICE)
    key_start = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    call = call_of(cache, batch, queries(cache, torch.bfloat16, heads, sum(counts)), max(counts), **options)
    for s, start in enumerate(starts):
        call.segments[0].block_table[s, -(-start // size) :] = -(2**30)  # pages of which only copies are read
    call = replace(call, segments=(call.segments[0]._replace(key_range=ranges), copies.segment(table, key_start)))
    return call, exact_of_rows(*(t[:, 0].cpu() for t in read), call.q, lens, counts, **options)


@runs
@pytest.mark.parametrize(
    "fmt, heads, arguments",
    [
        ("int4", 16, {}),
        ("levels4", 16, {}),
        ("levels4", 128, dict(lens=(70, 5), counts=(1, 1))),
        ("levels4", 16, dict(lens=(900, 3, 700), counts=(1, 2, 1), multiprocessors=2, max_tiles=8)),
        ("int8", 64, dict(counts=(2, 1, 1, 3), softcap=2.0)),
        ("int4+int8", 16, dict(counts=(2, 1, 1, 3))),
        ("levels4", 8, dict(counts=(1, 0, 1, 1), window=100, sinks=torch.linspace(-3, 3, 8, device=DEVICE))),
    ],
    ids=str,
)
def test_copies_at_16_bits_are_a_source_of_their_own(fmt, heads, arguments, monkeypatch, tmp_path):
    """What a preset's decode reads: quantized rows, and 16-bit copies of the latest ones, under one map."""
    device = {name: arguments[name] for name in ("multiprocessors", "max_tiles") if name in arguments}
    call, want = with_copies(fmt, heads, **{"lens": LENS, "counts": DECODE} | {k: v for k, v in arguments.items() if k not in device})
    assert [config.key.name for config in hopper.configurations(call)] == [fmt.split("+")[0], "bf16"]
    run(monkeypatch, tmp_path, call, **device)
    check(call, want)


def in_parts(call, mean):
    """The same call, of queries in two tensors that do not lie beside each other, outputs with a mean."""
    latents, rotated = call.q[..., :512].clone(), call.q.new_full((*call.q.shape[:2], 192), torch.nan)
    rotated[..., 128:] = call.q[..., 512:]
    return replace(call, q=torch.full_like(call.q, torch.nan), parts=(latents, rotated[..., 128:]), mean=mean)


@runs
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("fmt, heads, counts, absorbed", [("int4", 16, DECODE, False), ("levels4", 40, (2, 1, 1, 3), True)])
def test_queries_in_parts_and_outputs_with_a_mean(fmt, heads, counts, absorbed, copied, monkeypatch, tmp_path):
    """As an engine has them: nothing is put together before, and nothing added behind."""
    call, (out, lse) = with_copies(fmt, heads, LENS, counts) if copied else batch_of(fmt, heads, LENS, counts, device=DEVICE)
    if absorbed:  # pages are read as they are stored
        call, out = replace(call, segments=tuple(s._replace(maps=LayerMaps()) for s in call.segments)), None
    mean = (4 * torch.randn(512, generator=torch.Generator().manual_seed(4))).bfloat16().to(DEVICE)
    whole, parted = replace(call, out=torch.empty_like(call.out), lse=torch.empty_like(call.lse)), in_parts(call, mean)
    run(monkeypatch, tmp_path, parted)
    if out is None:
        run(monkeypatch, tmp_path, whole)
        out, lse = whole.out.double().cpu(), whole.lse.double().cpu()
    check(parted, (out + mean.double().cpu(), lse))


@runs
def test_a_layer_without_a_mean_after_one_with_it(monkeypatch, tmp_path):
    call, want = batch_of("int4", 16, device=DEVICE)
    if not ON_HOPPER:
        Device(monkeypatch, tmp_path, 1)
    prepared = hopper.prepare(in_parts(call, torch.ones(512, dtype=torch.bfloat16, device=DEVICE)))
    prepared(in_parts(call, torch.ones(512, dtype=torch.bfloat16, device=DEVICE)))
    prepared(in_parts(call, None))
    check(call, want)
    assert prepared.takes_parts_and_mean


def test_parts_that_lie_askew_are_refused():
    """And what was prepared for queries in parts serves no others: strides are those of the parts."""
    call, _ = batch_of("int4", 16)
    assert len({hopper._shape(c) for c in (call, in_parts(call, None), replace(call, parts=call.q.split([512, 64], 2)))}) == 3
    parts = in_parts(call, None).parts
    askew = parts[1].new_zeros(*parts[1].shape[:2], 100)[..., :64]
    assert "q strides" in hopper._unsupported(replace(call, parts=(parts[0], askew)))


@runs
@pytest.mark.parametrize("fmt, heads", [("int4", 16), ("levels4", 128)])
def test_steps_before_a_hadamard_matrix(fmt, heads, monkeypatch, tmp_path):
    call, _ = batch_of(fmt, heads, device=DEVICE)
    maps = LayerMaps(evened(512, 1).k.to(DEVICE))
    call = replace(call, segments=(call.segments[0]._replace(maps=maps),))
    assert hopper.configurations(call)[0].key_map == "EVENED"
    run(monkeypatch, tmp_path, call)
    check(call, tuple(t.cpu() for t in compute(call, torch.float64)))


def test_refusals():
    """What the kernel has no code for, by the argument and what is allowed."""
    call, _ = batch_of("int4", 16)
    segment = call.segments[0]
    others = {name: batch_of(name, 16)[0] for name in ("levels6", "fp8_token", "int4+fp8")}
    turn = torch.linalg.qr(torch.randn(512, 512, generator=torch.Generator().manual_seed(0)))[0][None]
    maps = LayerMaps(LinearMap(turn, turn.mT.contiguous()))
    for refused, reason in (
        (others["levels6"], "format levels6.bf16: latents of levels6 have no code for Hopper"),
        (others["fp8_token"], "format fp8_token.bf16: latents of fp8_token have no code for Hopper"),
        (others["int4+fp8"], "format int4.fp8: rotated dimensions of fp8_e4m3 have no code for Hopper"),
        (replace(call, segments=(segment._replace(maps=maps),)), "maps: latents under a Hadamard matrix or none"),
        (replace(call, segments=(segment,) * 5), "5 segments: at most 4"),
        (replace(call, options=AttentionOptions(batch_invariant=True)), "batch_invariant: not of latents"),
        (replace(call, q=call.q.half(), out=None), "rotated dimensions of q.dtype, torch.float16"),
        (replace(call, batch=replace(call.batch, max_query_len=None)), "max_query_len=None"),
        (batch_of("int4", 256, (9,), (3,))[0], "256 query heads of a kv head, max_query_len=3: 768 share it, at most 512 do"),
        (batch_of("int4", 16, latent=256)[0], "latents of 256 . 64 numbers, 1 kv heads: 512 . 64, one kv head"),
    ):
        assert re.search(reason, hopper._unsupported(refused)), (reason, hopper._unsupported(refused))
    assert hopper._unsupported(call) is None
    served = {
        fmt: implementations.can_serve("hopper", get_format(fmt), "attend")
        for fmt in ("int4+bf16", "int4+int8", "int8+fp16", "int8+fp32", "levels4+bf16", "levels6+bf16", "int4+fp8")
    }
    assert {fmt for fmt, is_served in served.items() if is_served} == {"int4+bf16", "int4+int8", "int8+fp16", "levels4+bf16"}


@pytest.mark.parametrize("fmt, heads", [("int4", 16), ("int4+int8", 16), ("int8", 16), ("levels4", 128), ("none", 16)])
def test_auto_takes_it(monkeypatch, fmt, heads):
    call, _ = batch_of(fmt, heads)
    monkeypatch.setattr(launch, "elsewhere", lambda device: None)
    monkeypatch.setattr(implementations, "ON_CPU", ("hopper", "reference"))
    assert implementations.resolve(call) == ("hopper", {})


# ---- what it is compiled to


def compiled(monkeypatch, folder, fmt, heads, counts=DECODE):
    """The configuration of a call whose sequences have room for many tokens, and the names of its kernel's instructions: of the loop over
    KV tiles, and all."""
    pytest.importorskip("cuda.core")
    cache, batch, _, _ = cache_of(fmt, (4096,), (1,))
    batch["block_table"] = batch["block_table"][:, :1].repeat(64, 128)
    batch["seq_lens"], batch["cu_seqlens_q"] = torch.ones(64, dtype=torch.int32), torch.arange(65, dtype=torch.int32)
    (config,) = hopper.configurations(call_of(cache, batch, queries(cache, torch.bfloat16, heads, 64), 1))
    cubin = folder / "cubin"
    cubin.write_bytes(config.cubin())
    return config, step(cubin), [name for _, name, _ in kernels(cubin)["decode_wgmma_kernel"]]


# Packed query rows of a block, KV tiles in a ring, warpgroups, products begun together; then at most: instructions of a warp for a KV tile
# of 64 tokens, those of local memory among them, and those of the whole kernel.
COMPILED = {
    ("int4", 8): (8, 4, 2, 8, 740, 0, 0), ("int4", 16): (16, 3, 2, 8, 775, 0, 31), ("int4", 32): (32, 2, 2, 2, 915, 0, 59),
    ("int4", 48): (24, 3, 2, 2, 830, 0, 0), ("int4", 128): (32, 2, 2, 2, 915, 0, 59), ("int8", 16): (16, 2, 2, 8, 785, 0, 0),
    ("int8", 128): (16, 2, 2, 8, 785, 0, 0), ("levels4", 16): (16, 2, 2, 8, 1210, 0, 0), ("none", 16): (16, 2, 1, 4, 750, 0, 0),
    ("int4+int8", 16): (16, 4, 2, 8, 850, 0, 22), ("int4+int8", 128): (32, 3, 2, 2, 995, 0, 63),
    ("int8+int8", 16): (16, 2, 2, 8, 865, 0, 0), ("levels4+int8", 16): (16, 2, 2, 8, 1285, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("fmt, heads", COMPILED)
def test_what_it_is_compiled_to(fmt, heads, monkeypatch, tmp_path, cubins):
    """Products run on behind the program: were they waited for one by one, more would wait. The loop keeps in registers what it holds."""
    config, loop, names = compiled(monkeypatch, tmp_path, fmt, heads)
    rows, stages, warpgroups, at_once, budget, in_loop, spilled = COMPILED[fmt, heads]
    assert (config.packed_rows, config.stages, config.workers, config.keys_at_once, config.values_at_once) == (
        rows, stages, warpgroups, at_once, at_once,
    )  # fmt: skip
    assert config.shared_bytes <= 227 * 1024 - 1024
    before = sum(map(is_product, loop[: next(i for i, name in enumerate(loop) if name.startswith("LDGSTS"))]))
    keys = 16 if config.by_integers else 32  # products with keys: of 32 numbers, or 16
    assert before == 0 if stages == 2 else before > keys + 4  # a ring of two KV tiles has no other time for copies
    assert sum(name.startswith("BAR.") for name in loop) == 1 + (stages == 2)
    assert config.by_integers == fmt.startswith("int") and sum(map(is_product, loop)) == keys + 4 + 32
    parts = keys // min(at_once, {"int8": 4, "none": 2}.get(fmt.split("+")[0], 8)) + 1 + 32 // at_once
    assert sum(name.startswith("WARPGROUP.ARRIVE") for name in loop) == parts
    assert len(loop) <= budget
    local = [name for name in names if name.startswith(("LDL", "STL"))]
    from cuda.bindings import nvrtc

    reloads = 1 if nvrtc.nvrtcVersion()[1:] < (13, 5) else 0  # NVRTC 13.0 loads an address again, and spills four registers more
    local_in_loop = [name for name in loop if name.startswith(("LDL", "STL"))]
    assert len(local_in_loop) <= in_loop + reloads and len(local) <= spilled + 4 * reloads
