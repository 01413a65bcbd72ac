"""Decode by the Triton kernels, with the tiles and the unpacking that they have and had, beside Hopper's and FlashAttention-3's, in a run:

    python benchmarks/triton_decode.py [--peers DIR] [--shapes B8xL32768 ..] [--formats int4 ..] [--variants now before ..] [--json FILE]

For each shape a line a format: under each variant microseconds and the share of the read ceiling. A variant is what is set in
implementations/triton/tiling.py while a call is prepared. Every result is compared with float64 attention over what the cache holds before
it is timed, and the rounds of all variants take turns. NOT ALIKE: two calls gave other bits. Triton compiles a kernel in 2 to 5 seconds, so
formats other than int4 are run under fewer variants unless --variants names them. No shape is begun after --seconds. Exit code 1 where a
result is wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from quantkv import ops
from quantkv.bench.contestants import TOLERANCE, filled
from quantkv.bench.problem import Entry, Problem, Unavailable
from quantkv.bench.rivals import rivals
from quantkv.bench.run import save_rows
from quantkv.bench.shapes import Shape, shapes
from quantkv.bench.timing import measure, read_ceiling_gbps
from quantkv.calls import AttendCall, Batch
from quantkv.implementations.triton import tiling

FLASH3, HOPPER = "FlashAttention-3", "hopper"
SHAPES = ("B8xL32768", "B64xL8192", "B1xL2048", "B16xL8192")
FORMATS = ("int4", "int8", "int2", "tq4", "levels4", "fp8_token", "none")
VARIANTS = {  # what is set in tiling.py
    "now": {},
    "before": {"FEW": 0, "SPARED": 0},  # queries down, codes centred one by one; pages and strides are looked up as now
    "lean": {"FEW": 0},
    "transposed": {"SPARED": 0},
    "32 keys": {"KEYS_OF_NARROW_ROWS": 32},
    "128 keys": {"KEYS_OF_NARROW_ROWS": 128},
    "64 wide": {"KEYS_OF_WIDE_ROWS": 64},
    "8 warps": {"WARPS": 8},
    "24 warps": {"WARPS": 24},  # more splits than there is room for at once
    "split 256": {"KEYS_OF_SPLIT": 256},
    "16 bits too": {"WIDE_NUMBERS": 3},
    "rows alone": {"ROWS_ALONE": 1 << 20},  # each row has a program of the combine kernel
    "rows share": {"ROWS_ALONE": -(1 << 20)},
}
TRIED = {"int4": ("now", "before", "lean", "transposed", "32 keys", "8 warps", "24 warps", "split 256"), "none": ("now", "16 bits too")}
TRIED_ELSE = ("now", "before", "24 warps")


class Row(NamedTuple):
    """One time. error: relative, against float64."""

    shape: str
    format: str
    variant: str
    us: float
    spread_us: float
    read_gbps: float
    error: float
    alike: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="for all formats")
    parser.add_argument("--peers", type=Path, help="a folder with rivals")
    parser.add_argument("--device", default="cuda", help="cpu: where Triton is interpreted, to see that all is right")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA GPU")
    device, found, wrong, begun = torch.device(given.device), [], [], time.perf_counter()
    ceiling = read_ceiling_gbps(device) if device.type == "cuda" else None
    for shape in shapes(*given.shapes):
        if time.perf_counter() - begun > given.seconds:
            print(f"{shape}: not begun after {given.seconds:.0f} s")
            continue
        rows = of_shape(shape, device, given, wrong)
        found += rows
        show(rows, ceiling)
    print(f"{time.perf_counter() - begun:.0f} s")
    if given.json:
        save_rows(given.json, device, [row._asdict() for row in found], read_ceiling_gbps=ceiling)
    sys.exit("\n".join(wrong) if wrong else 0)


def of_shape(shape: Shape, device: torch.device, given, wrong: list[str]) -> list[Row]:
    """Everything at one shape; the formats one after the other, the variants of each in turns. What is wrong is not timed."""
    problem, rows = Problem(shape, device), []
    for name in (FLASH3, *given.formats):
        entries = dict(flash3(problem, given.peers) if name == FLASH3 else ours(problem, name, given.variants))
        errors, alike = {}, {}
        for variant, entry in list(entries.items()):
            first = entry.call().clone()
            errors[variant], alike[variant] = problem.attention_error(entry, first), torch.equal(first, entry.call())
            if not errors[variant] <= TOLERANCE["16 bit"]:
                wrong.append(f"{shape} {name} {variant}: differs by {errors[variant]:.1e}; {TOLERANCE['16 bit']:.0e} is allowed")
                del entries[variant]
        times: dict[str, list[float]] = {variant: [] for variant in entries}
        for _ in range(given.rounds):
            for variant, entry in entries.items():
                times[variant].append(measure(entry.call, device, entry.graph)[0])
        for variant, us in times.items():
            middle, spread = statistics.median(us), max(us) - min(us)
            gbps = entries[variant].nbytes / middle / 1e3
            rows.append(Row(str(shape), name, variant, middle, spread, gbps, errors[variant], alike[variant]))
    return rows


def flash3(problem: Problem, peers: Path | None) -> Iterator[tuple[str, Entry]]:
    """FlashAttention-3 over 16 bits, where there is one."""
    for contestant in rivals(peers):
        if (contestant.name, contestant.stores) == (FLASH3, "bf16"):
            try:
                yield "bf16", contestant.prepare(problem)
            except (Unavailable, ValueError) as reason:
                print(f"{FLASH3}: {reason}")


def ours(problem: Problem, name: str, variants: list[str] | None) -> Iterator[tuple[str, Entry]]:
    """Attention over one cache of a format, by Triton under each variant and by Hopper."""
    cache, rows = filled(problem, name)
    nbytes = int(problem.shape.tokens_read * cache.spec.bytes_per_token)
    batch = Batch(problem.cu_seqlens_q, problem.seq_lens, problem.shape.Q)
    call = lambda: AttendCall(problem.q, (cache.segment(problem.block_table),), batch, problem.scale)
    for variant in variants or TRIED.get(name, TRIED_ELSE):
        with settings(**VARIANTS[variant]):
            yield variant, Entry(served(call(), "triton"), rows, nbytes)
    try:
        yield HOPPER, Entry(served(call(), HOPPER), rows, nbytes)
    except ValueError as reason:
        print(f"{HOPPER}, {name}: {reason}")


@contextmanager
def settings(**values: object) -> Iterator[None]:
    """Constants of tiling.py while a call is prepared."""
    usual = {name: getattr(tiling, name) for name in values}
    vars(tiling).update(values)
    try:
        yield
    finally:
        vars(tiling).update(usual)


def served(call: AttendCall, implementation: str) -> Callable[[], torch.Tensor]:
    """A prepared call, which has been made once: some of tiling.py is read when kernels are launched first."""
    launch = ops.prepare(call, implementation)
    launch(call)

    def run() -> torch.Tensor:
        launch(call)
        return call.out

    return run


def show(rows: list[Row], ceiling: float | None) -> None:
    """A line for each format: under each variant microseconds, and the share of the ceiling."""
    print(f"\n{rows[0].shape if rows else ''}")
    for name in dict.fromkeys(row.format for row in rows):
        cells = []
        for row in rows:
            if row.format == name:
                share = f" ({row.read_gbps / ceiling:.0%})" if ceiling else ""
                cells.append(f"{row.variant} {row.us:.1f}{share} +-{row.spread_us / 2:.1f}{'' if row.alike else ' NOT ALIKE'}")
        print(f"{name:16}", "  ".join(cells), f"  error at most {max(row.error for row in rows if row.format == name):.1e}")


if __name__ == "__main__":
    main()
