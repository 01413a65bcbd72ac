"""What a vLLM configuration asks for: a type, and the policy behind it."""

from __future__ import annotations

from typing import Any

from ...policy import Policy
from ...policy_file import check_prompt
from ..asked import POLICY, preset, presets, read_policy
from . import POLICY_OPTION, PROMPT_OPTION, asked_type


def policy_of(config: Any) -> Policy | None:
    """The policy of a file or a preset that a vLLM configuration asks for.

    ValueError where it names a file and another type, or this type and no file.
    """
    path, asked = _options(config).get(POLICY_OPTION), asked_type(config.cache_config.cache_dtype) == POLICY
    if asked != (path is not None):
        needed = f"--kv-cache-dtype {POLICY} and --additional-config '{{\"{POLICY_OPTION}\": FILE}}' need each other"
        raise ValueError(f"kv_cache_dtype={config.cache_config.cache_dtype!r}, {POLICY_OPTION}={path!r}: {needed}")
    name = presets().get(asked_type(config.cache_config.cache_dtype))
    if name is not None:
        return preset(name)
    return read_policy(path) if asked else None


def reads_own_rows(config: Any, invariant: bool) -> bool:
    """Whether prompts read their own rows as given. invariant: a sequence's answer must not depend on the batch, which decides how its
    prompt is cut: then it reads pages, and ValueError says so where a configuration asks for the other."""
    policy, asked = policy_of(config), _options(config).get(PROMPT_OPTION)
    if asked is not None and check_prompt(PROMPT_OPTION, asked) == "own" and invariant:
        raise ValueError(
            f"{PROMPT_OPTION}='own' with VLLM_BATCH_INVARIANT=1: answers would depend on how prompts are cut; 'stored' is needed"
        )
    return not invariant and (asked or (policy.prompt if policy else "own")) == "own"


def _options(config: Any) -> dict[str, Any]:
    return config.additional_config if isinstance(config.additional_config, dict) else {}
