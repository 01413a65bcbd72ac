"""Where quantkv stands in SGLang: by its own registry of hooks, and its registry of attention backends."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ..asked import options

PAGE_SIZE = 16  # where none is asked for
REQUESTS = 256  # likewise, of those that run at once, which SGLang works out later: those beyond have no full-precision tokens
CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
SIZES = "sglang.srt.model_executor.pool_configurator"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
_layers: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()  # `Layers` of models


def hook_arguments() -> None:
    """See what a server is asked for, when SGLang settles its arguments."""
    HookRegistry.register("sglang.srt.server_args.ServerArgs.resolve_once", resolve_once, HookType.AROUND)


def hook_runner() -> None:
    """Stand where a model's pools and attention backends are made."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    HookRegistry.register(f"{CONFIGURATOR}.configure", configure, HookType.AROUND)
    HookRegistry.register(f"{CONFIGURATOR}._resolve_kv_pool_class", resolve_kv_pool_class, HookType.AROUND)
    HookRegistry.register(f"{SIZES}.DefaultPoolConfigurator._compute_cell_size", compute_cell_size, HookType.AROUND)
    HookRegistry.register(f"{SIZES}.HybridSWAPoolConfigurator._recompute_cell_size", recompute_cell_size, HookType.BEFORE)
    HookRegistry.register(f"{SIZES}.HybridSWAPoolConfigurator.__init__", size_with_windows, HookType.AROUND)
    HookRegistry.register(f"{RUNNER}.init_attention_backends", init_attention_backends, HookType.AROUND)
    HookRegistry.register(f"{DRAFTS}.create_decode_backend", create_decode_backend, HookType.AROUND)
    HookRegistry.register(f"{DRAFTS}.create_draft_extend_backend", create_draft_extend_backend, HookType.AROUND)
    for name in options():
        register_attention_backend(name)(make_backend)


def resolve_once(own: Any, server_args: Any) -> None:
    """Settle arguments: pages of 16 tokens where none were asked for, and refusals before weights are loaded."""
    from sglang.srt.arg_groups.overrides import model_config_of

    from .asked import asked_backends, check, check_arguments

    ours = asked_backends(server_args) != (None, None)
    if not ours or getattr(server_args, "_resolution_finished", False):
        return own(server_args)
    check_arguments(server_args)  # before SGLang, whose own refusals name other backends
    if server_args.page_size is None:
        server_args.page_size = PAGE_SIZE
    own(server_args)
    check(server_args, model_config_of(server_args))


def layers_of(model: torch.nn.Module) -> Any:
    """The `Layers` of a model that quantkv serves; None for another."""
    return _layers.get(model)


def configure(own: Any, configurator: Any, *, pre_model_load_memory: int) -> Any:
    """Make a model's pools. How its layers are stored is settled before SGLang measures how much memory is left."""
    from sglang.srt.arg_groups.overrides import resolved_view

    from .asked import asked_backends, check, policy_of
    from .drafts import check_model, policy_of_drafts
    from .layers import Layers
    from .pool import cell_bytes
    from .statistics import take_statistics

    view, drafts = resolved_view(configurator.server_args), configurator.is_draft_worker
    if asked_backends(view) != (None, None):
        backend = check(configurator.server_args, configurator.model_config, drafts)
        if view.speculative_algorithm is not None:
            check_model(configurator)
        policy = policy_of_drafts(policy_of(backend)) if drafts else policy_of(backend)
        layers = Layers(backend, policy, configurator.model, configurator.model_config, configurator.kv_cache_dtype)
        if drafts:  # as many tokens as the served model has
            layers.cell_bytes = cell_bytes(layers, layers.numbers, configurator.page_size)
        take_statistics(configurator, layers)
        layers.reserve_copies(configurator.page_size, _requests(configurator), torch.device(configurator.device))
        _layers[configurator.model] = layers
    return own(configurator, pre_model_load_memory=pre_model_load_memory)


