"""Fake-quantized, teacher-forced evaluation in one forward pass: every query sees the rows that a decoding step at its position would read.

    with teacher_forced(model, policy):
        logits = model(ids, use_cache=False).logits

Each layer's keys and values go through the codecs and maps that write and read pages; what a query reads exactly goes by its position.
Nothing is stored, so a context costs about one plain pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from ..checks import refuse
from ..engine.fake_quantized import attend, fake_quantized
from ..engine.layer_config import LayerConfig, full_precision_tokens
from ..format import Format
from ..full_precision import BLOCK_SIZE, FullPrecisionTokens
from ..geometry import Heads
from ..integrations.transformers_model import LayerPlan, check_policy, check_weights, decoder_of, plan_layers, shares_keys
from ..maps import LayerMaps, LinearMap
from ..options import PROMPT_QUERIES
from ..policy import Policy
from ..spec import CacheSpec
from .statistics import with_statistics

TEACHER_FORCED = "quantkv_teacher_forced"
Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float, float, Any], torch.Tensor]  # as `FakeQuantizedCache` is called


class FakeQuantizedCache:
    """What the queries of a model see of a cache by `policy`.

    config: the model's. dtype: what format "none" stores. prompt: so many first tokens are a prompt, which reads its own rows as given.
    specs: geometry of the layers that a forward pass went through, by their number.
    Errors: NotImplementedError for layers that keep something else than their own keys and values; ValueError for a policy of another
        geometry.
    """

    def __init__(self, config: PreTrainedConfig, policy: Policy, dtype: torch.dtype = torch.bfloat16, prompt: int = 0) -> None:
        self.prompt = prompt
        self.plans, self.policy, self.dtype = teacher_forced_plans(config), policy, dtype
        check_policy(policy, config, self.plans)
        self.specs: dict[int, CacheSpec] = {}
        self._layers: dict[int, tuple[Format, LinearMap | None, LinearMap | None]] = {}

    def full_precision(self, layer: int) -> FullPrecisionTokens | None:
        """What is read exactly in a layer: where a window moves on, no first tokens."""
        return full_precision_tokens(self.policy.full_precision, self.plans[layer].kind.window > 0)

    def rows(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[HK, N, D]` and values `[HK, N, D_V]` of positions 0 to N - 1 as they come back from pages, float32."""
        if layer not in self.specs:
            heads = Heads(key.shape[0], key.shape[2], value.shape[2])
            config = LayerConfig.of(self.policy, layer, self.dtype, heads)
            fmt, own = config.format, LayerMaps.of(config.format, *heads[1:])  # what the format asks for, where nothing else is given
            self.specs[layer] = fmt.cache_spec(*heads, BLOCK_SIZE)
            maps = config.maps.k or own.k, config.maps.v or own.v
            self._layers[layer] = fmt, *(m if m is None else m.to(key.device) for m in maps)
        fmt, k_map, v_map = self._layers[layer]
        return fake_quantized(key, fmt.k, k_map), fake_quantized(value, fmt.v, v_map)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, softcap: float, sinks: Any
    ) -> torch.Tensor:
        """Attention of a layer over one sequence: see `attend`."""
        given = scale, self.full_precision(layer), self.plans[layer].kind, softcap, sinks, self.prompt, self.policy.prompt_precision
        return attend(query, key, value, self.rows(layer, key, value), *given)


def teacher_forced_plans(config: PreTrainedConfig) -> list[LayerPlan]:
    """What each layer keeps. NotImplementedError for a model that only a real cache can evaluate."""
    name, plans = type(config).__name__, plan_layers(config)
    if shares_keys(config):
        raise NotImplementedError(f"config: layers of {name} share keys and values; they can be evaluated through a QuantizedCache only")
    for plan in plans:
        if plan.kind is None or plan.latent or plan.own is not None:
            raise NotImplementedError(
                f"config: {name} has layers that keep states or latents; they can be evaluated through a QuantizedCache only"
            )
    return plans


_attention: ContextVar[Attention] = ContextVar("attention")


@contextmanager
def attending(model: PreTrainedModel, attention: Attention) -> Iterator[None]:
    """Inside the block `attention` computes that of the model's decoder; after it the model's is its own again."""
    own = model.config._attn_implementation
    decoder_of(model).set_attn_implementation({"": TEACHER_FORCED})
    token = _attention.set(attention)
    try:
        yield
    finally:
        _attention.reset(token)
        model.set_attn_implementation(own)


@contextmanager
def teacher_forced(model: PreTrainedModel, policy: Policy, prompt: int = 0) -> Iterator[FakeQuantizedCache]:
    """Inside the block a forward pass of whole sequences without a cache (`use_cache=False`, no padding) computes what decoding would
    over a cache by `policy`. prompt: so many first tokens of each sequence come in one pass, as a prompt: several lose nothing where the
    policy lets prompts read their own rows."""
    if policy.prompt_precision != "16bit" and policy.prompt == "stored" and prompt >= PROMPT_QUERIES:
        allowed = "with policy.prompt='stored' prompts are evaluated at 16bit, or through a QuantizedCache"
        refuse("policy.prompt_precision", policy.prompt_precision, allowed)
    policy = with_statistics(policy, model)
    fake = FakeQuantizedCache(model.config, policy, model.dtype, prompt if policy.prompt == "own" and prompt > 1 else 0)
    check_weights(model, policy.calibration)
    with attending(model, fake):
        yield fake


def teacher_forced_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function inside `attending`: `query [S, HQ, N, D]` -> `[S, N, HQ, D_V]`, no weights."""
    attention = _attention.get(None)
    if attention is None:
        raise RuntimeError(f"attention implementation {TEACHER_FORCED!r} works inside quantkv's teacher_forced(model, policy) only")
    if key.shape[2] != query.shape[2]:
        refuse("past_key_values", f"{key.shape[2] - query.shape[2]} tokens", "a teacher-forced pass takes whole sequences and no cache")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outs = [attention(module.layer_idx, q, k, v, scale, softcap or 0.0, s_aux).to(query.dtype) for q, k, v in zip(query, key, value)]
    return torch.stack(outs), None


def teacher_forced_mask(*, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    """transformers' mask function inside `teacher_forced`: causality and windows are known by layer, and there is nothing else to mask."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise NotImplementedError("attention_mask: a teacher-forced pass takes sequences without padding")


AttentionInterface.register(TEACHER_FORCED, teacher_forced_attention)
AttentionMaskInterface.register(TEACHER_FORCED, teacher_forced_mask)
