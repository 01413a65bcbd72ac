"""transformers' attention and mask functions over a quantized cache, registered by name."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from ... import deprecated, weights
from ...checks import refuse
from ...engine.decode_metadata import mask_summary
from ...engine.layer_config import UNQUANTIZED
from ...formats import get_format
from ..transformers_model import decoder_of, plain_attention
from .compiled import HANDED
from .layers import QuantizedLayer
from .lazy_kv import ATTENTION, PagedLength

log = logging.getLogger("quantkv")


def use_quantkv_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Let the decoder of `model` read a `QuantizedCache`: sets its attention implementation to "quantkv". Returns the model.

    Encoders of images and sound stay as they are. With another cache, or none, the decoder attends as with "sdpa" (or "eager", where
    that does not know its options). `model.set_attn_implementation("sdpa")` or "eager" undoes it.
    Errors: NotImplementedError naming an encoder-decoder, or a model that does not ask transformers for its attention function.
    """
    decoder_of(model).set_attn_implementation({"": ATTENTION})
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
    """transformers' attention function over a `QuantizedCache`: `query [S, HQ, N, D]` -> `[S, N, HQ, D_V]`, no weights.

    Keys and values that no `QuantizedLayer` holds are attended to as by "sdpa" or "eager".
    """
    compiling = torch.compiler.is_compiling()
    layer = HANDED.take() if compiling else getattr(key, "layer", None)
    if layer is None:
        options = {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window, "is_causal": is_causal, **kwargs}
        return plain_attention(module, query, key, value, attention_mask, softcap=softcap, s_aux=s_aux, **options)
    if dropout:
        refuse("dropout", dropout, "a quantized cache is for inference")
    if torch.is_grad_enabled() and query.requires_grad:
        raise NotImplementedError("gradients: a quantized cache has none; call under torch.no_grad() or torch.inference_mode()")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise NotImplementedError("is_causal=False: only causal attention can read a cache that grows")
    given = [name for name in ("output_attentions", "head_mask", "position_bias") if kwargs.get(name) not in (None, False)]
    if given:
        raise NotImplementedError(f"{', '.join(given)}: not supported by attention implementation {ATTENTION!r}")
    if compiling:
        if attention_mask is not None and attention_mask.dtype == torch.bool and attention_mask.shape[1:3] == (1, 1):
            attention_mask = attention_mask[:, 0, 0]
    else:
        attention_mask = getattr(attention_mask, "padding", attention_mask)
    short = attention_mask is not None and query.shape[2] == 1 and attention_mask.dtype == torch.int32  # by `quantkv_mask`
    if not (attention_mask is None or short or attention_mask.ndim == 2 or (not compiling and layer.is_shared(key.update))):
        raise NotImplementedError(f"attention_mask.shape={tuple(attention_mask.shape)}: only padding masks [batch, tokens]")
    window, asked = layer.sequences.kind.window, layer.sequences.windows
    if sliding_window not in (None, window) or (sliding_window is None and window and asked and window not in asked):
        refuse("sliding_window", sliding_window, f"config gives this layer a window or chunks of {window}, and its model's masks do not")
    options = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    if layer.is_new and not compiling:
        _expect_statistics(layer)
        if not layer.latent:
            _meet(module, layer)
    if compiling:
        return layer.traced(query, key, value, attention_mask, **options), None
    if layer.latent:
        return layer.attend_latents(module, query, key, value, attention_mask, **options), None
    return layer.attend(query, attention_mask, key.update, **options), None


# Models of which a warning said that their keys are stored with large biases, by their configurations.
_warned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _meet(module: torch.nn.Module, layer: QuantizedLayer) -> None:
    """What a layer's attention module tells of the model, before the layer stores its first row: whether its calibration is of another one,
    and whether its keys have biases that break them. ValueError for another model."""
    if layer.weights is not None:
        weights.check({layer.index: layer.weights}, {layer.index: weights.of_module(module)})
    maps, name = layer.config.maps, get_format(layer.requested, torch.bfloat16).name
    of_model = getattr(module, "config", module)  # one object for all layers of a model
    known = id(of_model) in _warned or name in UNQUANTIZED or (maps.k and maps.k.key_mean is not None)
    largest = 0.0 if known else weights.largest_key_bias(module)
    if largest > weights.LARGE_BIAS:
        _warned[id(of_model)] = of_model
        log.warning(
            weights.BIASED, type(module).__name__, largest, name, "QuantizedCache(model.config, '4bit') (or '8bit', '3bit', '2bit')"
        )
    layer.is_new = False


def _expect_statistics(layer: QuantizedLayer) -> None:
    """Statistics that a cache waits for are there before a layer stores its first row."""
    positions = layer.sequences.cache_positions
    if positions.statistics != "off":
        _no_statistics(positions.statistics)
        positions.statistics = "off"


def _no_statistics(mode: str) -> None:
    """A cache that waits for statistics stores its first row, and no model was seen: a warning, or, where they are required, a refusal."""
    said = "no model with the configuration that it was made from was called, so keys and values are stored without its statistics"
    if mode == "require":
        refuse(
            "policy.statistics", repr(mode), f"{said}; allowed: QuantizedCache(model.config, ...) of the model that is called, or 'auto'"
        )
    log.warning("quantkv: QuantizedCache: %s", said)


def quantkv_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool | None = None,
    use_vmap: bool = False,
    local_size: int | None = None,
    config: PreTrainedConfig | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """transformers' mask function. For a layer in pages: the padding mask, bool `[S, 1, 1, q_offset + q_length]`, in `padding` without
    the dimensions of 1, or None where nothing is padded; in a pass of one token a sequence `mask_summary` of it, for which nothing is
    read on the host. What else a mask could say is refused, and causality and windows the cache knows. For any other: sdpa's mask.

    config: of the model that asks. ValueError where its layers are not those that the cache was made for.
    """
    if not isinstance(kv_length, PagedLength):
        options = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "attention_mask": attention_mask}
        options |= {"local_size": local_size, "allow_is_causal_skip": allow_is_causal_skip, "use_vmap": use_vmap, "config": config}
        return sdpa_mask(**options, **kwargs)
    if kv_length.made_for is not None and config is not None:
        kv_length.made_for.check(config)
    if use_vmap or not (allow_is_causal_skip or q_length == 1):
        raise NotImplementedError("mask: only causal attention with padding; no bidirectional, packed, blockwise or custom masks")
    kv_length.windows.add(local_size)
    if attention_mask is None:
        return None
    padding, fewer = attention_mask.bool(), False
    if not isinstance(q_offset, torch.Tensor):
        padding = padding[:, : q_offset + q_length]
        fewer = padding.shape[1] < q_offset + q_length  # than there are tokens: handed on as it is, and the cache refuses its shape
    if q_length == 1 and not fewer:
        return mask_summary(padding)
    mask = padding[:, None, None]  # of four dimensions, as models expect of a mask that they cut
    if torch.compiler.is_compiling():
        return mask
    if not fewer and bool(padding.all()):
        return None
    mask.padding = padding
    return mask


AttentionInterface.register(ATTENTION, quantkv_attention)
AttentionMaskInterface.register(ATTENTION, quantkv_mask)

__getattr__ = deprecated.module(__name__, "quantkv.integrations.transformers_model", ("check_weights",))
