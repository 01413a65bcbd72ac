"""Every format with every feature at every head size, against float64 over the dequantized cache: docs/features.md and its JSON.

    python benchmarks/feature_matrix.py [--implementation triton] [--device cuda] [--workers 12] [--requests "decode,verify of 4"]

Each case is one ragged call with a decode, a whole prefill, a chunk and a verification of four queries in it, or with the requests that are
named; each has an error and a budget. The budget is twice the error of the same attention done eagerly in bfloat16: rows, probabilities and
output rounded (to float8 with an FP8 output). A cell that is no pass must be a refusal by name: anything else fails the run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from quantkv import AttentionOptions, PagedCache, available_formats, get_format, ops
from quantkv.calls import AttendCall, Batch
from quantkv.implementations.reference.attend import compute
from quantkv.maps import LayerMaps, LinearMap

ROOT = Path(__file__).parent.parent
PAIRS = ["bf16/int4", "fp8_token/int4", "int2/tq4", "int4/tq3", "tq3/int2", "tq4/int8"]
HEAD_SIZES = [(128, 128), (64, 64), (256, 256), (80, 80), (96, 96), (192, 128)]
REQUESTS = {"decode": (1, 150), "prefill": (40, 40), "chunk": (21, 97), "verify of 4": (4, 130), "verify of 8": (8, 230)}  # queries, keys
USUAL = list(REQUESTS)[:4]
HK, GROUP, BLOCK = 2, 4, 16
FEATURES = ["plain", "window", "softcap", "sinks", "ALiBi", "qq bias", "prefix ranges", "FP8 output", "map and offset"]


def options_of(feature: str, requests: list[str], device: str) -> AttentionOptions:
    generator = torch.Generator().manual_seed(7)
    number = lambda *shape: torch.randn(*shape, generator=generator).to(device)
    return {
        "window": lambda: AttentionOptions(window=33),
        "softcap": lambda: AttentionOptions(softcap=3.0),
        "sinks": lambda: AttentionOptions(sinks=number(HK * GROUP)),
        "ALiBi": lambda: AttentionOptions(alibi_slopes=number(HK * GROUP).abs() / 8),
        "qq bias": lambda: AttentionOptions(qq_bias=number(48, 48)),
        "prefix ranges": lambda: AttentionOptions(
            window=40,
            prefix_ranges=torch.tensor(
                [[[2, 60], [100, 149]], [[5, 30], [0, 0]], [[70, 96], [9, 9]], [[0, 20], [120, 129]], [[3, 40], [200, 229]]], device=device
            )[[list(REQUESTS).index(request) for request in requests]],
        ),
        "FP8 output": lambda: AttentionOptions(output_scale=0.02),
        "map and offset": lambda: AttentionOptions(softcap=20.0, sinks=number(HK * GROUP)),
    }.get(feature, AttentionOptions)()


def random_maps(head_size: int, head_size_v: int) -> LayerMaps:
    """A well-conditioned map for each head and an offset for each bucket, in place of what the format asks for."""
    generator = torch.Generator().manual_seed(11)
    sides = []
    for d in (head_size, head_size_v):
        a = torch.linalg.qr(torch.randn(HK, d, d, generator=generator, dtype=torch.float64))[0]
        a = a * torch.exp(0.3 * torch.randn(HK, 1, d, generator=generator, dtype=torch.float64))
        sides.append((a.float(), torch.linalg.inv(a).float()))
    offset = 0.5 * torch.randn(3, HK, head_size, generator=generator)
    return LayerMaps(LinearMap(*sides[0], offset), LinearMap(*sides[1]))


def case(name: str, sizes: tuple[int, int], requests: list[str], implementation: str, device: str) -> list[dict]:
    """All features of one format at one head size."""
    torch.set_num_threads(1)
    d, d_v = sizes
    fmt, results = get_format(name), []
    try:
        spec = fmt.cache_spec(HK, d, d_v, BLOCK)
    except ValueError as error:
        return [dict(format=name, sizes=sizes, feature=f, refused=str(error)) for f in FEATURES]
    generator = torch.Generator().manual_seed(3)
    queries, lens = zip(*(REQUESTS[request] for request in requests))
    pages = [spec.num_blocks(n) for n in lens]
    order = torch.randperm(sum(pages) + 3, generator=generator)[: sum(pages)].split(pages)
    table = torch.stack([torch.nn.functional.pad(p, (0, max(pages) - len(p)), value=10**6) for p in order])
    slots = torch.cat([table[s, torch.arange(n) // BLOCK] * BLOCK + torch.arange(n) % BLOCK for s, n in enumerate(lens)]).to(device)
    positions = torch.cat([torch.arange(n) for n in lens]).to(device)
    key, value, q = (
        torch.randn(*shape, generator=generator).bfloat16().to(device)
        for shape in ((len(slots), HK, d), (len(slots), HK, d_v), (sum(queries), HK * GROUP, d))
    )
    table, starts = table.int().to(device), torch.tensor([0, *queries], device=device).cumsum(0, dtype=torch.int32)
    batch = Batch(starts, torch.tensor(lens, device=device, dtype=torch.int32), max_query_len=max(queries))
    for feature in FEATURES:
        maps = random_maps(d, d_v) if feature == "map and offset" else None
        cache = PagedCache(spec, sum(pages) + 3, device, maps=maps)
        cache.buffer.fill_(0xFF)  # NaN in every float that nothing writes
        # The reference writes, so that every implementation reads the same bytes.
        cache.write(key, value, slots, positions, implementation="reference")
        options = options_of(feature, requests, device)
        want = exactly(q, cache, batch, table, without_fp8(options))
        low = eager(q, cache, slots, positions, batch, table, options)
        try:
            out, _ = ops.attend(AttendCall(q, (cache.segment(table),), batch, options=options), implementation)
        except ValueError as error:
            results.append(dict(format=name, sizes=sizes, feature=feature, refused=str(error)))
            continue
        out = out.double() * (options.output_scale or 1.0)
        entry = dict(format=name, sizes=sizes, feature=feature, error={}, budget={})
        for request, a, b in zip(requests, starts.tolist(), starts[1:].tolist()):
            size = want[a:b].norm()
            entry["error"][request] = ((out[a:b] - want[a:b]).norm() / size).item()
            entry["budget"][request] = 2 * ((low[a:b] - want[a:b]).norm() / size).item()
        results.append(entry)
    return results


def without_fp8(options: AttentionOptions) -> AttentionOptions:
    return replace(options, output_scale=None)


def exactly(q, cache: PagedCache, batch: Batch, table: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Attention in float64."""
    return compute(AttendCall(q, (cache.segment(table),), batch, options=options), torch.float64)[0]


