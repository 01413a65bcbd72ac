"""A stand-in for SGLang's compiled operators, whose wheel on the package index needs CUDA: each name is there, and fails when called.

SGLang imports some of these on a CPU; without Intel's AMX operators it computes a Llama model with its own native paths, and calls none.
Models that draft call those of `chains`, and linear attention those of `mamba`, which are there.
Nothing in quantkv uses this: it is for trying, and testing, the plug-in on a machine without a GPU.
"""

from collections.abc import Callable
from typing import Any

from .chains import (  # noqa: F401
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_tree_kernel_efficient_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: this stand-in has no operators")

    return missing
