"""How formats are named: aliases, "K/V" for the K of one with the V of another, and "K+R" for latents; and precisions. Pure Python."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

PLAIN = ("none", "auto")  # keys and values as given
PREFIX = "quantkv_"  # of the types that vLLM knows
LATENT = "+"  # between what a latent and what its rotated dimensions are stored in
JOINTS = ("/", LATENT)  # of two formats; no format is named so
PRECISIONS = ("16bit", "8bit")  # of the scores of prompts


def pair(name: str) -> list[str]:
    """The two formats of a name with a "/". ValueError for more."""
    parts = name.split("/")
    if len(parts) > 2:
        raise ValueError(f"format={name!r}: one format, or a pair K/V such as int8/int4")
    return parts


def canonical(name: str, formats: Collection[str], aliases: Mapping[str, str]) -> str:
    """The name that a format is registered by. ValueError, with the nearest name, for an unknown one."""
    name = aliases.get(name, name)
    if name not in formats:
        known = {given.lower(): given for given in (*formats, *aliases, *PLAIN)}
        near = difflib.get_close_matches(name.lower().removeprefix(PREFIX), known, n=1, cutoff=0.4)
        hint = f"did you mean {known[near[0]]!r}? " if near else ""
        if name.endswith("bit") and name[:-3].isdecimal():  # such as 4bit
            hint = "presets are policies, which QuantizedCache, engines and Policy.given take; "
        raise ValueError(f"format={name!r} is unknown: {hint}allowed: {', '.join(formats)}, none, or K/V such as int8/int4")
    return name


def of_latent(name: str, plain: str) -> str:
    """The format of a layer that keeps latents (MLA) where `name` is asked for: its K half for the vector, `plain`, as given, for the
    rotated dimensions. A name of such a format is itself."""
    return name if is_latent(name) else f"{name.split('/')[0]}{LATENT}{plain}"


def is_latent(name: str) -> bool:
    """Whether a format is one of latents: a row, the latent with its rotated dimensions, is the key, and the latent the value."""
    return LATENT in name


def of_keys_and_values(name: str) -> str:
    """The same name. ValueError for a format of latents, where a layer keeps keys and values."""
    if is_latent(name):
        raise ValueError(f"format={name!r}: one of latents (MLA); a layer that keeps keys and values takes {name.split(LATENT)[0]!r}")
    return name


def of_rows(name: str) -> list[str]:
    """The formats of the latent and of the rotated dimensions. ValueError where a name does not say both."""
    parts = name.split(LATENT)
    if len(parts) != 2 or "/" in name:
        raise ValueError(f"format={name!r}: latents take one format, and one for their rotated dimensions, such as int4+bf16")
    return parts
