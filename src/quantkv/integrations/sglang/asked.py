"""What SGLang's arguments ask of quantkv: a policy, and what is refused before weights are loaded."""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.environ import envs

from ... import vllm_pages
from ...engine.layer import LayerAttention
from ...engine.warm_up import check_prompts
from ...formats import get_format
from ...geometry import Heads
from ...options import AttentionOptions
from ...policy import Policy
from .. import asked
from . import POLICY_VARIABLE, PREFIX, PROMPT_VARIABLES, drafts, logger

PAGE_SIZES = vllm_pages.BLOCK_SIZES  # of those that the Hopper kernels read
# What assumes rows of 16 bits, or slots that are rows: the argument, and the only value that is served.
ONLY = {
    "kv_cache_dtype": "auto",
    "enable_hierarchical_cache": False,
    "hicache_storage_backend": None,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "enable_hisparse": False,
    "enable_unified_memory": False,
    "enable_unified_cache_external_linker": False,
    "enable_page_major_kv_layout": False,
    "enable_kv_cache_sharding": False,
    "prefill_only_disable_kv_cache": False,
    "enable_memory_saver": False,
    "disaggregation_mode": "null",
    "dcp_size": 1,
    "attn_cp_size": 1,
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "enable_deterministic_inference": False,
    "enable_mis": False,
    "dllm_algorithm": None,
    "kv_canary": "none",
}
ONLY_ENVIRONMENT = (
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",  # allocates pools of another form, as does the next
    "SGLANG_USE_HND_KVCACHE",
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM",  # prepares a step before its drafts are known
)


def asked_backends(view: Any) -> tuple[str | None, str | None]:
    """The attention backends of prompts and of decode that a server's arguments name, and quantkv's alone; None for another's."""
    return tuple(name if name and name.startswith(PREFIX) else None for name in attention_backends_of(view))


def policy_of(backend: str) -> Policy:
    """The policy behind a name of --attention-backend. ValueError where it needs a file and none is named, or the other way round."""
    path, how = os.environ.get(POLICY_VARIABLE), f"{POLICY_VARIABLE}=FILE in the environment"
    return asked.policy_of("attention_backend", backend, POLICY_VARIABLE, path, how) or Policy(asked.names()[backend])


def of_prompts(name: str, policy: Policy) -> str:
    """What a server asks of prompts: see `asked.of_prompts`."""
    variable = PROMPT_VARIABLES[name]
    return asked.of_prompts(name, policy, variable, os.environ.get(variable))


def check_arguments(view: Any, resolved: bool = False) -> None:
    """Refuse what no model is served with. view: arguments of a server that asks for quantkv. resolved: whether SGLang has settled them.

    ValueError or NotImplementedError, naming the argument.
    """
    ours, both = asked_backends(view), attention_backends_of(view)
    for name in ours:
        if name is not None and name not in asked.options():
            raise ValueError(f"attention_backend={name!r}: allowed of quantkv: {', '.join(asked.options())}")
    if ours[0] != ours[1]:
        raise ValueError(
            f"prefill_attention_backend={both[0]!r}, decode_attention_backend={both[1]!r}: pages have one format, name one for both"
        )
    asked.check_only(view, ONLY, behind=f" with attention_backend={ours[0]!r}")
    for name in ONLY_ENVIRONMENT:
        if getattr(envs, name).get():
            raise NotImplementedError(f"quantkv: {name}=1 is not supported with attention_backend={ours[0]!r}; allowed: 0")
    drafts.check_arguments(view, ours[0], resolved)


def check(server_args: Any, model: Any, is_draft: bool = False) -> str | None:
    """The one backend of quantkv that a server's resolved arguments ask for; None where they ask for none. model: SGLang's `ModelConfig`.
    is_draft: whether the model drafts.

    ValueError or NotImplementedError, naming the argument, for what quantkv does not serve.
    """
    view = resolved_view(server_args)
    given, found = asked_backends(server_args), asked_backends(view)
    if given != found:
        raise ValueError(
            f"attention_backend={server_args.attention_backend!r}: SGLang took {attention_backends_of(view)} for this model instead"
        )
    if given == (None, None):
        return None
    check_arguments(view, resolved=True)
    if view.page_size not in PAGE_SIZES:
        allowed = ", ".join(map(str, PAGE_SIZES))
        raise ValueError(f"page_size={view.page_size}: attention_backend={given[0]!r} needs one of {allowed}")
    policy = policy_of(given[0])
    _check_model(model, Policy(policy.format, prompt=policy.prompt) if is_draft else policy, view.page_size, view.device)
    return given[0]


def _check_model(model: Any, policy: Policy, page_size: int, device: str) -> None:
    """Refuse models that keep no keys and values, and formats that their heads cannot have."""
    architecture = model.hf_config.architectures[0]
    if model.attention_arch != AttentionArch.MHA:
        raise NotImplementedError(f"quantkv: {architecture} keeps latents (MLA) or states alone, which quantkv does not serve in SGLang")
    if model.is_encoder_decoder:
        raise NotImplementedError(f"quantkv: {architecture} has an encoder; decoders only")
    heads = Heads(model.get_total_num_kv_heads(), model.head_dim, model.v_head_dim)
    fits = lambda name: get_format(name, model.dtype).of_keys_and_values().cache_spec(1, *heads[1:], page_size)
    asked.check_policy(policy, model.num_hidden_layers, heads, fits)
    asked.check_weights(model.model_path, model.revision, policy)
    asked.warn_of_biases(model.model_path, model.revision, policy, policy.format, logger)
    of_prompts("prompt", policy)
    options = AttentionOptions(prompt_precision=of_prompts("prompt_precision", policy))
    check_prompts(LayerAttention(model.num_attention_heads, options=options), heads, model.dtype, torch.device(device))
