"""Exact tokens in vLLM: which pages have a 16-bit copy, for the layers that one metadata builder serves."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.utils import extract_layer_index

from ...exact import ExactTokens
from ...shadow import FEW_QUERIES, ExactPages, ExactStep


class ExactGroup:
    """What layers with exact tokens share: a pool's state, and the tensors of a step, which are filled before it and outside of CUDA
    graphs. They lie where they are from the first step on.

    layers: by name, those with a pool. tokens: the most that one of them keeps.
    """

    def __init__(self, layers: dict[str, Any], config: Any, device: torch.device) -> None:
        self.layers, self.device = list(layers.values()), device
        self.last = layers[max(layers, key=extract_layer_index)]
        given = [layer.impl.exact for layer in self.layers]
        self.tokens = ExactTokens(max(tokens.first for tokens in given), max(tokens.latest for tokens in given))
        sizes = config.compilation_config.cudagraph_capture_sizes or [0]
        scheduler = config.scheduler_config
        self.num_seqs, self.num_tokens = max(scheduler.max_num_seqs, *sizes), max(scheduler.max_num_batched_tokens, *sizes)
        self.pool_seqs = scheduler.max_num_seqs
        self.pages: ExactPages | None = None
        self.whole: ExactStep | None = None

    @classmethod
    def of(cls, layers: dict[str, Any], config: Any, device: torch.device) -> ExactGroup | None:
        """None where no layer has exact tokens of its own."""
        kept = {name: layer for name, layer in layers.items() if layer.impl.exact is not None and layer.impl.owner is None}
        return cls(kept, config, device) if kept else None

    def step(self, m: Any, count: int, advance: bool = True) -> ExactStep | None:
        """What a step of `count` sequences with metadata `m` of vLLM's reads exactly; None before vLLM has allocated pages.

        advance: whether it runs now; else it is captured, and the numbers in its tensors come later.
        """
        kv_cache = self.last.kv_cache
        if kv_cache.numel() == 0:
            return None
        if self.pages is None:
            self.pages = ExactPages(self.tokens, kv_cache.shape[2], self.pool_seqs, kv_cache.shape[0], self.device)
            self.whole = ExactStep(self.tokens, kv_cache.shape[2], self.num_seqs, self.num_tokens, self.device, few=True)
            for layer in self.layers:
                layer.impl.join(self.pages)
        watched = self.last.impl.cache_of(kv_cache).pages
        if watched is not self.pages.watched:
            self.pages.watch(watched)
        step = self.whole.part(count, m.max_query_len <= FEW_QUERIES)
        if advance:
            self.pages.advance(m.block_table_tensor[:count], m.seq_lens[:count], m.query_start_loc[: count + 1], m.slot_mapping, step)
        return step
