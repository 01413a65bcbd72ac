"""How a model turns queries and keys with their position, found out from what it did, and averages over positions.

Every rotary embedding is `y_i = cos_i x_i + sin_i s_i x_{partner(i)}` with signs s: models differ in which dimensions are partners and
which are not turned at all. `Layout.found` tries those in use on rows before and after; what fits none is not understood.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

AT_ONCE = 1 << 14  # positions of one call of a model's rotary module
LAYOUTS = tuple((pairs, place) for pairs in ("halves", "neighbours") for place in ("first", "last"))
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # how a table `[N, R]` repeats the angles of R / 2 pairs
    "halves": lambda t: t[:, : t.shape[1] // 2],
    "neighbours": lambda t: t[:, ::2],
    "once": lambda t: t,
}


class Table(NamedTuple):
    """Cosines and sines of the pairs at N positions, each `[N, pairs]`, with the model's scaling in them."""

    cos: torch.Tensor
    sin: torch.Tensor


def form_of(embedding: Any) -> str | None:
    """How what a rotary module returned repeats its angles; None where it is no such thing."""
    rows = _rows(embedding)
    if rows is None:
        return None
    for form, view in (("halves", lambda t: t[:, t.shape[1] // 2 :]), ("neighbours", lambda t: t[:, 1::2])):
        if rows[0].shape[1] % 2 == 0 and all(torch.equal(FORMS[form](t), view(t)) for t in rows):
            return form
    return "once"


def table_of(embedding: Any, form: str) -> Table:
    """Table of what a rotary module returned, rows of a batch one after the other."""
    return Table(*(FORMS[form](t) for t in _rows(embedding)))


def _rows(embedding: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Cosines and sines `[rows, R]` float32 of a pair of tensors or of a complex one. None for anything else, and where the axes of
    images and videos differ, which they do not in text."""
    if isinstance(embedding, torch.Tensor) and embedding.is_complex():
        embedding = embedding.real, embedding.imag
    if not isinstance(embedding, tuple | list) or len(embedding) != 2:
        return None
    if not all(isinstance(t, torch.Tensor) and t.is_floating_point() and t.ndim >= 2 for t in embedding):
        return None
    if embedding[0].ndim == 4 and embedding[0].shape[0] > 1:  # [axes, batch, tokens, R]
        if not all(torch.equal(t, t[:1].expand_as(t)) for t in embedding):
            return None
        embedding = [t[0] for t in embedding]
    return tuple(t.detach().float().reshape(-1, t.shape[-1]) for t in embedding)


def unturned(embedding: Any) -> Any:
    """The same where nothing is turned: cosines 1, sines 0."""
    if isinstance(embedding, torch.Tensor):
        return torch.ones_like(embedding)
    cos, sin = embedding
    return type(embedding)((torch.ones_like(cos), torch.zeros_like(sin)))


class Turn(NamedTuple):
    """The rotations of N positions for rows of D dimensions: `y = cos * x + sin * x[partner]`, cos and sin `[N, D]`."""

    cos: torch.Tensor
    sin: torch.Tensor
    partner: torch.Tensor

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `[..., N, D]` float32."""
        return rows * self.cos + rows[..., self.partner] * self.sin

    def inverse(self) -> Turn:
        """What undoes it: the transpose, and the scaling divided out."""
        squared = self.cos.square() + self.sin.square()
        return Turn(self.cos / squared, -self.sin / squared, self.partner)


@dataclass(frozen=True)
class Layout:
    """Which dimensions a rotation turns together.

    pairs: "halves" (dimension i of the turned ones with i + R / 2) or "neighbours" (2 i with 2 i + 1). place: whether the R turned
    dimensions are the first or the last; the others stay as they are. backwards: the angle counts the other way round.
    """

    pairs: str
    place: str
    backwards: bool = False

    def turn(self, table: Table, head_size: int) -> Turn | None:
        """The rotations of a table; None where the head has fewer dimensions."""
        half = table.cos.shape[1]
        if 2 * half > head_size:
            return None
        start = 0 if self.place == "first" else head_size - 2 * half
        index = torch.arange(half, device="cpu")
        left, right = (index, index + half) if self.pairs == "halves" else (2 * index, 2 * index + 1)
        left, right = left + start, right + start
        cos = table.cos.new_ones(table.cos.shape[0], head_size)
        sin, partner = torch.zeros_like(cos), torch.arange(head_size, device="cpu")
        partner[left], partner[right] = right, left
        cos[:, left] = cos[:, right] = table.cos
        sin[:, right] = -table.sin if self.backwards else table.sin
        sin[:, left] = -sin[:, right]
        return Turn(cos, sin, partner.to(cos.device))

    @classmethod
    def found(cls, before: torch.Tensor, after: torch.Tensor, table: Table, dtype: torch.dtype) -> Layout | None:
        """The layout that turns rows `before [..., N, D]` into `after`, as a model does that computes in `dtype`; None if none does."""
        before, after = before.float(), after.float()
        bound = max(8 * torch.finfo(dtype).eps, 1e-5) * float(after.norm())
        for backwards in (False, True):
            for pairs, place in LAYOUTS:
                layout = cls(pairs, place, backwards)
                turn = layout.turn(table, before.shape[-1])
                if turn is not None and float((turn.apply(before) - after).norm()) <= bound:
                    return layout
        return None


@dataclass(frozen=True, eq=False)
class Rotary:
    """A model's rotary module as it was called: it gives the angles of any positions.

    key: equal for calls that differ in nothing but positions.
    """

    module: torch.nn.Module
    args: tuple
    kwargs: dict
    form: str

    @property
    def key(self) -> tuple:
        """What tells calls of one rotation from those of another."""
        plain = [v for v in (*self.args, *self.kwargs.values()) if not isinstance(v, torch.Tensor)]
        return id(self.module), self.form, tuple(map(repr, plain))

    def tables(self, count: int, bucket: int) -> Iterator[Table]:
        """Tables of positions 0 to before count, whole buckets of them at a time.

        Angles that depend on how long the text is (dynamic and long RoPE) are those of a text that ends with the bucket."""
        module = copy.deepcopy(self.module)  # some keep what they were called for last
        kind = str(getattr(module, "rope_type", ""))
        step = bucket if "dynamic" in kind or "longrope" in kind else AT_ONCE // bucket * bucket
        for start in range(0, count, step):
            positions = torch.arange(start, min(start + step, count), device="cpu")
            args = [_at(positions, value) for value in self.args]
            yield table_of(module(*args, **{name: _at(positions, value) for name, value in self.kwargs.items()}), self.form)


def _at(positions: torch.Tensor, value: Any) -> Any:
    """An argument of a rotary module in a call for other positions `[N]`: these in place of positions, `[.., N]`, and of hidden states,
    which matter for their dtype and device only, one float32 number."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return value.reshape(-1)[:1].view(1, 1, 1).float()
    batch = (1,) if value.ndim > 1 else ()
    return positions.to(value.device).expand(*value.shape[:-2], *batch, len(positions))


@dataclass(frozen=True, eq=False)
class Average:
    """What averages over positions need of the rotations: turned means and turned second moments follow from these exactly.

    mean: `Turn` of the mean cosines and sines of each bucket, `[buckets, D]`. cos_cos, cos_sin, sin_sin: `[D, D]` float64, means over
    all positions of `cos_i cos_j`, `cos_i sin_j`, `sin_i sin_j`.
    """

    mean: Turn
    cos_cos: torch.Tensor
    cos_sin: torch.Tensor
    sin_sin: torch.Tensor

    @classmethod
    def of(cls, tables: Iterator[Table], layout: Layout, head_size: int, bucket: int) -> Average:
        """Averages over all positions of the tables, and over each bucket of positions."""
        means, sums, count = [], [0.0, 0.0, 0.0], 0
        for table in tables:
            cos, sin, partner = layout.turn(table, head_size)
            means.append([torch.stack([part.mean(0) for part in t.split(bucket)]) for t in (cos, sin)])
            sums = [total + (a.mT @ b).double() for total, (a, b) in zip(sums, ((cos, cos), (cos, sin), (sin, sin)))]
            count += len(cos)
        mean = Turn(*(torch.cat(parts) for parts in zip(*means)), partner)
        return cls(mean, *(total / count for total in sums))

    def turned_mean(self, mean: torch.Tensor) -> torch.Tensor:
        """`[buckets, H, D]`: the mean over each bucket's positions of the turned rows `mean [H, D]`."""
        return self.mean.apply(mean[:, None].float()).transpose(0, 1)

    def turned_moments(self, moments: torch.Tensor) -> torch.Tensor:
        """`[H, D, D]` float64: the mean over positions of the second moments of turned rows, of those before, `moments [H, D, D]`."""
        m, p = moments.double(), self.mean.partner
        rows, columns = m[:, p], m[:, :, p]
        return self.cos_cos * m + self.cos_sin * columns + self.cos_sin.mT * rows + self.sin_sin * rows[:, :, p]
