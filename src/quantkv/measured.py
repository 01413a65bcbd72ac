"""How fast decode attention was beside 16 bits, on the GPUs that were measured: `measured.json`, which `scripts/measured.py` writes from
the recorded results."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Speed(NamedTuple):
    """Times as fast as 16 bits, least and most over the shapes that were measured."""

    least: float
    most: float


@cache
def gpus() -> dict:
    """Measurements by GPU: what is compared with ("beside"), the files, and by shape the head size and the speeds by format."""
    return json.loads(files(__package__).joinpath("measured.json").read_text(encoding="utf-8"))


def speed(gpu: str, format: str, head_size: int) -> Speed | None:
    """Speed of decode attention with 4 query heads on each kv head of that size. None where it was not measured."""
    shapes = gpus().get(gpu, {"shapes": {}})["shapes"].values()
    found = [shape["speed"][format] for shape in shapes if shape["head_size"] == head_size and format in shape["speed"]]
    return Speed(min(found), max(found)) if found else None
