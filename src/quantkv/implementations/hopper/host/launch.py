"""Compiled kernels on a device: loaded once, and launched with as little Python as it takes."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import re
import threading
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch

from ....assumed import assumed
from .nvrtc import DEVICE

SHARED_BYTES = 227 * 1024  # of one SM
LOG2E = math.log2(math.e)
SINK_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in arguments.cuh
C_TYPES = {"int": ctypes.c_int, "u32": ctypes.c_uint, "i64": ctypes.c_longlong, "float": ctypes.c_float}

# Held while a launch's arguments are filled in and its kernels, which share scratch, enter the stream.
LOCK = threading.Lock()


@cache
def arguments(name: str) -> type[ctypes.Structure]:
    """The struct of that name in arguments.cuh, where its fields are said once."""
    body = re.search(
        rf"^struct (?:__align__\(64\) )?{name} {{\n(.*?)^}};", (DEVICE / "arguments.cuh").read_text(), re.MULTILINE | re.DOTALL
    ).group(1)
    fields = re.findall(r"^  (.+?)(\*?) (\w+)(?:\[(\d)\])?;", body, re.MULTILINE)
    assert len(fields) == len(body.splitlines()), body
    types = [ctypes.c_void_p if star else C_TYPES.get(kind) or arguments(kind) for kind, star, _, _ in fields]
    made = [(field, one * int(count) if count else one) for one, (_, _, field, count) in zip(types, fields)]
    return type(name, (ctypes.Structure,), {"_fields_": made})


@cache
def missing() -> str | None:
    """Why no kernel can be compiled here."""
    for name in ("cuda.core", "cuda.bindings"):
        if importlib.util.find_spec(name.split(".")[0]) is None or importlib.util.find_spec(name) is None:
            return f"the package {name} is missing: pip install 'quantkv[hopper]'"
    return None


@cache
def is_hopper(index: int) -> bool:
    """Whether a device has compute capability 9.0."""
    return torch.cuda.get_device_capability(index) == (9, 0)


def elsewhere(device: torch.device) -> str | None:
    """Why nothing can run on this device; None on a Hopper GPU."""
    gpu = assumed()
    if gpu is not None:
        return missing() if gpu.capability == (9, 0) else f"a GPU of capability {gpu.capability}: a Hopper GPU is needed"
    if device.type != "cuda" or not is_hopper(device_index(device)):
        return f"tensors are on {device}: a Hopper GPU is needed"
    return missing()


# What torch.cuda has, without what it checks at every call: a microsecond each.
def current_device() -> int:
    """Number of torch's current device, without its checks."""
    return torch._C._cuda_getDevice()


def current_stream(index: int) -> int:
    """Address of torch's current stream of a device."""
    return torch._C._cuda_getCurrentRawStream(index)


def in_chunks(rows: torch.Tensor) -> bool:
    """Whether 16-bit rows `[tokens, heads, D]` are dense and each begins at a multiple of 16 bytes, as kernels load them."""
    return rows.stride(2) == 1 and not (rows.stride(0) % 8 or rows.stride(1) % 8 or rows.data_ptr() % 16)


def device_index(device: torch.device) -> int:
    """Number of a device; that of the current one where it says none."""
    if assumed() is not None:
        return 0
    return torch.cuda.current_device() if device.index is None else device.index


def multiprocessors(index: int) -> int:
    """Multiprocessors of a device."""
    gpu = assumed()
    return _multiprocessors(index) if gpu is None else gpu.multiprocessors


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


