"""What is being compiled now, for whoever says how far work is; and what calls would compile, for whoever does it ahead. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_COMPILED: list[str] = []
_WANTED: ContextVar[list[Any] | None] = ContextVar("wanted", default=None)
_IN_PROCESSES: ContextVar[bool] = ContextVar("in_processes", default=False)


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Inside the block `what`, such as "decode.cu by NVRTC", is being compiled, or fetched from where it was kept."""
    _COMPILED.append(what)
    try:
        yield
    finally:
        _COMPILED.remove(what)


def compiled_now() -> str | None:
    """The latest of what is being compiled, in any thread; None: nothing is."""
    return next(iter(_COMPILED[-1:]), None)


@contextmanager
def collecting() -> Iterator[list[Any]]:
    """Inside the block calls launch no kernel of ours: what each would compile is put into the list, Triton's launches and configurations
    of NVRTC's kernels. Of this thread."""
    found: list[Any] = []
    token = _WANTED.set(found)
    try:
        yield found
    finally:
        _WANTED.reset(token)


def wanted() -> list[Any] | None:
    """The list of `collecting`; None outside of it."""
    return _WANTED.get()


def compile_apart(compile_one: Callable[[], object]) -> None:
    """Call what compiles a kernel by NVRTC, which then compiles in a process of its own; this thread waits. For many threads at once."""
    token = _IN_PROCESSES.set(True)
    try:
        compile_one()
    finally:
        _IN_PROCESSES.reset(token)


def in_processes() -> bool:
    """Whether NVRTC is to compile in a process of its own: inside of `compile_apart`, in its thread."""
    return _IN_PROCESSES.get()
