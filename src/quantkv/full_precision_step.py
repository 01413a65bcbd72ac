"""What one step reads at full precision, as tensors that keep their places from step to step."""

from __future__ import annotations

import torch

from . import checks
from .full_precision import FullPrecisionTokens

BEYOND = 1 << 30  # a position that no key has


def check_made_for(tokens: FullPrecisionTokens, block_size: int, num_seqs: int, device: torch.device | str) -> torch.device:
    """The device, where a pool or a step can be made for these."""
    checks.instance("tokens", tokens, FullPrecisionTokens, "FullPrecisionTokens")
    checks.integer("block_size", block_size, 1, "a number of tokens")
    checks.integer("num_seqs", num_seqs, 0, "a number of sequences")
    return checks.place(device)


class FullPrecisionStep:
    """What one step reads exactly, filled by `CopiedPages.advance`: int32 tensors of S sequences and T new tokens, which stay where they
    are from step to step, so that prepared calls and graphs read the latest numbers.

    slots: `[T]`, where the copies of the new tokens go; -1: nowhere.
    joined: `block_table [S, pages]`, the first 16-bit copies and after them the latest ones, `key_start [S]`, which puts the latest at
        their positions and the first right before these, and `key_range [S, 2]` of what is read quantized; None where there are no first.
    sink: `block_table` and `key_range` of the first tokens; None where there are none. recent: `block_table` and `key_start`.
    between: `key_range` of what is read quantized beside `sink` and `recent`: here each key stands at its own position.
    Which of the two is read is decided for each call, or run of one: see `own.few_queries`.
    scratch: of the kernels that fill it. made_for: the full-precision tokens and the tokens of a page.

    Until it is filled nothing is exact, whatever the lengths are: engines run kernels over it before there are sequences.
    """

    def __init__(self, tokens: FullPrecisionTokens, block_size: int, num_seqs: int, num_tokens: int, device: torch.device) -> None:
        device = check_made_for(tokens, block_size, num_seqs, device)
        checks.integer("num_tokens", num_tokens, 0, "a number of tokens")
        self.made_for = tokens, block_size
        sink, recent = tokens.copied_pages(block_size)

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        with torch.inference_mode(False):
            self.slots = integers(num_tokens).fill_(-1)
            self.scratch = integers(num_seqs * (sink + recent)), integers(num_seqs * (sink + recent) + 1).long()
            self.between = integers(num_seqs, 2)
            self.recent = integers(num_seqs, recent), integers(num_seqs)
            self.sink = (integers(num_seqs, sink), integers(num_seqs, 2)) if sink else None
            self.joined = (integers(num_seqs, sink + recent), integers(num_seqs), integers(num_seqs, 2)) if sink else None
        for key_start in (self.recent[1], *(() if self.joined is None else self.joined[1:2])):
            key_start.fill_(BEYOND)
        for key_range in (self.between, *(() if self.joined is None else self.joined[2:])):
            key_range[:, 1] = BEYOND

    def part(self, num_seqs: int, first: int = 0) -> FullPrecisionStep:
        """The same step for `num_seqs` of its sequences, from number `first` on: views."""
        part, of = object.__new__(FullPrecisionStep), slice(first, first + num_seqs)
        part.made_for, part.slots, part.scratch, part.between = self.made_for, self.slots, self.scratch, self.between[of]
        for name in ("recent", "sink", "joined"):
            tensors = getattr(self, name)
            setattr(part, name, None if tensors is None else tuple(t[of] for t in tensors))
        return part

    def check(self, tokens: FullPrecisionTokens, block_size: int) -> None:
        """ValueError unless it was made for these tokens in pages of this size: its page numbers would mean others."""
        if self.made_for != (tokens, block_size):
            made, size = self.made_for
            checks.refuse("step", f"of {made} in pages of {size}", f"one of {tokens} in pages of {block_size} is needed")
