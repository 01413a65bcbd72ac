"""Functions compiled by numba, each for one signature, when their module is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from ...under_way import compiling

# For `fastmath`: sums may be taken in any order, and a product and a sum be one instruction; what is not finite stays what it is.
SUMS = {"contract", "reassoc", "nsz"}


def missing() -> str | None:
    """Why nothing can be compiled here, in words; None where numba is there."""
    if "vllm" in sys.modules:  # vars() of llvmlite's library is no dict, and vLLM 0.33 asks every attribute of every module for it
        return "vLLM is loaded, whose CPU platform does not start beside numba's llvmlite"
    return _without_numba()


@cache
def _without_numba() -> str | None:
    try:
        import numba  # noqa: F401
    except ModuleNotFoundError as error:
        return f"the package {error.name} is missing: pip install 'quantkv[cpu]'"
    except ImportError as error:  # it is strict about the numpy that it works with
        return f"numba cannot be imported: {error}"
    return None


def compiled(signature: Any, **options: Any) -> Callable[[Callable], Callable]:
    """A decorator: compile for `signature` alone. The result is kept on disk, by numba's rules: in the folder that NUMBA_CACHE_DIR
    names, beside the source, or in the user's cache folder; where none of them can be written, every process compiles anew."""
    from numba import njit

    def compile(function: Callable) -> Callable:
        with compiling(f"{function.__name__} by numba"):
            try:
                return njit(signature, cache=True, **options)(function)
            except (RuntimeError, OSError):  # no folder can be written, or the disk is full
                return njit(signature, **options)(function)

    return compile
