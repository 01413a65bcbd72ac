"""CUDA C++ at run time: compiles a source file of this package, with the snippets of two codecs, by NVRTC, and keeps the cubin.

A kept file is the SHA-256 of a cubin (32 bytes), then the cubin. A file that is damaged or cannot be read is compiled anew and replaced.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from .... import whole_file
from ....under_way import compiling, in_processes
from . import nvrtc_process

HOPPER = Path(__file__).parent.parent
DEVICE = HOPPER / "device"
FOLDERS = tuple(HOPPER / name for name in ("device", "decode", "write", "prefill"))  # of headers, whose names are unique
_IMPORT = threading.Lock()
ELF = b"\x7fELF"
DIGEST_BYTES = hashlib.sha256().digest_size


def compile_cubin(source: Path, macros: dict[str, object], snippets: Iterable[Path] = (), arch: str = "sm_90a") -> bytes:
    """The cubin of the file `source` under `macros`, after the snippets; kept in the folder for compiled kernels. What they include lies
    beside them or in one of FOLDERS.

    Needs no GPU, and may run in several threads at once. A RuntimeWarning says once why no cubin can be kept; it is returned then, too.
    """
    with _IMPORT:  # half imported by one thread, modules lack names in another
        import cuda.core  # noqa: F401
        from cuda.bindings import nvrtc

    snippets = list(dict.fromkeys(snippets))
    files = [find("encode.cuh"), *snippets, source] if snippets else [source]
    text = "".join(path.read_text() for file in files for path in _sources(file))
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    version = nvrtc.nvrtcVersion()[1:]
    key = hashlib.sha256(f"{arch} {'.'.join(map(str, version))} {source.name} {defines}{text}".encode()).hexdigest()[:32]
    file = cache_folder() / f"{key}.checked-cubin"  # a file named .cubin is of an older release and has no digest
    if (code := _kept(file)) is not None:
        return code
    folders = dict.fromkeys(map(str, (*FOLDERS, *(path.parent for path in (source, *snippets)))))
    includes = "".join(f'#include "{path}"\n' for path in files[:-1])
    program = f'{defines}{includes}#line 1 "{source.name}"\n{source.read_text()}', arch, list(folders)
    with compiling(f"{source.name} by NVRTC"):
        code = (_apart(version, *program) if in_processes() else None) or nvrtc_process.compiled(*program)
    _keep(file, code)
    return code


def _apart(version: tuple[int, int], text: str, arch: str, folders: list[str]) -> bytes | None:
    """The cubin by a process of its own: NVRTC has one lock for all threads of a process, and takes it 100,000 times a kernel. None: that
    failed, and this process will say why, if it fails too."""
    given = json.dumps({"version": version, "path": sys.path, "text": text, "arch": arch, "folders": folders})
    try:
        ended = subprocess.run([sys.executable, "-I", nvrtc_process.__file__], input=given.encode(), capture_output=True)
    except OSError:
        return None
    return ended.stdout if ended.returncode == 0 and ended.stdout.startswith(ELF) else None


def _kept(file: Path) -> bytes | None:
    """The cubin in `file`. None: it is missing, cannot be read or is damaged."""
    try:
        with whole_file.reading(file) as opened:
            data = opened.read()
    except OSError:
        return None
    digest, code = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(file: Path, code: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole_file.write(file, hashlib.sha256(code).digest() + code)
    except OSError as error:
        _warn_not_kept(file.parent, error.strerror or str(error))


@cache
def _warn_not_kept(folder: Path, reason: str) -> None:
    warnings.warn(
        f"compiled kernels cannot be kept in {folder} ({reason}): every process compiles them anew; QUANTKV_CACHE names another folder",
        RuntimeWarning,
        stacklevel=4,
    )


def _sources(path: Path) -> list[Path]:
    """The file and what it includes, in turn."""
    included = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
    return [path, *(file for name in included for file in _sources(find(name, path.parent)))]


def find(header: str, *beside: Path) -> Path:
    """The header of that name, in a folder `beside` or one of FOLDERS."""
    return next(folder / header for folder in (*beside, *FOLDERS) if (folder / header).exists())


def cache_folder() -> Path:
    """Where compiled kernels are kept: `$QUANTKV_CACHE`, else the user's cache folder."""
    return whole_file.cache_folder() / "kernels"
