"""A model of transformers: what its configuration says about its layers, the part that attends, and its own attention."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from inspect import signature
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutputWithPast

from .. import weights
from ..calibration import Calibration
from ..checks import instance
from ..geometry import (
    ATTENTION_TYPES,
    EMPTY_TYPES,
    HYBRID_TYPES,
    MODELS,
    SHAPE,
    STATE_TYPES,
    Geometry,
    Heads,
    Kind,
    heads_of,
    model_types,
    stretched,
    unknown_type,
)
from ..policy import Policy

# What models, and their outputs, call their cache; `cache` since transformers 5.24, which takes the older name with a warning.
CACHE = "cache" if any(field.name == "cache" for field in fields(BaseModelOutputWithPast)) else "past_key_values"
UNEVEN = ("global_head_dim", "num_global_key_value_heads", "v_head_dim", "attention_head_dim")  # other sizes in some layers, or of values


class LayerPlan(NamedTuple):
    """What a layer of a decoder keeps between forward passes.

    kind: which of its keys its queries see; None: it has none.
    latent: size of the vector that its keys and values are computed from, which it keeps in their place; 0: it keeps keys and values.
    own: transformers' layer for what else it keeps; None: it has none.
    states: whether it keeps states of a recurrence or convolution there.
    """

    kind: Kind | None
    latent: int = 0
    own: Any = None
    states: bool = False


def plan_layers(config: PreTrainedConfig) -> list[LayerPlan]:
    """What each layer of a decoder keeps. NotImplementedError, by name, for what can be neither quantized nor left as it is."""
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(f"config: {name} is an encoder-decoder; decoders only")
    config = config.get_text_config(decoder=True)
    if config.model_type in MODELS:
        raise NotImplementedError(f"config: {name}: {MODELS[config.model_type]}")
    types = _types(config)
    for given in types:
        if given not in (*ATTENTION_TYPES, *HYBRID_TYPES, *STATE_TYPES, *EMPTY_TYPES):
            raise NotImplementedError(unknown_type(given, name))
    own = DynamicCache(config=config).layers
    plans = [_plan(config, given, layer) for given, layer in zip(types, own)]
    if all(plan.kind is None for plan in plans):
        raise NotImplementedError(f"config: {name} has no attention layers, so no keys and values to quantize (layer_types)")
    return plans


def _types(config: PreTrainedConfig) -> list[str]:
    """Type of each layer; shorter than the layers where the last ones share keys and values and have no place in the cache."""
    for size, kinds in (("sliding_window", ("sliding_attention", "hybrid_sliding")), ("attention_chunk_size", ("chunked_attention",))):
        for given in getattr(config, "layer_types", None) or ():
            if given in kinds and not getattr(config, size, None):
                raise ValueError(f"config: {given!r} layers need sliding_window or attention_chunk_size")
    if getattr(config, "layers_block_type", None) and not getattr(config, "layer_types", None):
        raise NotImplementedError(
            f"config.layers_block_type: {type(config).__name__} of this transformers keeps states in the model itself"
        )
    try:
        return list(get_layer_types_and_kwargs(config)[0])
    except AttributeError as error:
        raise NotImplementedError(f"config: {type(config).__name__} does not say what its layers keep ({error}); no layer_types") from error


def _plan(config: PreTrainedConfig, given: str, own: Any) -> LayerPlan:
    if given in STATE_TYPES or given in EMPTY_TYPES:
        return LayerPlan(None, own=own, states=given in STATE_TYPES)
    attention = HYBRID_TYPES.get(given, given)
    kind = Kind() if attention == "full_attention" else Kind(own.sliding_window, attention == "chunked_attention")
    latent = getattr(config, "kv_lora_rank", None) or 0
    if latent and kind != Kind():
        raise NotImplementedError(f"config.kv_lora_rank={latent}: {given!r} layers that keep latents instead of keys and values")
    return LayerPlan(kind, latent, own, True) if given in HYBRID_TYPES else LayerPlan(kind, latent)


def shares_keys(config: PreTrainedConfig) -> bool:
    """Whether some layers read keys and values of others."""
    config = config.get_text_config(decoder=True)
    return bool(getattr(config, "num_kv_shared_layers", 0)) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ())


def geometry_of(config: PreTrainedConfig) -> Geometry:
    """What a config says of the model's layers and heads; heads are None where it does not say."""
    plans, config = plan_layers(config), config.get_text_config(decoder=True)
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * len(plans)
    heads = {number: _heads(layer, plan) for number, (plan, layer) in enumerate(zip(plans, layers)) if plan.kind is not None}
    return Geometry(max(len(plans), config.num_hidden_layers), heads)


