"""A transformers `Cache` over paged quantized caches, and the attention that reads its pages.

    use_quantkv_attention(model)
    cache = QuantizedCache(model.config, "int4")
    model.generate(**inputs, past_key_values=cache)

`Cache.update` hands the new keys and values, unread, to the attention function, which knows the padding mask: it stores them
and attends to the pages. Tested with transformers 5.17 to 5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from ..cache import PagedCache
from ..checks import refuse
from ..format import Format
from ..formats import get_format
from ..spec import CacheSpec
from .sequences import Kind, Sequences

ATTENTION = "quantkv"
GROWTH = 1.25  # a pool that is full grows by this factor: what is allocated stays close to what is used


def use_quantkv_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Let `model` read a `QuantizedCache`: sets its attention implementation to "quantkv". Returns the model.

    `model.set_attn_implementation("sdpa")` or "eager" undoes it.
    """
    model.set_attn_implementation(ATTENTION)
    return model


class PendingStates(torch.Tensor):
    """New keys or values between `Cache.update` and the attention function: any use by another attention is an error."""

    layer: QuantizedLayer

    @classmethod
    def of(cls, states: torch.Tensor, layer: QuantizedLayer) -> PendingStates:
        pending = states.as_subclass(cls)
        pending.layer = layer
        return pending

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ == "__get__":  # shape, dtype, device and the like
            return super().__torch_function__(func, types, args, kwargs or {})
        raise RuntimeError(
            f"{func.__name__}: a QuantizedCache is read by the attention implementation {ATTENTION!r} only, as the "
            "rows are in quantized pages; call quantkv.integrations.transformers.use_quantkv_attention(model)"
        )


