"""How the plug-in stands in vLLM where vLLM asks no plug-in: functions of ours around its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def around(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Let `ours(own, *given)` stand for a function of a module, or a method of a class, which it gets as `own`. May be called again."""
    there = inspect.getattr_static(owner, name)
    own = there.__func__ if isinstance(there, classmethod) else there
    if own.__module__ == ours.__module__:
        return

    @functools.wraps(own)
    def standing(*args: Any, **kwargs: Any) -> Any:
        return ours(own, *args, **kwargs)

    standing.__module__ = ours.__module__
    setattr(owner, name, classmethod(standing) if isinstance(there, classmethod) else standing)
