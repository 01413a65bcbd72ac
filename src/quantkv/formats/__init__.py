"""The formats that come with quantkv, one family a file. Importing this package registers them all."""

from ..format import available_formats, get_format
from . import fp8, int2, int4, int8, levels, mixed, none, trellis, turboquant

__all__ = ["available_formats", "fp8", "get_format", "int2", "int4", "int8", "levels", "mixed", "none", "trellis", "turboquant"]
