"""quantkv: a language model's KV cache at 2 to 8 bits, in pages, and attention over it there.

Importing the package imports neither torch nor Triton nor transformers; the names below are loaded when they are first used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "CacheSpec": "spec",
    "RowLayout": "spec",
    "Codec": "format",
    "Format": "format",
    "register": "format",
    "available_formats": "formats",
    "get_format": "formats",
    "AttentionOptions": "options",
    "LayerMaps": "maps",
    "LinearMap": "maps",
    "Batch": "calls",
    "Segment": "calls",
    "AttendCall": "calls",
    "WriteCall": "calls",
    "PagedCache": "cache",
    "PageStore": "offload",
    "PageViews": "page_views",
    "copy_pages_between": "page_views",
    "prepare_attend": "prepared",
    "prepare_write": "prepared",
    "warm_up": "warmup",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'quantkv' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
