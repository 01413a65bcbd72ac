"""Calls everything public with anything, and reports what is neither right nor refused by name: each distinct failure once, made small.

    python scripts/fuzz.py --cases 100000 --seed 1
    python scripts/fuzz.py --cases 2000 --only attention --device cuda --implementation triton

Two failures are the same where they are of one target, one type and one line. A call that an implementation chosen by name announces
not to serve is counted as refused, and is no failure; "auto" serves every call. How far it came is printed to stderr every 10 s.
tests/fuzzing has the targets and the oracle; tests/test_fuzz.py runs about 1,000 cases of them.
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]

from fuzzing import TARGETS, elsewhere  # noqa: E402
from fuzzing.announced import Refused  # noqa: E402
from quantkv.implementations import NAMES  # noqa: E402

ROUND = 500  # cases of a target that hypothesis makes at once
EVERY = 10.0  # seconds between two lines of progress


class Report:
    """Failures by what makes them the same: how often, and the smallest case; and how many cases were tried, how many of them refused."""

    def __init__(self) -> None:
        self.tried: Counter[str] = Counter()  # by target
        self.refused: Counter[str] = Counter()
        self.seen: Counter[tuple[str, ...]] = Counter()
        self.smallest: dict[tuple[str, ...], tuple[str, str]] = {}

    def signature(self, target: str, error: BaseException) -> tuple[str, ...]:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        words = re.sub(r"[-+.0-9e]+|\[.*\]", "#", str(error))[:60]
        return target, type(error).__name__, f"{Path(frame.filename).name}:{frame.lineno}", words

    def add(self, target: str, case: Any, error: BaseException) -> bool:
        """Whether it is a new one, or a smaller case of one that is being made small."""
        key, text = self.signature(target, error), repr(case)
        self.seen[key] += 1
        if key not in self.smallest or len(text) <= len(self.smallest[key][0]):
            self.smallest[key] = text, str(error)
        return self.seen[key] < ROUND  # then it is left alone, and what else there is can be found

    def show(self) -> None:
        for key, (case, message) in self.smallest.items():
            print(f"\n{key[0]}: {key[1]} at {key[2]}\n  {message[:400]}\n  {case}")

    def progress(self, cases: int, seed_: int) -> str:
        """How far a run of `cases` has come. It may try more of them: those that make a failure small."""
        tried = ", ".join(f"{name} {count:,}" for name, count in self.tried.items())
        return f"{self.tried.total():,} of {cases:,} cases with seed {seed_} ({tried}), {self.refused.total():,} refused"


class Progress:
    """A thread that prints how far a run has come every 10 s, so that a run that is stopped, or hangs in a case, has said so."""

    def __init__(self, line: Callable[[], str]) -> None:
        self.line, self.ended, self.to = line, threading.Event(), sys.stderr  # which a target may put another stream in place of
        self.thread = threading.Thread(target=self._print, daemon=True)

    def _print(self) -> None:
        began = time.monotonic()
        while not self.ended.wait(EVERY):
            print(f"{time.monotonic() - began:.0f} s: {self.line()}", file=self.to, flush=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


def run(target: str, count: int, number: int, report: Report, how: dict[str, str]) -> None:
    """`count` cases of a target; a failure is made small by hypothesis, which runs it again and again."""

    failed = False

    @seed(number)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(TARGETS[target].cases())
    def one(case):
        nonlocal failed
        report.tried[target] += 1
        try:
            with elsewhere():
                TARGETS[target].check(case, **how)
        except Refused:
            report.refused[target] += not failed  # afterwards cases are smaller ones of the failure
        except Exception as error:
            if report.add(target, case, error):
                failed = True
                raise

    try:
        one()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise


def main(arguments: list[str] | None = None) -> int:
    """The command line: 1 where there was a failure, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(TARGETS), help="one target")
    parser.add_argument("--device", default="cpu", help="of the target attention")
    parser.add_argument("--implementation", default="reference", choices=["auto", *NAMES], help="of the target attention")
    given_ = parser.parse_args(arguments)
    report, began, done, number = Report(), time.monotonic(), Counter(), given_.seed * 1_000_003
    shares = {given_.only: 1.0} if given_.only else {name: target.SHARE for name, target in TARGETS.items()}
    with Progress(lambda: report.progress(given_.cases, given_.seed)):
        for name, share in shares.items():
            left = round(given_.cases * share / sum(shares.values()))
            how = dict(device=given_.device, implementation=given_.implementation) if name == "attention" else {}
            while left > 0:
                number += 1
                run(name, min(left, ROUND), number, report, how)
                done[name] += min(left, ROUND)
                left -= ROUND
            refused = f", {report.refused[name]:,} refused" if how else ""
            print(f"{name}: {done[name]:,} cases{refused}, {time.monotonic() - began:.0f} s in all", flush=True)
    report.show()
    found, refused = len(report.smallest), report.refused.total()
    print(f"\n{sum(done.values()):,} cases with seed {given_.seed}: {found} distinct failures, {refused:,} refused")
    return 1 if report.smallest else 0


if __name__ == "__main__":
    sys.exit(main())
