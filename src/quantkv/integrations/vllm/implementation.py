"""Attention of one layer in vLLM: rows into its pages, and attention over them."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from vllm.compilation import backends
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ...cache import PagedCache
from ...calibration import Calibration
from ...copies import CacheWithCopies
from ...engine.layer import LayerAttention, PagedLayer
from ...engine.layer_config import LayerConfig, Shard
from ...engine.warm_up import StepLimits, check_prompts, claim_scratch, warm_up, who_serves
from ...format import Format
from ...full_precision import FullPrecisionTokens
from ...geometry import Heads
from ...options import AttentionOptions
from ...policy import Policy
from ..asked import check_policy, check_weights, warn_of_biases
from ..serving import Step
from . import PREFIX, PROMPT_OPTIONS
from .asked import of_prompts, policy_of, reads_own_rows
from .backend import BLOCK_SIZES, CHUNKS, UNQUANTIZED, QuantKVBackend, format_of
from .blocks import kernel_pages
from .connectors import check_connectors
from .mixed import check_hybrid, warn_of_padding
from .statistics import check_statistics, measure_before_sizing

logger = init_logger("vllm.quantkv")
LOAD_AHEAD = ("OffloadingConnector",)  # connectors of which a request waits for its blocks, before a step is made of it
CONTEXT_PARALLEL = ("decode_context_parallel_size", "prefill_context_parallel_size")


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


def drafts_now() -> bool:
    """Whether the layers that vLLM makes now are of a model that drafts."""
    return backends.model_tag == "draft_model" or backends.model_tag.endswith("_head")


def step_of(layer: Any) -> Any:
    """The metadata of the step that runs."""
    step = get_forward_context().attn_metadata
    step = step[0] if isinstance(step, list) else step
    return step[layer.layer_name] if isinstance(step, dict) else step


class QuantKVImpl(AttentionImpl[Step]):
    """One layer's attention. How its rows are stored is known once the weights are loaded.

    attention: what its calls have in common. paged: its pages. owner: the layer whose pages it reads; None: they are its own.
    pages_per_block: pages that the kernels read. unmeasured: the model could not be measured, which was said.
    number: of the layer whose pages it reads. observer: sees the rows of the pass that measures the model; None: no such pass runs.
    measured: what that pass has measured of this rank's heads.
    """

    attention: LayerAttention
    paged: PagedLayer | None = None
    owner: QuantKVImpl | None = None
    of_latents: ClassVar[bool] = False
    backend: ClassVar[type[QuantKVBackend]] = QuantKVBackend  # what its layer answers vLLM
    sizes: tuple[int, ...] = ()  # of latents and their rotated dimensions
    lends: bool = False  # whether other layers read its pages, and its rows
    pages_per_block: int = 1
    unmeasured: bool = False
    number: int | None = None
    observer: Any = None
    measured: Calibration | None = None

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
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.config, self.dtype = get_current_vllm_config(), torch.get_default_dtype()
        if self.total_cp_world_size > 1:
            given = [f"{kind}={getattr(self.config.parallel_config, kind)}" for kind in CONTEXT_PARALLEL]
            raise NotImplementedError(f"quantkv: context parallelism is not supported: {', '.join(given)}; 1 is needed of each")
        check_connectors(self.config)
        self._check_configuration()
        self.policy = self._served(policy_of(self.config))
        if self.policy is None:
            self._token_bytes(kv_cache_dtype)  # a model that names its backend itself has not asked that
        else:
            self._check_policy()
            if self.policy.wants_statistics:
                check_statistics(self.config, self.policy)
        if not any(isinstance(getattr(layer, "impl", None), QuantKVImpl) for layer in _layers(self.config)):  # once a model
            self._check_weights()
            check_hybrid(self.config, self.policy, self._token_bytes)
            warn_of_padding(self.config, self.policy, self.dtype)
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device="cpu")
        options = AttentionOptions(
            window=sliding_window or 0,
            softcap=float(logits_soft_cap or 0.0),
            alibi_sqrt=bool(use_alibi_sqrt),
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
            prompt_precision=of_prompts("prompt_precision", self.config),
        )
        own_rows = reads_own_rows(self.config, options.batch_invariant)
        self.attention = LayerAttention(num_heads, self.scale, options, sinks, slopes, own_rows)
        self._check_prompts(Heads(self.num_kv_heads, head_size, head_size))
        self._per_layer: dict[str, Any] = {}  # sinks and slopes, on the device
        self._pages: tuple[Any, PagedCache | None] = (lambda: None, None)
        load_flash_attention()

    def _check_configuration(self) -> None:
        """Refuse what vLLM would do to a step's metadata, and give drafts the backend that reads their pages: vLLM's first model runner
        lets a model that drafts take the type of the cache from the other model, and not the backend."""
        cache, drafts = self.config.cache_config, self.config.speculative_config
        if cache.kv_sharing_fast_prefill:
            raise NotImplementedError("quantkv: kv_sharing_fast_prefill=True; False is needed")
        if drafts is not None and drafts.attention_backend is None and (drafts.kv_cache_dtype or cache.cache_dtype).startswith(PREFIX):
            drafts.attention_backend = AttentionBackendEnum.CUSTOM

    def _check_prompts(self, heads: Heads) -> None:
        """Refuse 8-bit prompts where no kernel serves them."""
        precision = self.attention.options.prompt_precision
        if precision == "16bit":
            return
        lacking = {"latents (MLA)": self.of_latents, "images whose tokens see each other": self.config.model_config.is_mm_prefix_lm}
        for what, given in lacking.items():
            if given:
                raise NotImplementedError(f"quantkv: {PROMPT_OPTIONS['prompt_precision']}={precision!r} with {what}: 16bit is needed")
        check_prompts(self.attention, heads, self.dtype, torch.device(current_platform.device_type))

    def _served(self, policy: Policy | None) -> Policy | None:
        """What is served of a policy. A model that drafts has layers of its own, whose numbers are not the policy's, and drafts are
        verified: its rows are stored in the policy's format, and nothing more."""
        if policy is None or not drafts_now():
            return policy
        logger.info_once("quantkv: the model that drafts stores its rows in %s, without what else the policy says", policy.format)
        return Policy(policy.format, prompt=policy.prompt)

    def _token_bytes(self, name: str) -> int:
        """Bytes of a token of one kv head in the format of that name. ValueError for one that its heads cannot have."""
        return self.backend.token_bytes(format_of(name, self.dtype), self.head_size, BLOCK_SIZES[0], self.dtype)

    def _check_weights(self) -> None:
        """Refuse a calibration of other weights, and warn of key biases that a format would store."""
        model = self.config.model_config
        check_weights(model.model, model.revision, self.policy)
        name = self.policy.format if self.policy else format_of(self.kv_cache_dtype, self.dtype).name
        warn_of_biases(model.model, model.revision, self.policy, name, logger)

    def _check_policy(self) -> None:
        """Refuse, before weights are loaded, formats that this layer's heads cannot have and layers that the model lacks."""
        heads = Heads(self._all_kv_heads(), self.head_size, self.head_size)
        check_policy(self.policy, self.config.model_config.get_total_num_hidden_layers(), heads, self._token_bytes)
        if self.policy.full_precision is not None:
            self._check_full_precision()

    def _check_full_precision(self) -> None:
        """Refuse what would read copies that are not those of its tokens."""
        if self.config.parallel_config.use_ubatching:
            raise NotImplementedError("quantkv: policy.full_precision with steps that are cut into two batches at once (enable_dbo)")
        connector = self.config.kv_transfer_config
        if connector is None or not connector.is_kv_consumer:
            return
        if connector.kv_connector not in LOAD_AHEAD or connector.get_from_extra_config("sync_load_budget_bytes", 0):
            raise NotImplementedError(
                f"quantkv: policy.full_precision with kv_connector={connector.kv_connector!r}, which may load blocks in the step "
                "that reads them; "
                f"allowed: {', '.join(LOAD_AHEAD)} without sync_load_budget_bytes, or one that only stores (kv_role='kv_producer')"
            )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take what only the layer knows: its number, the size of its values, scales from a checkpoint."""
        layers, layer = self.config.compilation_config.static_forward_context, self._layer()
        owner = self.kv_sharing_target_layer_name or layer.layer_name
        heads = self._heads_of(layer)
        if layer.attn_backend.__name__.startswith(CHUNKS):
            self._take_chunks(layer.attention_chunk_size)
        self._check_prompts(heads)
        self._set_options(clamp_prefix_to_window=bool(getattr(layer, "mm_prefix_clamp_sliding_window", False)))
        if self.policy is None or self.kv_cache_dtype in UNQUANTIZED:
            stored = LayerConfig(self._stored(format_of(self.kv_cache_dtype, self.dtype)))
        else:
            self.number = extract_layer_index(owner)
            stored = self._by_policy(self.number, heads)
            if self.measured is not None:  # weights are loaded again: pages stay what they were
                stored = self._calibrated(stored)
            if self.policy.wants_statistics:
                measure_before_sizing(self.config)
        scales = stored.scales(getattr(layer, "_k_scale_float", None), getattr(layer, "_v_scale_float", None))
        if self.paged is None:
            self.paged = PagedLayer(stored, heads, self.dtype, scales)
        else:  # weights that are loaded again
            self.paged.config, self.paged.scales = stored, scales
        self.owner = None if layers[owner].impl is self else layers[owner].impl
        if self.owner is not None:
            self.owner.lends = True
        self.attention = self.attention.over(stored)
        if self.owner is None:
            block_size, num_seqs = self.config.cache_config.block_size, self.config.scheduler_config.max_num_seqs
            self.paged.reserve_copies(block_size, num_seqs, torch.device(current_platform.device_type))
        layer.attn_backend = self.backend if self.kv_cache_dtype in UNQUANTIZED else self.backend.of(stored.format, *self.sizes)

    def _layer(self) -> Any:
        """The layer that it serves."""
        return next(layer for layer in _layers(self.config) if getattr(layer, "impl", None) is self)

    def _heads_of(self, layer: Any) -> Heads:
        """The kv heads of this rank."""
        return Heads(self.num_kv_heads, self.head_size, layer.head_size_v)

    def _stored(self, fmt: Format) -> Format:
        """How rows are stored where a format is asked for."""
        return fmt

    @property
    def wants_statistics(self) -> bool:
        """Whether its rows are to be stored by statistics of the model that are not there yet."""
        return self.number is not None and self.policy.wants_statistics and self.measured is None and not self.unmeasured

    @property
    def observed_as(self) -> int | None:
        """Its number in the pass that measures the model; None: it reads another's pages, or its rows are stored as they are."""
        return self.number if self.owner is None and self.wants_statistics else None

    def take_statistics(self, made: Calibration) -> None:
        """Store rows by a calibration of this rank's heads from now on. No row may have been stored."""
        self.measured = made
        self.paged.config = self._calibrated(self.paged.config)

    def _calibrated(self, stored: LayerConfig) -> LayerConfig:
        """How rows are stored by what was measured."""
        return stored.with_calibration(self.measured, self.number)

    def watch(self, observer: Any) -> None:
        """Show the rows of the pass that measures the model to an observer from now on; None: no such pass runs."""
        self.observer = observer

    def _by_policy(self, number: int, heads: Heads) -> LayerConfig:
        """What the policy says of a layer, for the kv heads of this rank."""
        return LayerConfig.of(self.policy, number, self.dtype, heads, self._all_kv_heads(), self._shard(), self.attention.by_position)

    def _set_options(self, **options: Any) -> None:
        self.attention = replace(self.attention, options=replace(self.attention.options, **options))

    def _take_chunks(self, size: int) -> None:
        """Attend within chunks of `size` tokens by an option of every call, in place of vLLM's virtual batches: keys keep their
        positions, and CUDA graphs hold steps of decode."""
        if self.attention.options.window:
            raise NotImplementedError(f"quantkv: attention within chunks of {size} tokens and a window of {self.attention.options.window}")
        self._set_options(window=int(size), chunk_lookback=0)

    def _all_kv_heads(self) -> int:
        """Kv heads of all ranks of a tensor-parallel group."""
        return self._shard().all_kv_heads(self.num_kv_heads, self.config.model_config.get_total_num_kv_heads)

    def _shard(self) -> Shard:
        """This rank of a tensor-parallel group."""
        return Shard(get_tensor_model_parallel_rank(), self.config.parallel_config.tensor_parallel_size)

    @property
    def format(self) -> Format:
        """Format of its pages."""
        return self.paged.config.format

    @property
    def full_precision(self) -> FullPrecisionTokens | None:
        """Tokens with 16-bit copies; None: it has none."""
        return self.paged.config.full_precision

    @property
    def kind(self) -> Hashable:
        """Equal for layers that the same kernels serve."""
        return self.paged.kind(self.attention)

    def who_serves(self, device: torch.device, block_size: int, verified: int, table_width: int) -> dict[str, str]:
        """Which implementation serves what, of this layer's calls. block_size: of the kernels. verified: queries of a sequence that
        verifies. table_width: pages of a row of vLLM's block tables."""
        return who_serves(self.paged, self.attention, self._limits(verified, table_width), device, block_size)

    def warm_up(self, kv_cache: torch.Tensor, verified: int, table_width: int) -> dict[str, str]:
        """Compile what this layer's calls need over vLLM's tensor, which is left as it was; what is compiled depends on how that lies."""
        return warm_up(self.paged, self.attention, self._limits(verified, table_width), self._wrap(kv_cache))

    def _limits(self, verified: int, table_width: int) -> StepLimits:
        scheduler, most = self.config.scheduler_config, self.config.model_config.max_model_len
        return StepLimits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, most, verified, table_width)

    def pages_of(self, kv_cache: torch.Tensor) -> PagedCache:
        """vLLM's tensor as pages. Kept while it is the same: profiling binds a small one first, waking up a new one."""
        held, pages = self._pages
        if held() is not kv_cache:
            pages = self._wrap(kv_cache)
            self._pages = weakref.ref(kv_cache), pages
            self._per_layer = self.attention.tensors(kv_cache.device)
            self.paged.owner = self.owner and self.owner.paged
        return pages

    def _wrap(self, kv_cache: torch.Tensor) -> PagedCache:
        pages = kernel_pages(kv_cache, self.pages_per_block)
        return self.paged.wrap(pages, pages.shape[2])

    def cache_of(self, kv_cache: torch.Tensor) -> PagedCache | CacheWithCopies:
        """The same with the 16-bit copies in front of them."""
        return self.paged.cache(self.pages_of(kv_cache))

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        """Store `key [T, HK, D]` and `value [T, HK, D_V]` in the slots `slot_mapping`; rows beyond these are padding."""
        if kv_cache.numel() == 0:
            return
        step_of(layer).write(self.cache_of(kv_cache), key, value, slot_mapping)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None):
        """Attention of `query [T, HQ, D]` into `output [T, HQ, D_V]`."""
        if self.observer is not None:
            return self._observed(layer, query, key, value, output)
        if attn_metadata is None:  # profiling: claim the scratch that attention will take, so that it is left free
            claim_scratch(query, self.attention.options)
            return output.fill_(0)
        if output_scale is not None:
            raise NotImplementedError("quantkv: fused quantization of the output is not supported")
        cache, shared = self.cache_of(kv_cache), (self.scale, self.attention.options)
        rows = self._own_rows(attn_metadata, key, value)
        attn_metadata.attend(cache, query, *shared, out=output, **rows, **self._per_layer)
        return output

    def _own_rows(self, step: Step, key: torch.Tensor, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """The rows that a step brings to the layer's pages, where it reads them as given: another's, where the pages are another's."""
        if not self.attention.own_rows:
            return {}
        own = (key, value) if self.owner is None else (None, None)
        return step.own_rows(self.owner or self, *own, self.lends)

    def _observed(self, layer, query, key, value, output):
        """Attention of the pass that measures the model, over its own rows; layers without keys of their own attend to the owner's."""
        own = (key, value) if self.owner is None else (None, None)
        return output.copy_(self.observer.attend(self.observed_as, self.owner or self, self.attention, query, *own))
