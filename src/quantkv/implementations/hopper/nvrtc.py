"""CUDA C++ at run time: compiles a source file of this folder, with the snippets of two codecs, by NVRTC, and keeps the cubin.

A kept file is the SHA-256 of a cubin (32 bytes), then the cubin. A file that is damaged or cannot be read is compiled anew and replaced.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ... import whole_file
from ...under_way import compiling

SOURCE = Path(__file__).parent
DIGEST_BYTES = hashlib.sha256().digest_size


def compile_cubin(source: str, macros: dict[str, object], snippets: Iterable[Path] = (), arch: str = "sm_90a") -> bytes:
    """The cubin of `source`, a file beside this one, under `macros`, after the snippets; kept in the folder for compiled kernels.

    Needs no GPU, and may run in several threads at once. A RuntimeWarning says once why no cubin can be kept; it is returned then, too.
    """
    from cuda.bindings import nvrtc
    from cuda.core import Program, ProgramOptions

    main, snippets = SOURCE / source, list(dict.fromkeys(snippets))
    files = [SOURCE / "encode.cuh", *snippets, main] if snippets else [main]
    text = "".join(path.read_text() for file in files for path in _sources(file))
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    version = ".".join(str(n) for n in nvrtc.nvrtcVersion()[1:])
    key = hashlib.sha256(f"{arch} {version} {source} {defines}{text}".encode()).hexdigest()[:32]
    file = cache_folder() / f"{key}.checked-cubin"  # a file named .cubin is of an older release and has no digest
    if (code := _kept(file)) is not None:
        return code
    folders = dict.fromkeys(str(path.parent) for path in [main, *snippets])
    options = ProgramOptions(std="c++17", arch=arch, include_path=list(folders), device_as_default_execution_space=True)
    includes = "".join(f'#include "{path}"\n' for path in files[:-1])
    with compiling(f"{source} by NVRTC"):
        code = bytes(Program(f'{defines}{includes}#line 1 "{source}"\n{main.read_text()}', "c++", options).compile("cubin").code)
    _keep(file, code)
    return code


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
    """The file and what it includes, in turn: beside it, or here."""
    included = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
    beside = ((path.parent / name if (path.parent / name).exists() else SOURCE / name) for name in included)
    return [path, *(file for found in beside for file in _sources(found))]


def cache_folder() -> Path:
    """Where compiled kernels are kept: `$QUANTKV_CACHE`, else the user's cache folder."""
    root = os.environ.get("QUANTKV_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantkv"
    return Path(root) / "kernels"
