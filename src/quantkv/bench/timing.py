"""Microseconds of a call, and how fast this GPU reads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[], object]


REST_S, WARM_S = 0.3, 1.5


def measure(call: Call, device: torch.device, graph: bool = True, rounds: int = 1) -> tuple[float, str]:
    """Median microseconds of one call, and how they were taken: "graph" (replays of a captured CUDA graph), "events" (CUDA
    events around calls, the host's work included where it is slower), or "clock" on a CPU.

    rounds: with more than one each begins after a rest: a GPU lowers its clock by up to 10 % under sustained tensor work."""
    if device.type != "cuda":
        return _clock(call), "clock"
    if not graph:
        return _rounds(call, statistics.median(_events(call, 3)), rounds), "events"
    alone = statistics.median(_events(capture(call, 1).replay, 3))  # without the host's work, which a replay does not have
    calls = max(1, min(20, round(500 / alone)))  # replays of about 500 us hide the launch of the graph
    captured = capture(call, calls)
    replay = statistics.median(_events(captured.replay, 3))
    return _rounds(captured.replay, replay, rounds) / calls, "graph"


def in_turns(calls: Mapping[str, Call], device: torch.device, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median microseconds of each call, and how far apart its rounds are. Calls take turns, so a change of clocks is shared by all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(measure(call, device)[0])
    return {n: statistics.median(of) for n, of in times.items()}, {n: max(of) - min(of) for n, of in times.items()}


def _rounds(call: Call, once: float, rounds: int) -> float:
    """Median microseconds of a call that takes about `once`."""
    samples = []
    for _ in range(rounds):
        if rounds > 1:
            time.sleep(REST_S)
        samples += _events(call, max(3, _repeats(once) // rounds))
    return statistics.median(samples)


def _repeats(once_us: float) -> int:
    return max(5, min(50, round(100_000 / once_us)))


def _clock(call: Call) -> float:
    call()
    samples: list[float] = []
    while len(samples) < 3 or (sum(samples) < 0.3 and len(samples) < 50):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples) * 1e6


def _events(call: Call, repeats: int) -> list[float]:
    """Microseconds of `repeats` calls, each between two events, all enqueued before the host waits."""
    call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


@dataclass(frozen=True)
class Captured:
    """A CUDA graph of a call, and the call. A graph reads the addresses of its tensors and holds none of them: the call does."""

    graph: torch.cuda.CUDAGraph
    call: Call

    def replay(self) -> None:
        """Launch what was captured on the current stream."""
        self.graph.replay()


def capture(call: Call, calls: int) -> Captured:
    """`calls` calls, one after the other, as a graph. What the call refers to lives as long as the result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # what allocates or compiles does it before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
    torch.cuda.current_stream().wait_stream(stream)
    return Captured(graph, call)


def read_ceiling_gbps(device: torch.device, size: int = 2 << 30) -> float:
    """GB/s at which this GPU reads memory that no cache holds: the sum of 2 GiB of integers, after a while of nothing else: an idle
    GPU raises its clock in the course of a second, and short calls take longer until then."""
    words = torch.randint(-(1 << 62), 1 << 62, (size // 8,), device=device)
    begun = time.perf_counter()
    while time.perf_counter() - begun < WARM_S:
        words.sum()
        torch.cuda.synchronize()
    us, _ = measure(words.sum, device)
    return size / us / 1e3
