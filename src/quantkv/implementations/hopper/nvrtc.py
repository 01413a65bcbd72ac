"""CUDA C++ at run time: compiles a source file of this folder, with the snippets of two codecs, by NVRTC, and keeps the cubin."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ...under_way import compiling

SOURCE = Path(__file__).parent


def compile_cubin(source: str, macros: dict[str, object], snippets: Iterable[Path] = (), arch: str = "sm_90a") -> bytes:
    """The cubin of `source`, a file beside this one, under `macros`, after the snippets; kept in the folder for compiled kernels.

    Needs no GPU, and may run in several threads at once.
    """
    from cuda.bindings import nvrtc
    from cuda.core import Program, ProgramOptions

    main, snippets = SOURCE / source, list(dict.fromkeys(snippets))
    files = [SOURCE / "encode.cuh", *snippets, main] if snippets else [main]
    text = "".join(path.read_text() for file in files for path in _sources(file))
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    version = ".".join(str(n) for n in nvrtc.nvrtcVersion()[1:])
    file = cache_folder() / f"{hashlib.sha256(f'{arch} {version} {source} {defines}{text}'.encode()).hexdigest()[:32]}.cubin"
    if file.exists():
        return file.read_bytes()
    folders = dict.fromkeys(str(path.parent) for path in [main, *snippets])
    options = ProgramOptions(std="c++17", arch=arch, include_path=list(folders), device_as_default_execution_space=True)
    includes = "".join(f'#include "{path}"\n' for path in files[:-1])
    with compiling(f"{source} by NVRTC"):
        code = bytes(Program(f'{defines}{includes}#line 1 "{source}"\n{main.read_text()}', "c++", options).compile("cubin").code)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
        part.write(code)
    os.replace(part.name, file)  # whole or not at all, also where several processes compile
    return code


def _sources(path: Path) -> list[Path]:
    """The file and what it includes, in turn: beside it, or here."""
    included = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
    beside = ((path.parent / name if (path.parent / name).exists() else SOURCE / name) for name in included)
    return [path, *(file for found in beside for file in _sources(found))]


def cache_folder() -> Path:
    """Where compiled kernels are kept: `$QUANTKV_CACHE`, else the user's cache folder."""
    root = os.environ.get("QUANTKV_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantkv"
    return Path(root) / "kernels"
