"""How many bytes a quantized KV cache takes and where each of them lies. Pure Python: a planner needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from . import names

ITEM_BYTES = {"float32": 4, "float16": 2}
RECORD_ALIGNMENT = 16  # bytes: what one bulk copy or one 128-bit load needs


def _align(n: int) -> int:
    return -(-n // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


@dataclass(frozen=True)
class RowLayout:
    """What one cached row, the K or the V vector of one (token, kv head), occupies.

    code_bits: bits of one stored element.
    meta: dtype names of the fields stored beside the codes ("float32", "float16"), all the same.
    """

    code_bits: int
    meta: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.code_bits, bool) or not isinstance(self.code_bits, int) or self.code_bits < 1:
            raise ValueError(f"code_bits={self.code_bits!r}: a positive integer is needed")
        if not isinstance(self.meta, tuple) or not all(isinstance(name, str) for name in self.meta):
            raise ValueError(f"meta={self.meta!r}: a tuple of names of dtypes is needed")
        if len(set(self.meta)) > 1 or not set(self.meta) <= set(ITEM_BYTES):
            raise ValueError(f"meta={self.meta!r}: the fields share one dtype, one of {sorted(ITEM_BYTES)}")

    def code_bytes(self, head_size: int, argument: str = "head_size") -> int:
        """Bytes of the codes of one row of `head_size` elements. ValueError, by the argument's name, where they are no whole number."""
        bits = self.code_bits * head_size
        if bits % 8:
            raise ValueError(f"{argument}={head_size}: {self.code_bits}-bit rows need a whole number of bytes")
        return bits // 8

    @property
    def meta_bytes(self) -> int:
        """Bytes of the fields beside the codes of one row."""
        return sum(ITEM_BYTES[name] for name in self.meta)


@dataclass(frozen=True)
class CodecLayout:
    """What the rows of one side, K or V, of a format take, and which head sizes it can take; without arithmetic. As of `Codec`."""

    name: str
    row: RowLayout
    head_size_multiple: int = 1
    power_of_two: bool = False

    def check_head_size(self, head_size: int, argument: str = "head_size") -> None:
        """Raise ValueError if a row of `head_size` elements cannot be encoded."""
        if head_size < 1 or head_size % self.head_size_multiple:
            raise ValueError(f"{argument}={head_size}: {self.name} takes multiples of {self.head_size_multiple}")
        if self.power_of_two and head_size & (head_size - 1):
            raise ValueError(f"{argument}={head_size}: {self.name} takes powers of two (its rotation is one Hadamard matrix)")


@dataclass(frozen=True)
class FormatLayout:
    """What a format takes: of a K and of a V row."""

    name: str
    k: CodecLayout
    v: CodecLayout

    def cache_spec(self, num_kv_heads: int, head_size: int, head_size_v: int | None = None, block_size: int = 16) -> CacheSpec:
        """Geometry of a layer's cache in this format. ValueError for a head size that it cannot take."""
        spec = CacheSpec(self.name, self.k.row, self.v.row, num_kv_heads, head_size, head_size_v, block_size)
        self.k.check_head_size(spec.head_size)
        self.v.check_head_size(spec.head_size_v, "head_size_v")
        return spec


@dataclass(frozen=True)
class CacheSpec:
    """Geometry of one layer's cache: bytes, offsets and capacity.

    A page of one kv head is one contiguous record, `K codes | V codes | K meta | V meta`, each section starting at a
    multiple of 16 bytes; the cache is `[num_blocks, num_kv_heads, page_bytes]`. Build one with `Format.cache_spec`.

    format: name of the format, as the registry spells it.
    k, v: layout of a K and of a V row; of latents, of the latent and of the rotated dimensions.
    head_size_v: head size of V, that of K if None.
    block_size: tokens of a page.
    """

    format: str
    k: RowLayout
    v: RowLayout
    num_kv_heads: int
    head_size: int
    head_size_v: int | None = None
    block_size: int = 16

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)
        for name in ("num_kv_heads", "head_size", "head_size_v", "block_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: a positive integer is needed")
        if self.block_size % 8:
            raise ValueError(f"block_size={self.block_size}: a multiple of 8 is needed")
        self.k.code_bytes(self.head_size), self.v.code_bytes(self.head_size_v, "head_size_v")  # refuse rows of broken bytes here

    @property
    def latent(self) -> bool:
        """Whether it holds latents (MLA): keys of `head_size + head_size_v` numbers, of which the first `head_size` are the value."""
        return names.is_latent(self.format)

    @property
    def query_sizes(self) -> tuple[int, int]:
        """Numbers of a query and of its output."""
        return (self.head_size + self.head_size_v, self.head_size) if self.latent else (self.head_size, self.head_size_v)

    @property
    def sections(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of K codes, V codes, K meta and V meta inside a record."""
        n = self.block_size
        sizes = (
            n * self.k.code_bytes(self.head_size),
            n * self.v.code_bytes(self.head_size_v),
            n * self.k.meta_bytes,
            n * self.v.meta_bytes,
        )
        sections, offset = [], 0
        for size in sizes:
            sections.append((offset, size))
            offset = _align(offset + size)
        return tuple(sections)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one kv head, K and V."""
        offset, size = self.sections[-1]
        return _align(offset + size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one page of all kv heads."""
        return self.page_bytes * self.num_kv_heads

    @property
    def bytes_per_token(self) -> float:
        """Bytes a token takes in this layer, K and V of all kv heads with their metadata."""
        return self.block_bytes / self.block_size

    @property
    def elements_per_token(self) -> int:
        """Numbers of K and V of one token, all kv heads."""
        return self.num_kv_heads * (self.head_size + self.head_size_v)

    @property
    def bits_per_element(self) -> float:
        """Stored bits for each element of K and V, metadata included."""
        return 8 * self.bytes_per_token / self.elements_per_token

    @property
    def compression(self) -> float:
        """Compression factor against a 16-bit cache."""
        return 16 / self.bits_per_element

    def num_blocks(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def nbytes(self, num_blocks: int) -> int:
        """Bytes of a cache of `num_blocks` pages."""
        return num_blocks * self.block_bytes

    def capacity(self, num_bytes: int) -> int:
        """Tokens that fit into `num_bytes`, in whole pages."""
        return num_bytes // self.block_bytes * self.block_size

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a file's header. `from_dict` reverses it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CacheSpec:
        """The spec that `to_dict` wrote. ValueError where fields are missing or unknown."""
        known = {f.name for f in fields(cls)}
        if set(values) != known:
            raise ValueError(f"fields {sorted(values)}: a cache spec has {sorted(known)}")
        rows = {side: RowLayout(values[side]["code_bits"], tuple(values[side]["meta"])) for side in ("k", "v")}
        return cls(**{**values, **rows})
