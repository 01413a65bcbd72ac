"""What the Hopper kernels are for: formats, head sizes of keys and of values, tokens of a page, how a cache lies in memory."""

from __future__ import annotations

import torch

from ...calls import Segment
from ...format import Codec, Format
from .host.operands import kind
from .host.records import pages_of, unsuitable

HEAD_SIZES = (*range(48, 257, 16), 512)
CHOSEN_BY_ERRORS = (64, 128, 256)  # head sizes of rows that a kernel of their codec writes, or that are rounded by a Hessian, K and V alike
# the largest head size, of keys and of values, that four warps of decode_wgmma.cu share: their registers have no room for more
FOR_WGMMA = 256
READ_PAGES = (8, 16, 32, 64, 128)  # tokens
LATENT_SIZES = (512, 64)  # numbers of a latent and of rotated dimensions
WRITTEN_PAGES = range(8, 1025, 8)


def unreadable_segment(segment: Segment, D: int, dtype: torch.dtype) -> str | None:
    """Why no Hopper GPU can read this segment with queries of head size D and this dtype."""
    fmt, k, v, block_size = segment.fmt, segment.k, segment.v, segment.k.codes.shape[1]
    if fmt.latent and (reason := _unreadable_latents(segment, dtype)):
        return reason
    for name, codec, use in (("keys", fmt.k, "keys"), ("values", fmt.v, "values")):
        if codec.hopper is None or not getattr(codec.hopper(), use):
            return f"format {fmt.name}: {name} of {codec.name} have no code for Hopper"
        if codec.code_dtype == torch.bfloat16 != dtype:
            return f"format {fmt.name}: {name} of {codec.name} need queries of it, and q.dtype is {dtype}"
    if reason := unreadable(fmt, *segment.stored_sizes, block_size):
        return reason
    pages = pages_of(k, v)
    if pages is None:
        return "the cache is no buffer of page records [num_blocks, HK, page_bytes]"
    if pages.stride(0) >= 1 << 32:
        return f"pages strides {pages.stride()}: a page under 4 GiB"
    if reason := unsuitable(pages, fmt.k, fmt.v, *segment.stored_sizes, block_size):
        return reason
    if segment.block_table.dtype != torch.int32 or segment.block_table.stride(-1) != 1:
        return f"block_table of {segment.block_table.dtype}, strides {segment.block_table.stride()}: int32, last dimension contiguous"
    for name, t in (("key_start", segment.key_start), ("key_range", segment.key_range)):
        if t is not None and (t.dtype != torch.int32 or not t.is_contiguous()):
            return f"{name} of {t.dtype}, strides {t.stride()}: int32, contiguous"
    if segment.key_start is not None and segment.maps.by_position:
        return "key_start with key means by position: all positions from 0 have a slot where keys have means"
    return None


def _unreadable_latents(segment: Segment, dtype: torch.dtype) -> str | None:
    """Why rows that are keys and values are none that decode_wgmma.cu is written for; what else is asked of any rows is not looked at."""
    fmt, sizes, heads = segment.fmt, segment.stored_sizes, segment.k.codes.shape[2]
    if sizes != LATENT_SIZES or heads != 1:
        return f"latents of {sizes[0]} + {sizes[1]} numbers, {heads} kv heads: {LATENT_SIZES[0]} + {LATENT_SIZES[1]}, one kv head"
    if fmt.k.hopper is None or not fmt.k.hopper().latents:
        return f"format {fmt.name}: latents of {fmt.k.name} have no code for Hopper"
    if fmt.v.hopper is None or not fmt.v.hopper().rotated:
        return f"format {fmt.name}: rotated dimensions of {fmt.v.name} have no code for Hopper"
    if fmt.v.code_dtype.is_floating_point and fmt.v.code_dtype != dtype:
        return f"format {fmt.name}: rotated dimensions of q.dtype, {dtype}"
    if kind(segment.maps.k) == "MATRIX" or segment.maps.v is not None:
        return "maps: latents under a Hadamard matrix or none, rotated dimensions under none"
    return None


def unreadable(fmt: Format, head_size: int, head_size_v: int, block_size: int) -> str | None:
    """Why no Hopper GPU reads such rows of such pages; None where it does."""
    if block_size not in READ_PAGES:
        return f"block_size {block_size}: one of {', '.join(map(str, READ_PAGES))}"
    return _other_head_sizes(fmt.k, head_size) or _other_head_sizes(fmt.v, head_size_v, "head_size_v")


def unwritable(fmt: Format, head_size: int, head_size_v: int, block_size: int, by_errors: bool) -> str | None:
    """Why no Hopper GPU writes such rows; None where it does. by_errors: rows of one side are written by a kernel of their codec, or
    rounded by a Hessian."""
    if block_size not in WRITTEN_PAGES:
        return f"block_size {block_size}: a multiple of {WRITTEN_PAGES.step} up to {WRITTEN_PAGES[-1]}"
    if by_errors and (head_size not in CHOSEN_BY_ERRORS or head_size_v != head_size):
        sizes = ", ".join(map(str, CHOSEN_BY_ERRORS))
        return f"head_size {head_size}, head_size_v {head_size_v}: both one of {sizes} where rows are trellis-coded or rounded by a Hessian"
    return _other_head_sizes(fmt.k, head_size) or _other_head_sizes(fmt.v, head_size_v, "head_size_v")


def is_for_wgmma(value: Codec, head_size: int, head_size_v: int) -> bool:
    """Whether decode_wgmma.cu has code for such rows; decode.cu has it for all that are read. Of a table's codes a warp takes at least
    four."""
    return max(head_size, head_size_v) <= FOR_WGMMA and (head_size_v >= 128 or not value.hopper().values_by_table)


def _other_head_sizes(codec: Codec, head_size: int, argument: str = "head_size") -> str | None:
    step = codec.hopper().step
    if head_size in HEAD_SIZES and head_size % step == 0:
        return None
    return f"{argument} {head_size}: multiples of {step} from {-(-HEAD_SIZES[0] // step) * step} to {HEAD_SIZES[-2]}, and {HEAD_SIZES[-1]}"
