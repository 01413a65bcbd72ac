"""Decoding by CUDA graphs of the model as it is: what torch.compile does, without its minutes of compilation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from ..transformers_model import CACHE
from .cache import QuantizedCache


def use_cuda_graphs(model: PreTrainedModel) -> PreTrainedModel:
    """Let `model.generate` capture its passes of one token in a CUDA graph and replay them, where it would compile them by torch.compile:
    with a `QuantizedCache` made with num_tokens, on a GPU. The model's code must not wait for the GPU in such a pass.

    Returns the model; `del model.get_compiled_call` undoes it.
    """
    captured, compiled = CapturedModel(model), type(model).get_compiled_call
    owner = weakref.ref(model)

    def get_compiled_call(compile_config: Any) -> Any:
        def call(**inputs: Any) -> Any:
            for name in (CACHE, "past_key_values"):
                if isinstance(inputs.get(name), QuantizedCache):
                    return captured(inputs.pop(name), inputs)
            return compiled(owner(), compile_config)(**inputs)

        return call

    model.get_compiled_call = get_compiled_call
    return model


class CapturedModel:
    """Calls of a model. Those that differ in nothing but what their tensors hold are captured the second time, and then replayed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = weakref.ref(model)
        self.forget()

    def forget(self, *_: Any) -> None:
        """Give the graph back, and its memory."""
        self.key: Any = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: dict[str, Any] = {}
        self.output: Any = None

    def __call__(self, cache: QuantizedCache, inputs: dict[str, Any]) -> Any:
        """The model's output; its tensors are overwritten by the next call."""
        model, cache_positions = self.model(), cache.cache_positions
        key = self._key(cache, inputs)
        if key is None or key != self.key:  # this call compiles, and allocates what lasts
            self.forget()
            self.key = key
            return model(**{CACHE: cache}, **inputs)
        if self.graph is None:
            self._capture(model, cache, inputs)
        for name, t in _tensors(inputs):
            self.inputs[name].copy_(t)
        self.graph.replay()
        cache_positions.stale = cache_positions.behind = True
        self.output[CACHE] = cache
        output, self.output = self.output, type(self.output)(**{**self.output, CACHE: None})  # keeps no cache alive
        return output

    def _key(self, cache: QuantizedCache, inputs: dict[str, Any]) -> Any:
        """Equal for calls that one graph serves; None where it can be none."""
        cache_positions, tensors = cache.cache_positions, _tensors(inputs)
        if not cache_positions.ready or inputs["input_ids"].shape[1] != 1:
            return None
        shapes = tuple((name, t.shape, t.dtype, t.device) for name, t in tensors)
        others = tuple((name, value) for name, value in inputs.items() if not isinstance(value, torch.Tensor | dict))
        return weakref.ref(cache, self.forget), cache_positions.addresses, cache_positions.padded, shapes, others

    def _capture(self, model: PreTrainedModel, cache: QuantizedCache, inputs: dict[str, Any]) -> None:
        self.inputs = {name: t.clone() for name, t in _tensors(inputs)}
        given = {name: self.inputs.get(name, value) for name, value in inputs.items()}
        for name, value in inputs.items():
            if isinstance(value, dict):  # a mask for each type of layers
                given[name] = {inner: self.inputs.get(f"{name}.{inner}", v) for inner, v in value.items()}
        before = cache.cache_positions.stale, cache.cache_positions.behind
        try:
            self.graph, self.output = captured(lambda: model(**{CACHE: cache}, **given))
        finally:
            cache.cache_positions.stale, cache.cache_positions.behind, cache.cache_positions.traced = *before, 0  # nothing ran


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of what `call` launches, and what it returned: tensors that a replay fills."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = call()
    return graph, output


def _tensors(inputs: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Tensors by name, those in dictionaries too."""
    flat = []
    for name, value in inputs.items():
        flat += [(f"{name}.{inner}", v) for inner, v in value.items()] if isinstance(value, dict) else [(name, value)]
    return [(name, value) for name, value in flat if isinstance(value, torch.Tensor)]
