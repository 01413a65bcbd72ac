"""Layers of several formats in vLLM's one pool of blocks: which models cannot have them, and what they cost in the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.logger import init_logger

from ... import geometry
from ...capacity import capacity
from ...geometry import Model
from ...policy import Policy
from ...policy_file import PolicyFile
from ...vllm_pages import WORTH_SAYING, pool, unified
from .blocks import can_pack

logger = init_logger("vllm.quantkv")
PACKS = "leave VLLM_KV_CACHE_LAYOUT unset or BLHNC, without a connector that needs another, without pipeline or context parallelism"


def _model(config: Any) -> Model | None:
    """What the layers of vLLM's model are; None for a family that `geometry` does not know."""
    try:
        return geometry.read(config.model_config.hf_config.to_dict())
    except (ValueError, NotImplementedError):
        return None


def check_hybrid(config: Any, policy: Policy | None, nbytes: Callable[[str], int]) -> None:
    """Refuse pages of several sizes beside the states of a recurrence where blocks cannot be packed, before weights are loaded: vLLM
    would pad pages that it has to cut. nbytes: of a token of one kv head, by a format's name. NotImplementedError naming the layers."""
    if not config.model_config.is_hybrid or can_pack(config):
        return

    asked, skipped = config.cache_config.cache_dtype, config.cache_config.kv_cache_dtype_skip_layers
    if policy is None:
        stored = {asked: nbytes(asked)}
    else:
        model = _model(config)
        layers = range(config.model_config.get_total_num_hidden_layers()) if model is None else model.attention
        stored = {name: nbytes(name) for name in map(policy.name_of, layers)}
    sizes = {*stored.values(), *([nbytes("none")] if skipped else [])}
    if len(sizes) == 1:
        return
    if skipped:
        given, do = f"kv_cache_dtype_skip_layers={skipped!r}", "skip no layers"
    else:
        named = ", ".join(f"{name} ({size} bytes a token and kv head)" for name, size in stored.items())
        given, do = f"policy with {named}", "give all attention layers one format, or formats of the same bytes"
    reason = "this model keeps states of a recurrence (Mamba) beside keys and values, so pages need one size where vLLM plans alone"
    raise NotImplementedError(f"quantkv: {given}: {reason}: {do}, or {PACKS}")


def warn_of_padding(config: Any, policy: Policy | None, dtype: torch.dtype) -> None:
    """Say, before weights are loaded, what a policy costs where blocks are not packed and vLLM pads pages to the largest."""
    if policy is None or config.model_config.is_hybrid or config.cache_config.kv_cache_dtype_skip_layers:
        return
    if (model := _model(config)) is None:
        return
    try:
        stored = PolicyFile(policy.format, {layer: policy.of(layer, dtype).name for layer in range(len(model.layers))})
        ranks = config.parallel_config.tensor_parallel_size
        found = pool(model, capacity(model, stored, ranks, config.cache_config.block_size), ranks)
    except (ValueError, NotImplementedError):  # what is wrong is said by whoever refuses it
        return
    asked = config.model_config.max_model_len, config.max_in_flight_tokens
    if found is not None and not can_pack(config):
        found = unified(found.layers, found.block_size)
    if found is not None and found.density > WORTH_SAYING:
        logger.warning(
            "quantkv: vLLM's pages of this model have one size: with this policy %s tokens take %s bytes, %.2fx of the %s that its layers' "
            "formats need. To lose less, %s",
            f"{asked[0]:,}",
            f"{found.sequence_bytes(*asked):,}",
            found.padding(*asked),
            f"{found.unpadded_bytes(*asked):,}",
            PACKS,
        )
