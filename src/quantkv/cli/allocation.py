"""Formats for each layer's keys and values within a budget."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Place = TypeVar("Place", bound=Hashable)


class Choice(NamedTuple):
    """One format at one place: what it takes and what it costs."""

    name: str
    bytes: float
    loss: float


def allocate(
    choices: Mapping[Place, Sequence[Choice]], most_bytes: float = math.inf, least_loss: float | None = None
) -> dict[Place, Choice]:
    """A choice for each place: from the smallest on, the step that gains most for each byte, as long as the sum of bytes stays within
    `most_bytes`, and until the sum of losses is at most `least_loss`, if that is given.

    Steps lead along the lower convex hull of a place's choices, so that none is taken back.
    ValueError where the smallest choices take more than `most_bytes`, or the best lose more than `least_loss`.
    """
    smallest, largest, best = limits(choices)
    if smallest > most_bytes * (1 + 1e-9):
        raise ValueError(f"{most_bytes:,.1f}: {smallest:,.1f} to {largest:,.1f} bytes are possible")
    hulls = {place: hull(given) for place, given in choices.items()}
    chosen = {place: 0 for place in choices}
    total, loss = sum(h[0].bytes for h in hulls.values()), math.fsum(h[0].loss for h in hulls.values())
    steps = [(-_gain(hulls[place], 0), number, place) for number, place in enumerate(choices) if len(hulls[place]) > 1]
    heapq.heapify(steps)
    while steps and (least_loss is None or loss > least_loss):
        _, number, place = heapq.heappop(steps)
        now, then = hulls[place][chosen[place] : chosen[place] + 2]
        if total + then.bytes - now.bytes > most_bytes * (1 + 1e-9):
            continue  # another place may have a smaller step
        chosen[place] += 1
        total, loss = total + then.bytes - now.bytes, loss + then.loss - now.loss
        if chosen[place] + 1 < len(hulls[place]):
            heapq.heappush(steps, (-_gain(hulls[place], chosen[place]), number, place))
    if least_loss is not None and loss > least_loss * (1 + 1e-9):
        worst = math.fsum(h[0].loss for h in hulls.values())
        raise ValueError(f"{least_loss:g}: {best:.2g} to {worst:.2g} nats a token are possible")
    return {place: hulls[place][index] for place, index in chosen.items()}


def limits(choices: Mapping[Place, Sequence[Choice]]) -> tuple[float, float, float]:
    """The fewest and the most bytes that a choice for each place can take, and the least loss."""
    return (
        sum(min(c.bytes for c in given) for given in choices.values()),
        sum(max(c.bytes for c in given) for given in choices.values()),
        math.fsum(min(c.loss for c in given) for given in choices.values()),
    )


def hull(choices: Sequence[Choice]) -> list[Choice]:
    """The choices from the smallest on, of which each gains less for a byte than the one before, and none loses more."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.bytes, c.loss)):
        if kept and choice.loss >= kept[-1].loss:
            continue
        while len(kept) > 1 and _gain([kept[-2], choice], 0) >= _gain(kept[-2:], 0):
            kept.pop()
        kept.append(choice)
    return kept


def _gain(choices: Sequence[Choice], index: int) -> float:
    """What the next choice gains for each byte."""
    now, then = choices[index], choices[index + 1]
    return (now.loss - then.loss) / max(then.bytes - now.bytes, 1e-12)
