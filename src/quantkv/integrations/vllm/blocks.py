"""The blocks of vLLM's pool where layers have pages of several sizes: groups of layers, and tokens of a block, as `vllm_pages` packs them.

A packed block holds the pages of every layer of a group side by side, vLLM's layout BLHNC. Where it has more tokens than the kernels read
at once it holds several kernel pages of each layer: first a page of every layer, then the next of every layer. So the pages of a layer
stand one stride apart in the whole pool, and a block's number gives those of its pages.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase, get_mamba_prefill_checkpoint_alignment
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as vllm_specs
from vllm.v1.attention.backends import utils as backend_utils
from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import customize_attention_spec
from vllm.v1.worker.worker_base import WorkerBase

from ...geometry import Kind
from ...policy import Policy
from ...vllm_pages import BLOCK_SIZES, RECORD_ALIGNMENT, Group, Pool, PooledLayer, packed_beside_states, pool_of
from . import PREFIX, asked_type
from .around import around
from .asked import policy_of, stays_in_memory

logger = init_logger("vllm.quantkv")
PACKED = KVCacheLayout.BLHNC
BUILDERS = ("vllm.v1.core.kv_cache_planning.DefaultKVCacheConfigBuilder",)  # which `PackedBlocks` may stand for
STEP = 16  # tokens: blocks beside states are multiples


def is_packed(spec: Any) -> bool:
    """Whether a layer's pages lie in a packed block: vLLM asks for no alignment in bytes of our pages."""
    return isinstance(spec.block_stride_alignment, int)


def largest_page(policy: Policy | None) -> int:
    """Most tokens of a page that the kernels read of a packed block: few where pages have 16-bit copies, which are allocated before."""
    return BLOCK_SIZES[-1 if policy is None or policy.full_precision is None else 0]