class Kernel:
    """A loaded kernel."""

    def __init__(self, module, name: str, threads: int, shared_bytes: int, index: int):
        from cuda.bindings import driver

        self.threads, self.shared_bytes = threads, shared_bytes
        self.kernel = module.get_kernel(name)  # keeps the module alive
        handle = driver.CUkernel(int(self.kernel.handle))
        if shared_bytes > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuKernelSetAttribute(attribute, shared_bytes, handle, driver.CUdevice(index)))
        self.function, self.handle, self.index = driver.CUfunction(int(self.kernel.handle)), handle, index

    def clusters(self, blocks: int) -> int:
        """Clusters of so many blocks that a device holds at once."""
        from cuda.bindings import driver

        if blocks > 8:  # more than every device of the architecture has
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            check(driver.cuKernelSetAttribute(attribute, 1, self.handle, driver.CUdevice(self.index)))
        with torch.cuda.device(self.index):
            result = driver.cuOccupancyMaxActiveClusters(self.function, _config(self, (blocks, 1, 1), blocks))
        return 0 if int(result[0]) else result[1]  # a size that this device has not


def load(cubin: bytes, index: int):
    """The module, in the context of a device."""
    from cuda.core import ObjectCode

    with torch.cuda.device(index):
        torch.cuda.current_stream()
        return ObjectCode.from_cubin(cubin)


def _config(kernel: Kernel, grid: tuple[int, int, int], cluster: int, threads: int | None = None):
    """How a kernel is launched: it may start while the previous one drains."""
    from cuda.bindings import driver

    overlap = driver.CUlaunchAttribute()
    overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlap.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads or kernel.threads, 1, 1
    config.sharedMemBytes, config.hStream = kernel.shared_bytes, driver.CUstream(0)
    attributes = [overlap]
    if cluster > 1:
        together = driver.CUlaunchAttribute()
        together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        together.value.clusterDim.x, together.value.clusterDim.y, together.value.clusterDim.z = cluster, 1, 1
        attributes.append(together)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


class Launch:
    """A kernel with its grid, over one struct of arguments: it may start while the previous kernel of the stream drains. cluster:
    neighbouring blocks that read each other's shared memory. threads: of a block, where they are fewer than the kernel has at most."""

    def __init__(
        self, kernel: Kernel, grid: tuple[int, int, int], arguments: ctypes.Structure, cluster: int = 1, threads: int | None = None
    ):
        from cuda.bindings import driver

        self.kernel, self.config, self.function, self.stream = kernel, _config(kernel, grid, cluster, threads), kernel.function, 0
        self.launch, self.make_stream = driver.cuLaunchKernelEx, driver.CUstream
        self.arguments, self.pointers = arguments, (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        self.address = ctypes.addressof(self.pointers)

    def __call__(self, stream: int) -> None:
        if stream != self.stream:
            self.config.hStream, self.stream = self.make_stream(stream), stream
        result = self.launch(self.config, self.function, self.address, 0)
        if result[0]:
            check(result)


class ByShape:
    """What was prepared for calls of each shape, so that eager calls take the path of prepared ones.

    shape: a call's, equal for those that what `prepare` returns serves."""

    MOST = 512  # shapes; more than a model has, and then all are forgotten

    def __init__(self, shape: Callable[[Any], Hashable], prepare: Callable[[Any], Callable[[Any], None]]):
        self.shape, self.prepare = shape, prepare
        self.prepared: dict[Hashable, Callable[[Any], None]] = {}

    def serve(self, call: Any) -> None:
        """Launch the call as one of its shape was prepared; the first of a shape is prepared now."""
        shape = self.shape(call)
        launch = self.prepared.get(shape)
        if launch is None:
            if len(self.prepared) >= self.MOST:
                self.prepared.clear()
            launch = self.prepared[shape] = self.prepare(call)
        launch(call)


def check(result) -> None:
    """RuntimeError where the driver's answer is an error."""
    if int(result[0]):
        raise RuntimeError(f"CUDA driver: {result[0]!r}")


_SCRATCH: dict[int, torch.Tensor] = {}


def scratch(size: int, index: int, stream: int) -> torch.Tensor:
    """At least `size` bytes, which every launch on the default stream uses in its turn. On another stream, or in a graph, memory may come
    from a pool that keeps nothing (torch.compile's graphs warm up so): what is launched next gets its own."""
    if stream or torch.cuda.is_current_stream_capturing():
        return torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}")
    held = _SCRATCH.get(index)
    if held is None or held.numel() < size:
        held = _SCRATCH[index] = torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}")
    return held
