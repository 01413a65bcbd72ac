"""How attend cuts its work: tiles, warps and splits. Numbers; nothing is launched here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton

from .kernels.views import TritonCodec
from .launch import INTERPRETED, TRITON_3_4, Target

FEW = 16  # rows of a tile up to which keys run down (`Features.key_axis`); 0: in no tile
SPARED = 64  # rows below which codecs are read by their `lean` codecs; 0: in no tile
KEYS_OF_NARROW_ROWS = 64  # of a tile of few queries, where a row is stored in at most 64 bytes
KEYS_OF_WIDE_ROWS = 32
SHARED_BY_LONG_ROWS = 128 << 10  # bytes of shared memory of a tile of 64 rows of more than 256 numbers: more than some GPUs have
WORDS_OF_HADAMARD = 64  # of a row of keys, up to which queries go through Hadamard matrices that are made in registers
WARPS = 12  # of a multiprocessor: tiles of up to 1,024 numbers of queries leave registers for so many
WARPS_OF_WIDE_TILES = 8
WIDE_NUMBERS = 2  # bytes, from which rows are not read as few queries are: two warps and a mask read 16 bits at the speed of memory
KEYS_OF_SPLIT = 128  # at the least
ROWS_ALONE, SPLITS_OF_ROW = 2, 7  # of a multiprocessor: see `combine_rows`
ROWS_OF_LATENTS = 64  # of a tile, at most
LATENT_TILES = {  # rows of a tile: keys, warps, stages, programs of a multiprocessor at once
    16: (64, 4, 5, 2),
    32: (64, 8, 5, 1),
    64: (32, 8, 5, 1),
}


class Tiling(NamedTuple):
    """How attend cuts its work."""

    block_m: int  # rows of a tile: queries x heads of a group
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int
    resident: int  # programs of a multiprocessor at once
    key_axis: int = 1  # see `Features`
    lean: bool = False  # whether codecs are read by their `lean` codecs
    by_page: bool = False  # whether pages are looked up once a page, not once a key
    parts: int = 1  # tiles that the heads of a kv head are cut into: of latents alone

    @classmethod
    def of(
        cls, group: int, max_query_len: int, head_size: int, row_bytes: int, wide: bool, codecs: Sequence[TritonCodec], target: Target
    ) -> Tiling:
        """head_size, row_bytes: the larger of K's and V's. wide: dots are in float32, which takes small tiles. codecs: of all
        sides. The numbers were measured on an H200 at head size 128, those of few queries worked out from the instructions of its loop."""
        rows = triton.next_power_of_2(group * max_query_len)
        tight = head_size > 256 and _room(target) < SHARED_BY_LONG_ROWS
        if wide:
            block_m = max(16, triton.next_power_of_2(group), min(rows, 16 if tight else 32))
            return cls(block_m, 32 if head_size <= 128 else 16, 4, 1 if tight else 2, 2)
        if target.turns and rows <= FEW and row_bytes < WIDE_NUMBERS * head_size:
            return cls._of_few(rows, triton.next_power_of_2(head_size), row_bytes / head_size, codecs, target)
        block_m = max(16, triton.next_power_of_2(group), min(128 if head_size <= 128 else 32 if tight else 64, rows))
        warps = {16: 1, 32: 2, 64: 4, 128: 8}[block_m] * (1 if head_size <= 128 else 2 if head_size <= 256 else 4)
        block_n, stages = 64 if head_size <= 128 else 32, 1 if tight and row_bytes >= WIDE_NUMBERS * head_size else 3
        if block_m == 16 and head_size <= 128:  # decode: as many bytes in flight as registers and shared memory allow
            if row_bytes > 128:
                warps = 2
            else:
                block_n, stages = 32, 5
        warps = min(warps, 8)
        return cls(block_m, block_n, warps, stages, max(8 // warps, 1), lean=block_m < SPARED, by_page=block_m == 16 and not target.turns)

    @classmethod
    def _of_few(cls, rows: int, width: int, bytes_of_number: float, codecs: Sequence[TritonCodec], target: Target) -> Tiling:
        """A warp for each tile, and as many as there is shared memory for: what one waits for, another uses. Five stages are two buffers,
        since pages are looked up first. Words as long as no integer is take twice their room, and so do those read with the one before."""
        twice = any(codec.bytewise or codec.overlap > 0 for codec in codecs)
        block_m, columns, warps = max(4, rows), max(8, rows), 1 if width <= 256 else 2
        row_bytes = width * bytes_of_number * (2 if twice else 1)
        most = min(WARPS if width * columns <= 1024 else WARPS_OF_WIDE_TILES, *(codec.warps for codec in codecs)) // warps
        fit = lambda keys: int(target.shared // (1024 + 2 * width * columns + 2 * keys * (2 * row_bytes + 8)))
        narrow = row_bytes <= 64 and fit(KEYS_OF_NARROW_ROWS) >= min(most, 8)
        block_n = KEYS_OF_NARROW_ROWS if narrow else KEYS_OF_WIDE_ROWS
        return cls(block_m, block_n, warps, 5, max(1, min(most, fit(block_n))), 0, SPARED > 0, True)

    @classmethod
    def of_latents(cls, group: int, max_query_len: int, width: int, row_bytes: int, wide: bool, masked: bool, target: Target) -> Tiling:
        """Over latents of up to `width` numbers: all heads share them, and a tile holds few rows, whose outputs stay in registers and
        their queries in shared memory. row_bytes: of a stored row. wide: dots are in float32. masked: see `_shared_by_latents`."""
        most = 16 if wide else ROWS_OF_LATENTS if width <= 512 else ROWS_OF_LATENTS // 2
        while True:
            parts = next(n for n in range(1, group + 1) if group % n == 0 and group // n <= most)
            block_m = max(16, triton.next_power_of_2(group // parts), min(most, triton.next_power_of_2(group // parts * max_query_len)))
            if wide:
                return cls(block_m, 16, 4, 2, 1, parts=parts)
            keys, warps, most_stages, resident = LATENT_TILES[block_m]
            for block_n, stages in ((keys, most_stages), (keys, 3), (keys // 2, 3)):
                fit = _room(target) // _shared_by_latents(block_m, block_n, stages, width, row_bytes, masked, target)
                if fit:
                    return cls(block_m, block_n, warps, stages, min(resident, fit), lean=block_m < SPARED, parts=parts)
            if most <= 16:
                return cls(block_m, 16, 4, 2, 1, lean=True, parts=parts)
            most //= 2


def _room(target: Target) -> int:
    """Bytes of shared memory of a multiprocessor; an AMD GPU's has less than a target says."""
    return target.shared if target.ptx or INTERPRETED else 64 << 10


