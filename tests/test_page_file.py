"""Page files: what is read back, what is refused, and what a save that is killed leaves behind."""

import errno
import io
import json
import os
import stat
import struct
import subprocess
import sys
import zlib
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quantkv import LayerMaps, LinearMap, PagedCache, get_format, page_file, whole_file


def cache_of(name="int4", pages=6, d=64, heads=2, block_size=16, **kwargs):
    return PagedCache(get_format(name).cache_spec(heads, d, block_size=block_size), pages, **kwargs)


def filled(name="int4", pages=6, **kwargs):
    cache = cache_of(name, pages, **kwargs)
    cache.buffer.random_(generator=torch.Generator().manual_seed(0))
    return cache


def untouched(**kwargs):
    cache = cache_of(**kwargs)
    cache.buffer.fill_(3)
    return cache


def refused(cache, path, match, pages=None):
    with pytest.raises(ValueError, match=match):
        cache.load(path, pages)
    assert (cache.buffer == 3).all()


def rewritten(path, change):
    """The file with its metadata and tensors changed in place."""
    with safe_open(path, framework="pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(header, tensors)
    save_file(tensors, path, metadata=header)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pages.safetensors"


def test_save_and_load(path, format_name):
    cache, other = filled(format_name), cache_of(format_name, 9)
    cache.save(path, pages=[2, 0])
    other.load(path, pages=torch.tensor([7, 8]))
    assert torch.equal(other.buffer[7], cache.buffer[2]) and torch.equal(other.buffer[8], cache.buffer[0])
    assert not other.buffer[:7].any()
    cache.save(str(path))  # all pages, over the older file
    other.load(path)
    assert torch.equal(other.buffer[:6], cache.buffer)


def test_a_cache_larger_than_a_chunk_is_saved_whole(path, monkeypatch):
    monkeypatch.setattr(page_file, "CHUNK_BYTES", 2 * cache_of().spec.block_bytes + 1)
    cache, other = filled(pages=7), cache_of(pages=7)
    cache.save(path)
    other.load(path)
    assert torch.equal(other.buffer, cache.buffer)


def test_no_pages_are_a_file_too(path):
    filled().save(path, pages=[])
    refused(untouched(), path, "pages=1: .*holds 0 pages", pages=[0])
    cache = untouched()
    cache.load(path)
    assert (cache.buffer == 3).all()


def test_other_readers_of_safetensors_can_read_it(path):
    cache = filled()
    cache.save(path)
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor("pages"), cache.buffer)
        assert file.metadata()["version"] == "2" and json.loads(file.metadata()["spec"])["format"] == "int4"


# ---- what is damaged or foreign is refused, and nothing is changed


def tiny(**kwargs):
    """Two pages of 320 bytes: few enough that every bit of their file can be flipped."""
    return PagedCache(get_format("int4").cache_spec(1, 32, block_size=8), 2, **kwargs)


def tiny_file():
    """A file's bytes, where its parts begin, and a cache that must stay as it is."""
    cache, file = tiny(), io.BytesIO()
    cache.buffer.random_(generator=torch.Generator().manual_seed(0))
    cache.save(file)
    whole, untouched = file.getvalue(), tiny()
    untouched.buffer.fill_(3)
    pages = 8 + int.from_bytes(whole[:8], "little")
    return whole, {"length": 0, "header": 8, "pages": pages, "checksums": pages + cache.nbytes, "end": len(whole)}, untouched


@pytest.mark.parametrize("part, following", list(pairwise(["length", "header", "pages", "checksums", "end"])))
@pytest.mark.parametrize("way", ["path", "stream"])
def test_every_flipped_bit_is_refused(path, part, following, way):
    whole, begins, cache = tiny_file()
    for bit in range(8 * begins[part], 8 * begins[following]):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        match = "pages.safetensors|BytesIO"
        if part in ("pages", "checksums"):
            size = cache.spec.block_bytes if part == "pages" else 8
            match = f"({match}): page={(bit // 8 - begins[part]) // size}: damaged: its bytes have the checksum 0x.*the file says"
        file = io.BytesIO(flipped)
        if way == "path":
            path.write_bytes(flipped)
            file = path
        refused(cache, file, match)
    cache.load(io.BytesIO(whole))


