"""Every format with every feature at every head size, against float64 over the dequantized cache: docs/features.md and its JSON.

    python benchmarks/feature_matrix.py [--implementation triton] [--device cuda] [--workers 12] [--requests "decode,verify of 4"]
    python benchmarks/feature_matrix.py --formats latents --json benchmarks/results/features-latents.json    # of latents (MLA)
    python benchmarks/feature_matrix.py --page    # docs/features.md from the recorded runs (`RECORDED`); nothing is run

Each case is one ragged call with a decode, a whole prefill, a chunk and a verification of four queries in it, or with the requests that are
named; each has an error and a budget. The budget is twice the error of the same attention done eagerly in bfloat16: rows, probabilities and
output rounded (to float8 with an FP8 output). A cell that is no pass must be a refusal by name: anything else fails the run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
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
RESULTS = ROOT / "benchmarks" / "results"
RECORDED = {  # what the page is made of
    "Triton": ["features.json", "features-latents.json"],
    "Hopper": ["features-hopper-4.json", "features-hopper-8.json", "features-hopper-latents.json"],
}
FULL, PART, NONE = "●", "○", "–"
SAID = {
    "plain": "none: causal",
    "qq bias": "query-query bias",
    "map and offset": "any rotation and key means, with softcap and sinks",
}  # features of the page that are called otherwise in the runs
PAIRS = ["bf16/int4", "fp8_token/int4", "int2/tq4", "int4/tq3", "tq3/int2", "tq4/int8"]
LATENTS = ["int4+bf16", "int4+int8", "int8+bf16", "levels4+bf16", "levels4+int8", "levels6+bf16", "bf16+bf16"]
HEAD_SIZES = [(128, 128), (64, 64), (256, 256), (80, 80), (96, 96), (192, 128)]
LATENT_SIZES = [(512, 64)]
REQUESTS = {"decode": (1, 150), "prefill": (40, 40), "chunk": (21, 97), "verify of 4": (4, 130), "verify of 8": (8, 230)}  # queries, keys
USUAL = list(REQUESTS)[:4]
HK, GROUP, BLOCK = 2, 4, 16
LATENT_HEADS = 16  # query heads that share a row of latents
FEATURES = ["plain", "window", "softcap", "sinks", "ALiBi", "qq bias", "prefix ranges", "FP8 output", "map and offset"]


def options_of(feature: str, requests: list[str], heads: int, device: str) -> AttentionOptions:
    generator = torch.Generator().manual_seed(7)
    number = lambda *shape: torch.randn(*shape, generator=generator).to(device)
    return {
        "window": lambda: AttentionOptions(window=33),
        "softcap": lambda: AttentionOptions(softcap=3.0),
        "sinks": lambda: AttentionOptions(sinks=number(heads)),
        "ALiBi": lambda: AttentionOptions(alibi_slopes=number(heads).abs() / 8),
        "qq bias": lambda: AttentionOptions(qq_bias=number(48, 48)),
        "prefix ranges": lambda: AttentionOptions(
            window=40,
            prefix_ranges=torch.tensor(
                [[[2, 60], [100, 149]], [[5, 30], [0, 0]], [[70, 96], [9, 9]], [[0, 20], [120, 129]], [[3, 40], [200, 229]]], device=device
            )[[list(REQUESTS).index(request) for request in requests]],
        ),
        "FP8 output": lambda: AttentionOptions(output_scale=0.02),
        "map and offset": lambda: AttentionOptions(softcap=20.0, sinks=number(heads)),
    }.get(feature, AttentionOptions)()


def random_maps(head_size: int, head_size_v: int) -> LayerMaps:
    """A well-conditioned map for each head and a key mean for each bucket, in place of what the format asks for."""
    generator = torch.Generator().manual_seed(11)
    sides = []
    for d in (head_size, head_size_v):
        a = torch.linalg.qr(torch.randn(HK, d, d, generator=generator, dtype=torch.float64))[0]
        a = a * torch.exp(0.3 * torch.randn(HK, 1, d, generator=generator, dtype=torch.float64))
        sides.append((a.float(), torch.linalg.inv(a).float()))
    key_mean = 0.5 * torch.randn(3, HK, head_size, generator=generator)
    return LayerMaps(LinearMap(*sides[0], key_mean), LinearMap(*sides[1]))


def case(name: str, sizes: tuple[int, int], requests: list[str], implementation: str, device: str) -> list[dict]:
    """All features of one format at one head size."""
    torch.set_num_threads(1)
    d, d_v = sizes
    fmt, results = get_format(name), []
    try:
        spec = fmt.latent_spec(d, d_v, BLOCK) if fmt.latent else fmt.cache_spec(HK, d, d_v, BLOCK)
    except ValueError as error:
        return [dict(format=name, sizes=sizes, feature=f, refused=str(error)) for f in FEATURES]
    generator = torch.Generator().manual_seed(3)
    queries, lens = zip(*(REQUESTS[request] for request in requests))
    pages = [spec.num_blocks(n) for n in lens]
    order = torch.randperm(sum(pages) + 3, generator=generator)[: sum(pages)].split(pages)
    table = torch.stack([torch.nn.functional.pad(p, (0, max(pages) - len(p)), value=10**6) for p in order])
    slots = torch.cat([table[s, torch.arange(n) // BLOCK] * BLOCK + torch.arange(n) % BLOCK for s, n in enumerate(lens)]).to(device)
    positions = torch.cat([torch.arange(n) for n in lens]).to(device)
    heads, kv_heads = LATENT_HEADS if fmt.latent else HK * GROUP, spec.num_kv_heads
    key, value, q = (
        torch.randn(*shape, generator=generator).bfloat16().to(device)
        for shape in ((len(slots), kv_heads, d), (len(slots), kv_heads, d_v), (sum(queries), heads, spec.query_sizes[0]))
    )
    table, starts = table.int().to(device), torch.tensor([0, *queries], device=device).cumsum(0, dtype=torch.int32)
    batch = Batch(starts, torch.tensor(lens, device=device, dtype=torch.int32), max_query_len=max(queries))
    for feature in FEATURES:
        if fmt.latent and feature == "map and offset":
            continue  # latents have the rotation of their format, and no key mean
        maps = random_maps(d, d_v) if feature == "map and offset" else None
        cache = PagedCache(spec, sum(pages) + 3, device, maps=maps)
        cache.buffer.fill_(0xFF)  # NaN in every float that nothing writes
        # The reference writes, so that every implementation reads the same bytes.
        cache.write(key, value, slots, positions, implementation="reference")
        options = options_of(feature, requests, heads, device)
        want = exactly(q, cache, batch, table, without_fp8(options))
        low = eager(q, cache, slots, positions, batch, table, options)
        try:
            out, _ = ops.attend(call_over(q, cache, batch, table, options), implementation)
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


def call_over(q, cache: PagedCache, batch: Batch, table: torch.Tensor, options: AttentionOptions) -> AttendCall:
    """Attention over a cache. Queries of latents are absorbed: their scale is that of DeepSeek-V3, heads of 128 + 64 numbers."""
    return AttendCall(q, (cache.segment(table),), batch, (128 + 64) ** -0.5 if cache.spec.latent else None, options)


def without_fp8(options: AttentionOptions) -> AttentionOptions:
    return replace(options, output_scale=None)


def exactly(q, cache: PagedCache, batch: Batch, table: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Attention in float64."""
    return compute(call_over(q, cache, batch, table, options), torch.float64)[0]


