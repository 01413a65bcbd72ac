"""CUDA C++ at run time: compiles a source file of this folder by NVRTC, keeps the cubin, launches its kernels."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).parent


def compile_cubin(source: str, macros: dict[str, object], arch: str = "sm_90a") -> bytes:
    """The cubin of `source`, a file beside this one, under `macros`; kept in the folder for compiled kernels. Needs no GPU."""
    from cuda.bindings import nvrtc
    from cuda.core import Program, ProgramOptions

    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    text = "".join(path.read_text() for path in _sources(SOURCE / source))
    version = ".".join(str(n) for n in nvrtc.nvrtcVersion()[1:])
    file = cache_folder() / f"{hashlib.sha256(f'{arch} {version} {source} {defines}{text}'.encode()).hexdigest()[:32]}.cubin"
    if file.exists():
        return file.read_bytes()
    options = ProgramOptions(std="c++17", arch=arch, include_path=str(SOURCE), device_as_default_execution_space=True)
    code = bytes(Program(defines + (SOURCE / source).read_text(), "c++", options).compile("cubin").code)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
        part.write(code)
    os.replace(part.name, file)  # whole or not at all, also where several processes compile
    return code


def _sources(path: Path) -> list[Path]:
    """The file and what it includes, in turn."""
    included = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
    return [path, *(file for name in included for file in _sources(path.parent / name))]


def cache_folder() -> Path:
    """Where compiled kernels are kept: `$QUANTKV_CACHE`, else the user's cache folder."""
    root = os.environ.get("QUANTKV_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantkv"
    return Path(root) / "kernels"


class Kernel:
    """A loaded kernel, launched so that it may start while the previous one in the stream drains."""

    def __init__(self, module, name: str, threads: int, shared_bytes: int, device: int):
        from cuda.bindings import driver

        self.driver, self.threads, self.shared_bytes = driver, threads, shared_bytes
        self.kernel = module.get_kernel(name)  # keeps the module alive
        handle = driver.CUkernel(int(self.kernel.handle))
        if shared_bytes > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.check(driver.cuKernelSetAttribute(attribute, shared_bytes, handle, driver.CUdevice(device)))
        self.function = driver.CUfunction(int(self.kernel.handle))
        overlap = driver.CUlaunchAttribute()
        overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        self.overlap = overlap

    @staticmethod
    def check(result):
        if int(result[0]):
            raise RuntimeError(f"CUDA driver: {result[0]!r}")

    def __call__(self, grid: tuple[int, int, int], args: list[tuple[object, type]]):
        config = self.driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes, config.hStream = self.shared_bytes, torch.cuda.current_stream().cuda_stream
        config.attrs, config.numAttrs = [self.overlap], 1
        values, types = zip(*args)
        self.check(self.driver.cuLaunchKernelEx(config, self.function, (values, types), 0))
