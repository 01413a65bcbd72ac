"""What it costs that a step reads its own rows as given, beside reading what was stored of them, in one run on random data:

    python benchmarks/own_rows.py [--formats none int4 levels4] [--json FILE]
    python benchmarks/own_rows.py --device cpu --steps 40 16+24 2x4+100 --heads 8 2

A step is NxQ+C: N sequences (1 if it is left out) of Q queries, each after a context of C keys (0). Each is compared with float64 attention
over dequantized pages and given rows where that fits (--check keys at most), then timed through a prepared call of known lengths, as an
engine makes it once for the layers of a step. Exit code 1 where a result is wrong.
"""

from __future__ import annotations

import argparse
import re
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from quantkv import prepare_attend
from quantkv.bench.run import save_rows
from quantkv.bench.timing import measure
from quantkv.implementations import batches, resolve
from quantkv.testing import OUTPUT_BUDGET, SampleBatch, relative_error

STEPS = ("8192", "8x1024", "8192+24576", "8x512+3584", "64x5+8192", "2x100+4096")


class Row(NamedTuple):
    """One time. us: of a call. who: what serves it. error: relative, against float64; None where it is not compared."""

    step: str
    format: str
    rows: str
    us: float
    who: str
    error: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", default=STEPS)
    parser.add_argument("--formats", nargs="+", default=["none", "int4", "levels4"])
    parser.add_argument("--heads", nargs=2, type=int, default=(32, 8), metavar=("HQ", "HK"))
    parser.add_argument("--check", type=int, default=10_000, help="keys of all sequences, at most, that are compared with float64")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, dtype, (num_heads, kv_heads) = torch.device(options.device), torch.bfloat16, options.heads
    print(f"{'step':>12} {'format':>8} {'rows':>7} {'us':>10} {'stored/own':>11}  error    served by")
    rows = []
    for step in options.steps:
        count, queries, context = (int(n or d) for n, d in zip(re.fullmatch(r"(?:(\d+)x)?(\d+)(?:\+(\d+))?", step).groups(), (1, 0, 0)))
        for name in options.formats:
            shape = [queries] * count, [queries + context] * count
            b = SampleBatch.make(
                name, *shape, head_size=128, num_kv_heads=kv_heads, group=num_heads // kv_heads, dtype=dtype, device=device, block_size=16
            )
            index = torch.arange(count * (queries + context), device=device).view(count, -1)[:, context:].flatten()
            own = b.key[index], b.value[index]
            lengths = tuple(zip(*shape)) if queries >= 9 else None  # as engines know them
            batch = {"block_table": b.block_table.clamp_min(0), "seq_lens": b.seq_lens, "cu_seqlens_q": b.cu_seqlens_q}
            found = {}
            for kind, given in (("stored", None), ("own", own)):
                attend = prepare_attend(**batch, lengths=lengths, max_query_len=queries)
                out, error = attend(b.cache, b.q, own=given), None
                if b.slots.shape[0] <= options.check:
                    error = relative_error(out, b.oracle(own=given)[0])
                call = b.call(own=given, **({"max_query_len": queries} if lengths is None else {"lengths": lengths}))
                who = ", ".join(dict.fromkeys(resolve(run.call)[0] for run in batches.cut(call)))
                us, _ = measure(partial(attend, b.cache, b.q, own=given, out=out), device, graph=False)
                found[kind] = us
                rows.append(Row(step, name, kind, us, who, error))
                ratio = "" if kind == "stored" else f"{found['stored'] / us:.3f}"
                print(
                    f"{step:>12} {name:>8} {kind:>7} {us:10.1f} {ratio:>11}  {'' if error is None else f'{error:.1e}':8} {who}", flush=True
                )
    if options.json:
        save_rows(options.json, device, [row._asdict() for row in rows])
    wrong = [row for row in rows if row.error is not None and not row.error <= 2 * OUTPUT_BUDGET[dtype]]
    sys.exit(f"wrong: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
