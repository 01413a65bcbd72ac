"""How formats are named: aliases, and "K/V" for the K of one with the V of another. Pure Python."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

PLAIN = ("none", "auto")  # keys and values as given
PREFIX = "quantkv_"  # of the types that vLLM knows


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
        raise ValueError(f"format={name!r} is unknown: {hint}allowed: {', '.join(formats)}, none, or K/V such as int8/int4")
    return name


def of_latent(name: str, plain: str) -> str:
    """The format of a layer that keeps latents (MLA) where `name` is asked for: its K half for the vector, `plain`, as given, for the
    rotated dimensions."""
    return f"{name.split('/')[0]}/{plain}"