@pytest.mark.parametrize("way", ["path", "stream"])
def test_a_file_cut_anywhere_is_refused(path, way):
    whole, _, cache = tiny_file()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        file = path if way == "path" else io.BytesIO(whole[:size])
        refused(cache, file, "pages.safetensors: .*cut" if way == "path" else "BytesIO: .*cut")


def test_a_file_that_goes_on_is_refused(path):
    whole, _, cache = tiny_file()
    path.write_bytes(whole + b"\0")
    refused(cache, path, f"size={len(whole) + 1}: cut or changed: its header needs {len(whole)} bytes")


def test_the_header_byte_by_byte():
    """What docs/pages.md says of version 2."""
    whole, begins, _ = tiny_file()
    length, offset = struct.unpack("<Q", whole[:8])[0], begins["pages"]
    header = json.loads(whole[8 : 8 + length])
    assert length % 8 == 0 and offset == 8 + length and len(whole) == offset + 2 * 320 + 16
    assert header["pages"] == {"dtype": "U8", "shape": [2, 1, 320], "data_offsets": [0, 640]}
    assert header["checksums"] == {"dtype": "I64", "shape": [2], "data_offsets": [640, 656]}
    metadata = header["__metadata__"]
    assert {name: metadata[name] for name in ("format", "version", "scales")} == {
        "format": "quantkv-pages",
        "version": "2",
        "scales": "[1.0, 1.0]",
    }
    assert metadata["maps"] == LayerMaps.of(get_format("int4"), 32, 32).fingerprint()
    row = {"code_bits": 4, "meta": ["float32"]}
    spec = {"format": "int4", "k": row, "v": row, "num_kv_heads": 1, "head_size": 32, "head_size_v": 32, "block_size": 8}
    assert json.loads(metadata["spec"]) == spec
    sums = struct.unpack("<2q", whole[begins["checksums"] :])
    assert sums == tuple(zlib.crc32(whole[offset + 320 * i : offset + 320 * (i + 1)]) for i in range(2))


class Dribble(io.RawIOBase):
    """A file without a buffer, as a socket may be: takes and gives 7 bytes at a time."""

    def __init__(self):
        self.data, self.at = bytearray(), 0

    def readable(self):
        return True

    def writable(self):
        return True

    def write(self, data):
        self.data += bytes(data[:7])
        return min(len(data), 7)

    def readinto(self, into):
        part = self.data[self.at : self.at + min(len(into), 7)]
        into[: len(part)] = part
        self.at += len(part)
        return len(part)


@pytest.mark.parametrize("kind", [io.BytesIO, Dribble])
def test_files_that_follow_one_another_in_a_stream(kind, format_name):
    """Caches of several layers go through one pipe; each load takes its own bytes and no more."""
    stream, layers = kind(), [filled(format_name, 3, k_scale=2.0), filled("int8", 2)]
    for cache in layers:
        cache.save(stream, pages=[1])
    if kind is io.BytesIO:
        stream.seek(0)
    for cache in layers:
        other = cache_of(cache.spec.format, 3, k_scale=cache.k.scale)
        other.load(stream, pages=[2])
        assert torch.equal(other.buffer[2], cache.buffer[1]) and not other.buffer[:2].any()


def test_pages_that_changed_places_are_refused(path):
    filled().save(path)
    rewritten(path, lambda header, tensors: tensors.update(pages=tensors["pages"].flip(0)))
    refused(untouched(), path, "page=0: damaged")


@pytest.mark.parametrize(
    "other, match",
    [
        (dict(name="int8"), "spec={'format': 'int4', 'k': {'code_bits': 4.*needs {'format': 'int8', 'k': {'code_bits': 8"),
        (dict(name="tq4"), "spec={'format': 'int4'.*needs {'format': 'tq4'"),
        (dict(d=128), "spec={'head_size': 64, 'head_size_v': 64}: this cache needs {'head_size': 128, 'head_size_v': 128}"),
        (dict(heads=4), "spec={'num_kv_heads': 2}: this cache needs {'num_kv_heads': 4}"),
        (dict(block_size=32), "spec={'block_size': 16}: this cache needs {'block_size': 32}"),
        (dict(k_scale=2.0), r"scales=\[1.0, 1.0\]: this cache needs \[2.0, 1.0\]"),
    ],
)
def test_another_cache_is_refused_and_both_are_named(path, other, match):
    filled().save(path)
    refused(untouched(**other), path, "pages.safetensors: " + match)


