"""Decode over latents of DeepSeek's sizes on one core: the compiled kernels beside the reference, whose products are a BLAS's.

    python benchmarks/cpu_latents.py [--formats int4 levels4] [--heads 8 16 128] [--keys 1024 4096] [--queries 1 4]

One sequence, random rows, prepared calls, turn about. Milliseconds of the processor, the least of --rounds: what else the machine does
counts little. Larger products than `attend.MOST_LATENT_ROWS` allows are timed too: that is how it was chosen.
"""

from __future__ import annotations

import argparse
import time
from itertools import product

import torch

from quantkv import PagedCache, get_format, prepare_attend
from quantkv.implementations.cpu import attend

IMPLEMENTATIONS = ("cpu", "reference")


def measure(name: str, heads: int, keys: int, queries: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each implementation."""
    spec = get_format(name, torch.bfloat16).latent_spec(512, 64, 16, torch.bfloat16)
    cache = PagedCache(spec, spec.num_blocks(keys))
    rows = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache.write(rows(keys, 1, 512), rows(keys, 1, 64), torch.arange(keys))
    batch = dict(block_table=torch.arange(cache.num_blocks, dtype=torch.int32)[None], seq_lens=torch.tensor([keys], dtype=torch.int32))
    batch |= dict(cu_seqlens_q=torch.tensor([0, queries], dtype=torch.int32), max_query_len=queries)
    steps = {of: prepare_attend(**batch, scale=(128 + 64) ** -0.5, implementation=of) for of in IMPLEMENTATIONS}
    q, least = rows(queries, heads, 576), dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for of, step in steps.items():
            start = time.process_time()
            step(cache, q)
            least[of] = min(least[of], 1e3 * (time.process_time() - start))
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["int4", "levels4", "int8", "none"])
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 16, 128])
    parser.add_argument("--keys", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--queries", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    attend.MOST_LATENT_ROWS = 1 << 30
    print("| format | heads | keys | queries | kernels, ms | reference, ms | |\n|---|--:|--:|--:|--:|--:|--:|")
    for name, heads, keys, queries in product(args.formats, args.heads, args.keys, args.queries):
        found = measure(name, heads, keys, queries, args.rounds)
        ours, reference = (found[of] for of in IMPLEMENTATIONS)
        print(f"| `{name}` | {heads} | {keys:,} | {queries} | {ours:.2f} | {reference:.2f} | {reference / ours:.2f}x |", flush=True)


if __name__ == "__main__":
    main()
