"""Page files: pages of one layer's cache in a safetensors file, with their geometry and a checksum for each page.

A file has two tensors: `pages`, uint8 `[n, HK, page_bytes]`, and `checksums`, int64 `[n]`, the CRC-32 of each page's bytes. Its
metadata says what the bytes mean. Version 2; files of version 1 had no checksums and are refused.

A file appears whole, in one step, or not at all: its bytes are on the disk before it gets its name, and the name is before `save`
returns. Where the system lets a file be without a name until then (Linux), a process that is killed leaves nothing behind. Elsewhere,
and for the moment in which an older file is replaced, the file is named `.quantkv-<16 hex digits>.tmp` and locked by its writer; the
next save into the folder removes those that nobody locks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import operator
import os
import re
import secrets
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .checks import refuse

if TYPE_CHECKING:
    from .cache import PagedCache

FILE_FORMAT, FILE_VERSION = "quantkv-pages", 2
CHUNK_BYTES = 1 << 24  # what `save` copies to the host at a time
TEMPORARY = re.compile(r"\.quantkv-[0-9a-f]{16}\.tmp")
NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)  # what file systems without O_TMPFILE answer


def page_numbers(pages: Iterable[int], num_blocks: int) -> list[int]:
    """Distinct pages of a cache, as ints. ValueError for anything else: floats, bools, repeated pages, pages that do not exist."""
    try:
        items = pages.tolist() if isinstance(pages, torch.Tensor) else pages
        numbers = [None if isinstance(page, bool) else operator.index(page) for page in items]
    except TypeError:
        numbers = [None]
    if None in numbers:
        refuse("pages", repr(pages), "a sequence of integers is needed")
    outside = [page for page in numbers if not 0 <= page < num_blocks]
    if outside:
        refuse("pages", outside[0], f"values lie in 0..{num_blocks - 1}")
    repeated = [page for page, count in Counter(numbers).items() if count > 1]
    if repeated:
        refuse("pages", repeated[0], "repeated: a page can be named once")
    return numbers


def save(cache: PagedCache, path: str | os.PathLike[str], pages: Sequence[int] | None = None) -> None:
    """Write pages (all if None) of `cache` to a page file at `path`, in place of what is there; its mode follows the umask.

    ValueError, before anything is written, for page numbers that are not distinct pages of the cache. OSError where the file cannot be
    written; then what was at `path` before is there still.
    """
    numbers = list(range(cache.num_blocks)) if pages is None else page_numbers(pages, cache.num_blocks)
    with _replacing(os.path.abspath(path)) as file:
        _write(file, cache, torch.tensor(numbers, dtype=torch.int64, device=cache.device))


def load(cache: PagedCache, path: str | os.PathLike[str], pages: Sequence[int] | None = None) -> None:
    """Read a file that `save` wrote into pages (0, 1, .. if None) of `cache`.

    ValueError naming the path and the cause, with nothing changed, if its version, format, geometry, maps, scales or number of pages
    differ from what is needed, or a page from its checksum. OSError where the file cannot be read.
    """
    path = os.fspath(path)
    header, stored, checksums = _read(path)
    for field, expected in _header(cache).items():
        if _plain(header.get(field)) != _plain(expected):
            refuse(f"{path}: {field}", header.get(field), f"this cache needs {expected}")
    shape = tuple(cache.buffer.shape[1:])
    if stored is None or stored.dtype != torch.uint8 or stored.shape[1:] != shape:
        refuse("path", repr(path), f"a tensor 'pages' of {shape} bytes a page is needed")
    if checksums is None or checksums.dtype != torch.int64 or checksums.shape != stored.shape[:1]:
        refuse("path", repr(path), f"a tensor 'checksums' of {stored.shape[0]} int64 is needed")
    count = stored.shape[0]
    if pages is None and count > cache.num_blocks:
        refuse(f"{path}: pages", count, f"the cache has {cache.num_blocks}")
    numbers = list(range(count)) if pages is None else page_numbers(pages, cache.num_blocks)
    if len(numbers) != count:
        refuse("pages", len(numbers), f"{path} holds {count} pages")
    for index, (found, expected) in enumerate(zip(_checksums(stored), checksums.tolist())):
        if found != expected:
            refuse(f"{path}: page", index, f"damaged: its bytes have the checksum {found:#010x}, the file says {expected:#x}")
    cache.buffer[torch.tensor(numbers, dtype=torch.int64, device=cache.device)] = stored.to(cache.device)


def _header(cache: PagedCache) -> dict[str, str]:
    """What has to be equal for bytes to mean the same, each field in JSON or plain words."""
    return {
        "format": FILE_FORMAT,
        "version": str(FILE_VERSION),
        "spec": json.dumps(cache.spec.to_dict(), sort_keys=True),
        "maps": cache.maps.fingerprint(),
        "scales": json.dumps([float(cache.k.scale), float(cache.v.scale)]),
    }


def _plain(field: str | None) -> Any:
    """A field's value, so that 1 and 1.0 are equal; the field itself where it is no JSON list or object."""
    if field is None or not field.startswith(("[", "{")):
        return field
    try:
        return json.loads(field)
    except ValueError:
        return field