def test_other_maps_are_refused(path):
    turn = torch.eye(64).roll(1, 0)[None]
    filled("int8", maps=LayerMaps(k=LinearMap(turn, turn.mT))).save(path)
    theirs, ours = LayerMaps(k=LinearMap(turn, turn.mT)).fingerprint(), LayerMaps().fingerprint()
    refused(untouched(name="int8"), path, f"pages.safetensors: maps={theirs}: this cache needs {ours}")


def test_keys_without_another_mean_are_refused(path):
    """What was taken off the keys is part of what their bytes mean; what only guides a writer is none."""
    eye, means = torch.eye(64)[None], torch.linspace(-1, 1, 2 * 64).view(2, 1, 64)
    maps = {name: LayerMaps(LinearMap(eye, eye, *rest)) for name, rest in {"own": (means,), "other": (-means,), "none": ()}.items()}
    maps["guided"] = LayerMaps(LinearMap(eye, eye, means, 2 * eye))
    written = filled("int8", maps=maps["own"])
    written.save(path)
    for name in ("other", "none"):
        refused(untouched(name="int8", maps=maps[name]), path, f"maps={maps['own'].fingerprint()}: this cache needs")
    again = untouched(name="int8", maps=maps["guided"])
    again.load(path)
    assert torch.equal(again.buffer, written.buffer)


@pytest.mark.parametrize("field", ["format", "version", "spec", "maps", "scales"])
def test_a_header_without_a_field_is_refused(path, field):
    filled().save(path)
    rewritten(path, lambda header, tensors: header.pop(field))
    refused(untouched(), path, f"pages.safetensors: {field}=None: this cache needs")


def test_version_1_is_refused(path):
    filled().save(path)
    rewritten(path, lambda header, tensors: (header.update(version="1"), tensors.pop("checksums")))
    refused(untouched(), path, "version=1: this cache needs 2")


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda t: t.pop("checksums"), "a tensor 'checksums' of 6"),
        (lambda t: t.update(checksums=t["checksums"][:-1].clone()), "a tensor 'checksums' of 6"),
        (lambda t: t.update(checksums=t["checksums"].int()), "a tensor 'checksums' of 6"),
        (lambda t: t.update(more=t["checksums"].clone()), "'more'.*and no other"),
        (lambda t: t.pop("pages"), "a tensor 'pages'"),
        (lambda t: t.update(pages=t["pages"].view(torch.int8)), "a tensor 'pages' of uint8"),
        (lambda t: t.update(pages=t["pages"][:, :1].clone()), "a tensor 'pages'"),
    ],
)
def test_other_tensors_are_refused(path, change, match):
    filled().save(path)
    rewritten(path, lambda header, tensors: change(tensors))
    refused(untouched(), path, match)


def test_numbers_in_a_header_are_compared_as_numbers(path):
    filled("fp8", k_scale=1, v_scale=2).save(path)
    other = cache_of("fp8", k_scale=1.0, v_scale=2.0)
    other.load(path)
    assert torch.equal(other.buffer, filled("fp8").buffer)
    rewritten(path, lambda header, tensors: header.update(scales="[1, 2]"))
    other.load(path)


@pytest.mark.parametrize(
    "pages, match",
    [
        ([0, 1.0], "pages=.*integers"),
        (torch.tensor([0.0, 1.0]), "pages=.*integers"),
        ([0, True], "pages=.*integers"),
        (torch.tensor([True, False]), "pages=.*integers"),
        ("01", "pages=.*integers"),
        (1, "pages=.*integers"),
        ([4, 4], "pages=4: repeated"),
        ([0, 6], r"pages=6: values lie in 0\.\.5"),
        ([-1, 0], r"pages=-1: values lie in 0\.\.5"),
    ],
)
def test_page_numbers_are_distinct_pages_of_the_cache(path, pages, match):
    filled().save(path, pages=[0, 1])
    before = path.read_bytes()
    refused(untouched(), path, match, pages)
    with pytest.raises(ValueError, match=match):
        filled().save(path, pages)
    assert path.read_bytes() == before


def test_the_number_of_pages_must_fit(path):
    filled().save(path)
    refused(untouched(), path, "pages=2: .*holds 6 pages", pages=[0, 1])
    refused(untouched(pages=4), path, "pages=6: the cache has 4")


