"""What a `PageStore` saves: read by another process after the first was killed, on disks that are full, cut or damaged."""

import hashlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantkv import LayerMaps, LinearMap, PagedCache, PageStore, get_format
from quantkv.page_meaning import PageMeaning

resource = pytest.importorskip("resource")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE, HEADS, BLOCK, BLOCKS = 32, 2, 16, 12
FORMATS = ("int4", "levels4", "int8")  # of the layers


def rows(seed, length):
    return torch.randn(2, length, HEADS, SIZE, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def model(blocks=BLOCKS, formats=FORMATS, **more):
    return [PagedCache(get_format(name).cache_spec(HEADS, SIZE, block_size=BLOCK), blocks, DEVICE, **more) for name in formats]


def write(caches, pages, length, first=0):
    """Tokens `first` to before `length` of the sequence that lies in `pages`."""
    at = torch.arange(first, length, device=DEVICE)
    slots = torch.tensor(pages, device=DEVICE)[at // BLOCK] * BLOCK + at % BLOCK
    for seed, cache in enumerate(caches):
        key, value = rows(seed, length)[:, first:]
        cache.write(key, value, slots)


def answers(caches, pages, length):
    """One decoding step of each layer, output and log-sum-exp; by the reference: numba's code is another in a process that compiles it than
    in one that loads it, in the last bits."""
    q = torch.randn(1, 4, SIZE, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    table, lens = (torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in ([pages], [length]))
    how = {"block_table": table, "seq_lens": lens, "return_lse": True, "implementation": "reference"}
    return [t.cpu() for cache in caches for t in cache.attend(q, **how)]


def equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def saved(length=70, pages=(3, 7, 1, 0, 11), file=None, **more):
    """Caches with a sequence, and the file of it."""
    caches, file = model(), io.BytesIO() if file is None else file
    write(caches, pages, length)
    store = PageStore(caches, len(pages), **more)
    store.save(store.store(pages), file)
    return caches, answers(caches, pages, length), file


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("way", ["path", "stream"])
def test_what_was_saved_is_read_into_other_places_and_decodes_the_same(tmp_path, checksums, way):
    _, expected, file = saved(file=tmp_path / "prefix" if way == "path" else None, checksums=checksums)
    caches = model()
    store = PageStore(caches, 8, checksums=checksums)
    first = store.store([0, 1])  # places of the host that are taken
    if way == "stream":
        file.write(b"what follows")
        file.seek(0)
    stored = store.read(file)
    assert stored.pages == [2, 3, 4, 5, 6] and store.room == 1
    if way == "stream":
        assert file.read() == b"what follows"
    for pages in ([5, 2, 8, 4, 6], [9, 10, 0, 1, 3]):
        store.load(stored, pages).wait()
        assert equal(answers(caches, pages, 70), expected)
    store.release(first)
    store.release(stored)
    assert store.room == 8


def test_it_is_a_page_file_of_each_layer(tmp_path):
    """Without a store, too: each cache takes its own from the stream, and nothing is left."""
    _, expected, file = saved()
    file.seek(0)
    others = model()
    for cache in others:
        cache.load(file, [5, 4, 3, 2, 1])
    assert file.read() == b"" and equal(answers(others, [5, 4, 3, 2, 1], 70), expected)


def test_checksums_go_along_from_the_store_to_the_disk_and_back():
    """A byte that changes on the host is found by whoever handles it next: by `save`, or by `load` after `read`."""
    caches, _, file = saved(checksums=True)
    store = PageStore(caches, 10, checksums=True)
    stored = store.store([3, 7])
    store.save(stored, io.BytesIO())  # the checksums are there now
    store.host[1].buffer[stored.pages[1]].view(-1)[5] ^= 1
    with pytest.raises(ValueError, match=r"stored page=1: damaged: checksum 0x[0-9a-f]{8}, 0x[0-9a-f]{8} when it was stored"):
        store.save(stored, io.BytesIO())
    file.seek(0)
    again = store.read(file)
    store.host[2].buffer[again.pages[3]].view(-1)[5] ^= 1
    with pytest.raises(ValueError, match="stored=layer 2, page 3: damaged"):
        store.load(again, [0, 1, 2, 4, 5])


# ---- processes that are killed

KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import test_saved_store as own
from quantkv import page_file
{before}
caches, expected, _ = own.saved(length={length}, pages={pages}, file={file!r}, checksums=True)
print(own.summary(expected), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def summary(tensors):
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def killed(file, length=70, pages=(3, 7, 1, 0, 11), before=""):
    """What a process printed that saved a sequence and was killed."""
    code = KILLED.format(tests=str(Path(__file__).parent), before=before, length=length, pages=pages, file=str(file))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return ended.stdout.strip()


def read_here(file, length, count, blocks=BLOCKS):
    """Of a saved sequence, decoded in this process."""
    caches = model(blocks)
    store = PageStore(caches, count, checksums=True)
    stored = store.read(file)
    pages = list(range(blocks - count, blocks))[::-1]
    store.load(stored, pages).wait()
    return answers(caches, pages, length)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal")
def test_a_prefix_of_100_000_tokens_outlives_the_process_that_computed_it(tmp_path):
    length, count = 100_000, 6_250
    pages = f"list(range({count}, 0, -1))"
    told = killed(
        tmp_path / "prefix", length, pages, before=f"own.BLOCKS, own.model.__defaults__ = {count + 1}, ({count + 1}, own.FORMATS)"
    )
    assert summary(read_here(tmp_path / "prefix", length, count, count + 2)) == told
    assert os.listdir(tmp_path) == ["prefix"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal")
@pytest.mark.parametrize("older", [False, True])
def test_a_process_that_is_killed_while_it_saves_leaves_the_old_file_or_none(tmp_path, older):
    """By SIGKILL, before one of its writes: there are three a layer."""
    file = tmp_path / "prefix"
    before = """
count, stock = 0, page_file._write_whole
def write(*args):
    global count
    count += 1
    if count == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
    stock(*args)
page_file._write_whole = write
"""
    expected = saved(40, [2, 1, 0], file)[1] if older else None
    for step in (5,) if older else (1, 9):
        assert killed(file, before=before.format(step=step)) == ""
        assert os.listdir(tmp_path) == ([file.name] if older else [])
        if older:
            assert equal(read_here(file, 40, 3), expected)
    if older:
        told = killed(file, before=before.format(step=10))  # there is no tenth: it is killed when it has saved
        assert told == summary(read_here(file, 70, 5)) and os.listdir(tmp_path) == [file.name]


# ---- disks


@pytest.mark.parametrize("older", [False, True])
def test_a_full_disk_changes_nothing(tmp_path, older):
    """A file may end at any byte: here the system itself refuses more (RLIMIT_FSIZE)."""
    file = tmp_path / "prefix"
    expected = saved(40, [2, 1, 0], file)[1] if older else None
    caches = model()
    write(caches, [3, 7, 1, 0, 11], 70)
    store = PageStore(caches, 5, checksums=True)
    stored, whole = store.store([3, 7, 1, 0, 11]), io.BytesIO()
    store.save(stored, whole)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = len(whole.getvalue())
    for room in range(0, size, size // 40):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                store.save(stored, file)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert os.listdir(tmp_path) == ([file.name] if older else [])
        if older:
            assert equal(read_here(file, 40, 3), expected)
    store.save(stored, file)  # nothing was lost: it is stored still
    assert file.read_bytes() == whole.getvalue()


def parts(data):
    """Where the header, the pages and the checksums of each layer begin, and where the last of them ends."""
    at, found = 0, []
    for cache in model(1):
        header = 8 + int.from_bytes(data[at : at + 8], "little")
        pages, sums = 5 * cache.spec.block_bytes, 5 * 8
        found.append((at, at + header, at + header + pages, at + header + pages + sums))
        at = found[-1][-1]
    assert at == len(data)
    return found


def test_every_flipped_byte_is_refused_or_recomputed():
    """In the bytes of pages: all before the page is kept, and the rest, computed again, decodes the same. In all else: refused."""
    _, expected, file = saved()
    data, pages = file.getvalue(), [4, 2, 9, 8, 0]
    first_page_after = {}
    for layer, (header, records, sums, end) in enumerate(parts(data)):
        for at in (*range(header, records, 29), *range(records, sums, 197), *range(sums, end, 3)):
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 8
            store = PageStore(model(), 5, checksums=at % 2 == 0)
            with pytest.raises(ValueError, match=f"BytesIO: layer {layer}: "):
                store.read(io.BytesIO(flipped))
            assert store.room == 5 and not any(cache.buffer.any() for cache in store.caches)
            if at < records:
                with pytest.raises(ValueError, match=f"BytesIO: layer {layer}: "):
                    store.read(io.BytesIO(flipped), up_to_damage=True)
                continue
            damaged = (at - records) * 5 // (sums - records) if at < sums else (at - sums) // 8
            stored = store.read(io.BytesIO(flipped), up_to_damage=True)
            assert len(stored.pages) == damaged and store.room == 5 - damaged
            first_page_after[layer, damaged] = store, stored
    assert len(first_page_after) == 15
    for store, stored in first_page_after.values():
        kept = len(stored.pages)
        store.load(stored, pages[:kept]).wait()
        write(store.caches, pages, 70, first=BLOCK * kept)
        assert equal(answers(store.caches, pages, 70), expected)


def test_damage_in_several_layers_keeps_what_is_whole_in_all():
    _, _, file = saved()
    data = bytearray(file.getvalue())
    for (_, records, sums, _), page in zip(parts(data), (3, 1, 2)):
        data[records + page * (sums - records) // 5] ^= 1
    store = PageStore(model(), 5)
    assert len(store.read(io.BytesIO(data), up_to_damage=True).pages) == 1 and store.room == 4
    with pytest.raises(ValueError, match="layer 0: page=3: damaged"):
        PageStore(model(), 5).read(io.BytesIO(data))


@pytest.mark.parametrize("up_to_damage", [False, True])
def test_a_half_written_file_is_refused(tmp_path, up_to_damage):
    _, _, file = saved()
    data, path = file.getvalue(), tmp_path / "prefix"
    store = PageStore(model(), 5)
    edges = {at + d for layer in parts(data) for at in layer for d in (-1, 0, 1)}
    for size in sorted({n for n in edges if 0 <= n < len(data)} | set(range(0, len(data), 997))):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=re.escape(f"{path}: layer ") + "[012]: .*cut"):
            store.read(path, up_to_damage=up_to_damage)
        assert store.room == 5
    path.write_bytes(data + b"\0")
    with pytest.raises(ValueError, match=r"size=.*: cut or changed: 1 bytes follow the pages of 3 layers"):
        store.read(path, up_to_damage=up_to_damage)


# ---- what does not fit


TURN = LinearMap(torch.eye(SIZE).roll(1, 0)[None], torch.eye(SIZE).roll(1, 0).mT[None])


@pytest.mark.parametrize(
    "caches, layer, said",
    [
        (lambda: model(formats=("int8", *FORMATS[1:])), 0, "spec={'format': 'int4'.*needs {'format': 'int8'"),
        (lambda: model(formats=FORMATS[::-1]), 0, "spec={'format': 'int4'.*needs {'format': 'int8'"),
        (lambda: model(formats=(*FORMATS[:2], "int4")), 2, "spec={'format': 'int8'.*needs {'format': 'int4'"),
        (lambda: model(k_scale=2.0), 0, r"scales=\[1.0, 1.0\]: this cache needs \[2.0, 1.0\]"),
        (lambda: [*model()[:2], *model(formats=("int8",), maps=LayerMaps(v=TURN))], 2, "maps=[0-9a-f]{16}: this cache needs [0-9a-f]{16}"),
    ],
)
def test_pages_of_another_meaning_are_refused_by_both_digests(caches, layer, said):
    theirs, _, file = saved()
    file.seek(0)
    ours = caches()
    store = PageStore(ours, 5)
    digests = [PageMeaning.of(side[layer]).digest for side in (theirs, ours)]
    with pytest.raises(ValueError, match=f"layer {layer}: {said}.*has the digest {digests[0]}, {digests[1]} is needed"):
        store.read(file, up_to_damage=True)
    assert store.room == 5


def test_other_numbers_of_pages_and_layers_are_refused(tmp_path):
    _, _, file = saved()
    with pytest.raises(ValueError, match="BytesIO: layer 0: pages=5: the store has room for 4"):
        PageStore(model(), 4).read(io.BytesIO(file.getvalue()))
    with pytest.raises(ValueError, match="BytesIO: layer 3: size=0 bytes: cut"):
        PageStore(model(formats=(*FORMATS, "int4")), 5).read(io.BytesIO(file.getvalue()))
    path = tmp_path / "prefix"
    path.write_bytes(file.getvalue())
    with pytest.raises(ValueError, match="bytes follow the pages of 2 layers"):
        PageStore(model(formats=FORMATS[:2]), 5).read(path)
    uneven = io.BytesIO()
    for cache, pages in zip(model(), ([0, 1], [0, 1], [0])):
        cache.save(uneven, pages)
    with pytest.raises(ValueError, match="layer 2: pages=1: the layers before it have 2"):
        PageStore(model(), 5).read(io.BytesIO(uneven.getvalue()))


def test_what_is_released_or_no_file_is_refused(tmp_path):
    store = PageStore(model(), 2)
    stored = store.store([0])
    for way in (lambda file: store.save(stored, file), store.read):
        with pytest.raises(ValueError, match="file=int: a path, or a file that is open in binary mode, is needed"):
            way(3)
    with pytest.raises(FileNotFoundError):
        store.read(tmp_path / "nowhere")
    store.release(stored)
    with pytest.raises(ValueError, match=r"stored=.*was not released, is needed"):
        store.save(stored, tmp_path / "prefix")
    assert os.listdir(tmp_path) == [] and store.room == 2


def test_places_that_a_load_still_reads_are_waited_for(monkeypatch):
    """A load from places that were released is under way: `read` may not write there before it has ended."""
    store = PageStore(model(), 5)
    waited = []
    monkeypatch.setattr(type(store._lanes), "synchronize", lambda self, event: waited.append(event))
    store._leaving = ["a load", "another"]
    _, _, file = saved()
    waited.clear()
    file.seek(0)
    store.read(file)
    assert waited[:2] == ["a load", "another"] and store._leaving == []
