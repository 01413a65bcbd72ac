"""The index tensors of forward passes, and the prepared calls over them: passes of any size, and decoding with one token a sequence."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ..cache import PagedCache
from ..exact import ExactTokens
from ..geometry import Kind
from ..prepared import PreparedAttend, PreparedWrite, prepare_attend, prepare_write
from ..shadow import ExactPages, ExactStep, ShadowedCache


class Pass:
    """A forward pass, the same for all layers of a kind. T tokens that are no padding, of S sequences.

    slots: `[T]`. block_table: `[S, pages]`. seq_lens: `[S]`. cu_seqlens_q: `[S + 1]`. All int32.
    lengths: (queries, keys) of each sequence; None: the device alone knows them.
    positions: int32 `[T]`, where the tokens stand in their sequences, padding not counted; None for a pass that stores nothing.
    exact: what it reads exactly; None: nothing is.
    """

    def __init__(
        self,
        slots: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        lengths: list[tuple[int, int]] | None = None,
        positions: torch.Tensor | None = None,
    ) -> None:
        self.slots, self.block_table, self.seq_lens, self.cu_seqlens_q = slots, block_table, seq_lens, cu_seqlens_q
        self.lengths, self.positions = lengths, positions
        self.exact: ExactStep | None = None
        self.prepared: dict[Any, PreparedAttend | PreparedWrite] = {}

    def write(self, cache: PagedCache | ShadowedCache, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the new rows of a layer, `[T, HK, D]` and `[T, HK, D_V]`."""
        kind = "write", cache.maps.by_position
        if kind not in self.prepared:
            self.prepared[kind] = prepare_write(self.slots, self.positions if cache.maps.by_position else None, exact=self.exact)
        self.prepared[kind](cache, key, value)

    def attend(self, cache: PagedCache | ShadowedCache, q: torch.Tensor, sinks: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        """Attention of a layer's `q [T, HQ, D]`. options: of `prepare_attend`; layers with the same ones share what is prepared."""
        key = tuple(options.items())
        if key not in self.prepared:
            batch = {"block_table": self.block_table, "seq_lens": self.seq_lens, "cu_seqlens_q": self.cu_seqlens_q}
            self.prepared[key] = prepare_attend(**batch, lengths=self.lengths, exact=self.exact, **options)
        return self.prepared[key](cache, q, sinks=sinks)


class Step(Pass):
    """A pass of which the host knows the lengths, N padded tokens a sequence.

    rows: `[T]`, where the tokens stand in `[S * N]`; None: everywhere.
    late: padding that stands after tokens of its sequence: it sees those before it, as in transformers, where a prompt padded on the
        right is continued from the output of its last padding token. Each is a sequence of its own that stores nothing. None: none.
    """

    def __init__(
        self,
        rows: torch.Tensor | None,
        *tensors: torch.Tensor,
        lengths: list[tuple[int, int]],
        positions: torch.Tensor | None = None,
        late: Step | None = None,
    ) -> None:
        super().__init__(*tensors, lengths, positions)
        self.rows, self.late = rows, late

    def to(self, device: torch.device) -> Step:
        """The same step with its tensors on a device."""
        tensors = (self.rows, self.slots, self.block_table, self.seq_lens, self.cu_seqlens_q, self.positions)
        *there, positions = (None if t is None else sent(t, device) for t in tensors)
        late = None if self.late is None else self.late.to(device)
        return Step(*there, lengths=self.lengths, positions=positions, late=late)


class Late(NamedTuple):
    """Padding after tokens, in one forward pass: where it stands (see `Step.rows`), in which sequences, and how many tokens precede it."""

    rows: torch.Tensor
    sequences: torch.Tensor
    lengths: torch.Tensor

    def step(self, block_table: torch.Tensor) -> Step:
        """The rows as a step of its own, one query a sequence."""
        ends = torch.arange(len(self.rows) + 1, dtype=torch.int32, device=self.rows.device)
        pairs = [(1, n) for n in self.lengths.tolist()]
        return Step(self.rows, self.rows[:0], block_table[self.sequences], self.lengths.int(), ends, lengths=pairs)


class Decoding(Pass):
    """Passes of one token a sequence on one device: a pass advances these tensors in place, so that every one has the same shapes and
    addresses. The prepared calls stay; a pass can be captured in a graph, and reads nothing on the host.

    lengths_now: int32 `[S]`, tokens of each sequence. state: all the numbers that change, in one tensor, which begins at `place`.
    capacity: tokens that the table has room for. valid: bool `[S]`; False once a sequence was full, or its mask at odds with what is
        stored: what it gets then is not a number, and `Progress.settle` refuses.
    """

    def __init__(
        self, kind: Kind, block_size: int, batch_size: int, width: int, device: torch.device, tokens: ExactTokens | None = None
    ) -> None:
        padded = -(-batch_size // 4) * 4  # every part begins at a multiple of 16 bytes
        with torch.inference_mode(False):
            self.state = torch.zeros(4 * padded + batch_size * width, dtype=torch.int32, device=device)
            self.lengths_now, seq_lens, slots, positions = (self.state[i * padded : i * padded + batch_size] for i in range(4))
            table = self.state[4 * padded :].view(batch_size, width)
            self.place = self.state[:4]
            self.valid = torch.ones(batch_size, dtype=torch.bool, device=device)
            ends = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
            super().__init__(slots, table, seq_lens, ends, positions=positions)
        if tokens is not None:
            self.exact = ExactStep(tokens, block_size, batch_size, batch_size, device, few=True)
        self.kind, self.block_size, self.device = kind, block_size, device
        self.batch_size, self.width, self.capacity = batch_size, width, width * block_size
        self.turn = -1  # the pass that they were advanced for
        self.warm = False

    def fits(self, batch_size: int, width: int) -> bool:
        """Whether it was made for this many sequences, and for at least this many pages of each."""
        return batch_size == self.batch_size and width <= self.width

    def load(self, rows: Sequence[Sequence[int]], lengths: Sequence[int] | None) -> None:
        """The pages of each sequence, and its tokens (None: as they are). A page that is not held reads 0."""
        table = torch.tensor([[*row, *[0] * (self.width - len(row))] for row in rows], dtype=torch.int32, device="cpu").clamp_min_(0)
        self.turn = -1
        self.block_table.copy_(sent(table, self.device))
        if lengths is not None:
            self.lengths_now.copy_(sent(torch.tensor(lengths, dtype=torch.int32, device="cpu"), self.device))
            self.seq_lens.copy_(self.lengths_now.clamp_min(1))
            self.valid.fill_(True)

    def advance(self, mask: torch.Tensor | None, pool: ExactPages | None = None) -> None:
        """One token more for every sequence. mask: see `brief`; None: all are real. pool: says what is read exactly."""
        lengths, size = self.lengths_now, self.block_size
        page = self.block_table.gather(1, (lengths // size).clamp_max(self.width - 1).long()[:, None])[:, 0]
        valid, real = lengths < self.capacity, None
        if mask is not None:
            total, real = mask[:, 0, 0].unbind(1)
            valid &= total - real == lengths
            if self.kind.window:
                valid &= (real > 0) | (lengths == 0)
        self.valid &= valid
        stored = self.valid if real is None else self.valid & (real > 0)
        self.slots.copy_(torch.where(stored, page * size + lengths % size, -1))
        self.positions.copy_(lengths)
        lengths += stored
        torch.clamp(lengths, min=1, out=self.seq_lens)
        if pool is not None:
            pool.advance(self.block_table, self.seq_lens, self.cu_seqlens_q, self.slots, self.exact)

    def poison(self, out: torch.Tensor) -> torch.Tensor:
        """Rows `[S, HQ, D]` of sequences that are not valid become not a number."""
        return out.masked_fill_(~self.valid[:, None, None], float("nan"))


def brief(mask: torch.Tensor) -> torch.Tensor:
    """What a pass of one token a sequence needs of a padding mask `[S, tokens]`: int32 `[S, 1, 1, 2]`, how many of the tokens are real,
    and whether the last is. It has the same shape in every pass, and nothing is read on the host."""
    mask = mask.bool()
    return torch.stack([mask.sum(1, dtype=torch.int32), mask[:, -1].int()], 1)[:, None, None]


def alone() -> bool:
    """Whether what is called now will run again without the host: it is being compiled, or captured."""
    return torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def sent(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`; the host does not wait."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)


# A graph that was captured over a `Decoding` runs over its addresses, and those of the scratch that its prepared calls keep. They live
# on when its cache is gone, and the next cache of the same geometry takes them over: torch.compile finds what it compiled.
_FREE: dict[Hashable, list[Decoding]] = {}
_MADE: list[Decoding] = []


def lasting(
    owner: object,
    geometry: Hashable,
    kind: Kind,
    block_size: int,
    batch_size: int,
    width: int,
    device: torch.device,
    tokens: ExactTokens | None = None,
) -> Decoding:
    """A `Decoding` that is never freed: its owner's as long as that lives, then another's of the same geometry."""
    free = _FREE.setdefault((geometry, kind, block_size, batch_size, width, device, tokens), [])
    if free:
        decoding = free.pop()
    else:
        decoding = Decoding(kind, block_size, batch_size, width, device, tokens)
        torch._dynamo.mark_static_address(decoding.place, guard=False)
        _MADE.append(decoding)
    weakref.finalize(owner, free.append, decoding)
    return decoding
