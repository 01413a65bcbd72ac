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
from ...vllm_pages import WORTH_SAYING, pool

logger = init_logger("vllm.quantkv")


def _model(config: Any) -> Model | None:
    """What the layers of vLLM's model are; None for a family that `geometry` does not know."""
    try:
        return geometry.read(config.model_config.hf_config.to_dict())
    except (ValueError, NotImplementedError):
        return None


def check_hybrid(config: Any, policy: Policy | None, nbytes: Callable[[str], int]) -> None:
    """Refuse pages of several sizes beside the states of a recurrence, before weights are loaded: vLLM would pad pages that it has to
    cut. nbytes: of a token of one kv head, by the name of a format. NotImplementedError naming the layers."""
    if not config.model_config.is_hybrid:
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
    reason = "this model keeps states of a recurrence (Mamba) beside keys and values, so pages of all layers need one size"
    raise NotImplementedError(f"quantkv: {given}: {reason}: {do}")


def warn_of_padding(config: Any, policy: Policy | None, dtype: torch.dtype) -> None:
    """Say, before weights are loaded, what a policy costs where vLLM pads the pages of some layers to those of others."""
    if policy is None or config.cache_config.kv_cache_dtype_skip_layers or (model := _model(config)) is None:
        return
    try:
        stored = PolicyFile(policy.format, {layer: policy.of(layer, dtype).name for layer in range(len(model.layers))})
        ranks = config.parallel_config.tensor_parallel_size
        found = pool(model, capacity(model, stored, ranks, config.cache_config.block_size))
    except (ValueError, NotImplementedError):  # what is wrong is said by whoever refuses it
        return
    asked = config.model_config.max_model_len, config.max_in_flight_tokens
    if found is not None and found.padding(*asked) > WORTH_SAYING:
        logger.warning(
            "quantkv: vLLM pads the pages of all layers of this model to the largest: with this policy %s tokens take %s bytes, %.2fx of "
            "the %s that its layers' formats need. Formats of the same bytes a token waste nothing; `quantkv plan` counts the same",
            f"{asked[0]:,}",
            f"{found.sequence_bytes(*asked):,}",
            found.padding(*asked),
            f"{found.unpadded_bytes(*asked):,}",
        )
