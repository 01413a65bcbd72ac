"""Decoding by CUDA graphs of the model as it is: what torch.compile does, without its minutes of compilation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers import PreTrainedModel

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
            if isinstance(inputs.get("past_key_values"), QuantizedCache):
                return captured(**inputs)
            return compiled(owner(), compile_config)(**inputs)

        return call

    model.get_compiled_call = get_compiled_call
    return model


class CapturedModel:
    """Calls of a model. Those that differ in nothing but what their tensors hold are captured the second time, and then replayed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = weakref.ref(model)
        self.key: Any = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: dict[str, Any] = {}
        self.output: Any = None

    def __call__(self, **inputs: Any) -> Any:
        """The model's output; its tensors are overwritten by the next call."""
        model, cache = self.model(), inputs["past_key_values"]
        progress, tensors = cache.progress, {name: t for name, t in _flat(inputs) if isinstance(t, torch.Tensor)}
        if not (progress.ready and cache.is_compileable and inputs["input_ids"].shape[1] == 1):
            self.forget()
            return model(**inputs)
        others = tuple((name, value) for name, value in _flat(inputs) if not isinstance(value, torch.Tensor) and name != "past_key_values")
        shapes = tuple((name, t.shape, t.dtype, t.device) for name, t in tensors.items())
        key = (weakref.ref(cache), progress.addresses, progress.padded, others, shapes)
        if key != self.key:
            self.forget()
            self.key = key
            return model(**inputs)  # compiles and allocates what lasts
        if self.graph is None:
            self._capture(model, inputs)
        held = dict(_flat(self.inputs))
        for name, t in tensors.items():
            held[name].copy_(t)
        self.graph.replay()
        progress.stale = progress.behind = True
        return self.output

    def forget(self) -> None:
        self.key, self.graph, self.inputs, self.output = None, None, {}, None

    def _capture(self, model: PreTrainedModel, inputs: dict[str, Any]) -> None:
        def held(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: held(v) for name, v in value.items()}
            return value.clone() if isinstance(value, torch.Tensor) else value

        self.inputs = {name: held(value) for name, value in inputs.items()}
        graph, cache = torch.cuda.CUDAGraph(), inputs["past_key_values"]
        before = cache.progress.stale, cache.progress.behind
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                self.output = model(**self.inputs)
        finally:
            cache.progress.stale, cache.progress.behind = before  # nothing ran
            cache.progress.traced = 0
        self.graph = graph


def _flat(inputs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Entries of dictionaries too: a mask for each type of layers."""
    flat = []
    for name, value in inputs.items():
        flat += [(f"{name}.{k}", v) for k, v in value.items()] if isinstance(value, dict) else [(name, value)]
    return flat
