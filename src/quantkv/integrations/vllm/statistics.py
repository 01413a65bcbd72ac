"""Key means and Hessians that an engine measures of its own model at start, without a file.

Each rank makes one pass of the loaded model, for its own heads, right before vLLM measures how much memory is left for pages. So nothing
of it is left in memory, and kernels are compiled for the maps that it makes. The pass is eager and needs no pages: `QuantKVImpl.forward`
attends over the rows of the pass itself. Rows before rotation are what the rotary embedding's module was given, and rotations are what
that module makes of the identity, so no layout of rotations is known here.

vLLM's own profile run is no such pass: its tokens are all the same, it skips attention, and it is compiled. A first request comes too late:
pages of other requests, and CUDA graphs, would be there.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.import_utils import resolve_obj_by_qualname

from ...calibration import Calibration
from ...engine.observed import PROJECTIONS, SKIPPED, LayerSums, latent_moments, layer_moments, projection_moments
from ..sample_tokens import pass_tokens, sample_tokens

logger = init_logger("vllm.quantkv")
IN_MEMORY = ("OffloadingConnector", "CPUOffloadingSpec")  # a connector whose pages end with the engine
SAME = 2**-6  # relative distance of rows that differ by a factor each, in bfloat16
TINY = torch.finfo(torch.float32).tiny
ROTARIES = "vllm.model_executor.layers.rotary_embedding"
WITHIN_ROTARIES = ("ApplyRotaryEmb",)  # steps of a rotary embedding, which are given parts of rows


class Rotated(NamedTuple):
    """Rows before and after one call of a rotary embedding. dims: of the positions that the module takes."""

    module: torch.nn.Module
    before: torch.Tensor
    after: torch.Tensor
    dims: int


class Observer:
    """What the pass shows of the layers.

    layers: sums by the number of a layer. latents: sums `[latent]` of latents and how many they are of, likewise. values: second moments
    `[HK, D_V, D_V]` of what reads its values. rotaries: rotary embeddings by their key, with the dimensions of the positions that each
    takes.
    """

    def __init__(self) -> None:
        self.layers: dict[int, LayerSums] = {}
        self.latents: dict[int, tuple[torch.Tensor, int]] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.rotaries: dict[tuple[int, int, int], torch.nn.Module] = {}
        self._given: list[tuple[torch.Tensor, ...]] = []
        self._rotated: list[Rotated] = []

    @contextmanager
    def watching(self, model: torch.nn.Module, impls: list[Any]) -> Iterator[None]:
        """A context in which every call of the layers is seen."""
        handles = []
        for module in model.modules():
            if type(module).__module__.startswith(ROTARIES) and type(module).__name__ not in WITHIN_ROTARIES:
                handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                handles.append(module.register_forward_hook(self._after, with_kwargs=True))
        try:
            for impl in impls:
                impl.watch(self)
            yield
        finally:
            for impl in impls:
                impl.watch(None)
            for handle in handles:
                handle.remove()

    def _before(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        given = [*args, *kwargs.values()]
        self._given.append(tuple(t.clone() for t in given if isinstance(t, torch.Tensor) and t.is_floating_point()))

    def _after(self, module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        positions = next(t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and not t.is_floating_point())
        made = output if isinstance(output, tuple) else (output,)
        for before, after in zip(self._given.pop(), (t for t in made if t is not None)):
            self._rotated.append(Rotated(module, before, after.clone(), positions.ndim))

    def see(self, layer: torch.nn.Module, impl: Any, query: torch.Tensor, key: torch.Tensor) -> None:
        """`query [T, HQ, D]` and `key [T, HK, D]` of a layer, as they are attended to. Left out are layers that read another's pages, and
        layers whose rows are stored as they are."""
        rotated = self._rotated
        if impl.owner is not None or not impl.wants_statistics:
            self._rotated = []
            return
        sums = self.layers.setdefault(impl.number, LayerSums())
        turned = {name: self._find(rows) for name, rows in (("query", query), ("key", key))}
        self._rotated = []
        if rotated:
            same = turned["query"] is not None and turned["key"] is not None and turned["query"].module is turned["key"].module
            sums.understood = sums.understood and same
            if same:
                found = turned["key"]
                name = id(found.module), key.shape[2], found.dims
                self.rotaries[name], sums.rotation = found.module, name
                query, key = (turned[name].before for name in ("query", "key"))
        sums.add(query, key)

    def see_latents(self, impl: Any, latents: torch.Tensor) -> None:
        """Latents `[T, latent]` of a layer. Their rotated dimensions are stored as they are."""
        self._rotated = []
        if impl.wants_statistics:
            rows = latents[SKIPPED:].double()
            total, count = self.latents.get(impl.number, (0.0, 0))
            self.latents[impl.number] = total + rows.sum(0), count + len(rows)

    def _find(self, rows: torch.Tensor) -> Rotated | None:
        """The call of a rotary embedding that made rows `[T, H, D]`; its rows before are scaled as these were afterwards (Llama 4 norms
        rows after their rotation, and scales queries by position)."""
        for call in reversed(self._rotated):
            if call.after.numel() == rows.numel():
                before, after, given = (t.reshape(rows.shape).float() for t in (call.before, call.after, rows))
                scale = (given * after).sum(2, keepdim=True) / after.square().sum(2, keepdim=True).clamp(min=TINY)
                if (given - scale * after).norm() <= SAME * given.norm():
                    return call._replace(before=before * scale)
        return None

    def moments(self, limit: int, dtype: torch.dtype) -> dict[int, Any]:
        """`LayerMoments` by the number of a layer, with key means for positions below limit."""
        rotations = {name: functools.partial(_rotate, module, *name[1:], dtype) for name, module in self.rotaries.items()}
        made = layer_moments(self.layers, self.values, rotations, limit)
        return made | {number: latent_moments(total / count) for number, (total, count) in self.latents.items()}


def _rotate(module: torch.nn.Module, size: int, dims: int, dtype: torch.dtype, positions: torch.Tensor) -> torch.Tensor:
    """`[P, D, D]`: the rotations of a rotary embedding at positions `[P]`, from what it makes of the identity."""
    eye = torch.eye(size, dtype=dtype, device=positions.device).flatten().repeat(len(positions), 1)
    places = positions if dims == 1 else positions.expand(3, -1).contiguous()
    made = module(places, eye, eye[:, :size].clone())
    return (made[0] if isinstance(made, tuple) else made).view(len(positions), size, size)


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
    began = time.perf_counter()
    try:
        if (reason := reason_against(config)) is not None:
            raise NotImplementedError(reason)
        made, source = _measured(config, runner, waiting)
    except Exception as error:  # of whatever a model does when it is called so
        if any(layer.impl.policy.statistics == "require" for layer in waiting.values()):
            raise NotImplementedError(f"quantkv: policy.statistics='require': the model cannot be measured: {error}") from error
        logger.warning("quantkv: no statistics of this model, keys and values are stored without key means and Hessians: %s", error)
        for layer in waiting.values():
            layer.impl.unmeasured = True
        return
    for layer in waiting.values():
        layer.impl.take_statistics(made)
    what = "means of latents" if all(layer.impl.of_latents for layer in waiting.values()) else "key means and Hessians"
    logger.info("quantkv: %s of %d layers (%s): %.1f s", what, len(made.layers), source, time.perf_counter() - began)


def _measured(config: Any, runner: Any, layers: dict[str, Any]) -> tuple[Calibration, str]:
    """The calibration of this rank's heads, and what it was made of."""
    model, model_config, device = runner.get_model(), config.model_config, runner.device
    limit = model_config.max_model_len
    count = pass_tokens(device)
    context = min(count, limit, config.scheduler_config.max_num_batched_tokens)
    if context <= 2 * SKIPPED:
        raise NotImplementedError(f"steps of {context} tokens are too short")
    tokenizer = None if model_config.skip_tokenizer_init else model_config.tokenizer
    ids, source = sample_tokens(tokenizer, model_config.get_vocab_size(), count)
    observer = Observer()
    every = [layer.impl for layer in config.compilation_config.static_forward_context.values() if hasattr(layer, "impl")]
    with torch.inference_mode(), set_current_vllm_config(config), observer.watching(model, every):
        for part in ids[0].to(device).split(context):
            if len(part) > 2 * SKIPPED:
                _forward(model, config, part)
    owners = {layer.impl.number for layer in layers.values()}
    if missing := owners - observer.layers.keys() - observer.latents.keys():
        raise NotImplementedError(f"the pass did not reach layers {sorted(missing)}")
    with torch.inference_mode():
        _value_moments(model, layers, observer)
        moments = observer.moments(limit, model_config.dtype)
    del observer
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    kept = {number: _own(moments[number]) for number in sorted(owners)}
    return Calibration(max(max(kept) + 1, model_config.get_total_num_hidden_layers()), kept, {"text": source}), source


