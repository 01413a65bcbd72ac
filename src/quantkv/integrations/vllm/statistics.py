"""Key means and Hessians that an engine measures of its own model at start, without a file.

Each rank makes one pass of the loaded model, for its own heads, right before vLLM measures how much memory is left for pages. So nothing
of it is left in memory, and kernels are compiled for the maps that it makes. The pass is eager and needs no pages: `QuantKVImpl.forward`
attends over the rows of the pass itself. Rows before rotation are what the rotary embedding's module was given, and rotations are what
that module makes of the identity, so no layout of rotations is known here.

vLLM's own profile run is no such pass: its tokens are all the same, it skips attention, and it is compiled. A first request comes too late:
pages of other requests, and CUDA graphs, would be there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.import_utils import resolve_obj_by_qualname

from ...calibration import Calibration
from ..at_start import LORA, RECURRENCE, SOME_LAYERS, measured, unmeasured
from ..seen_layers import SeenLayers, ServedModel
from .around import around
from .asked import IN_MEMORY, stays_in_memory

logger = init_logger("vllm.quantkv")
ROTARIES = "vllm.model_executor.layers.rotary_embedding"
WITHIN_ROTARIES = ("ApplyRotaryEmb",)  # steps of a rotary embedding, which are given parts of rows


@contextmanager
def watching(seen: SeenLayers, impls: list[Any]) -> Iterator[None]:
    """A context in which every call of the layers is shown to `seen`."""
    try:
        for impl in impls:
            impl.watch(seen)
        yield
    finally:
        for impl in impls:
            impl.watch(None)


def reason_against(config: Any) -> str | None:
    """Why no pass over this model shows its keys, in words; None where one does."""
    model = config.model_config
    if config.parallel_config.pipeline_parallel_size > 1:
        return SOME_LAYERS.format("pipeline_parallel_size")
    if model.is_hybrid:
        return RECURRENCE
    if model.is_encoder_decoder:
        return "the model has an encoder"
    if config.lora_config is not None:
        return LORA
    return None


def check_statistics(config: Any, policy: Any) -> None:
    """Refuse, before weights are loaded, statistics that are required and cannot be taken, and connectors that move pages to other engines:
    two engines measure with rounding of their own, and the key mean is part of what a page's bytes mean."""
    reason, transfer = reason_against(config), config.kv_transfer_config
    if reason is not None and policy.statistics == "require":
        raise unmeasured(reason)
    if transfer is not None and transfer.kv_connector is not None and not stays_in_memory(transfer):
        raise NotImplementedError(
            f"quantkv: policy.statistics={policy.statistics!r} with kv_connector={transfer.kv_connector!r}: pages of one engine are not "
            f"those of another, which measures for itself; allowed: {IN_MEMORY[0]} into memory, or a calibration of `quantkv calibrate`"
        )


def measure_before_sizing(config: Any) -> None:
    """Let the worker of this process measure its model before it tells how much memory is free for pages. May be called again."""
    around(resolve_obj_by_qualname(config.parallel_config.worker_cls), "determine_available_memory", _measure_first)


def _measure_first(own: Any, worker: Any) -> int:
    take_statistics(worker.vllm_config, worker.model_runner)
    return own(worker)


def take_statistics(config: Any, runner: Any) -> None:
    """Measure a worker's model where its layers wait for that. Where it cannot be measured: one line says so, and rows are stored without;
    NotImplementedError where the policy requires it."""
    layers = config.compilation_config.static_forward_context
    waiting = {name: layer for name, layer in layers.items() if getattr(getattr(layer, "impl", None), "wants_statistics", False)}
    if not waiting:
        return
    impls = [layer.impl for layer in waiting.values()]
    required = "require" if any(impl.policy.statistics == "require" for impl in impls) else None
    what = "means of latents" if all(impl.of_latents for impl in impls) else "key means and Hessians"
    made = measured(required, reason_against(config), lambda: _measured(config, runner, waiting), logger, what)
    for impl in impls:
        if made is None:
            impl.unmeasured = True
        else:
            impl.take_statistics(made)


def _measured(config: Any, runner: Any, layers: dict[str, Any]) -> tuple[Calibration, str]:
    """The calibration of this rank's heads, and what it was made of."""
    model, of, limit = runner.get_model(), config.model_config, config.model_config.max_model_len
    longest = min(limit, config.scheduler_config.max_num_batched_tokens)
    tokenizer = None if of.skip_tokenizer_init else of.tokenizer
    sizes = of.get_total_num_hidden_layers(), limit, longest, of.get_vocab_size()
    served, seen = ServedModel(model, runner.device, of.dtype, *sizes, tokenizer), SeenLayers(ROTARIES, WITHIN_ROTARIES)
    every = [layer.impl for layer in config.compilation_config.static_forward_context.values() if hasattr(layer, "impl")]
    numbers = {layer.impl.number for layer in layers.values()}
    with set_current_vllm_config(config):
        return seen.measure(served, numbers, _value_layers(layers), partial(_forward, model, config), watching(seen, every))


def _forward(model: torch.nn.Module, config: Any, ids: torch.Tensor) -> None:
    """One eager pass over tokens `[T]` that stand at the first positions."""
    positions = torch.arange(len(ids), device=ids.device)
    if config.model_config.uses_mrope:
        positions = positions.expand(3, -1).contiguous()
    with set_forward_context(None, config, num_tokens=len(ids), skip_compiled=True):
        model(input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)


def _value_layers(layers: dict[str, Any]) -> Iterator[tuple[int, torch.nn.Module, tuple[int, int, int]]]:
    """Layers with keys and values of their own, as `value_moments` takes them."""
    for layer in layers.values():
        impl = layer.impl
        if not impl.of_latents and extract_layer_index(layer.layer_name) == impl.number:
            yield impl.number, layer, (impl.num_kv_heads, layer.head_size_v, impl.num_heads)
