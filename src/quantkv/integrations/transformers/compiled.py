"""Layers of a quantized cache under torch.compile and in CUDA graphs: two operators, which find their layer by a tensor of its cache,
as numbers would be compiled for.

A pass of one token over pages that are there (`num_tokens`) reads nothing on the host, and can be captured. Any other pass is one
operator as well, which runs as it would without torch.compile.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .layers import QuantizedLayer

_LAYERS: dict[tuple[int, int], weakref.ref[QuantizedLayer]] = {}  # by the address of a tensor that outlives it, and its index
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


class Handed:
    """The layer whose rows are on their way from `Cache.update` to the attention function while they are traced: tensors that
    torch.compile follows can carry nothing."""

    def __init__(self) -> None:
        self.layer: QuantizedLayer | None = None

    def give(self, layer: QuantizedLayer) -> None:
        """Leave a layer's rows for its attention. RuntimeError where the last ones were not read."""
        if self.layer is not None:
            raise RuntimeError(
                "past_key_values: the rows of a layer were not read: a QuantizedCache is read by the attention implementation "
                "'quantkv' only; call quantkv.integrations.transformers.use_quantkv_attention(model)"
            )
        self.layer = layer

    def take(self) -> QuantizedLayer | None:
        """The layer whose rows wait, which is then none; None where none do."""
        layer, self.layer = self.layer, None
        return layer


HANDED = Handed()


def known_by(tensor: torch.Tensor, layer: QuantizedLayer) -> None:
    """Let operators find `layer` by `tensor`."""
    _LAYERS[tensor.data_ptr(), layer.index] = weakref.ref(layer)


def _layer(tensor: torch.Tensor, index: int) -> QuantizedLayer:
    layer = _LAYERS[tensor.data_ptr(), index]()
    if layer is None:
        raise RuntimeError("past_key_values: the cache of a compiled call is gone")
    return layer


@torch.library.custom_op(
    "quantkv::decode_layer",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor[] places, Tensor? sinks, float? scale, float softcap, "
    "int index) -> Tensor",
)
def decode_layer(query, key, value, mask, places, sinks, scale, softcap, index):
    """`QuantizedLayer.decode`.

    places: where what it writes to begins, that of its `DecodeMetadata` first: a graph that was captured over them is valid for no others.
    They are not declared as written to: nothing else in a compiled graph reads them, and none may copy them."""
    layer = _layer(places[0], index)
    return layer.decode(query, (key, value), mask, layer.leads, scale=scale, softcap=softcap, sinks=sinks)


@torch.library.custom_op(
    "quantkv::pass_layer",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor token, Tensor? sinks, float? scale, float softcap, "
    "int index) -> Tensor",
    tags=_TAGS,
)
def pass_layer(query, key, value, mask, token, sinks, scale, softcap, index):
    """`QuantizedLayer.attend`, whatever the pass."""
    layer = _layer(token, index)
    layer.take(key, value)
    return layer.attend(query, mask, scale=scale, softcap=softcap, sinks=sinks)


@decode_layer.register_fake
def _(query, key, value, *_: Any):
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


@pass_layer.register_fake
def _(query, key, value, *_: Any):
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
