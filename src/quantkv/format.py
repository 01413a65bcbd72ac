"""The contract of a cache format, and the registry of formats.

A `Codec` says how one row (the K or V vector of one token and kv head) becomes bytes; a `Format` pairs a codec for K
with one for V. Every row reads back as `scale * operand + bias`, which is all that attention needs to know.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import names
from .packing import interleave
from .rounding import Rounding
from .spec import CacheSpec, CodecLayout, FormatLayout, RowLayout

Meta = torch.Tensor | None


class ByName:
    """What the registry knows is pickled by its name, as functions are; a copy is the thing itself, which never changes."""

    name: str

    def __reduce__(self) -> tuple[Callable, tuple[str, str]]:
        kind = type(self).__name__
        if _known(kind, self.name) != self:
            raise ValueError(f"{kind.lower()}={self.name!r}: a pickle names a registered one; quantkv.register its format first")
        return _restore, (kind, self.name)

    def __copy__(self) -> ByName:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ByName:
        return self


@dataclass(frozen=True)
class Codec(ByName):
    """One side, K or V, of a format.

    name: short name, unique.
    row: bits of an element and the metadata beside a row.
    encode: rows `[..., D]` float32 -> codes `[..., code_bytes]` of `code_dtype`, meta `[..., fields]` or None.
        With `decode` it is the specification of the bytes: vectorised, any device.
    decode: (codes, meta, dtype) -> operand `[..., D]`, scale `[..., 1]` or None, bias `[..., 1]` or None: the row is
        `scale * operand + bias`; None stands for 1 and for 0. All are of `dtype` (float32 or float64), the operand of that or
        of a narrower one that holds its numbers exactly.
    planes: P > 1: the operand comes as its planes (`packing.py`), `[P, ..., D / P]`, so that packed codes need no shuffle.
    encode_in: (rows `[T, HK, D]` float32, `Rounding`) -> codes and meta as of `encode`, chosen so that errors cost little in a layer's
        hessian. None: the codec rounds by one way, and a Hessian changes nothing.
    cubic: (a, b) of a codec whose codes c of B bits stand for `t (a + b t^2)`, t = c - (2^B - 1) / 2, times one fp16 scale: what kernels
        that round by a Hessian must know of it. None: it has other numbers, and only the reference rounds them so.
    signed: the first metadata field is a scale, and a key whose scale is negative was stored without its map's key mean.
    code_dtype: dtype of the codes' view; uint8 for what is packed.
    map: linear map that a row goes through before it is encoded, unless a layer brings its own: "none", "hadamard"
        (H_D), "hadamard_unit" (H_D / sqrt(D)) or "rht" (randomized, block-diagonal where D is no power of two).
    round_mapped: the mapped row is rounded to the input's dtype first, as vLLM's bytes require.
    head_size_multiple, power_of_two: which head sizes the codec can take.
    triton: returns the codec for Triton, a `views.TritonCodec`; called when a kernel first needs it, so that importing a
        format imports no Triton. hopper: likewise the one in CUDA C++, a `codec.HopperCodec`; cpu: the one for CPUs, a
        `codec.CpuCodec`. None: it has none.
    """

    name: str
    row: RowLayout
    encode: Callable[[torch.Tensor], tuple[torch.Tensor, Meta]]
    decode: Callable[[torch.Tensor, Meta, torch.dtype], tuple[torch.Tensor, Meta, Meta]]
    code_dtype: torch.dtype = torch.uint8
    map: str = "none"
    round_mapped: bool = False
    head_size_multiple: int = 1
    power_of_two: bool = False
    planes: int = 1
    encode_in: Callable[[torch.Tensor, Rounding], tuple[torch.Tensor, Meta]] | None = None
    cubic: tuple[float, float] | None = None
    signed: bool = False
    triton: Callable[[], Any] | None = None
    hopper: Callable[[], Any] | None = None
    cpu: Callable[[], Any] | None = None

    @property
    def scaled_per_tensor(self) -> bool:
        """Whether rows are divided by a scale of the layer, which a checkpoint may bring: 8-bit codes with nothing beside them."""
        return self.row.code_bits == 8 and not self.row.meta

    def check_head_size(self, head_size: int, argument: str = "head_size") -> None:
        """Raise ValueError if a row of `head_size` elements cannot be encoded."""
        self.layout.check_head_size(head_size, argument)

    @property
    def layout(self) -> CodecLayout:
        """Its bytes, without its arithmetic."""
        return CodecLayout(self.name, self.row, self.head_size_multiple, self.power_of_two)

    def head_size(self, codes: torch.Tensor) -> int:
        """Elements of a row of `codes [..., code_bytes]`, a view of the code dtype."""
        return codes.shape[-1] * 8 * codes.dtype.itemsize // self.row.code_bits

    def dequantize(self, codes: torch.Tensor, meta: Meta, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rows `[..., D]` in the codec's mapped space: `scale * operand + bias`."""
        operand, scale, bias = self.decode(codes, meta, dtype)
        operand = operand if self.planes == 1 else interleave(operand)
        rows = operand.to(dtype) if scale is None else operand.to(dtype) * scale
        return rows if bias is None else rows + bias


