"""Arguments of any type and value, in plain data; and what is legal, by predicate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from hypothesis import strategies as st

INDEX = ("int32", "int64")
FLOATS = ("float32", "bfloat16", "float16")
ALL_DTYPES = (*INDEX, *FLOATS, "float64", "uint8", "int8", "bool", "float8_e4m3fn", "complex64")
Legal = Callable[[Any], bool]


@dataclass(frozen=True)
class Tensor:
    """A tensor to make, so that a case can be printed."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    fill: float = 0

    def made(self) -> torch.Tensor:
        return torch.full(self.shape, self.fill).to(getattr(torch, self.dtype))


def made(value: Any) -> Any:
    """What a case names, as it is given to a call."""
    return value.made() if isinstance(value, Tensor) else value


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([-(2**63) - 1, 10_000]),  # larger ones are legal sizes, of more memory than there is
    st.floats(allow_nan=True, allow_infinity=True, width=16),
    st.text("a1/-é ", max_size=4),
    st.just(b"x"),
    st.just(1j),
    st.just(object),
)
TENSORS = st.builds(
    Tensor,
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.sampled_from(ALL_DTYPES),
    st.sampled_from([0, 1, 2, -1, 100, math.nan, math.inf]),
)
LISTS = st.lists(st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.tuples(SCALARS, SCALARS)), max_size=4)
ANYTHING = st.one_of(SCALARS, TENSORS, LISTS, LISTS.map(tuple), st.dictionaries(st.text("ab", max_size=2), SCALARS, max_size=2))


def integer(low: int, high: float = math.inf, none: bool = False) -> Legal:
    return lambda v: (none and v is None) or (isinstance(v, int) and not isinstance(v, bool) and low <= v <= high)


def number(low: float = -math.inf, above: bool = False, none: bool = False, high: float = math.inf) -> Legal:
    def legal(v: Any) -> bool:
        finite = isinstance(v, Real) and not isinstance(v, bool) and math.isfinite(v)
        return (none and v is None) or (finite and (v > low if above else v >= low) and v <= high)

    return legal


def boolean(v: Any) -> bool:
    return isinstance(v, bool)


def tensor(shape: Sequence[int | None], dtypes: Sequence[str], none: bool = False, low: float = -math.inf, high: float = math.inf) -> Legal:
    """shape: None for any size. low, high: of its numbers, high left out."""

    def legal(v: Any) -> bool:
        if none and v is None:
            return True
        if not isinstance(v, Tensor) or v.dtype not in dtypes or len(v.shape) != len(shape):
            return False
        fits = all(want is None or want == got for want, got in zip(shape, v.shape))
        return fits and (0 in v.shape or (low == -math.inf and high == math.inf) or low <= v.fill < high)

    return legal


def either(*legal: Legal) -> Legal:
    return lambda v: any(one(v) for one in legal)


def among(*values: Any) -> Legal:
    return lambda v: isinstance(v, (str, type(None))) and v in values


def never(v: Any) -> bool:
    return False


def listed(value: Any) -> Any:
    """A tensor as lists, as who takes a sequence of integers sees it."""
    return value.made().tolist() if isinstance(value, Tensor) else value


def pages(count: int, length: int | None = None, none: bool = False) -> Legal:
    """Distinct numbers of pages of a cache, as a sequence of integers."""

    def legal(v: Any) -> bool:
        v = listed(v)
        if isinstance(v, (str, bytes, dict)) and not v:
            return length in (None, 0)
        own = isinstance(v, (list, tuple)) and all(integer(0, count - 1)(n) for n in v) and len(set(v)) == len(v)
        return (none and v is None) or (own and length in (None, len(v)))

    return legal


def integers_up_to(*most: float) -> Legal:
    """A sequence of integers, one for each of `most`."""

    def legal(v: Any) -> bool:
        v = listed(v)
        return isinstance(v, (list, tuple)) and len(v) == len(most) and all(isinstance(n, int) and 0 <= n <= m for n, m in zip(v, most))

    return legal


def indices(count: int) -> Legal:
    """A sequence of integers below `count`, of any length."""

    def legal(v: Any) -> bool:
        v = listed(v)
        none = isinstance(v, (str, bytes, dict)) and not v
        return none or (isinstance(v, (list, tuple)) and all(isinstance(n, int) and 0 <= n < count for n in v))

    return legal
