"""Page files: pages of one layer's cache as bytes, with their geometry and a checksum for each page. docs/pages.md has every byte.

A file is a safetensors file with two tensors, `pages` and `checksums`; its metadata says what the bytes mean. Version 2; files of
version 1 had no checksums and are refused. `load` reads nothing that the header does not account for, and changes the cache last.

A file appears whole, in one step, or not at all (`whole_file.py`).
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import torch

from . import checks, whole_file
from .checks import refuse
from .page_meaning import PageMeaning

if TYPE_CHECKING:
    from .cache import PagedCache

FILE_FORMAT, FILE_VERSION = "quantkv-pages", 2
CHUNK_BYTES = 1 << 24  # what `save` copies to the host at a time
HEADER_BYTES = 1 << 20  # a longer header is a damaged length: ours has some 700 bytes


def save(cache: PagedCache, file: str | os.PathLike[str] | BinaryIO, pages: Sequence[int] | None = None) -> None:
    """Write pages (all if None) of `cache` to a page file.

    file: a path, where the file takes the place of what is there, its mode following the umask; or a binary file to write to (a
    socket's, `io.BytesIO`), which is left open.
    ValueError, before anything is written, for page numbers that are not distinct pages of the cache. OSError where the file cannot be
    written; then what was at the path before is there still.
    """
    numbers = list(range(cache.num_blocks)) if pages is None else checks.page_numbers(pages, cache.num_blocks)
    index = torch.tensor(numbers, dtype=torch.int64, device=cache.device)
    with writing(file) as opened:
        write_layer(opened, cache, index)


def load(cache: PagedCache, file: str | os.PathLike[str] | BinaryIO, pages: Sequence[int] | None = None) -> None:
    """Read what `save` wrote into pages (0, 1, .. if None) of `cache`.

    file: a path; or a binary file, of which the bytes of one page file are read, whatever follows them.
    ValueError naming the file and the cause, with nothing changed, if it was cut or changed, or its version, format, geometry, maps,
    scales or number of pages differ from what is needed. OSError where the file cannot be read.
    """
    with reading(file) as (opened, name, size):
        _load(cache, opened, name, size, pages)


@contextmanager
def writing(file: str | os.PathLike[str] | BinaryIO) -> Iterator[Any]:
    """What to write to where a user gives a path, at which a file appears whole or not at all, or a file that is open for writing."""
    if hasattr(file, "write"):
        yield file
    else:
        _check_path(file)
        with whole_file.replacing(file) as whole:
            yield whole


@contextmanager
def reading(file: str | os.PathLike[str] | BinaryIO) -> Iterator[tuple[BinaryIO, str, int | None]]:
    """What to read where a user gives a path or an open file; its name; its bytes, None where others may follow."""
    if hasattr(file, "read"):
        yield file, str(getattr(file, "name", type(file).__name__)), None
    else:
        _check_path(file)
        with whole_file.reading(file) as opened:
            yield opened, os.fspath(file), os.fstat(opened.fileno()).st_size


def _check_path(file: Any) -> None:
    """A number would be taken for an open descriptor, and closed."""
    checks.instance("file", file, (str, os.PathLike), "a path, or a file that is open in binary mode,")


def _load(cache: PagedCache, file: BinaryIO, name: str, size: int | None, pages: Sequence[int] | None) -> None:
    def places(count: int) -> list[int]:
        if pages is None and count > cache.num_blocks:
            refuse(f"{name}: pages", count, f"the cache has {cache.num_blocks}")
        numbers = list(range(count)) if pages is None else checks.page_numbers(pages, cache.num_blocks)
        if len(numbers) != count:
            refuse("pages", len(numbers), f"{name} holds {count} pages")
        return numbers

    numbers, stored, sums = read_layer(cache, file, name, places, size)
    for index, (found, expected) in enumerate(zip(checksums(stored), sums)):
        if found != expected:
            refuse_page(name, index, found, expected)
    cache.buffer[torch.tensor(numbers, dtype=torch.int64, device=cache.device)] = stored.to(cache.device)


def read_layer(
    cache: PagedCache, file: BinaryIO, name: str, places: Callable[[int], list[int]], size: int | None = None
) -> tuple[list[int], torch.Tensor, list[int]]:
    """The pages of one page file, for a cache like `cache`, which stays as it is: where to put them, as `places` said of their number;
    their bytes `[n, HK, page_bytes]`, on the host; the checksums that the file says, which nobody has compared yet. ValueError as of
    `load`. name: of the file. size: of all of it, in bytes; None: others may follow."""
    header, offset = _read_header(file, name, size)
    count, order = _check_header(cache, header, name)
    numbers = places(count)
    sizes = {"pages": count * cache.spec.block_bytes, "checksums": 8 * count}
    if size is not None and size != offset + sum(sizes.values()):
        refuse(f"{name}: size", size, f"cut or changed: its header needs {offset + sum(sizes.values())} bytes")
    payload = _read_exactly(file, sum(sizes.values()), name)
    parts = dict(zip(order, payload.split([sizes[tensor] for tensor in order])))
    return numbers, parts["pages"].view(count, *cache.buffer.shape[1:]), _integers(parts["checksums"])


def refuse_page(name: str, index: int, found: int, expected: int) -> NoReturn:
    """Refuse a page whose bytes are not those that were written. index: within its file."""
    refuse(f"{name}: page", index, f"damaged: its bytes have the checksum {found:#010x}, the file says {expected:#x}")


def _header(cache: PagedCache) -> dict[str, str]:
    """What has to be equal for a file to be read into a cache, each field in JSON or plain words."""
    return {"format": FILE_FORMAT, "version": str(FILE_VERSION), **PageMeaning.of(cache).header()}


def _check_header(cache: PagedCache, header: Any, name: str) -> tuple[int, tuple[str, str]]:
    """Number of pages in the file and the order of its two tensors. ValueError unless it was made for caches like this one."""
    tensors = dict(header) if isinstance(header, dict) else {}
    metadata = tensors.pop("__metadata__", None)
    metadata = metadata if isinstance(metadata, dict) else {}
    for field, expected in (("format", FILE_FORMAT), ("version", str(FILE_VERSION))):
        if metadata.get(field) != expected:
            refuse(f"{name}: {field}", metadata.get(field), f"this cache needs {expected}")
    PageMeaning.of(cache).check_same(PageMeaning.of_header(metadata), f"{name}: ", "this cache needs")
    shape = list(cache.buffer.shape[1:])
    pages = tensors.get("pages")
    found = pages.get("shape") if isinstance(pages, dict) else None
    if not isinstance(found, list) or found[1:] != shape or type(found[0]) is not int or found[0] < 0:
        refuse(f"{name}: shape", found, f"a tensor 'pages' of {tuple(shape)} bytes a page is needed")
    for order in (("pages", "checksums"), ("checksums", "pages")):
        if tensors == _tensors([found[0], *shape], order):
            return found[0], order
    refuse(f"{name}: tensors", tensors, f"a tensor 'pages' of uint8 and a tensor 'checksums' of {found[0]} int64 are needed, and no other")


def _tensors(shape: list[int], order: Sequence[str] = ("pages", "checksums")) -> dict[str, Any]:
    """What a header says of the two tensors, that begin in this order."""
    kinds = {"pages": ("U8", shape, math.prod(shape)), "checksums": ("I64", shape[:1], 8 * shape[0])}
    described, start = {}, 0
    for tensor in order:
        dtype, extent, size = kinds[tensor]
        described[tensor] = {"dtype": dtype, "shape": extent, "data_offsets": [start, start + size]}
        start += size
    return described


def checksums(pages: torch.Tensor) -> list[int]:
    """CRC-32 of the bytes of each of `pages [n, HK, page_bytes]`, on the host."""
    return [zlib.crc32(page) for page in pages.contiguous().flatten(1).numpy()]


def write_layer(file: Any, cache: PagedCache, index: torch.Tensor, expected: Sequence[int] | None = None) -> None:
    """A safetensors file, chunk by chunk: the host never holds all pages, and the checksums are those of the bytes written.

    file: open for writing. index: int64 `[n]`, pages, on the cache's device. expected: what their checksums have to be; ValueError for
    the first that is another, after some of the file was written."""
    shape = [len(index), *cache.buffer.shape[1:]]
    told = {} if cache.maps.calibration is None else {"calibration": cache.maps.calibration}  # for people: no reader compares it
    header = {"__metadata__": _header(cache) | told, **_tensors(shape)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    _write_whole(file, len(text).to_bytes(8, "little") + text)
    sums: list[int] = []
    for part in index.split(max(CHUNK_BYTES // cache.spec.block_bytes, 1)):
        pages = cache.buffer[part].cpu()
        _write_whole(file, pages.flatten().numpy())
        for found in checksums(pages):
            if expected is not None and found != expected[len(sums)]:
                refuse("stored page", len(sums), f"damaged: checksum {found:#010x}, {expected[len(sums)]:#010x} when it was stored")
            sums.append(found)
    _write_whole(file, b"".join(number.to_bytes(8, "little") for number in sums))


def _write_whole(file: BinaryIO, data: Any) -> None:
    view = memoryview(data)
    while len(view):  # a file without a buffer, as sockets may have, takes what it can
        written = file.write(view)
        view = view[len(view) if written is None else written :]


def _read_header(file: BinaryIO, name: str, size: int | None) -> tuple[Any, int]:
    """The header's JSON, and how many bytes it takes with its length."""
    length = int.from_bytes(_read_exactly(file, 8, name).numpy().tobytes(), "little")
    if length % 8 or length > HEADER_BYTES or (size is not None and length > size - 8):
        refuse(f"{name}: header", f"{length} bytes", "no page file, or cut or changed")
    try:
        return json.loads(_read_exactly(file, length, name).numpy().tobytes()), 8 + length
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: its header is no JSON: no page file, or cut or changed") from error


def _read_exactly(file: BinaryIO, size: int, name: str) -> torch.Tensor:
    """The next `size` bytes. ValueError where there are fewer: a file that was cut, a sender that went away."""
    into, got = torch.empty(size, dtype=torch.uint8, device="cpu"), 0
    while got < size:
        read = file.readinto(into.numpy()[got:])
        if not read:
            refuse(f"{name}: size", f"{got} bytes", f"cut: {size} more are needed where it ends")
        got += read
    return into


def _integers(data: torch.Tensor) -> list[int]:
    return [int.from_bytes(number, "little", signed=True) for number in data.view(-1, 8).numpy()]
