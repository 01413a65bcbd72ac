"""Where the backend codecs in this package are: files beside each family, loaded when a kernel first needs them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def codec_in(family: str, name: str, device: str = "triton") -> Callable[[], Any]:
    """For `Codec.triton`: `name` in the module `device` of package `family`."""
    return lambda: getattr(importlib.import_module(f"{family}.{device}"), name)


def hopper_codec(file: str, type: str, **arguments: Any) -> Callable[[], Any]:
    """For `Codec.hopper`: the struct `type` of `hopper.cuh` beside `file`; further arguments as of `HopperCodec`."""

    @cache
    def load():
        from ..implementations.hopper.codec import HopperCodec

        return HopperCodec(Path(file).with_name("hopper.cuh"), type, **arguments)

    return load


def cpu_codec(**arguments: Any) -> Callable[[], Any]:
    """For `Codec.cpu`: arguments as of `CpuCodec`."""

    @cache
    def load():
        from ..implementations.cpu.codec import CpuCodec

        return CpuCodec(**arguments)

    return load
