"""Rounds of one call on two streams: while the kernel of one runs, the rows of the next are written out, and fill what it leaves idle."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Lanes:
    """Lane 0 is the stream that the caller is on, lane 1 a stream beside it; a lane has scratch memory of its own, and what runs on it runs
    in order. count: 1 or 2; with one, and on a CPU, all is in the order in which it is called.

    Work on lane 1 begins after what the caller's stream had to do when the lanes were made. Who uses them lets lane 0 wait for all of
    it."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.count = count
        self.streams = []
        if device.type == "cuda" and count > 1:
            self.streams = [torch.cuda.current_stream(device), _side(device)]
            self.wait(1, self.mark(0))

    def on(self, lane: int) -> AbstractContextManager:
        """What is launched inside runs on the lane."""
        return torch.cuda.stream(self.streams[lane]) if self.streams else nullcontext()

    def mark(self, lane: int) -> torch.cuda.Event | None:
        """The point that the lane has been told to get to."""
        return self.streams[lane].record_event() if self.streams else None

    def wait(self, lane: int, point: torch.cuda.Event | None) -> None:
        """What the lane is told from now on runs after a point of another."""
        if point is not None:
            self.streams[lane].wait_event(point)

    def lend(self, t: torch.Tensor, lane: int) -> None:
        """A tensor that was made on one lane is used on another: its memory is not given away before that one is done with it."""
        if self.streams:
            t.record_stream(self.streams[lane])