def _shared_by_latents(rows: int, keys: int, stages: int, width: int, row_bytes: int, masked: bool, target: Target) -> int:
    """Bytes of shared memory of a tile over latents, about: its queries, stored rows, of which two stages are one buffer, since pages are
    looked up first (by Triton 3.4 each but one is a buffer), and decoded ones, where tensor cores read them there. masked: later keys are
    hidden, as a lone query of a sequence needs not, so that rows of 16 bits, which need no decoding, are copied before they are values."""
    buffers = stages - 1 if TRITON_3_4 else max(stages // 2, 1)
    copied = (rows >= 64 and target.has_matrix_descriptors) or (masked and row_bytes >= 2 * width)
    decoded = 2 * keys * width if copied else 0
    return 2 * rows * (width + 64) + buffers * keys * row_bytes + decoded + (6 << 10)


def split_count(tiles: int, max_keys: int, tiling: Tiling, target: Target) -> int:
    """Splits of the keys that fill the GPU once, each with some work."""
    least = KEYS_OF_SPLIT if tiling.key_axis == 0 else 4 * tiling.block_n
    return max(1, min(target.processors * tiling.resident // tiles, max_keys // least))


def combine_rows(rows: int, splits: int, target: Target) -> int:
    """Rows of a program of the combine kernel, of so many in all: one, or as many as a product has, which share a matrix. As many programs
    as rows take turns, few programs read the splits of a row one by one: on an H200 a row of a multiprocessor costs as much as 7 splits."""
    return 1 if rows <= (ROWS_ALONE + splits / SPLITS_OF_ROW) * target.processors else 16
