"""Python threads for kernels that release the interpreter's lock: as many as torch uses."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise

import torch


@cache
def _pool(process: int, count: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork has none."""
    return ThreadPoolExecutor(count, "quantkv")


def in_parts(work: int, smallest: int, run: Callable[[int, int], None]) -> None:
    """`run(first, last)` over ranges that make up 0 to `work`, none with fewer than `smallest` chunks of it, at the same time."""
    parts = min(torch.get_num_threads(), work // max(smallest, 1))
    if parts < 2:
        return run(0, work)
    ends = [work * i // parts for i in range(parts + 1)]
    others = [_pool(os.getpid(), parts - 1).submit(run, *part) for part in pairwise(ends[1:])]
    try:
        run(ends[0], ends[1])
    finally:
        wait(others)
    for other in others:
        other.result()
