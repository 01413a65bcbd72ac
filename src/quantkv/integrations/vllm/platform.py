"""What vLLM's platform answers where CUSTOM is asked for, by name or by a type of quantkv's: one name for layers of keys and values and for
layers of latents, on a CPU too.

vLLM takes one class for a name. Its other way, a backend by kind of attention in the configuration, needs a member of its enumeration that
is lost when a configuration is sent to another process; so the class is chosen here, in the process of the layer.
"""

from __future__ import annotations

from typing import Any

from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from . import LATENTS, PREFIX
from .around import around

TWO_SIZES = ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV")  # backends of keys and values of two sizes, which models name themselves
WRITE_THEMSELVES = ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration", "KimiK3MTPModel")
OF_STEPS, OF_PAGES = ("enable_chunked_prefill", "max_num_batched_tokens"), ("enable_prefix_caching", "block_size")


def take_custom() -> None:
    """Let CUSTOM be chosen by a type of quantkv's, let it serve latents (MLA), and let the CPU platform take it at all: that one answers
    every request for a backend with its own, and says so in one line of the log. What asks for another backend is as it was. May be
    called again."""
    around(type(current_platform), "get_attn_backend_cls", _backend)
    around(VllmConfig, "try_verify_and_update_config", _choose_by_type)
    around(AttentionBackendEnum, "get_class", _take_two_sizes)
    around(type(current_platform), "check_and_update_config", _check_models)


def _backend(own: Any, cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
    if selected_backend == AttentionBackendEnum.CUSTOM and attn_selector_config.use_mla:
        selected_backend = AttentionBackendEnum[LATENTS]
    asked = selected_backend is not None and selected_backend.name in (AttentionBackendEnum.CUSTOM.name, LATENTS)
    if not (asked and current_platform.is_cpu()):
        return own(cls, selected_backend, attn_selector_config, num_heads)
    reasons = selected_backend.get_class().validate_configuration(device_capability=None, **attn_selector_config._asdict())
    if reasons:
        given = attn_selector_config.kv_cache_dtype
        raise ValueError(f"--kv-cache-dtype {given}, --attention-backend CUSTOM cannot serve this model: {'; '.join(reasons)}")
    return selected_backend.get_path()


def _choose_by_type(own: Any, config: Any) -> None:
    """Let a type of quantkv's choose CUSTOM where no backend is named: no other reads it. It is chosen before models choose (Gemma 4's
    hook names Triton's backend where none is named), and from there on all is as if it had been named."""
    cache, attention = config.cache_config, config.attention_config
    if attention.backend is None and cache is not None and cache.cache_dtype.startswith(PREFIX):
        attention.backend = AttentionBackendEnum.CUSTOM
    own(config)


def _take_two_sizes(own: Any, named: Any) -> type:
    """Let CUSTOM, where it was asked for, serve models whose keys and values have two sizes (MiMo): these name vLLM's backends for that,
    whatever was asked for."""
    if named.name in TWO_SIZES and get_current_vllm_config().attention_config.backend == AttentionBackendEnum.CUSTOM:
        named = AttentionBackendEnum.CUSTOM
    return own(named)


def _check_models(own: Any, cls: Any, vllm_config: Any) -> None:
    """Refuse models whose latents CUSTOM cannot serve while a configuration is checked. And let the CPU platform leave chunked prefill,
    prefix caching and the size of blocks as they were asked for: for models with latents it turns the first two off and sets the third,
    which its own backend needs."""
    parts = (vllm_config.scheduler_config, OF_STEPS), (vllm_config.cache_config, OF_PAGES)
    kept = [(part, name, getattr(part, name)) for part, names in parts for name in names] if current_platform.is_cpu() else []
    own(cls, vllm_config)
    model = vllm_config.model_config
    if model is not None and model.use_mla and vllm_config.attention_config.backend == AttentionBackendEnum.CUSTOM:
        check_latents(model)
        check_invariance()
        for part, name, value in kept:
            setattr(part, name, value)


def check_invariance() -> None:
    """NotImplementedError where an answer must not depend on the batch: what is before a prompt is read back from pages in chunks, whose
    lengths vLLM works out of the batch, and each is a sum of its own."""
    if envs.VLLM_BATCH_INVARIANT:
        raise NotImplementedError(
            "quantkv: VLLM_BATCH_INVARIANT=1 with latents (MLA) is not supported: chunks of a prompt's context depend on the batch; 0 is "
            "needed, or vLLM's own backends, without --kv-cache-dtype quantkv_.. and --attention-backend CUSTOM"
        )


def check_latents(model: Any) -> None:
    """NotImplementedError for a model whose latents are not served, by its name."""
    if hasattr(model.hf_text_config, "index_topk"):
        reason = "attends to latents that a sparse indexer selects (DSA)"
    elif model.architecture in WRITE_THEMSELVES:
        reason = "has layers that store latents themselves, as rows of 16 bits"
    else:
        return
    raise NotImplementedError(
        f"quantkv: {model.architecture} {reason}, which quantkv does not serve; vLLM's own backends do, without --kv-cache-dtype "
        "quantkv_.. and --attention-backend CUSTOM"
    )
