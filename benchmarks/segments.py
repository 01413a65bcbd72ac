"""What full-precision tokens in front of quantized pages cost a decoding step, in one run on random data:

    python benchmarks/segments.py [--peers DIR] [--shapes B8xL32768 B64xL8192] [--formats none int4 int2] [--json FILE]
    python benchmarks/segments.py --device cpu --shapes B2xL512xHQ8xHK2

For each shape and format, microseconds of attention over all tokens in the format; over all but the first 16 and the latest 24 to 39; over
these in 16 bits beside the others in the format, read by the combine kernel, or by a kernel of their own, before or after that of the
others; and of FlashAttention-3 over 16 bits, where there is one (`--peers` as `quantkv bench` takes it). Each but the second is compared
with float64 attention over what its caches hold before it is timed; the rounds of all take turns. Exit code 1 where a result is wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from quantkv import PagedCache, get_format, ops
from quantkv.bench.contestants import TOLERANCE, filled
from quantkv.bench.problem import Entry, Problem, Unavailable
from quantkv.bench.rivals import rivals
from quantkv.bench.run import save_rows
from quantkv.bench.shapes import Shape, shapes
from quantkv.bench.timing import measure, read_ceiling_gbps
from quantkv.calls import AttendCall, Batch, Segment
from quantkv.implementations.hopper import attend as hopper

FIRST, LATEST = 16, 24  # tokens that are exact; of the latest up to a page less one more
FLASH3 = "FlashAttention-3"
PLAIN, RANGE = "all", "all but exact ones"
ORDER = hopper._launch_order
BESIDE = {  # how: what is patched in implementations/hopper/attend.py
    "exact beside": {},
    "exact beside, own kernel first": {"_exact": lambda call: None},
    "exact beside, own kernel last": {"_exact": lambda call: None, "_launch_order": lambda *given: ORDER(*given)[::-1]},
}


class Row(NamedTuple):
    """One time. what: who reads which segments. read_gbps: of the bytes that must be read. error: relative, against float64; None where it
    is not compared."""

    shape: str
    format: str
    what: str
    us: float
    spread_us: float
    read_gbps: float
    error: float | None
    note: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["B8xL32768", "B64xL8192"])
    parser.add_argument("--formats", nargs="+", default=["none", "int4", "int2"])
    parser.add_argument("--peers", type=Path, help="a folder with rivals")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--implementation", default=None, help="hopper on a GPU, else what is chosen")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA GPU: --device cpu shows only that all is right")
    device, found, wrong = torch.device(given.device), [], []
    implementation = given.implementation or ("hopper" if device.type == "cuda" else "auto")
    ceiling = read_ceiling_gbps(device) if device.type == "cuda" else None
    for shape in shapes(*given.shapes):
        rows = of_shape(shape, device, given, implementation, wrong)
        found += rows
        show(rows, ceiling)
    if given.json:
        save_rows(given.json, device, [row._asdict() for row in found], read_ceiling_gbps=ceiling)
    sys.exit("\n".join(wrong) if wrong else 0)


def of_shape(shape: Shape, device: torch.device, given, implementation: str, wrong: list[str]) -> list[Row]:
    """Everything at one shape, in turns; what is wrong is not timed."""
    problem = Problem(shape, device)
    entries: dict[tuple[str, str], Entry] = {}
    for contestant in rivals(given.peers):
        if (contestant.name, contestant.stores) == (FLASH3, "bf16"):
            try:
                entries["bf16", FLASH3] = contestant.prepare(problem)
            except (Unavailable, ValueError) as reason:
                print(f"{FLASH3}: {reason}")
    for name in given.formats:
        for what, entry in ours(problem, name, implementation).items():
            entries[name, what] = entry
    errors = {}
    for at, entry in list(entries.items()):
        errors[at] = problem.attention_error(entry, entry.call()) if at[1] != RANGE else None
        if errors[at] is not None and not errors[at] <= TOLERANCE["16 bit"]:
            wrong.append(f"{shape} {' '.join(at)}: differs by {errors[at]:.1e} of the norm; {TOLERANCE['16 bit']:.0e} is allowed")
            del entries[at]
    times: dict[tuple[str, str], list[float]] = {at: [] for at in entries}
    for _ in range(given.rounds):
        for at, entry in entries.items():
            times[at].append(measure(entry.call, device, entry.graph)[0])
    return [
        Row(
            str(shape),
            *at,
            statistics.median(us),
            max(us) - min(us),
            entries[at].nbytes / statistics.median(us) / 1e3,
            errors[at],
            entries[at].note,
        )
        for at, us in times.items()
    ]


def ours(problem: Problem, name: str, implementation: str) -> dict[str, Entry]:
    """Attention over one format, alone and beside full-precision tokens."""
    s, device, format_name = problem.shape, problem.device, get_format(name).name
    cache, rows = filled(problem, format_name)
    latest = max(s.L - LATEST, 0) // s.P * s.P
    if latest < FIRST:
        raise SystemExit(f"{s}: too few keys for {FIRST} first and {LATEST} latest ones")
    position = problem.positions.view(s.B, -1)[0]
    kept = (position < FIRST) | (position >= latest)
    slot = torch.arange(int(kept.sum()), device=device)
    count, pages = len(slot), -(-len(slot) // s.P)
    exact = PagedCache(get_format("none").cache_spec(s.HK, s.D, block_size=s.P), s.B * pages, device)
    table = torch.arange(s.B * pages, device=device, dtype=torch.int32).view(s.B, -1)
    slots = (table[:, slot // s.P].long() * s.P + slot % s.P).flatten()
    token = torch.arange(s.num_tokens, device=device)[kept.repeat(s.B)]
    exact.write(problem.key[token], problem.value[token], slots, implementation="reference")
    # Slots of the first tokens are taken for the positions before the latest: nothing here depends on where they stand.
    key_start = torch.full((s.B,), s.L - count, dtype=torch.int32, device=device)
    key_range = torch.tensor([[FIRST, latest]] * s.B, dtype=torch.int32, device=device)
    beside = cache.segment(problem.block_table, None, key_range), exact.segment(table, key_start)

    of_slot = problem.positions.new_empty(problem.num_blocks * s.P)
    of_slot[problem.slots] = problem.positions

    def mixed(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        where = of_slot[slots]
        is_exact = ((where < FIRST) | (where >= latest))[:, None, None]
        return tuple(torch.where(is_exact, a, b) for a, b in zip(problem.plain_rows(torch.bfloat16)(slots), rows(slots)))

    plain_bytes = int(s.tokens_read * cache.spec.bytes_per_token)
    other_bytes = int(s.B * count * (exact.spec.bytes_per_token - cache.spec.bytes_per_token))
    made = {PLAIN: Entry(serve(problem, (cache.segment(problem.block_table),), implementation), rows, plain_bytes)}
    fewer = int(s.B * count * cache.spec.bytes_per_token)
    made[RANGE] = Entry(serve(problem, beside[:1], implementation), rows, plain_bytes - fewer, note=f"{count} left out")
    for what, settings in BESIDE.items():
        made[what] = Entry(serve(problem, beside, implementation, settings), mixed, plain_bytes + other_bytes, note=f"{count} exact")
    return made


def serve(problem: Problem, segments: tuple[Segment, ...], implementation: str, settings: dict | None = None) -> Callable[[], torch.Tensor]:
    """A prepared call."""
    batch = Batch(problem.cu_seqlens_q, problem.seq_lens, problem.shape.Q)
    call = AttendCall(problem.q, segments, batch, problem.scale)
    usual = {name: getattr(hopper, name) for name in settings or {}}
    vars(hopper).update(settings or {})
    launch = ops.prepare(call, implementation)
    vars(hopper).update(usual)

    def run() -> torch.Tensor:
        launch(call)
        return call.out

    return run


def show(rows: list[Row], ceiling: float | None) -> None:
    """A table of one shape: against FlashAttention-3, and against the format without full-precision tokens."""
    us = {(row.format, row.what): row.us for row in rows}
    flash = us.get(("bf16", FLASH3))
    columns = ("format", -8), ("what", -32), ("us", 8), ("+-", 6), ("GB/s", 6), ("of read", 8), ("FA3 /", 6), ("+ %", 6), ("error", 8)
    print(f"\n{rows[0].shape if rows else ''}")
    print(" ".join(name.ljust(-width) if width < 0 else name.rjust(width) for name, width in columns))
    for row in rows:
        plain = us.get((row.format, PLAIN))
        cells = (
            *(row.format, row.what, f"{row.us:.1f}", f"{row.spread_us / 2:.1f}", f"{row.read_gbps:.0f}"),
            f"{row.read_gbps / ceiling:.0%}" if ceiling else "-",
            f"{flash / row.us:.2f}" if flash else "-",
            f"{(row.us / plain - 1) * 100:.1f}" if plain and row.what != PLAIN else "-",
            "-" if row.error is None else f"{row.error:.1e}",
        )
        print(" ".join(cell.ljust(-width) if width < 0 else cell.rjust(width) for cell, (_, width) in zip(cells, columns)), row.note)


if __name__ == "__main__":
    main()
