"""The attention layers of one model on one rank: how each is stored, and who serves it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.runtime_context import get_parallel

from ...cache import PagedCache
from ...calibration import Calibration
from ...copies import CacheWithCopies
from ...engine.layer import LayerAttention, PagedLayer
from ...engine.layer_config import LayerConfig, Shard
from ...geometry import Heads
from ...options import AttentionOptions
from ...policy import Policy
from ..asked import check_only
from .asked import of_prompts

ONLY = {  # attention that calls of quantkv compute: what a module says, and the only value that is served
    "attn_type": AttentionType.DECODER,
    "is_cross_attention": False,
    "use_irope": False,
    "pos_encoding_mode": "NONE",
    "logit_capping_method": "tanh",
    "xai_temperature_len": -1,
}


@dataclass
class Layer:
    """One layer's pages, whoever reads them.

    number: of the layer. windowed: whether its pages are those of SGLang's pool for windows. cache: its pages, once they are allocated.
    lends: whether several of the model's modules read them.
    """

    number: int
    paged: PagedLayer
    windowed: bool = False
    cache: PagedCache | None = None
    lends: bool = False

    @property
    def pages(self) -> PagedCache | CacheWithCopies:
        """Its pages as calls take them, with the 16-bit copies in front of them."""
        return self.paged.cache(self.cache)


class Layers:
    """The layers of a model on this rank.

    backend: the name that was asked for. policy: how rows are stored. of: layers by their number. modules: SGLang's attention by layer.
    measured: what a pass at start has measured of this rank's heads. requests: sequences whose full-precision tokens have room.
    cell_bytes: bytes of a token that the pools were sized by, once they were.
    """

    def __init__(self, backend: str, policy: Policy, model: torch.nn.Module, model_config: Any, dtype: torch.dtype) -> None:
        self.backend, self.policy, self.dtype = backend, policy, dtype
        self.modules = [module for module in model.modules() if isinstance(module, RadixAttention)]
        self.of: dict[int, Layer] = {}
        self.attention: dict[int, LayerAttention] = {}  # by the id of a module
        self.requests, self.cell_bytes, self.measured = 0, None, None
        for module in self.modules:
            self._add(module, model_config)

    def _add(self, module: RadixAttention, model_config: Any) -> None:
        check_only(module, ONLY, before=f"layer {module.layer_id}: ")
        number, heads = module.layer_id, Heads(module.tp_k_head_num, module.qk_head_dim, module.v_head_dim)
        window = module.sliding_window_size + 1 if module.sliding_window_size > -1 else 0  # SGLang's does not count the query's own
        options = AttentionOptions(
            window=window, softcap=float(module.logit_cap or 0.0), prompt_precision=of_prompts("prompt_precision", self.policy)
        )
        own_rows = of_prompts("prompt", self.policy) == "own"
        attention = LayerAttention(module.tp_q_head_num, float(module.scaling), options, own_rows=own_rows)
        known = self.of.get(number)
        if known is None:
            ranks = get_parallel()
            shard = Shard(ranks.attn_tp_rank, ranks.attn_tp_size)
            total = shard.all_kv_heads(heads.num_kv_heads, model_config.get_total_num_kv_heads)
            config = LayerConfig.of(self.policy, number, self.dtype, heads, total, shard, attention.by_position)
            scales = config.scales(module.k_scale_float, module.v_scale_float)
            known = self.of[number] = Layer(number, PagedLayer(config, heads, self.dtype, scales))
        else:
            known.lends = True
            if known.paged.heads != heads:
                raise NotImplementedError(f"quantkv: layer {number} has heads {known.paged.heads} and {heads}")
        self.attention[id(module)] = attention.over(known.paged.config)

    def reserve_copies(self, page_size: int, requests: int, device: torch.device) -> None:
        """Take the memory of full-precision tokens now, before SGLang gives the rest to pages."""
        self.requests = requests
        for layer in self.of.values():
            layer.paged.reserve_copies(page_size, requests, device)

    def take_statistics(self, made: Calibration) -> None:
        """Store rows by a calibration of this rank's heads from now on. No row may have been stored."""
        self.measured = made
        for number, layer in self.of.items():
            layer.paged.config = layer.paged.config.with_calibration(made, number)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the layers, in order."""
        return sorted(self.of)

    def page_bytes(self, numbers: list[int], page_size: int) -> int:
        """Bytes of a page of `page_size` tokens in these layers."""
        return sum(self.of[number].paged.spec(page_size).block_bytes for number in numbers)

    def kinds(self) -> Iterator[tuple[Layer, LayerAttention]]:
        """One layer of each kind that the same kernels serve."""
        seen = set()
        for module in self.modules:
            layer, attention = self.of[module.layer_id], self.attention[id(module)]
            kind = layer.paged.kind(attention), layer.windowed
            if kind not in seen:
                seen.add(kind)
                yield layer, attention

    def full_precision(self, windowed: bool) -> list[Layer]:
        """Layers with full-precision tokens, of those that share block tables; the last one last."""
        found = (self.of[number] for number in self.numbers)
        return [layer for layer in found if layer.windowed == windowed and layer.paged.config.full_precision is not None]
