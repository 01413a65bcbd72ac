"""Runs the Hopper kernels on a CPU: the CUDA sources compiled by g++, over the headers in cuda_on_cpu in place of the package's."""

import ctypes
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch

from quantkv.calls import AttendCall, WriteCall
from quantkv.implementations.hopper import attend, prefill, write
from quantkv.implementations.hopper.decode.warps import COMBINE_PACKED_ROWS, COMBINE_WARPS
from quantkv.implementations.hopper.host import launch, nvrtc


def available() -> bool:
    """Whether the tests that need g++ run. In continuous integration they do without it too, and fail: there none is skipped unseen."""
    return shutil.which("g++") is not None or os.environ.get("CI", "false").lower() not in ("", "0", "false")


AVAILABLE = available()
HEADERS = Path(__file__).parent / "cuda_on_cpu"
COMPILED: Path | None = None  # where compiled libraries are kept for other tests, processes and runs (conftest.py)
INCLUDED: Path | None = None  # where what they include is put for one run
FLAGS = ("-std=c++17", "-w", "-fPIC", "-fno-strict-aliasing", "-fno-gnu-unique")
OPTIMIZED = {"prefill.cu": "-O1"}  # what runs for longer than it takes to compile
COMBINE = ["combine_kernel", "combine_one_kernel"]  # beside a kernel that decodes


def compile_library(folder: Path, source: Path, macros: dict[str, object], snippets: Iterable[Path]) -> ctypes.CDLL:
    """The kernels of `source` as functions `run_NAME(grid, threads, shared bytes, arguments)`. Each call loads a copy: what the kernels
    keep in static memory is of one test."""
    ((name, arguments),) = re.findall(r"(\w+)\(const __grid_constant__ (\w+) \w+\)", source.read_text())
    names = [name, *COMBINE] if arguments == "AttendArguments" else [name]
    snippets = dict.fromkeys(snippets)
    lines = [f"#define {name} {value}" for name, value in macros.items()]
    lines += ['#include "encode.cuh"'] * bool(snippets) + [f'#include "{path}"' for path in snippets]
    lines.append(source.read_text())
    for name in names:
        lines.append(f"static {arguments} given_{name};")
        lines.append(f'extern "C" void run_{name}(int x, int y, int z, int threads, long bytes, int cluster, {arguments}* a) {{')
        lines.append(f"  memcpy((void*)&given_{name}, (const void*)a, sizeof *a);")
        lines.append(f"  cpu_launch([] {{ {name}(given_{name}); }}, x, y, z, threads, bytes, cluster);\n}}")
    text, kept = "\n".join(lines), COMPILED or folder
    level = OPTIMIZED.get(source.name, "-O0")
    known = "".join([text, *(path.read_text() for path in snippets), level, _surroundings()]).encode()
    library = kept / f"{hashlib.sha256(known).hexdigest()[:32]}.so"
    if not library.exists():
        _compile(text, library, source)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as own:
        own.write(library.read_bytes())
    return ctypes.CDLL(own.name)


def _compile(text: str, library: Path, source: Path) -> None:
    """Whole or not at all, also where several processes compile."""
    library.parent.mkdir(parents=True, exist_ok=True)
    level = OPTIMIZED.get(source.name, "-O0")
    sources, part = _headers(INCLUDED or library.parent, level), library.with_suffix(f".{os.getpid()}")
    command = [
        "g++",
        *FLAGS,
        level,
        "-shared",
        f"-I{sources}",
        f"-I{source.parent}",
        "-include",
        str(sources / "standard.h"),
        "-x",
        "c++",
        "-",
        "-x",
        "none",
        str(_runtime(library.parent, sources)),
        "-o",
        str(part),
    ]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    part.replace(library)


@cache
def _surroundings() -> str:
    """All else that a library depends on: headers, flags, the compiler."""
    headers = [path.read_text() for folder in (*nvrtc.FOLDERS, HEADERS) for path in sorted(folder.glob("*.cuh"))]
    headers.append((HEADERS / "runtime.cc").read_text())
    return "".join([*headers, *FLAGS, subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout])