def eager(q, cache, slots, positions, batch, table, options):
    """The same attention over 16-bit copies of the dequantized rows, with the roundings of an eager 16-bit implementation."""
    keys, values = (t.bfloat16().float() for t in cache.dequantize(slots, positions))
    plain = get_format("fp32")
    exact = PagedCache(plain.cache_spec(HK, keys.shape[2], values.shape[2], BLOCK), cache.num_blocks, cache.device)
    exact.write(keys, values, slots, implementation="reference")
    # Probabilities that are rounded change the output by as much as rounding it does.
    out = exactly(q, exact, batch, table, without_fp8(options))
    noise = torch.finfo(torch.bfloat16).eps / 2
    out = out * (1 + noise * (2 * torch.rand(out.shape, generator=torch.Generator().manual_seed(1)).to(out) - 1))
    if options.output_scale is None:
        return out.bfloat16().double()
    return (out / options.output_scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * options.output_scale


def passed(entry: dict) -> bool:
    return "refused" in entry or all(error <= entry["budget"][r] for r, error in entry["error"].items())


def render(entries: list[dict], header: str) -> str:
    """One table a head size: the largest error / budget of a request in each cell, or a number that points to the refusal."""
    lines = [
        "# Every feature with every format",
        "",
        header,
        "",
        __doc__.split("\n\n")[2].replace("\n", " "),
        "",
        "A cell is the largest error of a request, in parts of its budget. `-`: refused, with the reason below the table.",
        "",
    ]
    for sizes in HEAD_SIZES:
        rows = [e for e in entries if tuple(e["sizes"]) == sizes]
        lines += [
            f"## Head size {sizes[0]}" + (f", values {sizes[1]}" if sizes[0] != sizes[1] else ""),
            "",
            "| format | " + " | ".join(FEATURES) + " |",
            "|---" * (len(FEATURES) + 1) + "|",
        ]
        reasons = []
        for name in dict.fromkeys(e["format"] for e in rows):
            cells = []
            for feature in FEATURES:
                entry = next(e for e in rows if e["format"] == name and e["feature"] == feature)
                if "refused" in entry:
                    reasons.append(entry["refused"])
                    cells.append("-")
                else:
                    cells.append(f"{max(error / entry['budget'][r] for r, error in entry['error'].items()):.2f}")
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines += ["", *(f"- {reason}" for reason in dict.fromkeys(reasons)), ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default="triton")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=12, help="processes: compiling is what takes time")
    parser.add_argument("--requests", default=",".join(USUAL), help=f"some of {', '.join(REQUESTS)}")
    parser.add_argument("--seconds", type=float, help="give up what is not done by then; it is listed and missing in the tables")
    parser.add_argument("--formats", default=",".join([*available_formats(), *PAIRS]))
    parser.add_argument("--markdown", type=Path, default=ROOT / "docs" / "features.md")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "features.json")
    args = parser.parse_args()
    requests = args.requests.split(",")
    if unknown := [request for request in requests if request not in REQUESTS]:
        parser.error(f"--requests: {unknown} are none of {list(REQUESTS)}")
    jobs = [(name, sizes, requests, args.implementation, args.device) for sizes in HEAD_SIZES for name in args.formats.split(",")]
    begun = time.monotonic()
    with get_context("spawn").Pool(args.workers) as pool:  # left behind, it ends what still runs
        results = [pool.apply_async(case, job) for job in jobs]
        for result in results:
            result.wait(None if args.seconds is None else max(begun + args.seconds - time.monotonic(), 0))
        late = [f"{name} {sizes[0]}" for (name, sizes, *_), result in zip(jobs, results) if not result.ready()]
        entries = [entry for result in results if result.ready() for entry in result.get()]
    print(f"{time.monotonic() - begun:.0f} s; not run: {late}")
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {platform.machine()}"
    what = f"implementation {args.implementation}; requests: {', '.join(requests)}"
    header = f"Measured on {where}, torch {torch.__version__}, {datetime.date.today()}, {what}."
    args.json.write_text(json.dumps(dict(header=header, entries=entries)) + "\n")
    args.markdown.write_text(render(entries, header))
    failures = [e for e in entries if not passed(e)]
    for e in failures:
        print("FAILED", e["format"], e["sizes"], e["feature"], {r: f"{error:.1e}/{e['budget'][r]:.1e}" for r, error in e["error"].items()})
    refused = sum("refused" in e for e in entries)
    print(f"{len(entries) - len(failures) - refused} of {len(entries)} cells pass, {refused} are refused by name")
    return int(bool(failures or late))


if __name__ == "__main__":
    sys.exit(main())
