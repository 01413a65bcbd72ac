"""One small run of every kernel in every format, for a checker to watch (benchmarks/sanitize.sh runs all of compute-sanitizer's over it):

    PYTHONPATH=src python benchmarks/small_run.py [--implementation triton hopper prefill] [--formats ...]

Exit code 1 if a result differs from the reference's.
"""

import argparse
import sys

import torch

from quantkv import LayerMaps, PagedCache, available_formats, get_format, implementations, ops
from quantkv.bench.contestants import maps_of, stepped
from quantkv.calls import AttendCall, AttentionOptions, Batch, WriteCall
from quantkv.implementations.hopper.decode.warps import DecodeConfig
from quantkv.implementations.reference.attend import compute
from quantkv.testing import SampleBatch

PAIRS = ["tq4/int8", "int4/tq3", "fp8_token/int2"]
LATENTS = ["int4+bf16", "int8+bf16", "levels4+bf16", "int4+int8"]
STEPS = "+steps"  # behind a format: of each kv head Hadamard matrices behind powers of two


def layer_maps(name: str, heads: int, head_size: int) -> LayerMaps | None:
    """Maps of K and V of a format that STEPS follows; None for others."""
    if not name.endswith(STEPS):
        return None
    generator = torch.Generator("cpu").manual_seed(1)
    return maps_of(*(stepped(heads, head_size, generator) for _ in range(2)))


