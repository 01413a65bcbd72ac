"""Share of the memory ceiling that decode by Triton is predicted to reach on GPUs that nobody could run it on.

    python benchmarks/predicted.py [--fit] [--table]      # needs no GPU: reads results/triton-loops.json, as predicted_loops.py writes it

A prediction is no measurement. Time of a call = START + matrices / L2 + (memory^P + issue^P)^(1/P):

- memory: the call's bytes over the GPU's read ceiling; where that was not measured, CEILING of what the maker says.
- issue: tiles of the busiest multiprocessor, times the cycles of a scheduler for one tile: a cycle an instruction, and of tensor cores'
  instructions TENSOR of the cycles that they take, for which a scheduler waits; or what the busiest pipe takes, if that is more. Where
  loads of a tile are not issued ahead of it, WAIT for each of the two that follow each other.
- matrices: each program read the rotation of the queries, each combining one that of the values, at L2 bytes a clock and multiprocessor.
  Since both are butterflies in registers nothing is read: NOW has no L2, and its START was fitted on int4 of an H200 (B8xL32768 and
  B64xL8192, 79.8 and 145.7 us). START is of a GPU of 1.98 GHz, and longer on slower ones.

START, L2 and TENSOR are fitted on an H100 (int4, ten shapes of head size 128 of results/h100-geometries.json); WAIT on one figure of an
H200 (levels4, B64xL8192), since no format with such loads was timed on an H100. P was chosen among 2, 2.5 and 3, which the H100 hardly
tells apart. All else that was measured on an H200 is checked, not fitted.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import product
from pathlib import Path
from typing import NamedTuple

from quantkv import assumed
from quantkv.bench.shapes import Shape

RESULTS = Path(__file__).parent / "results"
POWER, CEILING = 2.5, 0.93  # of an H100's and an H200's 0.93 and 0.94 to 0.95 were measured
LEAST_WARPS = 8  # of a multiprocessor: fewer take as long for a tile; the H100's figures are of 8
UNROTATED = ("int8",)
CALLS = list(product(("int4", "levels4"), ("B8xL32768", "B64xL8192")))
HEADER = "| predicted % of the read ceiling (higher is better) | " + " | ".join(f"`{name}`, {shape}" for name, shape in CALLS) + " |"


class Fit(NamedTuple):
    """What was fitted. start, wait: microseconds. l2: bytes a clock of a multiprocessor. tensor: of the cycles of tensor cores."""

    start: float
    l2: float
    tensor: float
    wait: float


FITTED = Fit(start=0, l2=6.5, tensor=1.0, wait=0.53)
NOW = FITTED._replace(start=8, l2=math.inf)
START_GHZ = 1.98


class Gpu(NamedTuple):
    """arch: what it is compiled for. shared: bytes of shared memory of a multiprocessor, as plans take it. processors: multiprocessors or
    compute units. ghz: boost clock. gbps: of the memory, as its maker says. tensor: cycles of a scheduler
    for one product of 16 x 8 x 16 (AMD: 16 x 16 x 16). fp32, half: cycles of an instruction of float32, of two fp16. simd: whether vector
    instructions take four cycles, as AMD's do."""

    arch: str
    shared: int
    processors: int
    ghz: float
    gbps: float
    tensor: float
    fp32: float = 1
    half: float = 1
    simd: bool = False


def _known(name: str, *speeds: float, **cycles: float) -> Gpu:
    """One that kernels are compiled ahead for."""
    gpu = assumed.GPUS[name]
    return Gpu("".join(map(str, gpu.capability)), gpu.shared_bytes, gpu.multiprocessors, *speeds, **cycles)


GPUS = {
    "H100": _known("h100", 1.98, 3350, 8),
    "H200": _known("h200", 1.98, 4800, 8),
    "A100": _known("a100", 1.41, 2039, 8, fp32=2),
    "L40S": _known("l40s", 2.52, 864, 16, half=2),
    "RTX 4090": _known("rtx-4090", 2.52, 1008, 32, half=2),
    "RTX 5090": Gpu("120", 100 << 10, 170, 2.41, 1792, 32, half=2),
    "MI300X": Gpu("gfx942", 100 << 10, 304, 2.10, 5300, 16, simd=True),
}


def tile_cycles(counts: dict[str, int], gpu: Gpu, fit: Fit) -> float:
    """Cycles of a scheduler for one tile of one warp."""
    of = lambda name: counts.get(name, 0)
    if gpu.simd:  # four cycles a vector instruction, sixteen an exponential; scalar ones are issued beside them
        return 4 * (of("alu") + of("half")) + 16 * of("mufu") + fit.tensor * gpu.tensor * of("tensor")
    pipes = (
        sum(counts.values()) + fit.tensor * gpu.tensor * of("tensor"),
        2 * of("alu"),
        gpu.fp32 * of("fma") + gpu.half * of("half") + 2 * of("imad"),
        8 * of("mufu"),
        gpu.tensor * of("tensor"),
        4 * (of("shared") + of("copy")),
    )
    return max(pipes)