def _own(moments: Any) -> Any:
    """The same numbers in tensors that are no inference tensors."""
    tensors = moments.key_mean, moments.key_hessian, moments.value_hessian
    return type(moments)(*(None if t is None else t.clone() for t in tensors))


def _forward(model: torch.nn.Module, config: Any, ids: torch.Tensor) -> None:
    """One eager pass over tokens `[T]` that stand at the first positions."""
    positions = torch.arange(len(ids), device=ids.device)
    if config.model_config.uses_mrope:
        positions = positions.expand(3, -1).contiguous()
    with set_forward_context(None, config, num_tokens=len(ids), skip_compiled=True):
        model(input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)


def _value_moments(model: torch.nn.Module, layers: dict[str, Any], observer: Observer) -> None:
    """Find the output projection behind each layer; without one the errors of all values count the same."""
    parents = {id(child): module for module in model.modules() for child in module.children()}
    for layer in layers.values():
        impl, number = layer.impl, layer.impl.number
        if number in observer.values or number in observer.latents or extract_layer_index(layer.layer_name) != number:
            continue
        parent = parents.get(id(layer))
        named = [] if parent is None else [getattr(getattr(parent, name, None), "weight", None) for name in PROJECTIONS]
        heads, size = impl.num_kv_heads, layer.head_size_v
        found = projection_moments(named, heads, size, impl.num_heads)
        observer.values[number] = torch.eye(size, device="cpu").repeat(heads, 1, 1) if found is None else found
