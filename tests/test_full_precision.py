"""Full-precision tokens in front of the pages: what is read exactly, to the token, whatever happens to pages; and nothing wrong is ever
read."""

import pytest
import torch

from full_precision_engine import GROUP, HEADS, SIZE, Captured, D, Engine
from quantkv import PagedCache, copies, get_format, implementations, prepare_attend, prepare_write
from quantkv.calls import AttendCall, Batch
from quantkv.copies import CacheWithCopies, CopiedPages, FullPrecisionStep, cache_of_copies
from quantkv.full_precision import FullPrecisionTokens
from quantkv.implementations import batches
from quantkv.implementations.hopper import attend as hopper


def rule(length, first, latest):
    """The positions that are exact where every page had room for its copy."""
    return {j for j in range(length) if j < -(-first // SIZE) * SIZE or (latest and j >= max(length - latest, 0) // SIZE * SIZE)}


@pytest.mark.parametrize("beside", [0, 9])
@pytest.mark.parametrize(("first", "latest"), [(16, 24), (0, 24), (32, 1), (4, 0), (20, 100)])
def test_every_length(first, latest, beside):
    """From nothing, token by token. beside: tokens of a prompt in the same step, so that sink and recent tokens are a source each."""
    engine = Engine(first=first, latest=latest, seqs=2)
    for length in range(1, 150):
        assert engine.step([1, beside])[0] == rule(length, first, latest), length
        engine.drop(1)


@pytest.fixture
def cut(monkeypatch):
    """Calls are cut into runs, as on a GPU. The list has the KV sources of each call that was served, by the queries of its sequences."""
    served, run, prepare = [], implementations.run, implementations.prepare

    def told(call):
        if isinstance(call, AttendCall):
            served.append(([queries for queries, _ in call.batch.host_lengths()], len(call.segments)))
        return call

    monkeypatch.setattr(batches, "cut", lambda call: [batches.Run(call)] if call.batch.lengths is None else batches.runs_of(call))
    monkeypatch.setattr(implementations, "run", lambda name, call: run(name, told(call)))

    def prepared(name, call):
        launch = prepare(name, call)
        return lambda call: launch(told(call))

    monkeypatch.setattr(implementations, "prepare", prepared)
    return served


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("prompt", [9, 40, 130])
def test_decode_reads_two_sources_beside_a_prompt(own, prompt, cut):
    """Pages and 16-bit copies, as without the prompt, which reads sink and recent copies each at their positions. Two layers: the second
    call of one shape is launched by what was prepared for the first."""
    engine = Engine(seqs=3, own=own, runs=True, layers=2)
    engine.step([60, 70, 5])
    for drafts in (1, 5):
        cut.clear()
        found = engine.step([1, drafts, prompt])
        assert found[0] == rule(len(engine.seqs[0]), 16, 24)
        sources = {tuple(queries): count for queries, count in cut}
        decode = {(1, drafts): 2} if drafts == 1 or not own else {(1,): 2, (drafts,): 3}
        assert sources == decode | {(prompt,): 3}
        engine.drop(2)
        engine.step([1, 1, 5])


def test_runs_of_another_layer_read_its_own_copies(cut):
    """The call that was prepared for one layer serves another over its pages, copies and queries, in each of its runs."""
    engine = Engine(seqs=2, runs=True, layers=2)
    engine.step([60, 70])
    first, second = engine.caches
    for mine, other in ((first.pages, second.pages), (first.copies, second.copies)):  # the heads change places
        mine.buffer.copy_(other.buffer.flip(1))
    table = torch.tensor([(seq.pages + [0])[:5] for seq in engine.seqs], dtype=torch.int32)
    starts = torch.tensor([0, 1, 21], dtype=torch.int32)
    given = {"block_table": table, "seq_lens": torch.tensor([60, 70], dtype=torch.int32), "cu_seqlens_q": starts}
    step = engine.new_step(2, 21)
    engine.full_precision.advance(table, given["seq_lens"], starts, torch.full((21,), -1), step)
    q = engine.rand(21, HEADS * GROUP, D)
    cut.clear()
    shared, alone = (prepare_attend(**given, lengths=[(1, 60), (20, 70)], full_precision=step) for _ in range(2))
    before, out = shared(first, q), shared(second, q)
    assert torch.equal(out, alone(second, q)) and not torch.allclose(out, before, rtol=0.1)
    assert [count for _, count in cut] == [2, 3] * 3


OPTIONS = {"plain": {}, "window": {"window": 21}, "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])}}


@pytest.mark.parametrize(("runs", "options"), [(True, "plain"), (False, "plain"), (True, "window"), (False, "alibi")])
@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed, runs, options, cut):
    """Prompts in chunks beside sequences that decode; sequences end, begin with pages of others, or anew; the pool has room for all, or
    for less than half. Every other time steps read their own rows as given."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    first, latest = (16, 0, 32, 5)[seed % 4], (24, 40, 3)[seed % 3]
    engine = Engine(first=first, latest=latest, runs=runs, seqs=3, room=1 + 2 * (seed % 2), seed=seed, layers=2, own=seed % 4 > 1)
    for _ in range(40):
        i = integer(0, 3)
        if integer(0, 6) == 0 or len(engine.seqs[i]) > 180:
            engine.drop(i)
            source = integer(0, 3)
            if source != i and integer(0, 2):
                engine.share(source, i, integer(0, len(engine.seqs[source]) // SIZE + 1))
        counts = [integer(2, 70) if integer(0, 4) == 0 else integer(0, 2) for _ in range(3)]
        if any(counts):
            engine.step(counts, **OPTIONS[options])


@pytest.mark.parametrize("queries", [1, 5, 40])
def test_a_step_that_nothing_filled_reads_pages_alone(queries):
    """Engines run kernels over it before there are sequences, with any lengths."""
    spec, tokens = get_format("int4").cache_spec(2, 64), FullPrecisionTokens(16, 24)
    pages = PagedCache(spec, 40)
    pages.buffer.random_(0, 100, generator=torch.Generator().manual_seed(0))
    copied = CopiedPages(tokens, 16, 1, 40)
    cache = CacheWithCopies(pages, cache_of_copies(pages, copied.num_copies, torch.float32), copied)
    cache.copies.buffer.fill_(0xFF)
    q = torch.randn(queries, 4, 64, generator=torch.Generator().manual_seed(1))
    batch = {"block_table": torch.arange(40, dtype=torch.int32)[None], "seq_lens": torch.tensor([600], dtype=torch.int32)}
    batch["cu_seqlens_q"] = torch.tensor([0, queries], dtype=torch.int32)
    step = FullPrecisionStep(tokens, 16, 1, queries, torch.device("cpu"))
    out = prepare_attend(**batch, full_precision=step, max_query_len=queries)(cache, q)
    torch.testing.assert_close(out, pages.attend(q, **batch), rtol=1e-5, atol=1e-6)


def test_room_is_made_where_there_is_too_little_and_nothing_is_lost():
    """Captured graphs hold the state: where there is room it stays the same tensor."""
    engine = prepared()
    exact, held = engine.full_precision, engine.full_precision.state
    exact.make_room(2, 64), exact.make_room(0, 1)
    assert exact.state is held
    exact.make_room(1, 90)
    assert exact.state is not held and (exact.num_blocks, exact.num_copies) == (90, len(exact.owner) - 1)
    assert len(exact.copy_of) == 91 and len(exact.owner) == len(exact.stamp) == exact.tokens.copies_needed(SIZE, 2) + 1
    assert engine.step([1, 1]) == [rule(75, 16, 40), rule(95, 16, 40)]
    exact.make_room(3, 1)
    assert exact.num_blocks == 90 and exact.num_copies == exact.tokens.copies_needed(SIZE, 3)


def test_a_small_pool_leaves_the_copies_to_those_that_have_them():
    """Room for one sequence of four: some keep their full-precision tokens, none reads another's."""
    engine = Engine(room=1)
    assert [len(exact) for exact in engine.step([40, 40, 40, 40])] == [40, 16, 0, 0]
    for _ in range(60):
        assert engine.step([1, 1, 1, 1])[0] >= set(range(16))
    engine.drop(0)
    assert any([bool(exact) for exact in engine.step([0, 1, 1, 1])] for _ in range(60))


def prepared(**options):
    engine = Engine(latest=40, seqs=2, layers=2, **options)
    engine.step([70, 90])
    for _ in range(3):
        engine.step([1, 1])
    assert engine.step([1, 1]) == [rule(74, 16, 40), rule(94, 16, 40)]
    return engine


@pytest.mark.parametrize("fmt", ["int4", "fp8", "int2", "tq3"])
@pytest.mark.parametrize("slots", [range(SIZE), [0], [15], [7, 8]], ids=str)
@pytest.mark.parametrize("page", [0, 2, 3])
def test_a_page_overwritten_behind_our_back_is_not_believed(page, slots, fmt):
    """The first page, and two of the latest: what is read then is what the page holds."""
    engine = prepared(fmt=fmt)
    engine.overwrite(0, page, slots)
    engine.pool.lose(engine.seqs[0].pages[page])
    first, second = engine.step([1, 1])
    assert first == {j for j in rule(75, 16, 40) if j >= ((page + 1) * SIZE if page else 32)} | (set(range(16)) if page else set())
    assert second == rule(95, 16, 40)
    assert engine.step([1, 1])[0] < rule(76, 16, 40)


def test_first_pages_count_from_the_beginning():
    """The first of two is lost: the second has a copy, but does not stand at the beginning."""
    engine = Engine(first=32, latest=8, seqs=1)
    engine.step([100])
    engine.overwrite(0, 0)
    engine.pool.lose(engine.seqs[0].pages[0])
    assert engine.step([1]) == [set(range(80, 101))]
    assert int(engine.full_precision.copy_of[engine.seqs[0].pages[1]]) >= 0


@pytest.mark.parametrize("part", ["codes", "meta"])
def test_every_byte_of_the_last_layers_keys_counts(part):
    engine = prepared()
    page = engine.seqs[0].pages[2]
    getattr(engine.pages.k, part).view(torch.uint8)[page, 3, 1, 1] ^= 1
    engine.pool.lose(page)
    assert engine.step([1, 1]) == [rule(75, 16, 40) - set(range(32, 48)), rule(95, 16, 40)]


def test_the_token_of_the_last_step_is_looked_at():
    """A page that holds one token, taken by somebody else before the next step."""
    engine = Engine(seqs=1)
    engine.step([48]), engine.step([1])
    engine.overwrite(0, 3, [0])
    engine.pool.lose(engine.seqs[0].pages[3])
    assert engine.step([1]) == [set(range(16))]


def test_moved_pages_are_read_quantized():
    """Into pages that were another's, copies of which are still in the pool: nothing exact is left, until a page begins."""
    engine = Engine(seqs=2)
    engine.step([60, 75])
    engine.drop(0)
    engine.move(1)
    assert len(set(engine.seqs[1].pages) & {p for p, s in enumerate(engine.full_precision.copy_of.tolist()) if s >= 0}) >= 3
    assert engine.step([0, 1]) == [set(), set()]
    for _ in range(5):
        found = engine.step([0, 1])
    assert found[1] == {80}


def test_pages_that_are_forgotten_give_their_copies_back():
    """The next page that begins takes one of theirs."""
    engine = prepared()
    forgotten = engine.seqs[0].pages
    engine.full_precision.forget(torch.tensor(forgotten))
    for page in forgotten:
        engine.pool.lose(page)
    assert sorted(engine.full_precision.owner[:-1].tolist()) == sorted(
        [-1] * (len(engine.pool.stamp) - len(engine.pool.copies)) + [*engine.pool.copies]
    )
    assert engine.full_precision.stamp[:-1].tolist() == engine.pool.stamp
    assert engine.step([1, 1]) == [set(), rule(95, 16, 40)]


def test_pages_that_come_back_as_they_were_are_believed():
    """Stored to another place and loaded again: the same bytes in the same page."""
    engine = prepared()
    for cache in engine.caches:
        kept = cache.pages.buffer.clone()
        cache.pages.buffer.random_(0, 256)
        cache.pages.buffer.copy_(kept)
    assert engine.step([1, 1]) == [rule(75, 16, 40), rule(95, 16, 40)]


def test_without_copies_the_very_numbers_of_the_format():
    """As after everything was lost. Tokens that are not stored again begin no page, not even the first of one."""
    engine = Engine(seqs=2)
    engine.step([49, 75])
    engine.full_precision.clear()
    engine.pool.copies.clear()
    plain = engine.pages
    seen = []
    for exact in (True, False):
        table = torch.tensor([(s.pages + [0] * 5)[:5] for s in engine.seqs], dtype=torch.int32)
        lens, starts = torch.tensor([49, 75], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
        step = engine.new_step(2, 2)
        engine.full_precision.advance(table, lens, starts, torch.full((2,), -1), step)
        attend = prepare_attend(block_table=table, seq_lens=lens, max_query_len=1, full_precision=step if exact else None)
        q = torch.randn(2, 4, D, generator=torch.Generator().manual_seed(0))
        seen.append(attend(engine.caches[-1] if exact else plain, q, return_lse=True))
    assert (engine.full_precision.copy_of == -1).all()
    assert torch.equal(seen[0][0], seen[1][0]) and torch.equal(seen[0][1], seen[1][1])


STATES = [  # sink, recent, tokens of a page, format
    (16, 24, 16, "levels4"),
    (20, 3, 16, "int4"),
    (0, 40, 16, "none"),
    (16, 0, 32, "tq3"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, which takes CPU tensors, is for where there is no GPU")
@pytest.mark.parametrize(("sink", "recent", "size", "fmt"), STATES)
def test_kernels_do_what_the_operations_do(sink, recent, size, fmt, monkeypatch):
    """All that they leave behind, after random steps over random pages: more sequences than the pool has room for, shared pages, pages
    overwritten, padding, rows without a slot."""
    kernels = pytest.importorskip("quantkv.implementations.triton.copies")
    generator = torch.Generator().manual_seed(sink + recent)
    spec, tokens = get_format(fmt, torch.bfloat16).cache_spec(2, 32, block_size=size), FullPrecisionTokens(sink, recent)
    pages, seqs, width = PagedCache(spec, 40), 5, 7
    both = [CopiedPages(tokens, size, 2, 40) for _ in range(2)]
    steps = [FullPrecisionStep(tokens, size, seqs + 2, 100, pages.device) for _ in range(2)]
    for copied in both:
        copied.watch(pages)

    def integers(high, *shape, low=0):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    table = torch.randperm(40, generator=generator)[: seqs * width].view(seqs, width).int()
    table[1, :2] = table[0, :2]
    length, granted, doubted, put = torch.tensor([0, 40, 0, 9, 0], dtype=torch.int32), 0, [], CopiedPages._put
    monkeypatch.setattr(
        CopiedPages,
        "_put",
        lambda self, where, *to, **of: (
            doubted.append(int(where.sum()) * (of.get("owner") == -1 if of else False)),
            put(self, where, *to, **of),
        ),
    )
    for turn in range(14):
        new = torch.where(integers(3, seqs) == 0, integers(30, seqs), integers(2, seqs))
        length = torch.where(length + new > width * size, 0, length)
        length[1] = length[1].clamp_min(2 * size)  # who shares pages does not write to them
        ends = torch.cat([new.new_zeros(1), new.cumsum(0)]).int()
        length = length + new
        slots = [int(table[i, at // size]) * size + at % size for i in range(seqs) for at in range(int(length[i] - new[i]), int(length[i]))]
        slots = torch.tensor(slots, dtype=(torch.int64, torch.int32)[turn % 2])
        slots[integers(8, len(slots)) == 0] = -1
        some = seqs - turn % 2  # a part of the sequences that there is room for
        for copied, step, module in zip(both, steps, (None, kernels)):
            monkeypatch.setattr(copies, "kernels_of", lambda *given, found=module: found)
            part = step.part(some)
            copied.advance(table[:some], torch.stack([length, table[:, 0]], 1)[:some, 0], ends[: some + 1], slots[: int(ends[some])], part)
        granted += int((both[0].owner >= 0).sum())
        for name in ("now", "owner", "stamp", "copy_of"):  # but for the last entries, which nobody reads
            assert torch.equal(*(getattr(copied, name).view(-1)[: -1 if name != "now" else None] for copied in both)), (turn, name)
        for name in ("slots", "between", "recent", "sink", "joined"):
            for a, b in zip(*(t if isinstance(t, tuple) else (t,) for step in steps if (t := getattr(step, name)) is not None)):
                assert torch.equal(a, b), (turn, name)
        stored = slots >= 0
        key = torch.randn(len(slots), 2, 32, generator=generator).bfloat16()
        pages.write(key[stored], key[stored], slots[stored])
        for copied, step, module in zip(both, steps, (None, kernels)):
            monkeypatch.setattr(copies, "kernels_of", lambda *given, found=module: found)
            copied.note(slots[: int(ends[some])], step)
        kept = [copied.copies[:-1].clone() for copied in both]
        assert torch.equal(*kept), turn
        for copied, step, before, module in zip(
            both, steps, kept, (None, kernels)
        ):  # without a slot nothing was stored, whatever a step says
            monkeypatch.setattr(copies, "kernels_of", lambda *given, found=module: found)
            copied.note(torch.full_like(slots, -1), step)
            assert torch.equal(copied.copies[:-1], before), turn
        if turn % 4 == 1:
            pages.buffer[both[0].owner[:-1].clamp_min(0)] ^= 1  # somebody else has taken them
    assert granted > 10 and sum(doubted) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, which takes CPU tensors, is for where there is no GPU")
def test_triton_reads_the_same():
    pytest.importorskip("triton")
    engine = Engine(fmt="int4", seqs=2, layers=1, implementation="triton")
    for counts in ([40, 21], [1, 1], [3, 20], [1, 1], [17, 1]):
        engine.step(counts)
    engine.step([9, 2])


def test_prompts_by_the_dense_path():
    """Long chunks, of which the queries come before, in and after what is exact."""
    engine = Engine(seqs=1, implementation="prefill")
    for count in (130, 128, 141):
        assert engine.step([count]) == [rule(len(engine.seqs[0]), 16, 24)]
    engine.overwrite(0, 0)
    engine.pool.lose(engine.seqs[0].pages[0])
    assert engine.step([128]) == [rule(527, 16, 24) - set(range(16))]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", ["int4", "tq3", "int8"])
def test_hopper_takes_both_layouts(name, apart):
    """Types, strides and shapes of what `CopiedPages` fills, for a part of the sequences that it has room for."""
    pages = PagedCache(get_format(name).cache_spec(2, 128), 4)
    exact = CopiedPages(FullPrecisionTokens(16, 24), 16, 5, 4)
    cache = CacheWithCopies(pages, cache_of_copies(pages, exact.num_copies, torch.bfloat16), exact)
    step = FullPrecisionStep(exact.tokens, 16, 5, 5, pages.device).part(3)
    segments = cache.segments(torch.zeros(3, 4, dtype=torch.int32), step, apart)
    assert len(segments) == 2 + apart
    batch = Batch.of(None, torch.ones(3, dtype=torch.int32))
    assert hopper._unsupported(AttendCall(torch.zeros(3, 8, 128, dtype=torch.bfloat16), segments, batch)) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("engine", [Engine, Captured])
def test_on_a_gpu_and_in_a_graph(engine):
    """Sequences that end and begin anew between replays; pages that somebody overwrites."""
    engine = engine(seqs=3, room=2, layers=2, device="cuda")
    engine.step([40, 21, 70])
    for i in range(80):
        if i % 23 == 22:
            engine.drop(i % 3)
            engine.step([33 * (i % 3 == s) for s in range(3)])
        if i % 17 == 16:
            engine.overwrite(1, 0)
            engine.pool.lose(engine.seqs[1].pages[0])
        engine.step([1, 1, 1])


def test_refused():
    engine = Engine(seqs=1)
    cache, rows, slots = engine.caches[0], torch.zeros(1, HEADS, D), torch.zeros(1, dtype=torch.int64)
    before = [t.clone() for t in (cache.pages.buffer, cache.copies.buffer)]
    with pytest.raises(ValueError, match="full_precision=None"):
        prepare_write(slots)(cache, rows, rows)
    assert all(map(torch.equal, before, (cache.pages.buffer, cache.copies.buffer)))
    lens, table = torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="key_start and key_range"):
        prepare_attend(block_table=table, seq_lens=lens, full_precision=engine.new_step(1, 1), key_start=lens)
    other = PagedCache(get_format("int4").cache_spec(HEADS, D, block_size=32), 2)
    with pytest.raises(ValueError, match=r"copies\.spec"):
        CacheWithCopies(other, cache_of_copies(engine.pages, 2, torch.float32), engine.full_precision)


def test_a_cache_with_copies_can_be_read_without_them():
    engine = Engine(seqs=1)
    engine.step([60])
    q = torch.randn(1, 4, D)
    table = torch.tensor([engine.seqs[0].pages], dtype=torch.int32)
    given = {"block_table": table, "seq_lens": torch.tensor([60], dtype=torch.int32)}
    assert torch.equal(prepare_attend(**given)(engine.caches[0], q), engine.pages.attend(q, **given))


def test_copies_that_do_not_fit_are_refused():
    """Too few copies, or page numbers of pages of another size, would be read as something else, on a GPU beyond the memory."""
    pages, tokens = PagedCache(get_format("int4").cache_spec(HEADS, D), 4), FullPrecisionTokens(16, 24)
    copied = CopiedPages(tokens, 16, 2, 4)
    with pytest.raises(ValueError, match=f"copies.num_blocks=2: at least full_precision.num_copies={copied.num_copies} pages"):
        CacheWithCopies(pages, cache_of_copies(pages, 2, torch.float32), copied)
    copies = cache_of_copies(pages, copied.num_copies, torch.float32)
    wide = CopiedPages(tokens, 32, 2, 4)
    for call in (lambda: CacheWithCopies(pages, copies, wide), lambda: wide.watch(pages)):
        with pytest.raises(ValueError, match=r"pages.spec.block_size=16: full_precision has pages of 32 tokens"):
            call()
    assert wide.watched is None
    cache = CacheWithCopies(pages, copies, copied)
    table, lens, ends = torch.tensor([[0, 1], [2, 3]]), torch.tensor([20, 3]), torch.tensor([0, 1, 2])
    device = torch.device("cpu")
    for step in (FullPrecisionStep(tokens, 32, 2, 2, device), FullPrecisionStep(FullPrecisionTokens(16, 40), 16, 2, 2, device)):
        with pytest.raises(ValueError, match=r"step=of Full.* in pages of \d+: one of .* in pages of 16 is needed"):
            prepare_attend(block_table=table, seq_lens=lens, full_precision=step.part(2))(cache, torch.zeros(2, HEADS, D))
        with pytest.raises(ValueError, match=r"step=of"):
            copied.advance(table, lens, ends, torch.tensor([19, 34]), step)
    state, step, slots = copied.state.clone(), FullPrecisionStep(tokens, 16, 2, 2, device), torch.tensor([19, 34])
    for name, given in (
        ("seq_lens.shape=\\(1,\\)", (table, lens[:1], ends, slots)),
        ("cu_seqlens_q.shape=\\(2,\\)", (table, lens, ends[:2], slots)),
        ("block_table.dtype=torch.float32", (table.float(), lens, ends, slots)),
        ("slot_mapping.shape\\[0\\]=3: step has room for 2", (table, lens, ends, torch.arange(3))),
    ):
        with pytest.raises(ValueError, match=name):
            copied.advance(*given, step)
    assert torch.equal(copied.state, state)
    for name, given in (("tokens=str", ("x", 16, 1)), ("block_size=0", (tokens, 0, 1)), ("num_seqs=-1", (tokens, 16, -1))):
        with pytest.raises(ValueError, match=name):
            CopiedPages(*given)
        with pytest.raises(ValueError, match=name):
            FullPrecisionStep(*given, 1, device)
    with pytest.raises(ValueError, match="device='gpu'"):
        CopiedPages(tokens, 16, 1, 4, "gpu")
