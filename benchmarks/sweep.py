"""Is decode linear in tokens? Times around the batch at which every warp has all that it may take, 1,024 tiles of 16 tokens.

    PYTHONPATH=src python benchmarks/sweep.py [--formats int4 int8] [--json FILE]

Prints, for each point, microseconds, and by how much it lies above the line through its two neighbours: a second wave of warps shows
as a step. Exit code 1 where that is more than 4 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from quantkv.bench.contestants import quantkv
from quantkv.bench.problem import Problem
from quantkv.bench.shapes import shapes
from quantkv.bench.timing import measure

BATCHES = {8192: (360, 376, 384, 392, 400, 408, 424, 440, 456), 32768: (90, 94, 96, 98, 100, 102, 106, 110)}
LIMIT = 0.04


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["int4"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, found, worst = torch.device("cuda"), [], 0.0
    for name in args.formats:
        for length, batches in BATCHES.items():
            times = []
            for batch in batches:
                problem = Problem(shapes(f"B{batch}xL{length}")[0], device)
                times.append(measure(quantkv("hopper", name).prepare(problem).call, device)[0])
                del problem
                torch.cuda.empty_cache()
            for i, (batch, time) in enumerate(zip(batches, times)):
                above = 0.0
                if 0 < i < len(batches) - 1:
                    share = (batch - batches[i - 1]) / (batches[i + 1] - batches[i - 1])
                    above = time / (times[i - 1] + share * (times[i + 1] - times[i - 1])) - 1
                worst = max(worst, above)
                found.append({"format": name, "length": length, "batch": batch, "us": time, "above": above})
                print(f"{name} {batch:4d} x {length}: {time:7.1f} us, {time / batch:6.3f} us a sequence, {above:+.1%}", flush=True)
    print(f"largest step: {worst:+.1%}, {LIMIT:.0%} is allowed; {torch.cuda.get_device_name()}")
    if args.json:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "points": found}, indent=1) + "\n")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
