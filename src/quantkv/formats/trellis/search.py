"""The codes of a trellis: of all sequences of codes one that costs little, found by dynamic programming (Viterbi)."""

from __future__ import annotations

import torch

from ...rounding import Rounding

STATES = 16  # values of a code: a state is the code before
CHAIN = 64  # dimensions that hang together; each chain begins after a code of 0


def search(rows: torch.Tensor, pairs: torch.Tensor, rounding: Rounding | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 `[T, HK, D / 2]` of rows `[T, HK, D]` float32 in units of `pairs`, and the rows that they stand for.

    pairs: `[16, 16, 2]` float32, the two numbers that a code stands for after each code before it. rounding: of the Hessian in which errors
    cost (see `rounding.py`): each of the 16 ways that are kept open feeds back its own errors. None: all errors cost alike.
    """
    size = rows.shape[2]
    left = rows.permute(2, 1, 0).clone(memory_format=torch.contiguous_format)  # what is aimed at, [D, HK, T]; of one row no view
    codes, rounded = [], []
    for start in range(0, size, CHAIN):
        stop = min(start + CHAIN, size)
        own = rows[..., start:stop].permute(2, 1, 0)
        inside = None if rounding is None else _part(rounding, start, stop)
        found = _chain(left[start:stop], own, pairs, inside)
        values = _values(found, pairs)
        codes.append(found)
        rounded.append(values)
        if rounding is not None and stop < size:
            for i, error in enumerate(own - values, start):
                left[stop:].addcmul_(rounding.feedback[:, stop:, i].mT[..., None], error)
    return torch.cat(codes).permute(2, 1, 0), torch.cat(rounded).permute(2, 1, 0)


def _part(rounding: Rounding, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Feedback `[D, HK or 1, D]` and gain `[D, HK or 1]` between dimensions of one chain."""
    return rounding.feedback[:, start:stop, start:stop].transpose(0, 1), rounding.gain[:, start:stop].mT


def _values(codes: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """`[C, HK, T]` -> `[2 C, HK, T]`, of one chain."""
    before = torch.cat([torch.zeros_like(codes[:1]), codes[:-1]])
    return pairs[before.int(), codes.int()].movedim(-1, 1).flatten(0, 1)


def _chain(
    target: torch.Tensor, own: torch.Tensor, pairs: torch.Tensor, rounding: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    """Codes `[C, HK, T]` of one chain. target: own `[2 C, HK, T]` and the errors of earlier chains fed back."""
    first, second = (pairs[None, ..., i, None] for i in (0, 1))  # [1, before, code, 1]
    heads, tokens = target.shape[1:]
    target = target[:, :, None].expand(-1, -1, STATES if rounding is not None else 1, -1)  # [2 C, HK, ways, T]
    cost = torch.full((heads, STATES, tokens), torch.inf, device=target.device)
    cost[:, 0] = 0
    code = torch.arange(STATES, device=target.device)[:, None]
    came_from = []
    for i in range(0, own.shape[0], 2):
        one, two = (target[j][:, :, None] for j in (0, 1))
        if rounding is None:
            total = (one - first).square() + (two - second).square()
        else:
            feedback, gain = rounding
            two = two + feedback[i + 1, :, i, None, None, None] * (own[i][:, None, None] - first)
            total = (one - first).square().mul_(gain[i][:, None, None, None])
            total.addcmul_(gain[i + 1][:, None, None, None], (two - second).square_())
        cost, before = (total + cost[:, :, None]).min(1)
        came_from.append(before)
        target = target[2:]
        if rounding is not None and len(target):
            errors = (own[i + j][:, None] - pairs[before, code, j] for j in (0, 1))
            target = target.gather(2, before.expand(len(target), -1, -1, -1))
            for j, error in enumerate(errors, i):
                target.addcmul_(feedback[i + 2 :, :, j, None, None], error)
    state, codes = cost.argmin(1, keepdim=True), []
    for before in reversed(came_from):
        codes.append(state[:, 0])
        state = before.gather(1, state)
    return torch.stack(codes[::-1]).to(torch.uint8)