def eager(q, cache, slots, positions, batch, table, options):
    """The same attention over 16-bit copies of the dequantized rows, with the roundings of an eager 16-bit implementation."""
    keys, values = (t.bfloat16().float() for t in cache.dequantize(slots, positions))
    sizes, latent = (keys.shape[2], values.shape[2], BLOCK), cache.spec.latent
    spec = get_format("fp32+fp32").latent_spec(*sizes) if latent else get_format("fp32").cache_spec(HK, *sizes)
    exact = PagedCache(spec, cache.num_blocks, cache.device)
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


# ---- docs/features.md


def page() -> str:
    """docs/features.md, from the recorded runs of Triton's kernels and of Hopper's."""
    runs = {name: [json.loads((RESULTS / file).read_text()) for file in files] for name, files in RECORDED.items()}
    entries = {name: [entry for run in of for entry in run["entries"]] for name, of in runs.items()}
    ran = [entry for of in entries.values() for entry in of if "refused" not in entry]
    worst = max(error / entry["budget"][request] for entry in ran for request, error in entry["error"].items())
    failed = sum(not passed(entry) for entry in ran)
    notes: list[str] = []
    of_latents, of_pairs = (
        {name: [e for e in of if get_format(e["format"]).latent == latent] for name, of in entries.items()} for latent in (True, False)
    )
    return "\n".join(
        [
            "# Every feature with every format",
            "",
            "Every cell was run on an H200 and is right, or is refused by name. `benchmarks/feature_matrix.py` writes this page.",
            "",
            f"{FULL}: Triton's kernels and Hopper's. {PART}: Triton's, on any GPU. {NONE}: refused by name. Numbers are notes below.",
            "",
            *format_matrix(of_pairs, HEAD_SIZES, notes),
            "",
            f"A format's mark holds under every option that its implementation serves. {FULL}: served. {NONE}: refused by name.",
            "",
            *option_table(of_pairs),
            "",
            "Latents (DeepSeek's MLA), 512 numbers and 64 rotated dimensions, 16 query heads:",
            "",
            *format_matrix(of_latents, LATENT_SIZES, notes),
            "",
            *option_table(of_latents),
            "",
            *(f"{at}. {note}" for at, note in enumerate(notes, 1)),
            "",
            "## How it was found",
            "",
            "- Triton's cases are one ragged call each: a decode, a whole prefill, a chunk, and a verification of four queries.",
            "- Hopper's cases are a decode beside a verification, of four and of eight queries.",
            "- Errors are those to float64 attention over the dequantized cache.",
            "- The budget of an error is twice that of eager attention in bfloat16.",
            f"- The largest error of {len(ran):,} cells is {worst:.2f} of its budget. {failed} cells fail.",
            "- [Who serves a call](kernels.md#what-serves-a-call) says what prefill kernels and CPUs serve.",
            "",
            *(f"- {name}: {run['header']}" for name, of in runs.items() for run in of),
            "",
        ]
    )


