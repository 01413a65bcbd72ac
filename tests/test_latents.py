"""Caches of latents (DeepSeek's MLA): one row a token, which is the key and, but for its rotated dimensions, the value."""

import copy
import importlib.util
import io
import pickle

import pytest
import torch

from latent_batches import HEADS, KEYS, LATENT, QUERIES, ROPE, SCALE, SIZE, expected, make, queries
from quantkv import PagedCache, get_format, implementations, prepare_attend, prepare_write, warm_up
from quantkv.copies import CacheWithCopies, CopiedPages, FullPrecisionStep, cache_of_copies
from quantkv.format_table import layout_of
from quantkv.full_precision import FullPrecisionTokens
from quantkv.implementations.cpu.compiling import missing
from quantkv.maps import LayerMaps, LinearMap
from quantkv.names import of_keys_and_values
from quantkv.offload import PageStore
from quantkv.page_views import copy_pages_between
from quantkv.spec import CacheSpec

LAUNCHES = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()  # interpreted
FORMATS = ("int4", "int8", "levels4", "levels3", "fp8", "fp8_token", "int2", "turboquant_4bit_nc", "trellis2", "none")


@pytest.mark.parametrize("fmt", FORMATS)
def test_attends_over_rows_that_are_keys_and_values(fmt):
    scales = {"k_scale": 0.25, "v_scale": 1.0} if fmt == "fp8" else {}
    cache, batch, (slots, _), _ = make(fmt, **scales)
    q = queries(cache)
    out, lse = cache.attend(q, **batch, scale=SCALE, return_lse=True)
    want, want_lse = expected(cache, q, batch, slots)
    assert out.shape == (sum(QUERIES), HEADS, LATENT)
    assert (out.double() - want).norm() <= 3e-6 * want.norm()
    assert torch.allclose(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{"window": 5}, {"causal": False}, {"softcap": 2.0}])
def test_options(options):
    cache, batch, (slots, _), _ = make()
    q = queries(cache)
    out = cache.attend(q, **batch, scale=SCALE, **options)
    want, _ = expected(cache, q, batch, slots, **options)
    assert (out.double() - want).norm() <= 3e-6 * want.norm()


def test_rotated_dimensions_in_a_format_with_a_rotation_of_their_own():
    spec = get_format("int4+int4").cache_spec(1, LATENT, ROPE, SIZE)
    cache, batch, (slots, _), rows = make()
    other = PagedCache(spec, cache.num_blocks)
    other.write(*rows, slots)
    q = queries(cache)
    want, _ = expected(other, q, batch, slots)
    out = other.attend(q, **batch, scale=SCALE)
    assert (out.double() - want).norm() <= 3e-6 * want.norm()


@pytest.mark.parametrize(
    "fmt, row",
    [("int4", 256 + 128 + 4), ("int8", 512 + 128 + 4), ("int4+int8", 256 + 4 + 64 + 4), ("fp8", 512 + 128), ("levels4", 256 + 128 + 2)],
)
def test_bytes(fmt, row):
    """DeepSeek-V3's rows, one kv head: the value takes none."""
    spec = get_format(fmt).latent_spec(512, 64, block_size=16)
    assert spec.page_bytes == spec.block_bytes == 16 * row
    assert spec.bytes_per_token == row and spec.compression == pytest.approx(1152 / row)
    assert spec.sections[:2] == ((0, 16 * spec.k.code_bytes(512)), (16 * spec.k.code_bytes(512), 16 * spec.v.code_bytes(64)))
    assert spec.latent and spec.query_sizes == (576, 512)
    assert layout_of(spec.format).cache_spec(1, 512, 64) == spec == CacheSpec.from_dict(spec.to_dict())


