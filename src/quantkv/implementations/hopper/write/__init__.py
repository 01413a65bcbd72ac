"""Writes on Hopper: rows into page records, of one call or of all that share its shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from ctypes import sizeof
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from ....calls import WriteCall
from ....format import Codec
from ....maps import LinearMap, rounding_of
from ....under_way import wanted
from .. import geometry
from ..codec import literal
from ..host import launch
from ..host.launch import Kernel, Launch
from ..host.nvrtc import compile_cubin
from ..host.operands import kept
from ..host.records import pages_of, row_macros, unsuitable
from . import given

SOURCE = Path(__file__).with_name("write.cu")
CHUNK = 8  # numbers of one load
KEYS, VALUES, BOTH = 1, 2, 3  # sides that a kernel writes


@dataclass(frozen=True)
class Hadamard:
    """The map `factor * H * diag(signs)`, H the Sylvester matrix of the head size, or of its largest power of two, as often as it goes.
    Where `evened`, `H * diag(steps)` of each head (`MapOperands.steps`)."""

    factor: float
    signs: torch.Tensor | None  # int32 [4, D / 128, rounded up], as `of` packs them, or steps [HK, D] of the rows' dtype; None: all are +1

    @staticmethod
    def of(factor: float, signs: torch.Tensor) -> Hadamard:
        """`signs` [D] of +-1, into the words that the four lanes of a row read: see `hadamard` in hadamard.cuh."""
        if bool((signs > 0).all()):
            return Hadamard(factor, None)
        D = -(-signs.shape[0] // (4 * CHUNK)) * 4 * CHUNK
        signs = torch.nn.functional.pad(signs, (0, D - signs.shape[0]), value=1.0)
        pairs = (signs.cpu() < 0).long().view(-1, 4, CHUNK).transpose(0, 1).reshape(4, -1, 2)  # [lane, pair, parity]
        bit = torch.tensor([15, 31], device="cpu") - torch.arange(D // 8, device="cpu")[:, None] % 16
        words = torch.zeros(4, -(-D // 128), dtype=torch.int64, device="cpu")
        for i in range(words.shape[1]):
            words[:, i] = (pairs[:, 16 * i : 16 * i + 16] << bit[16 * i : 16 * i + 16]).sum((1, 2))
        return Hadamard(factor, (words - (words >> 31 << 32)).int().to(signs.device))  # as signed words

    @property
    def address(self) -> int | None:
        """Address of its signs or steps; None where it has none."""
        return None if self.signs is None else self.signs.data_ptr()


NONE = Hadamard(0.0, None)


def hadamard_of(map_: LinearMap | None, heads: int, dtype: torch.dtype) -> Hadamard | None:
    """The map of `heads` kv heads as the kernel takes it for rows of `dtype`, `NONE` for no map; None where it is no Hadamard matrix."""
    if map_ is None:
        return NONE
    steps = map_.operands.steps
    if steps is not None:
        return kept(steps, (heads, dtype), lambda: Hadamard(1.0, steps.to(dtype).expand(heads, -1).contiguous()))
    signs, factor = map_.operands.signs, map_.operands.forward_factor
    if signs is None:
        signs = map_.block_signs
    if signs is None or map_.operands.forward.dtype != torch.bfloat16:
        return None
    return kept(signs, factor, lambda: Hadamard.of(factor, signs))


@dataclass(frozen=True)
class WriteConfig:
    """What one compiled kernel is made for. key_factor, value_factor: of the maps; 0: none. sides: KEYS, VALUES or BOTH."""

    key: Codec
    value: Codec
    head_size: int
    head_size_v: int
    block_size: int
    bf16: bool
    wide_slots: bool
    key_factor: float = 0.0
    value_factor: float = 0.0
    key_scaled: bool = False
    value_scaled: bool = False
    key_shifted: bool = False
    key_evened: bool = False
    value_evened: bool = False
    wide_positions: bool = False
    warps: int = 4
    sides: int = BOTH
    source = SOURCE
    shared_bytes = 0

    @property
    def alike(self) -> bool:
        """K and V are treated in the same way."""
        key = (self.key, self.key_factor, self.key_scaled, self.key_evened)
        value = (self.value, self.value_factor, self.value_scaled, self.value_evened)
        return key == value and not self.key_shifted and self.head_size == self.head_size_v

    def macros(self) -> dict[str, object]:
        """What the kernel is compiled with: the numbers that host and device share."""
        return dict(
            **row_macros(self.key, self.value, self.head_size, self.head_size_v, self.sides == VALUES), BLOCK_SIZE=self.block_size,
            KEY_FACTOR=literal(self.key_factor), VALUE_FACTOR=literal(self.value_factor), KEY_ROUNDED=int(self.key.round_mapped),
            VALUE_ROUNDED=int(self.value.round_mapped), KEY_SCALED=int(self.key_scaled), VALUE_SCALED=int(self.value_scaled),
            KEY_SHIFTED=int(self.key_shifted), KEY_EVENED=int(self.key_evened), VALUE_EVENED=int(self.value_evened), SIDES=self.sides,
            ALIKE=int(self.alike),
            ROWS_BF16=int(self.bf16), SLOT=_integer(self.wide_slots), POSITION=_integer(self.wide_positions), WARPS=self.warps, CHUNK=CHUNK,
            ARGUMENT_BYTES=sizeof(launch.arguments("WriteArguments")),
        )  # fmt: skip

    @property
    def rows(self) -> WriteConfig:
        """Itself: configurations of other kernels have one."""
        return self

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def tokens_of_block(self) -> int:
        """Tokens whose rows a block writes."""
        return 8 * self.warps

    def compiled(self, config: Config) -> bytes:
        """The cubin of a kernel that writes these rows: this one's, or another's whose configuration has these `rows`."""
        return compile_cubin(config.source, config.macros(), (codec.hopper().source for codec in (self.key, self.value)))

    def cubin(self) -> bytes:
        """Compiled, once."""
        return self.compiled(self)


class Config(Protocol):
    """What a kernel that writes rows is compiled for. source: its file, which has the kernel's name."""

    rows: WriteConfig
    source: Path
    threads: int
    tokens_of_block: int
    shared_bytes: int

    def macros(self) -> dict[str, object]:
        """What the kernel is compiled with."""

    def cubin(self) -> bytes:
        """Compiled, once."""


