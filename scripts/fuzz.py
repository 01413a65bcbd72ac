"""Calls everything public with anything, and reports what is neither right nor refused by name: each distinct failure once, made small.

    python scripts/fuzz.py --cases 100000 --seed 1
    python scripts/fuzz.py --cases 2000 --only attention --device cuda --implementation triton

Two failures are the same where they are of one target, one type and one line. tests/fuzzing has the targets and the oracle;
tests/test_fuzz.py runs about 1,000 cases of them.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]

from fuzzing import TARGETS, elsewhere  # noqa: E402

ROUND = 500  # cases of a target between two looks at the clock


class Report:
    """Failures by what makes them the same: how often, and the smallest case."""

    def __init__(self) -> None:
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


def run(target: str, count: int, number: int, report: Report, how: dict[str, str]) -> None:
    """`count` cases of a target; a failure is made small by hypothesis, which runs it again and again."""

    @seed(number)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(TARGETS[target].cases())
    def one(case):
        try:
            with elsewhere():
                TARGETS[target].check(case, **how)
        except Exception as error:
            if report.add(target, case, error):
                raise

    try:
        one()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(TARGETS), help="one target")
    parser.add_argument("--device", default="cpu", help="of the target attention")
    parser.add_argument("--implementation", default="reference", help="of the target attention")
    given_ = parser.parse_args()
    report, began, done, number = Report(), time.monotonic(), Counter(), given_.seed * 1_000_003
    shares = {given_.only: 1.0} if given_.only else {name: target.SHARE for name, target in TARGETS.items()}
    for name, share in shares.items():
        left = round(given_.cases * share / sum(shares.values()))
        how = dict(device=given_.device, implementation=given_.implementation) if name == "attention" else {}
        while left > 0:
            number += 1
            run(name, min(left, ROUND), number, report, how)
            done[name] += min(left, ROUND)
            left -= ROUND
        print(f"{name}: {done[name]:,} cases, {time.monotonic() - began:.0f} s in all", flush=True)
    report.show()
    print(f"\n{sum(done.values()):,} cases with seed {given_.seed}: {len(report.smallest)} distinct failures")
    return 1 if report.smallest else 0


if __name__ == "__main__":
    sys.exit(main())
