"""What is said while a command works: how far it is, since when, and about how much time is left.

On a terminal a bar or a spinner; elsewhere a line every ten seconds, in the middle of a long step too: a thread says it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..under_way import compiled_now
from .common import duration

EVERY = 10.0  # seconds from one line to the next
BEAT = 1.0  # seconds, in which a terminal's words are renewed


class Step(NamedTuple):
    """One step of work. kind: steps of a kind take as long for each unit of their cost. cost: positive, such as tokens."""

    kind: str
    cost: float = 1.0


class Estimate:
    """The time that work takes from now on, from what its steps took by kind.

    steps: all, in order. beyond: seconds for a unit of cost of a kind that was not seen yet, more than the first step's kind takes; no
    estimate is made while a kind without one is ahead. Times are seconds by any one clock.
    """

    def __init__(self, steps: Sequence[Step], beyond: Mapping[str, float] | None = None) -> None:
        self.steps, self.beyond = steps, beyond or {}
        self._current = 0
        self._since: float | None = None  # when the current step began
        self._seconds: Counter[str] = Counter()
        self._costs: Counter[str] = Counter()

    def begin(self, step: int, now: float) -> None:
        """Step number `step` begins; those before it are through, and took their share of the time since the last call."""
        if self._since is None:
            self._since = now
        through = self.steps[self._current : step]
        if through:
            shares = [(self.rate(s.kind) or 1.0) * s.cost for s in through]
            for s, share in zip(through, shares):
                self._seconds[s.kind] += (now - self._since) * share / sum(shares)
                self._costs[s.kind] += s.cost
            self._current, self._since = step, now

    def left(self, now: float) -> float | None:
        """Seconds from now until all steps are through; None: it cannot be told yet."""
        ahead = self.steps[self._current :]
        if not ahead or not self._costs:
            return None
        spent, rates = now - self._since, {s.kind: self.rate(s.kind) for s in ahead}
        if None in rates.values():
            return None
        first = ahead[0]  # one that takes longer than its kind did: so may those after it
        rates[first.kind] = max(rates[first.kind], spent / first.cost)
        return max(sum(rates[s.kind] * s.cost for s in ahead) - spent, 0.0)

    def rate(self, kind: str) -> float | None:
        """Seconds for a unit of cost of a kind: seen, else believed; None for neither."""
        if self._costs[kind]:
            return self._seconds[kind] / self._costs[kind]
        base = self.steps[0].kind
        if kind in self.beyond and self._costs[base]:
            return self._seconds[base] / self._costs[base] + self.beyond[kind]
        return None


class Work:
    """Work under way, and the words for it.

    what: it is called so until a step has a name. tell: takes a line, every so many seconds at most. clock: seconds.
    """

    def __init__(
        self,
        what: str,
        estimate: Estimate | None = None,
        tell: Callable[[str], None] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.what, self.estimate, self.tell, self.clock, self.step = what, estimate, tell, clock or time.monotonic, 0
        self._lock, self._begun = threading.Lock(), self.clock()
        self._told = self._begun
        if estimate is not None:
            estimate.begin(0, self._begun)

    def on_step(self, name: str, step: int) -> None:
        """A step of that name and number begins."""
        with self._lock:
            self.what, self.step = name, step
            self.estimate.begin(step, self.clock())
        self.beat()

    def beat(self) -> None:
        """Tell a line if it is time for one."""
        with self._lock:
            now = self.clock()
            if self.tell is None or now - self._told < EVERY or (self.estimate is not None and self.step >= len(self.estimate.steps)):
                return
            self._told = now
            done = "" if self.estimate is None else f"{self.step:,} of {len(self.estimate.steps):,} steps"
            line = f"{', '.join(filter(None, (done, self.what)))}: {self._time(now)}"
        self.tell(line)

    @property
    def time(self) -> str:
        """How much is left or, where that cannot be told, for how long it has been going on; and what is being compiled."""
        with self._lock:
            return self._time(self.clock())

    def _time(self, now: float) -> str:
        left, compiled = None if self.estimate is None else self.estimate.left(now), compiled_now()
        words = f"{duration(now - self._begun)} so far" if left is None else f"about {duration(left)} left"
        return words if compiled is None else f"{words}; compiling {compiled}"


@contextmanager
def beating(beat: Callable[[], None]) -> Iterator[None]:
    """Inside the block a thread calls `beat` every `BEAT` seconds."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(BEAT):
            beat()

    thread = threading.Thread(target=run, name="quantkv-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _line(console: Any) -> Callable[[str], None] | None:
    """What takes the lines of work; None on a terminal, which shows more."""
    if console.is_terminal:
        return None
    return lambda line: console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(console: Any, steps: int | Sequence[Step], beyond: Mapping[str, float] | None = None) -> Iterator[Callable[[str, int], None]]:
    """A bar with the time that is left: called with the name of the step that begins and the number of steps that are through.

    steps: how many, all alike, or what each costs. beyond: of `Estimate`.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    steps = [Step("")] * steps if isinstance(steps, int) else steps
    work = Work("", Estimate(steps, beyond), _line(console))
    words = TextColumn("[bold]{task.description:12}"), TextColumn("{task.fields[left]}", style="dim")
    columns = SpinnerColumn(), words[0], BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(), words[1]
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(steps), left="")

        def beat() -> None:
            bar.update(task, left=work.time)
            work.beat()

        def on_step(name: str, step: int) -> None:
            work.on_step(name, step)
            bar.update(task, description=name, completed=step, left=work.time)

        with beating(beat):
            yield on_step


@contextmanager
def waiting(console: Any, what: str) -> Iterator[Callable[[str | None], None]]:
    """A spinner with the time so far, for work whose length nobody knows. Called with other words it shows those; with None it ends."""
    work = Work(what, tell=_line(console))
    with console.status(what) as status:

        def beat() -> None:
            status.update(f"{work.what}: {work.time}")
            work.beat()

        def now(words: str | None) -> None:
            if words is None:
                ended.set()
                status.stop()
            else:
                work.what = words
                beat()

        ended = threading.Event()
        with beating(lambda: None if ended.is_set() else beat()):
            yield now