def _integer(wide: bool) -> str:
    return "long long" if wide else "int"


def refusal(call: WriteCall) -> str | None:
    """Why the kernel cannot serve this call; None where it can. Looks at shapes and types only, never at what tensors hold."""
    return launch.elsewhere(call.key.device) or _unsupported(call)


def _unsupported(call: WriteCall) -> str | None:
    """Why no Hopper GPU can serve it."""
    key, value, fmt, block_size = call.key, call.value, call.fmt, call.k.codes.shape[1]
    for codec in (fmt.k, fmt.v):
        if codec.hopper is None or not codec.hopper().written:
            return f"format {fmt.name}: rows of {codec.name} have no code for Hopper"
    D, D_V = key.shape[2], value.shape[2]
    if key.dtype not in (torch.bfloat16, torch.float16):
        return f"key of {key.dtype}: bfloat16 or float16"
    if reason := geometry.unwritable(fmt, D, D_V, block_size, any(map(any, ways(call)))):
        return reason
    for name, rows in (("key", key), ("value", value)):
        if not launch.in_chunks(rows):
            return f"{name} strides {rows.stride()}: rows of neighbouring elements that begin at multiples of 16 bytes"
    for name, t in (("slot_mapping", call.slot_mapping), ("positions", call.positions)):
        if t is not None and not t.is_contiguous():
            return f"{name} strides {t.stride()}: contiguous"
    pages = pages_of(call.k, call.v)
    if pages is None:
        return "the cache is no buffer of page records [num_blocks, HK, page_bytes]"
    if reason := unsuitable(pages, fmt.k, fmt.v, D, D_V, block_size):
        return reason
    if any(hadamard_of(map_, key.shape[1], key.dtype) is None for map_ in (call.maps.k, call.maps.v)):
        return "maps: a Hadamard matrix of the head size, behind powers of two or not, or none"
    for codec, map_ in ((fmt.k, call.maps.k), (fmt.v, call.maps.v)):
        cubic = codec.cubic is not None and not codec.round_mapped and codec.row.meta_bytes == 2
        if rounding_of(codec, map_) is not None and not cubic and codec.hopper().writer is None:
            return f"maps: a Hessian, and {codec.name} has no code for Hopper that rounds by a Hessian"
    return None


