"""Tasks in forked processes, as many at once as there are cores. Pure Python.

Threads of one process that compile share its locks, its allocator and Python's own lock; processes share nothing. What a task leaves is on
the disk: it returns None. A process that forks has no other threads, and none of its children may touch a GPU.
"""

from __future__ import annotations

import heapq
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from itertools import count
from typing import Any

POLL = 0.005  # seconds


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ForkedExecutor(Executor):
    """An executor whose tasks run in processes of their own, the longest first. It has no thread: tasks begin in `submit` and `drain`.

    workers: processes at once; None: one for each core.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or cores()
        self.running: dict[int, Future[None]] = {}
        self.waiting: list[tuple[float, int, Future[None], Callable[[], object]]] = []
        self.failed = 0
        self._numbers = count()

    def submit(self, task: Callable[[], object], /, cost: float = 0.0) -> Future[None]:  # type: ignore[override]
        """Run a task in another process, those of a higher cost first. What it raises is printed there, and its future fails."""
        future: Future[None] = Future()
        heapq.heappush(self.waiting, (-cost, next(self._numbers), future, task))
        self._step()
        return future

    def drain(self) -> None:
        """Return when all tasks are done."""
        while self.running or self.waiting:
            if not self._step():
                time.sleep(POLL)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As of any executor. Tasks that run are waited for."""
        if cancel_futures:
            for *_, future, _ in self.waiting:
                future.cancel()
            self.waiting.clear()
        self.drain()

    def _step(self) -> bool:
        """Take leave of what ended, and begin what there is room for. Whether something ended."""
        ended = [(pid, status) for pid, status in (os.waitpid(pid, os.WNOHANG) for pid in self.running) if pid]
        for pid, status in ended:
            future = self.running.pop(pid)
            if status:
                self.failed += 1
                future.set_exception(RuntimeError(f"a process ended with status {os.waitstatus_to_exitcode(status)}"))
            else:
                future.set_result(None)
        while self.waiting and len(self.running) < self.workers:
            *_, future, task = heapq.heappop(self.waiting)
            sys.stdout.flush(), sys.stderr.flush()
            pid = os.fork()
            if not pid:
                _run(task)
            self.running[pid] = future
        return bool(ended)


def _run(task: Callable[[], Any]) -> None:
    """Run a task in this process, the child, and end it."""
    status = 1
    try:
        task()
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)
