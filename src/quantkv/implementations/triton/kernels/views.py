"""What a kernel sees of its arguments: pointers with strides as NamedTuples, and what it is compiled for as frozen dataclasses.

Triton specialises integers inside a NamedTuple, so only what outlives a step is in one; per-step counts are plain arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .ptx import Program


class RowsView(NamedTuple):
    """`[T, heads, D]`. Strides in elements."""

    ptr: Any
    stride_token: Any
    stride_head: Any


class PagesView(NamedTuple):
    """K or V of a paged cache, as words and metadata of its rows."""

    words: Any  # [num_blocks, block_size, HK, words]
    stride_head: Any  # in words
    meta: Any  # [num_blocks, block_size, HK, fields], or None
    meta_head: Any  # in elements
    table: Any  # the codec's numbers, float32, or None


class MapView(NamedTuple):
    """`y = matrix (x - key_mean[position // 64])` for each kv head."""

    matrix: Any = None  # [HK or 1, D, D]: y[out] = sum_in matrix[out, in] x[in]; or a diagonal [HK or 1, D] beside Hadamard matrices
    stride_head: Any = 0
    key_mean: Any = None  # [buckets, HK or 1, D] float32
    key_mean_bucket: Any = 0
    key_mean_head: Any = 0
    num_buckets: Any = 0
    feedback: Any = None  # of a Hessian, [HK or 1, D, D] float32
    feedback_head: Any = 0
    gain: Any = None  # [HK or 1, D] float32
    gain_head: Any = 0


class BatchView(NamedTuple):
    """Which sequence each query belongs to, and where the sequence's keys are."""

    query_start: Any  # [S + 1]
    seq_lens: Any  # [S]
    block_table: Any  # [S, pages]
    stride_table: Any


class Extras(NamedTuple):
    """Tensors of options, None where `Features` says that there is none; and what a segment's values are multiplied by."""

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
    v_factor: Any = 1.0


class _Constant:
    """A dataclass that a kernel takes as one constexpr. Triton's disk cache knows it by `cache_key`: its numbers, and the
    source of its device functions, so that an edit of one is not answered with the old kernel."""

    @property
    def cache_key(self) -> str:
        values = [getattr(self, f.name) for f in fields(self) if f.compare]
        return "|".join(str(getattr(v, "cache_key", v)) for v in values)


