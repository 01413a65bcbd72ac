"""What a model's configuration says about its layers."""

from __future__ import annotations

from transformers import PreTrainedConfig

from ..passes import Kind


def layer_kinds(config: PreTrainedConfig) -> list[Kind]:
    """The kind of each layer of a decoder. NotImplementedError for what holds anything but keys and values of its own."""
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(f"config: {type(config).__name__} is an encoder-decoder; decoders only")
    config = config.get_text_config(decoder=True)
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        raise NotImplementedError(f"config: layers of {type(config).__name__} share keys and values")
    if getattr(config, "kv_lora_rank", None):
        raise NotImplementedError(f"config.kv_lora_rank={config.kv_lora_rank}: {type(config).__name__} caches no keys and values")
    window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    default = "sliding_attention" if window else "chunked_attention" if chunk else "full_attention"
    types = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    kinds = {"full_attention": Kind(), "sliding_attention": Kind(window or 0), "chunked_attention": Kind(chunk or 0, True)}
    for name in types:
        if name not in kinds:
            raise NotImplementedError(f"config.layer_types: {name!r}; allowed: {', '.join(kinds)}")
        if name != "full_attention" and not kinds[name].window:
            raise ValueError(f"config: {name!r} layers need sliding_window or attention_chunk_size")
    return [kinds[name] for name in types]
