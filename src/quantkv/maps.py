"""Linear maps that rows go through before they are encoded, as data: `y = A (k - off[position // 64])`.

Attention needs only the inverse: `q . k = (A^-T q) . y + q . off`, and the output over values is mapped back by `A_v^-1`.
Nothing that reads a map may assume that it is a Hadamard matrix.
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from . import deprecated
from .format import Codec, Format
from .rounding import Rounding

KEY_MEAN_BUCKET = 64  # positions that share one row of a table of key means
SIDE_TENSORS = 14  # of `LayerMaps.flatten`, for K and for V
RHT_SEED = 0x9E3779B9
SMALLEST_STEP = 2.0**-12  # of a map that evens out dimensions: what fp16 holds of common rows times it keeps 10 bits or more
LARGEST_INVERSE_ERROR = 2.0**-8  # of an entry of A^-1 A: what bfloat16 rounds a number near 1 by, at most


def hadamard(size: int) -> torch.Tensor:
    """Unnormalised Sylvester Hadamard matrix `[size, size]` float64: `H H = size I`. ValueError unless a power of two."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"size={size}: a Hadamard matrix needs a power of two")
    h = torch.ones(1, 1, dtype=torch.float64, device="cpu")  # whatever device a caller has made the default
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def block_hadamard(size: int) -> torch.Tensor:
    """Hadamard matrices in blocks of the largest power of two that divides size: `[size, size]` float64."""
    block = size & -size
    return torch.block_diag(*[hadamard(block)] * (size // block))


def butterfly(rows: torch.Tensor) -> torch.Tensor:
    """`H x` of rows x `[..., D]`, unnormalised, D a power of two, in their dtype and without gradients.

    Every stage adds and subtracts neighbours at a distance of 1, 2, 4, ... in this order, as vLLM does on a CPU: the bits of float32
    rows are vLLM's, and no BLAS has a say in them.
    """
    size = rows.shape[-1]
    source, target = rows.clone(memory_format=torch.contiguous_format), torch.empty_like(rows, memory_format=torch.contiguous_format)
    views = [(t[..., 0::2], t[..., 1::2], t[..., : size // 2], t[..., size // 2 :]) for t in (source, target)]
    for stage in range(size.bit_length() - 1):
        # Neighbours always stand side by side: a stage turns the bits of the index by one, and all stages turn them once around.
        even, odd = views[stage % 2][:2]
        sums, differences = views[1 - stage % 2][2:]
        torch.add(even, odd, out=sums)
        torch.sub(even, odd, out=differences)
    return target if size.bit_length() % 2 == 0 else source


def rht_signs(size: int) -> torch.Tensor:
    """vLLM's fixed vector of +-1 `[size]` float64."""
    generator = torch.Generator("cpu")
    generator.manual_seed(RHT_SEED)
    return 2 * torch.bernoulli(torch.full((size,), 0.5, device="cpu"), generator=generator).double() - 1


@lru_cache(maxsize=64)
def named_map(kind: str, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A and A^-1, each `[D, D]` float64, of a map that formats ask for by name (`Codec.map`)."""
    if kind == "hadamard":
        h = hadamard(head_size)
        return h, h / head_size
    if kind == "hadamard_unit":
        h = hadamard(head_size) / head_size**0.5
        return h, h
    if kind == "rht":
        block = head_size & -head_size  # largest power of two that divides
        a = hadamard(block) * rht_signs(block)
        return tuple(torch.block_diag(*[m] * (head_size // block)) for m in (a, a.T / block))
    raise ValueError(f"map={kind!r}: one of 'hadamard', 'hadamard_unit', 'rht'")


class MapOperands(NamedTuple):
    """A map as kernels take it: matrices `[HK or 1, D, D]` that a row x is multiplied with as `matrix x`, and their factors.

    A matrix with entries 0 and +-f only, any Hadamard matrix, is held as its signs in bfloat16 with the factor f, so that
    16-bit dots are exact; another one in float32, with the factor 1.
    """

    forward: torch.Tensor  # A
    query: torch.Tensor  # A^-T
    output: torch.Tensor  # A^-1
    mapped_key_mean: torch.Tensor | None  # A key_mean, [buckets, HK or 1, D] float32
    # [D] float32, where A is forward_factor * H diag(signs), and A^-T inverse_factor * H diag(signs), for all heads, H Hadamard matrices
    # in blocks of the largest power of two that divides D.
    signs: torch.Tensor | None
    # [HK or 1, D] float32, powers of two from 1 down and their negatives, where A of each head is H diag(steps): a map that evens out
    # dimensions first, which loses nothing in 16 bits.
    steps: torch.Tensor | None
    # [HK or 1, D] float32, where A^-T of each head is inverse_factor * H diag(diagonal), of signs or of steps; so A^-1 is its transpose.
    diagonal: torch.Tensor | None
    forward_factor: float
    inverse_factor: float


def _signs(matrix: torch.Tensor) -> tuple[torch.Tensor, float]:
    size = float(matrix.abs().amax())
    if size > 0 and bool(((matrix == 0) | (matrix.abs() == size)).all()):
        return matrix.sign().bfloat16(), size
    return matrix, 1.0


def _before_hadamard(matrix: torch.Tensor) -> torch.Tensor | None:
    """The numbers s `[HK or 1, D]` of `matrix[h] = H diag(s[h])`, H in blocks, where matrix `[HK or 1, D, D]` has them."""
    size = matrix.shape[-1]
    block = size & -size
    factors = torch.cat([matrix[:, i, i : i + block] for i in range(0, size, block)], 1)  # H's first row is all ones
    return factors if torch.equal(matrix, block_hadamard(size).to(matrix) * factors[:, None]) else None


def _hadamard_signs(matrix: torch.Tensor) -> torch.Tensor | None:
    """The signs s with `matrix[0] = H diag(s)`, H in blocks, where matrix `[HK or 1, D, D]`, of entries 0 and +-1 or others, has them."""
    if matrix.shape[0] > 1 or matrix.dtype != torch.bfloat16:
        return None
    signs = _before_hadamard(matrix)
    return None if signs is None or not bool(signs.abs().amin() > 0) else signs[0].float()


def _hadamard_steps(matrix: torch.Tensor) -> torch.Tensor | None:
    """The powers of two s, with signs, of `matrix[h] = H diag(s[h])`, H in blocks, where `matrix [HK or 1, D, D]` of float32 has them."""
    steps = None if matrix.dtype != torch.float32 else _before_hadamard(matrix)
    if steps is None:
        return None
    sizes = steps.abs()
    return steps if bool(((sizes.frexp().mantissa == 0.5) & (sizes >= SMALLEST_STEP) & (sizes <= 1)).all()) else None


@deprecated.keywords(offset="key_mean", metric="hessian")
@dataclass(frozen=True)
class LinearMap:
    """One side's map: `y = A (x - key_mean[position // 64])`.

    forward, inverse: A and A^-1, `[HK or 1, D, D]` float32; no entry of `inverse @ forward` is further than 2^-8 from the identity's.
    key_mean: `[buckets, HK or 1, D]` float32, keys only; positions beyond the table use its last row. None: no key means.
    hessian: `[HK or 1, D, D]` float32, symmetric: an error e of a mapped row costs `e^T hessian e`. It guides codecs that can round so
        (`Codec.encode_in`), and changes nothing for who reads. None: all errors cost alike.
    """

    forward: torch.Tensor
    inverse: torch.Tensor
    key_mean: torch.Tensor | None = None
    hessian: torch.Tensor | None = None
    operands: MapOperands = field(default=None, repr=False, compare=False)  # derived; given only to spare the work
    rounding: Rounding | None = field(default=None, repr=False, compare=False)  # of the Hessian; likewise

    def __post_init__(self) -> None:
        for name in ("forward", "inverse", "key_mean", "hessian"):
            t = getattr(self, name)
            if t is None and name in ("key_mean", "hessian"):
                continue
            if not isinstance(t, torch.Tensor):
                raise ValueError(f"{name}={type(t).__name__}: a tensor is needed")
            if t.ndim != 3 or t.dtype != torch.float32 or not t.numel():
                raise ValueError(f"{name}: shape {tuple(t.shape)} of {t.dtype}; 3 axes of float32 are needed, none of size 0")
        if self.forward.shape != self.inverse.shape or self.forward.shape[-1] != self.forward.shape[-2]:
            raise ValueError(f"forward, inverse: shapes {tuple(self.forward.shape)}, {tuple(self.inverse.shape)}; both [HK or 1, D, D]")
        size = self.forward.shape[-1]
        for name, fits in (("key_mean", lambda t: t.shape[2] == size), ("hessian", lambda t: t.shape[1:] == (size, size))):
            t = getattr(self, name)
            if t is not None and not fits(t):
                raise ValueError(f"{name}: shape {tuple(t.shape)}; rows of {size} numbers, as the matrices', are needed")
        if self.operands is None:
            for name in ("forward", "inverse", "key_mean", "hessian"):
                t = getattr(self, name)
                if t is not None and not bool(t.isfinite().all()):
                    raise ValueError(f"{name}: numbers that are not finite; finite ones are needed")
            self._check_inverse()
            object.__setattr__(self, "operands", self._operands())
        if self.hessian is not None and self.rounding is None:
            object.__setattr__(self, "rounding", Rounding.of(self.hessian))

    def _check_inverse(self) -> None:
        """ValueError where the one matrix does not undo the other: what was written with them would be read as something else."""
        product = self.inverse.double() @ self.forward.double()
        error = float((product - torch.eye(product.shape[-1], dtype=product.dtype, device=product.device)).abs().amax())
        if not error <= LARGEST_INVERSE_ERROR:
            allowed = f"at most {LARGEST_INVERSE_ERROR:g} is allowed: torch.linalg.inv(forward.double()).float() is an inverse"
            raise ValueError(f"inverse: inverse @ forward differs from the identity by {error:.3g}; {allowed}")

    def check(self, head_size: int, num_kv_heads: int, side: str) -> None:
        """ValueError unless the map fits rows of `head_size` of `num_kv_heads` heads. side: "k" or "v", for the message."""
        for name in ("forward", "key_mean", "hessian"):
            t = getattr(self, name)
            if t is not None and (t.shape[-1] != head_size or t.shape[1 if name == "key_mean" else 0] not in (1, num_kv_heads)):
                raise ValueError(
                    f"maps.{side}.{name}.shape={tuple(t.shape)}: the cache has {num_kv_heads} kv heads of {head_size} "
                    f"({'keys' if side == 'k' else 'values'})"
                )

    @property
    def num_heads(self) -> int:
        """Kv heads that it tells apart; 1: all share what it holds."""
        return max(1 if t is None else t.shape[axis] for t, axis in ((self.forward, 0), (self.key_mean, 1), (self.hessian, 0)))

    @cached_property
    def traits(self) -> tuple:
        """What one prepared call needs the maps of its layers to have in common: everything but the entries."""
        key_mean = None if self.key_mean is None else (self.key_mean.shape, self.key_mean.stride())
        hessian = None if self.hessian is None else self.hessian.shape
        return (
            self.forward.shape,
            self.operands.forward.dtype,
            self.operands.signs is None,
            self.operands.steps is None,
            self.operands[7:],
            key_mean,
            hessian,
        )

    @cached_property
    def _forward64(self) -> torch.Tensor:
        return self.forward.double()

    @cached_property
    def block_signs(self) -> torch.Tensor | None:
        """The signs s `[D]` where A is `H diag(s)` for all heads, H unnormalised Hadamard matrices in blocks (the map of int2 and int4)."""
        return _hadamard_signs(self.operands.forward) if self.operands.forward_factor == 1.0 else None

    def apply(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`A x` of rows x `[T, HK, D]` float32, rounded to `dtype`: what is encoded. Its bits depend on no BLAS. Sums that are too large
        become the largest number of `dtype`: of finite rows nothing that is not finite is stored.

        A Hadamard matrix of +-1 is a butterfly in float32, any other matrix a product in float64.
        """
        signs = self.block_signs
        if signs is not None:
            blocks = (rows * signs).unflatten(-1, (-1, signs.shape[0] & -signs.shape[0]))
            mapped = butterfly(blocks)
            if not bool(mapped.isfinite().all()):  # sums too large for float32 on the way: inf - inf
                mapped = torch.where(mapped.isfinite(), mapped, butterfly(blocks.double()))
            mapped = mapped.flatten(-2)
        else:
            matrix, wide = self._forward64, rows.double()
            mapped = wide @ matrix[0].mT if matrix.shape[0] == 1 else (wide.transpose(0, 1) @ matrix.mT).transpose(0, 1)
        largest = torch.finfo(dtype).max
        return mapped.clamp(-largest, largest).to(dtype)

    def _operands(self) -> MapOperands:
        (forward, forward_factor), (inverse, inverse_factor) = _signs(self.forward), _signs(self.inverse)
        mapped = None
        if self.key_mean is not None:
            rows = self.key_mean.double().transpose(0, 1) @ self.forward.double().mT  # [HK or 1, buckets, D]
            mapped = rows.transpose(0, 1).float().contiguous()
        query, steps = inverse.mT.contiguous(), _hadamard_steps(forward)
        signs, size = _hadamard_signs(query), forward.shape[-1]
        diagonal = signs[None] if signs is not None else None if steps is None else 1 / (steps * (size & -size))
        return MapOperands(
            forward.contiguous(), query, inverse.contiguous(), mapped, signs, steps, diagonal, forward_factor, inverse_factor
        )

    def heads(self, start: int, stop: int) -> LinearMap:
        """The map of kv heads start to before stop: of a rank that holds these. Itself where all heads share one."""

        def part(t: torch.Tensor | None, axis: int) -> torch.Tensor | None:
            return t if t is None or t.shape[axis] == 1 else t.narrow(axis, start, stop - start)

        given = self.forward, self.inverse, self.key_mean, self.hessian
        own = [part(t, axis) for t, axis in zip(given, (0, 0, 1, 0))]
        return self if all(a is b for a, b in zip(own, given)) else LinearMap(*own)

    def to(self, device: torch.device | str) -> LinearMap:
        """The same map on a device; itself where it is there. One map and one device give one object as long as anything holds it, so that
        caches made with one map share it."""

        def move(values):
            return [t.to(device) if isinstance(t, torch.Tensor) else t for t in values]

        given = self.forward, self.inverse, self.key_mean, self.hessian
        place = torch.empty(0, device=device).device  # "cuda" with its number
        if all(t is None or t.device == place for t in given):
            return self
        if (moved := self._elsewhere.get(place)) is None:
            with torch.inference_mode(False):  # it serves calls outside of it, too
                rounding = None if self.rounding is None else Rounding(*move(self.rounding))
                moved = self._elsewhere[place] = LinearMap(*move(given), MapOperands(*move(self.operands)), rounding)
        return moved

    @cached_property
    def _elsewhere(self) -> weakref.WeakValueDictionary[torch.device, LinearMap]:
        return weakref.WeakValueDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """For pickles and copies, which have places of their own."""
        return {name: value for name, value in vars(self).items() if name != "_elsewhere"}

    def key_mean_rows(self, positions: torch.Tensor) -> torch.Tensor:
        """Rows `[..., HK or 1, D]` of the table of key means for integer positions `[...]`."""
        return self.key_mean[(positions // KEY_MEAN_BUCKET).clamp_max(self.key_mean.shape[0] - 1).long()]


def rounding_of(codec: Codec, map_: LinearMap | None) -> Rounding | None:
    """What rows of `codec` are rounded by under `map_`; None where each number becomes the nearest one that the codec has."""
    return None if map_ is None or codec.encode_in is None else map_.rounding


def default_map(codec: Codec, head_size: int, device: torch.device | str = "cpu") -> LinearMap | None:
    """The map that `codec` asks for, shared by all heads; None where it asks for none."""
    return _default_map(codec.map, head_size, str(device))


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # it serves calls outside of it, too
def _default_map(kind: str, head_size: int, device: str) -> LinearMap | None:
    if kind == "none":
        return None
    forward, inverse = named_map(kind, head_size)
    return LinearMap(forward.float()[None], inverse.float()[None]).to(device)


@dataclass(frozen=True)
class LayerMaps:
    """The maps of one layer's K and V; None: rows are stored as they are. ValueError for a V map with key means: none is added back.

    calibration: the digest of the `Calibration` that they are of, for people; it changes nothing.
    """

    k: LinearMap | None = None
    v: LinearMap | None = None
    calibration: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("k", "v"):
            if not isinstance(getattr(self, name), (LinearMap, type(None))):
                raise ValueError(f"{name}={type(getattr(self, name)).__name__}: a LinearMap or None is needed")
        if self.v is not None and self.v.key_mean is not None:
            raise ValueError(f"v.key_mean: shape {tuple(self.v.key_mean.shape)}; None is needed: only keys have means")

    @classmethod
    def of(cls, fmt: Format, head_size: int, head_size_v: int, device: torch.device | str = "cpu") -> LayerMaps:
        """What the format asks for."""
        return cls(default_map(fmt.k, head_size, device), default_map(fmt.v, head_size_v, device))

    def check_use(self, latent: bool) -> None:
        """ValueError for maps that rows of latents cannot have: a latent is a value too, to which no mean is added back."""
        if latent and self.by_position:
            raise ValueError(
                f"maps.k.key_mean: shape {tuple(self.k.key_mean.shape)}; latents take none, None is needed: they are values too"
            )

    @property
    def by_position(self) -> bool:
        """Whether what is stored of a key depends on its position: its map has key means."""
        return self.k is not None and self.k.key_mean is not None

    def heads(self, start: int, stop: int) -> LayerMaps:
        """The maps of kv heads start to before stop."""
        return replace(self, **{name: side.heads(start, stop) for name in ("k", "v") if (side := getattr(self, name)) is not None})

    def flatten(self) -> tuple[list[torch.Tensor | None], list[float]]:
        """Tensors and numbers, for an operator, which takes no dataclasses. `unflatten` reverses it."""
        tensors, factors = [], []
        for side in (self.k, self.v):
            if side is None:
                tensors += [None] * SIDE_TENSORS
                factors += [1.0, 1.0]
            else:
                rounding = [None] * 3 if side.rounding is None else side.rounding
                tensors += [side.forward, side.inverse, side.key_mean, side.hessian, *side.operands[:7], *rounding]
                factors += side.operands[7:]
        return tensors, factors

    @classmethod
    def unflatten(cls, tensors: list[torch.Tensor | None], factors: list[float]) -> LayerMaps:
        """The maps that `flatten` took apart."""

        def side(t, f):
            rounding = None if t[3] is None else Rounding(*t[11:])
            return None if t[0] is None else LinearMap(*t[:4], MapOperands(*t[4:11], *f), rounding)

        return cls(side(tensors[:SIDE_TENSORS], factors[:2]), side(tensors[SIDE_TENSORS:], factors[2:]))

    def fingerprint(self) -> str:
        """Hash of what bytes mean: two caches with the same one hold comparable bytes. Hessians, which only guide a writer, are left
        out."""
        digest = hashlib.sha256()
        for side in (self.k, self.v):
            for tensor in () if side is None else (side.forward, side.inverse, side.key_mean):
                digest.update(b"-" if tensor is None else tensor.detach().cpu().contiguous().numpy().tobytes())
            digest.update(b"|")
        return digest.hexdigest()[:16]
