"""The Triton halves of the codecs in this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def shipped_codec(name: str) -> Callable[[], Any]:
    """For `Codec.device`: `name` in `kernels.codecs`, imported when it is first asked for."""

    def load() -> Any:
        from ..implementations.triton.kernels import codecs

        return getattr(codecs, name)

    return load