def test_what_the_system_refuses_names_the_path(path, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"pages\.safetensors"):
        cache_of().load(path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        cache_of().save(tmp_path / "nowhere" / "pages.safetensors")
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        cache_of().load(tmp_path)
    path.mkdir()
    with pytest.raises(IsADirectoryError, match=r"pages\.safetensors"):
        cache_of().save(path)
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("file", [None, b"pages", []])
def test_what_is_no_file_is_refused(file):
    for way in (filled().save, untouched().load):
        with pytest.raises(ValueError, match=f"file={type(file).__name__}: a path, or a file that is open in binary mode, is needed"):
            way(file)


def test_a_number_is_not_taken_for_an_open_file(path):
    with open(path, "wb") as other:
        for way in (filled().save, untouched().load):
            with pytest.raises(ValueError, match="file=int: a path"):
                way(other.fileno())
        other.write(b"still open")


# ---- a file appears whole or not at all


@pytest.fixture(params=["unnamed", "named"])
def temporary(request, monkeypatch):
    """Both ways to write a file: without a name until it is whole, and, where a system has no such files, under one of ours."""
    if request.param == "named":
        monkeypatch.setattr(whole_file, "_unnamed", lambda folder: None)
    elif whole_file._unnamed(os.getcwd()) is None:
        pytest.skip("this file system has no files without a name")
    return request.param


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_mode_follows_the_umask(path, temporary, umask):
    before = os.umask(umask)
    try:
        for _ in range(2):  # a new file, and one that takes another's place
            filled().save(path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
            path.chmod(0o600)
    finally:
        os.umask(before)


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("step", ["fsync", "checksums", "link", "replace"])
def test_a_save_that_fails_changes_nothing(path, tmp_path, monkeypatch, temporary, step, older):
    if step == {"unnamed": "replace", "named": "link"}[temporary] and not (older and temporary == "unnamed"):
        pytest.skip("this way to write a file does not come to that step")
    if older:
        path.write_bytes(b"older")

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(page_file if step == "checksums" else os, step, fail)
    with pytest.raises(OSError, match="disk full"):
        filled().save(path)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == ([(path.name, b"older")] if older else [])


STEPS = ("open", "write", "fsync", "link", "replace", "unlink", "close")  # of a save; what a process may be killed before or after


class Killed(BaseException):
    """What a process that is killed does not run: nothing may follow."""


def dies_at(monkeypatch, step, after):
    """From the step of that number on no call of the system does anything: the process is gone. after: with the step, not before it."""
    count = 0

    def counted(stock):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count < step:
                return stock(*args, **kwargs)
            if count == step and after:
                stock(*args, **kwargs)
            raise Killed

        return call

    for name in STEPS:
        if name != "write":
            monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(page_file, "_write_whole", counted(page_file._write_whole))


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_save_that_dies_at_any_step_leaves_the_old_file_or_the_new(path, tmp_path, monkeypatch, temporary, older, after):
    """Each call of the system in turn is the last one. What then is at the path is whole, and the next save leaves it alone there."""
    old, new = filled(pages=2), cache_of(pages=2)
    new.buffer.fill_(7)
    step, died = 0, True
    while died:
        step += 1
        for stray in tmp_path.iterdir():
            stray.unlink()
        if older:
            old.save(path)
        with monkeypatch.context() as patch:
            dies_at(patch, step, after)
            try:
                new.save(path)
                died = False
            except Killed:
                pass
        if path.exists():
            found = cache_of(pages=2)
            found.load(path)
            assert any(torch.equal(found.buffer, t.buffer) for t in ([old, new] if older else [new])), step
        else:
            assert not older, step
        assert all(whole_file.TEMPORARY.fullmatch(name) for name in os.listdir(tmp_path) if name != path.name)
        new.save(path)
        assert os.listdir(tmp_path) == [path.name]
        found = cache_of(pages=2)
        found.load(path)
        assert torch.equal(found.buffer, new.buffer)
    assert step > 6  # each of the steps was the last one once


@pytest.mark.parametrize("older", [False, True])
def test_a_disk_that_is_full_after_any_number_of_bytes_changes_nothing(path, tmp_path, monkeypatch, temporary, older):
    """A file of a saver may end at any byte: what is at the path is what was there."""
    if older:
        path.write_bytes(b"older")
    write, size = page_file._write_whole, len(tiny_file()[0])
    for room in range(0, size, 7):
        left = room

        def until_full(file, data):
            nonlocal left
            view = memoryview(data).cast("B")
            write(file, view[:left])
            left -= len(view)
            if left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(page_file, "_write_whole", until_full)
        with pytest.raises(OSError, match="No space left"):
            tiny().save(path)
        assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == ([(path.name, b"older")] if older else [])
        left = 0


@pytest.mark.parametrize("older", [False, True])
def test_the_bytes_are_on_the_disk_before_the_name_is(path, monkeypatch, temporary, older):
    if older:
        filled().save(path)
    steps = []

    def recorded(name, function):
        def call(*args, **kwargs):
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)
            steps.append("fsync of the folder" if is_folder else name)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "link", "replace"):
        monkeypatch.setattr(os, name, recorded(name, getattr(os, name)))
    filled().save(path)
    naming = {"named": ["replace"], "unnamed": ["link", "link", "replace"] if older else ["link"]}[temporary]
    assert steps == ["fsync", *naming, "fsync of the folder"]


