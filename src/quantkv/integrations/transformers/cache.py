"""A transformers `Cache` over paged quantized caches."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from ... import deprecated
from ...checks import ROW_DTYPES, integer, refuse
from ...engine.cache_positions import CachePositions
from ...engine.layer_config import LayerConfig
from ...engine.sequences import Sequences
from ...format import Format
from ...formats import get_format
from ...model_analysis.statistics import latent_means, with_statistics
from ...policy import Policy
from ...spec import CacheSpec
from ..asked import of_prompts
from ..transformers_model import LayerPlan, check_policy, geometry_of, plan_layers, shares_keys
from .first_use import wait_for
from .layers import QuantizedLayer
from .made_for import MadeFor
from .recurrent_and_latent import HybridLayer, LatentLayer


@deprecated.attributes(exact_nbytes="full_precision_nbytes")
class QuantizedCache(Cache):
    """KV cache of a decoder in quantized pages, for `generate(past_key_values=...)` or `model(past_key_values=...)`.

    Layers of full, sliding and chunked attention keep keys and values in pages; those of latent attention (DeepSeek's MLA) the latents,
    which queries read absorbed. What linear attention, convolutions and recurrences (Mamba) keep stays in transformers'
    own layers, at the model's precision: see `quantized_layers` and `passed_layers`.

    config: the model's; its layer types say what each layer is. Pages of layers with a sliding window or chunks that no query sees any
        more are given back.
    format: a preset, "8bit", "4bit", "3bit" or "2bit": the best format of so many bits, sink and recent tokens in full precision, and
        statistics of the model, which the first forward pass takes (0.2 s on a GPU, seconds on a CPU). Or a `Policy`, the path of its JSON
        file, or what that holds as a dict: formats by layer, with what guides their writers, and full-precision tokens. Or the name of a
        format, or one for each layer, None for those without keys and values; "none" keeps rows as they are. Of a latent the K half
        counts.
    block_size: tokens of a page.
    dtype: what "none" stores; the model's dtype if None.
    prompt: "own": a pass of several tokens attends to their own keys and values as the model computed them, and to pages only before
        them; they are quantized into pages beside it. "stored": it attends to pages alone, so that the answer does not depend on how the
        prompt was cut into passes. None: what the policy says, "own" without one.
    prompt_precision: "8bit": scores of passes of at least 128 tokens are products of 8-bit integers: faster for long prompts on a Hopper
        GPU, and off by 1 % (docs/attention.md). None: what the policy says, "16bit" without one.
    fresh_prefill: deprecated: True is prompt="own", False prompt="stored".
    num_tokens: tokens a sequence to allocate pages for at once; pages beyond are added as they are needed. Where all layers are attention
        of their own keys and values, passes of one token can then be compiled, or captured in a CUDA graph: `generate` does so by itself
        on a GPU (unless disable_compile=True), and see `use_cuda_graphs`. With more tokens than that they are not captured any more.
    Errors: ValueError for a policy or a calibration of another model, and for a pass of a model whose layers keep something else than
        those of config; ValueError or NotImplementedError naming what is not supported:
        encoder-decoders, models without attention, attention that chooses keys by an index or compresses them, custom masks, gradients.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        format: str | Format | Policy | os.PathLike[str] | Mapping[str, Any] | Sequence[str | Format | None] = "4bit",
        *,
        block_size: int = 16,
        dtype: torch.dtype | None = None,
        prompt: str | None = None,
        fresh_prefill: bool | None = None,
        num_tokens: int = 0,
        prompt_precision: str | None = None,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            refuse("config", type(config).__name__, "a model's configuration is needed: QuantizedCache(model.config, ...)")
        integer("block_size", block_size, 8, "a multiple of 8")
        if block_size % 8:
            refuse("block_size", block_size, "a multiple of 8 is needed")
        integer("num_tokens", num_tokens, 0, "a number of tokens, 0 for none,")
        if dtype not in (None, *ROW_DTYPES):
            refuse("dtype", repr(dtype), f"None or one of {', '.join(map(str, ROW_DTYPES))} is needed")
        if fresh_prefill not in (None, True, False):
            refuse("fresh_prefill", repr(fresh_prefill), "None, True or False is needed")
        plans, policy, made_for = plan_layers(config), Policy.given(format), MadeFor(config)
        keeps = [plan.kind is not None for plan in plans]
        keeps += [False] * (geometry_of(config).num_layers - len(plans))  # before transformers 5.23: layers that share keys
        if policy is not None:
            policy = policy.of_latents() if any(plan.latent for plan in plans) else policy
            check_policy(policy, config, plans)
            format = [policy.name_of(i) if kept else None for i, kept in enumerate(keeps)]
        formats = _formats(format, keeps, dtype)
        for plan, fmt in zip(plans, formats):
            if fmt is not None and not plan.latent:
                get_format(fmt).of_keys_and_values()
        prompt = _prompt(prompt, fresh_prefill, policy)
        precision = of_prompts("prompt_precision", policy, "prompt_precision", prompt_precision)
        if precision != "16bit" and any(plan.latent for plan in plans):
            raise NotImplementedError(f"prompt_precision={precision!r}: latents in place of keys and values; 16bit is needed")
        self.cache_positions = CachePositions()
        self.cache_positions.shared = shares_keys(config)
        self.cache_positions.capturable = not self.cache_positions.shared and not any(
            plan.kind is None or plan.latent or plan.own for plan in plans
        )
        kinds = dict.fromkeys(plan.kind for plan in plans if plan.kind is not None)
        self.sequences = {kind: Sequences(kind, block_size, self.cache_positions, policy and policy.full_precision) for kind in kinds}
        options = dtype, prompt, num_tokens, precision
        self._passed = {i: LinearAttentionLayer.__name__ for i, plan in enumerate(plans) if plan.states}
        super().__init__(layers=[self._layer(plan, name, *options) for plan, name in zip(plans, formats)])
        for number, layer in self.quantized_layers.items():
            layer.made_for = made_for
            if policy is not None:
                layer.config = LayerConfig.of(policy, number, dtype or torch.bfloat16)
                layer.weights = None if policy.calibration is None else policy.calibration.layers[number].weights
        self._made_from, self._policy, self._dtype = config, policy, dtype or torch.bfloat16
        if policy is not None and policy.wants_statistics:
            self.cache_positions.statistics = policy.statistics
            wait_for(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.cache_positions.statistics != "off":
            wait_for(self)

    def is_of(self, config: PreTrainedConfig) -> bool:
        """Whether it was made from this configuration, or from an equal one."""
        return config is self._made_from or (type(config) is type(self._made_from) and config == self._made_from)

    def take_statistics(self, model: PreTrainedModel) -> None:
        """Guide the writers of all layers by what a pass of `model` measures: for caches whose policy has `statistics`, before the first
        row is stored. Where the model cannot be measured: a warning; ValueError or NotImplementedError where the policy requires it."""
        latents = [layer for layer in self.layers if getattr(layer, "latent", 0)]
        if latents:
            means = latent_means(self._policy, model)
            for number, layer in self.quantized_layers.items():
                layer.take_mean(means.get(number))
        policy = self._policy if latents else with_statistics(self._policy, model)
        for number, layer in self.quantized_layers.items():
            layer.config = LayerConfig.of(policy, number, self._dtype)
        self.cache_positions.statistics = "off"

    def _layer(self, plan: LayerPlan, *options: Any) -> QuantizedLayer | LinearAttentionCacheLayerMixin | Any:
        if plan.kind is None:
            return plan.own
        fmt, options = options[0], (self.sequences[plan.kind], *options[1:])
        if plan.latent:
            return LatentLayer(fmt, *options, latent=plan.latent)
        if plan.own is not None:
            return HybridLayer(fmt, *options, number_of_states=plan.own.number_of_states)
        return QuantizedLayer(fmt, *options)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Hand a layer's new keys and values `[batch, HK, tokens, D]` to the attention function, which stores them and reads the pages."""
        if self.cache_positions.shared and torch.compiler.is_compiling():
            _refuse_to_compile()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def quantized_layers(self) -> dict[int, QuantizedLayer]:
        """The layers whose keys and values (or latents) are in pages, by their number in the model."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, QuantizedLayer)}

    @property
    def passed_layers(self) -> dict[int, str]:
        """The layers with states that transformers' own classes keep, at the model's precision, by their number in the model: the name
        of the class. A layer with attention beside a recurrence is here, for its states, and in `quantized_layers`."""
        return dict(self._passed)

    @property
    def is_initialized(self) -> bool:
        """Whether every layer knows its sizes: after the first forward pass."""
        return all(layer.is_initialized for layer in self.quantized_layers.values())

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile passes of one token."""
        # not by super(), which torch.compile of torch 2.11 does not follow here
        return all(layer.is_compileable for layer in self.layers) and not self.cache_positions.shared

    @property
    def is_linear(self) -> list[bool]:
        """Which layers have no attention, but states."""
        return [isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, QuantizedLayer) for layer in self.layers]

    @property
    def _states(self) -> list[LinearAttentionCacheLayerMixin]:
        return [layer for layer in self.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]

    @property
    def specs(self) -> list[CacheSpec]:
        """Geometry of each of the `quantized_layers`. ValueError before the first forward pass, which tells the sizes."""
        if not self.is_initialized:
            raise ValueError("specs: the sizes of heads are known after the first forward pass")
        return [layer.pages.spec for layer in self.quantized_layers.values()]

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
            for layer in self.quantized_layers.values()
            if layer.is_initialized and layer.sequences.table is not None
        )

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of all pages, used or not, and of the 16-bit copies."""
        return self.full_precision_nbytes + sum(layer.pages.nbytes for layer in self.quantized_layers.values() if layer.is_initialized)

    @property
    def full_precision_nbytes(self) -> int:
        """Bytes of the 16-bit copies of full-precision tokens, over all layers: as many for a sequence however long it is."""
        return sum(layer.full_precision_nbytes for layer in self.quantized_layers.values())

    @property
    def batch_size(self) -> int:
        """Sequences in the cache, -1 before the first forward pass."""
        return self.cache_positions.batch_size

    def reset(self) -> None:
        """Empty the cache in place; its memory is kept."""
        self.cache_positions.reset()
        for layer in self._states:
            LinearAttentionLayer.reset(layer)
            for made in (layer.is_conv_states_initialized, layer.is_recurrent_states_initialized):
                made.update(dict.fromkeys(made, False))  # the next batch may have another size
        self._sync()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (a negative number, as in transformers; 0 removes none)."""
        try:
            count = -operator.index(tokens_to_remove)  # assisted decoding passes a tensor in some versions
        except TypeError:
            count = -1
        if count < 0:
            refuse("tokens_to_remove", tokens_to_remove, "a negative integer is needed, -n removes n tokens")
        states = [layer for layer in self._states if any(layer.has_previous_state.values())]
        if count and not all(layer.is_croppable and layer.record_past for layer in states):
            raise RuntimeError(
                f"crop: {count} tokens back, the states of recurrent layers are not kept; nor are those of convolutions, unless "
                "cache.activate_past_recording() is called before the forward passes"
            )
        self.cache_positions.crop(count)
        for layer in states:
            if layer.is_croppable and layer.record_past:
                LinearAttentionLayer.crop(layer, -count)
        self._sync()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i becomes a copy of sequence `beam_idx[i]`. Pages are shared, and copied when one of them is written to."""
        self._select(_numbers("beam_idx", beam_idx).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times, side by side. ValueError for less than 1."""
        integer("repeats", repeats, 1, "a positive integer")
        self._select([i for i in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keep the sequences `indices`: numbers, or one bool for each sequence."""
        indices = _numbers("indices", indices)
        try:
            chosen = torch.arange(max(self.batch_size, 0), device="cpu")[indices].tolist()
        except IndexError as error:
            raise ValueError(f"indices={indices.tolist()}: the cache holds {self.batch_size} sequences ({error})") from error
        self._select(chosen)

    def _select(self, indices: list[int]) -> None:
        self.cache_positions.select(indices)
        for layer in self._states:
            if layer.device is not None:
                LinearAttentionLayer.reorder_cache(layer, torch.tensor(indices, device=layer.device))

    def _sync(self) -> None:
        for layer in self.quantized_layers.values():
            layer.forget_pass()


def _numbers(argument: str, given: Any) -> torch.Tensor:
    """What names sequences, on the host."""
    try:
        return torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        refuse(argument, repr(given), "a tensor or a sequence of the numbers of sequences is needed")


@torch.compiler.disable
def _refuse_to_compile() -> None:
    """Outside of what is compiled, where an error stays the one that it is."""
    raise NotImplementedError("torch.compile: layers of this model share keys and values, which it cannot follow; leave it out")


def _prompt(prompt: str | None, fresh_prefill: bool | None, policy: Policy | None) -> str:
    """What passes of several tokens read, of what a caller says."""
    if fresh_prefill is not None:
        warnings.warn("fresh_prefill is deprecated: write prompt='own' or prompt='stored'", DeprecationWarning, stacklevel=3)
        if prompt is not None:
            refuse("fresh_prefill", fresh_prefill, f"prompt={prompt!r} says it")
        return "own" if fresh_prefill else "stored"
    return of_prompts("prompt", policy, "prompt", prompt)


def _formats(
    format: str | Format | Sequence[str | Format | None], keeps: list[bool], dtype: torch.dtype | None
) -> list[str | Format | None]:
    """The format of each layer of the model, None where it `keeps` no keys and values."""
    if isinstance(format, str | Format):
        formats = [format if kept else None for kept in keeps]
    elif not isinstance(format, Sequence) or isinstance(format, bytes):
        shown = repr(format)
        if "\n" in shown or len(shown) > 60:
            shown = type(format).__name__
        allowed = "a name such as 'int4', 'K/V' such as 'int8/int4', one for each layer, or a policy: its path, a dict, a Policy"
        refuse("format", shown, f"{allowed} is needed")
    else:
        formats = list(format)
        if len(formats) != len(keeps):
            refuse("format", f"{len(formats)} formats", f"the model has {len(keeps)} layers")
    for i, (name, kept) in enumerate(zip(formats, keeps)):
        if (name is not None) != kept:
            refuse(f"format[{i}]", name, f"layer {i} keeps {'keys and values' if kept else 'none: its format is None'}")
        if kept:
            get_format(name, dtype or torch.bfloat16)
    return formats
