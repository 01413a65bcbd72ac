"""The inputs of one shape, and what a right answer is: float64 attention over what a contestant's cache holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch

from .shapes import Shape

CHECKED_SEQUENCES, CHECKED_QUERIES = 3, 24
RowsOf = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Unavailable(Exception):
    """A contestant cannot run here, or not this shape: why."""


class Entry(NamedTuple):
    """A contestant that is ready for one problem.

    call: does the work. Attention returns `[B * Q, HQ, D]`; a write returns nothing.
    rows: slots `[T]` -> the keys and values `[T, HK, D]` float64 that lie in its cache.
    nbytes: of what a call must at least move.
    graph: whether a CUDA graph can capture the call.
    note: how it was set up, where that is not the shape's own: "page 256".
    """

    call: Callable[[], torch.Tensor | None]
    rows: RowsOf
    nbytes: int
    graph: bool = True
    note: str = ""


class Problem:
    """Random keys, values and queries in bf16, in pages whose order is random.

    key, value: `[T, HK, D]`, V's D its own. q: `[B * Q, HQ, D]`. block_table: int32 `[B, pages]`. slots, positions: int64 `[T]`, of each
    token.
    new: int64, the tokens that a write or a step writes: the last N of each sequence. seen: those that some query sees, or all.
    seq_lens `[B]`, cu_seqlens_q `[B + 1]`: int32. All on `device`.
    """

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        self.shape, self.device = shape, device
        self.generator = torch.Generator(device).manual_seed(seed)
        s, batch = shape, shape.B if shape.L else 1
        self.key, self.value = (self._normal(s.num_tokens, s.HK, size) for size in (s.D, s.head_size_v))
        self.q = self._normal(batch * s.Q, s.HQ, s.D)
        self.length = s.L or s.N
        pages = -(-self.length // s.P)
        self.num_blocks = batch * pages
        order = torch.randperm(self.num_blocks, generator=self.generator, device=device)
        self.block_table = order.view(batch, pages).int()
        position = torch.arange(self.length, device=device)
        self.positions = position.repeat(batch)
        self.slots = (self.block_table[:, position // s.P].long() * s.P + position % s.P).flatten()
        self.seq_lens = torch.full((batch,), self.length, device=device, dtype=torch.int32)
        self.cu_seqlens_q = torch.arange(batch + 1, device=device, dtype=torch.int32) * s.Q
        self.scale = s.D**-0.5
        token = torch.arange(s.num_tokens, device=device).view(batch, -1)
        self.new = token[:, self.length - s.N :].flatten()
        self.seen = token[:, self.length - (s.tokens_read // batch or self.length) :].flatten()
        self._mark_ends()
        self._plain: dict[torch.dtype, RowsOf] = {}
        self._kept: tuple[str, Any] = ("", None)
        self._expected: tuple[RowsOf | None, list[torch.Tensor]] = (None, [])

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returned when it was last asked for this name; one name at a time is kept."""
        if self._kept[0] != name:
            self._kept = ("", None)  # frees the other's memory first
            self._kept = (name, make())
        return self._kept[1]

    def _mark_ends(self) -> None:
        """Turn each sequence's first and last key towards its last query, to a score of log(L) / 2 where others are about 1.
        Among random keys one that is lost, or seen too early, changes a mean of thousands by less than its rounding; these
        change it by half."""
        s, group = self.shape, self.shape.HQ // self.shape.HK
        towards = self.q.view(-1, s.Q, s.HK, group, s.D)[:, -1].float().mean(2)
        towards = towards * (0.5 * math.log(self.length) * group * s.D**-0.5)
        for token in (0, -1):
            self.key.view(-1, self.length, s.HK, s.D)[:, token] = towards.to(self.key.dtype)

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator, device=self.device, dtype=torch.bfloat16)

    def paged(self, dtype: torch.dtype, page: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Caches `[num_blocks, P, HK, D]` of K and V as 16 or 8 bits, and their block table; page: another size of page."""
        page = page or self.shape.P
        pages = -(-self.length // page)
        order = torch.randperm(len(self.seq_lens) * pages, generator=self.generator, device=self.device)
        table = order.view(-1, pages).int() if page != self.shape.P else self.block_table
        position = torch.arange(self.length, device=self.device)
        slots = (table[:, position // page].long() * page + position % page).flatten()
        caches = []
        for rows in (self.key, self.value):
            cache = torch.zeros(table.numel() * page, *rows.shape[1:], dtype=dtype, device=self.device)
            cache[slots] = rows.to(dtype) if dtype.itemsize > 1 else 0
            if dtype.itemsize == 1:  # an 8-bit float cannot be indexed everywhere
                cache.view(torch.uint8)[slots] = rows.to(dtype).view(torch.uint8)
            if self.shape.kind == "step":  # what is not written before it is read shows
                cache[slots[self.new]] = -rows[self.new].to(dtype)
            caches.append(cache.view(-1, page, *rows.shape[1:]))
        return *caches, table

    def plain_rows(self, dtype: torch.dtype) -> RowsOf:
        """What a cache of that dtype holds of the tokens, whatever its pages are."""
        if dtype in self._plain:
            return self._plain[dtype]
        token = self.token_of
        self._plain[dtype] = lambda slots: tuple(rows[token[slots]].to(dtype).double() for rows in (self.key, self.value))
        return self._plain[dtype]

    @cached_property
    def token_of(self) -> torch.Tensor:
        """int64 `[slots of all pages]`: which token lies in each; -1: none."""
        token = torch.full((self.num_blocks * self.shape.P,), -1, device=self.device)
        token[self.slots] = torch.arange(len(self.slots), device=self.device)
        return token

    def plain_bytes(self, item_bytes: int) -> int:
        """Bytes that attention over a cache without metadata must read."""
        return self.shape.tokens_read * self.shape.HK * (self.shape.D + self.shape.head_size_v) * item_bytes

    @cached_property
    def sample(self) -> list[tuple[int, torch.Tensor]]:
        """Sequences, and queries of each, that are checked: the first and the last, and random ones."""
        sequences = self._some(len(self.seq_lens), CHECKED_SEQUENCES)
        return [(int(s), self._some(self.shape.Q, CHECKED_QUERIES)) for s in sequences]

    def _some(self, count: int, most: int) -> torch.Tensor:
        order = torch.randperm(count, generator=self.generator, device=self.device)[:most]
        return torch.cat([order, order.new_tensor([0, count - 1])]).unique()

    def attention_error(self, entry: Entry, out: torch.Tensor) -> float:
        """`|out - expected| / |expected|` over the sample; infinite where out has a NaN or another shape."""
        s = self.shape
        if out.shape != (*self.q.shape[:2], s.head_size_v) or not bool(torch.isfinite(out).all()):
            return math.inf
        if self._expected[0] is not entry.rows:
            self._expected = (entry.rows, [self._right(entry.rows, *some) for some in self.sample])
        wrong = right = 0.0
        for (sequence, queries), expected in zip(self.sample, self._expected[1]):
            got = out.view(-1, s.Q, s.HQ, s.head_size_v)[sequence, queries].double()
            wrong += float((got - expected).square().sum())
            right += float(expected.square().sum())
        return math.sqrt(wrong / right)

    def _right(self, rows: RowsOf, sequence: int, queries: torch.Tensor) -> torch.Tensor:
        """The answer `[M, HQ, D]` for queries `[M]` of a sequence."""
        s = self.shape
        q = self.q.view(-1, s.Q, s.HQ, s.D)[sequence, queries].double()
        return self._attention(q, s.L - s.Q + queries, *rows(self.slots.view(-1, self.length)[sequence]))

    def _attention(self, q: torch.Tensor, position: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """q `[M, HQ, D]` at positions `[M]` over keys and values `[L, HK, D]`, all float64 -> `[M, HQ, D]`, D of the values."""
        distance = position[:, None] - torch.arange(len(keys), device=self.device)
        hidden = (distance < 0) | (distance >= self.shape.W if self.shape.W else False)
        out = q.new_empty(*q.shape[:2], values.shape[-1])
        group = self.shape.HQ // self.shape.HK
        for h in range(self.shape.HQ):  # head by head: the scores of one are large enough
            score = (q[:, h] @ keys[:, h // group].T * self.scale).masked_fill(hidden, -math.inf)
            out[:, h] = score.softmax(-1) @ values[:, h // group]
        return out

    def write_error(self, entry: Entry, expected: RowsOf) -> float:
        """`|stored - expected| / |expected|` over all tokens that were written."""
        wrong, right, slots = 0.0, 0.0, self.slots[self.new]
        for got, want in zip(entry.rows(slots), expected(slots)):
            if not bool(torch.isfinite(got).all()):
                return math.inf
            wrong += float((got - want).square().sum())
            right += float(want.square().sum())
        return math.sqrt(wrong / right)
