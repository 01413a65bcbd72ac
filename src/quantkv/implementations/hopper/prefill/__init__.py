"""Attention of prompts over 16-bit rows on Hopper: what its kernel is compiled for, and its launch."""

from __future__ import annotations

import ctypes
from ctypes import sizeof
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from ....under_way import wanted
from ..host import launch
from ..host.launch import SHARED_BYTES, Kernel, Launch
from ..host.nvrtc import compile_cubin

SOURCE = Path(__file__).with_name("prefill.cu")

BOX = 64  # dimensions that lie together in shared memory: 128 bytes
CACHED = 24 << 20  # bytes of keys and values that are read again and again, and should stay in the GPU's cache of 50 MB
NARROW = 512  # keys that a query sees before its own
SIZES = (64, 80, 96, 112, 128, 160, 192, 256)  # of heads: what products are as wide as


@dataclass(frozen=True)
class PrefillConfig:
    """What one compiled kernel is made for. group: query heads of a kv head. left: whether queries see only so far back; narrow: and that
    is a few tiles of keys at most. eight: whether queries and keys are 8-bit integers."""

    head_size: int
    head_size_v: int
    group: int
    bf16: bool
    left: bool
    narrow: bool
    softcap: bool
    eight: bool = False

    @property
    def largest(self) -> int:
        """The larger head size."""
        return max(self.head_size, self.head_size_v)

    @property
    def consumers(self) -> int:
        """Warpgroups of 64 rows each. Three read keys and values a third less often than two, which have registers for longer tiles: those
        pay where a window is a tile or two."""
        return 2 if self.narrow or self.largest > 128 else 3

    @property
    def registers(self) -> int:
        """Registers of a consumer's thread; those that load need no more than what is left."""
        return 160 if self.consumers == 3 else 232

    @property
    def keys(self) -> int:
        """Keys of a tile: as many as registers and shared memory hold."""
        if self.consumers == 3:
            return 128 if self.largest <= 64 and not self.eight else 96 if self.largest <= 96 else 80
        return 160 if self.largest <= 128 else 96 if self.largest <= 192 else 80

    @property
    def query_stages(self) -> int:
        """Tiles of queries that are there at once: two where there is room and they are soon done with."""
        return 2 if self._shared_bytes(2) <= SHARED_BYTES and (self.narrow or self.largest <= 64) else 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self._shared_bytes(self.query_stages)

    def _shared_bytes(self, query_stages: int) -> int:
        """Queries, two stages of keys and values, counters, what is handed on; from a multiple of 1,024 bytes on."""
        key, value = (-(-size // BOX) * 2 * BOX for size in (self.head_size // (2 if self.eight else 1), self.head_size_v))
        return 1024 + query_stages * (64 * self.consumers * key + 16) + 2 * self.keys * (key + value) + 16 * 4 + (16 + 32) * 2

    def macros(self) -> dict[str, object]:
        """What the kernel is compiled with: the numbers that host and device share."""
        return {
            "EIGHT": int(self.eight),
            "D": self.head_size,
            "DV": self.head_size_v,
            "GROUP": self.group,
            "CONSUMERS": self.consumers,
            "KEYS": self.keys,
            "STAGES": 2,
            "QUERY_STAGES": self.query_stages,
            "BF16": int(self.bf16),
            "LEFT": int(self.left),
            "TURNS": int(self.consumers == 2 and not self.narrow),
            "SOFTCAP": int(self.softcap),
            "CONSUMER_REGISTERS": self.registers,
            "SHARED_BYTES": self.shared_bytes,
            "ARGUMENT_BYTES": sizeof(launch.arguments("PrefillArguments")),
        }

    def cubin(self) -> bytes:
        """Compiled, once."""
        return compile_cubin(SOURCE, self.macros())


def takes(head_size: int, head_size_v: int) -> bool:
    """Whether the kernel can be compiled here, and takes rows of these sizes."""
    return head_size in SIZES and head_size_v in SIZES and launch.missing() is None


@cache
def kernel(config: PrefillConfig, index: int) -> Kernel:
    """The kernel of a configuration on a device, compiled and loaded once."""
    return Kernel(launch.load(config.cubin(), index), "prefill_kernel", 128 * (config.consumers + 1), config.shared_bytes, index)


@lru_cache(maxsize=256)
def tensor_map(address: int, bf16: bool, shape: tuple[int, int, int], strides: tuple[int, int], rows: int) -> bytes:
    """The driver's description of a tensor of 16-bit numbers `[heads, rows, D]` of dense rows, to load boxes of `rows` rows of. strides: of
    heads and rows, in bytes."""
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if bf16 else kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    numbers = driver.cuuint64_t, driver.cuuint32_t
    dims = [numbers[0](n) for n in reversed(shape)]
    result = driver.cuTensorMapEncodeTiled(
        kind,
        3,
        address,
        dims,
        [numbers[0](n) for n in reversed(strides)],
        [numbers[1](n) for n in (BOX, rows, 1)],
        [numbers[1](1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    launch.check(result)
    return ctypes.string_at(int(result[1].getPtr()), 128)


class EightBitRows(NamedTuple):
    """Queries and keys as `reference/eight_bit.py` has them, keys by blocks of `PrefillConfig.keys` of their sequence. queries: int8
    `[M, HQ, D]`; query_scales, query_means: float32 `[M, HQ]`, the latter the query times the mean that was taken off the keys of its
    sequence. keys: int8 `[HK, N, D]`; key_scales: float32 `[HK, N]`, of which those where a block begins are read. All are dense."""

    queries: torch.Tensor
    query_scales: torch.Tensor
    query_means: torch.Tensor
    keys: torch.Tensor
    key_scales: torch.Tensor


def config_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: tuple[int, int], softcap: float, eight: bool) -> PrefillConfig:
    """What serves rows as of `attend`."""
    near = mask[0] >= 0, 0 <= mask[0] < NARROW
    return PrefillConfig(q.shape[2], v.shape[2], q.shape[1] // k.shape[0], q.dtype == torch.bfloat16, *near, softcap > 0, eight)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    longest: int,
    mask: tuple[int, int],
    ends: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    softcap: float,
    out: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
    eight: EightBitRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[M, HQ, D_V]`, in out where it is given, and natural log-sum-exp `[M, HQ]` float32. q: `[M, HQ, D]`; k, v: `[HK, N, D]`,
    `[HK, N, D_V]`. longest: queries of the longest sequence. mask: keys before and behind its own that a query sees, -1: all. ends: where
    the queries of each sequence begin, and the last ones end; the same of the rows of keys; how many of these are keys: int32, on the
    device. sinks: `[HQ]`, which log-sum-exps then have in them. eight: in place of what q and k
    hold, where it is given."""
    config = config_of(q, k, v, mask, softcap, eight is not None)
    collected = wanted()
    if collected is not None:
        collected.append(config)
        return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=torch.float32)
    index = launch.device_index(q.device)
    if launch.current_device() != index:
        with torch.cuda.device(index):
            return attend(q, k, v, scale, longest, mask, ends, softcap, out, sinks, eight)
    q = q if launch.in_chunks(q) else q.contiguous()
    out = out if out is not None and launch.in_chunks(out) else q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    heads, sequences, group = k.shape[0], len(ends[2]), q.shape[1] // k.shape[0]
    found = kernel(config, index)
    a = launch.arguments("PrefillArguments")()
    if eight is not None:  # pairs of integers are moved as 16-bit numbers are
        q, k = (t.view(torch.int16) for t in (eight.queries, eight.keys))
        a.query_scales, a.query_means, a.key_scales = (t.data_ptr() for t in (eight.query_scales, eight.query_means, eight.key_scales))
        a.key_scale_head = eight.key_scales.stride(0)
    for name, t in (("keys", k), ("values", v)):
        strides = (t.stride(0) * 2, t.stride(1) * 2)
        words = tensor_map(t.data_ptr(), config.bf16, tuple(t.shape), strides, config.keys)
        ctypes.memmove(ctypes.addressof(getattr(a, name)), words, 128)
    a.q, a.out, a.lse = q.data_ptr(), out.data_ptr(), lse.data_ptr()
    a.queries, a.rows, a.used = (t.data_ptr() for t in ends)
    taken = torch.zeros(1, dtype=torch.int32, device=q.device)
    a.taken = taken.data_ptr()
    a.q_token, a.q_head, a.out_token, a.out_head = *q.stride()[:2], *out.stride()[:2]
    a.kv_heads, a.sequences, a.tiles = heads, sequences, -(-longest * group // (64 * config.consumers))
    a.together = max(CACHED // (k.shape[1] // sequences * (k.shape[2] + v.shape[2]) * 2), 1)
    a.left, a.right = mask
    if sinks is not None:
        a.sinks, a.sinks_stride, a.sinks_type = sinks.data_ptr(), sinks.stride(0), launch.SINK_TYPES[sinks.dtype]
    a.scale, a.softcap = launch.LOG2E * scale * (2 / softcap if softcap else 1.0), launch.LOG2E * softcap
    blocks = min(launch.multiprocessors(index), a.tiles * heads * sequences)
    Launch(found, (blocks, 1, 1), a)(launch.current_stream(index))
    return out, lse
