"""What a vLLM configuration asks for: a type, the policy behind it, and where its pages may go."""

from __future__ import annotations

from typing import Any

from ...policy import Policy
from .. import asked
from . import POLICY_OPTION, PROMPT_OPTIONS, asked_type

IN_MEMORY = ("OffloadingConnector", "CPUOffloadingSpec")  # a connector whose pages end with the engine


def policy_of(config: Any) -> Policy | None:
    """The policy of a file or a preset that a vLLM configuration asks for.

    ValueError where it names a file and another type, or this type and no file.
    """
    name, path = asked_type(config.cache_config.cache_dtype), _options(config).get(POLICY_OPTION)
    how = f"--additional-config '{{\"{POLICY_OPTION}\": FILE}}'"
    return asked.policy_of("kv_cache_dtype", name, POLICY_OPTION, path, how, config.model_config.use_mla)


def reads_own_rows(config: Any, invariant: bool) -> bool:
    """Whether prompts read their own rows as given. invariant: a sequence's answer must not depend on the batch, which decides how its
    prompt is cut: then it reads pages, and ValueError says so where a configuration asks for the other."""
    name, prompt = PROMPT_OPTIONS["prompt"], of_prompts("prompt", config)
    if prompt == _options(config).get(name) == "own" and invariant:
        raise ValueError(f"{name}='own' with VLLM_BATCH_INVARIANT=1: answers would depend on how prompts are cut; 'stored' is needed")
    return prompt == "own" and not invariant


def of_prompts(name: str, config: Any) -> str:
    """What a configuration asks of prompts: see `asked.of_prompts`."""
    option = PROMPT_OPTIONS[name]
    return asked.of_prompts(name, policy_of(config), option, _options(config).get(option))


def stays_in_memory(transfer: Any) -> bool:
    """Whether vLLM's configuration of a connector, where there is one, moves pages to the host's memory and to no other engine."""
    return transfer is not None and (transfer.kv_connector, transfer.get_from_extra_config("spec_name", IN_MEMORY[1])) == IN_MEMORY


def _options(config: Any) -> dict[str, Any]:
    return config.additional_config if isinstance(config.additional_config, dict) else {}
