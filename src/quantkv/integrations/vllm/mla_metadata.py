"""A step of vLLM's over latents: vLLM's own metadata for prompts, prepared calls for writes and decode."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata, MLACommonMetadataBuilder, QueryLenSupport
from vllm.v1.attention.backend import AttentionCGSupport

from ...calls import Batch
from ...copies import FullPrecisionStep
from ...engine.forward_metadata import ForwardMetadata
from .metadata import StepBuilder


@dataclass
class LatentMetadata(MLACommonMetadata):
    """One step. Sequences that decode, or verify drafts, come first.

    written: of all sequences, for writes. decoded: of those that decode; None: none does. before: int32 `[prompts]`, tokens before each
    prompt's own rows; None: there are no prompts.
    """

    written: ForwardMetadata | None = None
    decoded: ForwardMetadata | None = None
    before: torch.Tensor | None = None

    def full_precision_of_prompts(self, first: int, count: int) -> FullPrecisionStep | None:
        """What `count` prompts, from number `first` on, read at full precision; None: nothing."""
        step = self.written.full_precision
        return None if step is None else step.part(count, self.num_decodes + first)


class QuantKVLatentBuilder(StepBuilder, MLACommonMetadataBuilder[LatentMetadata]):
    """Builds `LatentMetadata`. Full CUDA graphs hold batches in which every sequence decodes, or verifies."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    query_len_support = QueryLenSupport.VARLEN  # lengths are read on the device

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device, block_table_width=None):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, metadata_cls=LatentMetadata)
        self.take_layers(vllm_config, layer_names)
        self.tell(block_table_width, kv_cache_spec.block_size)

    def _build(self, m, max_seq_len: int | None, advance: bool = True) -> LatentMetadata:
        """advance: whether the step runs now; False: it is captured, and its numbers come later."""
        made = MLACommonMetadataBuilder.build(self, 0, m)
        made.written = _part(m, m.num_reqs, m.num_actual_tokens, m.max_query_len, None)
        self.attach_full_precision(made.written, advance)
        if made.num_decodes:
            longest = min(m.max_query_len, self.reorder_batch_threshold)
            made.decoded = _part(m, made.num_decodes, made.num_decode_tokens, longest, max_seq_len)
            if (step := made.written.full_precision) is not None:
                made.decoded.full_precision = step.part(made.num_decodes)
        if made.prefill is not None:
            first = made.num_decodes
            made.before = m.seq_lens[first : m.num_reqs] - made.prefill.query_start_loc.diff()
        return made


def _part(m, count: int, num_tokens: int, max_query_len: int, max_seq_len: int | None) -> ForwardMetadata:
    """What vLLM says in `m` that concerns the first `count` sequences."""
    batch = Batch(m.query_start_loc[: count + 1], m.seq_lens[:count], max_query_len, max_seq_len)
    return ForwardMetadata(batch, m.block_table_tensor[:count], m.slot_mapping, num_tokens=num_tokens)
