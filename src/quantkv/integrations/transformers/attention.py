"""transformers' attention and mask functions over a quantized cache, registered by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ...checks import refuse
from ..passes import brief
from .compiled import HANDED
from .layers import ATTENTION

CAUSAL = ("causal_mask_function", "and_mask")  # transformers' functions of a causal mask, and of one with a window or chunks


def use_quantkv_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Let `model` read a `QuantizedCache`: sets its attention implementation to "quantkv". Returns the model.

    `model.set_attn_implementation("sdpa")` or "eager" undoes it.
    """
    model.set_attn_implementation(ATTENTION)
    return model


def quantkv_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function over a `QuantizedCache`: `query [S, HQ, N, D]` -> `[S, N, HQ, D_V]`, no weights."""
    compiling = torch.compiler.is_compiling()
    layer = HANDED.take() if compiling else getattr(key, "layer", None)
    if layer is None:
        raise ValueError(
            f"past_key_values: attention implementation {ATTENTION!r} reads a QuantizedCache; pass "
            "past_key_values=quantkv.integrations.transformers.QuantizedCache(model.config)"
        )
    if dropout:
        refuse("dropout", dropout, "a quantized cache is for inference")
    if torch.is_grad_enabled() and query.requires_grad:
        raise NotImplementedError("gradients: a quantized cache has none; call under torch.no_grad() or torch.inference_mode()")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise NotImplementedError("is_causal=False: only causal attention can read a cache that grows")
    given = [name for name in ("output_attentions", "head_mask", "position_bias") if kwargs.get(name) not in (None, False)]
    if given:
        raise NotImplementedError(f"{', '.join(given)}: not supported by attention implementation {ATTENTION!r}")
    if attention_mask is not None and attention_mask.ndim != 2 and (query.shape[2] > 1 or attention_mask.shape[1:] != (1, 1, 2)):
        raise NotImplementedError(f"attention_mask.shape={tuple(attention_mask.shape)}: only padding masks [batch, tokens]")
    if sliding_window not in (None, layer.sequences.kind.window):
        refuse("sliding_window", sliding_window, f"config.layer_types gives this layer {layer.sequences.kind.window}")
    options = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    if compiling:
        return layer.traced(query, key, value, attention_mask, **options), None
    return layer.attend(query, attention_mask, **options), None


def quantkv_mask(
    q_length: int,
    q_offset: int | torch.Tensor,
    kv_length: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """transformers' mask function: the padding mask, bool `[S, q_offset + q_length]`, or None where nothing is padded; in a pass of one
    token a sequence `passes.brief` of it, for which nothing is read on the host.

    What else a mask could say is refused here; causality and windows the cache knows.
    """
    # transformers takes the skip away from passes of one token that may be compiled: what the mask is says its function.
    plain = getattr(mask_function, "__name__", None) in CAUSAL if q_length == 1 else allow_is_causal_skip
    if use_vmap or not plain:
        raise NotImplementedError("mask: only causal attention with padding; no bidirectional, packed, blockwise or custom masks")
    if attention_mask is None:
        return None
    if isinstance(q_offset, torch.Tensor):
        if attention_mask.shape[1] > kv_length:
            refuse("attention_mask.shape[1]", attention_mask.shape[1], f"the cache was made for num_tokens={kv_length}")
    else:
        attention_mask = attention_mask[:, : q_offset + q_length]
    if q_length == 1:
        return brief(attention_mask)
    return None if bool(attention_mask.all()) else attention_mask.bool()


AttentionInterface.register(ATTENTION, quantkv_attention)
AttentionMaskInterface.register(ATTENTION, quantkv_mask)
