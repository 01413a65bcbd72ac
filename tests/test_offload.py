"""Pages that go to host memory and come back: what arrives, what is refused, and in which orders the copies may run."""

import itertools
import random

import pytest
import torch

from quantkv import PagedCache, PageStore, get_format, offload

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGES = 12


def cache_of(name="int4", blocks=PAGES, heads=2, d=32, device=DEVICE, seed=0, **kwargs):
    cache = PagedCache(get_format(name).cache_spec(heads, d), blocks, device, **kwargs)
    cache.buffer.random_(generator=torch.Generator(device).manual_seed(seed))
    return cache


def layers():
    """Layers of two formats, one of them in memory that an engine strides."""
    spec = get_format("int8").cache_spec(2, 32)
    memory = torch.zeros(2, PAGES, 3, spec.page_bytes, dtype=torch.uint8, device=DEVICE)
    return [cache_of("int4", seed=1), PagedCache.wrap(memory[:, :, 1].transpose(0, 1).random_(), spec), cache_of("tq3", seed=3)]


def test_pages_go_and_return_to_other_places():
    caches = layers()
    before = [cache.buffer.clone() for cache in caches]
    store = PageStore(caches, 5)
    stored = store.store([3, 9, 4, 0])
    stored.wait()
    for cache in caches:
        cache.buffer[[3, 9, 4, 0]] = 0
    assert store.room == 1
    transfer = store.load(stored, [9, 1, 0, 11])
    transfer.synchronize()
    assert transfer.done and stored.done
    for cache, held in zip(caches, before):
        expected = held.clone()
        expected[[3, 4]] = 0
        expected[[9, 1, 0, 11]] = held[[3, 9, 4, 0]]
        assert torch.equal(cache.buffer, expected)
    store.release(stored)
    assert store.room == 5


def test_buffers_are_moved_as_the_widest_numbers_that_fit():
    """Sizes, strides, the first byte and the address are multiples of them."""
    memory = torch.zeros(4096, dtype=torch.uint8)
    for size, row, offset, expected in (
        (64, 64, 0, torch.complex128),
        (64, 72, 0, torch.int64),
        (64, 64, 4, torch.int32),
        (6, 64, 0, torch.int16),
        (64, 65, 0, torch.uint8),
        (64, 64, 1, torch.uint8),
    ):
        buffer = memory.as_strided((3, 2, size), (2 * row, row, 1), offset)
        found = offload.wide(buffer)
        assert found.dtype == expected and found.data_ptr() == buffer.data_ptr() and found.shape[:2] == (3, 2)
        assert found.shape[2] * found.itemsize == size
    assert offload.wide(memory.as_strided((3, 16), (64, 2))).dtype == torch.uint8


def test_runs_are_neighbours_among_places():
    assert offload.runs([]) == []
    assert offload.runs([4]) == [(0, 1)]
    assert offload.runs([0, 1, 2, 5, 6, 9, 8]) == [(0, 3), (3, 5), (5, 6), (6, 7)]


@pytest.mark.parametrize("caches", [None, 3, [None], [torch.zeros(4, 2, 64)]], ids=["none", "number", "no cache", "tensor"])
def test_what_is_no_cache_is_refused(caches):
    with pytest.raises(ValueError, match="caches="):
        PageStore(caches, 1)


