"""quantkv's formats in an unmodified vLLM: `vllm serve MODEL --kv-cache-dtype quantkv_int4`.

vLLM finds `register` by its entry point (`vllm.general_plugins`) and calls it in the engine and in every worker before a
configuration is checked. Nothing here imports vLLM until then. --kv-cache-dtype takes what `..asked` names.
"""

from __future__ import annotations

from ..asked import PREFIX as PREFIX
from ..asked import options
from ..contract import is_tested
from ..serving import calls as calls
from ..serving import served as served
from .contract import missing

POLICY_OPTION = "quantkv_policy"  # --additional-config '{"quantkv_policy": "policy.json"}'
PROMPT_OPTIONS = {  # --additional-config '{"quantkv_prompt": "stored"}', by the policy's field
    "prompt": "quantkv_prompt",
    "prompt_precision": "quantkv_prompt_precision",
}
BACKEND = f"{__name__}.backend.QuantKVBackend"
LATENTS = "CUSTOM_MLA"  # the name of the backend that serves latents, where CUSTOM is asked for
LATENT_BACKEND = f"{__name__}.mla.QuantKVLatentBackend"
TESTED = ("0.33.",)
DIGEST_MARK = ":"  # between a type and the digest that connectors see beside it
ANY_VERSION = "QUANTKV_VLLM_ANY_VERSION"  # =1 registers with a version of vLLM that was not tested


def asked_type(kv_cache_dtype: str) -> str:
    """The type that the user asked for, of its name as connectors see it."""
    return kv_cache_dtype.partition(DIGEST_MARK)[0]


def make_known(name: str) -> None:
    """Let vLLM take `name` as a type of bytes that the backend alone understands. May be called again."""
    import torch
    from vllm.config.cache import is_known_kv_cache_dtype, register_kv_cache_dtype
    from vllm.v1.kv_cache_interface import KVQuantMode

    if not is_known_kv_cache_dtype(name):
        traits = {"name": name, "torch_dtype": lambda self: torch.uint8, "quant_mode": lambda self: KVQuantMode.CUSTOM}
        register_kv_cache_dtype(name)(type("QuantKVType", (), traits))


def register() -> None:
    """Make quantkv's types and its attention backend known to vLLM. A version of vLLM that was not tested gets one line in the log,
    and nothing is registered: vLLM then refuses the types by name. May be called again."""
    import vllm

    if not is_tested("vLLM", vllm.__version__, TESTED, ANY_VERSION, "types", missing):
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .blocks import pack_blocks
    from .connectors import name_page_types
    from .platform import take_custom

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if LATENTS not in AttentionBackendEnum.__members__:
        register_backend(LATENTS, LATENT_BACKEND)
    for name in options():
        make_known(name)
    name_page_types()
    take_custom()
    pack_blocks()
