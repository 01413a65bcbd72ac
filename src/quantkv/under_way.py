"""What is being compiled now, for whoever says how far work is. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_COMPILED: list[str] = []


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