def test_names():
    assert of_keys_and_values("k8v4/int2") == "k8v4/int2"
    with pytest.raises(ValueError, match=r"format='int4\+int8': one of latents.* takes 'int4'"):
        of_keys_and_values("int4+int8")
    assert get_format("int4").latents().name == get_format("int4+bf16").name == "int4+bf16"
    assert get_format("int4+none", torch.float16) == get_format("int4").latents(torch.float16)
    assert get_format("k8v4/int2").latents() == get_format("k8v4+bf16") and get_format("k8v4+bf16").k == get_format("int8").k
    assert get_format("int4+bf16").latents() == get_format("int4+bf16")
    assert layout_of("int4+none").name == "int4+bf16" and layout_of("k8v4+bf16") == get_format("k8v4+bf16").layout
    fmt = get_format("int4+bf16")
    assert pickle.loads(pickle.dumps(fmt)) == fmt == copy.deepcopy(fmt)
    for name in ("int4+bf16+bf16", "int4/int8+bf16", "+"):
        for of in (get_format, layout_of):
            with pytest.raises(ValueError, match="format="):
                of(name)


def test_pages_move_with_all_that_they_hold(tmp_path):
    cache, batch, _, _ = make()
    q = queries(cache)
    want = cache.attend(q, **batch, scale=SCALE)
    numbers = range(cache.num_blocks)
    loaded, received, copied, stored = (PagedCache(cache.spec, cache.num_blocks) for _ in range(4))
    cache.save(tmp_path / "pages")
    loaded.load(tmp_path / "pages")
    sent = io.BytesIO()
    cache.save(sent)
    sent.seek(0)
    received.load(sent)
    copy_pages_between(cache, copied, numbers)
    stored.buffer.copy_(cache.buffer)
    store = PageStore([stored], cache.num_blocks)
    held = store.store(numbers)
    held.synchronize()
    stored.buffer.zero_()
    store.load(held, numbers).synchronize()
    for other in (loaded, received, copied, stored, pickle.loads(pickle.dumps(cache))):
        assert torch.equal(other.attend(q, **batch, scale=SCALE), want)
    plain = PagedCache(get_format("int4/fp32").cache_spec(1, LATENT, ROPE, SIZE), cache.num_blocks)
    with pytest.raises(ValueError, match=r"int4\+fp32.*int4/fp32"):  # keys and values of those sizes are something else
        plain.load(tmp_path / "pages")