def _checksums(pages: torch.Tensor) -> list[int]:
    """CRC-32 of each of `pages [n, HK, page_bytes]`, on the host."""
    return [zlib.crc32(page) for page in pages.contiguous().flatten(1).numpy()]


def _write(file: Any, cache: PagedCache, index: torch.Tensor) -> None:
    """A safetensors file, chunk by chunk: the host never holds all pages, and the checksums are those of the bytes written."""
    shape = [len(index), *cache.buffer.shape[1:]]
    size = len(index) * cache.spec.block_bytes
    header = {
        "__metadata__": _header(cache),
        "pages": {"dtype": "U8", "shape": shape, "data_offsets": [0, size]},
        "checksums": {"dtype": "I64", "shape": shape[:1], "data_offsets": [size, size + 8 * len(index)]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    checksums = []
    for part in index.split(max(CHUNK_BYTES // cache.spec.block_bytes, 1)):
        pages = cache.buffer[part].cpu()
        file.write(pages.numpy())
        checksums += _checksums(pages)
    file.write(b"".join(checksum.to_bytes(8, "little") for checksum in checksums))


def _read(path: str) -> tuple[dict[str, str], torch.Tensor | None, torch.Tensor | None]:
    from safetensors import SafetensorError, safe_open

    open(path, "rb").close()  # an OSError that names the path
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            return file.metadata() or {}, *(file.get_tensor(name) if name in names else None for name in ("pages", "checksums"))
    except SafetensorError as error:
        raise ValueError(f"path={path!r}: no safetensors file ({error})") from error


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[Any]:
    """A file to write that takes `path`'s place when the block ends, and vanishes if it raises."""
    folder = os.path.dirname(path)
    _remove_abandoned(folder)
    descriptor, temporary = _unnamed(folder), None
    if descriptor is None:
        descriptor, temporary = _named(folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
            parent = os.open(folder, os.O_RDONLY)
            try:
                if temporary is None:
                    source = f"/proc/self/fd/{descriptor}"  # with a folder's descriptor, os.link follows it to the file
                    try:
                        os.link(source, path, dst_dir_fd=parent)
                    except FileExistsError:
                        _lock(descriptor)
                        temporary = _temporary_name(folder)
                        os.link(source, temporary, dst_dir_fd=parent)
                if temporary is not None:
                    os.replace(temporary, path)
                    temporary = None
                os.fsync(parent)
            finally:
                os.close(parent)
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _unnamed(folder: str) -> int | None:
    """Descriptor of a new file in `folder` without a name; None where the system has no such files."""
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except OSError as error:
        if error.errno in NO_UNNAMED_FILES and os.path.isdir(folder):
            return None
        raise


def _named(folder: str) -> tuple[int, str]:
    """Descriptor and name of a new file in `folder` that this process has locked."""
    while True:
        name = _temporary_name(folder)
        descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        _lock(descriptor)
        if os.fstat(descriptor).st_nlink:  # else another save took it for abandoned before it was locked
            return descriptor, name
        os.close(descriptor)


def _temporary_name(folder: str) -> str:
    return os.path.join(folder, f".quantkv-{secrets.token_hex(8)}.tmp")


def _lock(descriptor: int, wait: bool = True) -> bool:
    """Lock a file for as long as it is open. False where another process has, or the system knows no locks."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):
        return False
    return True


def _remove_abandoned(folder: str) -> None:
    """Remove the temporary files of savers that were killed. What another process may still write is left alone."""
    for name in filter(TEMPORARY.fullmatch, os.listdir(folder)):
        temporary = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            descriptor = os.open(temporary, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            try:
                if _lock(descriptor, wait=False):
                    os.unlink(temporary)
            finally:
                os.close(descriptor)
