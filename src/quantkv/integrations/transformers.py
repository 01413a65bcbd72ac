"""A transformers `Cache` over paged quantized caches, and the attention that reads its pages.

    use_quantkv_attention(model)
    cache = QuantizedCache(model.config, "int4")
    model.generate(**inputs, past_key_values=cache)

`Cache.update` hands the new keys and values, unread, to the attention function, which knows the padding mask: it stores them
and attends to the pages. Tested with transformers 5.17 to 5.23.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from ..cache import PagedCache
from ..calls import AttentionOptions
from ..checks import ROW_DTYPES, integer, number, refuse, tensor
from ..format import Format
from ..formats import get_format
from ..spec import CacheSpec
from .sequences import Kind, Progress, Sequences

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
        sequences.progress.num_layers += 1
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
        self.pages = self._new_pages(key_states, value_states)
        self.is_initialized = True

    def _new_pages(self, key: torch.Tensor, value: torch.Tensor) -> PagedCache:
        """Pages for rows such as key and value, `[S, HK, N, D]`."""
        fmt = get_format(self.requested, self.dtype or key.dtype)
        spec = fmt.cache_spec(key.shape[1], key.shape[3], value.shape[3], self.sequences.block_size)
        return _pages(spec, max(spec.num_blocks(self.num_tokens) * key.shape[0], 1), key.device)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Take `[S, HK, N, D]` keys and values; they are stored when the attention function gets what this returns."""
        self._new = key_states, value_states
        return PendingStates.of(key_states, self), PendingStates.of(value_states, self)

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, **options: Any) -> torch.Tensor:
        """Store the new rows, then attention of `query [S, HQ, N, D]` over the pages -> `[S, N, HQ, D_V]`; 0 for padding.

        A call that is refused changes nothing. One that fails later leaves a cache that refuses everything until it is reset.
        """
        if self._new is None or self._new[0].shape[2] != query.shape[2]:
            raise RuntimeError("keys: each cache update is followed by one attention call over the same tokens")
        (key, value), self._new, progress = self._new, None, self.sequences.progress
        pages = self._new_pages(key, value) if self.pages is None else self.pages
        self._check(pages, query, key, value, **options)
        progress.enter(self.seen, query.shape[0], query.shape[2], mask)
        self.pages, self.is_initialized = pages, True
        try:
            self._make_room()
            out = self._attend(query, key, value, **options)
        except BaseException:
            progress.failed = True
            raise
        self.seen = progress.leave()
        return out

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        batch_size, _, count, _ = query.shape
        first = self.seen == 0
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

    def _check(
        self, pages: PagedCache, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, **options: Any
    ) -> None:
        """Refuse what write and attend would, before anything advances."""
        spec, batch_size, count = pages.spec, query.shape[0], query.shape[2]
        tensor("key", key, (batch_size, spec.num_kv_heads, count, spec.head_size), ROW_DTYPES, pages.device)
        tensor("value", value, (batch_size, spec.num_kv_heads, count, spec.head_size_v), (key.dtype,), pages.device)
        tensor("query", query, (None, None, None, spec.head_size), ROW_DTYPES, pages.device)
        if query.shape[1] % spec.num_kv_heads:
            refuse("query.shape[1]", query.shape[1], f"a multiple of the {spec.num_kv_heads} kv heads is needed")
        AttentionOptions(**self.sequences.kind.options, **options).check({"S": batch_size, "HQ": query.shape[1]}, pages.device)
        if scale is not None:
            number("scaling", scale)

    def _make_room(self) -> None:
        """Pages for the tokens of the forward pass under way, and copies of those that are shared no longer."""
        needed, step = self.sequences.table.num_pages, self.sequences.step(self.pages.device)
        if needed > self.pages.num_blocks:
            old = self.pages
            self.pages = _pages(old.spec, max(needed, int(old.num_blocks * GROWTH)), old.device)
            self.pages.buffer[: old.num_blocks] = old.buffer
        if step.copies is not None:
            self.pages.copy_pages(*step.copies)

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
        self.progress = Progress()
        self.sequences = {kind: Sequences(kind, block_size, self.progress) for kind in dict.fromkeys(kinds)}
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
        return self.progress.batch_size

    def reset(self) -> None:
        self.progress.reset()
        self._sync()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (a negative number, as in transformers; 0 removes none)."""
        try:
            count = -operator.index(tokens_to_remove)  # assisted decoding passes a tensor in some versions
        except TypeError:
            count = -1
        if count < 0:
            refuse("tokens_to_remove", tokens_to_remove, "a negative integer is needed, -n removes n tokens")
        self.progress.crop(count)
        self._sync()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i becomes a copy of sequence `beam_idx[i]`. Pages are shared, and copied when one of them is written to."""
        self.progress.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        integer("repeats", repeats, 1, "a positive integer")
        self.progress.select([i for i in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        try:
            chosen = torch.arange(max(self.batch_size, 0))[indices.cpu()].tolist()
        except IndexError as error:
            raise ValueError(f"indices={indices.tolist()}: the cache holds {self.batch_size} sequences ({error})") from error
        self.progress.select(chosen)

    def _sync(self) -> None:
        for layer in self.layers:
            layer.seen, layer._new = self.progress.seen, None


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