@pytest.mark.parametrize("chunk_pages", [1, 2, 3, 100])
def test_what_is_larger_than_the_scratch_goes_in_parts(monkeypatch, chunk_pages):
    """The host's places are no run: two of five were given back in between."""
    cache = cache_of()
    monkeypatch.setattr(offload, "CHUNK_BYTES", chunk_pages * cache.spec.block_bytes + 7)
    store, before = PageStore([cache], 8), cache.buffer.clone()
    handles = [store.store([page]) for page in range(5)]
    store.release(handles[1])
    store.release(handles[3])
    stored = store.store([11, 10, 9, 8, 7])
    assert stored.pages == [1, 3, 5, 6, 7]
    stored.wait()
    cache.buffer.zero_()
    store.load(stored, [0, 1, 2, 3, 4]).wait()
    store.load(handles[4], [5]).wait()
    assert torch.equal(cache.buffer[:6], before[[11, 10, 9, 8, 7, 4]]) and not cache.buffer[6:].any()


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 24])
def test_one_page_of_the_largest_layer_always_fits(monkeypatch, chunk_bytes):
    """A store of one page, and scratch memory that holds less: the layers' pages are 1 to 8 times as large as the smallest's."""
    monkeypatch.setattr(offload, "CHUNK_BYTES", chunk_bytes)
    caches = [cache_of("int2", seed=1), cache_of("fp32", seed=2), cache_of("int4", heads=1, seed=3)]
    sizes = [cache.spec.block_bytes for cache in caches]
    assert sizes[1] == max(sizes) > 4 * min(sizes)
    before, store = [cache.buffer.clone() for cache in caches], PageStore(caches, 1)
    store.load(store.store([7]), [2]).synchronize()
    for cache, held in zip(caches, before):
        held[2] = held[7]
        assert torch.equal(cache.buffer, held)


def test_attention_and_page_files_of_what_is_stored(tmp_path):
    """The host's copy is a cache as any other: it is attended to and saved where it lies."""
    cache = PagedCache(get_format("int4").cache_spec(2, 32), PAGES, DEVICE, k_scale=1.0)
    key, value = torch.randn(2, 40, 2, 32, device=DEVICE)
    cache.write(key, value, torch.arange(40, device=DEVICE) + 16)
    q = torch.randn(1, 4, 32, device=DEVICE)

    def answer(where, pages):
        table, lens = (torch.tensor(n, dtype=torch.int32, device=where.device) for n in ([pages], [40]))
        return where.attend(q.to(where.device), block_table=table, seq_lens=lens, implementation="reference").cpu()

    store = PageStore([cache], 6)
    store.store([0])
    stored = store.store([1, 2, 3])
    stored.synchronize()
    expected = answer(cache, [1, 2, 3])
    torch.testing.assert_close(answer(store.host[0], stored.pages), expected, rtol=1e-5, atol=1e-5)
    store.host[0].save(tmp_path / "pages", stored.pages)
    cache.buffer.zero_()
    cache.load(tmp_path / "pages", [7, 8, 9])
    assert torch.equal(answer(cache, [7, 8, 9]), expected)


def test_a_damaged_page_is_found_and_nothing_is_loaded():
    caches = layers()
    store = PageStore(caches, 4, checksums=True)
    stored = store.store([1, 2, 3])
    stored.wait()
    store.load(stored, [4, 5, 6]).synchronize()
    stored.synchronize()
    before = [cache.buffer.clone() for cache in caches]
    for layer, host in enumerate(store.host):
        byte = host.buffer[stored.pages[1]].view(-1)[77:78]
        byte.bitwise_xor_(16)
        with pytest.raises(ValueError, match=f"stored=layer {layer}, page 1: damaged: checksum 0x.*when it was stored"):
            store.load(stored, [7, 8, 9])
        byte.bitwise_xor_(16)
    assert all(torch.equal(cache.buffer, held) for cache, held in zip(caches, before))
    store.load(stored, [7, 8, 9]).synchronize()
    assert all(torch.equal(cache.buffer[[7, 8, 9]], cache.buffer[[4, 5, 6]]) for cache in caches)


