"""Attention of one layer in vLLM: rows into its pages, and attention over them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ...cache import PagedCache
from ...calls import AttentionOptions
from ...exact import ExactTokens
from ...format import Format
from ...geometry import Heads
from ...implementations.dense.attend import QUERY_BYTES, SCRATCH_BYTES, query_row_bytes
from ...maps import LayerMaps
from ...shadow import ExactPages, ShadowedCache, goes_by_position, shadow_pages
from ...warmup import mixed_batches, warm_up, who_serves
from . import PREFIX, calls
from .asked import check_weights, policy_of
from .backend import BLOCK_SIZES, CHUNKS, UNQUANTIZED, QuantKVBackend, backend_of, format_of, token_bytes
from .connectors import check_connectors
from .metadata import Metadata
from .mixed import check_hybrid, warn_of_padding

logger = init_logger("vllm.quantkv")
LOAD_AHEAD = ("OffloadingConnector",)  # connectors of which a request waits for its blocks, before a step is made of it


@cache
def load_flash_attention() -> None:
    """Load FlashAttention-3's operators, which dense attention then uses, where this vLLM has them."""
    try:
        import vllm.vllm_flash_attn  # noqa: F401
    except Exception as error:
        logger.debug("quantkv: no FlashAttention here: %s", error)


def _layers(config: Any) -> Iterable[Any]:
    """Layers of the model that exist so far."""
    return config.compilation_config.static_forward_context.values()


