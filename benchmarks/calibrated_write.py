"""What rounding by a Hessian costs a write: microseconds of plain and calibrated writes, K and V of 8 heads, in one run.

    PYTHONPATH=src python benchmarks/calibrated_write.py [--formats levels4 ...] [--implementations hopper triton] [--json FILE]

First the calibrated bytes of 256 tokens are compared with the reference's, by what they cost by the Hessian; nothing is timed that costs
1 % more. Times are of prepared calls in CUDA graphs, their rows changed between replays only by what else the GPU does.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from quantkv import PagedCache, get_format
from quantkv.bench.timing import measure
from quantkv.maps import LayerMaps, LinearMap, default_map
from quantkv.prepared import prepare_write

HEADS, CHECKED = 8, 256


def hessian_of(size: int, seed: int) -> torch.Tensor:
    """Moments `[HEADS, size, size]` of rows of which few directions are large."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(HEADS, size, size, generator=generator))[0]
    factor = torch.randn(HEADS, 2 * size, size, generator=generator) * torch.logspace(0, -1.5, size) @ directions
    return factor.mT @ factor / (2 * size)


def maps_of(name: str, size: int, hessian: bool, key_mean: bool) -> LayerMaps:
    fmt, sides = get_format(name), []
    for seed, codec in enumerate((fmt.k, fmt.v)):
        plain = default_map(codec, size)
        table = torch.randn(8, HEADS, size, generator=torch.Generator().manual_seed(9)) if key_mean and seed == 0 else None
        sides.append(LinearMap(plain.forward, plain.inverse, table, hessian_of(size, seed) if hessian else None))
    return LayerMaps(*sides)


def costs(cache: PagedCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> list[float]:
    """Mean cost, by the Hessian, of what the cache holds of K and V."""
    found = []
    for rows, read, map_ in zip((key, value), cache.dequantize(slots, slots), (cache.maps.k, cache.maps.v)):
        error = (read.double() - rows.double()).cpu() @ map_.forward[0].double().cpu().mT
        found.append(torch.einsum("thd,hde,the->th", error, map_.rounding.hessian.double().cpu(), error).mean().item())
    return found


def check(name: str, maps: LayerMaps, implementation: str, key: torch.Tensor, value: torch.Tensor) -> list[float]:
    """Costs of K and V over the reference's."""
    slots, both = torch.arange(CHECKED), []
    for device, by in (("cuda", implementation), ("cpu", "reference")):
        cache = PagedCache(get_format(name).cache_spec(HEADS, key.shape[2]), CHECKED // 16, device, maps=maps)
        given = key[:CHECKED].to(device), value[:CHECKED].to(device), slots.to(device), slots.to(device)
        cache.write(*given, implementation=by)
        both.append(costs(cache, *given[:3]))
    return [ours / theirs for ours, theirs in zip(*both)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["levels4", "levels2", "levels3", "levels8"])
    parser.add_argument("--implementations", nargs="+", default=["hopper", "triton"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 64])
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    size, most, results = args.head_size, max(args.tokens), []
    key, value = torch.randn(2, most, HEADS, size, dtype=torch.bfloat16, device="cuda")
    for name in args.formats:
        for implementation in args.implementations:
            for what, hessian, key_mean in (("plain", False, False), ("Hessian", True, False), ("Hessian, key means", True, True)):
                maps = maps_of(name, size, hessian, key_mean)
                ratio = check(name, maps, implementation, key, value) if hessian else None
                if ratio is not None and max(ratio) > 1.01:
                    raise SystemExit(f"{name} by {implementation}, {what}: costs {ratio} of the reference's")
                for tokens in args.tokens:
                    cache = PagedCache(get_format(name).cache_spec(HEADS, size), most // 16, "cuda", maps=maps)
                    slots = torch.arange(tokens, device="cuda")
                    write = prepare_write(slots, slots, implementation=implementation)
                    us, how = measure(partial(write, cache, key[:tokens], value[:tokens]), torch.device("cuda"))
                    results.append(dict(format=name, by=implementation, what=what, tokens=tokens, us=round(us, 2), how=how, cost=ratio))
                    print(*results[-1].values(), sep="\t", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "head_size": size, "results": results}, indent=1))


if __name__ == "__main__":
    main()