def run(call: WriteCall) -> None:
    """Serve `call`. The first call of a shape compiles its kernel."""
    collected = wanted()
    if collected is None:
        _PREPARED.serve(call)
    else:
        collected += configurations(call)


def prepare(call: WriteCall) -> Prepared:
    """What launches calls of this shape. The first of a shape compiles its kernel."""
    return Prepared(call)


def compiled_for(call: WriteCall) -> set[Config]:
    """What is compiled for `call`: `cubin` of each does so, and may run in several threads at once."""
    return {*configurations(call)}


def configurations(call: WriteCall) -> list[Config]:
    """What the kernels that serve `call` are compiled for: one for the sides that are written in one way."""
    config, (key_way, value_way) = configuration(call), ways(call)
    rows = call.key.shape[0] * call.key.shape[1]
    if _given(call):
        wide = call.copies is not None and call.copies.slot_mapping.dtype == torch.int64
        return [given.GivenConfig(replace(config, sides=KEYS), wide)]
    if key_way == value_way and config.head_size == config.head_size_v:
        return [_config(config, key_way, rows)]
    return [_config(replace(config, sides=side), way, rows) for side, way in ((KEYS, key_way), (VALUES, value_way))]


def _given(call: WriteCall) -> bool:
    """Whether V is copied, beside K, by one launch."""
    return given.serves(call, ways(call) == ((None, False), (None, False)))


def at_once(call: WriteCall) -> bool:
    """Whether mean and copies of a call are served by its launch."""
    return _given(call) and given.copied(call)


# how rows of one side are written: by a kernel of their codec, `HopperCodec.writer`; by a Hessian
Way = tuple[Callable[[], Any] | None, bool]


def _config(config: WriteConfig, way: Way, rows: int) -> Config:
    kind = _kind(way)
    return config if kind is None else kind.of(config, way[1], rows)


def _kind(way: Way) -> Any:
    """The class of the configurations of what writes rows in this way; None: WriteConfig."""
    from .round import RoundConfig

    writer, hessian = way
    return writer() if writer is not None else RoundConfig if hessian else None


def ways(call: WriteCall) -> tuple[Way, ...]:
    """Ways of keys and of values."""
    sides = ((call.fmt.k, call.maps.k), (call.fmt.v, call.maps.v))
    return tuple((codec.hopper().writer, rounding_of(codec, map_) is not None) for codec, map_ in sides)


def configuration(call: WriteCall) -> WriteConfig:
    """What a kernel that serves `call` is compiled for, where no codec has a kernel of its own and nothing is rounded by a Hessian."""
    key_factor, value_factor, key_evened, value_evened, _, key_scaled, value_scaled, shifted, *_ = _layer(call)
    tokens, heads, D = call.key.shape
    return WriteConfig(
        call.fmt.k,
        call.fmt.v,
        D,
        call.value.shape[2],
        call.k.codes.shape[1],
        call.key.dtype == torch.bfloat16,
        call.slot_mapping.dtype == torch.int64,
        key_factor,
        value_factor,
        key_scaled,
        value_scaled,
        shifted,
        key_evened,
        value_evened,
        shifted and call.positions.dtype == torch.int64,
        1 if tokens * heads <= 2048 else 2,  # warps of a block: one block for each SM as long as there are few
    )


@cache
def _kernel(config: Config, index: int) -> Kernel:
    """The kernel of a configuration on a device, compiled and loaded once."""
    module = launch.load(config.cubin(), index)
    return Kernel(module, f"{config.source.stem}_kernel", config.threads, config.shared_bytes, index)


def _layer(call: WriteCall) -> tuple:
    """What may differ between layers, and is compiled for."""
    maps, fmt = call.maps, call.fmt
    shifted = maps.by_position
    factors = (0.0 if m is None else m.operands.forward_factor for m in (maps.k, maps.v))
    return (
        *factors,
        *(m is not None and m.operands.steps is not None for m in (maps.k, maps.v)),
        ways(call),
        call.k.scale != 1.0,
        call.v.scale != 1.0,
        shifted,
        id(fmt.k),
        id(fmt.v),
    )  # codecs that a configuration keeps alive


