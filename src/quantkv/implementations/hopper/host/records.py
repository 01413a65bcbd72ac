"""The record of one page and kv head, K codes | V codes | K meta | V meta, as the kernels address it."""

from __future__ import annotations

import torch

from ....calls import PagedTensor
from ....format import Codec


def page_bytes(key: Codec, value: Codec, head_size: int, head_size_v: int, block_size: int) -> int:
    """Bytes of a record of `block_size` tokens."""
    sides = ((key, head_size), (value, head_size_v))
    return block_size * sum(codec.row.code_bytes(size) + codec.row.meta_bytes for codec, size in sides)


def row_macros(key: Codec, value: Codec, head_size: int, head_size_v: int, of_values: bool = False) -> dict[str, object]:
    """What both kernels are told of the codecs and their rows. of_values: the snippets' numbers and head size are the values', not the
    keys', where both have them."""
    macros: dict[str, object] = {"HEAD_SIZE": head_size_v if of_values else head_size, "KEY_SIGNED": int(key.signed)}
    sides = [("KEY", key, head_size), ("VALUE", value, head_size_v)]
    for name, codec, size in sides if of_values else sides[::-1]:
        half = codec.hopper()
        macros |= {name: half.type, f"{name}_BITS": codec.row.code_bits, f"{name}_META_BYTES": codec.row.meta_bytes, f"{name}_SIZE": size}
        macros |= half.macros(size)
    return macros


def pages_of(k: PagedTensor, v: PagedTensor) -> torch.Tensor | None:
    """The buffer of page records that both sides are views of, or None."""
    base = k.base
    if base is None or base is not v.base or base.ndim != 3 or base.dtype != torch.uint8:
        return None
    offset = base.data_ptr()
    for t in (k.codes, v.codes, k.meta, v.meta):
        if t is None:
            continue
        size, width = t.shape[1], t.shape[3]
        row = width * t.element_size()
        wanted = (base.stride(0), row, base.stride(1), t.element_size())
        steps = [(have * t.element_size(), want) for n, have, want in zip(t.shape, t.stride(), wanted) if n > 1]
        if t.data_ptr() != offset or any(have != want for have, want in steps):  # an axis of one has any stride
            return None
        offset += size * row
    return base


def unsuitable(pages: torch.Tensor, key: Codec, value: Codec, head_size: int, head_size_v: int, block_size: int) -> str | None:
    """Why `pages`, of three axes, are no records that the kernels can address, in words; None where they are."""
    size = page_bytes(key, value, head_size, head_size_v, block_size)
    if pages.shape[2] != size or pages.stride(2) != 1:
        return f"pages {tuple(pages.shape)}, strides {pages.stride()}: records of {size} bytes, last dimension contiguous"
    if pages.data_ptr() % 16 or pages.stride(0) % 16 or pages.stride(1) % 16:
        return f"pages strides {pages.stride()}: multiples of 16 bytes, at an address that is one"
    return None
