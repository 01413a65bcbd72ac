"""Deprecated: `full_precision`."""

from . import deprecated

__getattr__ = deprecated.module(__name__, "quantkv.full_precision", {"ExactTokens": "FullPrecisionTokens", "BLOCK_SIZE": "BLOCK_SIZE"})
