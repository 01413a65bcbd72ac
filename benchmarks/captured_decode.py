"""Decode of which the host knows no lengths, as in an engine's captured graphs, beside the same with lengths told:

    python benchmarks/captured_decode.py [--peers DIR] [--batches "GLM-4" ragged] [--format int4] [--json FILE]

For each batch, in turns: microseconds of quantkv's Hopper kernels with lengths told, with lengths that the device looks at, and with all
sequences cut among all warps, whatever the lengths are; and of FlashAttention-3 over 16 bits (`--peers` as `quantkv bench` takes it).
Answers are compared with those of the reference before anything is timed. Exit code 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from quantkv import PagedCache
from quantkv.bench.contestants import TOLERANCE, filled
from quantkv.bench.problem import Problem, Unavailable
from quantkv.bench.rivals import rivals
from quantkv.bench.run import save_rows
from quantkv.bench.shapes import Shape
from quantkv.bench.timing import in_turns
from quantkv.implementations.hopper.decode import unsplit
from quantkv.prepared import prepare_attend
from quantkv.testing import relative_error

BATCHES = {  # a shape of as many tokens in all, and the lengths, where they are not even
    "Llama-3 70B, 8-way": ("B64xL8192xHQ8xHK1", ()),
    "Llama-3 405B, 8-way": ("B64xL8192xHQ16xHK1", ()),
    "GLM-4 9B": ("B32xL16384xHK2", ()),
    "Llama-3 8B, many": ("B64xL8192", ()),
    "ragged, 16/2 heads": ("B32xL7040xHQ16xHK2", (98304, *[4096] * 31)),
    "ragged, 32/8 heads": ("B32xL7040", (98304, *[4096] * 31)),
}
FLASH3 = "FlashAttention-3"
WAYS = {"told": (True, False), "not told": (False, False), "always split": (False, True)}  # lengths told; always split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", default=list(BATCHES), help="batches, or what their names contain")
    parser.add_argument("--format", default="int4")
    parser.add_argument("--peers", type=Path, help="a folder with rivals")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU")
    device, found, wrong = torch.device("cuda"), [], []
    for name in BATCHES:
        if any(part in name for part in given.batches):
            found.append(of_batch(name, device, given, wrong))
            torch.cuda.empty_cache()
    if given.json:
        save_rows(given.json, device, found)
    sys.exit("\n".join(wrong) if wrong else 0)


def of_batch(name: str, device: torch.device, given: argparse.Namespace, wrong: list[str], implementation: str = "hopper") -> dict:
    """The times of one batch, by way."""
    shape, lens = BATCHES[name]
    problem = Problem(Shape.parse(shape), device)
    cache, _ = filled(problem, given.format)
    calls = {way: ours(problem, cache, lens, *how, implementation) for way, how in WAYS.items()}
    expected = ours(problem, cache, lens, True, False, "reference")()
    for way, call in calls.items():
        if (error := relative_error(call(), expected)) > TOLERANCE["16 bit"]:
            wrong.append(f"{name}, {way}: differs from the reference by {error:.1e}")
    if flash3 := of_flash3(problem, lens, given.peers):
        calls[FLASH3] = flash3
    us, spread = in_turns(calls, device, given.rounds)
    ratio = {way: us[FLASH3] / us[way] for way in WAYS if FLASH3 in us}
    print(
        f"{name:22}",
        *(f"{way} {us[way]:7.1f} us" + (f" ({ratio[way]:.2f}x)" if way in ratio else "") for way in calls),
        sep="  ",
        flush=True,
    )
    return {"batch": name, "shape": shape, "lengths": lens[:2], "format": given.format, "us": us, "spread_us": spread}


def ours(
    problem: Problem, cache: PagedCache, lens: tuple[int, ...], told: bool, split: bool, implementation: str
) -> Callable[[], torch.Tensor]:
    """A prepared call, which has been made once."""
    seq_lens, table = cut(problem, lens)
    lengths = [(1, n) for n in seq_lens.tolist()] if told else None
    batch = dict(cu_seqlens_q=problem.cu_seqlens_q, seq_lens=seq_lens, block_table=table, scale=problem.scale)
    attend = prepare_attend(**batch, max_query_len=1, lengths=lengths, implementation=implementation)
    choose = unsplit.choose
    if split:
        unsplit.choose = lambda call, config, *_: (config, None)
    try:
        attend(cache, problem.q)
    finally:
        unsplit.choose = choose
    return lambda: attend(cache, problem.q)


def cut(problem: Problem, lens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths and page tables of the problem, or of its pages under other lengths, as many in all."""
    if not lens:
        return problem.seq_lens, problem.block_table
    pages, size, table = problem.block_table.flatten(), problem.shape.P, []
    for n in lens:
        own, pages = pages[: n // size], pages[n // size :]
        table.append(torch.nn.functional.pad(own, (0, max(lens) // size - len(own))))
    return problem.seq_lens.new_tensor(lens), torch.stack(table)


def of_flash3(problem: Problem, lens: tuple[int, ...], peers: Path | None) -> Callable[[], torch.Tensor] | None:
    """FlashAttention-3 over 16-bit pages, where it is there."""
    caches = problem.paged(torch.bfloat16)[:2]
    problem.seq_lens, table = cut(problem, lens)
    problem.paged = lambda dtype, page=None: (*caches, table)
    for contestant in rivals(peers):
        if (contestant.name, contestant.stores) == (FLASH3, "bf16"):
            try:
                return contestant.prepare(problem).call
            except Unavailable as reason:
                print(f"{FLASH3}: {reason}")
    return None


if __name__ == "__main__":
    main()
