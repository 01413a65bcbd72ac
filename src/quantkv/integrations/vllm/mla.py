"""Layers of latents (MLA) in vLLM: one row a token, its latent in a format and its rotated dimensions as the model computes them.

Decode reads pages by absorbed attention, in our kernels. Prompts go vLLM's way: their own rows, and what is before them in pages as rows
of the model's dtype, through the layer's up-projection, into attention over many heads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    MLACommonBackend,
    MLACommonImpl,
    accumulate_mla_context_chunk,
    get_mla_dims,
    init_mla_context_partial,
)
from vllm.platforms import current_platform

from ...cache import PagedCache
from ...calibration import gains_from_key_mean
from ...copies import CacheWithCopies, FullPrecisionStep, with_room_for_one
from ...engine.layer_config import LayerConfig, Shard
from ...engine.observed import causal_attention
from ...engine.warm_up import claim_scratch, warm_up
from ...format import Format
from ...geometry import Heads
from . import LATENTS, calls
from .around import around
from .backend import BLOCK_SIZES, QuantKVBackend, format_of, never, token_bytes
from .implementation import QuantKVImpl, step_of
from .mla_metadata import LatentMetadata, QuantKVLatentBuilder


def latent_bytes(fmt: Format, sizes: tuple[int, int], dtype: torch.dtype) -> int:
    """Bytes of a token. sizes: numbers of its latent and of its rotated dimensions. ValueError where a format cannot have them."""
    return token_bytes(fmt.latents(dtype).cache_spec(1, *sizes, block_size=BLOCK_SIZES[0]))


def _sizes_and_dtype() -> tuple[tuple[int, int], torch.dtype]:
    """Sizes and dtype of the model that vLLM builds."""
    model = get_current_vllm_config().model_config
    dims = get_mla_dims(model)
    return (dims.kv_lora_rank, dims.qk_rope_head_dim), model.dtype


class QuantKVLatentBackend(QuantKVBackend, MLACommonBackend):
    """Pages of latents, `[B, 1, N, C]`: C is the bytes of a token."""

    format = None  # as of `QuantKVBackend`: this class is no other kind of attention that vLLM derives
    supports_sink = supports_sliding_window = supports_alibi_sqrt = supports_mm_prefix = classmethod(never)
    supports_batch_invariance = classmethod(never)  # how a prompt's context is cut depends on the batch

    @staticmethod
    def get_name() -> str:
        """What vLLM knows it by."""
        return LATENTS

    @staticmethod
    def get_impl_cls():
        """What serves a layer."""
        return QuantKVLatentImpl

    @staticmethod
    def get_builder_cls():
        """What makes a step's metadata."""
        return QuantKVLatentBuilder

    @classmethod
    def token_bytes(cls, fmt: Format, head_size: int, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of a token in a format. ValueError for one that the model's latents cannot have."""
        return latent_bytes(fmt, _sizes_and_dtype()[0], dtype)

    @classmethod
    def content_bytes(cls, spec) -> int:
        """Bytes of a token of a layer."""
        if cls.format is not None:
            return token_bytes(cls.format.cache_spec(1, *cls.sizes))
        sizes, dtype = _sizes_and_dtype()  # before the layers have theirs
        return latent_bytes(format_of(get_current_vllm_config().cache_config.cache_dtype, dtype, latent=True), sizes, dtype)


class QuantKVLatentImpl(MLACommonImpl[LatentMetadata], QuantKVImpl):
    """One layer's attention over latents. Its one kv head is the same on every rank.

    absorbed: whether the layer's projections of decode hold the rotation of stored latents, so that pages are read as they are stored.
    mean: `[latent]`, which latents are stored without; None: they are stored whole. Softmax does not see what all keys of a query have in
        common, so only outputs and rows that are read back get it.
    """

    of_latents = True
    backend = QuantKVLatentBackend
    supports_pcp = False
    absorbed = False
    mean: torch.Tensor | None = None
    _read: tuple[PagedCache | CacheWithCopies | None, ...] = None, None  # the cache, and what decode reads of it

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        logits_soft_cap,
        attn_type,
        kv_sharing_target_layer_name,
        **latents,
    ):
        given = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        given |= {name: latents.get(name) for name in ("indexer", "q_pad_num_heads", "topk_indices_buffer")}
        if named := [name for name, value in given.items() if value is not None]:
            raise NotImplementedError(f"quantkv: latents (MLA) with {', '.join(named)} are not supported; only None is")
        common = num_heads, head_size, scale, num_kv_heads, None, None, kv_cache_dtype, None, attn_type, kv_sharing_target_layer_name
        MLACommonImpl.__init__(self, *common, **latents)
        self.supports_quant_query_input = False  # queries of decode stay as the model computes them
        QuantKVImpl.__init__(self, *common)
        if self.config.attention_config.use_prefill_query_quantization:
            raise NotImplementedError("quantkv: latents (MLA) with use_prefill_query_quantization=True; False is needed")
        keep_writes(self.config)
        self._projections: dict[str, torch.Tensor] = {}
        self.reads_own_rows = self.attention.own_rows
        self.attention = replace(self.attention, own_rows=False)  # decode, and drafts that are verified, read pages alone

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of a latent, and of its rotated dimensions."""
        return self.kv_lora_rank, self.qk_rope_head_dim

    def _token_bytes(self, name: str) -> int:
        return latent_bytes(format_of(name, self.dtype), self.sizes, self.dtype)

    def _all_kv_heads(self) -> int:
        return 1

    def _heads_of(self, layer: Any) -> Heads:
        if not isinstance(layer, MLAAttention):
            raise NotImplementedError(f"quantkv: {type(layer).__name__} is no MLAAttention: it may store latents itself; not supported")
        return Heads(1, *self.sizes)

    def _stored(self, fmt: Format) -> Format:
        return fmt.latents(self.dtype)

    def _by_policy(self, number: int, heads: Heads) -> LayerConfig:
        asked = LayerConfig.of(self.policy, number, self.dtype, heads, 1, Shard())
        return replace(asked, format=self._stored(asked.format))

    def absorb(self, layer: Any) -> None:
        """Multiply the rotation of stored latents into the layer's projections of decode, once they are made of the weights: `W_UK_T [HQ,
        nope, latent]` of queries and `W_UV [HQ, latent, V]` of outputs. Prompts use the weights themselves.

        The rotation stays on the CPU: what is on the device here is in the pool of the weights, which vLLM forgets in sleep of level 2.
        """
        map_ = self.paged.allocate(1, BLOCK_SIZES[0], torch.device("cpu")).maps.k
        self.absorbed = map_ is not None
        if self.absorbed:
            inverse = map_.inverse[0].to(layer.W_UV.device).float()
            made = {"W_UK_T": layer.W_UK_T.float() @ inverse, "W_UV": inverse.mT @ layer.W_UV.float()}
            for name, tensor in made.items():  # in memory of their own, and the same when weights are loaded again: graphs hold it
                parameter = getattr(layer, name)
                self._projections.setdefault(name, torch.empty_like(tensor, dtype=parameter.dtype)).copy_(tensor)
                parameter.data = self._projections[name]

    @cached_property
    def _mean_of_outputs(self) -> torch.Tensor:
        """The mean in the space of what decode reads, `[latent]`."""
        if not self.absorbed:
            return self.mean
        map_ = self.pages_of(self._layer().kv_cache).maps.k
        return (map_.forward[0].double() @ self.mean.double()).to(self.mean.dtype)

    def _calibrated(self, stored: LayerConfig) -> LayerConfig:
        """The same, since the mean of latents is taken off here, where it is a part of no kernel."""
        if gains_from_key_mean(stored.format.k):
            self.mean = self.measured.layers[self.number].key_mean[0, 0].to(current_platform.device_type, self.dtype)
        return stored

    def watch(self, observer: Any) -> None:
        """The same; the layer shows its rows, since without metadata it asks nothing of this."""
        super().watch(observer)
        layer = self._layer()
        if observer is not None:
            layer.forward_impl = partial(self._observed_latents, layer)
        elif "forward_impl" in vars(layer):
            del layer.forward_impl

    def _observed_latents(self, layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, output, **unused):
        """Attention of the pass that measures the model, over its own rows: `q [T, HQ, nope + rope]` into `output [T, HQ * V]`."""
        self.observer.add_latents(self.observed_as, k_c_normed)
        found = causal_attention(self.attention, q, *self._keys_and_values(k_c_normed, k_pe))
        return output.copy_(found.view_as(output))

    def _keys_and_values(self, latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer's up-projection makes of latents `[T, latent]`: keys `[T, HQ, nope + rope]`, values `[T, HQ, V]`. rotated: `[T, 1,
        rope]`."""
        heads = self.kv_b_proj(latents)[0].view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        k_nope, v = heads.split([self.qk_nope_head_dim, self.v_head_dim], 2)
        return self._concat_k_nope_k_pe(k_nope, rotated), v

    def warm_up(self, kv_cache: torch.Tensor, verified: int, table_width: int) -> dict[str, str]:
        """Compile what its calls need, those of prompts too."""
        pages, limits = self._wrap(kv_cache), self._limits(verified, table_width)
        told = warm_up(self.paged, self.attention, limits, pages)
        if self.absorbed:
            told |= warm_up(self.paged, self.attention, limits, pages.as_stored())
        rows = torch.empty(1, sum(self.sizes), dtype=self.dtype, device=pages.device)
        table = torch.zeros(1, table_width or 1, dtype=torch.int32, device=pages.device)
        starts, step = torch.tensor([0, 1], dtype=torch.int32, device=pages.device), None
        if self.full_precision is not None:  # vLLM binds pages before a first step makes the pool of their copies
            pages = with_room_for_one(pages, self.full_precision, self.dtype)
            step = FullPrecisionStep(self.full_precision, pages.pages.spec.block_size, 1, 0, pages.device)
        self._gather(pages, rows, table, starts, starts[:1], 1, step)
        return told

    def reserve_workspace(self) -> None:
        """Claim the scratch that decode will take while vLLM profiles."""
        tokens = self.config.scheduler_config.max_num_seqs
        claim_scratch(torch.empty(tokens, self.num_heads, sum(self.sizes), dtype=self.dtype, device=current_platform.device_type))

    def _wrap(self, kv_cache: torch.Tensor) -> PagedCache:
        return super()._wrap(kv_cache if kv_cache.ndim == 4 else kv_cache.unsqueeze(1))  # vLLM drops the axis of its one head

    def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale=False):
        """Store latents `kv_c_normed [T, latent]` and rotated dimensions `k_pe [T, 1, rope]` in the slots `slot_mapping`."""
        if kv_cache.numel() == 0:
            return
        calls["write"] += 1
        step = step_of(self._layer())
        step.written.write(self.cache_of(kv_cache), kv_c_normed.unsqueeze(1), k_pe, slot_mapping.flatten(), self.mean)

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        """Attention of absorbed queries, `[T, HQ, latent + rope]` or its two parts, over pages -> `[T, HQ, latent]`; no log-sum-exp."""
        calls["decode"] += 1
        cache, read = self.cache_of(layer.kv_cache), self._read
        if read[0] is not cache:
            read = self._read = cache, cache.as_stored() if self.absorbed else cache
        mean = None if self.mean is None else self._mean_of_outputs
        return attn_metadata.decoded.attend(read[1], q, self.scale, self.attention.options, mean=mean), None

    def forward_mha(self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale=None):
        """Attention of prompts, whose own rows are read as given or, where they are to read what is stored, from their pages."""
        calls["mixed"] += 1
        if not self.reads_own_rows:
            prefill, count, cache = attn_metadata.prefill, len(kv_c_normed), self.cache_of(self._layer().kv_cache)
            rows = kv_c_normed.new_zeros(count, sum(self.sizes))  # those of padding stay so
            where = prefill.block_table, prefill.query_start_loc, attn_metadata.before
            kv_c_normed, k_pe = self._gather(
                cache, rows, *where, count, attn_metadata.full_precision_of_prompts(0, len(prefill.block_table))
            )
        super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale)

    def _compute_prefill_context(self, q, kv_c_and_k_pe_cache, attn_metadata, k_scale):
        """Attention of prompts over what is before them, in pages, cut as vLLM's metadata says -> `[T, HQ, D_V]` and `[HQ, T]`."""
        prefill, cache = attn_metadata.prefill, self.cache_of(self._layer().kv_cache)
        context, found = prefill.chunked_context, None
        for chunk in context.chunks:
            where = prefill.block_table[chunk.request_slice], chunk.cu_seq_lens, chunk.starts
            full_precision = attn_metadata.full_precision_of_prompts(chunk.request_slice.start, len(where[0]))
            latents, rotated = self._gather(cache, context.workspace, *where, chunk.num_context_tokens, full_precision)
            k, v = self._keys_and_values(latents, rotated)
            part = prefill.prefill_backend.run_prefill_context_chunk(chunk=chunk, q=q[chunk.token_slice], k=k, v=v)
            if found is None:
                found = init_mla_context_partial(context, *part, num_tokens=len(q))
            accumulate_mla_context_chunk(chunk, *part, *found)
        return found

    def _gather(
        self,
        cache: PagedCache | CacheWithCopies,
        workspace: torch.Tensor,
        block_table: torch.Tensor,
        starts: torch.Tensor,
        first: torch.Tensor,
        count: int,
        full_precision: FullPrecisionStep | None,
    ) -> Any:
        """`count` rows of a cache in a workspace `[rows, latent + rope]`, as latents `[count, latent]` and rotated dimensions `[count, 1,
        rope]`: of each sequence the tokens from `first [S]` on go to rows `starts [S + 1]`. full_precision: what these read so."""
        latents, rotated = workspace[:count, None].split(self.sizes, 2)
        where = block_table, starts, (latents, rotated), first
        cache.gather(*where, *([full_precision] if isinstance(cache, CacheWithCopies) else []))
        if self.mean is not None:
            latents.add_(self.mean)
        return latents[:, 0], rotated


def keep_writes(config: Any) -> None:
    """Turn off the pass of vLLM's compiler that puts a kernel of its own, which rotates keys and stores latents, in place of our writes: it
    would store rows of 16 bits in our pages. The pass asks no backend."""
    config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla = False


def _absorb(own: Any, layer: Any, act_dtype: torch.dtype) -> None:
    """Let every layer of latents absorb its rotation as soon as vLLM has made its projections, which it does after it has told us that
    the weights are there."""
    own(layer, act_dtype)
    if isinstance(layer.impl, QuantKVLatentImpl):
        layer.impl.absorb(layer)


around(MLAAttention, "process_weights_after_loading", _absorb)