@dataclass(frozen=True)
class Format(ByName):
    """What a user names: a codec for K and one for V.

    One that is named "K+R" is of latents (DeepSeek's MLA): `k` stores a token's latent, `v` the rotated dimensions (RoPE) of its key. The
    key is the whole row, the latent and then these, and the value is the latent again: one row, two uses.
    """

    name: str
    k: Codec
    v: Codec
    notes: str = ""

    @property
    def latent(self) -> bool:
        """Whether it is of latents."""
        return names.is_latent(self.name)

    def latents(self, dtype: torch.dtype = torch.bfloat16) -> Format:
        """The format of latents that this one's K half stores, their rotated dimensions as given in `dtype`; itself if it is one."""
        return get_format(names.of_latent(self.name, get_format("none", dtype).name))

    def of_keys_and_values(self) -> Format:
        """Itself. ValueError for a format of latents, where a layer keeps keys and values."""
        names.of_keys_and_values(self.name)
        return self

    def latent_spec(self, latent: int, rope: int, block_size: int = 16, dtype: torch.dtype = torch.bfloat16) -> CacheSpec:
        """Geometry of a layer's cache of latents: of one row a token, `latent` numbers in this format's K half, `rope` as given in `dtype`.
        ValueError for a size that it cannot take."""
        return self.latents(dtype).cache_spec(1, latent, rope, block_size)

    def cache_spec(self, num_kv_heads: int, head_size: int, head_size_v: int | None = None, block_size: int = 16) -> CacheSpec:
        """Geometry of a layer's cache in this format. ValueError for a head size that it cannot take."""
        return self.layout.cache_spec(num_kv_heads, head_size, head_size_v, block_size)

    @property
    def layout(self) -> FormatLayout:
        """Its bytes, without its arithmetic."""
        return FormatLayout(self.name, self.k.layout, self.v.layout)


_FORMATS: dict[str, Format] = {}
_ALIASES: dict[str, str] = {}
_built_in_are_loaded = False  # torch.compile cannot follow an import


def _load_built_in() -> None:
    """Let the formats that come with the package register themselves, whichever module is asked for a format first."""
    global _built_in_are_loaded
    if not _built_in_are_loaded:
        importlib.import_module(f"{__package__}.formats")
        _built_in_are_loaded = True


def register(fmt: Format, *aliases: str) -> Format:
    """Make a format known by its name and by `aliases`. ValueError where a name is taken by another format."""
    if not _built_in_are_loaded:  # then their names are taken; while they load, this does nothing
        importlib.import_module(f"{__package__}.formats")
    for name in (fmt.name, *aliases):
        taken = _FORMATS.get(_ALIASES.get(name, name))
        if any(joint in name for joint in names.JOINTS) or (taken is not None and taken != fmt):
            raise ValueError(f"name={name!r}: taken, or contains '/' or '+', which join two formats")
    _FORMATS[fmt.name] = fmt
    _ALIASES.update(dict.fromkeys(aliases, fmt.name))
    return fmt


def unregister(name: str) -> None:
    """Forget a format and its aliases."""
    del _FORMATS[name]
    for alias in [a for a, target in _ALIASES.items() if target == name]:
        del _ALIASES[alias]


def available_formats() -> list[str]:
    """Names of the registered formats, aliases left out."""
    _load_built_in()
    return list(_FORMATS)


def aliases_of(name: str) -> list[str]:
    """Other names of a registered format."""
    _load_built_in()
    return [alias for alias, target in _ALIASES.items() if target == name]


def get_format(name: str | Format, dtype: torch.dtype = torch.bfloat16) -> Format:
    """The format of that name or alias; "A/B" pairs A's K with B's V, two formats at most; "A+B" is of latents, see `Format`.

    dtype: what "none" and "auto" (keys and values as given) stand for: bfloat16, float16 or float32.
    ValueError, with the nearest name, for an unknown one.
    """
    if isinstance(name, Format):
        return name
    if not isinstance(name, str):
        raise ValueError(f"format={name!r}: a name such as int4, or a Format, is needed")
    _load_built_in()
    if names.is_latent(name):
        latent, rope = (get_format(part, dtype) for part in names.of_rows(name))
        return Format(names.of_latent(latent.name, rope.name), latent.k, rope.k)
    if "/" in name:
        k, v = (get_format(part, dtype) for part in names.pair(name))
        return k if k.name == v.name else Format(f"{k.name}/{v.name}", k.k, v.v)
    if name in names.PLAIN:
        plain = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        if not isinstance(dtype, torch.dtype) or dtype not in plain:
            raise ValueError(f"dtype={dtype}: format {name!r} stores one of {[str(d) for d in plain]}")
        name = plain[dtype]
    return _FORMATS[names.canonical(name, _FORMATS, _ALIASES)]


def _known(kind: str, name: str) -> ByName | None:
    """The registered format or codec of that name. Pairs that are made when they are asked for, such as int8/int4, are known too."""
    _load_built_in()
    if kind == Codec.__name__:
        return next((codec for fmt in _FORMATS.values() for codec in (fmt.k, fmt.v) if codec.name == name), None)
    try:
        return get_format(name)
    except ValueError:
        return None


def _restore(kind: str, name: str) -> ByName:
    """What a pickle names."""
    found = _known(kind, name)
    if found is None:
        raise ValueError(f"{kind.lower()}={name!r} is unknown here: import what registers it before unpickling")
    return found