def test_memory_of_an_engine():
    """vLLM's tensor of a layer of latents is `[num_blocks, block_size, bytes of a token]`."""
    cache, batch, (slots, _), rows = make()
    theirs = torch.zeros(cache.num_blocks, SIZE, cache.spec.page_bytes // SIZE, dtype=torch.uint8)
    wrapped = PagedCache.wrap(theirs.view(cache.num_blocks, 1, -1), cache.spec)
    wrapped.write(*rows, slots)
    assert torch.equal(wrapped.attend(queries(cache), **batch, scale=SCALE), cache.attend(queries(cache), **batch, scale=SCALE))


def test_prepared_calls():
    cache, batch, (slots, _), rows = make()
    other = PagedCache(cache.spec, cache.num_blocks)
    write, attend = prepare_write(slots), prepare_attend(**batch, scale=SCALE)
    q = queries(cache)
    for layer in (other, cache, other):
        write(layer, *rows)
        out, lse = attend(layer, q, return_lse=True)
        assert torch.equal(out, cache.attend(q, **batch, scale=SCALE))
    _, want_lse = expected(other, q, batch, slots)
    assert torch.allclose(lse.double(), want_lse, atol=1e-5)


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_queries_in_parts_and_outputs_with_a_mean(implementation):
    """Where nobody takes them as they are: the bits of queries put together before, and of a mean added behind."""
    cache, batch, _, _ = make()
    attend = prepare_attend(**batch, scale=SCALE, implementation=implementation)
    q, mean = queries(cache), torch.linspace(-1, 1, LATENT)
    for _ in range(2):  # the second is not prepared again
        q = 2 * q
        parts = tuple(t.clone() for t in q.split([LATENT, ROPE], 2))
        whole = cache.attend(q, **batch, scale=SCALE, implementation=implementation)
        assert torch.equal(attend(cache, parts), whole) and torch.equal(attend(cache, q), whole)
        assert torch.equal(attend(cache, parts, mean=mean), whole + mean)
    with pytest.raises(ValueError, match="mean"):
        attend(cache, q, mean=mean[:-1])
    with pytest.raises(ValueError, match="q=None"):
        attend(cache, (parts[0], None))


def test_rows_of_a_step_as_given():
    """A chunk of a prompt reads its own rows at full precision, and what is before them in pages."""
    cache, batch, (slots, _), (latents, rotated) = make()
    starts = batch["cu_seqlens_q"]
    of = torch.cat([torch.arange(sum(KEYS[:s]) + n - QUERIES[s], sum(KEYS[:s]) + n) for s, n in enumerate(KEYS)])
    exact = PagedCache(get_format("fp32+fp32").cache_spec(1, LATENT, ROPE, SIZE), cache.num_blocks)
    read = [rows.clone() for rows in cache.dequantize(slots)]
    for s in (0, 2):
        own = of[starts[s] : starts[s + 1]]
        read[0][own], read[1][own] = latents[own], rotated[own]
    exact.write(*read, slots)
    q = queries(cache)
    out = cache.attend(q, **batch, scale=SCALE, own=(latents[of], rotated[of]))
    want = exact.attend(q, **batch, scale=SCALE)
    assert (out - want).norm() <= 3e-6 * want.norm()


def test_rotation_does_not_change_what_is_read_of_rows_as_given():
    """A map of the layer's own: queries go through its inverse transposed, outputs through its inverse."""
    g = torch.Generator().manual_seed(3)
    matrix = torch.linalg.qr(torch.randn(LATENT, LATENT, generator=g, dtype=torch.float64))[0] * torch.linspace(0.5, 2, LATENT)
    turn = LinearMap(matrix.float()[None], torch.linalg.inv(matrix).float()[None])
    plain, batch, _, _ = make("none")
    turned, _, _, _ = make("none", maps=LayerMaps(turn))
    assert not torch.equal(plain.buffer, turned.buffer)
    q = queries(plain)
    out, want = turned.attend(q, **batch, scale=SCALE), plain.attend(q, **batch, scale=SCALE)
    assert (out - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("fmt", ["int4", "levels4"])
def test_projections_that_hold_the_rotation(fmt):
    """What an engine that absorbs the maps into its projections asks for."""
    cache, batch, _, _ = make(fmt)
    inverse, q = cache.maps.k.inverse[0], queries(cache)
    want = cache.attend(q, **batch, scale=SCALE)
    mapped = torch.cat([q[..., :LATENT] @ inverse, q[..., LATENT:]], -1)
    stored = cache.as_stored()
    out = stored.attend(mapped, **batch, scale=SCALE) @ inverse.mT
    assert (out - want).norm() <= 3e-6 * want.norm()
    assert stored.buffer is cache.buffer and cache.maps.k is not None and stored.maps.k is None and stored.kind != cache.kind


def test_what_is_written_later_is_read_as_stored():
    """Also where the pages are a part of memory that an engine owns: they are never copied."""
    plain, batch, _, _ = make("int4")
    pool = torch.zeros(2 * plain.num_blocks, *plain.buffer.shape[1:], dtype=torch.uint8)
    cache = PagedCache.wrap(pool[plain.num_blocks :], plain.spec)
    stored = cache.as_stored()
    pool[plain.num_blocks :] = plain.buffer
    assert stored.buffer.data_ptr() == cache.buffer.data_ptr()
    q = queries(plain)
    assert torch.equal(stored.attend(q, **batch, scale=SCALE), plain.as_stored().attend(q, **batch, scale=SCALE))


def test_refusals():
    cache, batch, _, _ = make()
    q = queries(cache)
    with pytest.raises(ValueError, match=r"scale=None"):
        cache.attend(q, **batch)
    with pytest.raises(ValueError, match=r"q.shape\[2\]=32: the cache holds keys of 48"):
        cache.attend(q[..., :LATENT], **batch, scale=SCALE)
    with pytest.raises(ValueError, match=r"out\.shape"):
        cache.attend(q, **batch, scale=SCALE, out=torch.empty(len(q), HEADS, ROPE))
    mean = LinearMap(torch.eye(LATENT)[None], torch.eye(LATENT)[None], torch.zeros(2, 1, LATENT))
    with pytest.raises(ValueError, match=r"maps\.k\.key_mean"):
        PagedCache(cache.spec, 1, maps=LayerMaps(mean))
    with pytest.raises(ValueError, match=r"latents \(int4\+fp32\): not supported here; supported by .*reference"):
        cache.attend(q, **batch, scale=SCALE, implementation="prefill")
    assert implementations.can_serve("prefill", cache.format, "attend") is False


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize(
    "fmt, dtype", [("int4", torch.bfloat16), ("levels4", torch.float16), ("none", torch.bfloat16), ("int8", torch.float32)]
)
def test_gather(fmt, dtype, implementation):
    """Stretches of sequences, as rows of one workspace for both parts, rotated back."""
    if implementation == "triton" and not LAUNCHES:
        pytest.skip("Triton's kernels run on another device here")
    cache, batch, (slots, _), _ = make(fmt, dtype=dtype)
    first, counts = torch.tensor([3, 0, 1, 8], dtype=torch.int32), torch.tensor([17, 30, 0, 1])
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    space = torch.full((64, LATENT + ROPE), 7.0, dtype=dtype)
    out = space[:, None, :LATENT], space[:, None, LATENT:]
    assert cache.gather(batch["block_table"], starts, out, first, implementation=implementation) is out
    begin = torch.tensor([0, *KEYS]).cumsum(0)[:-1]
    at = torch.cat([begin[s] + first[s] + torch.arange(counts[s]) for s in range(len(KEYS))])
    for got, want in zip(out, cache.dequantize(slots[at], dtype=torch.float64)):
        error = (got[: len(at)].double() - want).norm() / want.norm()
        assert error <= 2 * torch.finfo(dtype).eps  # rounded once as they are, and once rotated back


def test_gather_refuses():
    cache, batch, _, _ = make()
    table, starts = batch["block_table"], torch.tensor([0, 1, 2, 3, 4])
    out = torch.empty(8, 1, LATENT), torch.empty(8, 1, ROPE)
    for arguments, match in (
        ((table, starts[:-1], out), r"starts\.shape"),
        ((table, starts + 5, out), r"starts="),
        ((table, starts, out, torch.tensor([40, 0, 0, 0])), r"first=40"),
        ((table, starts, (out[0], out[1][..., :8])), r"out\[1\]\.shape"),
        ((table, starts, out[0]), "out=Tensor"),
    ):
        with pytest.raises(ValueError, match=match):
            cache.gather(*arguments)
    with pytest.raises(ValueError, match="implementation='hopper'"):
        cache.gather(table, starts, out, implementation="hopper")


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_full_precision_tokens(implementation):
    """The first and the latest tokens of a sequence are read from 16-bit copies of their rows, by both uses."""
    if implementation == "triton" and not LAUNCHES:
        pytest.skip("Triton's kernels run on another device here")
    tokens, block = FullPrecisionTokens(SIZE, 2 * SIZE), SIZE
    cache, batch, (slots, positions), rows = make("int4", dtype=torch.float16, keys=(70,), queries=(1,))
    copied = CopiedPages(tokens, block, 1, cache.num_blocks)
    copies = cache_of_copies(cache, copied.num_copies, torch.float16)
    assert copies.format.name == "fp16+fp16"
    both, table = CacheWithCopies(cache, copies, copied), batch["block_table"]
    for start in range(70):  # a token a step, as decode brings them
        step = FullPrecisionStep(tokens, block, 1, 1, cache.device)
        slot, lens = slots[start : start + 1], torch.tensor([start + 1], dtype=torch.int32)
        copied.advance(table, lens, batch["cu_seqlens_q"], slot, step)
        prepare_write(slot, full_precision=step)(both, *(t[start : start + 1] for t in rows))
    q = queries(cache, torch.float16, count=1)
    out = prepare_attend(**batch, scale=SCALE, full_precision=step, implementation=implementation)(both, q)
    read = [t.clone() for t in cache.dequantize(slots)]
    low, high = step.joined[2][0].tolist()
    exact = (positions < low) | (positions >= high)
    assert low == SIZE and 70 - 3 * SIZE <= high <= 70 - 2 * SIZE
    for got, given in zip(read, rows):
        got[exact] = given[exact].float()
    want = torch.cat([read[0], read[1]], 2)[:, 0].double()
    score = (q[0].double() @ want.T * SCALE).softmax(-1) @ want[:, :LATENT]
    assert (out[0].double() - score).norm() <= 2e-3 * score.norm()


def test_under_torch_compile():
    """The kind of a cache travels in its format's name."""
    cache, batch, (slots, _), rows = make()
    q = queries(cache)

    def step(q, latents, rotated):
        cache.write(latents, rotated, slots)
        return cache.attend(q, **batch, scale=SCALE)

    assert torch.equal(torch.compile(step, fullgraph=True, backend="eager")(q, *rows), step(q, *rows))


def test_warm_up_of_latents():
    cache, _, _, _ = make()
    served = warm_up(cache, 4, dtype=torch.float32, scale=SCALE, max_seq_len=16, batch_sizes=(2,), write_sizes=(1,))
    assert served["attend of 2 x 1 queries"] == ("reference" if missing() else "cpu")


@pytest.mark.parametrize("sink", [0, SIZE])
def test_rows_read_back_with_full_precision_tokens(sink):
    """Stretches of two sequences, of which the first and the latest tokens have copies, rotated as pages are; and the same sequences
    read by queries that are rotated beforehand."""
    tokens, keys = FullPrecisionTokens(sink, 2 * SIZE), (70, 45)
    cache, batch, (slots, positions), rows = make("int4", keys=keys, queries=(1, 1))
    copied = CopiedPages(tokens, SIZE, 2, cache.num_blocks)
    both, table = CacheWithCopies(cache, cache_of_copies(cache, copied.num_copies, torch.float32), copied), batch["block_table"]
    assert both.copies.maps.k is cache.maps.k
    copied.watch(cache)
    for before, after in (((0, 0), (30, 20)), ((30, 20), keys)):  # two steps of prompts
        new = torch.cat([torch.arange(a, b) + s * keys[0] for s, (a, b) in enumerate(zip(before, after))])
        step = FullPrecisionStep(tokens, SIZE, 2, len(new), cache.device)
        lens, starts = torch.tensor(after).int(), torch.tensor([0, *(b - a for a, b in zip(before, after))]).cumsum(0).int()
        copied.advance(table, lens, starts, slots[new], step)
        prepare_write(slots[new], full_precision=step)(both, *(t[new] for t in rows))
    first, counts = torch.tensor([3, 40], dtype=torch.int32), torch.tensor([67, 5])
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    out = torch.full((80, 1, LATENT), 7.0), torch.full((80, 1, ROPE), 7.0)
    assert both.gather(table, starts, out, first, step) is out
    at = torch.cat([torch.arange(3, 70), keys[0] + torch.arange(40, 45)])
    begin, end = (t.repeat_interleave(counts) for t in step.between.unbind(1))
    exact = (positions[at] < begin) | (positions[at] >= end)
    assert {int(n) for n in begin} == {sink} and int(exact[67:].sum()) == 5 and int((~exact).sum()) > 3 * SIZE
    for got, given, read in zip(out, rows, cache.dequantize(slots[at])):
        want = torch.where(exact[:, None, None], given[at], read)
        assert (got[: len(at)] - want).norm() <= 1e-6 * want.norm()
        assert bool((got[len(at) :] == 7.0).all())
    inverse, q = cache.maps.k.inverse[0], queries(cache, count=2)
    attend = prepare_attend(**batch, scale=SCALE, full_precision=step)
    mapped = torch.cat([q[..., :LATENT] @ inverse, q[..., LATENT:]], -1)
    want = attend(both, q)
    assert (attend(both.as_stored(), mapped) @ inverse.mT - want).norm() <= 3e-6 * want.norm()


def test_copies_of_keys_and_values_are_not_read_as_stored():
    cache = PagedCache(get_format("int4").cache_spec(1, 32), 4)
    copied = CopiedPages(FullPrecisionTokens(0, 16), 16, 1, 4)
    with pytest.raises(ValueError, match=r"pages\.spec\.format=int4"):
        CacheWithCopies(cache, cache_of_copies(cache, copied.num_copies, torch.float32), copied).as_stored()
