"""The record of one page and kv head, K codes | V codes | K meta | V meta, by the names that the kernels give to codecs."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Row(NamedTuple):
    """Bits of a code, and bytes of metadata beside a row."""

    bits: int
    meta_bytes: int = 0


ROWS = {
    "bf16": Row(16),
    "fp16": Row(16),
    "e4m3": Row(8),
    "e5m2": Row(8),
    "fp8": Row(8, 4),
    "int8": Row(8, 4),
    "int4": Row(4, 4),
    "int2": Row(2, 4),
    "codebook4": Row(4, 2),
    "codebook3": Row(3, 2),
    "affine4": Row(4, 4),
    "affine3": Row(3, 4),
}


def page_bytes(key: str, value: str, head_size: int, block_size: int) -> int:
    """Bytes of a record of `block_size` tokens."""
    k, v = ROWS[key], ROWS[value]
    return block_size * (head_size * (k.bits + v.bits) // 8 + k.meta_bytes + v.meta_bytes)


def unsuitable(pages: torch.Tensor, key: str, value: str, kv_heads: int, head_size: int, block_size: int) -> str | None:
    """Why `pages`, of three axes, are no records that the kernels can address, in words; None where they are."""
    size = page_bytes(key, value, head_size, block_size)
    if pages.dtype != torch.uint8 or pages.shape[1:] != (kv_heads, size) or pages.stride(2) != 1:
        return f"pages {pages.dtype} {tuple(pages.shape)}: uint8 [num_blocks, {kv_heads}, {size}], last dimension contiguous"
    if pages.data_ptr() % 16 or pages.stride(0) % 16 or pages.stride(1) % 16:
        return f"pages strides {pages.stride()}: multiples of 16 bytes, at an address that is one"
    return None
