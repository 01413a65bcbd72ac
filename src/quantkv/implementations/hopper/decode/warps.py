"""The configurations of decode.cu: what one is compiled for, and which suits a call."""

from __future__ import annotations

from ctypes import sizeof
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from ....format import Codec
from ..codec import HopperCodec
from ..host.launch import SHARED_BYTES, arguments
from ..host.nvrtc import compile_cubin
from ..host.operands import HADAMARDS
from ..host.records import page_bytes, row_macros

T = TypeVar("T")
TILE = 16  # tokens of a tile: rows of an mma
MAX_TILES = 1024  # of one accumulator: beyond 16k tokens it drifts, as the tensor core truncates what it adds
INTEGER_PACKED_ROWS = 4  # that share products with keys by integers; more take as long by fp16, or longer
EXACT_TILES = 8  # of a sequence that the combine kernel attends to itself, at most
LARGEST_CLUSTER = 16  # blocks; a device that holds too few clusters of so many at once is given smaller ones
BARRIER_BYTES = 8  # of a warp: in which (sequence, kv head) its run began, and ended
COMBINE_PACKED_ROWS, COMBINE_WARPS = 4, 8  # packed query rows of a block of combine_kernel; warps of a block of combine_one_kernel
# Of an invariant cut (`Sequences.partials`): `partials_first` partials or fewer, of PARTIAL_LEAST tiles or more; twice as many where these
# are no shorter; and twice as many again, and so on, where they would be longer than PARTIAL_MOST, until one sequence has enough for all
# warps. Shorter partials balance better; each costs a softmax that begins anew and outputs that are combined. Of a consumer warpgroup all
# this is in KV tiles.
PARTIAL_LEAST, PARTIAL_MOST, PARTIALS_ENOUGH = 10, 44, 1024


@dataclass(frozen=True)
class CallShape:
    """What of a call's segment decides how it is read. group: query heads of a kv head. block_size: tokens of a page. record_bytes:
    bytes from one head's page record to the next. packed_rows: packed query rows of a kv head, or of a configuration, those that a block
    serves. key_map, value_map: `KernelMap.kind`."""

    key: Codec
    value: Codec
    head_size: int
    head_size_v: int
    group: int
    kv_heads: int
    block_size: int
    record_bytes: int
    bf16: bool
    packed_rows: int
    softcap: bool = False
    key_map: str = "NO_MAP"  # or HADAMARD, EVENED (the same with steps) or MATRIX
    value_map: str = "NO_MAP"
    key_mean: bool = False

    def config(self, kind: type[T], packed_rows: int, **chosen) -> T:
        """A configuration of some kind for it, of which a block serves so many packed query rows."""
        shape = {field.name: getattr(self, field.name) for field in fields(CallShape)}
        return kind(**shape | dict(packed_rows=packed_rows) | chosen)


