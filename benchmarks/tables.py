"""Write what was measured into documents: `python benchmarks/tables.py RESULT.json ... [FILE.md ...]`.

A document says where: the lines between `<!-- bench:NAME -->` and `<!-- /bench -->` are replaced. NAME: summary (microseconds
of decode and verify, without quantkv's Triton kernels), full (a table for each shape), targets (what was aimed at and what was reached),
of a file of `measure.py`; geometries (those of models, by name) and geometry_targets (acceptance thresholds, for notebook/), of a file of
`geometries.py` whose name ends in -geometries; end_to_end (tokens a second, memory) and model (that in a sentence), of a file of
`end_to_end.py`; transformers (a token and a prompt), of a file of `transformers_step.py`. Blocks of which no file tells stay as they are.
Beside a file of `measure.py` goes its plot; one whose name ends in -growth is that of growth, and fills no block.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from quantkv.bench import plot, tables
from quantkv.bench.run import Result, Row

BLOCK = re.compile(r"(<!-- bench:(\w+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
FLASH3, ENGINE = ("FlashAttention-3", "bf16"), "vLLM Triton"
SUMMARY = ("B8xL32768", "B64xL8192", "L131072", "B128xL1024", "B64xL8192xQ4")


@dataclass(frozen=True)
class Target:
    """unit: "share" of the read ceiling; "faster" than FlashAttention-3 bf16; "engine": faster than vLLM's Triton kernel of
    that format, where the aim is 2 us above the memory's floor; "us" and "times" that of the format without maps of its own, where
    less is better. stores: the formats, each of which must reach it."""

    shape: str
    stores: tuple[str, ...]
    unit: str
    must: float
    aim: float | None


def shares(shape: str, must: float, aim: float, *stores: str) -> Target:
    return Target(shape, stores, "share", must, aim)


def faster(shape: str, must: float, aim: float, *stores: str) -> Target:
    return Target(shape, stores, "faster", must, aim)


# At the geometries that benchmarks/geometries.py names, by format: how many times as fast as FlashAttention-3 over 16 bits, the share of
# the read ceiling, or the microseconds that were to be reached, and aimed at.
GEOMETRY_TARGETS = {
    ("Llama-3 8B", "int2"): ("faster", 5.0, 5.8),
    ("Llama-3 8B", "none"): ("faster", 1.0, 1.02),
    ("Llama-3 8B, many", "int2"): ("faster", 5.6, 6.5),
    ("Llama-3 70B, 8-way", "int4"): ("faster", 3.0, 3.3),
    ("Llama-3 405B, 8-way", "int4"): ("faster", 2.9, 3.3),
    ("GLM-4 9B, group 16", "int4"): ("faster", 3.0, 3.4),
    ("Gemma 3 27B, window 1024", "int4"): ("faster", 3.2, 3.5),
    ("gpt-oss, window 128", "int4"): ("faster", 2.5, 3.2),
    ("Phi-3 mini, head size 96", "int4"): ("faster", 3.0, 3.3),
    ("Phi-2, head size 80", "int4"): ("faster", 3.0, 3.3),
    ("head size 112", "int4"): ("share", 0.75, 0.85),
    ("StableLM 2 12B, head size 160", "int4"): ("share", 0.75, 0.85),
    ("Nemotron-4 340B, 2-way, head size 192", "int4"): ("faster", 3.0, 3.3),
    ("Gemma 4, global layers, head size 512", "int4"): ("share", 0.75, 0.85),
    ("pages of 8", "int4"): ("faster", 3.0, 3.3),
    ("verify 5", "int4"): ("faster", 2.8, 3.1),
    ("verify 8", "int4"): ("faster", 2.4, 2.8),
    ("verify 16", "int4"): ("faster", 1.6, 2.3),
    ("one sequence of 4096", "int4"): ("faster", 1.9, 2.3),
    ("four of 4096", "int4"): ("faster", 2.5, 2.9),
    ("one sequence of 2048", "none"): ("us", 11.0, 9.0),
    ("one sequence of 2048, and its write", "int4"): ("faster", 1.75, 2.1),
}
TARGETS = (
    shares("B8xL32768", 0.80, 0.87, "int4"),
    shares("B64xL8192", 0.85, 0.93, "int4"),
    faster("B8xL32768", 3.0, 3.4, "int4"),
    faster("B64xL8192", 3.1, 3.5, "int4"),
    shares("B8xL32768xP64", 0.80, 0.87, "int4"),
    shares("B64xL8192xP64", 0.85, 0.93, "int4"),
    shares("B8xL32768xHQ64", 0.80, 0.87, "int4"),
    shares("B64xL8192xHQ64", 0.85, 0.93, "int4"),
    shares("B8xL32768", 0.90, 0.95, "int8", "fp8_token"),
    shares("B64xL8192", 0.93, 0.98, "int8", "fp8_token"),
    shares("B8xL32768", 0.52, 0.68, "int2"),
    shares("B64xL8192", 0.60, 0.80, "int2"),
    shares("B8xL32768", 0.78, 0.88, "k8v4"),
    shares("B8xL32768", 0.65, 0.78, "tq4"),
    shares("B8xL32768", 0.45, 0.60, "tq3"),
    shares("L131072", 0.65, 0.78, "int4"),
    faster("B128xL1024", 2.7, 3.2, "int4"),
    faster("B16xL2048", 2.2, 2.8, "int4"),
    faster("L2048xN1", 1.65, 2.0, "int4"),
    faster("B64xL8192xQ4", 2.3, 2.9, "int4"),
    faster("B64xL8192xQ8", 1.8, 2.4, "int4"),
    faster("B64xL32768xW4096", 3.3, 4.2, "int4"),
    Target("B8xL32768", ("int4+maps",), "times", 1.06, 1.02),
    Target("B64xL8192", ("int4+maps",), "times", 1.06, 1.02),
    shares("B64xL8192xD64", 0.65, 0.80, "int4"),
    shares("B64xL8192xHQ16xD256", 0.65, 0.80, "int4"),
    shares("B64xL8192xHQ4xHK1", 0.65, 0.80, "int4"),
    shares("B64xL8192xHQ8xHK2", 0.65, 0.80, "int4"),
    Target("N8192", ("int4",), "us", 18, 13),
    Target("N64", ("int4",), "us", 3.5, 2.5),
    Target("N8192", ("bf16", "int8", "fp8_token", "tq_k8v4", "tq4", "tq3"), "engine", 2.0, None),
    Target("N64", ("bf16", "int8", "fp8_token", "tq_k8v4", "tq4", "tq3"), "engine", 2.0, None),
    faster("Q4096xL16384", 0.95, 1.05, "bf16", "int8", "fp8_token", "int4", "int2", "k8v4", "tq_k8v4", "tq4", "tq3"),
)


def best(result: Result, shape: str, stores: str):
    """Our fastest row of the shape and format, or None."""
    found = [r for r in result.rows if r.ours and r.us is not None and (r.shape, r.stores) == (canonical(shape), stores)]
    return min(found, key=lambda r: r.us, default=None)


def canonical(shape: str) -> str:
    return str(tables.Shape.parse(shape))


def reached(result: Result, target: Target, stores: str) -> float | None:
    """The measured value in the target's unit; None where something was not measured."""
    row = best(result, target.shape, stores)
    if row is None or target.unit == "us":
        return row and row.us
    if target.unit == "share":
        return row.share
    if target.unit == "times":
        plain = best(result, target.shape, stores.split("+")[0])
        return row.us / plain.us if plain else None
    rival_of = (ENGINE, stores) if target.unit == "engine" else FLASH3
    rival = [r.us for r in result.rows if r.us is not None and (r.name, r.stores) == rival_of and r.shape == row.shape]
    return min(rival) / row.us if rival else None


