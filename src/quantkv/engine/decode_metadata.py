"""Forward metadata of decode: one token a sequence, over tensors that stay where they are, so that a pass can be captured in a graph."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence

import torch

from ..calls import Batch
from ..copies import CopiedPages, FullPrecisionStep
from ..full_precision import FullPrecisionTokens
from ..geometry import Kind
from .forward_metadata import ForwardMetadata, to_device


class DecodeMetadata(ForwardMetadata):
    """Passes of one token a sequence on one device: a pass advances these tensors in place, so that every one has the same shapes and
    addresses. The prepared calls stay; a pass can be captured in a graph, and reads nothing on the host.

    lengths_now: int32 `[S]`, tokens of each sequence. state: all the numbers that change, in one tensor, which begins at `place`.
    capacity: tokens that the table has room for. valid: bool `[S]`; False once a sequence was full, or its mask at odds with what is
        stored: what it gets then is not a number, and `CachePositions.settle` refuses.
    """

    def __init__(
        self, kind: Kind, block_size: int, batch_size: int, width: int, device: torch.device, tokens: FullPrecisionTokens | None = None
    ) -> None:
        padded = -(-batch_size // 4) * 4  # every part begins at a multiple of 16 bytes
        with torch.inference_mode(False):
            self.state = torch.zeros(4 * padded + batch_size * width, dtype=torch.int32, device=device)
            self.lengths_now, seq_lens, slots, positions = (self.state[i * padded : i * padded + batch_size] for i in range(4))
            table = self.state[4 * padded :].view(batch_size, width)
            self.place = self.state[:4]
            self.valid = torch.ones(batch_size, dtype=torch.bool, device=device)
            ends = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
            super().__init__(Batch(ends, seq_lens, 1), table, slots, positions)
        self.seq_lens = seq_lens
        if tokens is not None:
            self.full_precision = FullPrecisionStep(tokens, block_size, batch_size, batch_size, device)
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
        self.block_table.copy_(to_device(table, self.device))
        if lengths is not None:
            self.lengths_now.copy_(to_device(torch.tensor(lengths, dtype=torch.int32, device="cpu"), self.device))
            self.seq_lens.copy_(self.lengths_now.clamp_min(1))
            self.valid.fill_(True)

    def advance(self, mask: torch.Tensor | None, pool: CopiedPages | None = None) -> None:
        """One token more for every sequence. mask: see `mask_summary`; None: all are real. pool: says what is read exactly."""
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
            self.advance_full_precision(pool)

    def poison(self, out: torch.Tensor) -> torch.Tensor:
        """Rows `[S, HQ, D]` of sequences that are not valid become not a number."""
        return out.masked_fill_(~self.valid[:, None, None], float("nan"))


def mask_summary(mask: torch.Tensor) -> torch.Tensor:
    """What a pass of one token a sequence needs of a padding mask `[S, tokens]`: int32 `[S, 1, 1, 2]`, how many of the tokens are real,
    and whether the last is. It has the same shape in every pass, and nothing is read on the host."""
    mask = mask.bool()
    return torch.stack([mask.sum(1, dtype=torch.int32), mask[:, -1].int()], 1)[:, None, None]


# A graph that was captured over a `DecodeMetadata` runs over its addresses, and those of the scratch that its prepared calls keep. They
# live on when its cache is gone, and the next cache of the same geometry takes them over: torch.compile finds what it compiled.
_FREE: dict[Hashable, list[DecodeMetadata]] = {}
_MADE: list[DecodeMetadata] = []


def pooled(
    owner: object,
    geometry: Hashable,
    kind: Kind,
    block_size: int,
    batch_size: int,
    width: int,
    device: torch.device,
    tokens: FullPrecisionTokens | None = None,
) -> DecodeMetadata:
    """A `DecodeMetadata` that is never freed: its owner's as long as that lives, then another's of the same geometry."""
    free = _FREE.setdefault((geometry, kind, block_size, batch_size, width, device, tokens), [])
    if free:
        decoding = free.pop()
    else:
        decoding = DecodeMetadata(kind, block_size, batch_size, width, device, tokens)
        torch._dynamo.mark_static_address(decoding.place, guard=False)
        _MADE.append(decoding)
    weakref.finalize(owner, free.append, decoding)
    return decoding
