"""Fake-quantized, teacher-forced evaluation in one forward pass: every query sees the rows that a decoding step at its position would read.

    with teacher_forced(model, policy):
        logits = model(ids, use_cache=False).logits

Each layer's keys and values go through the codecs and maps that write and read pages; what a query reads exactly goes by its position.
Nothing is stored, so a context costs about one plain pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from ...calls import PagedTensor
from ...checks import refuse
from ...engine.layer_config import LayerConfig, full_precision_tokens
from ...engine.observed import unseen
from ...format import Codec, Format
from ...full_precision import BLOCK_SIZE, FullPrecisionTokens
from ...geometry import Heads, Kind
from ...implementations.reference.write import dequantize, encode
from ...maps import LayerMaps, LinearMap
from ...options import AttentionOptions
from ...policy import Policy
from ...spec import CacheSpec
from .attention import check_weights, decoder_of
from .config import LayerPlan, check_policy, plan_layers, shares_keys
from .statistics import with_statistics

TEACHER_FORCED = "quantkv_teacher_forced"
QUERIES_AT_ONCE = 256
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
        given = scale, self.full_precision(layer), self.plans[layer].kind, softcap, sinks, self.prompt
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


def fake_quantized(rows: torch.Tensor, codec: Codec, map_: LinearMap | None) -> torch.Tensor:
    """`rows [HK, N, D]` of positions 0 to N - 1, written to a page and read back: float32."""
    rows = rows.transpose(0, 1).contiguous()
    at = torch.arange(rows.shape[0], device=rows.device)
    codes, meta = encode(rows, codec, map_, at)
    page = PagedTensor(codes[None], None if meta is None else meta[None])
    return dequantize(page, codec, map_, at, at).transpose(0, 1)


def full_precision_from(positions: torch.Tensor, latest: int) -> torch.Tensor:
    """From where a query at each of `positions` reads exactly: the page in which the latest `latest` of its tokens begin."""
    return FullPrecisionTokens(recent=latest).first_recent_page(positions + 1, BLOCK_SIZE) * BLOCK_SIZE


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stored: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    full_precision: FullPrecisionTokens | None = None,
    kind: Kind = Kind(),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    prompt: int = 0,
) -> torch.Tensor:
    """Causal attention of `query [HQ, N, D]`, position i over positions 0 to i, to `[N, HQ, D_V]` float32.

    key, value: `[HK, N, D]`, `[HK, N, D_V]`: the exact rows. stored: the same as they come back from pages. prompt: so many first queries
    read exact rows alone.
    """
    if prompt:
        told = query[:, :prompt], key[:, :prompt], value[:, :prompt]
        whole = attend(*told, told[1:], scale, None, kind, softcap, sinks)
    heads, count = key.shape[0], query.shape[1]
    query = (query.float() * scale).unflatten(0, (heads, -1))  # [HK, G, N, D]
    groups = query.shape[1]
    key, value = key.float(), value.float()
    stored_key, stored_value = stored
    latest, first = (0, 0) if full_precision is None else (full_precision.recent, full_precision.sink_tokens(BLOCK_SIZE))
    if first:
        head, tail = slice(None, first), slice(first, None)
        stored_key = torch.cat([key[:, head], stored_key[:, tail]], 1)
        stored_value = torch.cat([value[:, head], stored_value[:, tail]], 1)
    out = query.new_empty(count, heads * groups, value.shape[-1])
    position = torch.arange(count, device=query.device)
    if prompt:
        out[:prompt] = whole
    for start in range(prompt, count, QUERIES_AT_ONCE):
        stop = min(count, start + QUERIES_AT_ONCE)
        seen = slice(kind.first_seen(start), stop)
        rows, keys = position[start:stop, None], position[None, seen]
        block = query[:, :, start:stop].flatten(1, 2)
        score = (block @ stored_key[:, seen].mT).unflatten(1, (groups, -1))
        if latest:
            near = slice(max(int(full_precision_from(position[start], latest)), seen.start), stop)
            left = near.start - seen.start
            is_exact = position[None, near] >= full_precision_from(rows, latest)
            nearby = (block @ key[:, near].mT).unflatten(1, (groups, -1))
            score[..., left:] = torch.where(is_exact, nearby, score[..., left:])
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        score.masked_fill_(unseen(AttentionOptions(**kind.options), rows, keys), -math.inf)
        if sinks is None:
            weight = score.softmax(-1)
        else:
            column = sinks.float().view(heads, groups, 1, 1).expand(*score.shape[:3], 1)
            weight = torch.cat([score, column], -1).softmax(-1)[..., :-1]
        if latest:
            from_exact = (weight[..., left:] * is_exact).flatten(1, 2) @ value[:, near]
            weight[..., left:].masked_fill_(is_exact, 0)
            result = weight.flatten(1, 2) @ stored_value[:, seen] + from_exact
        else:
            result = weight.flatten(1, 2) @ stored_value[:, seen]
        out[start:stop] = result.view(heads * groups, stop - start, -1).transpose(0, 1)
    return out


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
