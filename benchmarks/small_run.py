"""One small run of every kernel in every format, for a checker to watch:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck  python benchmarks/small_run.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python benchmarks/small_run.py

Run it once without the checker first: that compiles the kernels. Exit code 1 if a result differs from the reference's.
"""

import argparse
import sys

import torch

from quantkv import AttentionOptions, PagedCache, available_formats, get_format, ops, reference

PAIRS = ["tq4/int8", "int4/tq3", "fp8_token/int2"]


def run(name: str, implementation: str, device: str, head_size: int) -> float:
    """Write, then decode and a ragged batch with every mask at once; the relative error against the reference in float64."""
    spec = get_format(name).cache_spec(2, head_size, block_size=16)
    cache = PagedCache(spec, 9, device)
    generator = torch.Generator(device).manual_seed(0)
    rows = lambda n, heads: torch.randn(n, heads, head_size, generator=generator, device=device, dtype=torch.bfloat16)
    lens, queries = [37, 50, 3], [1, 9, 3]
    table = torch.tensor([[8, 2, 5, 0], [1, 7, 3, 4], [6, 0, 0, 0]], device=device)
    positions = [torch.arange(n, device=device) for n in lens]
    slots = torch.cat([table[s, p // 16] * 16 + p % 16 for s, p in enumerate(positions)])
    ops.write(rows(len(slots), 2), rows(len(slots), 2), cache.k, cache.v, cache.format, slots, implementation=implementation)
    worst = 0.0
    options = AttentionOptions(window=30, softcap=20.0, sinks=torch.linspace(-1, 1, 8, device=device))
    for counts, opts in (([1, 1, 1], AttentionOptions()), (queries, AttentionOptions()), (queries, options)):
        q = rows(sum(counts), 8)
        batch = dict(cu_seqlens_q=torch.tensor([0, *counts], device=device).cumsum(0, dtype=torch.int32),
                     seq_lens=torch.tensor(lens, device=device, dtype=torch.int32), block_table=table.int(), scale=head_size**-0.5,
                     options=opts)
        out, _ = ops.attend(q, cache.k, cache.v, cache.format, implementation=implementation, max_query_len=max(counts), **batch)
        want, _ = reference.attend(q, cache.k, cache.v, cache.format, dtype=torch.float64, **batch)
        worst = max(worst, ((out.double() - want).norm() / want.norm()).item())
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default="triton")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--head-size", type=int, default=128)
    args = parser.parse_args()
    errors = {name: run(name, args.implementation, args.device, args.head_size) for name in [*available_formats(), *PAIRS]}
    for name, error in errors.items():
        print(f"{name:16s} {error:.1e}")
    return int(not max(errors.values()) < 1e-2)


if __name__ == "__main__":
    sys.exit(main())