@dataclass(frozen=True)
class TritonCodec(_Constant):
    """The Triton codec of a codec.

    A row of D values is `D / planes` words; word w holds dimensions `planes w .. planes w + planes - 1`, one of each plane.

    planes: values of a word.
    encode: (x, real, table, PLAN) -> words, meta. x: tuple of planes `[T, W]` float32, zero where not `real [W]`; words
        `[T, W]`, meta a tuple of `[T]`, one for each field. PLAN is the `RowPlan`. None: no kernel writes rows.
    unpack: (words, table, PLAN) -> tuple of planes of dtype `operand`. words `[N, W]` or `[W, N]`, zero beyond the row's columns.
        Planes should be centred on zero: tensor cores truncate as they add, and an uncentred sum drifts.
    affine: (planes, meta, PLAN, TRANSPOSED) -> `()`, `(scale,)` or `(scale, bias)` of `[N]` float32: what planes, `[W, N]` if TRANSPOSED,
        stand for. meta: a tuple of `[N]` float32. None: it is the metadata as it is.
    lean: the same rows with fewer instructions, for tiles of few queries. None: nothing can be spared.
    coarse: of such a codec, that it keeps a score to 8 bits, no more: bfloat16 queries alone are read against it.
    zero: of such a codec, (meta, PLAN) -> `[N]` float32, what planes times their exponents are too large by, before their scale: it is
        taken off the sums of a tile, and not off every number. None: planes are centred.
    word_bytes: bytes of a word, which an integer of 8, 16, 32 or 64 bits holds; of 3 bytes an int32 whose highest byte may hold anything.
    overlap: > 0: `unpack` gets int32 words of which the lowest `overlap` bits are the highest of the word before, 0 for the first of every
        `chain` words, and the others the word's own, of at most three bytes.
    num_meta: fields beside a row.
    table: head_size -> numbers (1-D) that encode and unpack find, in float32, at the pointer `table`; None: they take none.
    operand: dtype of the planes.
    warps: of a multiprocessor, as many as there are registers for where rows of it are decoded.
    exact: (unpack, dtype) that give the planes to float32 queries where `operand` rounds them; None: it holds them exactly.
    floats: planes may be inf or NaN.
    exponents: plane p comes out of `unpack` times `2**-exponents[p]`; all 0 if empty.
    program: a `ptx.Program` that does what `unpack` does to words of 2 to 4 bytes, for the GPUs that take it, or None.
    """

    planes: int
    encode: Any
    unpack: Any
    affine: Any = None
    word_bytes: int = 2
    overlap: int = 0
    chain: int = 0
    num_meta: int = 0
    operand: Any = tl.float16
    exponents: tuple[int, ...] = ()
    program: Program | None = None
    warps: int = 64
    exact: Any = None
    lean: TritonCodec | None = None
    coarse: bool = False
    zero: Any = None
    floats: bool = False
    table: Any = field(default=None, compare=False)  # no kernel is compiled for it

    @property
    def ptx(self) -> str:
        """Its inline PTX; "" where it has none."""
        return "" if self.program is None else self.program.text

    @property
    def registers(self) -> str:
        """What holds two words, as inline PTX names it."""
        return "r" if self.word_bytes <= 2 else "r,r"

    @property
    def bytewise(self) -> bool:
        """Whether words are stored byte by byte, and read so unless they can be read from longer ones."""
        return self.word_bytes not in (1, 2, 4, 8)


@dataclass(frozen=True)
class RowPlan(_Constant):
    """How rows of one side are treated: the codec and what stands around it."""

    codec: TritonCodec
    head_size: int
    page_words: int  # words from page to page
    slot_words: int  # and from slot to slot
    page_meta: int  # elements of metadata
    slot_meta: int
    mapped: bool = False
    key_mean: bool = False
    signed: bool = False  # rows with a negative scale were stored without the key mean
    rounded: bool = False  # the mapped row is rounded to the input's dtype before it is encoded
    scaled: bool = False  # a per-tensor scale other than 1
    cubic: tuple[float, float] | None = None  # rows are rounded by a Hessian, to these levels: see `Codec.cubic`
    align_meta: int = 1  # metadata of a page and kv head likewise, in elements
    align: int = 1  # rows begin at multiples of so many words: what Triton cannot see where strides are no multiples of 16
    hadamard: int = 0  # size of the Hadamard matrices, where a view of a map has the diagonal before them and no matrix

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
        """What each plane must be multiplied by once it is unpacked."""
        exponents = self.codec.exponents if self.codec.program is None else self.codec.program.exponents
        return tuple(2.0**e for e in exponents) or (1.0,) * self.codec.planes


@dataclass(frozen=True)
class LatentTile(_Constant):
    """What a program of the kernel over latents reads and holds.

    group: heads of a tile, a kv head's over `parts`. page: tokens of a page. block_m: rows, queries x heads. block_n: keys of a tile."""

    group: int
    parts: int
    page: int
    block_m: int
    block_n: int


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
    prefix_window: int = 0  # what clamps prefix ranges; 0: nothing
    key_start: bool = False
    key_range: bool = False
    single: bool = False  # no sequence has more than one query
    one_block: bool = False  # no sequence has more queries than a tile: the tile's index is the sequence's
    key_axis: int = 1  # of a tile of scores: 0 where keys run down and queries, few, across
    by_page: bool = False  # pages are looked up once a page, not once a key
    joined: bool = False  # one dot over all planes instead of one a plane: large tiles
    one_loop: bool = False  # all tiles are masked, those too that every query sees whole
    split_tiles: int = 0  # > 0: each split has so many tiles of keys, whatever else is in the batch
    precision: str = "ieee"  # of float32 dots