def format_matrix(entries: dict[str, list[dict]], of_sizes: list[tuple[int, int]], notes: list[str]) -> list[str]:
    """A line for each format, a column for each head size. notes: grows by what the marks refer to."""
    sizes = [tuple(size) for size in sorted(of_sizes, key=lambda size: (size[0] != size[1], size))]
    lines = [
        f"| format, by {'numbers' if of_sizes is LATENT_SIZES else 'head size'} | " + " | ".join(map(size_name, sizes)) + " |",
        "| --- |" + " :-: |" * len(sizes),
    ]
    missing = {name: refused_everywhere(of) for name, of in entries.items()}
    for fmt in dict.fromkeys(entry["format"] for of in entries.values() for entry in of):
        cells = []
        for size in sizes:
            states = []
            for name, of in entries.items():
                cell = [e for e in of if (e["format"], tuple(e["sizes"])) == (fmt, size) and e["feature"] not in missing[name]]
                states.append((all("refused" not in e and passed(e) for e in cell), [e["refused"] for e in cell if "refused" in e]))
            (triton, triton_why), (hopper, hopper_why) = states
            mark = NONE if not triton else FULL if hopper else PART
            cells.append(mark + references(triton_why or hopper_why, notes))
        lines.append(f"| `{fmt}` | " + " | ".join(cells) + " |")
    return lines


def option_table(entries: dict[str, list[dict]]) -> list[str]:
    """A line for each feature, a column for each implementation."""
    lines = ["| option | " + " | ".join(entries) + " |", "| --- |" + " :-: |" * len(entries)]
    for feature in FEATURES:
        if not any(entry["feature"] == feature for of in entries.values() for entry in of):
            continue
        cells = []
        for of in entries.values():
            refused = feature in refused_everywhere(of)
            cells.append(NONE if refused else FULL)
        lines.append(f"| {SAID.get(feature, feature)} | " + " | ".join(cells) + " |")
    return lines


def refused_everywhere(entries: list[dict]) -> set[str]:
    """The features that an implementation refuses with every format and head size."""
    return {feature for feature in FEATURES if all("refused" in entry for entry in entries if entry["feature"] == feature)}


def references(reasons: list[str], notes: list[str]) -> str:
    """Numbers of the notes that say these reasons, each without what differs by head size."""
    plain = (re.sub(r"head_size(_v)?[= ]\d+: ", "", reason) for reason in reasons)
    shown = dict.fromkeys(re.sub(r"^implementation='(\w+)'", lambda found: found[1].capitalize(), reason) for reason in plain)
    notes += [reason for reason in shown if reason not in notes]
    numbers = ", ".join(str(notes.index(reason) + 1) for reason in shown)
    return f"<sup>{numbers}</sup>" if numbers else ""


def size_name(sizes: tuple[int, int]) -> str:
    if sizes in LATENT_SIZES:
        return " + ".join(map(str, sizes))
    return str(sizes[0]) if sizes[0] == sizes[1] else f"{sizes[0]}, V {sizes[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default="triton")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=12, help="processes: compiling is what takes time")
    parser.add_argument("--requests", default=",".join(USUAL), help=f"some of {', '.join(REQUESTS)}")
    parser.add_argument("--seconds", type=float, help="give up what is not done by then; it is listed and missing in the tables")
    parser.add_argument("--formats", default=",".join([*available_formats(), *PAIRS]), help=f"latents: {','.join(LATENTS)}")
    parser.add_argument("--markdown", type=Path, default=ROOT / "docs" / "features.md")
    parser.add_argument("--json", type=Path, default=RESULTS / "features.json")
    parser.add_argument("--page", action="store_true", help="write the page from the recorded runs; run nothing")
    args = parser.parse_args()
    if args.page:
        args.markdown.write_text(page())
        return 0
    requests = args.requests.split(",")
    if unknown := [request for request in requests if request not in REQUESTS]:
        parser.error(f"--requests: {unknown} are none of {list(REQUESTS)}")
    named = LATENTS if args.formats == "latents" else args.formats.split(",")
    formats = [(name, LATENT_SIZES if get_format(name).latent else HEAD_SIZES) for name in named]
    jobs = [(name, sizes, requests, args.implementation, args.device) for name, of in formats for sizes in of]
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
    if all((RESULTS / file).exists() for of in RECORDED.values() for file in of):
        args.markdown.write_text(page())
    failures = [e for e in entries if not passed(e)]
    for e in failures:
        print("FAILED", e["format"], e["sizes"], e["feature"], {r: f"{error:.1e}/{e['budget'][r]:.1e}" for r, error in e["error"].items()})
    refused = sum("refused" in e for e in entries)
    print(f"{len(entries) - len(failures) - refused} of {len(entries)} cells pass, {refused} are refused by name")
    return int(bool(failures or late))


if __name__ == "__main__":
    sys.exit(main())
