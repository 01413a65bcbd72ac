"""Rows into page records on Hopper: compiles write.cu for one configuration at a time, and launches it."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache

import torch

from .nvrtc import Kernel, compile_cubin
from .records import unsuitable

CHUNK = 8  # as in write.cu


# The types in encode.cuh.
CODECS = {
    "bf16": "Plain16<true>",
    "fp16": "Plain16<false>",
    "e4m3": "Float8<true>",
    "e5m2": "Float8<false>",
    "fp8": "E4M3Token",
    "int8": "Int8",
    "int4": "Int4",
    "int2": "Int2",
    "codebook4": "Codebook<4>",
    "codebook3": "Codebook<3>",
    "affine4": "Uniform<4>",
    "affine3": "Uniform<3>",
}


@dataclass(frozen=True)
class Hadamard:
    """The map `factor * H * diag(signs)`, H the Sylvester matrix of the head size."""

    factor: float
    signs: torch.Tensor | None  # int32 [4, D / 128 or 1], as `of` packs them; None: all are +1

    @staticmethod
    def of(factor: float, signs: torch.Tensor) -> Hadamard:
        """`signs` [D] of +-1, into the words that the four lanes of a row read: see `hadamard` in write.cu."""
        if bool((signs > 0).all()):
            return Hadamard(factor, None)
        D = signs.shape[0]
        pairs = (signs.cpu() < 0).long().view(-1, 4, CHUNK).transpose(0, 1).reshape(4, -1, 2)  # [lane, pair, parity]
        bit = torch.tensor([15, 31]) - torch.arange(D // 8)[:, None] % 16
        words = torch.zeros(4, max(D // 128, 1), dtype=torch.int64)
        for i in range(words.shape[1]):
            words[:, i] = (pairs[:, 16 * i : 16 * i + 16] << bit[16 * i : 16 * i + 16]).sum((1, 2))
        return Hadamard(factor, (words - (words >> 31 << 32)).int().to(signs.device))  # as signed words


@dataclass(frozen=True)
class Config:
    """What one compiled kernel is made for. midpoints: those of a codebook above zero."""

    key: str
    value: str
    head_size: int
    block_size: int
    bf16: bool
    wide_slots: bool
    key_factor: float = 0.0
    value_factor: float = 0.0
    key_scaled: bool = False
    value_scaled: bool = False
    key_shifted: bool = False
    wide_positions: bool = False
    midpoints: tuple[float, ...] = ()
    warps: int = 4

    @property
    def alike(self) -> bool:
        """K and V are treated in the same way."""
        key, value = (self.key, self.key_factor, self.key_scaled), (self.value, self.value_factor, self.value_scaled)
        return key == value and not self.key_shifted

    def macros(self) -> dict[str, object]:
        return dict(
            HEAD_SIZE=self.head_size, BLOCK_SIZE=self.block_size, KEY=CODECS[self.key], VALUE=CODECS[self.value],
            KEY_FACTOR=_literal(self.key_factor), VALUE_FACTOR=_literal(self.value_factor), KEY_SCALED=int(self.key_scaled),
            VALUE_SCALED=int(self.value_scaled), KEY_SHIFTED=int(self.key_shifted), ALIKE=int(self.alike), ROWS_BF16=int(self.bf16),
            SLOT=_integer(self.wide_slots), POSITION=_integer(self.wide_positions), WARPS=self.warps,
            ROOT_D=repr(math.sqrt(self.head_size)), MIDPOINT_LIST=", ".join(map(_literal, self.midpoints)) or "0.f",
        )  # fmt: skip


def _integer(wide: bool) -> str:
    return "long long" if wide else "int"


def _literal(x: float) -> str:
    return f"{x.hex()}f"


@cache
def kernel(config: Config, device: int) -> Kernel:
    from cuda.core import ObjectCode

    with torch.cuda.device(device):
        torch.cuda.current_stream()
        module = ObjectCode.from_cubin(compile_cubin("write.cu", config.macros()))
        return Kernel(module, "write_kernel", 32 * config.warps, 0, device)


def unsupported(
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    key_codec: str,
    value_codec: str,
    block_size: int,
    positions: torch.Tensor | None = None,
) -> str | None:
    """Why `write` cannot take these arguments, tensors on a GPU of compute capability 9.0, in words; None where it can."""
    D = key.shape[2]
    if key_codec not in CODECS or value_codec not in CODECS:
        return f"codecs {key_codec}, {value_codec}: {', '.join(CODECS)}"
    if key.dtype not in (torch.bfloat16, torch.float16) or value.dtype != key.dtype:
        return f"key of {key.dtype}, value of {value.dtype}: both bfloat16 or both float16"
    if D not in (64, 128, 256) or value.shape != key.shape:
        return f"key {tuple(key.shape)}, value {tuple(value.shape)}: one shape, head size 64, 128 or 256"
    for name, rows in (("key", key), ("value", value)):
        if rows.stride(2) != 1 or rows.stride(0) % 8 or rows.stride(1) % 8 or rows.data_ptr() % 16:
            return f"{name} strides {rows.stride()}: rows of neighbouring elements that begin at multiples of 16 bytes"
    for name, t in (("slot_mapping", slots), ("positions", positions)):
        if t is not None and (t.dtype not in (torch.int32, torch.int64) or not t.is_contiguous()):
            return f"{name} of {t.dtype}, strides {t.stride()}: contiguous int32 or int64"
    if not 1 <= block_size <= 1024 or block_size % 8:
        return f"block_size {block_size}: a multiple of 8 up to 1024"
    return unsuitable(pages, key_codec, value_codec, key.shape[1], D, block_size)


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    key_codec: str,
    value_codec: str,
    block_size: int,
    *,
    key_map: Hadamard | None = None,
    value_map: Hadamard | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    key_offset: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    midpoints: tuple[float, ...] = (),
    warps: int | None = None,
) -> None:
    """Encode `key` and `value` [T, HK, D], bf16 or fp16, into the slots `slots` [T] of page records.

    pages: uint8 [num_blocks, HK, page_bytes] (records.py). Slot s is token `s % block_size` of page `s // block_size`;
    tokens with a negative slot are skipped. Rows go through their map, then are divided by the per-tensor scale. key_offset
    [buckets, HK or 1, D] float32: a mapped key at position p is less row p // 64 of it, or the last; positions [T]. midpoints:
    between the levels above zero of codebook keys. warps: of a block, instead of what suits the size. Nothing is checked
    here: `unsupported` says what the kernel takes.
    """
    T, HK, D = key.shape
    if T == 0:
        return
    if warps is None:
        warps = 1 if T * HK <= 2048 else 2  # one block for each SM as long as there are few
    shifted = key_offset is not None
    factors = [0.0 if m is None else m.factor for m in (key_map, value_map)]
    config = Config(
        key_codec,
        value_codec,
        D,
        block_size,
        key.dtype == torch.bfloat16,
        slots.dtype == torch.int64,
        *factors,
        key_scale != 1.0,
        value_scale != 1.0,
        shifted,
        shifted and positions.dtype == torch.int64,
        midpoints,
        warps,
    )
    pointer = lambda t: (0 if t is None else t.data_ptr(), ctypes.c_void_p)
    maps = [pointer(None if m is None else m.signs) for m in (key_map, value_map)]
    offset = (0, 0, 0) if not shifted else (D * key_offset.shape[1], D if key_offset.shape[1] > 1 else 0, key_offset.shape[0])
    strides = [(n, ctypes.c_longlong) for n in (*key.stride()[:2], *value.stride()[:2], *pages.stride()[:2], *offset[:2])]
    scales = [(scale, ctypes.c_float) for scale in (key_scale, value_scale)]
    with torch.cuda.device(key.device):
        kernel(config, key.device.index or 0)(
            (2 * -(-T // (8 * warps)), HK, 1),
            [
                pointer(key),
                pointer(value),
                pointer(pages),
                pointer(slots),
                *maps,
                pointer(key_offset),
                pointer(positions if shifted else None),
                *strides,
                (offset[2], ctypes.c_int),
                (T, ctypes.c_int),
                *scales,
            ],
        )
