"""XQA, TensorRT-LLM's decode kernel, out of libraries that were compiled of FlashInfer's sources: no package is needed."""

from __future__ import annotations

import ctypes
import functools
import lzma
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from .problem import Unavailable
from .shapes import Shape

LARGEST_HOPPER_HEAD = 256
# multiprocessors, kv heads, window | scales of queries and of the cache | out q k v, page table | longest length, lengths, sequences |
# semaphores, workspace | dependent launch | strides of pages, tokens, heads, in elements | stream
ARGUMENTS = (
    *[ctypes.c_uint32] * 3,
    *[ctypes.c_float] * 2,
    *[ctypes.c_void_p] * 5,
    *[ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32],
    *[ctypes.c_void_p] * 2,
    ctypes.c_int32,
    *[ctypes.c_uint64] * 3,
    ctypes.c_void_p,
)


def load(folder: Path, shape: Shape, dtype: torch.dtype, page: int, hopper: bool = False) -> Callable[..., None]:
    """What serves the shape over a cache of that dtype in pages of that size, called as `flashinfer.xqa.xqa` is.

    hopper: Hopper's kernel over 16 bits too, which the source has but FlashInfer does not call; it calls it over 8 bits. `Unavailable`
    where the folder has no such library, or it cannot be loaded."""
    eight_bit = dtype.itemsize == 1
    kernel = "hopper" if hopper or (eight_bit and shape.D <= LARGEST_HOPPER_HEAD) else "generic"
    group, window = shape.HQ // shape.HK, "-w" if shape.W else ""
    library = _library(folder, f"{kernel}-{'fp8' if eight_bit else 'bf16'}-d{shape.D}-g{group}-p{page}{window}")
    return partial(_decode, library)


@functools.cache
def _library(folder: Path, name: str) -> ctypes.CDLL:
    packed = folder / f"{name}.xz"
    if not packed.exists():
        raise Unavailable(f"{packed}: no such file")
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / f"{name}.so"
        path.write_bytes(lzma.decompress(packed.read_bytes()))
        try:
            library = ctypes.CDLL(str(path))  # it sets up its kernel: torch has brought the CUDA runtime before
        except OSError as error:
            raise Unavailable(f"{packed}: {error}") from error
    library.xqa_decode.argtypes, library.xqa_decode.restype = ARGUMENTS, ctypes.c_char_p
    return library


def _decode(library: ctypes.CDLL, q, k, v, table, lengths, out, workspace, semaphores, kv_heads: int, page: int, sliding_win_size: int = 0):
    """q, out: `[B, 1, HQ, D]`. k, v: `[num_blocks, page, HK, D]`. table: int32 `[B, pages]`. lengths: uint32 `[B, 1]`. semaphores: zero,
    which a call leaves again. On the current stream."""
    problem = library.xqa_decode(
        torch.cuda.get_device_properties(q.device).multi_processor_count,
        kv_heads,
        sliding_win_size,
        1.0,
        1.0,
        *(t.data_ptr() for t in (out, q, k, v, table)),
        table.shape[1] * page,
        lengths.data_ptr(),
        len(q),
        semaphores.data_ptr(),
        workspace.data_ptr(),
        True,  # as FlashInfer launches it from Hopper on
        *(k.stride(dim) for dim in (0, 1, 2)),
        torch.cuda.current_stream(q.device).cuda_stream,
    )
    if problem:
        raise RuntimeError(f"XQA: {problem.decode()}")
