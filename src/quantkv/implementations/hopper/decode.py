"""Paged decode and verify on Hopper: chooses a configuration of decode.cu for a call, and launches it."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from .nvrtc import Kernel, compile_cubin
from .records import ROWS, page_bytes, unsuitable

SHARED_BYTES = 227 * 1024  # of one SM
TILE, MAX_TILES = 16, 1024  # as in tiles.cuh
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Side:
    """One side of a format: its C++ type, the distance of the two dimensions that share a register (HALF in unpack.cuh), the
    factor that brings its products to values, what odd registers are worth more than even ones, and the bytes of the table that
    its keys are read by."""

    type: str
    half: int
    gain: float = 1.0
    odd_unit: float = 1.0
    table_bytes: int = 0


KEYS = {
    "int8": Side("Int8", 2, 2.0**24),
    "fp8": Side("E4M3<Meta::scale>", 1),
    "e4m3": Side("E4M3<Meta::none>", 1),
    "int4": Side("Int4<Meta::scale_zero>", 4, 2.0**24, 16.0),
    "int2": Side("Int2", 1, 2.0**24 / 6.62, 1.0, 65536),  # gain: times the head size
    "codebook4": Side("Codebook<4>", 1, table_bytes=65536),
    "codebook3": Side("Codebook<3>", 1, table_bytes=8192),
}
VALUES = {name: KEYS[name] for name in ("int8", "fp8", "int4", "int2")}
VALUES |= {"affine4": Side("Int4<Meta::scale_min>", 4), "affine3": Side("Int3", 1)}


@dataclass(frozen=True)
class Config:
    """What one compiled kernel is made for. `record_bytes`: bytes from one head's page record to the next."""

    key: str
    value: str
    head_size: int
    group: int
    kv_heads: int
    block_size: int
    record_bytes: int
    bf16: bool
    column_tiles: int
    softcap: bool
    key_map: str = "NO_MAP"  # or HADAMARD or MATRIX: `Map.kind`
    value_map: str = "NO_MAP"
    key_offset: bool = False
    warps: int = 8
    blocks_per_sm: int = 1
    tiles_per_step: int = 1
    max_stages: int = 4

    @property
    def tile_bytes(self) -> int:
        return page_bytes(self.key, self.value, self.head_size, TILE)

    @property
    def table_bytes(self) -> int:
        return KEYS[self.key].table_bytes

    @property
    def room(self) -> int:
        """Shared memory of a warp for its ring."""
        per_warp = (SHARED_BYTES // self.blocks_per_sm - 1024 - self.table_bytes) // self.warps
        return per_warp - self.score_bytes - self.parked_bytes - self.mapped_bytes

    @property
    def stages(self) -> int:
        return min(self.room // self.tile_bytes, self.max_stages)

    @property
    def combined(self) -> int:
        """SEQUENCES in combine.cuh."""
        return 4 if self.value_map == "MATRIX" else 1

    @property
    def warp_bytes(self) -> int:
        """Shared memory of a warp: as MAPPED_AT in attend.cuh, and mapped queries."""
        ring = self.stages * self.tile_bytes + self.score_bytes + self.parked_bytes
        return max(ring, 8 * self.column_tiles * piece_bytes(self.head_size)) + self.mapped_bytes

    @property
    def score_bytes(self) -> int:
        return 64 * 8 * self.column_tiles if self.key_offset else 0

    @property
    def query_bytes(self) -> int:
        return 2 * self.head_size * 8 * self.column_tiles

    @property
    def parked_bytes(self) -> int:
        return self.query_bytes if self.column_tiles > 1 and self.column_tiles * self.head_size > 128 else 0

    @property
    def mapped_bytes(self) -> int:
        return 2 * self.query_bytes if self.key_map == "MATRIX" else 0

    @property
    def shared_bytes(self) -> int:
        return self.table_bytes + self.warps * (self.warp_bytes + 8)

    def macros(self) -> dict[str, object]:
        return dict(
            HEAD_SIZE=self.head_size, GROUP=self.group, KV_HEADS=self.kv_heads, BLOCK_SIZE=self.block_size,
            RECORD_BYTES=self.record_bytes, KEY=KEYS[self.key].type, VALUE=VALUES[self.value].type, KEY_MAP=self.key_map,
            KEY_OFFSET=int(self.key_offset), VALUE_MAP=self.value_map,
            QUERY_BF16=int(self.bf16), COLUMN_TILES=self.column_tiles, WARPS=self.warps, BLOCKS_PER_SM=self.blocks_per_sm,
            STAGES=self.stages, WARP_BYTES=self.warp_bytes, TILES_PER_STEP=self.tiles_per_step, SOFTCAP=int(self.softcap),
        )  # fmt: skip


def piece_bytes(head_size: int) -> int:
    """Bytes of one column's partial result: float32 outputs and the log-sum-exp, padded to 16 bytes."""
    return 4 * (head_size + 4)


@cache
def kernels(config: Config, device: int) -> tuple[Kernel, tuple[Kernel, Kernel], int]:
    """The decode kernel, the two combine kernels and the number of SMs, for one configuration and device."""
    from cuda.core import ObjectCode

    with torch.cuda.device(device):
        torch.cuda.current_stream()
        module = ObjectCode.from_cubin(compile_cubin("decode.cu", config.macros()))
        decode = Kernel(module, "decode_kernel", 32 * config.warps, config.shared_bytes, device)
        combine = Kernel(module, "combine_kernel", 128 * config.combined, 0, device), Kernel(module, "combine_one_kernel", 256, 0, device)
    return decode, combine, torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Map:
    """A linear map as the kernels read it, times `gain`."""

    kind: str  # HADAMARD, MATRIX
    data: torch.Tensor | None
    gain: float

    @staticmethod
    def hadamard(signs: torch.Tensor, gain: float) -> Map:
        """`H diag(signs)` for queries, `diag(signs) H` for outputs. Data: the sign bits [1, D] of `signs`, None where none is set."""
        bits = signs.to(torch.bfloat16).view(torch.int16) & -0x8000
        return Map("HADAMARD", bits[None] if bool(bits.any()) else None, gain)

    @staticmethod
    def matrix(matrix: torch.Tensor, key: str | None = None) -> Map:
        """`matrix` [HK or 1, D, D]. A key map's rows and columns come in the order in which keys of format `key` are unpacked;
        a value map (None) keeps its own."""
        dims = torch.arange(matrix.shape[-1]) if key is None else key_order(key, matrix.shape[-1]).flatten()
        return Map("MATRIX", *tiles(matrix[:, dims.to(matrix.device)], key))


@dataclass(frozen=True)
class Offsets:
    """The rows of an offset table as the kernels read them, times `gain`: groups of 16, the last of them all copies of the last row."""

    data: torch.Tensor
    groups: int
    gain: float

    @staticmethod
    def of(mapped: torch.Tensor, key: str) -> Offsets:
        """`mapped` [buckets, HK or 1, D]: A offset, for keys of format `key`."""
        buckets, _, D = mapped.shape
        groups = -(-buckets // 16) + 1
        rows = mapped[torch.arange(16 * groups, device=mapped.device).clamp_max(buckets - 1)].transpose(0, 1)
        rows[..., key_order(key, D)[1::2].flatten().to(rows.device)] *= KEYS[key].odd_unit  # by which the query was divided
        data, gain = tiles(rows, key)
        return Offsets(data, groups, gain)


def key_order(key: str, head_size: int) -> torch.Tensor:
    """[D / 8, 4, 2]: the dimension in register j of lane c, low and high half, as keys are unpacked."""
    half, j = KEYS[key].half, torch.arange(head_size // 8)
    first = j // half * 2 * half + j % half  # KEY::dim(j)
    return first.view(-1, 1, 1) + torch.arange(4).view(4, 1) * (head_size // 4) + torch.arange(2) * half


def tiles(matrix: torch.Tensor, key: str | None) -> tuple[torch.Tensor, float]:
    """`matrix` [H, 16 n, D] as fp16 [H, n, D / 32, 2, 8, 4, 8], in the order in which `multiply` loads it, and the power of two
    that was taken out so that the largest entry is at most 1. Columns in the order of keys of format `key`, or their own."""
    D = matrix.shape[-1]
    if key is not None:
        matrix = matrix[..., key_order(key, D).view(D // 32, 4, 4, 2).transpose(1, 2).flatten().to(matrix.device)]
    gain = 2.0 ** math.ceil(math.log2(max(matrix.abs().max().item(), 2.0**-100)))
    return (matrix / gain).half().unflatten(-1, (D // 32, 4, 8)).unflatten(1, (-1, 2, 8)).permute(0, 1, 4, 2, 3, 5, 6).contiguous(), gain


def kind(map_: Map | None) -> str:
    return "NO_MAP" if map_ is None else map_.kind


def choose(
    key,
    value,
    head_size,
    group,
    kv_heads,
    block_size,
    record_bytes,
    bf16,
    columns,
    softcap,
    key_map="NO_MAP",
    value_map="NO_MAP",
    key_offset=False,
    capacity=1 << 20,
) -> Config:
    """The configuration for one shape, by what was fastest on an H200.

    More warps hide latency until registers spill (255 for each of 8 warps, 168 of 12, 128 of 16), and so do two tiles a step,
    whose chains of products are independent; little work (capacity: tiles that may be read) is cut among fewer. Of small tiles
    more must be on their way. Up to 32 columns share what is unpacked.
    """
    column_tiles = 1 if columns <= 8 or head_size > 128 else 2 if columns <= 16 or key_map == "MATRIX" else 4
    if column_tiles * head_size > 256:
        shape = dict(warps=8, max_stages=3)
    elif column_tiles * head_size > 128:
        shape = dict(warps=8, tiles_per_step=2) if column_tiles == 1 else dict(warps=12)
    else:
        small = (ROWS[key].bits + ROWS[value].bits) * head_size <= 512
        warps = 12 if capacity > 1 << 14 and key != "codebook4" else 8
        shape = dict(warps=warps, tiles_per_step=2, max_stages=6 if small else 4)
    config = Config(
        key,
        value,
        head_size,
        group,
        kv_heads,
        block_size,
        record_bytes,
        bf16,
        column_tiles,
        softcap,
        key_map,
        value_map,
        key_offset,
        **shape,
    )
    if config.stages < 4:
        config = replace(config, tiles_per_step=1)
    while config.stages < 3:  # large rows beside a table or mapped queries
        config = replace(config, warps=config.warps - 2)
    return config


def unsupported(q: torch.Tensor, pages: torch.Tensor, key: str, value: str, block_size: int, queries: int) -> str | None:
    """Why `decode` cannot take these arguments, tensors on a GPU of compute capability 9.0, in words; None where it can."""
    D, HQ, HK = q.shape[-1], q.shape[1], pages.shape[1]
    if key not in KEYS or value not in VALUES:
        return f"formats {key}, {value}: keys are {', '.join(KEYS)}; values {', '.join(VALUES)}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"q.dtype {q.dtype}: bfloat16 or float16"
    if D not in (64, 128, 256) or (D == 64 and 3 in (ROWS[key].bits, ROWS[value].bits)):
        return f"head size {D}: 64 (not with 3 bits), 128 or 256"
    if HQ % HK or HQ // HK > 16:
        return f"{HQ} query heads over {HK} kv heads: a multiple of 1 to 16"
    if block_size not in (16, 32, 64, 128):
        return f"block_size {block_size}: 16, 32, 64 or 128"
    if not 1 <= queries <= 8:
        return f"queries {queries}: 1 to 8 a sequence"
    if pages.stride(0) >= 1 << 32:
        return f"pages strides {pages.stride()}: a page under 4 GiB"
    return unsuitable(pages, key, value, HK, D, block_size)


def decode(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    key: str,
    value: str,
    block_size: int,
    scale: float,
    cu_queries: torch.Tensor | None = None,
    queries: int = 1,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    key_map: Map | None = None,
    value_map: Map | None = None,
    key_offset: Offsets | None = None,
    codebook: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """softmax(scale * A q . k^) v^, mapped by B, over each sequence's pages; causal among the `queries` last tokens.

    q [T, HQ, D] bf16 or fp16; pages uint8 [num_blocks, HK, page_bytes] (records.py); block_table [S, max_pages] and
    seq_lens [S] int32. Sequence s asks queries cu_queries[s] .. cu_queries[s + 1] (int32 [S + 1], `queries` an upper bound),
    or `queries` each; query i of n stands at position seq_lens[s] - n + i and sees the keys up to it, of the last `window`
    positions where window > 0. key_map is Map.matrix(A, key), value_map Map.matrix(B), or Map.hadamard; with key_offset,
    key t reads as k^ + key_offset[t // 64] (its last row beyond the table); codebook the centroids of codebook keys (their
    common factor cancels); sinks [HQ] float32. Returns [T, HQ, D] of q's type; `lse` [T, HQ] float32 is filled with
    the natural log-sum-exp (sinks included; -inf where no key was seen) where given. Nothing is checked here:
    `unsupported` says what the kernel takes, and the tables are contiguous int32.
    """
    q = q.contiguous()  # rows of a wider projection are copied: a few microseconds
    HQ, D = q.shape[1:]
    HK, S = pages.shape[1], seq_lens.shape[0]
    group = HQ // HK
    capacity = S * HK * block_table.shape[1] * block_size // TILE
    if config is None:
        bf16 = q.dtype == torch.bfloat16
        config = choose(
            key,
            value,
            D,
            group,
            HK,
            block_size,
            pages.stride(1),
            bf16,
            queries * group,
            softcap > 0,
            kind(key_map),
            kind(value_map),
            key_offset is not None,
            capacity,
        )
    decode_kernel, combine_kernels, sms = kernels(config, q.device.index or 0)

    columns = queries * group
    column_blocks = -(-columns // (8 * config.column_tiles))
    blocks = max(1, sms * config.blocks_per_sm // column_blocks)
    resident = blocks * config.warps
    blocks = max(blocks, -(-capacity // (MAX_TILES * config.warps)))
    partial = torch.empty((blocks * config.warps + S * HK) * columns * piece_bytes(D), dtype=torch.uint8, device=q.device)
    out = torch.empty_like(q) if out is None else out

    key_gain = KEYS[key].gain * (D if key == "int2" else 1)
    gain = key_gain * (key_map.gain if key_map else 1) * scale * LOG2E
    offset = key_offset or Offsets(None, 0, 0.0)
    pointer = lambda t: (0 if t is None else t.data_ptr(), ctypes.c_void_p)
    integer = lambda i: (i, ctypes.c_int)
    number = lambda x: (x, ctypes.c_float)
    stride = lambda m: integer(m.data.stride(0) if m is not None and m.data is not None and m.data.shape[0] > 1 else 0)
    matrix = lambda m: pointer(None if m is None else m.data)
    common = [integer(S), integer(queries), integer(window), integer(resident), integer(columns)]
    page_stride = ctypes.c_int(pages.stride(0)).value  # the kernel reads it as unsigned
    few = sms >= 8 * S * HK  # pairs, with more than eight partials each
    with torch.cuda.device(q.device):
        decode_kernel(
            (blocks, column_blocks, 1),
            [
                pointer(q),
                pointer(pages),
                pointer(block_table),
                pointer(seq_lens),
                pointer(cu_queries),
                matrix(key_map),
                stride(key_map),
                matrix(key_offset),
                stride(key_offset),
                integer(offset.groups),
                number(offset.gain / key_gain),
                pointer(codebook),
                pointer(partial),
                integer(page_stride),
                integer(block_table.shape[1]),
                *common,
                number(2 * gain / softcap if softcap else gain),
                number(softcap * LOG2E),
            ],
        )
        combine_kernels[few](
            (S, HK, columns) if few else (-(-S // config.combined), HK, -(-columns // 4)),
            [
                pointer(partial),
                pointer(seq_lens),
                pointer(cu_queries),
                pointer(sinks),
                matrix(value_map),
                stride(value_map),
                number(value_map.gain if value_map else 1.0),
                pointer(out),
                pointer(lse),
                *common,
            ],
        )
    return out
