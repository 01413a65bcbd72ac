"""A stand-in for SGLang's compiled operators, whose wheel on the package index needs CUDA: each name is there, and fails when called.

SGLang imports some of these on a CPU; without Intel's AMX operators it computes a Llama model with its own native paths, and calls none.
Nothing in quantkv uses this: it is for trying, and testing, the plug-in on a machine without a GPU.
"""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: this stand-in has no operators")

    return missing
