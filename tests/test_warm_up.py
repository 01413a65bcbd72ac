"""Warming up compiles and names who serves what, and leaves the cache as it was."""

import inspect
import random
from itertools import accumulate

import pytest
import torch

from quantkv import PagedCache, forked, get_format, implementations, under_way, warm_up, warmup
from quantkv.calls import Batch
from quantkv.copies import CopiedPages, FullPrecisionStep
from quantkv.full_precision import FullPrecisionTokens
from quantkv.implementations import batches
from quantkv.warmup import mixed_batches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_warm_up():
    cache = PagedCache(get_format("int4").cache_spec(2, 64), 4, DEVICE)
    cache.buffer.random_(0, 255)
    before, seen = cache.buffer.clone(), []
    served = warm_up(cache, 4, query_lens=(1, 5), batch_sizes=(1, 3), write_sizes=(2,), max_seq_len=64, progress=lambda *x: seen.append(x))
    assert torch.equal(cache.buffer, before)
    assert list(served) == ["write of 2 tokens", *(f"attend of {s} x {n} queries" for n in (1, 5) for s in (1, 3))]
    assert DEVICE != "cpu" or set(served.values()) <= {"cpu", "reference"}
    assert seen[-1][:2] == (5, 5) and seen[0][2].startswith("write of 2 tokens: ")


@pytest.mark.parametrize(
    "argument, value, match",
    [
        ("cache", None, "^cache=NoneType: a PagedCache is needed"),
        ("cache", "int4", "^cache=str: a PagedCache is needed"),
        ("num_heads", "4", "^num_heads=4: a number of query heads is needed"),
        ("num_heads", 0, "^num_heads=0: a number of query heads"),
        ("num_heads", 3, r"^q\.shape\[1\]=3: a multiple of the 2 kv heads"),
        ("dtype", "bf16", r"^dtype=bf16: one of torch\.bfloat16"),
        ("query_lens", 1, "^query_lens=1: a sequence of integers of at least 0"),
        ("query_lens", [1.0], r"^query_lens=\[1\.0\]: a sequence of integers"),
        ("batch_sizes", 64, "^batch_sizes=64: a sequence of integers"),
        ("batch_sizes", [1, True], r"^batch_sizes=\[1, True\]: a sequence of integers"),
        ("write_sizes", None, "^write_sizes=None: a sequence of integers"),
        ("write_sizes", (-1,), r"^write_sizes=\[-1\]: a sequence of integers of at least 0"),
        ("max_seq_len", "64", "^max_seq_len=64: a number of tokens is needed"),
        ("mixed", 1, "^mixed=int: a sequence of batches"),
        ("mixed", [(1, 2)], r"^mixed\[0\]=\(1, 2\): a pair \(queries, keys\) for each sequence"),
        ("mixed", [[(1, 2)], [("a", 2)]], r"^mixed\[1\]=\[\('a', 2\)\]: a pair \(queries, keys\) of integers"),
        ("mixed", [[(3, 2)]], r"^mixed\[0\]=\[\(3, 2\)\]: at least one pair, of 0 <= queries <= keys"),
        ("mixed", [[]], r"^mixed\[0\]=\[\]: at least one pair"),
        ("table_width", 1.5, "^table_width=float: a number of pages or None"),
        ("table_width", -1, "^table_width=-1: a number of pages or None"),
        ("full_precision", 16, "^full_precision=int: FullPrecisionTokens or None"),
        ("own", 1, "^own=int: True or False is needed"),
        ("block_table", torch.zeros(1, 1), r"^options=\['block_table'\]: those are made for each call"),
        ("scale", "1", "^scale=1: a finite number is needed"),
        ("colour", 1, r"^options=\['colour'\]: allowed: causal"),
        ("progress", 10, r"^progress=int: a function of \(done, all, what\) or None"),
    ],
)
def test_what_is_no_size_is_refused_by_name_before_anything_runs(argument, value, match, monkeypatch):
    ran = []
    monkeypatch.setattr(implementations, "run", lambda *call: ran.append(call))
    sizes = dict(query_lens=(1,), batch_sizes=(1,), write_sizes=(1,), max_seq_len=64)
    given = {"cache": PagedCache(get_format("int4").cache_spec(2, 64), 4, DEVICE), "num_heads": 4, **sizes, argument: value}
    asked = [warm_up] if argument in ("progress", "full_precision") else [warm_up, warmup.who_serves, warmup.compile_ahead]
    for each in asked:
        with pytest.raises(ValueError, match=match):
            each(**given)
    assert not ran