def verdict(result: Result, target: Target, stores: str, value: float | None) -> str:
    """Whether the aim, the must or neither was reached; nothing where it was not measured."""
    if value is None:
        return ""
    sign = -1 if target.unit in ("us", "times") else 1
    if target.aim is None:
        row = best(result, target.shape, stores)
        aimed = row.us <= tables.floor_us(row) + 2 if row.ceiling_gbps else False
    else:
        aimed = sign * value >= sign * target.aim
    return "aim" if aimed else "must" if sign * value >= sign * target.must else "**missed**"


def show(value: float | None, unit: str) -> str:
    if value is None:
        return "not measured"
    return {"share": f"{value:.0%}", "us": f"{value:.1f} us"}.get(unit, f"{value:.2f}x")


def targets(result: Result) -> str:
    """Every target with what was reached; a missed "must" is said in words."""
    lines = ["| shape | format | what | must | aim | reached | |", "| --- | --- | --- | --: | --: | --: | --- |"]
    what = {
        "share": "of the read ceiling",
        "faster": "times FlashAttention-3 bf16's speed",
        "us": "time",
        "engine": "times vLLM's speed",
        "times": "time, of that under the Hadamard map",
    }
    for t in TARGETS:
        for stores in t.stores:
            value = reached(result, t, stores)
            aim = "floor + 2 us" if t.aim is None else show(t.aim, t.unit)
            cells = (
                canonical(t.shape),
                stores,
                what[t.unit],
                show(t.must, t.unit),
                aim,
                show(value, t.unit),
                verdict(result, t, stores, value),
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def named_rows(result: Result) -> Iterator[tuple[str, Row]]:
    """The name of each geometry that benchmarks/geometries.py has and the run measured, with our fastest row of each format."""
    formats = dict.fromkeys(row.stores for row in result.rows if row.ours)
    for name, shape in geometry_script().GEOMETRIES.items():
        for stores in formats:
            if (row := best(result, shape, stores)) is not None:
                yield name, row


def geometry_script() -> ModuleType:
    """benchmarks/geometries.py, which is no package's module."""
    spec = importlib.util.spec_from_file_location("geometries", Path(__file__).with_name("geometries.py"))
    named = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(named)
    return named


def geometries(result: Result) -> str:
    """A line for each geometry and format; a column for XQA where it was timed, with a time for each type of cache."""
    xqa = geometry_script().xqa_times(result)
    rivals = ["FlashAttention-3 bf16, us", *([f"XQA {' / '.join(xqa)}, us"] if xqa else [])]
    ours = ["us (share of ceiling)", "speedup over FlashAttention-3"]
    lines = [f"| geometry (time: lower is better) | shape | {' | '.join(rivals)} | format | {' | '.join(ours)} |"]
    lines.append(f"| --- | --- |{' --: |' * len(rivals)} --- |{' --: |' * len(ours)}")
    for name, row in named_rows(result):
        faster = reached(result, Target(row.shape, (row.stores,), "faster", 0, 0), row.stores)
        flash3, speedup = ("", "") if faster is None else (tables.microseconds(row.us * faster), show(faster, "faster"))
        times = ["-" if (us := of.get(row.shape)) is None else tables.microseconds(us) for of in xqa.values()]
        others = [] if not xqa else ["" if set(times) == {"-"} else " / ".join(times)]
        share = "" if row.share is None else f" ({row.share:.0%})"
        shape = re.sub("x(HQ|HK|D)(?=[0-9])", r"<wbr>x\1", row.shape)  # a narrow column may break there
        cells = [name, shape, flash3, *others, f"`{row.stores}`", tables.microseconds(row.us) + share, speedup]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"{tables.subtitle(result)}."])


