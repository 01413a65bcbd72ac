"""What a kernel sees of its arguments: pointers with strides as NamedTuples, and what it is compiled for as frozen dataclasses.

Integers inside a NamedTuple are specialised by Triton, so only what outlives a step is in one; per-step counts are plain arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """`[T, heads, D]`. Strides in elements."""

    ptr: Any
    stride_token: Any
    stride_head: Any


class Pages(NamedTuple):
    """K or V of a paged cache, as words and metadata of its rows."""

    words: Any  # [num_blocks, block_size, HK, words]
    stride_page: Any  # in words
    stride_slot: Any
    stride_head: Any
    meta: Any  # [num_blocks, block_size, HK, fields], or None
    meta_page: Any  # in elements
    meta_slot: Any
    meta_head: Any
    table: Any  # the codec's numbers, float32, or None


class Map(NamedTuple):
    """`y = matrix (x - offset[position // 64])` for each kv head."""

    matrix: Any = None  # [HK or 1, D, D]: y[out] = sum_in matrix[out, in] x[in]
    stride_head: Any = 0
    offset: Any = None  # [buckets, HK or 1, D] float32
    offset_bucket: Any = 0
    offset_head: Any = 0
    num_buckets: Any = 0


class Batch(NamedTuple):
    """Which sequence each query belongs to, and where the sequence's keys are."""

    query_start: Any  # [S + 1]
    seq_lens: Any  # [S]
    block_table: Any  # [S, pages]
    stride_table: Any


class Extras(NamedTuple):
    """Tensors of options; None where `Features` says that there is none."""

    causal: Any = None  # [S] uint8
    alibi_slopes: Any = None  # [HQ]
    qq_bias: Any = None  # [Q, Q]
    qq_stride: Any = 0
    qq_rows: Any = 0
    qq_cols: Any = 0
    prefix_ranges: Any = None  # [S, R, 2]
    num_ranges: Any = 0
    key_start: Any = None  # [S]
    key_range: Any = None  # [S, 2]


def _cache_key(value: Any) -> str:
    key = getattr(value, "cache_key", None)
    return str(value) if key is None else key


class _Constant:
    """A dataclass that a kernel takes as one constexpr. Triton's disk cache knows it by `cache_key`: its numbers, and the source of
    its device functions, so that an edit of one is not answered with the old kernel."""

    @property
    def cache_key(self) -> str:
        return "|".join(f"{f.name}={_cache_key(getattr(self, f.name))}" for f in fields(self))


@dataclass(frozen=True)
class DeviceCodec(_Constant):
    """The Triton half of a codec.

    A row of D values is `D / planes` words; word w holds dimensions `planes w .. planes w + planes - 1`, one of each plane.

    planes: values of a word.
    encode: (x, real, table, PLAN) -> words, meta. x: tuple of planes `[T, W]` float32, zero where not `real [W]`; words `[T, W]`,
        meta a tuple of `[T]`, one for each field.
    decode: (words, meta, table, PLAN, TURNED) -> planes, affine. words `[N, W]`, or `[W, N]` if TURNED, zero beyond the row's
        columns; PLAN is the `RowPlan`; planes a tuple of that shape and of dtype `operand`; affine `()`, `(scale,)` or
        `(scale, bias)` of `[N]` float32. Planes that are not turned may be V's, and should be centred on zero: tensor cores
        truncate as they add, and an uncentred sum drifts.
    word_bytes: bytes of a word; a word of 3 is read as three bytes into an int32.
    num_meta: fields beside a row.
    operand: dtype of what `decode` returns.
    exponents: plane p comes out of `decode` times `2**-exponents[p]`; all 0 if empty.
    ptx: the same codec with inline PTX in `decode`, or None; ptx_capability: what it needs, 10 x major + minor.
    """

    planes: int
    encode: Any
    decode: Any
    word_bytes: int = 2
    num_meta: int = 0
    operand: Any = tl.float16
    exponents: tuple[int, ...] = ()
    ptx: DeviceCodec | None = None
    ptx_capability: int = 80

    def factor(self, plane: int) -> float:
        """What plane `plane` must be multiplied by after `decode`."""
        return 2.0 ** self.exponents[plane] if self.exponents else 1.0


@dataclass(frozen=True)
class RowPlan(_Constant):
    """How rows of one side are treated: the codec and what stands around it."""

    codec: DeviceCodec
    head_size: int
    mapped: bool = False
    offset: bool = False
    rounded: bool = False  # the mapped row is rounded to the input's dtype before it is encoded
    scaled: bool = False  # a per-tensor scale other than 1

    @property
    def planes(self) -> int:
        return self.codec.planes

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return 8 * self.codec.word_bytes // self.codec.planes

    @property
    def columns(self) -> int:
        """Words of a row."""
        return self.head_size // self.codec.planes

    @property
    def width(self) -> int:
        """Words of a tile's row: a power of two that a dot can take."""
        return max(16, triton.next_power_of_2(self.columns))

    @property
    def factors(self) -> tuple[float, ...]:
        return tuple(self.codec.factor(p) for p in range(self.codec.planes))


@dataclass(frozen=True)
class Features(_Constant):
    """What attend is compiled for. Sizes that a model fixes (window, softcap) are constants; per-batch data is in `Extras`."""

    num_kv_heads: int
    causal: int = 1  # 0: no, 1: yes, 2: per sequence
    window: int = 0
    chunk: int = 0  # size of a chunk; 0: no chunked lookback
    chunk_lookback: int = 0
    softcap: float = 0.0
    alibi: int = 0  # 1: linear, 2: square root
    qq_bias: bool = False
    prefix: bool = False
    prefix_clamped: bool = False
    key_start: bool = False
    key_range: bool = False
    single: bool = False  # no sequence has more than one query
    one_block: bool = False  # no sequence has more queries than a tile: the tile's index is the sequence's
    joined: bool = False  # one dot over all planes instead of one a plane: large tiles
    split_tiles: int = 0  # > 0: each split has so many tiles of keys, whatever else is in the batch
    precision: str = "ieee"  # of float32 dots