def _heads(config: PreTrainedConfig, plan: LayerPlan) -> Heads | None:
    """Heads of all layers, or of one with its own config. None for a latent, and where `geometry` does not know the class and there is no
    word for kv heads, or more than one for sizes."""
    if plan.latent:
        return None
    if config.model_type not in model_types()["types"]:
        if "num_key_value_heads" not in signature(type(config)).parameters or any(getattr(config, name, None) for name in UNEVEN):
            return None
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return Heads(config.num_key_value_heads, size, size) if isinstance(config.num_key_value_heads, int) else None
    attention = "sliding_attention" if plan.kind.window and not plan.kind.chunked else "full_attention"
    return heads_of({"model_type": config.model_type, **{name: getattr(config, name, None) for name in SHAPE}}, attention)


def check_policy(policy: Policy, config: PreTrainedConfig, plans: Sequence[LayerPlan]) -> None:
    """Refuse a policy that was made for another model. plans: of the model's layers."""
    geometry = geometry_of(config)
    policy.check(geometry.num_layers)
    if policy.calibration is not None:
        if any(plan.latent for plan in plans):
            raise NotImplementedError("policy.calibration: latents in place of keys and values are not calibrated")
        policy.calibration.check(geometry)


def max_positions(config: PreTrainedConfig) -> int | None:
    """How many tokens a model has positions for; None if its config sets no bound."""
    config = config.get_text_config(decoder=True)
    return stretched(getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None))


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part of `model` that attends to cached keys. NotImplementedError where transformers cannot tell it how."""
    instance("model", model, PreTrainedModel, "a model of transformers")
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise NotImplementedError(f"model: {name} is an encoder-decoder; decoders only")
    config = model.config.get_text_config(decoder=True)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is config]
    if not parts or not all(part._can_set_attn_implementation() for part in parts):
        raise NotImplementedError(
            f"model: {name} computes attention by itself and cannot be told to do it otherwise (its code does not use transformers' "
            "AttentionInterface), so it cannot read quantized pages"
        )
    return parts[0]


def check_weights(model: PreTrainedModel, calibration: Calibration | None) -> None:
    """ValueError where a calibration was made of another model: of one with other key projections."""
    if calibration is not None:
        modules = {
            part.layer_idx: part for part in reversed([*decoder_of(model).modules()]) if isinstance(getattr(part, "layer_idx", None), int)
        }
        calibration.check_weights({number: weights.of_module(part) for number, part in modules.items()})


def plain_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention by transformers itself, over keys and values that are given: "sdpa", or "eager" where that does not know the options."""
    if softcap is None and s_aux is None and not options.get("output_attentions"):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return _eager(module, query, key, value, attention_mask, softcap=softcap, s_aux=s_aux, **options)


def _eager(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's own attention function, with the mask `[S, 1, N, keys]` that it wants: what to add to the scores."""
    places = (sys.modules.get(base.__module__) for base in type(module).__mro__)
    attend = next((place.eager_attention_forward for place in places if hasattr(place, "eager_attention_forward")), None)
    if attend is None:
        raise NotImplementedError(f"softcap, s_aux, output_attentions: {type(module).__name__} has no attention function that knows them")
    if mask is None and query.shape[2] > 1:  # what transformers leaves to is_causal
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    return attend(module, query, key, value, mask, **options)
