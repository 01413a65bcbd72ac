"""Kernels of a layer, compiled from the moment at which vLLM makes the layer: weights are loaded and memory is measured meanwhile.

What is not known yet is taken as it usually is: pages of vLLM's own blocks, statistics of some numbers. Where a layer turns out otherwise,
its warm-up compiles what is missing, as it does without this.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import max_decode_query_len

from ...assumed import Gpu
from ...engine.background import Background, Wanted
from ...engine.layer_config import UNQUANTIZED as AS_GIVEN
from ...engine.layer_config import full_precision_tokens
from ...engine.warm_up import COMPILED_FOR, StepLimits
from ...format import get_format
from ...vllm_pages import table_width
from .backend import format_of

logger = init_logger("vllm.quantkv")
TRITON_FOLDER = "TRITON_CACHE_DIR"
AT_FIRST = os.environ.get(TRITON_FOLDER)
background = Background()


def begin(impl: Any) -> None:
    """Have a layer's kernels compiled in the background, on an NVIDIA GPU."""
    if current_platform.is_cuda() and torch.cuda.is_initialized() and (wanted := wanted_by(impl, _gpu())) is not None:
        background.begin(wanted, logger)


@contextmanager
def there() -> Iterator[None]:
    """Inside the block what was begun is there, and Triton looks for kernels where it was put, and where `quantkv warm-up` puts them:
    vLLM gives each model that it compiles a folder of its own in the meantime."""
    background.wait(logger)
    now = os.environ.get(TRITON_FOLDER)
    try:
        _set(TRITON_FOLDER, AT_FIRST)
        yield
    finally:
        _set(TRITON_FOLDER, now)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _gpu() -> Gpu:
    """The GPU of this process."""
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(found.name, (found.major, found.minor), found.multi_processor_count, found.shared_memory_per_multiprocessor)


def wanted_by(impl: Any, gpu: Gpu) -> Wanted | None:
    """What a layer that vLLM has just made will need on a GPU; None where too little is known of it."""
    if impl.kv_sharing_target_layer_name is not None or not _pages_known(impl):
        return None
    config, policy, attention = impl.config, impl.policy, impl.attention
    fmt = format_of(impl.kv_cache_dtype, impl.dtype) if policy is None else get_format(policy.format, impl.dtype)
    tokens = None if policy is None else full_precision_tokens(policy.full_precision, attention.by_position, fmt)
    size, most, scheduler = config.cache_config.block_size, config.model_config.max_model_len, config.scheduler_config
    verified = max_decode_query_len(config)
    return Wanted(
        format=fmt.name,
        full_precision=None if tokens is None else (tokens.sink, tokens.recent),
        statistics=policy is not None and (policy.wants_statistics or policy.calibration is not None),
        num_heads=impl.num_heads,
        heads=(impl.num_kv_heads, impl.head_size, impl.head_size),
        dtype=_name(impl.dtype),
        gpu=gpu,
        limits=StepLimits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, most, verified, table_width(most, size)),
        block_size=size,
        own_rows=attention.own_rows and fmt.name not in AS_GIVEN,
        options={name: getattr(attention.options, name) for name in COMPILED_FOR},
        sinks=None if attention.sinks is None else _name(attention.sinks.dtype),
        alibi=attention.alibi_slopes is not None,
    )


def _pages_known(impl: Any) -> bool:
    """Whether a layer's pages, and what it attends to, are those that are known when it is made."""
    model, policy = impl.config.model_config, impl.policy
    if not isinstance(impl.config.cache_config.block_size, int) or model.is_hybrid or (policy is not None and policy.maps):
        return False
    text = model.hf_text_config
    if getattr(text, "attention_chunk_size", None):  # which layers keep to chunks is said later
        return False
    packed = len(set(getattr(text, "layer_types", None) or ())) > 1  # in pages of few tokens where some have 16-bit copies
    return not packed or (policy is not None and policy.full_precision is not None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
