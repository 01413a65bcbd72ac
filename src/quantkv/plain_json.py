"""JSON that others may have damaged, or written to do damage. Pure Python."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def parse(text: str) -> Any:
    """What a text says. ValueError for one that is no JSON, nests too deeply, names a key twice, or has a number that is not finite."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Of a key that stands there twice, readers take different values."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key!r} stands twice in one object")
        made[key] = value
    return made


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
