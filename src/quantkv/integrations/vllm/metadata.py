"""A step of vLLM's as prepared calls: what its layers have in common is checked and worked out once."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, max_decode_query_len
from vllm.v1.attention.backends.utils import compute_mm_prefix_range_tensor

from ...calls import Batch
from ...engine.forward_metadata import ForwardMetadata
from ...engine.full_precision_group import FullPrecisionGroup
from ...engine.warm_up import WarmUps
from ..serving import Step, tell
from .blocks import PagesOfBlocks

logger = init_logger("vllm.quantkv")


def full_precision_group(layers: list[Any], config: Any, device: torch.device) -> FullPrecisionGroup:
    """What these layers of vLLM's share where tokens are at full precision."""
    scheduler, sizes = config.scheduler_config, config.compilation_config.cudagraph_capture_sizes or [0]
    largest = max(scheduler.max_num_seqs, *sizes), max(scheduler.max_num_batched_tokens, *sizes)
    return FullPrecisionGroup([layer.impl.paged for layer in layers], *largest, scheduler.max_num_seqs, device)


class StepBuilder:
    """What builders of rows' steps and of latents' have in common: vLLM calls `build` and its like, and `_build` makes the metadata.
    `self.take_layers` begins it, and `self.tell` has what the layers need compiled, and tells the log who serves them.

    of_engine: implementations of all layers that quantkv serves. full_precision: of those of its layers that have full-precision tokens;
    None: none has. last: of these layers.
    """

    requires_block_table_width = True  # kernels are compiled for its alignment
    full_precision: FullPrecisionGroup | None = None
    last: Any = None

    def take_layers(self, vllm_config: Any, layer_names: list[str]) -> None:
        """The layers of vLLM with these names; and full-precision tokens of those with pages of their own, where their policy has some."""
        named = vllm_config.compilation_config.static_forward_context
        self.layers, self.names = [named[name] for name in layer_names], layer_names
        self.of_engine = [layer.impl for layer in named.values() if hasattr(getattr(layer, "impl", None), "who_serves")]
        # Kept by a layer, which outlives this: vLLM makes its builders once for profiling, and again.
        self.warm_ups: WarmUps = vars(self.of_engine[0]).setdefault("warm_ups", WarmUps())
        kept = [layer for layer in self.layers if layer.impl.full_precision is not None and layer.impl.owner is None]
        if kept:
            kept.sort(key=lambda layer: extract_layer_index(layer.layer_name))
            self.full_precision, self.last = full_precision_group(kept, vllm_config, self.device), kept[-1]
        # vLLM then captures all passes of a model that drafts as one graph. What is at full precision is worked out outside of graphs, so
        # this is for layers without: those that draft have none.
        self.supports_draft_decode_metadata_update = self.full_precision is None

    def attach_full_precision(self, metadata: ForwardMetadata, advance: bool) -> None:
        """Say in a step's metadata what it reads at full precision. advance: whether it runs now."""
        if self.full_precision is not None and self.last.kv_cache.numel():  # vLLM has allocated pages
            self.full_precision.attach(metadata, self.last.impl.pages_of(self.last.kv_cache), advance)

    def tell(self, table_width: int | None, tokens: int) -> None:
        """Who serves, now, or when vLLM gives the layers their pages, on a GPU. table_width: pages of a row of the block table. tokens: of
        a page that the kernels read."""
        self.table_width = table_width
        if self.device.type == "cuda":
            self.warm_ups.expect(self.names)
            for name, layer in zip(self.names, self.layers):
                layer.bind_kv_cache = partial(self._bind, name, layer)
            return
        for layer in self.layers:
            if self.warm_ups.is_new((layer.impl.kind, self._steps)):
                self._tell(layer.impl, layer.impl.who_serves(self.device, tokens, *self._steps))

    @property
    def _steps(self) -> tuple[int, int]:
        """Queries of a sequence that verifies, pages of a row of the block table."""
        return self.reorder_batch_threshold, self.table_width

    def _bind(self, name: str, layer: Any, kv_cache: torch.Tensor) -> None:
        """vLLM gives a layer its pages: what calls over pages that lie so need is compiled before the first request."""
        type(layer).bind_kv_cache(layer, kv_cache)
        ask = lambda: self._tell(layer.impl, layer.impl.warm_up(kv_cache, *self._steps))
        lie = kv_cache.shape[1:], kv_cache.stride()
        self.warm_ups.has_pages(name, (layer.impl.kind, lie, self._steps), ask if kv_cache.numel() else None)

    def _tell(self, impl: Any, who: dict[str, str]) -> None:
        """Say in the log who serves the layers of a kind."""
        tell(logger, impl.format.name, who, sum(other.kind == impl.kind for other in self.of_engine))

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config, kv_cache_spec):
        """Queries a sequence that a captured batch may have."""
        return max_decode_query_len(vllm_config)  # lengths are read on the device

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        """A step's prepared calls, of vLLM's metadata."""
        self.warm_ups.finish()
        return self._build(common_attn_metadata, common_attn_metadata.max_seq_len)

    def build_for_cudagraph_capture(self, common_attn_metadata):
        """The same for a graph: no bound on lengths, and full-precision tokens stay as they are."""
        self.warm_ups.finish()
        return self._build(common_attn_metadata, None, advance=False)  # a graph is replayed with longer sequences

    def build_for_drafting(self, common_attn_metadata, draft_index):
        """The same for a model that drafts: with no bound on lengths, since it goes on by itself."""
        return self._build(common_attn_metadata, None)

    def update_draft_decode_metadata(self, metadata):
        """Before each draft, and captured with all of them in one graph: prepared calls read lengths, slots and positions from tensors that
        vLLM fills anew, so nothing is to be done."""