def kernel_pages(kv_cache: torch.Tensor, pages: int) -> torch.Tensor:
    """A layer's tensor `[B, H, N, C]` of blocks as pages that the kernels read, `[B * pages, H, N / pages, C]`."""
    if pages == 1:
        return kv_cache
    blocks, heads, size, width = kv_cache.shape
    tokens = size // pages
    strides = kv_cache.stride(0) // pages, tokens * width, width, 1
    return kv_cache.as_strided((blocks * pages, heads, tokens, width), strides, kv_cache.storage_offset() // pages)


class PagesOfBlocks:
    """Block tables of a group of layers as tables of the kernels' pages.

    pages: of a block. tokens: of a page. width: pages of a row. spec: of the layers, as the pool was planned.
    """

    def __init__(self, spec: Any, config: Any, width: int, device: torch.device) -> None:
        self.pages = spec.block_stride_alignment // RECORD_ALIGNMENT if is_packed(spec) else 1
        self.tokens = spec.block_size // self.pages
        self.width = width * self.pages
        self._table: torch.Tensor | None = None
        if self.pages > 1:  # graphs read it where it is
            rows = max(config.scheduler_config.max_num_seqs, *(config.compilation_config.cudagraph_capture_sizes or [0]))
            self._table = torch.zeros(rows, self.width, dtype=torch.int32, device=device)
            self._within = torch.arange(self.pages, dtype=torch.int32, device=device)

    def table(self, blocks: torch.Tensor) -> torch.Tensor:
        """Pages `[S, W * pages]` of blocks `[S, W]`, int32, which the next call overwrites."""
        if self._table is None:
            return blocks
        count, width = blocks.shape
        out = self._table[:count, : width * self.pages]
        torch.add(self._within, blocks[..., None], alpha=self.pages, out=out.unflatten(1, (width, self.pages)))
        return out


def can_pack(config: Any) -> bool:
    """Whether a configuration leaves the layout of blocks, and their groups, to the plug-in."""
    if not _may_pack(config):
        return False
    layout = envs.VLLM_KV_CACHE_LAYOUT or _connector_layout(get_kv_connector_cache_layout, config)
    return layout in (None, PACKED.name)


def _may_pack(config: Any) -> bool:
    """Whether packed blocks serve a configuration, whatever layout is asked for."""
    if not asked_type(config.cache_config.cache_dtype).startswith(PREFIX):
        return False
    if config.scheduler_config.disable_hybrid_kv_cache_manager or config.attention_config.hisparse_config is not None:
        return False
    parallel = config.parallel_config
    return parallel.pipeline_parallel_size == 1 and parallel.decode_context_parallel_size == 1


def _connector_layout(own: Any, vllm_config: Any = None) -> str | None:
    """The layout that a connector asks for. Of one that keeps blocks in memory it is the packed one, in which a block is one copy: vLLM
    asks for LBHNC, in which it is one of each layer. Its files, and its canonical form of blocks, are for others to read, and stay."""
    layout, transfer = own(vllm_config), getattr(vllm_config, "kv_transfer_config", None)
    if layout != KVCacheLayout.LBHNC.name or not stays_in_memory(transfer) or transfer.get_from_extra_config("canonical_layout", False):
        return layout
    return PACKED.name if _may_pack(vllm_config) and not vllm_config.model_config.is_hybrid else layout


def plan(config: Any, specs: dict[str, Any]) -> Pool | None:
    """The packed pool of layers by name; None where vLLM's own plan serves them as well."""
    layers = [_pooled(spec) for spec in specs.values()]
    if None in layers:
        return None
    rows = [spec for spec, layer in zip(specs.values(), layers) if layer.kind is not None]
    if not rows:
        return None
    size, page = min(spec.block_size for spec in rows), largest_page(policy_of(config))
    if len(rows) == len(layers):
        found = pool_of(layers, size, page)
        return found if found.packed else None
    kinds = {layer.kind for layer in layers if layer.kind is not None}
    if len({_state_bytes(spec) for spec in specs.values() if isinstance(spec, vllm_specs.MambaSpec)}) > 1:
        return None
    if len(kinds) > 1 or len({spec.unpadded_page_size_bytes // spec.block_size for spec in rows}) == 1:
        return None
    return packed_beside_states(layers, _states_held(config, specs), STEP, size, page)


def _states_held(config: Any, specs: dict[str, Any]) -> int:
    """Most states that a sequence holds of a layer."""
    states = (spec for spec in specs.values() if isinstance(spec, vllm_specs.MambaSpec))
    return max(-(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for spec in states)


def _pooled(spec: Any) -> PooledLayer | None:
    """A layer as `vllm_pages` takes it; None for one that it does not know."""
    if isinstance(spec, vllm_specs.MambaSpec):
        return PooledLayer(None, _state_bytes(spec), spec.tp_replicated)
    kinds = {
        vllm_specs.FullAttentionSpec: lambda: Kind(),
        vllm_specs.SlidingWindowSpec: lambda: Kind(spec.sliding_window),
        vllm_specs.ChunkedLocalAttentionSpec: lambda: Kind(spec.attention_chunk_size, True),
    }
    kind = kinds.get(type(spec))
    if kind is None or spec.tokens_per_state != 1:
        return None
    return PooledLayer(kind(), spec.num_heads * spec.state_content_size_bytes, (spec.num_heads, spec.head_size, spec.head_size_v))


def _state_bytes(spec: Any) -> int:
    """Bytes of a state in a packed block."""
    return -(-spec.state_content_size_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


class PackedBlocks(DefaultKVCacheConfigBuilder):
    """vLLM's plan, but for models whose pages are packed."""

    def get_kv_cache_groups(self, vllm_config, kv_cache_spec):
        """Groups of layers, with the tokens of their blocks."""
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        found = plan(vllm_config, kv_cache_spec) if layout == PACKED and can_pack(vllm_config) else None
        if found is None:
            groups = super().get_kv_cache_groups(vllm_config, kv_cache_spec)
            _say_beside_states(groups)
            return groups
        names = list(kv_cache_spec)
        groups = [_group(group, {names[n]: kv_cache_spec[names[n]] for n in group.layers}) for group in found.groups]
        sizes = ", ".join(f"{len(group.layers)} layers x {group.block_size}" for group in found.groups if group.kind is not None)
        logger.info("quantkv: blocks of %s bytes hold the pages of %s tokens", f"{found.block_bytes:,}", sizes)
        _say_beside_states(groups)
        return groups


def _say_beside_states(groups: list[KVCacheGroupSpec]) -> None:
    """What a request takes of a pool of blocks that hold a state each."""
    specs = [next(iter(vllm_specs.iter_layer_specs(group.kv_cache_spec))) for group in groups]
    sizes = [spec.block_size for spec in specs if isinstance(spec, vllm_specs.AttentionSpec)]
    states = sum(isinstance(spec, vllm_specs.MambaSpec) for spec in specs)
    if states and sizes:
        text = "quantkv: this model keeps states: a request takes at least one block of %s tokens, and a block or more in each of %s groups"
        logger.info_once(text, max(sizes), states)


def _group(group: Group, specs: dict[str, Any]) -> KVCacheGroupSpec:
    if group.kind is None:
        made = {name: replace(spec, page_size_padded=_state_bytes(spec)) for name, spec in specs.items()}
    else:
        changes = {"block_size": group.block_size, "page_size_padded": None, "block_stride_alignment": RECORD_ALIGNMENT * group.pages}
        made = {name: replace(spec, **changes) for name, spec in specs.items()}
    first = next(iter(made.values()))
    if all(spec == first for spec in made.values()):
        return KVCacheGroupSpec(list(made), type(first).merge(list(made.values())))
    return KVCacheGroupSpec(list(made), UniformTypeKVCacheSpecs.from_specs(made))


def pack_blocks() -> None:
    """Let vLLM ask `PackedBlocks` how blocks are cut, and its workers prefer the layout that it needs. May be called again."""
    platform = type(current_platform)
    around(platform, "get_kv_cache_config_builder_cls", _builder)
    around(platform, "update_block_size_for_backend", _update_sizes)
    around(WorkerBase, "get_supported_kv_cache_layouts", _layouts)
    around(backend_utils, "get_kv_connector_cache_layout", _connector_layout)


def _builder(own: Any, cls: Any, vllm_config: Any) -> str:
    name = own(cls, vllm_config)
    ours = asked_type(vllm_config.cache_config.cache_dtype).startswith(PREFIX) and name in BUILDERS
    return f"{__name__}.{PackedBlocks.__name__}" if ours else name


def _update_sizes(own: Any, cls: Any, vllm_config: Any) -> None:
    own(cls, vllm_config)
    if vllm_config.model_config is not None and vllm_config.model_config.is_hybrid and can_pack(vllm_config):
        _choose_beside_states(vllm_config)


def _layouts(own: Any, worker: Any) -> list[str]:
    names = own(worker)
    if PACKED.name in names and can_pack(worker.vllm_config) and plan(worker.vllm_config, worker.get_kv_cache_spec()) is not None:
        names.insert(0, names.pop(names.index(PACKED.name)))
    return names


def _choose_beside_states(config: Any) -> None:
    """Tokens of a block beside states, where attention layers differ in bytes: vLLM has chosen by the first of them."""
    cache, context = config.cache_config, config.compilation_config.static_forward_context
    specs = {}
    with set_current_vllm_config(config):
        for name, layer in context.items():
            if isinstance(layer, AttentionLayerBase) and (spec := layer.get_kv_cache_spec(config)) is not None:
                specs[name] = spec if isinstance(layer, MambaBase) else customize_attention_spec(layer.get_attn_backend(), spec)
    found = plan(config, specs)
    if found is None:
        return
    step = math.lcm(STEP, get_mamba_prefill_checkpoint_alignment(config) or 1) if cache.mamba_cache_mode == "align" else STEP
    found = packed_beside_states(found.layers, _states_held(config, specs), step, None, largest_page(policy_of(config)))
    if found is None:
        return
    cache.block_size = found.groups[0].block_size
    if cache.mamba_cache_mode == "align":
        cache.mamba_block_size = cache.block_size
    cache.mamba_page_size_padded = None
