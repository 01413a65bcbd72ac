"""Layers of a model as vLLM's planner sees them, without a model: what each says of its pages, or of its state."""

from typing import Any

from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1 import kv_cache_interface as pages

from quantkv import get_format
from quantkv.integrations.vllm.backend import QuantKVBackend


class Held:
    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def get_kv_cache_spec(self, config: Any) -> Any:
        return self.spec

    def get_attn_backend(self) -> type:
        return QuantKVBackend.of(get_format("int4"))  # its spec has the bytes of its own format


class Rows(Held, AttentionLayerBase):
    """Keys and values; a spec of None: another layer's."""


class States(Held, MambaBase):
    get_state_shape = get_state_dtype = mamba_type = None


def context(specs: dict[str, Any]) -> dict[str, Any]:
    """A model's layers by name, beside one that keeps nothing and what is no layer of attention."""
    layers = {name: (States if isinstance(spec, pages.MambaSpec) else Rows)(spec) for name, spec in specs.items()}
    return layers | {"reads another's": Rows(None), "experts": object()}