class QuantizedLayer(CacheLayerMixin):
    """One layer of a `QuantizedCache`; its pages are those of `sequences`, which it shares with the layers of its kind."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, fmt: str | Format, sequences: Sequences, dtype: torch.dtype | None, fresh_prefill: bool, num_tokens: int) -> None:
        super().__init__()
        self.requested, self.dtype, self.fresh_prefill, self.num_tokens = fmt, dtype, fresh_prefill, num_tokens
        self.sequences, self.is_sliding, self.seen = sequences, sequences.kind.window > 0, 0
        self.pages: PagedCache | None = None
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def record_past(self) -> bool:
        return self.sequences.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.sequences.record_past = value

    def activate_past_recording(self) -> None:
        self.record_past = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        fmt = get_format(self.requested, self.dtype or key_states.dtype)
        spec = fmt.cache_spec(key_states.shape[1], key_states.shape[3], value_states.shape[3], self.sequences.block_size)
        self.pages = _pages(spec, max(spec.num_blocks(self.num_tokens) * key_states.shape[0], 1), key_states.device)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Take `[S, HK, N, D]` keys and values; they are stored when the attention function gets what this returns."""
        if self.pages is None:
            self.lazy_initialization(key_states, value_states)
        self._new = key_states, value_states
        return PendingStates.of(key_states, self), PendingStates.of(value_states, self)

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, **options: Any) -> torch.Tensor:
        """Store the new rows, then attention of `query [S, HQ, N, D]` over the pages -> `[S, N, HQ, D_V]`; 0 for padding."""
        batch_size, _, count, _ = query.shape
        first = self.seen == 0
        key, value = self._advance(batch_size, count, mask)
        step = self.sequences.step(query.device)
        key, value, q = (_tokens(t, step.rows) for t in (key, value, query))
        step.write(self.pages, key, value)
        pages = self.pages
        if first and self.fresh_prefill:
            plain = get_format("none", key.dtype).cache_spec(key.shape[1], key.shape[2], value.shape[2], pages.spec.block_size)
            pages = PagedCache(plain, self.sequences.table.num_pages, query.device)
            step.write(pages, key, value)
        out = step.attend(pages, q, max_query_len=count, **self.sequences.kind.options, **options)
        if step.rows is not None:
            out = out.new_zeros(batch_size * count, *out.shape[1:]).index_copy_(0, step.rows, out)
        return out.unflatten(0, (batch_size, count))

    def _advance(self, batch_size: int, count: int, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Join the forward pass under way, or begin the next. Returns the new keys and values."""
        if self._new is None or self._new[0].shape[2] != count:
            raise RuntimeError("keys: each cache update is followed by one attention call over the same tokens")
        (key, value), self._new = self._new, None
        if self.seen == self.sequences.seen:
            self.sequences.begin(batch_size, count, mask)
        elif self.seen + count != self.sequences.seen:
            raise RuntimeError(
                f"cache: this layer holds {self.seen} tokens, others {self.sequences.seen}; a forward pass that skipped "
                "layers or failed leaves a cache that must be reset"
            )
        self.seen = self.sequences.seen
        needed, step = self.sequences.table.num_pages, self.sequences.step(key.device)
        if needed > self.pages.num_blocks:
            old = self.pages
            self.pages = _pages(old.spec, max(needed, int(old.num_blocks * GROWTH)), key.device)
            self.pages.buffer[: old.num_blocks] = old.buffer
        if step.copies is not None:
            self.pages.copy_pages(*step.copies)
        return key, value

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1


def _pages(spec: CacheSpec, num_blocks: int, device: torch.device) -> PagedCache:
    with torch.inference_mode(False):  # a buffer born in inference mode could not be written to outside it
        return PagedCache(spec, num_blocks, device)


def _tokens(states: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """`[S, H, N, D]` -> `[T, H, D]`, padding left out."""
    tokens = states.transpose(1, 2).flatten(0, 1)
    return tokens if rows is None else tokens[rows]


class QuantizedCache(Cache):
    """KV cache of a decoder in quantized pages, for `generate(past_key_values=...)` or `model(past_key_values=...)`.

    config: the model's; its layer types say which layers have a sliding window or chunks. Their pages that no query sees any more
        are given back.
    format: name of a format, or one for each layer; "none" keeps rows as they are.
    block_size: tokens of a page.
    dtype: what "none" stores; the model's dtype if None.
    fresh_prefill: False: a prompt attends to what was stored, so that the answer does not depend on how the prompt was cut into
        chunks. True: the first forward pass attends to its own exact keys and values, as engines commonly do: closer to the
        16-bit answer where the prompt comes whole, another answer where it comes in chunks.
    num_tokens: tokens a sequence to allocate pages for at once; pages beyond are added as they are needed.
    Errors: ValueError or NotImplementedError naming what is not supported: encoder-decoders, layers other than full, sliding and
        chunked attention, layers that share keys and values, latent attention, custom masks, gradients.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        format: str | Format | Sequence[str | Format] = "int4",
        *,
        block_size: int = 16,
        dtype: torch.dtype | None = None,
        fresh_prefill: bool = False,
        num_tokens: int = 0,
    ) -> None:
        kinds = _layer_kinds(config)
        formats = [format] * len(kinds) if isinstance(format, str | Format) else list(format)
        if len(formats) != len(kinds):
            refuse("format", f"{len(formats)} formats", f"the model has {len(kinds)} layers")
        for name in formats:
            get_format(name, dtype or torch.bfloat16)
        self.sequences = {kind: Sequences(kind, block_size) for kind in kinds}
        super().__init__(
            layers=[QuantizedLayer(name, self.sequences[kind], dtype, fresh_prefill, num_tokens) for name, kind in zip(formats, kinds)]
        )

    @property
    def specs(self) -> list[CacheSpec]:
        """Geometry of each layer. ValueError before the first forward pass, which tells the sizes."""
        if not all(layer.is_initialized for layer in self.layers):
            raise ValueError("specs: the sizes of heads are known after the first forward pass")
        return [layer.pages.spec for layer in self.layers]

    @property
    def spec(self) -> CacheSpec:
        """Geometry that all layers share. ValueError where they differ."""
        if len(specs := set(self.specs)) > 1:
            raise ValueError("spec: the layers differ; see specs")
        return specs.pop()

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that hold tokens, over all layers."""
        return sum(
            layer.pages.spec.nbytes(layer.sequences.table.used_pages)
            for layer in self.layers
            if layer.is_initialized and layer.sequences.table is not None
        )

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of all pages, used or not."""
        return sum(layer.pages.nbytes for layer in self.layers if layer.is_initialized)

    @property
    def batch_size(self) -> int:
        """Sequences in the cache, -1 before the first forward pass."""
        table = next(iter(self.sequences.values())).table
        return -1 if table is None else len(table.rows)

    def reset(self) -> None:
        for sequences in self.sequences.values():
            sequences.reset()
        self._sync()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (a negative number, as in transformers; 0 removes none)."""
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding passes a tensor in some versions
        if tokens_to_remove > 0:
            refuse("tokens_to_remove", tokens_to_remove, "a negative number is needed, -n removes n tokens")
        for sequences in self.sequences.values():
            sequences.crop(-tokens_to_remove)
        self._sync()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i becomes a copy of sequence `beam_idx[i]`. Pages are shared, and copied when one of them is written to."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([i for i in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(torch.arange(max(self.batch_size, 0))[indices.cpu()].tolist())

    def _select(self, indices: list[int]) -> None:
        for sequences in self.sequences.values():
            sequences.select(indices)

    def _sync(self) -> None:
        for layer in self.layers:
            layer.seen, layer._new = layer.sequences.seen, None


def _layer_kinds(config: PreTrainedConfig) -> list[Kind]:
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
    layer = getattr(key, "layer", None)
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
    if attention_mask is not None and attention_mask.ndim != 2:
        raise NotImplementedError(f"attention_mask.shape={tuple(attention_mask.shape)}: only padding masks [batch, tokens]")
    if sliding_window not in (None, layer.sequences.kind.window):
        refuse("sliding_window", sliding_window, f"config.layer_types gives this layer {layer.sequences.kind.window}")
    return layer.attend(query, attention_mask, scale=scaling, softcap=softcap or 0.0, sinks=s_aux), None


def quantkv_mask(
    q_length: int,
    q_offset: int,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """transformers' mask function: the padding mask, bool `[S, q_offset + q_length]`, or None where nothing is padded.

    What else a mask could say is refused here; causality and windows the cache knows.
    """
    if use_vmap or not allow_is_causal_skip:
        raise NotImplementedError("mask: only causal attention with padding; no bidirectional, packed, blockwise or custom masks")
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, : q_offset + q_length].bool()
    return None if bool(attention_mask.all()) else attention_mask


AttentionInterface.register(ATTENTION, quantkv_attention)
AttentionMaskInterface.register(ATTENTION, quantkv_mask)
