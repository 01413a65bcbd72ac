"""The configurations of decode_wgmma.cu, and whether it or decode.cu serves a call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from .. import geometry
from ..host.launch import SHARED_BYTES
from . import warps
from .warps import TILE, CallShape, DecodeConfig

MOST_QUERIES = 16  # of a sequence
MOST_PACKED_ROWS = 128  # of a kv head: its query heads times the queries of a sequence
MANY_PACKED_ROWS = 17  # from so many on a consumer warpgroup shares what it unpacks
WORKER_WARPS = 4  # warps
PACKED_ROW_TILES = (1, 2, 3, 4, 6, 8)  # that wgmma is written for


def unserved(group: int, queries: int, most: int = MOST_PACKED_ROWS) -> str | None:
    """Why nobody serves so many query heads of a kv head, and queries of a sequence, at most MOST_QUERIES of them. most: packed query rows
    that share a kv head."""
    if group * queries > most:
        return f"{group} query heads of a kv head, max_query_len={queries}: {group * queries} share it, at most {most} do"
    return None


@dataclass(frozen=True)
class WgmmaConfig(DecodeConfig):
    """What one compiled kernel is made for where a consumer warpgroup has a run of tiles."""

    @property
    def source(self) -> Path:
        """The file of the kernel, which has its name."""
        return Path(__file__).with_name("decode_wgmma.cu")

    @property
    def worker_warps(self) -> int:
        """Warps that share a run of KV tiles."""
        return WORKER_WARPS

    @property
    def ring_capacity(self) -> int:
        """Shared memory of a consumer warpgroup for its ring."""
        per_warpgroup = (SHARED_BYTES - 1024 - self.table_bytes) // self.workers // 1024 * 1024
        return per_warpgroup - self.beside_ring

    @property
    def stages(self) -> int:
        """KV tiles that a ring holds."""
        return min(self.ring_capacity // (WORKER_WARPS * self.tile_bytes), self.max_stages)

    @property
    def worker_bytes(self) -> int:
        """Shared memory of a consumer warpgroup, as WORKER_BYTES in consumer.cuh."""
        return -(-(self.stages * WORKER_WARPS * self.tile_bytes + self.beside_ring) // 1024) * 1024

    @property
    def beside_ring(self) -> int:
        """Shared memory of a consumer warpgroup that its ring cannot have, as in consumer.cuh: matrices of 128 bytes a packed query row
        (queries, their sums, two of weights); what warps tell each other; zero points; sums; scores of key means."""
        packed_rows = self.packed_rows
        matrices = (-(-self.key_dimensions // 64) + 3) * 128 * packed_rows
        return matrices + WORKER_WARPS * (2 * packed_rows + 4) * 4 + 4 * WORKER_WARPS * TILE + 4 * packed_rows + self.score_bytes


def choose(shape: CallShape, capacity: int = 1 << 20) -> DecodeConfig:
    """The configuration for one shape, of either kernel. capacity: as of `warps.choose`.

    Three consumer warpgroups have 168 registers a thread, two have 255. On an H200 a warp alone is faster up to 16 packed query rows
    where it takes all of them together, else up to 12."""
    size, packed_rows = max(shape.key.hopper().dimensions(shape.head_size), shape.head_size_v), shape.packed_rows
    alone = warps.choose(shape, capacity)
    few = packed_rows < MANY_PACKED_ROWS and (alone.packed_rows >= packed_rows or packed_rows < MANY_PACKED_ROWS - 4)
    if few or not geometry.is_for_wgmma(shape.value, shape.head_size, shape.head_size_v):
        return alone
    most = 4 if size > 128 else 8  # tiles of a block, as registers allow
    blocks = -(-packed_rows // (8 * most))
    packed_row_tiles = next(n for n in PACKED_ROW_TILES if 8 * n * blocks >= packed_rows)
    warpgroups = 1 if capacity <= 1 << 10 else 2 if capacity <= 1 << 12 or packed_row_tiles * size > 512 else 3  # little work is spread
    config = shape.config(WgmmaConfig, 8 * packed_row_tiles, warps=WORKER_WARPS * warpgroups)
    while config.stages < 3 and config.warps > WORKER_WARPS:
        config = replace(config, warps=config.warps - WORKER_WARPS)
    return config
