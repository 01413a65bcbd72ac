"""The bytes of every format that comes with quantkv, without torch: `format_table.json`, which `scripts/format_table.py` writes from the
registry."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from . import names
from .spec import CodecLayout, FormatLayout, RowLayout

FILE = "format_table.json"


def to_dict(layout: FormatLayout, aliases: list[str]) -> dict[str, Any]:
    """One entry of the file."""
    sides = {
        side: {
            "name": c.name,
            "bits": c.row.code_bits,
            "meta": list(c.row.meta),
            "multiple": c.head_size_multiple,
            "power_of_two": c.power_of_two,
        }
        for side, c in (("k", layout.k), ("v", layout.v))
    }
    return {"name": layout.name, "aliases": aliases, **sides}


def _codec(given: dict[str, Any]) -> CodecLayout:
    return CodecLayout(given["name"], RowLayout(given["bits"], tuple(given["meta"])), given["multiple"], given["power_of_two"])


@cache
def _table() -> tuple[dict[str, FormatLayout], dict[str, str]]:
    """Layouts by name, and names by alias."""
    held = json.loads(files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    layouts = {given["name"]: FormatLayout(given["name"], _codec(given["k"]), _codec(given["v"])) for given in held}
    return layouts, {alias: given["name"] for given in held for alias in given["aliases"]}


def available() -> list[str]:
    """Names of the formats, aliases left out."""
    return list(_table()[0])


def layout_of(name: str, plain: str = "bf16") -> FormatLayout:
    """The layout of a format by its name, alias or K/V, as `get_format` takes them. plain: what "none" stands for. ValueError, with the
    nearest name, for an unknown one."""
    layouts, aliases = _table()
    if not isinstance(name, str):
        raise ValueError(f"format={name!r}: a name such as int4 is needed")
    if names.is_latent(name):
        latent, rope = (layout_of(part, plain) for part in names.of_rows(name))
        return FormatLayout(names.of_latent(latent.name, rope.name), latent.k, rope.k)
    if "/" in name:
        k, v = (layout_of(part, plain) for part in names.pair(name))
        return k if k.name == v.name else FormatLayout(f"{k.name}/{v.name}", k.k, v.v)
    return layouts[names.canonical(plain if name in names.PLAIN else name, layouts, aliases)]