@dataclass(frozen=True)
class DecodeConfig(CallShape):
    """What one compiled kernel is made for. by_integers: products with keys are of 8-bit integers."""

    ranges: bool = False  # segments with key_start or key_range
    several_decodes: bool = False  # other segments have decode kernels, which overlap by programmatic dependent launch
    segments: int = 1  # that are combined
    mapped_segments: int = 1  # of them: those whose values have the map, or all of them where none has one
    chunked: bool = False  # windows
    invariant: bool = False  # the cut of a sequence is its own
    scaled: bool = False  # values without a map have a per-tensor scale
    pdl_after_write: bool = False  # and the write of the queries' own tokens, right behind which it is launched
    partial_capacity: int = 0  # bytes of shared memory of a block for the partials where the call is unsplit and the cut invariant
    unsplit: bool = False  # the results of a sequence and kv head are its warps' own: no kernel combines them
    either: bool = False  # that, or not, as the host says or the lengths have it when the kernel reads them
    by_integers: bool = False
    partials_first: int = 6  # of an invariant cut: 6 or 8, as the warps of a multiprocessor are 12 or 8
    exact: int = 0  # tokens of a page of the segment that the combine kernel attends to itself; 0: there is none
    warps: int = 8
    blocks_per_sm: int = 1
    tiles_per_step: int = 1
    max_stages: int = 4

    @property
    def source(self) -> Path:
        """The file of the kernel, which has its name."""
        return Path(__file__).with_name("decode.cu")

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Whose snippets it is compiled with."""
        return self.key, self.value

    @property
    def worker_warps(self) -> int:
        """Warps that share a run of tiles."""
        return 1

    @property
    def workers(self) -> int:
        """Workers of a block: each has a run of tiles."""
        return self.warps // self.worker_warps

    def runs(self, workers: int, seq_heads: int) -> int:
        """How many of so many workers are given a run of tiles; seq_heads: (sequence, kv head) pairs that have some."""
        return workers

    @property
    def with_more_warps(self) -> DecodeConfig | None:
        """The same with 16 warps, where 128 registers a thread are enough and shared memory is; usually they are not faster."""
        more = replace(self, warps=16)
        few = self.by_integers and max(self.key_dimensions, self.head_size_v) <= 128 and self.warps == 12
        return more if few and more.stages == self.stages else None

    @property
    def with_fewer_warps(self) -> DecodeConfig | None:
        """The same with 12 warps in place of 16; with 8 in place of 12, where the cut is invariant: tiles take longer, but partials of
        an unsplit call stay in shared memory."""
        if self.warps == 16:
            return replace(self, warps=12)
        return replace(self, warps=8) if self.invariant and self.warps == 12 and self.worker_warps == 1 else None

    @property
    def partial_least(self) -> int:
        """Tiles, or a consumer warpgroup's KV tiles, of a partial of an invariant cut, at least, where a sequence has as many."""
        return -(-PARTIAL_LEAST // self.worker_warps)

    def partials(self, tokens: int) -> int:
        """Partials of a sequence and kv head with so many tokens, or fewer, at most, where the cut is invariant."""
        line = -(-tokens // (TILE * self.worker_warps))
        first, enough, longest = self.partials_first, PARTIALS_ENOUGH // self.worker_warps, max(MAX_TILES // self.worker_warps, 1)
        n = max(1, min(line // self.partial_least, first))
        while n >= first:
            long = line >= 2 * n * self.partial_least if n == first else line > n * PARTIAL_MOST and n * self.kv_heads < enough
            if not long and line <= n * longest:
                break
            n *= 2
        return n

    @cached_property
    def key_half(self) -> HopperCodec:
        """What Hopper's kernels need of K's codec."""
        return self.key.hopper()

    @property
    def packed_row_tiles(self) -> int:
        """Tiles of 8 packed query rows, the last of which may be half full."""
        return -(-self.packed_rows // 8)

    @property
    def key_dimensions(self) -> int:
        """Dimensions of a key as it is unpacked."""
        return self.key_half.dimensions(self.head_size)

    @property
    def table_bytes(self) -> int:
        """Shared memory of a block for tables: the keys', and the values' at VALUE_TABLE_AT of lanes.cuh, unless it is the same."""
        key, value = self.key_table_bytes, self.value.hopper()
        if not value.values_by_table or self.value == self.key:
            return key
        return -(-key // (1 << 16)) * (1 << 16) + value.table_bytes

    @property
    def key_table_bytes(self) -> int:
        """Bytes of the keys' table: integers need none."""
        return 0 if self.by_integers else self.key_half.table_bytes

    @property
    def tile_bytes(self) -> int:
        """Bytes of K and V of one tile of a kv head, metadata included."""
        return page_bytes(self.key, self.value, self.head_size, self.head_size_v, TILE)

    @property
    def ring_capacity(self) -> int:
        """Shared memory of a warp for its ring."""
        per_warp = (SHARED_BYTES // self.blocks_per_sm - 1024 - self.table_bytes) // self.warps
        return per_warp - self.beside_ring - self.mapped_bytes

    @property
    def stages(self) -> int:
        """Tiles that a warp's ring of copies holds."""
        return min(self.ring_capacity // self.tile_bytes, self.max_stages)

    @property
    def combine_sequences(self) -> int:
        """Sequences of a block of combine_kernel, which share a matrix."""
        return 1 if self.value_map != "MATRIX" else 4 if self.head_size_v <= 256 else 2  # as shared memory allows

    @property
    def combiners_vary(self) -> bool:
        """Whether combine_one_kernel may have fewer warps than COMBINE_WARPS."""
        return self.segments == 1 and not self.exact and not self.invariant and self.value_map != "MATRIX"

    @property
    def worker_bytes(self) -> int:
        """Shared memory of a warp: as MAPPED_AT in ring.cuh, and mapped queries."""
        ring = self.stages * self.tile_bytes + self.beside_ring
        return max(ring, self.packed_rows * self.partial_bytes) + self.mapped_bytes

    @property
    def partial_bytes(self) -> int:
        """Bytes of one packed query row of a partial: fp16 outputs, the log-sum-exp and a factor, padded to 16 bytes."""
        return 2 * self.head_size_v + 16

    @property
    def partials_at_once(self) -> int:
        """Partials of a row that a warp loads together to combine them."""
        pairs = -(-self.head_size_v // 64)
        return 16 // (4 if self.value_map in HADAMARDS and pairs == 3 else pairs)

    @property
    def score_bytes(self) -> int:
        """Shared memory of a warp for the scores of key means."""
        return 4 * TILE * 8 * self.packed_row_tiles if self.key_mean else 0

    @property
    def beside_ring(self) -> int:
        """Shared memory of a warp that its ring cannot have: scores of key means, spilled queries."""
        return self.score_bytes + self.spilled_bytes

    @property
    def spilled_tiles(self) -> int:
        """Tiles of packed query rows, as they are spilled: one, or in pairs."""
        return self.packed_row_tiles + (self.packed_row_tiles % 2 if self.packed_row_tiles > 1 else 0)

    @property
    def query_bytes(self) -> int:
        """Bytes of the queries of a warp, 2 a number."""
        return 2 * self.key_dimensions * 8 * self.packed_row_tiles

    @property
    def spilled_bytes(self) -> int:
        """Shared memory of a warp for queries that are spilled from its registers."""
        if self.mapped_bytes:
            return 0  # they stay there
        spilled = self.head_size > 256 or (self.packed_row_tiles > 1 and self.packed_row_tiles * self.head_size > 128)
        return 16 * self.key_dimensions * self.spilled_tiles if spilled else 0

    @property
    def mapped_bytes(self) -> int:
        """Shared memory of a warp where queries are put together: under a matrix, or BY_CHUNKS as in linear.cuh."""
        if self.key_map in HADAMARDS and (self.head_size & (self.head_size - 1) or self.key_dimensions > self.head_size):
            return 16 * self.key_dimensions * self.spilled_tiles
        return 2 * self.query_bytes if self.key_map == "MATRIX" else 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, in all. No two blocks are to share a multiprocessor while another has none, which those of a cluster
        would where registers are few: so each takes more than half."""
        own = self.table_bytes + self.workers * (self.worker_bytes + BARRIER_BYTES)
        used = own + (self.inbox_bytes or (self.partial_capacity and 16 + self.partial_capacity))
        return max(used, SHARED_BYTES // 2 + 1024) if self.blocks_per_sm == 1 else used

    @property
    def inbox_bytes(self) -> int:
        """Shared memory of a block for what the others of its cluster send it, and its counter."""
        return 32 + (self.packed_rows + LARGEST_CLUSTER) * self.partial_bytes if self.unsplit and not self.invariant else 0

    def macros(self) -> dict[str, object]:
        """What the kernel is compiled with: the numbers that host and device share."""
        key = self.key_half
        return dict(
            **row_macros(self.key, self.value, self.head_size, self.head_size_v), KEY_DIMENSIONS=self.key_dimensions, GROUP=self.group,
            KV_HEADS=self.kv_heads, BLOCK_SIZE=self.block_size, RECORD_BYTES=self.record_bytes, KEY_HALF=key.half,
            KEY_ODD_UNIT=key.odd_unit, KEY_TABLE_BYTES=self.key_table_bytes, TABLES_BYTES=self.table_bytes, **self._maps(),
            KEY_MEAN=int(self.key_mean), QUERY_BF16=int(self.bf16), SOFTCAP=int(self.softcap),
            RANGES=int(self.ranges), SEVERAL_DECODES=int(self.several_decodes), SEGMENTS=self.segments,
            MAPPED_SEGMENTS=self.mapped_segments,
            PDL_AFTER_WRITE=int(self.pdl_after_write), UNSPLIT=int(self.unsplit), EITHER=int(self.either),
            LARGEST_CLUSTER=LARGEST_CLUSTER,
            INBOX_BYTES=self.inbox_bytes, CHUNKED=int(self.chunked), INVARIANT=int(self.invariant), SCALED=int(self.scaled),
            PARTIALS_FIRST=self.partials_first, PARTIAL_LEAST=self.partial_least, PARTIAL_MOST=PARTIAL_MOST,
            PARTIALS_ENOUGH=PARTIALS_ENOUGH // self.worker_warps, PARTIALS_AT_ONCE=self.partials_at_once,
            EXACT=self.exact, PACKED_ROWS=self.packed_rows, BY_INTEGERS=int(self.by_integers), WARPS=self.warps,
            WORKER_WARPS=self.worker_warps,
            BLOCKS_PER_SM=self.blocks_per_sm, STAGES=self.stages, TILES_PER_STEP=self.tiles_per_step, MAX_TILES=MAX_TILES, TILE=TILE,
            WORKER_BYTES=self.worker_bytes, BARRIER_BYTES=BARRIER_BYTES, PARTIAL_BYTES=self.partial_bytes,
            COMBINE_PACKED_ROWS=COMBINE_PACKED_ROWS, COMBINE_SEQUENCES=self.combine_sequences, COMBINE_WARPS=COMBINE_WARPS,
            COMBINERS_VARY=int(self.combiners_vary),
            ARGUMENT_BYTES=sizeof(arguments("AttendArguments")),
        )  # fmt: skip

    def _maps(self) -> dict[str, object]:
        """Which maps both sides have. EVENED: a Hadamard matrix behind steps in place of signs."""
        kinds = dict(KEY=self.key_map, VALUE=self.value_map)
        maps = {f"{side}_MAP": "HADAMARD" if kind in HADAMARDS else kind for side, kind in kinds.items()}
        return maps | {f"{side}_EVENED": int(kind == "EVENED") for side, kind in kinds.items()}

    def cubin(self) -> bytes:
        """Compiled, once."""
        return compile_cubin(self.source, self.macros(), (codec.hopper().source for codec in self.codecs))


def choose(shape: CallShape, capacity: int = 1 << 20) -> DecodeConfig:
    """The configuration for one shape, by what was fastest on an H200 at head sizes 64, 128 and 256; others are taken as the next larger of
    these, and 512 as what fills the registers.

    More warps hide latency until registers spill (255 for each of 8 warps, 168 of 12, 128 of 16), and so do two tiles a step,
    whose chains of products are independent; little work (capacity: tiles that may be read) is cut among fewer. Keys and values of
    2 bits, which are limited by arithmetic, are up to 9 % faster with 16 warps, 4 bits 1 % slower. Of small tiles
    more must be on their way, and of head sizes that are no powers of two more are 1 to 3 % faster. Up to 32 packed query rows share
    what is unpacked, 16 of rows of more than 128 numbers; three tiles of 8 packed query rows take less time than four."""
    key, value = shape.key, shape.value
    codec, head_size = key.hopper(), shape.head_size
    size = max(codec.dimensions(head_size), shape.head_size_v)
    most = 1 if size > 256 else 2 if size > 128 or shape.key_map == "MATRIX" else 4
    packed_row_tiles = min(-(-shape.packed_rows // 8), most)
    whole = codec.dimensions(head_size) % 32 == 0  # a product takes so many
    signs = shape.key_map in ("NO_MAP", "HADAMARD") and not shape.key_mean  # all that is done to a query beside Hadamard matrices
    by_integers = codec.integers and whole and signs and shape.packed_rows <= INTEGER_PACKED_ROWS
    packed_rows = min(4 * -(-shape.packed_rows // 4), 8 * packed_row_tiles)
    if size > 256 or packed_row_tiles > 2:
        chosen = dict(warps=8, max_stages=3)
    else:
        few = packed_row_tiles * size <= 128
        warps = min(12, codec.warps) if few and capacity > 1 << 14 else 8
        if warps == 12 and by_integers and key.row.code_bits + value.row.code_bits <= 4:
            warps = 16
        small = few and key.row.code_bits * head_size + value.row.code_bits * shape.head_size_v <= (256 if warps == 16 else 512)
        chosen = dict(warps=warps, tiles_per_step=2, max_stages=6 if small or head_size & head_size - 1 else 4)
    config = shape.config(DecodeConfig, packed_rows, by_integers=by_integers, **chosen)
    if size > 128 and packed_row_tiles > 1 and config.stages < 4:
        config = replace(config, packed_rows=8)  # two tiles a step of few packed query rows are faster than one of many
    if config.stages < 4:
        config = replace(config, tiles_per_step=1)
    least = 3 if size <= 256 else 2  # one tile of such rows on its way is enough
    while (
        config.stages < least or config.blocks_per_sm * config.shared_bytes > SHARED_BYTES
    ):  # large rows, a table, mapped queries, partials
        config = replace(config, warps=config.warps - 2)
    return config