def geometry_targets(result: Result) -> str:
    """The acceptance thresholds of geometries, with what was reached."""
    what = {"share": "of the read ceiling", "faster": "times FlashAttention-3 bf16's speed", "us": "time"}
    lines = ["| geometry | format | what | must | aim | reached | |", "| --- | --- | --- | --: | --: | --: | --- |"]
    for name, row in named_rows(result):
        if (name, row.stores) in GEOMETRY_TARGETS:
            unit, must, aim = GEOMETRY_TARGETS[name, row.stores]
            target = Target(row.shape, (row.stores,), unit, must, aim)
            value = reached(result, target, row.stores)
            numbers = (show(must, unit), show(aim, unit), show(value, unit), verdict(result, target, row.stores, value))
            lines.append("| " + " | ".join((name, f"`{row.stores}`", what[unit], *numbers)) + " |")
    return "\n".join(lines)


def summary(result: Result) -> str:
    measured = {r.shape for r in result.rows}
    chosen = [s for s in SUMMARY if canonical(s) in measured]
    result = replace(result, rows=[r for r in result.rows if not (r.ours and "triton" in r.name)])
    table = tables.summary(result, chosen).replace("|  |", "| microseconds (share of the read ceiling) |", 1)
    return f"{table}\n\n{tables.subtitle(result)}."


def end_to_end(figures: dict[str, Any]) -> str:
    """A line for each cache: what it costs and what a whole model does with it."""
    rows = figures["end_to_end"]
    head = (
        "read by",
        "stores",
        "tokens/s",
        "x the first",
        "ms a step",
        "caches, GiB",
        "peak, GiB",
        "error of rows",
        "of attention",
        "of logits",
    )
    lines = ["| " + " | ".join(head) + " |", "| --- | --- |" + " --: |" * (len(head) - 2)]
    for row in rows:
        reader = row["reader"] if row["implementation"] == row["reader"] else f"{row['reader']} {row['implementation']}"
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
        speed = row["tokens_per_s"]
        cells = (
            reader,
            row["stores"],
            f"{speed:,.0f}",
            f"{speed / rows[0]['tokens_per_s']:.2f}",
            f"{row['step_ms']:.2f}",
            f"{row['cache_bytes'] / 2**30:.1f}",
            peak,
            *(f"{row[f'{what}_error']:.1e}" for what in ("row", "attention", "logits")),
        )
        lines.append("| " + " | ".join(cells) + " |")
    versions = ", ".join(f"{k} {v}" for k, v in figures["versions"].items())
    batch = f"{figures['sequences']} sequences of {figures['length']:,} tokens, {figures['steps']} steps"
    return "\n".join(lines) + f"\n\n{batch}. {figures['device']}; {versions}; {figures['date']}."