KILLER = """
import os, random, signal, sys, time
import torch
from quantkv import PagedCache, get_format, whole_file

path, way = sys.argv[1:]
torch.set_num_threads(1)  # a process that has threads of its own is not to be forked
if way == "named":
    whole_file._unnamed = lambda folder: None
choose = random.Random(0)
cache = PagedCache(get_format("int4").cache_spec(2, 64), 400)
for trial in range(40):
    cache.buffer.fill_(trial)
    ready, tell = os.pipe()
    saver = os.fork()
    if saver == 0:
        os.write(tell, b"!")
        while True:
            cache.save(path)
    os.read(ready, 1)
    time.sleep(choose.uniform(0, 0.03))
    os.kill(saver, signal.SIGKILL)
    os.waitpid(saver, 0)
    strays = [name for name in os.listdir(os.path.dirname(path)) if name != os.path.basename(path)]
    assert all(whole_file.TEMPORARY.fullmatch(name) for name in strays), strays
    whole = PagedCache(cache.spec, 400)
    if os.path.exists(path):
        whole.load(path)
        assert whole.buffer.unique().tolist() in ([trial], [trial - 1]), (trial, whole.buffer.unique())
    cache.save(path)
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
    if trial % 2:
        os.unlink(path)  # half of the savers find no older file
    print(len(strays))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that it forks")
def test_a_save_that_is_killed_leaves_a_whole_file_and_nothing_that_stays(path, temporary):
    """Killed at 40 moments while it saves again and again: the file is whole each time, and the next save leaves it alone there."""
    command, env = [sys.executable, "-c", KILLER, str(path), temporary], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    strays = [int(line) for line in done.stdout.split()]
    assert len(strays) == 40
    if temporary == "named":
        assert any(strays)  # else nothing was there to clean up
    else:
        assert sum(strays) < 20  # only the moment between link and rename, where an older file is replaced: named, most leave one


def test_a_temporary_file_of_a_living_process_is_left_alone(path, tmp_path, monkeypatch):
    descriptor, name = whole_file._named(str(tmp_path))
    (tmp_path / ".quantkv-notes.tmp").write_text("not ours")
    try:
        filled().save(path)
        assert os.path.exists(name)
    finally:
        os.close(descriptor)
    filled().save(path)
    assert sorted(os.listdir(tmp_path)) == [".quantkv-notes.tmp", path.name]


def test_a_link_is_followed(path, tmp_path, temporary):
    (tmp_path / "elsewhere").mkdir()
    path.symlink_to(tmp_path / "elsewhere" / "real")
    for number in (1, 2):  # a new file, and one that takes another's place
        cache = filled(pages=number)
        cache.save(path)
        assert path.is_symlink() and os.listdir(tmp_path / "elsewhere") == ["real"]
        found = cache_of(pages=number)
        found.load(tmp_path / "elsewhere" / "real")
        assert torch.equal(found.buffer, cache.buffer)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_is_written_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        whole_file.write(tmp_path / "pipe", b"through")
        assert os.read(reader, 20) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode) and os.listdir(tmp_path) == ["pipe"]
