"""What is being compiled now, for whoever says how far work is; and what calls would compile, for whoever does it ahead. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_COMPILED: list[str] = []
_WANTED: ContextVar[list[Any] | None] = ContextVar("wanted", default=None)


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