def run(name: str, implementation: str, device: str, head_size: int) -> float | None:
    """Write, then decode and a ragged batch, plain and with every mask at once: the largest relative error against the reference in
    float64; None if the implementation takes none of the calls."""
    fmt = get_format(name.removesuffix(STEPS))
    spec = fmt.cache_spec(1, 512, 64) if fmt.latent else fmt.cache_spec(2, head_size)
    heads = spec.num_kv_heads
    cache = PagedCache(spec, 40, device, maps=layer_maps(name, heads, head_size))
    generator = torch.Generator(device).manual_seed(0)
    rows = lambda n, heads, size=head_size: torch.randn(n, heads, size, generator=generator, device=device, dtype=torch.bfloat16)
    lens = [37, 50, 3, 400]
    table = torch.full((4, 25), 10**6, device=device)
    order = torch.randperm(40, generator=generator, device=device)
    for s, n in enumerate(lens):
        count = spec.num_blocks(n)
        table[s, :count], order = order[:count], order[count:]
    positions = [torch.arange(n, device=device) for n in lens]
    slots = torch.cat([table[s, p // 16] * 16 + p % 16 for s, p in enumerate(positions)])
    given = (rows(len(slots), heads, size) for size in ((512, 64) if fmt.latent else (head_size, head_size)))
    write = WriteCall(*given, cache.k, cache.v, fmt, slots, cache.maps)
    ops.write(write, implementation if implementations.refusal(implementation, write) is None else "auto")
    worst = []
    masks = AttentionOptions(window=30, softcap=20.0, sinks=torch.linspace(-1, 1, 8, device=device))
    invariant = AttentionOptions(batch_invariant=True)
    decode, ragged, prompt = [1, 1, 1], [1, 9, 3], [300]
    for first, counts, options in (
        (0, decode, AttentionOptions()),
        (0, ragged, AttentionOptions()),
        (0, ragged, masks),
        (0, [4, 2, 3], masks),
        (0, [1, 8, 3], masks),
        (3, [1], AttentionOptions()),  # alone: a cluster of blocks has a kv head
        (0, decode, invariant),
        (0, [4, 2, 3], invariant),
        (3, [1], invariant),  # alone: the blocks of a cluster send each other their partials
        (3, prompt, AttentionOptions()),
    ):
        q, chosen = rows(sum(counts), 8, spec.query_sizes[0]), slice(first, first + len(counts))
        starts = torch.tensor([0, *counts], device=device).cumsum(0, dtype=torch.int32)
        batch = Batch(starts, torch.tensor(lens[chosen], device=device, dtype=torch.int32), max(counts))
        call = AttendCall(q, (cache.segment(table[chosen].int()),), batch, q.shape[2] ** -0.5, options)
        if implementations.refusal(implementation, call) is None:
            got, _ = ops.attend(call, implementation)
            want, _ = compute(call, torch.float64)
            worst.append(((got.double() - want).norm() / want.norm()).item())
        if counts is decode and not fmt.latent:  # the same beside full-precision tokens
            call = beside_exact(call, lens[chosen], rows)
            if implementations.refusal(implementation, call) is None:
                got, _ = ops.attend(call, implementation)
                want, _ = compute(call, torch.float64)
                worst.append(((got.double() - want).norm() / want.norm()).item())
    return max(worst, default=None)


def of_many(name: str, device: str, head_size: int) -> float | None:
    """Decode of so many sequences that Hopper's kernel decides on the device whether a warp or two have each (sequence, kv head): lengths
    for which they do, and lengths for which they do not. None for latents, which are never cut so."""
    if get_format(name.removesuffix(STEPS)).latent:
        return None
    worst, processors = [], torch.cuda.get_device_properties(device).multi_processor_count
    for lens in ([500] * (2 * processors), [500] * 8 + [40] * (2 * processors - 8)):
        fmt, maps = name.removesuffix(STEPS), layer_maps(name, 2, head_size)
        batch = SampleBatch.make(
            fmt, [1] * len(lens), lens, head_size=head_size, group=4, dtype=torch.bfloat16, device=device, num_kv_heads=2, maps=maps
        )
        call = batch.call(max_query_len=1)
        if implementations.refusal("hopper", call) is not None:
            return None
        got, _ = ops.attend(call, "hopper")
        want, _ = batch.oracle(max_query_len=1)
        worst.append(((got.cpu().double() - want).norm() / want.norm()).item())
    return max(worst)


def beside_exact(call: AttendCall, lens: list[int], rows) -> AttendCall:
    """The call with its keys from the last page but one on in a 16-bit cache."""
    (segment,), device = call.segments, call.q.device
    heads, size, head_size = segment.k.codes.shape[2], segment.k.codes.shape[1], call.q.shape[2]
    exact = PagedCache(get_format("none").cache_spec(heads, head_size, block_size=size), 2 * len(lens), device)
    begins = [max(-(-n // size) - 2, 0) * size for n in lens]
    slots = torch.cat([2 * size * s + torch.arange(n - begin, device=device) for s, (n, begin) in enumerate(zip(lens, begins))])
    exact.write(rows(len(slots), heads), rows(len(slots), heads), slots)
    starts = torch.tensor(begins, device=device, dtype=torch.int32)
    table = torch.arange(2 * len(lens), device=device, dtype=torch.int32).view(-1, 2)
    ranges = torch.stack([torch.zeros_like(starts), starts], 1)
    return AttendCall(call.q, (segment._replace(key_range=ranges), exact.segment(table, starts)), call.batch, options=call.options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", nargs="+", default=["triton"], help="hopper, prefill, triton: each in turn")
    parser.add_argument("--formats", nargs="+", default=[*available_formats(), *PAIRS, *LATENTS, "levels4" + STEPS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--head-size", type=int, default=128)
    args = parser.parse_args()
    macros = DecodeConfig.macros
    DecodeConfig.macros = lambda config: {**macros(config), "SPARE_LANES_COPY": 0}  # no two lanes write the same bytes to one place
    right = True
    for implementation in args.implementation:
        for name in args.formats:
            errors = [run(name, implementation, args.device, args.head_size)]
            if implementation == "hopper":
                errors.append(of_many(name, args.device, args.head_size))
            right = right and all(error is None or error < 1e-2 for error in errors)
            print(f"{implementation:9s} {name:16s}", *("refused" if error is None else f"{error:.1e}" for error in errors), flush=True)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