class QuantKVImpl(AttentionImpl[Metadata]):
    """One layer's attention. Its format, its maps and its scales are known once the weights are loaded.

    format: of its pages. maps: for the kv heads of this rank. kind: equal for layers that the same kernels serve.
    exact: tokens with 16-bit copies, None where it has none. owner: the layer whose pages it reads; None: they are its own.
    """

    exact: ExactTokens | None = None
    owner: QuantKVImpl | None = None
    _pool: ExactPages | None = None
    _shadow: PagedCache | None = None

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
        sinks=None,
        use_alibi_sqrt=False,
        **unknown,
    ):
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"quantkv: attn_type={attn_type!r}; decoders only")
        given = [name for name, value in unknown.items() if value is not None and value is not False]
        if given:
            raise NotImplementedError(f"quantkv: attention arguments {given} are not supported")
        if self.total_cp_world_size > 1:
            raise NotImplementedError("quantkv: context parallelism is not supported")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.config, self.dtype, self.head_size_v = get_current_vllm_config(), torch.get_default_dtype(), head_size
        check_connectors(self.config)
        self._check_configuration()
        self.policy = policy_of(self.config)
        if self.policy is not None:
            self._check_policy()
        if not any(isinstance(getattr(layer, "impl", None), QuantKVImpl) for layer in _layers(self.config)):  # once a model
            check_weights(self.config.model_config, self.policy)
            check_hybrid(self.config, self.policy, self.head_size, self.dtype)
            warn_of_padding(self.config, self.policy, self.dtype)
        self.format: Format | None = None
        self.maps, self.scales = LayerMaps(), (1.0, 1.0)
        self.sinks, self.slopes = sinks, None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device="cpu")
        self.options = AttentionOptions(
            window=sliding_window or 0, softcap=float(logits_soft_cap or 0.0), batch_invariant=bool(envs.VLLM_BATCH_INVARIANT)
        )
        self._per_layer: dict[str, Any] = {}  # sinks and slopes, on the device
        self._cache: tuple[Any, PagedCache | ShadowedCache | None] = (lambda: None, None)
        load_flash_attention()

    def _check_configuration(self) -> None:
        """Refuse what vLLM would do to a step's metadata, and give drafts the backend that reads their pages: vLLM's first model runner
        lets a model that drafts take the type of the cache from the other model, and not the backend."""
        cache, drafts = self.config.cache_config, self.config.speculative_config
        if cache.kv_sharing_fast_prefill:
            raise NotImplementedError("quantkv: kv_sharing_fast_prefill=True; False is needed")
        if drafts is not None and drafts.attention_backend is None and (drafts.kv_cache_dtype or cache.cache_dtype).startswith(PREFIX):
            drafts.attention_backend = AttentionBackendEnum.CUSTOM

    def _check_policy(self) -> None:
        """Refuse, before weights are loaded, formats that this layer's heads cannot have and layers that the model lacks."""
        layers, calibration = self.config.model_config.get_total_num_hidden_layers(), self.policy.calibration
        self.policy.check(layers)
        if calibration is not None:
            calibration.check_one(layers, Heads(self._all_kv_heads(), self.head_size, self.head_size))
        for name in {self.policy.format, *self.policy.layers.values()}:
            token_bytes(format_of(name, self.dtype).cache_spec(1, self.head_size, block_size=BLOCK_SIZES[0]))
        if self.policy.exact is not None:
            self._check_exact()

    def _check_exact(self) -> None:
        """Refuse what would read copies that are not those of its tokens."""
        if self.config.parallel_config.use_ubatching:
            raise NotImplementedError("quantkv: policy.exact with steps that are cut into two batches at once (enable_dbo)")
        connector = self.config.kv_transfer_config
        if connector is None or not connector.is_kv_consumer:
            return
        if connector.kv_connector not in LOAD_AHEAD or connector.get_from_extra_config("sync_load_budget_bytes", 0):
            raise NotImplementedError(
                f"quantkv: policy.exact with kv_connector={connector.kv_connector!r}, which may load blocks in the step that reads them; "
                f"allowed: {', '.join(LOAD_AHEAD)} without sync_load_budget_bytes, or one that only stores (kv_role='kv_producer')"
            )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take what only the layer knows: its number, the size of its values, scales from a checkpoint."""
        layers = self.config.compilation_config.static_forward_context
        layer = next(layer for layer in layers.values() if getattr(layer, "impl", None) is self)
        owner = self.kv_sharing_target_layer_name or layer.layer_name
        self.head_size_v = layer.head_size_v
        self.clamp_images = bool(getattr(layer, "mm_prefix_clamp_sliding_window", False))
        if layer.attn_backend.__name__.startswith(CHUNKS):
            self._take_chunks(layer.attention_chunk_size)
        if self.policy is None or self.kv_cache_dtype in UNQUANTIZED:
            self.format = format_of(self.kv_cache_dtype, self.dtype)
        else:
            number = extract_layer_index(owner)
            self.format = self.policy.of(number, self.dtype)
            self.maps = self._of_this_rank(self._maps_of(number))
        scales = getattr(layer, "_k_scale_float", 1.0), getattr(layer, "_v_scale_float", 1.0)
        self.scales = tuple(s if codec.scaled_per_tensor else 1.0 for s, codec in zip(scales, (self.format.k, self.format.v)))
        self.kind = (self.format.name, self.num_heads, self.num_kv_heads, self.head_size, self.head_size_v, self.options)
        self.kind += tuple(None if map_ is None else map_.traits for map_ in (self.maps.k, self.maps.v))
        self.kind += (self.sinks is None, self.slopes is None)
        layer.attn_backend = QuantKVBackend if self.kv_cache_dtype in UNQUANTIZED else backend_of(self.format)
        self.owner = None if layers[owner].impl is self else layers[owner].impl
        if self.policy is not None and self.policy.exact is not None and self.format is not format_of("none", self.dtype):
            self._keep_exact(self.policy.exact)

    def _take_chunks(self, size: int) -> None:
        """Attend within chunks of `size` tokens by an option of every call, in place of vLLM's virtual batches: keys keep their
        positions, and CUDA graphs hold steps of decode."""
        if self.options.window:
            raise NotImplementedError(f"quantkv: attention within chunks of {size} tokens and a window of {self.options.window}")
        self.options = replace(self.options, window=int(size), chunk_lookback=0)

    def _keep_exact(self, tokens: ExactTokens) -> None:
        """Take the memory of the 16-bit copies now, so that vLLM gives the rest of the GPU to pages and no more."""
        if goes_by_position(self.options) or self.slopes is not None:
            tokens = tokens.without_first()
        self.exact = tokens
        if tokens is not None and self.owner is None:
            block_size = self.config.cache_config.block_size
            count = tokens.shadows_needed(block_size, self.config.scheduler_config.max_num_seqs)
            self._shadow = shadow_pages(self._sample(torch.device(current_platform.device_type), block_size), count, self.dtype)

    def join(self, pool: ExactPages) -> None:
        """Which pages have a copy, from now on."""
        self._pool, self._cache = pool, (lambda: None, None)

    def _maps_of(self, number: int) -> LayerMaps:
        """The policy's maps of a layer, for the kv heads of all ranks. ValueError where its calibration is of other heads."""
        calibration = self.policy.calibration
        if calibration is not None:
            calibration.check_layer(number, Heads(self._all_kv_heads(), self.head_size, self.head_size_v))
        return self.policy.maps_of(number)

    def _all_kv_heads(self) -> int:
        """Of all ranks of a tensor-parallel group; where each has one, several may hold the same."""
        ranks = self.config.parallel_config.tensor_parallel_size
        alone = self.num_kv_heads > 1 or ranks == 1
        return self.num_kv_heads * ranks if alone else self.config.model_config.get_total_num_kv_heads()

    def _of_this_rank(self, maps: LayerMaps) -> LayerMaps:
        """The maps of the kv heads that this rank of a tensor-parallel group holds."""
        sides = []
        for side, head_size in ((maps.k, self.head_size), (maps.v, self.head_size_v)):
            if side is not None:
                ranks = self.config.parallel_config.tensor_parallel_size
                total = side.num_heads
                start = get_tensor_model_parallel_rank() * total // ranks  # fewer heads than ranks: several hold the same
                side = side.heads(start, start + self.num_kv_heads) if total > 1 else side
                side.check(head_size, self.num_kv_heads, "k" if side is maps.k else "v")
            sides.append(side)
        return LayerMaps(*sides, maps.calibration)

    def _page_spec(self, block_size: int):
        return self.format.cache_spec(self.num_kv_heads, self.head_size, self.head_size_v, block_size)

    def _over(self, buffer: torch.Tensor, block_size: int) -> PagedCache:
        k_scale, v_scale = self.scales
        return PagedCache.wrap(buffer, self._page_spec(block_size), maps=self.maps, k_scale=k_scale, v_scale=v_scale)

    def _sample(self, device: torch.device, block_size: int) -> PagedCache:
        """A page such as this layer's."""
        spec = self._page_spec(block_size)
        return self._over(torch.zeros(1, spec.num_kv_heads, spec.page_bytes, dtype=torch.uint8, device=device), block_size)

    def who_serves(self, device: torch.device, block_size: int, verified: int, table_width: int) -> dict[str, str]:
        """Which implementation serves what, of this layer's calls. block_size: of the kernels. verified: queries of a sequence that
        verifies. table_width: pages of a row of vLLM's block tables."""
        found = who_serves(self._sample(device, block_size), self.num_heads, **self._calls(device, verified, table_width))
        return {what: name for what, (name, _) in found.items()}

    def warm_up(self, kv_cache: torch.Tensor, verified: int, table_width: int) -> dict[str, str]:
        """Compile what this layer's calls need over vLLM's tensor, which is left as it was; what is compiled depends on how that lies."""
        pages, calls = self._over(kv_cache, kv_cache.shape[2]), self._calls(kv_cache.device, verified, table_width)
        mixed = mixed_batches(self.num_heads, calls["batch_sizes"][-1], calls["write_sizes"][-1], calls["max_seq_len"])
        return warm_up(pages, self.num_heads, mixed=mixed, exact=self.exact, **calls)

    def _calls(self, device: torch.device, verified: int, table_width: int) -> dict[str, Any]:
        """What `quantkv.warm_up` takes."""
        scheduler = self.config.scheduler_config
        options = {name: getattr(self.options, name) for name in ("window", "chunk_lookback", "softcap", "alibi_sqrt", "batch_invariant")}
        return {
            "dtype": self.dtype,
            "query_lens": sorted({1, verified}),
            "batch_sizes": sorted({1, scheduler.max_num_seqs}),
            "write_sizes": sorted({1, scheduler.max_num_seqs, scheduler.max_num_batched_tokens}),
            "max_seq_len": self.config.model_config.max_model_len,
            "table_width": table_width,
            **options,
            **self._tensors(device),
        }

    def _tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        """This layer's sinks and slopes."""
        given = {"sinks": self.sinks, "alibi_slopes": self.slopes}
        return {name: t.detach().to(device) for name, t in given.items() if t is not None}

    def cache_of(self, kv_cache: torch.Tensor) -> PagedCache | ShadowedCache:
        """vLLM's tensor as a cache. Kept while it is the same: profiling binds a small one first, waking up a new one."""
        held, found = self._cache
        if held() is not kv_cache:
            found = self._wrap(kv_cache)
            self._cache = weakref.ref(kv_cache), found
            self._per_layer = self._tensors(kv_cache.device)
        return found

    def _wrap(self, kv_cache: torch.Tensor) -> PagedCache | ShadowedCache:
        pages, owner = self._over(kv_cache, kv_cache.shape[2]), self.owner or self
        pool, held = owner._pool, owner._shadow
        if pool is None:
            return pages
        if held is None or held.spec.block_size != pages.spec.block_size or held.num_blocks < pool.num_shadows:  # than when it was taken
            held = owner._shadow = shadow_pages(pages, pool.num_shadows, self.dtype)
        return ShadowedCache(pages, held, pool)

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        """Store `key [T, HK, D]` and `value [T, HK, D_V]` in the slots `slot_mapping`; rows beyond these are padding."""
        if kv_cache.numel() == 0:
            return
        step = get_forward_context().attn_metadata
        step = step[0] if isinstance(step, list) else step
        step = step[layer.layer_name] if isinstance(step, dict) else step
        cache, count = self.cache_of(kv_cache), slot_mapping.shape[0]
        calls["write"] += 1
        step.write(slot_mapping, cache.maps.by_position)(cache, key[:count], value[:count])

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None):
        """Attention of `query [T, HQ, D]` into `output [T, HQ, D_V]`."""
        if attn_metadata is None:  # profiling: claim the scratch that attention will take, so that it is left free
            if query.is_cuda:
                rows = query.shape[0] * max(query_row_bytes(query.shape[1], (query.shape[2],) * 2, query.element_size()))
                torch.empty(SCRATCH_BYTES + min(rows, QUERY_BYTES), dtype=torch.uint8, device=query.device)
            return output.fill_(0)
        if output_scale is not None:
            raise NotImplementedError("quantkv: fused quantization of the output is not supported")
        cache, count = self.cache_of(kv_cache), attn_metadata.num_tokens
        calls[attn_metadata.kind] += 1
        attend = attn_metadata.attend(self.scale, self.options, self.clamp_images)
        attend(cache, query[:count], out=output[:count], **self._per_layer)
        return output