class QuantKVBuilder(StepBuilder, AttentionMetadataBuilder[Step]):
    """Builds a `Step` over slices of vLLM's own tensors, which a graph replays with other numbers in them. Full CUDA graphs hold batches in
    which every sequence decodes, or verifies as many tokens as any other."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device, block_table_width=None):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.take_layers(vllm_config, layer_names)
        self.pages = PagesOfBlocks(kv_cache_spec, vllm_config, block_table_width, device)
        for layer in self.layers:
            layer.impl.pages_per_block = self.pages.pages
        self.tell(self.pages.width, self.pages.tokens)

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        """Every batch, but for models with images whose ranges reach behind a window."""
        if not vllm_config.model_config.is_mm_prefix_lm:
            return cls._cudagraph_support
        # A graph knows no image ranges. One query sees no later key, but keys before its window, where images reach beyond it.
        layers = vllm_config.compilation_config.static_forward_context.values()
        beyond = any(
            getattr(layer, "sliding_window", None) and not getattr(layer, "mm_prefix_clamp_sliding_window", False) for layer in layers
        )
        return AttentionCGSupport.NEVER if beyond else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    @property
    def _eight_bit(self) -> bool:
        """Whether prompts have 8-bit scores."""
        return any(layer.impl.attention.options.prompt_precision == "8bit" for layer in self.layers)

    def _build(self, m, max_seq_len: int | None, advance: bool = True) -> Step:
        """advance: whether the step runs now; False: it is captured, and its numbers come later."""
        if m.causal is not True:
            raise NotImplementedError("quantkv: attention that is not causal")
        count = m.num_reqs
        ranges = compute_mm_prefix_range_tensor(m.mm_req_doc_ranges, count, self.device)
        if m.max_query_len <= self.reorder_batch_threshold:
            batch = Batch(m.query_start_loc[: count + 1], m.seq_lens[:count], m.max_query_len, max_seq_len)
            return self._metadata("decode", m, batch, m.num_actual_tokens, ranges, advance)
        starts = m.query_start_loc_cpu[: count + 1].tolist()
        while starts[count - 1] == starts[count]:  # padding
            count -= 1
        lengths, bound = None, m.seq_lens_cpu_upper_bound
        # Who serves a sequence must not depend on the others, or depends on which of them are prompts: worth waiting for the device.
        if bound is None and (envs.VLLM_BATCH_INVARIANT or self._eight_bit):
            bound = m.seq_lens
        if self.device.type == "cuda" and bound is not None:
            # Exact for prompts, which is where it matters; of sequences that decode it is a bound, and no more is asked of it.
            lengths = tuple((end - start, n) for start, end, n in zip(starts, starts[1:], bound[:count].tolist()))
        queries = m.query_start_loc[: count + 1], m.seq_lens[:count], m.max_query_len
        batch = Batch(*queries, None, lengths, chunks=self.reorder_batch_threshold == 1)
        return self._metadata("mixed", m, batch, starts[count], None if ranges is None else ranges[:count], advance)

    def _metadata(self, kind: str, m, batch: Batch, num_tokens: int, ranges: torch.Tensor | None, advance: bool) -> Step:
        """What vLLM says in `m` that concerns the sequences of `batch`."""
        blocks = m.block_table_tensor[: batch.num_seqs]
        metadata = Step(kind, batch, self.pages.table(blocks), m.slot_mapping, m.positions, num_tokens=num_tokens, prefix_ranges=ranges)
        metadata.blocks = blocks
        self.attach_full_precision(metadata, advance)
        return metadata

    def update_draft_decode_metadata(self, metadata: Step) -> None:
        """The same, but the table of pages is made anew of vLLM's blocks, which are those of another step when the graph is replayed."""
        self.pages.table(metadata.blocks)
