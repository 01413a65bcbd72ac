"""Files that appear whole, in one step, or not at all, and files that are read as files only. Pure Python. Page files, policies, their
maps, calibrations and compiled kernels are written and read so.

The bytes of a file are on the disk before it gets its name, and the name is before a writer returns. Where the system lets a file be
without a name until then (Linux), a process that is killed leaves nothing behind. Elsewhere, and for the moment in which an older file
is replaced, the file is named `.quantkv-<16 hex digits>.tmp` and locked by its writer; the next file written into the folder removes
those that nobody locks. On Windows files are written in place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

KINDS = {"a folder": stat.S_ISDIR, "a pipe": stat.S_ISFIFO, "a socket": stat.S_ISSOCK}
TEMPORARY = re.compile(r"\.quantkv-[0-9a-f]{16}\.tmp")
NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)  # what file systems without O_TMPFILE answer


def cache_folder() -> Path:
    """Where what can be made again is kept: `$QUANTKV_CACHE`, else the user's cache folder."""
    return Path(os.environ.get("QUANTKV_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantkv")


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file of these bytes; as `replacing`."""
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Any]:
    """A binary file to write that takes the place of what is at `path` when the block ends, and vanishes if it raises.

    Its mode follows the umask. A link is followed; what is no file of a disk (a pipe, /dev/stdout) is written as it is.
    OSError where the file cannot be written; then what was at the path before is there still.
    """
    path = os.path.realpath(path)
    if _is_stream(path) or os.name == "nt":  # Windows neither opens folders nor replaces a file that is open
        with open(path, "wb") as stream:
            yield stream
        return
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


def reading(path: str | os.PathLike[str]) -> BinaryIO:
    """A binary file to read. OSError for what is no regular file: a pipe without a writer would be waited for, a device never ends."""
    descriptor = _opened(os.fspath(path))
    try:
        if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
            kind = next((name for name, of in KINDS.items() if of(mode)), "a device")
            raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, f"{kind}; a regular file is needed", os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _opened(path: str, flags: int = 0) -> int:
    """Descriptor of a file for reading, whatever it is, without waiting for the writer of a pipe."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | flags)


def _is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether something is there that cannot be replaced by a file: a pipe, a terminal, a folder."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


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
            descriptor = _opened(temporary, getattr(os, "O_NOFOLLOW", 0))
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode) and _lock(descriptor, wait=False):
                    os.unlink(temporary)
            finally:
                os.close(descriptor)
