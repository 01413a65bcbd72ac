"""The configurations of decode_wgmma.cu over latents: rows that are keys and, but for their rotated dimensions, values."""

from __future__ import annotations

from dataclasses import dataclass

from ....format import Codec
from ..host.records import page_bytes
from .warps import TILE, CallShape
from .wgmma import PACKED_ROW_TILES, WORKER_WARPS, WgmmaConfig

MOST_PACKED_ROWS = 512  # heads times the queries of a sequence
WHOLE_RUNS = 0.96  # of workers; 64 sequences on 132 multiprocessors have 256 of 264
MOST_TILES = 4  # of 8 packed query rows, of a block: outputs of 512 numbers fill the registers


@dataclass(frozen=True)
class LatentConfig(WgmmaConfig):
    """What one compiled kernel is made for where rows are latents, codec `key` and `value`. rope, rope_size: codec and number of their
    rotated dimensions. keys_at_once, values_at_once: products that are begun together, of 16 numbers of keys or 32 `by_integers`, of 64 of
    values."""

    rope: Codec | None = None
    rope_size: int = 0
    keys_at_once: int = 8
    values_at_once: int = 8

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Whose snippets it is compiled with."""
        return self.key, self.rope

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile, metadata included."""
        return page_bytes(self.key, self.rope, self.head_size, self.rope_size, TILE)

    @property
    def beside_ring(self) -> int:
        """As of other rows, and the queries to rotated dimensions."""
        return super().beside_ring + -(-self.rope_size // 64) * 128 * self.packed_rows

    def runs(self, workers: int, seq_heads: int) -> int:
        """So many that, where sequences are as long as each other, each has whole runs, if hardly fewer than all workers are: one whose run
        ends in another sequence reads queries twice, and leaves two partials."""
        whole = workers - workers % max(seq_heads, 1)
        return whole if whole >= WHOLE_RUNS * workers else workers

    def macros(self) -> dict[str, object]:
        """What the kernel is compiled with."""
        rope = dict(ROPE=self.rope.hopper().type, ROPE_SIZE=self.rope_size)
        at_once = dict(LATENT_KEYS_AT_ONCE=self.keys_at_once, LATENT_VALUES_AT_ONCE=self.values_at_once)
        return super().macros() | rope | at_once


def choose(shape: CallShape, rope: Codec, rope_size: int, capacity: int = 1 << 20) -> LatentConfig:
    """The configuration for one shape; capacity: as of `warps.choose`. By count (notebook/2026-11-25-hopper-latents.md): others
    were not timed.

    A block has as many packed query rows as leave room for two consumer warpgroups, with two KV tiles each: one alone could not hide what
    it waits for. Rows of 16 bits leave none for two: copies of a few tokens are read by one. With more than 16 packed query rows, fewer
    products are begun together, as outputs leave fewer registers. Scores of codes that are integers are products of these, for all numbers
    of heads (notebook/2026-11-29-latents-by-integers.md)."""
    little = capacity <= 1 << 10  # work that is spread

    def config(tiles: int, warpgroups: int) -> LatentConfig:
        at_once = 2 if tiles > 2 else 4 if shape.key.row.code_bits == 16 else 8
        rows = dict(rope=rope, rope_size=rope_size, by_integers=shape.key.hopper().integers)
        given = dict(warps=WORKER_WARPS * warpgroups, keys_at_once=at_once, values_at_once=at_once)
        return shape.config(LatentConfig, 8 * tiles, **rows, **given)

    sizes = ((n, warpgroups) for warpgroups in (2, 1) for n in range(MOST_TILES, 0, -1))
    most, warpgroups = next((n, warpgroups) for n, warpgroups in sizes if config(n, warpgroups).stages >= 2)
    blocks = -(-shape.packed_rows // (8 * most))
    return config(next(n for n in PACKED_ROW_TILES if 8 * n * blocks >= shape.packed_rows), 1 if little else warpgroups)
