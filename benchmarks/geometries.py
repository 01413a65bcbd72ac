"""Attention at the geometries of real models, by name, in one run:

    python benchmarks/geometries.py [--peers DIR] [--names "Phi-3" "head size 512"] [--formats int4] [--seconds 200] [--json FILE]
    python benchmarks/geometries.py --list

For each, microseconds and the share of the read ceiling of quantkv's Hopper kernel and its Triton kernel over pages in a format, and of
FlashAttention-3 over 16 bits, where there is one that takes the shape (`--peers` as `quantkv bench` takes it), and how many times faster
than that quantkv is. Where there is XQA for the shape, its microseconds over 16 and 8 bits, in the fastest of its ways. Each answer is
compared with float64 attention over what the contestant's cache holds before it is timed; its error is in the table. Writes a table to
the terminal and rows as `quantkv bench` has them to FILE, without the ways of XQA that there are not. Exit code 1 where an answer is
wrong or a contestant fails; what a contestant refuses is no failure.

The heads are those of one layer on one GPU; with "8-way" those of one of eight. Sinks are left out: they add a number a head.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import torch

from quantkv.bench import tables
from quantkv.bench.contestants import Contestant, quantkv
from quantkv.bench.problem import Problem
from quantkv.bench.rivals import rivals, xqa_ways
from quantkv.bench.run import Result, Row, run
from quantkv.bench.shapes import Shape

FLASH3, XQA = "FlashAttention-3", "XQA"
OURS = ("hopper", "triton")
AT_ONCE = 12  # processes that compile: each holds a cache
GEOMETRIES = {  # name: the shape; what is not in it is 32 query heads over 8 kv heads of 128, one query, pages of 16
    "Llama-3 8B": "B8xL32768",
    "Llama-3 8B, many": "B64xL8192",
    "Llama-3 70B, 8-way": "B64xL8192xHQ8xHK1",
    "Llama-3 405B, 8-way": "B64xL8192xHQ16xHK1",
    "Llama-3.2 1B, head size 64": "B64xL8192xD64",
    "Qwen2.5 7B, group 7": "B64xL8192xHQ28xHK4",
    "Qwen3 30B, group 8": "B64xL8192xHQ32xHK4",
    "Qwen3-Next, head size 256": "B64xL8192xHQ16xHK2xD256",
    "GLM-4 9B, group 16": "B32xL16384xHK2",
    "Mistral 7B, window 4096": "B32xL32768xW4096",
    "Gemma 3 27B, window 1024": "B32xL16384xHK16xW1024",
    "gpt-oss, window 128": "B64xL16384xHQ64xD64xW128",
    "gpt-oss, full": "B64xL8192xHQ64xD64",
    "Phi-3 mini, head size 96": "B16xL8192xHK32xD96",
    "Phi-2, head size 80": "B16xL8192xHK32xD80",
    "head size 48": "B64xL8192xD48",
    "head size 112": "B64xL8192xD112",
    "StableLM 2 12B, head size 160": "B32xL8192xD160",
    "Nemotron-4 340B, 2-way, head size 192": "B16xL8192xHQ48xHK4xD192",
    "MiMo V2, 192 and 128": "B32xL8192xHQ64xHK4xD192xDV128",
    "192 and 128, group 4": "B32xL8192xD192xDV128",
    "Gemma 4, global layers, head size 512": "B32xL8192xHQ16xHK2xD512",
    "pages of 8": "B64xL8192xP8",
    "verify 5": "B32xL8192xQ5",
    "verify 8": "B64xL8192xQ8",
    "verify 16": "B32xL8192xQ16",
    "verify 5, head size 96": "B16xL8192xQ5xHK32xD96",
    "one sequence of 4096": "L4096",
    "four of 4096": "B4xL4096",
    "one sequence of 2048": "L2048",
    "one sequence of 2048, and its write": "L2048xN1",
    "one sequence of 2048, head size 96": "L2048xHK32xD96",
}
ALSO = {
    "int2": ("Llama-3 8B", "Llama-3 8B, many"),
    "none": ("Llama-3 8B", "one sequence of 2048"),
}  # formats that only these are measured with


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=list(GEOMETRIES), help="geometries, or what their names contain")
    parser.add_argument("--formats", nargs="+", default=["int4"])
    parser.add_argument("--peers", type=Path, help="a folder with rivals")
    parser.add_argument("--seconds", type=float, default=200, help="begin no geometry after so long")
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--list", action="store_true", help="the names and their shapes, and nothing else")
    arguments = parser.parse_args()
    chosen = [name for name in GEOMETRIES if any(part in name for part in arguments.names)]
    if unknown := [part for part in arguments.names if not any(part in name for name in GEOMETRIES)]:
        parser.error(f"--names {' '.join(map(repr, unknown))}: --list shows those that there are")
    if arguments.list:
        print("\n".join(f"{name:40}{GEOMETRIES[name]}" for name in chosen))
        return
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU: nothing to measure")
    result = measured(chosen, arguments)
    print("\n" + table(chosen, result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result.to_dict(), indent=1) + "\n")
    bad = [row for row in result.rows if row.status in ("wrong", "failed")]
    for row in bad:
        print(f"{row.shape}: {row.name} {row.stores}: {row.status}: {row.reason}", file=sys.stderr)
    sys.exit(bool(bad))


def measured(names: list[str], arguments: argparse.Namespace) -> Result:
    """Every contestant at the shapes of these names, until the time is over; all that is to be compiled first."""
    begun = time.monotonic()
    shapes = {Shape.parse(GEOMETRIES[name]): name for name in names}
    ours = [quantkv(implementation, name) for name in arguments.formats for implementation in OURS]
    compile_ahead(list(shapes), arguments.formats)
    also = {stores: [shape for shape, name in shapes.items() if name in those] for stores, those in ALSO.items()}
    for stores, of_format in also.items():
        compile_ahead(of_format, [stores])
    print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
    others = [c for c in rivals(arguments.peers) if (c.name, c.stores) == (FLASH3, "bf16") or c.name == XQA]
    others = sorted(others + xqa_ways(arguments.peers), key=lambda c: c.stores)  # what is right is computed once for each

    def on_row(row: Row) -> None:
        print(f"{time.monotonic() - begun:5.1f} {shapes[Shape.parse(row.shape)]}:", *tables.cells(row), flush=True)

    device = torch.device("cuda")
    result = run((s for s in shapes if time.monotonic() - begun < arguments.seconds), ours + others, device, on_row)
    for stores, of_format in also.items():
        result.rows += run(of_format, [quantkv("hopper", stores)], device, on_row).rows
    result.rows = [row for row in result.rows if not (is_xqa(row) and row.status == "unavailable")]
    return result


def compile_ahead(shapes: list[Shape], formats: list[str]) -> None:
    """Compiled kernels are kept on disk, where this process finds them: as many processes as there are cores leave them there."""
    with ProcessPoolExecutor(min(os.cpu_count(), AT_ONCE), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for shape in shapes:
            for format_name in formats:
                for implementation in OURS:
                    pool.submit(call_once, shape, format_name, implementation)


def call_once(shape: Shape, format_name: str, implementation: str) -> None:
    with suppress(Exception):  # what it is shows when it is measured
        quantkv(implementation, format_name).prepare(Problem(shape, torch.device("cuda"))).call()
        torch.cuda.synchronize()


def is_xqa(row: Row) -> bool:
    return row.name.split()[0] == XQA


def xqa_times(result: Result) -> dict[str, dict[str, float]]:
    """Microseconds of XQA in the fastest of its ways, by what it stores and by shape; what was not timed is not there."""
    found: dict[str, dict[str, float]] = {}
    for row in result.rows:
        if is_xqa(row) and row.us is not None:
            times = found.setdefault(row.stores, {})
            times[row.shape] = min(row.us, times.get(row.shape, row.us))
    return dict(sorted(found.items()))


def table(names: list[str], result: Result) -> str:
    """A line for each geometry and contestant of quantkv's, as Markdown; columns of XQA where it was timed."""
    rows = {(row.shape, row.name, row.stores): row for row in result.rows}
    contestants: list[Contestant] = [quantkv(*key) for key in dict.fromkeys((r.name.split()[-1], r.stores) for r in result.rows if r.ours)]
    xqa = xqa_times(result)
    times = ["FA3 bf16, us", *(f"XQA {stores}, us" for stores in xqa)]
    lines = [tables.subtitle(result), "", f"| geometry | shape | {' | '.join(times)} | | us | of ceiling | x FA3 | error |"]
    lines.append(f"| --- | --- |{' --: |' * len(times)} --- | --: | --: | --: | --: |")
    for name in names:
        shape = str(Shape.parse(GEOMETRIES[name]))
        flash3 = rows.get((shape, FLASH3, "bf16"))
        base = flash3.us if flash3 else None
        rivals_us = " | ".join("" if us is None else tables.microseconds(us) for us in (base, *(xqa[stores].get(shape) for stores in xqa)))
        for contestant in contestants:
            row = rows.get((shape, contestant.name, contestant.stores))
            if row is None:
                continue
            _, stores, us, _, share, _, error = tables.cells(row)
            ratio = f"{base / row.us:.2f}" if base and row.us else ""
            what = f"{contestant.name.removeprefix('quantkv ')} {stores}"
            lines.append(f"| {name} | {shape} | {rivals_us} | {what} | {us} | {share} | {ratio} | {error} |")
    shares = [row.share for row in result.rows if row.share and row.ours and "hopper" in row.name]
    if shares:
        lines += ["", f"hopper: {min(shares):.0%} to {max(shares):.0%} of the ceiling, {math.fsum(shares) / len(shares):.0%} on average"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