@cache
def _headers(folder: Path, level: str) -> Path:
    """The headers that the kernels include, those of `cuda_on_cpu` in place of the package's, and the standard ones, precompiled."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = Path(tempfile.mkdtemp(dir=folder))
    for path in [*(path for folder in nvrtc.FOLDERS for path in folder.glob("*.cuh")), *HEADERS.glob("*.c*")]:
        shutil.copy(path, sources)
    standard = sorted({line for path in HEADERS.glob("*.cuh") for line in re.findall(r"^#include <.+>$", path.read_text(), re.MULTILINE)})
    (sources / "standard.h").write_text("\n".join([*standard, '#include "instructions.cuh"']))
    subprocess.run(["g++", *FLAGS, level, "-x", "c++-header", str(sources / "standard.h")], check=True)
    return sources


@cache
def _runtime(folder: Path, sources: Path) -> Path:
    """runtime.cc of `cuda_on_cpu`, compiled: with optimisation, as it runs in every kernel."""
    made = folder / f"{hashlib.sha256(_surroundings().encode()).hexdigest()[:32]}.o"
    if not made.exists():
        part = made.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", *FLAGS, "-O1", f"-I{sources}", "-c", str(sources / "runtime.cc"), "-o", str(part)], check=True)
        part.replace(made)
    return made


def _tensor_map(address, bf16, shape, strides, rows):
    """In place of the driver's description, as pipeline.cuh in cuda_on_cpu reads it."""
    return struct.pack("7q72x", address, *shape, *strides, rows)


class Launch:
    """In place of launch.Launch."""

    def __init__(self, kernel, grid, arguments, cluster=1, threads=None):
        self.kernel, self.grid, self.arguments, self.cluster, self.threads = kernel, grid, arguments, cluster, threads or kernel.threads
        assert self.threads <= kernel.threads

    def __call__(self, stream):
        k = self.kernel
        k.run(*self.grid, self.threads, ctypes.c_long(k.shared_bytes), self.cluster, ctypes.byref(self.arguments))


class Device:
    """A stand-in for a Hopper GPU of so many multiprocessors, while a test runs."""

    def __init__(self, monkeypatch, folder: Path, multiprocessors: int = 2, max_tiles: int = 1024):
        self.folder, self.max_tiles, self.scratch, self.compiled = folder, max_tiles, None, {}
        self.unwritten = []  # addresses of rows that the kernel before writes: none is read before its end was waited for
        self.clusters = lambda blocks: multiprocessors // blocks  # that are held at once
        monkeypatch.setattr(attend, "_kernels", self._decode_kernels)
        monkeypatch.setattr(write, "_kernel", self._write_kernel)
        monkeypatch.setattr(prefill, "kernel", self._prefill_kernel)
        monkeypatch.setattr(prefill, "tensor_map", _tensor_map)
        for module in (attend, write, prefill):
            monkeypatch.setattr(module, "Launch", Launch)
        monkeypatch.setattr(launch, "current_device", lambda: 0)
        monkeypatch.setattr(launch, "current_stream", lambda index: 0)
        monkeypatch.setattr(launch, "multiprocessors", lambda index: multiprocessors)
        monkeypatch.setattr(launch, "device_index", lambda device: 0)
        monkeypatch.setattr(launch, "scratch", self._scratch)

    def _scratch(self, size, index, stream):
        self.size, self.scratch = size, torch.full((size + 4096,), 0xFF, dtype=torch.uint8, device="cpu")
        return self.scratch

    def _library(self, source, config):
        rows = getattr(config, "rows", config)
        snippets = (codec.hopper().source for codec in getattr(rows, "codecs", (rows.key, rows.value)))
        macros = config.macros()
        return compile_library(self.folder, source, macros | ({"MAX_TILES": self.max_tiles} if "MAX_TILES" in macros else {}), snippets)

    def _decode_kernels(self, config, index):
        library = self.compiled.get(config) or self.compiled.setdefault(config, self._library(config.source, config))
        sizes = (32 * config.warps, config.shared_bytes), (32 * COMBINE_PACKED_ROWS * config.combine_sequences, 0), (32 * COMBINE_WARPS, 0)
        names, self.early_copies = [f"{config.source.stem}_kernel", *COMBINE], library.early_copies
        library.set_unwritten((ctypes.c_void_p * len(self.unwritten))(*self.unwritten), len(self.unwritten))
        clusters = dict(clusters=self.clusters)
        return [SimpleNamespace(run=library[f"run_{name}"], threads=n, shared_bytes=b, **clusters) for name, (n, b) in zip(names, sizes)]

    def _write_kernel(self, config, index):
        run = self._library(config.source, config)[f"run_{config.source.stem}_kernel"]
        return SimpleNamespace(run=run, threads=config.threads, shared_bytes=config.shared_bytes)

    def _prefill_kernel(self, config, index):
        if config not in self.compiled:
            self.compiled[config] = compile_library(self.folder, prefill.SOURCE, config.macros(), ())
        run = self.compiled[config]["run_prefill_kernel"]
        return SimpleNamespace(run=run, threads=128 * (config.consumers + 1), shared_bytes=config.shared_bytes)

    def serve(self, call: AttendCall | WriteCall) -> None:
        module = attend if isinstance(call, AttendCall) else write
        assert module._unsupported(call) is None, module._unsupported(call)
        module.prepare(call)(call)
        assert self.scratch is None or bool((self.scratch[self.size :] == 0xFF).all()), "scratch is overrun"