GEOMETRIES = {  # query heads, kv heads, head size, options, tokens of a page, positions, format
    "llama": (32, 8, 128, {}, 16, 4096, "int4"),
    "gemma 3": (8, 4, 256, {"window": 1024}, 64, 2600, "int8"),
    "gpt-oss": (64, 8, 64, {"window": 128, "sinks": torch.zeros(64)}, 64, 3000, "none"),
    "a head for each": (16, 16, 128, {"softcap": 30.0}, 128, 299_900, "tq4"),
}
SEQS, TOKENS, VERIFIED = 48, 2048, 4  # of a step, at most; queries of a sequence that verifies


def steps(rng, num_heads, num_kv_heads, head_size, block_size, longest, count, verified=VERIFIED):
    """Batches as an engine hands them over: rows of one projection, a table of more sequences than there are. Lengths are known where
    kinds are mixed."""
    rows = torch.empty(TOKENS, (num_heads + 2 * num_kv_heads) * head_size, dtype=torch.bfloat16)
    table = torch.zeros(SEQS, -(-longest // 128) * 128 // block_size, dtype=torch.int32)
    out = torch.empty(TOKENS, num_heads, head_size, dtype=torch.bfloat16)
    parts = [(0, num_heads), *((n * head_size, num_kv_heads) for n in (num_heads, num_heads + num_kv_heads))]
    for _ in range(count):
        lengths, alike = [], rng.choice((None, None, 1, verified))
        kinds = rng.sample(((1, 1), (2, 8), (9, 127), (128, 900)), rng.randint(1, 4)) if alike is None else [(alike, alike)]
        for low, high in kinds:
            for _ in range(rng.choice((1, 1, 2, 5, 20))):
                queries = min(rng.randint(low, high), TOKENS - sum(n for n, _ in lengths))
                if queries and len(lengths) < SEQS:
                    lengths.append((queries, rng.choice((queries, queries, rng.randint(queries, longest)))))
        starts = torch.tensor([0, *accumulate(n for n, _ in lengths)], dtype=torch.int32)
        keys, tokens = torch.tensor([n for _, n in lengths], dtype=torch.int32), int(starts[-1])
        bound = rng.choice((None, max(n for _, n in lengths)))
        known = {"lengths": tuple(lengths)} if alike is None else {"max_query_len": alike, "max_seq_len": bound}
        q, *new = (rows[:tokens, first : first + n * head_size].view(tokens, n, head_size) for first, n in parts)
        yield q, tuple(new), out[:tokens], {"block_table": table[: len(lengths)], "seq_lens": keys, "cu_seqlens_q": starts, **known}


@pytest.mark.skipif(DEVICE == "cuda", reason="what is compiled is worked out without a GPU")
@pytest.mark.parametrize("target, precision", [("H100", "16bit"), ("A100", "16bit"), ("H100", "8bit")])
@pytest.mark.parametrize("model", GEOMETRIES)
@pytest.mark.parametrize("own", [False, True])
def test_an_engine_compiles_nothing_after_its_warm_up(own, model, target, precision, monkeypatch):
    """Random steps of decode, verification, short and long prompts, whole and in part: all that they would compile was compiled. own: they
    read their own rows. precision: of prompts; what else is compiled does not depend on it."""
    heads, kv_heads, size, options, block_size, longest, name = GEOMETRIES[model]
    options = options | {"prompt_precision": precision}
    from compiled import Gpu

    gpu, spec = Gpu(monkeypatch, target), get_format(name, torch.bfloat16).cache_spec(kv_heads, size, block_size=block_size)
    cache = PagedCache(spec, 1)
    width = -(-longest // 128) * 128 // block_size
    mixed = mixed_batches(heads, SEQS, TOKENS, longest, own)
    sizes = {"query_lens": (1, VERIFIED), "batch_sizes": (1, SEQS), "write_sizes": (1, SEQS, TOKENS), "max_seq_len": longest}
    warm_up(cache, heads, **sizes, mixed=mixed, table_width=width, own=own, **options)
    assert len(gpu.found) > 4 and gpu.found <= gpu.ahead  # on all cores, before anything ran
    compiled, found = gpu.found | gpu.ahead, []
    for q, (key, value), out, batch in steps(random.Random(0), heads, kv_heads, size, block_size, longest, 40):
        gpu.found.clear()
        cache.attend(q, out=out, own=(key, value) if own else None, **batch, **options)
        cache.write(key, value, torch.full((len(q),), -1))
        found.append(gpu.found - compiled)
    assert len(found) == 40
    assert not set().union(*found)
    made = [what for what in compiled if isinstance(what, tuple)]
    rounding = {"round_keys_kernel", "round_queries_kernel", "sample_mean_kernel"} & {what[0] for what in made}
    assert len(rounding) == (3 if precision == "8bit" else 0)
    assert {what[1][-1] for what in made if what[0] == "prompt"} == {precision == "8bit"}


@pytest.mark.skipif(DEVICE == "cuda", reason="what is compiled is worked out without a GPU")
@pytest.mark.parametrize("tokens", [FullPrecisionTokens(16, 24), FullPrecisionTokens(0, 24)], ids=str)
def test_full_precision_tokens_compile_nothing_after_the_warm_up(tokens, monkeypatch):
    """Which pages have copies, of steps of any size, and the rows that are noted: a prompt of a thousand tokens, decode of one and many."""
    from compiled import Gpu

    gpu, cache = Gpu(monkeypatch, "H100"), PagedCache(get_format("levels4").cache_spec(2, 64), 9)
    warm_up(cache, 4, batch_sizes=(1,), write_sizes=(1,), full_precision=tokens)
    names = {what[0] for what in gpu.found if isinstance(what, tuple)}
    assert names >= {"doubt_kernel", "claim_kernel", "take_kernel", "lay_out_kernel", "note_kernel"} and gpu.found <= gpu.ahead
    compiled = gpu.found.copy()
    gpu.found.clear()
    pool = CopiedPages(tokens, 16, 40, 9)
    pool.watch(cache)
    for queries, count in ((1, 1), (1, 33), (500, 2)):
        whole = FullPrecisionStep(tokens, 16, 40, 1000, cache.device)
        starts = torch.arange(count + 1, dtype=torch.int32) * queries
        lengths, slots = torch.full((count,), 500, dtype=torch.int32), torch.full((count * queries,), -1)
        step = whole.part(count)
        pool.advance(torch.zeros(count, 512, dtype=torch.int32), lengths, starts, slots, step)
        pool.note(slots, step)
    assert gpu.found and gpu.found <= compiled


@pytest.mark.skipif(DEVICE == "cuda", reason="what is compiled is worked out without a GPU")
def test_rows_of_any_requests_are_gathered_by_what_was_compiled(monkeypatch):
    """An engine gathers latents of some requests of a step: its tensors of them begin anywhere."""
    from compiled import specialized
    from quantkv.implementations.triton import gather

    kernel, found = gather.gather_rows_kernel, []
    names, kept = inspect.signature(kernel.fn).parameters, kernel.kwargs["do_not_specialize"]

    def launched(*arguments, **constants):
        found.append([(type if name in kept else specialized)(value) for name, value in zip(names, arguments)])

    monkeypatch.setattr(gather, "gather_rows_kernel", {(blocks, 1, 2): launched for blocks in (1, 2)})
    cache = PagedCache(get_format("levels4").latent_spec(64, 32, 16), 9)
    table, numbers = torch.zeros(5, 8, dtype=torch.int32), torch.arange(8, dtype=torch.int32)
    for of in (slice(0, 1), slice(1, 2), slice(2, 5)):
        segment, starts = cache.segment(table[:, :7][of]), numbers[of.start : of.stop + 1]
        rows = torch.empty(9 * (of.stop - of.start), 1, 96, dtype=torch.bfloat16)
        gather.run(segment, starts, numbers[of], rows.split((64, 32), 2), (1.0, 1.0))
    assert len(found) == 3 and found[0] == found[1] == found[2]
    assert len({t.data_ptr() % 16 for t in (numbers[0:], numbers[1:], numbers[2:])}) == 3


@pytest.mark.skipif(DEVICE == "cuda", reason="what is compiled is worked out without a GPU")
@pytest.mark.parametrize("own", [True, False])
def test_sequences_beside_a_prompt_read_full_precision_tokens_by_what_was_compiled(own, monkeypatch):
    """Sequences of few queries make the calls that they make without the prompt: two KV sources, pages and copies. own: they read their
    own rows."""
    from compiled import Gpu

    gpu, tokens, longest = Gpu(monkeypatch, "H100"), FullPrecisionTokens(16, 24), 4096
    cache = PagedCache(get_format("levels4").cache_spec(2, 128), 1)
    sizes = {"batch_sizes": (1, 8), "write_sizes": (1, 512), "max_seq_len": longest, "table_width": longest // 16, "own": own}
    warm_up(cache, 8, **sizes, mixed=mixed_batches(8, 8, 512, longest, own), full_precision=tokens)
    compiled, most = gpu.found | gpu.ahead, 1 if own else 8
    given = warmup._Given(cache, 8, torch.bfloat16, longest, longest // 16, tokens, own, False, {})
    for others in [[(1, 900)], [(1, 900), (1, 300), (1, 40)], *([(n, 900)] for n in range(2, 17)), [(2, 3), (7, 500)]]:
        gpu.found.clear()
        lengths = (*others, (300, 300))
        call = given.attend(Batch(*given.starts(lengths), lengths=lengths))
        for run in batches.cut(call):
            assert len(run.call.segments) == (2 if run.call.batch.max_query_len <= most else 3)
            implementations.run(implementations.resolve(run.call)[0], run.call)
        assert gpu.found and not gpu.found - compiled, others


@pytest.mark.skipif(DEVICE == "cuda", reason="what is compiled is worked out without a GPU")
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name, tokens", [("int4", None), ("levels4", FullPrecisionTokens(16, 24))])
def test_chunks_of_any_few_queries_are_read_by_one_kernel(name, tokens, own, monkeypatch):
    """Of an engine that verifies nothing: fewer are compiled, and nothing after the warm-up, for steps of its kinds."""
    from compiled import Gpu

    gpu, longest = Gpu(monkeypatch, "H100"), 4096
    cache = PagedCache(get_format(name).cache_spec(8, 128), 1)
    sizes = {"batch_sizes": (1, 32), "write_sizes": (1, 512), "max_seq_len": longest, "table_width": longest // 16, "own": own}
    mixed, counts = mixed_batches(32, 32, 512, longest, own), {}
    for chunks in (False, True):
        gpu.found.clear(), gpu.ahead.clear()
        warm_up(cache, 32, **sizes, mixed=mixed, full_precision=tokens, chunks=chunks)
        found = gpu.found | gpu.ahead
        counts[chunks] = sum(hasattr(what, "segments") for what in found)
        rows = {what.packed_rows for what in found if hasattr(what, "segments")}
        assert rows == {4, 64} if chunks else rows > {4, 8, 24, 64}
    assert counts[True] <= 0.4 * counts[False]
    given = warmup._Given(cache, 32, torch.bfloat16, longest, longest // 16, tokens, own, True, {})
    rng, run = random.Random(0), 0
    for _ in range(60):
        lengths = []
        for _ in range(rng.choice((1, 2, 5, 20))):
            queries = rng.choice((1, rng.randint(2, 9), rng.randint(2, 16), rng.randint(10, 100)))
            queries = min(queries, 512 - sum(n for n, _ in lengths)) or 1
            lengths.append((queries, rng.choice((queries, rng.randint(queries, longest)))))
        gpu.found.clear()
        call = given.attend(Batch(*given.starts(lengths), lengths=tuple(lengths), chunks=True))
        for part in batches.cut(call):
            implementations.run(implementations.resolve(part.call)[0], part.call)
            run += part.call.batch.chunks
        assert gpu.found and not gpu.found - found, lengths
    assert run > 60


@pytest.mark.parametrize(("cores", "apart"), [(2, False), (4, True), (16, True)])
def test_other_processes_compile_where_cores_are_many(cores, apart, monkeypatch):
    seen = []

    class Kernel:
        def cubin(self):
            seen.append(under_way.in_processes())

    monkeypatch.setattr(forked, "cores", lambda: cores)
    with warmup._Ahead(torch.device("cpu")) as ahead:
        ahead.compile([Kernel(), Kernel()])
    assert seen == [apart] * 2 and not under_way.in_processes()


def test_caches_that_are_warmed_up_together_are_compiled_before_any_runs(monkeypatch):
    found = []
    for name in ("compile", "run"):
        method = getattr(warmup._WarmUp, name)
        marked = lambda self, *given, name=name, method=method: (found.append((name, self.given.num_heads)), method(self, *given))[1]
        monkeypatch.setattr(warmup._WarmUp, name, marked)
    cache = PagedCache(get_format("int4").cache_spec(1, 64), 2)
    sizes = {"batch_sizes": (1,), "write_sizes": (1,), "max_seq_len": 16, "dtype": torch.float32}
    with warmup.together():
        told = [warm_up(cache, heads, **sizes) for heads in (2, 3)]
        assert not found
    assert found == [("compile", 2), ("compile", 3), ("run", 2), ("run", 3)]
    found.clear()
    assert told == [warm_up(cache, heads, **sizes) for heads in (2, 3)]
    assert found == [("compile", 2), ("run", 2), ("compile", 3), ("run", 3)]
    found.clear()
    with pytest.raises(ZeroDivisionError), warmup.together():
        warm_up(cache, 2, **sizes)
        raise ZeroDivisionError
    assert not found and warm_up(cache, 2, **sizes) and found