def model(figures: dict[str, Any]) -> str:
    """`end_to_end` in a sentence: int4 against the first."""
    rows = figures["end_to_end"]
    first, ours = rows[0], next((row for row in rows if row["stores"] == "int4"), rows[-1])

    def told(row: dict[str, Any]) -> str:
        return f"{row['tokens_per_s']:,.0f} tokens/s and {(row['peak_bytes'] or 0) / 2**30:.1f} GiB"

    batch = f"{figures['sequences']} sequences of {figures['length']:,} tokens"
    return (
        f"A whole model of Llama-3-8B's shape at decode, {batch}: {told(ours)} with `{ours['stores']}`, {told(first)} with "
        f"{first['reader']} over {first['stores']}, on an {figures['device']}."
    )


def transformers(figures: dict[str, Any]) -> str:
    """A line for each cache and way to decode, and one for each prompt."""
    steps, prompts = ([found for found in figures["results"] if found["kind"] == kind] for kind in ("Step", "Prompt"))
    lines = [
        "| cache | way | sequences x context | ms a token | first tokens, s | caches, GiB | peak, GiB |",
        "| --- | --- | --- |" + " --: |" * 4,
    ]
    for x in sorted(steps, key=lambda x: (x["sequences"], x["context"], x["step_ms"])):
        cells = (
            x["cache"],
            x["way"],
            f"{x['sequences']} x {x['context']:,}",
            *(f"{x[n]:.2f}" for n in ("step_ms", "first_s", "cache_gib", "peak_gib")),
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| prompt | tokens | cold, s | warm, s |", "| --- | --: | --: | --: |"]
    lines += [f"| {x['cache']} | {x['tokens']:,} | {x['cold_s']:.2f} | {x['warm_s']:.2f} |" for x in prompts]
    versions = ", ".join(f"{k} {v}" for k, v in figures["versions"].items())
    return "\n".join(lines) + f"\n\n{figures['device']}; {versions}."


OF_RESULT: dict[str, Callable[[Result], str]] = {"summary": summary, "full": tables.markdown, "targets": targets}
OF_END_TO_END: dict[str, Callable[[dict], str]] = {"end_to_end": end_to_end, "model": model}


def blocks(figures: dict[str, Any], stem: str = "") -> dict[str, str]:
    """The blocks that a file of figures of this name fills."""
    if stem.endswith("-geometries"):
        result = Result.from_dict(figures)
        return {"geometries": geometries(result), "geometry_targets": geometry_targets(result)}
    if "results" in figures:
        return {"transformers": transformers(figures)}
    if "end_to_end" in figures:
        return {name: render(figures) for name, render in OF_END_TO_END.items()}
    result = Result.from_dict(figures)
    return {name: render(result) for name, render in OF_RESULT.items()}


def update(text: str, filled: dict[str, str]) -> str:
    """The document with its blocks filled. ValueError for a block of an unknown name."""

    def fill(match: re.Match) -> str:
        known = (*OF_RESULT, *OF_END_TO_END, "transformers", "geometries", "geometry_targets")
        if match[2] not in known:
            raise ValueError(f"bench:{match[2]}: one of {', '.join(known)}")
        return f"{match[1]}{filled[match[2]].rstrip()}\n{match[3]}" if match[2] in filled else match[0]

    return BLOCK.sub(fill, text)


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]]
    figures, documents = ([p for p in paths if (p.suffix == ".json") is kind] for kind in (True, False))
    if not figures:
        sys.exit(__doc__)
    filled: dict[str, str] = {}
    for path in figures:
        values, growth = json.loads(path.read_text()), path.stem.endswith("-growth")
        if not growth:
            filled |= blocks(values, path.stem)
        if "rows" in values and not path.stem.endswith("-geometries"):
            (plot.draw_growth if growth else plot.draw)(path.with_suffix(".svg"), Result.from_dict(values))
    for path in documents:
        path.write_text(update(path.read_text(), filled))


if __name__ == "__main__":
    main()
