"""Hadamard transforms and nibbles as functions, for callers that rotate or pack by themselves."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..maps import butterfly, hadamard, rht_signs


@lru_cache(maxsize=16)
def _matrix(size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return hadamard(size).to(dtype).to(device)


@lru_cache(maxsize=16)
def _signs(size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return rht_signs(size).to(dtype).to(device)


def fast_hadamard_transform(x: torch.Tensor) -> torch.Tensor:
    """`H x` along the last axis, unnormalised (`H H = D I`), in x's dtype. ValueError unless D is a power of two.

    16-bit rows on a GPU: one tensor-core product; +-1 is exact there, so it rounds once, at the end. Otherwise log2(D)
    butterfly steps, 16-bit rows in float32.
    """
    size = x.shape[-1]
    if size < 1 or size & (size - 1):
        raise ValueError(f"x.shape[-1]={size}: a Hadamard transform needs a power of two")
    if not x.is_floating_point():
        raise ValueError(f"x.dtype={x.dtype}: floating point is needed")
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return x @ _matrix(size, x.dtype, str(x.device))
    return butterfly(x if x.dtype == torch.float64 else x.float()).to(x.dtype)


def single_rht(x: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """The randomized Hadamard transform `H (d * x)`, or its transpose `d * (H x)`, along the last axis.

    d: vLLM's fixed signs. Where D is no power of two, each block of b elements, b the largest power of two
    that divides D, by itself. `single_rht(single_rht(x), inverse=True) = b x`.
    """
    size = x.shape[-1]
    block = size & -size
    rows = x.unflatten(-1, (-1, block))
    signs = _signs(block, x.dtype, str(x.device))
    y = signs * fast_hadamard_transform(rows) if inverse else fast_hadamard_transform(signs * rows)
    return y.flatten(-2)


def pack_int4_nibbles(lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    """`lo | hi << 4` as uint8, of values in 0..15."""
    return (lo.to(torch.uint8) & 0xF) | (hi.to(torch.uint8) << 4)


def unpack_int4_nibbles(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high four bits of uint8, as uint8. Reverses `pack_int4_nibbles`."""
    return packed & 0xF, packed >> 4
