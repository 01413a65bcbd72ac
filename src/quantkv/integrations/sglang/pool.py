"""SGLang's pool of keys and values, whose memory is pages of quantkv."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from .layers import Layers

WINDOWS = "SWA"  # how SGLang labels its pool of layers with windows; the other one beside it is "Full"
REFUSED = (  # what reads, writes or moves rows: tokens of a page have no bytes of their own
    "get_key_buffer",
    "get_value_buffer",
    "set_kv_buffer",
    "set_kv_buffer_prefix_valid",
    "move_kv_cache",
    "get_cpu_copy",
    "load_cpu_copy",
    "get_contiguous_buf_infos",
    "host_pool_decls",
)


class QuantKVPool(MHATokenToKVPool):
    """Pages of one pool's layers: `[size / page_size + 1, HK, page_bytes]` uint8 a layer. Page 0 takes the rows of padding.

    layers: of the model. numbers: of its layers, by SGLang's label of the pool.
    """

    layers: ClassVar[Layers]
    numbers: ClassVar[dict[str | None, list[int]]]

    def __init__(self, size: int, page_size: int, dtype: torch.dtype, **named: Any) -> None:
        if named.pop("post_capture_active", False) or named.get("quant_method") is not None:
            raise NotImplementedError("quantkv: a pool that is sized after CUDA graphs, or that SGLang quantizes")
        named["enable_kv_cache_copy"] = False  # asked for with drafts; accepted ones of a chain are where they belong
        super().__init__(size, page_size, torch.uint8, **named)  # nothing takes bytes for rows of 16 bits

    def _create_buffers(self) -> None:
        rest = self.size % self.page_size
        if rest:
            raise ValueError(f"a pool of {self.size} tokens is no whole number of pages of {self.page_size}")
        own = self.numbers[self.allocation_label]
        if len(own) != self.layer_num:
            raise NotImplementedError(f"quantkv: a pool of {self.layer_num} layers; attention has layers {own}")
        device = torch.device(self.device)
        self.k_buffer, self.v_buffer = [], []
        for number in own:
            layer = self.layers.of[number]
            layer.windowed = self.allocation_label == WINDOWS
            layer.cache = layer.paged.allocate(self.size // self.page_size + 1, self.page_size, device)
            self.k_buffer.append(layer.cache.buffer)

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of keys and of values in its pages; padding of a page counts as keys'."""
        values = 0
        for number in self.numbers[self.allocation_label]:
            cache = self.layers.of[number].cache
            _, (_, codes), _, (_, meta) = cache.spec.sections
            values += (codes + meta) * cache.spec.num_kv_heads * cache.num_blocks
        return sum(buffer.nbytes for buffer in self.k_buffer) - values, values

    def _clear_buffers(self) -> None:
        raise NotImplementedError("quantkv: giving the memory of pages back is not supported")


def _refused(name: str) -> Any:
    def refuse(self: QuantKVPool, *given: Any, **named: Any) -> None:
        raise NotImplementedError(
            f"quantkv: {name}: pages of {self.layers.backend} have no rows of 16 bits; the attention backend writes and reads them"
        )

    return refuse


for _name in REFUSED:
    setattr(QuantKVPool, _name, _refused(_name))


def pool_class(layers: Layers, info: Any, hybrid: list[int] | None, has_windows: bool) -> type[QuantKVPool]:
    """The pool of these layers. info: SGLang's `ModelLayerInfo`. hybrid: layers with attention of a model that has others too. has_windows:
    whether layers with windows have a pool of their own."""
    if has_windows:
        numbers = {"Full": list(info.full_attention_layer_ids), WINDOWS: list(info.swa_attention_layer_ids)}
    else:
        own = range(info.start_layer, info.end_layer)
        numbers = {None: [n for n in own if hybrid is None or n in hybrid]}
    return type(QuantKVPool.__name__, (QuantKVPool,), {"layers": layers, "numbers": numbers, "__module__": __name__})


def cell_bytes(layers: Layers, numbers: list[int], page_size: int) -> int:
    """Bytes of a token in these layers, rounded up."""
    return math.ceil(layers.page_bytes(numbers, page_size) / page_size)
