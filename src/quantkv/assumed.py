"""A GPU that need not be there, so that what it would run can be compiled on a machine without one. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """What is compiled depends on. capability: major, minor. shared_bytes: shared memory of a multiprocessor."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int


GPUS = {gpu.name: gpu for gpu in (
    Gpu("h100", (9, 0), 132, 228 << 10), Gpu("h200", (9, 0), 132, 228 << 10), Gpu("h100-pcie", (9, 0), 114, 228 << 10),
    Gpu("a100", (8, 0), 108, 164 << 10), Gpu("l40s", (8, 9), 142, 100 << 10), Gpu("rtx-4090", (8, 9), 128, 100 << 10),
)}  # fmt: skip
_ASSUMED: ContextVar[Gpu | None] = ContextVar("assumed", default=None)


@contextmanager
def assuming(gpu: Gpu) -> Iterator[None]:
    """Inside the block calls over tensors of a CPU are chosen and cut as on this GPU. They must not run: `under_way.collecting`."""
    token = _ASSUMED.set(gpu)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def assumed() -> Gpu | None:
    """The GPU of `assuming`; None outside of it."""
    return _ASSUMED.get()
