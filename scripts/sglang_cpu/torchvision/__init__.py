"""A stand-in for torchvision, whose wheel on the package index needs CUDA: names that are imported, and that fail if used.

Nothing in quantkv uses this: it is for trying, and testing, the plug-in on a machine without a GPU. No image can be read.
"""

import enum
import sys
import types
from typing import Any

__version__ = "0.28.0"


class InterpolationMode(enum.Enum):
    """How images are scaled, by the names of torchvision."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012  a package, of which other modules can be imported

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for _name in ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _parent, _, _last = f"{__name__}.{_name}".rpartition(".")
    _made = sys.modules[f"{__name__}.{_name}"] = _Module(f"{__name__}.{_name}")
    _made.InterpolationMode = InterpolationMode
    setattr(sys.modules[_parent], _last, _made)