def test_what_is_wrong_is_refused_and_changes_nothing():
    cache = cache_of()
    store, other = PageStore([cache], 3), PageStore([cache], 3)
    stored, before = store.store([0, 1]), cache.buffer.clone()
    for call, match in (
        (lambda: store.store([2, 3]), "pages=2: the store has room for 1"),
        (lambda: store.store([12]), r"pages=12: values lie in 0\.\.11"),
        (lambda: store.store([2, 2]), "pages=2: repeated"),
        (lambda: store.load(stored, [5]), "pages=1: 2 are stored"),
        (lambda: store.load(stored, [5, 5]), "pages=5: repeated"),
        (lambda: other.load(stored, [5, 6]), "stored=.*of this store"),
        (lambda: other.release(stored), "stored=.*of this store"),
        (lambda: store.load([0, 1], [5, 6]), "stored=.*of this store"),
        (lambda: PageStore([], 3), "caches="),
        (lambda: PageStore([cache, cache_of(blocks=3)], 3), "caches=.*one number of pages"),
        (lambda: PageStore([cache], 0), "num_pages=0"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    assert store.room == 1 and other.room == 3 and torch.equal(cache.buffer, before)
    store.release(stored)
    for call in (store.release, lambda s: store.load(s, [5, 6])):
        with pytest.raises(ValueError, match="was not released"):
            call(stored)


# ---- every order in which streams may run


class AnyOrder(offload._Lanes):
    """Streams of a GPU, emulated: each runs its work in order and when the events that it waits for have come, in no other order but that
    which `choose` picks. Work of the current stream ("compute") is given by `put`."""

    def __init__(self, seed):
        super().__init__(torch.device("cpu"))
        self.choose = random.Random(seed)
        self.lanes = {lane: [] for lane in ("compute", *((way, stream) for way in ("store", "load") for stream in range(2)))}
        self.ended = set()
        self.count = 0

    def give(self, lane, stream, after, work):
        return self.put((lane, stream), after, work)

    def put(self, lane, after, work):
        self.count += 1
        self.lanes[lane].append((self.count, [event for event in after if event is not None], work))
        return self.count

    def mark(self):
        return self.lanes["compute"][-1][0] if self.lanes["compute"] else None

    def wait(self, event):
        self.put("compute", [event], lambda: None)

    def done(self, event):
        return event in self.ended

    def synchronize(self, event):
        while event not in self.ended:
            self.step()

    def step(self):
        ready = [lane for lane in self.lanes.values() if lane and self.ended.issuperset(lane[0][1])]
        if ready:
            number, _, work = self.choose.choice(ready).pop(0)
            work()
            self.ended.add(number)
        return bool(ready)


def run_scenario(seed, steps=60):
    """Sequences that are written, stored, loaded elsewhere, read and given up, at random; every read is checked when it runs."""
    lanes, choose = AnyOrder(seed), random.Random(seed + 1)
    cache = cache_of("int4", blocks=6, heads=1, device="cpu")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(offload, "_lanes_of", lambda device: lanes)
        patched.setattr(offload, "CHUNK_BYTES", 1)  # a page goes at a time, through two scratches
        store = PageStore([cache], 5)
    free, resident, away, content, arriving, leaving, kept, reads = set(range(6)), {}, {}, {}, {}, [], [], []

    def check(pages, expected):
        reads.append(len(pages))
        assert torch.equal(cache.buffer[pages], expected)

    for step in range(steps):
        kind = choose.choice(["new", "write", "read", "out", "in", "drop", "drop", "run"])
        if kind == "new" and len(free) >= 2:
            pages = choose.sample(sorted(free), choose.randint(1, 2))
            free -= set(pages)
            for stored in leaving:
                stored.wait()  # a page that is still being stored may be among them
            leaving.clear()
            resident[step] = pages
            content[step] = torch.full((len(pages), *cache.buffer.shape[1:]), step, dtype=torch.uint8)
            lanes.put("compute", [], lambda pages=pages, data=content[step]: cache.buffer.__setitem__(pages, data))
        elif kind in ("write", "read", "out") and resident:
            name = choose.choice(sorted(resident))
            pages = resident[name]
            if kind != "out" and name in arriving:
                arriving.pop(name).wait()
            if kind == "write":
                content[name] = content[name] + 64
                lanes.put("compute", [], lambda pages=pages, data=content[name]: cache.buffer.__setitem__(pages, data))
            elif kind == "read":
                lanes.put("compute", [], lambda pages=pages, data=content[name]: check(pages, data))
            elif store.room >= len(pages):
                away[name] = len(pages), store.store(pages)
                leaving.append(away[name][1])
                arriving.pop(name, None)  # a store waits for loads into its pages by itself
                free |= set(resident.pop(name))
        elif kind == "in" and away:
            name = choose.choice(sorted(away))
            size, stored = away[name]
            if len(free) >= size:
                pages = choose.sample(sorted(free), size)  # among them, perhaps, some that are still being stored
                free -= set(pages)
                transfer = store.load(stored, pages)
                del away[name]
                if choose.random() < 0.5:
                    store.release(stored)  # at once: the load is under way
                else:
                    kept.append(stored)
                resident[name], arriving[name] = pages, transfer
        elif kind == "drop" and resident and choose.random() < 0.3:
            name = choose.choice(sorted(resident))
            if name in arriving:
                arriving.pop(name).wait()
            free |= set(resident.pop(name))
        else:
            if kept:
                store.release(kept.pop())
            for _ in range(choose.randint(0, 4)):
                lanes.step()
    for name, pages in resident.items():
        if name in arriving:
            arriving[name].wait()
        lanes.put("compute", [], lambda pages=pages, data=content[name]: check(pages, data))
    while lanes.step():
        pass
    assert not any(lanes.lanes.values())
    return len(reads)


def test_any_order_that_the_events_allow_gives_the_same():
    assert sum(run_scenario(seed) for seed in range(300)) > 2000


@pytest.mark.parametrize("missing", ["mark", "stored", "leaving", "stores under way", "loads under way", "first step", "scratch"])
def test_each_event_that_a_copy_waits_for_is_needed(monkeypatch, missing):
    """Without any one of them some order gives other bytes: the emulation finds what it is for."""
    if missing == "mark":
        monkeypatch.setattr(AnyOrder, "mark", lambda self: None)
    elif missing == "leaving":
        monkeypatch.setattr(PageStore, "release", released_at_once(PageStore.release))
    elif missing == "first step":
        give = AnyOrder.give
        monkeypatch.setattr(
            AnyOrder, "give", lambda self, lane, stream, after, work: give(self, lane, stream, after if stream == 0 else [], work)
        )
    elif missing == "scratch":
        monkeypatch.setattr(AnyOrder, "make_scratch", forgetful(AnyOrder.make_scratch))
    elif missing == "stored":
        monkeypatch.setattr(AnyOrder, "run", without_its_store(AnyOrder.run))
    else:
        lane = missing.removesuffix("s under way")
        users = PageStore._users
        monkeypatch.setattr(PageStore, "_users", lambda self, name, pages: [] if name == lane else users(self, name, pages))
    with pytest.raises(AssertionError):
        for seed in range(300):
            run_scenario(seed)


def released_at_once(release):
    def call(self, stored):
        release(self, stored)
        self._leaving = []

    return call


def forgetful(make_scratch):
    """Until when the last chunk is in a scratch is not kept."""

    class Held(list):
        def __setitem__(self, index, event):
            pass

    def call(self, size):
        make_scratch(self, size)
        self._scratch = {lane: itertools.cycle([Held(next(held)) for _ in range(2)]) for lane, held in self._scratch.items()}

    return call


def without_its_store(run):
    def call(self, lane, after, copy):
        after = list(after)
        return run(self, lane, after[:1] + after[2:] if lane == "load" else after, copy)

    return call


def test_options_are_true_or_false():
    """A word such as "no" would be taken for True."""
    caches = [PagedCache(get_format("int4").cache_spec(1, 64), 2)]
    with pytest.raises(ValueError, match=r"^checksums=str: True or False"):
        PageStore(caches, 2, checksums="no")
    with pytest.raises(ValueError, match=r"^up_to_damage=str: True or False"):
        PageStore(caches, 2).read("there is no file", up_to_damage="no")
