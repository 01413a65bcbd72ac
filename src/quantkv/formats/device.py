"""Where the device halves of the codecs in this package are: modules beside each family, imported when a kernel first needs them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def half_of(family: str, name: str, device: str = "triton") -> Callable[[], Any]:
    """For `Codec.triton`: `name` in the module `device` of package `family`."""
    return lambda: getattr(importlib.import_module(f"{family}.{device}"), name)