def matrix_bytes(loop: dict) -> int:
    """Bytes of rotations that all programs of attend and of combine read; a matrix has 16 bits a number."""
    if loop["format"] in UNROTATED:
        return 0
    shape = Shape.parse(loop["shape"])
    rows, width = shape.B * shape.Q * shape.HQ, 1 << (shape.D - 1).bit_length()
    together = 1 if rows < 16 * loop["processors"] else 4 if loop["splits"] > 1 else 16  # as triton/attend.py had it
    combining = -(-shape.B * shape.Q * (shape.HQ // shape.HK) // together) * shape.HK
    return 2 * width * width * (loop["programs"] + combining)


def microseconds(loop: dict, gpu: Gpu, ceiling_gbps: float, fit: Fit, power: float = POWER) -> float:
    """The predicted time of a call."""
    clock = gpu.ghz * 1e3
    warps = max(-(-loop["programs"] // gpu.processors) * loop["warps"], LEAST_WARPS)
    waits = 0 if loop["arch"].startswith("gfx") or loop["instructions"].get("load", 0) < 2 else 2 * fit.wait
    issue = loop["tiles"] * (warps / 4 * tile_cycles(loop["instructions"], gpu, fit) / clock + waits)
    memory = loop["nbytes"] / ceiling_gbps / 1e3
    before = fit.start * START_GHZ / gpu.ghz + matrix_bytes(loop) / (fit.l2 * gpu.processors * clock)
    return before + (memory**power + issue**power) ** (1 / power)


def loops_of(when: str) -> dict[tuple[str, str, str], dict]:
    """Loops by GPU, format and shape: those "now", or those of when something was "measured"."""
    rows = json.loads((RESULTS / "triton-loops.json").read_text())[when]["rows"]
    return {(row["gpu"], row["format"], row["shape"]): row for row in rows}


def measured() -> list[tuple[str, dict, float, float]]:
    """GPU, loop, microseconds and read ceiling of each call that was timed with the loops of then."""
    loops = loops_of("measured")
    found = []
    for gpu in ("H100", "H200"):
        table = json.loads((RESULTS / f"{gpu.lower()}-geometries.json").read_text())
        for row in table["rows"]:
            loop = loops.get(("H100", row["stores"], row["shape"]))  # the same machine code, for both
            if row["name"] == "quantkv triton" and loop:
                found.append((gpu, loop, row["us"], table["ceiling_gbps"]))
    table = json.loads((RESULTS / "h200-triton-decode.json").read_text())
    for row in table["rows"]:
        loop = loops.get(("H200", row["format"], row["shape"]))
        if loop and row["variant"] == "now" and row["format"] in ("int8", "int2", "levels4"):
            found.append(("H200", loop, row["us"], table["read_ceiling_gbps"]))
    return found


def in_domain(shape: str) -> bool:
    """Whether predictions are meant for a shape: one query a sequence, head size 128, 2^18 tokens or more. Short calls wait for first
    loads, which the model does not know."""
    of = Shape.parse(shape)
    return (of.Q, of.D) == (1, 128) and of.B * of.L >= 1 << 18


def error(of: tuple[str, dict, float, float], fit: Fit, power: float = POWER) -> float:
    """Predicted share of the ceiling over the measured one, less 1."""
    gpu, loop, us, ceiling = of
    return us / microseconds(loop, GPUS[gpu], ceiling, fit, power) - 1


def fitted(power: float) -> tuple[float, Fit]:
    """Root mean square of the relative errors on the H100, and the numbers that make it smallest."""
    rows = [row for row in measured() if row[0] == "H100" and in_domain(row[1]["shape"])]
    worth = lambda fit: math.sqrt(sum(error(row, fit, power) ** 2 for row in rows) / len(rows))
    grid = product((0, 1, 2, 3, 4, 5, 6), [n / 4 for n in range(20, 41)], (n / 20 for n in range(41)))
    best = min((Fit(start, l2, tensor, 0) for start, l2, tensor in grid), key=worth)
    waiting = next(row for row in measured() if row[1]["format"] == "levels4" and row[1]["shape"] == "B64xL8192")
    return worth(best), min((best._replace(wait=n / 100) for n in range(151)), key=lambda fit: abs(error(waiting, fit, power)))


def table() -> list[str]:
    """Lines of the table of docs/limits.md."""
    lines = [HEADER, "|---|" + "--:|" * len(CALLS)]
    loops = loops_of("now")
    for name, gpu in GPUS.items():
        ceiling, cells = CEILING * gpu.gbps, []
        for call in CALLS:
            loop = loops[(name, *call)]
            cells.append(f"{100 * loop['nbytes'] / ceiling / 1e3 / microseconds(loop, gpu, ceiling, NOW):.0f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit anew, for several powers")
    parser.add_argument("--table", action="store_true", help="the table of docs/limits.md alone")
    given = parser.parse_args()
    if given.fit:
        for power in (2.0, 2.5, 3.0):
            worth, fit = fitted(power)
            checked = [
                f"{row[1]['format']} {row[1]['shape']} {error(row, fit, power):+.1%}"
                for row in measured()
                if row[0] == "H200" and row[1]["shape"] in ("B8xL32768", "B64xL8192")
            ]
            print(f"power {power}: {worth:.2%} on the H100, {fit}; on the H200 {', '.join(checked)}")
    if not given.table:
        for row in measured():
            share = row[1]["nbytes"] / row[2] / 1e3 / row[3]
            what, of = f"{row[0]} {row[1]['format']} {row[1]['shape']}", "" if in_domain(row[1]["shape"]) else " (not meant for it)"
            print(f"{what}: measured {share:.1%}, predicted {error(row, FITTED):+.1%} of it{of}")
    print("\n".join(table()))


if __name__ == "__main__":
    main()
