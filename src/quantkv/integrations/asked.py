"""What the options of a server name, in whichever engine: a format, a preset or a policy's file, each as `quantkv_NAME`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

from .. import weights
from ..engine.layer_config import UNQUANTIZED
from ..format import Format, available_formats, get_format
from ..geometry import Heads
from ..names import LATENT, PREFIX
from ..policy import Policy
from ..policy_file import CHOICES, PRESETS, check_choice

POLICY = PREFIX + "policy"  # formats by layer, from a file that another option names


def names() -> dict[str, str]:
    """What a server's option takes -> the format; "none" stores what the model computes in. Formats by layer are `POLICY`.

    K/V pairs, and formats of latents with rotated dimensions at 8 bits, are those of formats that have one codec for both sides: engines
    know only names that are registered ahead.
    """
    single = [*available_formats(), "none"]
    halves = [name for name in single if (fmt := get_format(name)).k.name == fmt.v.name]
    pairs, latents = (f"{k}/{v}" for k, v in permutations(halves, 2)), (f"{name}{LATENT}int8" for name in halves)
    return {PREFIX + name: name for name in (*single, *pairs, *latents)}


def presets() -> dict[str, str]:
    """What a server's option takes -> the preset, a policy by bits."""
    return {PREFIX + name: name for name in PRESETS}


def named_format(name: str, dtype, latent: bool = False) -> Format:
    """The format of a name behind the prefix, or of a preset; dtype: what the model computes in. latent: whether its layers keep latents.
    ValueError for one that is none."""
    return get_format(_policy(name, latent).format if name in PRESETS else name, dtype)


def options() -> list[str]:
    """All that a server's option takes of quantkv."""
    return [*presets(), *names(), POLICY]


def policy_of(argument: str, name: str, place: str, path: str | None, how: str, latent: bool = False) -> Policy | None:
    """The policy of the preset that a server's argument names, or of the file that it needs; None where it names a format.

    place, path: where a file is named, and which one; None: none is. how: to name one, in words. latent: whether layers keep latents.
    ValueError where the argument needs a file and none is named, or the other way round.
    """
    if (name == POLICY) != (path is not None):
        needed = f"--{argument.replace('_', '-')} {POLICY} and {how} need each other"
        raise ValueError(f"{argument}={name!r}, {place}={path!r}: {needed}")
    return _policy(presets()[name], latent) if name in presets() else _policy(Path(path), latent) if path is not None else None


@cache
def _policy(given: str | Path, latent: bool) -> Policy:
    """A preset by its name, or a file's policy: one object in each process."""
    policy = Policy.given(given)
    return policy.of_latents() if latent else policy


def of_prompts(name: str, policy: Policy | None, option: str, asked: Any) -> str:
    """What a policy says of prompts in its field `name`, "prompt" or "prompt_precision", or what an option asks, where it does."""
    if asked is not None:
        return check_choice(option, name, asked)
    return CHOICES[name][0] if policy is None else getattr(policy, name)


def check_only(given: Any, served: Mapping[str, Any], before: str = "", behind: str = "") -> None:
    """NotImplementedError for what an engine's object says and is not served. served: the only value of each attribute.

    before, behind: what stands around the refusal, in words."""
    for name, only in served.items():
        value = getattr(given, name)
        if value != only:
            raise NotImplementedError(f"quantkv: {before}{name}={value!r} is not supported{behind}; allowed: {only!r}")


def check_policy(policy: Policy, num_layers: int, heads: Heads, fits: Callable[[str], Any]) -> None:
    """ValueError, before weights are loaded, for a policy of other layers or heads than a model's. heads: of all ranks. fits: raises
    ValueError for a format, by its name, that the heads cannot have."""
    policy.check(num_layers)
    if policy.calibration is not None:
        policy.calibration.check_one(num_layers, heads)
    for name in {policy.format, *policy.layers.values()}:
        fits(name)


def check_weights(folder: str, revision: str | None, policy) -> None:
    """ValueError where a policy's calibration was made of another model than a checkpoint is of. Only files on this machine are read:
    a folder, or what the hub's cache holds of a name."""
    if policy is not None and policy.calibration is not None and (found := _on_disk(folder, revision)):
        policy.calibration.check_weights(weights.of_checkpoint(found))


def warn_of_biases(folder: str, revision: str | None, policy, name: str, logger: logging.Logger) -> None:
    """Warn where a checkpoint's keys have large biases and a format stores them so. folder, revision: as of `check_weights`. policy: None:
    a format alone was asked for. name: of the format."""
    takes_off = policy is not None and (policy.wants_statistics or policy.calibration is not None or bool(policy.maps))
    if takes_off or get_format(name).name in UNQUANTIZED or not (found := _on_disk(folder, revision)):
        return
    largest = weights.largest_key_bias_of_checkpoint(found)
    if largest > weights.LARGE_BIAS:
        logger.warning(weights.BIASED, folder, largest, name, f"{PREFIX}4bit (or {PREFIX}8bit, {PREFIX}3bit, {PREFIX}2bit)")


def _on_disk(folder: str, revision: str | None) -> str | None:
    """Where this machine holds a model; None where it does not yet."""
    if os.path.isdir(folder):
        return folder
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(folder, revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return None
