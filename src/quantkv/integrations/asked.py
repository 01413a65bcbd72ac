"""What the options of a server name, in whichever engine: a format, a preset or a policy's file, each as `quantkv_NAME`."""

from __future__ import annotations

import os
from functools import cache
from itertools import permutations

from .. import weights
from ..format import Format, available_formats, get_format
from ..names import PREFIX
from ..policy_file import PRESETS

POLICY = PREFIX + "policy"  # formats by layer, from a file that another option names


def names() -> dict[str, str]:
    """What a server's option takes -> the format; "none" stores what the model computes in. Formats by layer are `POLICY`.

    K/V pairs are those of formats that have one codec for both sides: engines know only names that are registered ahead.
    """
    single = [*available_formats(), "none"]
    halves = [name for name in single if (fmt := get_format(name)).k.name == fmt.v.name]
    return {PREFIX + name: name for name in (*single, *(f"{k}/{v}" for k, v in permutations(halves, 2)))}


def presets() -> dict[str, str]:
    """What a server's option takes -> the preset, a policy by bits."""
    return {PREFIX + name: name for name in PRESETS}


def named_format(name: str, dtype) -> Format:
    """The format of a name behind the prefix, or of a preset; dtype: what the model computes in. ValueError for one that is none."""
    return get_format(PRESETS[name]["format"] if name in PRESETS else name, dtype)


@cache
def preset(name: str):
    """The `Policy` of a preset, one object in each process."""
    from ..policy import Policy

    return Policy.given(name)


@cache
def read_policy(path: str):
    """The `Policy` of a file, read once in each process."""
    from ..policy import Policy

    return Policy.load(path)


def check_weights(folder: str, revision: str | None, policy) -> None:
    """ValueError where a policy's calibration was made of another model than a checkpoint is of. Only files on this machine are read:
    a folder, or what the hub's cache holds of a name."""
    if policy is not None and policy.calibration is not None:
        if not os.path.isdir(folder):
            from huggingface_hub import snapshot_download

            try:
                folder = snapshot_download(folder, revision=revision, local_files_only=True)
            except (OSError, ValueError):  # it is not there yet
                return
        policy.calibration.check_weights(weights.of_checkpoint(folder))
