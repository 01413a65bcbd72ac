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
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.import_utils import resolve_obj_by_qualname

from ...calibration import Calibration
from ...engine.observed import SKIPPED, LayerSums, calibration_of, latent_moments, layer_moments, value_moments
from ..at_start import contexts, measured, release
from ..rotations import SeenRotations

logger = init_logger("vllm.quantkv")
IN_MEMORY = ("OffloadingConnector", "CPUOffloadingSpec")  # a connector whose pages end with the engine
ROTARIES = "vllm.model_executor.layers.rotary_embedding"
WITHIN_ROTARIES = ("ApplyRotaryEmb",)  # steps of a rotary embedding, which are given parts of rows


class Observer:
    """What the pass shows of the layers.

    layers: sums by the number of a layer. latents: sums `[latent]` of latents and how many they are of, likewise. values: second moments
    `[HK, D_V, D_V]` of what reads its values. rotations: of rotary embeddings.
    """

    def __init__(self) -> None:
        self.layers: dict[int, LayerSums] = {}
        self.latents: dict[int, tuple[torch.Tensor, int]] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.rotations = SeenRotations(ROTARIES, WITHIN_ROTARIES)

    @contextmanager
    def watching(self, model: torch.nn.Module, impls: list[Any]) -> Iterator[None]:
        """A context in which every call of the layers is seen."""
        try:
            for impl in impls:
                impl.watch(self)
            with self.rotations.watching(model):
                yield
        finally:
            for impl in impls:
                impl.watch(None)

    def see(self, layer: torch.nn.Module, impl: Any, query: torch.Tensor, key: torch.Tensor) -> None:
        """`query [T, HQ, D]` and `key [T, HK, D]` of a layer, as they are attended to. Left out are layers that read another's pages, and
        layers whose rows are stored as they are."""
        if impl.owner is not None or not impl.wants_statistics:
            self.rotations.forget()
        else:
            self.rotations.add(self.layers.setdefault(impl.number, LayerSums()), query, key)

    def see_latents(self, impl: Any, latents: torch.Tensor) -> None:
        """Latents `[T, latent]` of a layer. Their rotated dimensions are stored as they are."""
        self.rotations.forget()
        if impl.wants_statistics:
            rows = latents[SKIPPED:].double()
            total, count = self.latents.get(impl.number, (0.0, 0))
            self.latents[impl.number] = total + rows.sum(0), count + len(rows)

    def moments(self, limit: int, dtype: torch.dtype) -> dict[int, Any]:
        """`LayerMoments` by the number of a layer, with key means for positions below limit."""
        made = layer_moments(self.layers, self.values, self.rotations.rotations(dtype), limit)
        return made | {number: latent_moments(total / count) for number, (total, count) in self.latents.items()}


def reason_against(config: Any) -> str | None:
    """Why no pass over this model shows its keys, in words; None where one does."""
    model = config.model_config
    if config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline_parallel_size is above 1: a rank has some of the layers alone"
    if model.is_hybrid:
        return "the model keeps states of a recurrence, which a pass without pages leaves out"
    if model.is_encoder_decoder:
        return "the model has an encoder"
    if config.lora_config is not None:
        return "the model takes LoRA adapters"
    return None


def check_statistics(config: Any, policy: Any) -> None:
    """Refuse, before weights are loaded, statistics that are required and cannot be taken, and connectors that move pages to other engines:
    two engines measure with rounding of their own, and the key mean is part of what a page's bytes mean."""
    reason, transfer = reason_against(config), config.kv_transfer_config
    if reason is not None and policy.statistics == "require":
        raise NotImplementedError(f"quantkv: policy.statistics='require': the model cannot be measured: {reason}")
    if transfer is not None and transfer.kv_connector is not None:
        where = transfer.kv_connector, transfer.get_from_extra_config("spec_name", IN_MEMORY[1])
        if where != IN_MEMORY:
            raise NotImplementedError(
                f"quantkv: policy.statistics={policy.statistics!r} with kv_connector={where[0]!r}: pages of one engine are not those of "
                f"another, which measures for itself; allowed: {IN_MEMORY[0]} into memory, or a calibration of `quantkv calibrate`"
            )


def measure_before_sizing(config: Any) -> None:
    """Let the worker of this process measure its model before it tells how much memory is free for pages. May be called again."""
    worker = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    own = worker.determine_available_memory
    if own.__module__ == __name__:
        return

    def determine_available_memory(self):
        take_statistics(self.vllm_config, self.model_runner)
        return own(self)

    worker.determine_available_memory = determine_available_memory


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
    model, model_config, device = runner.get_model(), config.model_config, runner.device
    limit = model_config.max_model_len
    tokenizer = None if model_config.skip_tokenizer_init else model_config.tokenizer
    longest = min(limit, config.scheduler_config.max_num_batched_tokens)
    parts, source = contexts(tokenizer, model_config.get_vocab_size(), longest, device)
    observer = Observer()
    every = [layer.impl for layer in config.compilation_config.static_forward_context.values() if hasattr(layer, "impl")]
    with torch.inference_mode(), set_current_vllm_config(config), observer.watching(model, every):
        for part in parts:
            _forward(model, config, part)
    owners = {layer.impl.number for layer in layers.values()}
    if missing := owners - observer.layers.keys() - observer.latents.keys():
        raise NotImplementedError(f"the pass did not reach layers {sorted(missing)}")
    with torch.inference_mode():
        observer.values = _value_moments(model, layers, observer)
        moments = observer.moments(limit, model_config.dtype)
    del observer
    release(device)
    return calibration_of(
        {number: moments[number] for number in sorted(owners)}, model_config.get_total_num_hidden_layers(), source
    ), source


def _forward(model: torch.nn.Module, config: Any, ids: torch.Tensor) -> None:
    """One eager pass over tokens `[T]` that stand at the first positions."""
    positions = torch.arange(len(ids), device=ids.device)
    if config.model_config.uses_mrope:
        positions = positions.expand(3, -1).contiguous()
    with set_forward_context(None, config, num_tokens=len(ids), skip_compiled=True):
        model(input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)


def _value_moments(model: torch.nn.Module, layers: dict[str, Any], observer: Observer) -> dict[int, torch.Tensor]:
    """Second moments of what reads the values of each layer, by its number."""
    own = [layer for layer in layers.values() if extract_layer_index(layer.layer_name) == layer.impl.number]
    seen = [layer for layer in own if layer.impl.number not in observer.latents]
    sizes = [(layer.impl.num_kv_heads, layer.head_size_v, layer.impl.num_heads) for layer in seen]
    return value_moments(model, [(layer.impl.number, layer, of) for layer, of in zip(seen, sizes)])
