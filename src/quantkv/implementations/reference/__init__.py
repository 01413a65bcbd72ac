"""The reference: `write`, `attend` and `dequantize` in plain PyTorch. It is the specification, and the CPU path."""

from .attend import attend, attend_segments, merge
from .write import apply_map, dequantize, encode, write

__all__ = ["apply_map", "attend", "attend_segments", "dequantize", "encode", "merge", "write"]
