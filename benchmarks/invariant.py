"""What `batch_invariant` costs on Hopper:

    python benchmarks/invariant.py [--shapes B8xL32768 ..] [--formats int4] [--json FILE]

For each shape and format: microseconds of a decode step as it is and with `batch_invariant`, by the Hopper kernel in turns, and of Triton
with it. Its answer is compared with that of the plain call, and the bits of two sequences alone with theirs in the batch, before anything
is timed. Exit code 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from quantkv import PagedCache
from quantkv.bench.contestants import TOLERANCE, filled
from quantkv.bench.problem import Problem
from quantkv.bench.run import save_rows
from quantkv.bench.shapes import shapes
from quantkv.bench.timing import in_turns
from quantkv.prepared import prepare_attend
from quantkv.testing import relative_error

SHAPES = ("B8xL32768", "B64xL8192", "B1xL131072", "B128xL1024", "B1xL2048", "B32xL16384xHK2", "B64xL8192xQ4")
WAYS = {"plain": ("hopper", False), "batch_invariant": ("hopper", True), "Triton, batch_invariant": ("triton", True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--formats", nargs="+", default=["int4"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU")
    device, found, wrong = torch.device("cuda"), [], []
    for shape in shapes(*given.shapes):
        problem = Problem(shape, device)
        for name in given.formats:
            found.append(of_cache(problem, name, given.rounds, wrong))
        del problem
        torch.cuda.empty_cache()
    if given.json:
        save_rows(given.json, device, found)
    sys.exit("\n".join(wrong) if wrong else 0)


def of_cache(problem: Problem, name: str, rounds: int, wrong: list[str]) -> dict:
    """The times at one shape and format."""
    shape, (cache, _) = problem.shape, filled(problem, name)
    tensors = {n: getattr(problem, n) for n in ("cu_seqlens_q", "seq_lens", "block_table", "scale")}
    calls = {}
    for way, (implementation, invariant) in WAYS.items():
        attend = prepare_attend(**tensors, lengths=[(shape.Q, shape.L)] * shape.B, batch_invariant=invariant, implementation=implementation)
        calls[way] = lambda attend=attend: attend(cache, problem.q)
    expected, out = calls["plain"](), calls["batch_invariant"]()
    error = relative_error(out, expected)
    if error > TOLERANCE["16 bit"]:
        wrong.append(f"{shape} {name}: batch_invariant differs from the plain call by {error:.1e}")
    for s in {0, shape.B - 1}:
        if not torch.equal(alone(cache, problem, s), out[s * shape.Q : (s + 1) * shape.Q]):
            wrong.append(f"{shape} {name}: sequence {s} alone has other bits")
    us, spread = in_turns(calls, problem.q.device, rounds)
    print(
        f"{shape!s:16} {name:8}",
        *(f"{way} {us[way]:8.1f} us" for way in WAYS),
        f"{us['batch_invariant'] / us['plain']:.3f} x plain",
        sep="  ",
    )
    return {"shape": str(shape), "format": name, "us": us, "spread_us": spread}


def alone(cache: PagedCache, problem: Problem, s: int) -> torch.Tensor:
    """The output of one sequence, of a call that has no other."""
    queries = problem.shape.Q
    return cache.attend(
        problem.q[s * queries : (s + 1) * queries],
        block_table=problem.block_table[s : s + 1],
        seq_lens=problem.seq_lens[s : s + 1],
        cu_seqlens_q=torch.tensor([0, queries], dtype=torch.int32, device=problem.q.device),
        max_query_len=queries,
        scale=problem.scale,
        batch_invariant=True,
        implementation="hopper",
    )


if __name__ == "__main__":
    main()