def _requests(configurator: Any) -> int:
    """Sequences whose full-precision tokens have room: those that may run at once, where that was asked for."""
    asked = configurator.server_args.max_running_requests
    return REQUESTS if asked is None else max(1, asked // configurator.attn_dp_size)


def resolve_kv_pool_class(own: Any, configurator: Any, *, kind: str, default: type) -> type:
    """The class of a model's pools."""
    from .pool import pool_class

    layers = layers_of(configurator.model)
    if layers is None or kind != "mha":
        return own(configurator, kind=kind, default=default)
    return pool_class(layers, configurator.layer_info, _hybrid(configurator), configurator.is_hybrid_swa)


def _hybrid(configurator: Any) -> list[int] | None:
    """Layers with attention of a model that has layers of another kind; None where all have attention."""
    return None if configurator.mambaish_config is None else list(configurator.mambaish_config.full_attention_layer_ids)


def compute_cell_size(own: Any, sizes: Any, configurator: Any, num_layers: int) -> int:
    """Bytes of a token in all layers of one pool."""
    from .pool import cell_bytes

    layers = layers_of(configurator.model)
    if layers is None:
        return own(sizes, configurator, num_layers)
    layers.cell_bytes = cell_bytes(layers, layers.numbers, configurator.page_size)
    return layers.cell_bytes


def size_with_windows(own: Any, sizes: Any, configurator: Any) -> None:
    """Bytes of a token in layers with windows, and in the others."""
    sizes._quantkv = layers_of(configurator.model), configurator.layer_info, configurator.page_size
    own(sizes, configurator)


def recompute_cell_size(sizes: Any) -> None:
    """Put the bytes of pages in the place of those of rows, an average of the layers of each pool."""
    layers, info, page_size = sizes._quantkv
    if layers is not None:
        for name, numbers in (("_full_per_token", info.full_attention_layer_ids), ("_swa_per_token", info.swa_attention_layer_ids)):
            if numbers:
                setattr(sizes, name, layers.page_bytes(numbers, page_size) / page_size / len(numbers))
        layers.cell_bytes = 0.0


def make_backend(runner: Any) -> Any:
    """The attention backend of a model's runner. RuntimeError where it would not read quantized pages."""
    from .backend import QuantKVBackend

    layers = layers_of(runner.model)
    if layers is None or layers.cell_bytes is None or any(layer.cache is None for layer in layers.of.values()):
        raise RuntimeError(
            "quantkv: SGLang made pools that are not quantkv's, and would serve 16 bits; what failed when plug-ins were loaded stands above"
        )
    return QuantKVBackend(runner, layers)


def create_decode_backend(own: Any, factory: Any) -> Any:
    """The attention backends by which a model drafts, one for each draft behind the first; None where there is none."""
    from .drafts import DraftSteps

    runner, steps = factory.draft_model_runner, factory.speculative_num_steps
    if layers_of(runner.model) is None:
        return own(factory)
    return DraftSteps(runner.attn_backend, steps) if steps > 1 else None


def create_draft_extend_backend(own: Any, factory: Any) -> Any:
    """The attention backend by which a model that drafts stores rows of what was accepted: that of its prompts."""
    runner = factory.draft_model_runner
    return own(factory) if layers_of(runner.model) is None else runner.attn_backend


def init_attention_backends(own: Any, runner: Any) -> None:
    """Make a runner's attention backends. RuntimeError where quantkv was asked for and does not serve."""
    from sglang.srt.arg_groups.overrides import resolved_view

    from .asked import asked_backends
    from .backend import QuantKVBackend

    own(runner)
    if asked_backends(resolved_view(runner.server_args)) != (None, None):
        made = runner.attn_backend
        if not isinstance(getattr(made, "full_attn_backend", made), QuantKVBackend):
            raise RuntimeError(f"quantkv: attention is served by {type(made).__name__}, which does not read quantized pages")