def _shape(call: WriteCall) -> Hashable:
    """Equal for calls that one `Prepared` serves."""
    key, value, positions = call.key, call.value, call.positions
    return (
        (key.shape, key.stride(), value.shape, value.stride(), key.dtype, key.device, call.k.base.stride(), call.k.codes.shape[1]),
        (call.slot_mapping.dtype, None if positions is None else positions.dtype, _layer(call)),
    )


class Prepared:
    """Launches calls of one shape. What differs from layer to layer is filled in: addresses, scales, signs and key means of maps."""

    def __init__(self, call: WriteCall):
        self.index = launch.device_index(call.key.device)
        self.layer = _layer(call)
        pages = call.k.base
        tokens = call.key.shape[0]
        self.given = _given(call)
        self.extended = launch.arguments(given.STRUCT if self.given else "RoundArguments")()
        self.arguments = a = self.extended.rows  # of which the structs of other kernels are extensions
        (a.key_token, a.key_head), (a.value_token, a.value_head) = call.key.stride()[:2], call.value.stride()[:2]
        a.page_stride, a.head_stride, a.tokens = pages.stride(0), pages.stride(1), tokens
        self._take_layer(call)
        self.launches = [self._launch_of(config, call) for config in configurations(call)]
        self.starts_next = tokens > 0  # once all that came before it is there: see `attend.Prepared.after_write`

    def _launch_of(self, config: Config, call: WriteCall) -> Launch:
        tokens, heads, _ = call.key.shape
        arguments = self.arguments if isinstance(config, WriteConfig) else self.extended
        parts = 2 if self.given else config.rows.sides.bit_count()
        grid = (parts * -(-tokens // config.tokens_of_block), heads, 1)
        return Launch(_kernel(config, self.index), grid, arguments)

    def __call__(self, call: WriteCall) -> None:
        if self.arguments.tokens == 0:
            return
        if launch.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self._launch(call)
        self._launch(call)

    def _launch(self, call: WriteCall) -> None:
        a, maps, key, value = self.arguments, call.maps, call.key.data_ptr(), call.value.data_ptr()
        if key % 16 or value % 16:
            raise ValueError(f"key, value at addresses {key}, {value}: rows begin at multiples of 16 bytes, as in the prepared call")
        stream = launch.current_stream(self.index)
        with launch.LOCK:
            if maps.k is not self.maps.k or maps.v is not self.maps.v or (call.k.scale, call.v.scale) != self.scales:
                self._take_layer(call)
            a.key, a.value, a.pages, a.slots = key, value, call.k.base.data_ptr(), call.slot_mapping.data_ptr()
            a.positions = None if call.positions is None else call.positions.data_ptr()
            if self.given:
                given.fill(self.extended, call)
            for each in self.launches:
                each(stream)

    def _take_layer(self, call: WriteCall) -> None:
        if _layer(call) != self.layer:
            raise ValueError("maps, scales: of another kind, or another format, than in the call that was prepared")
        maps, a = call.maps, self.arguments
        key_map, value_map = (hadamard_of(m, call.key.shape[1], call.key.dtype) for m in (maps.k, maps.v))
        a.key_signs, a.value_signs, a.key_scale, a.value_scale = key_map.address, value_map.address, call.k.scale, call.v.scale
        if maps.by_position:
            means = maps.k.operands.mapped_key_mean  # [buckets, HK or 1, D] float32, contiguous
            a.key_mean, a.buckets = means.data_ptr(), means.shape[0]
            a.key_mean_bucket, a.key_mean_head = means.stride(0), means.stride(1) if means.shape[1] > 1 else 0
        feedback = [_kind(way).feedback_of(map_.rounding) if way[1] else None for way, map_ in zip(ways(call), (maps.k, maps.v))]
        if not self.given:
            r = self.extended
            r.key_feedback, r.value_feedback = (None if t is None else t.data_ptr() for t in feedback)
            r.key_head, r.value_head = (0 if t is None or t.shape[0] == 1 else t.stride(0) for t in feedback)
        self.maps, self.scales, self.operands = maps, (call.k.scale, call.v.scale), (key_map, value_map, feedback)  # alive as long as used


_PREPARED = launch.ByShape(_shape, Prepared)
