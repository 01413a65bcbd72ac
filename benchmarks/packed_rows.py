"""Decode and verification of many packed query rows (queries times the query heads of a kv head), by each way that there is, in one run:

    python benchmarks/packed_rows.py [--peers DIR] [--shapes B32xL16384xHK2 ..] [--formats int4] [--json FILE]

The ways: a warp alone (decode.cu); a consumer warpgroup that shares what it unpacks (decode_wgmma.cu), its products by wgmma, or by
mma.sync out of the same shared memory; Triton; and FlashAttention-3 over 16 bits, where there is one (`--peers` as `quantkv bench` takes
it). Each is compared with float64 attention over what its cache holds before it is timed; the rounds of all take turns. Exit code 1
where one is wrong."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

from quantkv.bench.contestants import TOLERANCE, quantkv
from quantkv.bench.problem import Entry, Problem, Unavailable
from quantkv.bench.rivals import rivals
from quantkv.bench.run import save_rows
from quantkv.bench.shapes import Shape, shapes
from quantkv.bench.timing import measure, read_ceiling_gbps
from quantkv.implementations.hopper.decode import warps, wgmma

# GLM-4; one kv head of 16 and of 8 query heads; queries of a verification.
SHAPES = ("B32xL16384xHK2", "B64xL8192xHQ16xHK1", "B64xL8192xHQ8xHK1", "B32xL8192xQ5", "B64xL8192xQ8", "B32xL8192xQ16")
FLASH3 = "FlashAttention-3"
WAYS = {  # what is set in implementations/hopper/decode/wgmma.py
    "a warp": {"choose": warps.choose},
    "a warpgroup, wgmma": {"MANY_PACKED_ROWS": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--formats", nargs="+", default=["int4"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--no-triton", action="store_true")
    parser.add_argument("--peers", type=Path, help="a folder with rivals")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU")
    device, found, wrong = torch.device("cuda"), [], []
    ceiling = read_ceiling_gbps(device)
    for shape in shapes(*given.shapes):
        found += of_shape(shape, device, given, ceiling, wrong)
        torch.cuda.empty_cache()
    if given.json:
        save_rows(given.json, device, found, read_ceiling_gbps=ceiling)
    sys.exit("\n".join(wrong) if wrong else 0)


def of_shape(shape: Shape, device: torch.device, given: argparse.Namespace, ceiling: float, wrong: list[str]) -> list[dict]:
    """Every way at one shape, in turns; what is wrong is not timed."""
    problem, entries, settings = Problem(shape, device), {}, {}
    contestants = [(c, c.stores, FLASH3, {}) for c in rivals(given.peers) if (c.name, c.stores) == (FLASH3, "bf16")]
    for name in given.formats:
        contestants += [(quantkv("hopper", name), name, way, WAYS[way]) for way in given.ways]
        contestants += [] if given.no_triton else [(quantkv("triton", name), name, "Triton", {})]
    usual = {name: getattr(wgmma, name) for name in ("MANY_PACKED_ROWS", "choose")}
    for contestant, name, way, chosen in contestants:
        vars(wgmma).update(usual | chosen)
        try:
            entry: Entry = contestant.prepare(problem)
            error = problem.attention_error(entry, entry.call())
        except (Unavailable, ValueError) as reason:
            print(f"{shape} {name} {way}: {reason}")
            continue
        if error <= TOLERANCE["16 bit"]:
            entries[name, way], settings[name, way] = (entry, error), usual | chosen
        else:
            wrong.append(f"{shape} {name} {way}: differs by {error:.1e} of the norm; {TOLERANCE['16 bit']:.0e} is allowed")
    times: dict[tuple[str, str], list[float]] = {at: [] for at in entries}
    for _ in range(given.rounds):
        for at, (entry, _error) in entries.items():
            vars(wgmma).update(settings[at])
            times[at].append(measure(entry.call, device, entry.graph)[0])
    vars(wgmma).update(usual)
    flash = statistics.median(times.get(("bf16", FLASH3), [float("nan")]))
    print(
        f"\n{shape}: {shape.Q * shape.HQ // shape.HK} packed query rows",
        *(line for line in wrong if line.startswith(f"{shape} ")),
        sep="\n",
    )
    rows = []
    for at, (entry, error) in entries.items():
        us = statistics.median(times[at])
        share = entry.nbytes / us / 1e3 / ceiling
        rows.append({"shape": str(shape), "format": at[0], "way": at[1], "us": us, "spread_us": max(times[at]) - min(times[at])})
        rows[-1] |= {"of_read_ceiling": share, "error": error}
        print(f"{at[0]:9} {at[1]:17} {us:8.1f} us  {share:4.0%} of the ceiling  {flash / us:5.2f} x {FLASH3}  error {error:.1e}")
    return rows


if __name__ == "__main__":
    main()
