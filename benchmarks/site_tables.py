"""Write the tables of `PAGES` from the recorded results: `python benchmarks/site_tables.py`.

The lines between `<!-- site:NAME -->` and `<!-- /site -->` are replaced. A test holds the pages to what this writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from quantkv.cli.report import kl_with_error, with_error

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/choose.md", "docs/performance-by-model.md", "docs/engine.md", "docs/quality.md", "docs/vllm.md")
BLOCK = re.compile(r"(<!-- site:(\w+) -->\n).*?(<!-- /site -->)", re.DOTALL)
SHAPE = "B64xL8192"  # the batch that times are of
NOT_MEASURED = "not measured"
# What a configuration is for, and its name in the file of quality; without full-precision tokens (+SINK,RECENT) in that of every format
# as it is.
CONFIGURATIONS = (
    ("nothing may change, and nothing is to be set up", "int8"),
    ("keys at 8 bits, values at 4, nothing to set up", "k8v4"),
    ("4 bits as vLLM stores them, to try", "int4"),
    ("more than 4 bits can be had", "levels6/levels5 +16,24"),
    ("4 bits", "levels4 +16,24"),
    ("4 bits by layer, in fewer bytes", "tuned 72 +16,24"),
    ("3 to 4 bits by layer", "tuned 64 +16,24"),
    ("2 to 3 bits by layer", "tuned 48 +16,8"),
    ("2 bits, decode on Hopper", "trellis2 +16,24"),
    ("2 bits as they are: not advised", "int2"),
)
PRESETS = (  # with nothing set up: what for, and the configuration
    ("nothing may change", "8bit"),
    ("**4 bits: start here**", "4bit"),
    ("3 bits", "3bit"),
    ("2 bits", "2bit"),
    ("4 bits as vLLM stores them", "int4"),
)
FRONT, SEQUENCES = "h100-vllm.jsonl", 48  # speeds of the front page and its picture: decode of so many sequences of 8,192
# vLLM's own types and ours of that run, and the cache that stores what each stores; TurboQuant's is a policy: `tq4`, of which the first
# two and the last two layers are at 16 bits, as vLLM leaves them.
ENGINES = {
    "auto": None,
    "fp8": "fp8",
    "int8_per_token_head": "int8",
    "turboquant_4bit_nc": "turboquant_4bit_nc",
    "int4_per_token_head": "int4",
    **{f"quantkv_{name}": name for name in ("8bit", "4bit", "3bit", "2bit", "int4")},
}
REAL = ("SmolLM2-135M", "Qwen2.5-Coder-0.5B", "Gemma-3-270M")  # models of their loss
# Models of the benchmark of quality, with the bytes of a token and kv head at 16 bits, and what of its configurations is shown.
MODELS = {"smollm2": ("SmolLM2-135M", 256), "qwen": ("Qwen2 0.5B, keys with biases", 256), "gemma": ("Gemma 3 270M", 1024)}
BY_MODEL = ("int4", "levels4 +16,24", "tuned 80 +16,24", "tuned 52 +16,24", "tuned 48 +16,24", "trellis2 +16,24")


def read(name: str) -> Any:
    """A file of results; one of lines as a list."""
    text = (RESULTS / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], words: int) -> str:
    """A table of Markdown; the first `words` columns are text."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * words + " --: |" * (len(head) - words)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def digits(kl: float, small: float = 0.002) -> int:
    """Digits behind the point with which a KL is shown."""
    return 5 if kl < small else 4


# ---- docs/choose.md


def through_cache() -> dict[str, dict]:
    """The rows of `quantkv eval` on SmolLM2 and news, through a real cache, by what was typed."""
    return {row["format"]: row for row in read("through-cache.json")["runs"][0]["formats"]}


def presets() -> str:
    """What each preset takes and loses, beside int4."""
    loss = "KL of decoded tokens, nats a token (lower is better)"
    head = ("you want", "take", "bytes (16 bits: 256)", loss, "same top-1, %", "KL of the prompt")
    rows, found = [], through_cache()
    for wanted, name in PRESETS:
        row = found[name]
        rows.append((wanted, f"`{name}`", held(row), lost(row), f"{row['same_top1']:.1f}", kl_with_error(row["prompt"])))
    return table(head, rows, 2)


def held(row: dict) -> str:
    """Bytes of a token and kv head, and the compression."""
    return f"{row['bytes_per_head']:.0f} ({row['compression']:.2f}x)"


def lost(row: dict) -> str:
    """A KL with its standard error, if there are several contexts."""
    return with_error(row["kl"], row.get("kl_error"), digits(row["kl"]))


def choose() -> str:
    """Every configuration with what it needs, takes and loses, teacher-forced."""
    base = ("16 bits", "`none`", "", "256", "0", "", "")
    head = ("you want", "take", "first", "bytes (compression)", "KL, nats a token", "perplexity", "copy accuracy, %")
    return table(head, [base, *(configuration_row(*each) for each in CONFIGURATIONS)], 3)


def front_engines() -> dict[str, dict]:
    """The engines that the front page is of, by their types in vLLM; of several of a type the newest, which comes first."""
    return {engine["type"]: engine for engine in reversed(read(FRONT)) if engine["job"] == "main"}


def real_losses() -> dict[tuple[str, str], dict]:
    """Rows of decoded tokens of news through a real cache, by model and cache; presets of SmolLM2 are those of the front page."""
    runs = [run for run in read("quality-table.json")["runs"] if (run["part"], run["text"]) == ("presets", "news")]
    found = {(run["model"], row["format"]): row for run in runs for row in run["formats"]}
    return found | {(REAL[0], name): row for name, row in through_cache().items()}


def engines() -> str:
    """vLLM's own types beside ours, of one run, with what each loses on three models."""
    of, losses, rows = front_engines(), real_losses(), []
    batches = (
        ("prefill", 8, "prompts, 8 x 8,192"),
        ("prefill", 2, "prompts, 2 x 32,768"),
        ("decode", 48, "decode, 48 x 8,192"),
        ("decode", 8, "decode, 8 x 32,768"),
    )
    for kind, cache in ENGINES.items():
        shown = [f"`{kind}`" if kind != "auto" else "16 bits", f"{of[kind]['kv_tokens']:,}"]
        for scenario, sequences, _ in batches:
            base, found = (speed(of[each], scenario, sequences) for each in ("auto", kind))
            shown.append(f"{found:,.0f}" + (f" ({found / base:.2f}x)" if cache else ""))
        kls = [losses[model, cache]["kl"] for model in REAL] if cache else [0]
        rows.append((*shown, "; ".join(f"{kl:.{2 if kl > 0.1 else digits(kl)}f}" if kl else "0" for kl in kls)))
    head = ("type", "tokens that fit", *(said for *_, said in batches), "KL on the three models")
    return table(head, rows, 1)


def front() -> str:
    """What the front page advises, with loss and speed of the same configuration."""
    engines = front_engines()
    fast = lambda kind: speed(engines.get(kind), "decode", SEQUENCES)
    base, rows = fast("auto"), []
    for wanted, name in PRESETS[:4]:
        row, found = through_cache()[name], fast(f"quantkv_{name}")
        gain = NOT_MEASURED if found is None else f"{found:,.0f} ({found / base:.2f}x)"
        rows.append((wanted, f"`{name}`", held(row), lost(row), f"{row['same_top1']:.1f}", gain))
    loss, gain = "KL of decoded tokens, nats a token (lower is better)", f"tokens/s in vLLM (16 bits: {base:,.0f})"
    return table(("you want", "take", "bytes (16 bits: 256)", loss, "same top-1, %", gain), rows, 2)


def times() -> str:
    """How long attention takes to read each format of the configurations that is no choice by layer."""
    names = [name.split(" ")[0] for _, name in CONFIGURATIONS if not name.startswith("tuned")]
    rows = [(f"`{name}`", *(microseconds(f"quantkv {by}", name) for by in ("hopper", "triton"))) for name in names]
    rows = sorted((row for row in rows if row[1] != NOT_MEASURED), key=lambda row: float(row[1]))
    base = ("16 bits, FlashAttention-3", microseconds("FlashAttention-3", "bf16"), "")
    return table(
        ("time of attention (lower is better)", "Hopper's kernels, us", "Triton's, us"),
        [base, ("16 bits in pages", "", microseconds("quantkv triton", "bf16")), *rows],
        1,
    )


def configuration_row(wanted: str, name: str) -> tuple[str, ...]:
    """A line of `choose`."""
    exact = "+" in name
    if exact:
        runs = [run for run in read("quality.json")["runs"] if (run["model"], run["text"]) == ("smollm2", "news")]
        kl, found = ({row["format"]: row for run in runs if run["part"] == part for row in run["formats"]} for part in ("kl", "copy"))
        row, copied = kl[name], found.get(name, {}).get("copy")
    else:
        row, copied = next(row for row in read("eval-smollm2-135m.json")["runs"][0]["formats"] if row["format"] == name), None
    first = "" if not exact else "tune" if name.startswith("tuned") else "calibrate"
    return (
        wanted,
        f"`{name}`",
        first,
        f"{16 * row['bits_per_element']:.0f} ({row['compression']:.2f}x)",
        with_error(row["kl"], row.get("kl_error"), digits(row["kl"], 0.0005)),
        f"{row['perplexity_change']:+.2f} %",
        "" if copied is None else with_error(copied["share"], copied["error"]),
    )


def microseconds(reader: str, stores: str) -> str:
    """The time of one attention of `SHAPE`, of the first run that has it."""
    for name in ("h200.json", "h200-levels.json", "h200-trellis.json"):
        for row in read(name)["rows"]:
            if (row["shape"], row["name"], row["stores"]) == (SHAPE, reader, stores) and row["us"] is not None:
                return f"{row['us']:,.0f}"
    return NOT_MEASURED


# ---- docs/engine.md


def errors() -> str:
    """What an engine finds that stores a format as it is: by how much rows, attention and predictions differ."""
    ran = {row["format"]: row for row in read("expected-errors.json")["formats"]}
    head = ("format", "bits a number (D = 64)", "error of rows, %", "error of attention, %", "KL, nats a token", "same top-1, %")
    rows = []
    for row in read("eval-smollm2-135m.json")["runs"][0]["formats"]:
        name = row["format"]
        if name in ran:
            percent = (f"{100 * ran[name][of]:.1f}" for of in ("row_error", "attention_error"))
            kl = with_error(row["kl"], row["kl_error"], digits(row["kl"]))
            rows.append((f"`{name}`", f"{row['bits_per_element']:.2f}", *percent, kl, f"{row['same_top1']:.1f}"))
    return table(head, rows, 1)


# ---- docs/quality.md


def by_model() -> str:
    """The KL of a few configurations on each model of the benchmark of quality."""
    runs = {run["model"]: run for run in read("quality.json")["runs"] if run["part"] == "kl" and run["text"] == "news"}
    head = ("model", "cache", "bytes (16 bits: 100 %)", "KL, nats a token (lower is better)")
    rows = []
    for model, (said, exact) in MODELS.items():
        for row in sorted(runs[model]["formats"], key=lambda row: -row["bytes_per_head"]):
            if row["format"] in BY_MODEL:
                share = f"{row['bytes_per_head']:.0f} ({row['bytes_per_head'] / exact:.0%})"
                rows.append((said, f"`{row['format']}`", share, with_error(row["kl"], row["kl_error"], digits(row["kl"]))))
    return table(head, rows, 2)


# ---- docs/performance-by-model.md


def models() -> str:
    """What whole models do with 16 bits and with ours."""
    head = ("model, engine", "what", "exact", "8 bits", "4 bits", "2 bits", "gain at 4 bits")
    return table(head, (*engine_rows(), *loop_rows(), *generate_rows(), *cpu_rows()), 2)


def line(model: str, by: str, what: str, figures: dict[str, float | None], more_is_better: bool = True) -> tuple[str, ...]:
    """A line of `models`. figures: of "16" (an exact cache), "8", "4" and "2" bits."""
    base, four = figures["16"], figures["4"]
    ratio = four / base if more_is_better else base / four
    digits = 0 if base >= 100 else 1
    shown = ("" if figures.get(bits) is None else f"{figures[bits]:,.{digits}f}" for bits in ("16", "8", "4", "2"))
    return (f"{model}; {by}", what, *shown, f"{ratio:.2f}x")


def engine_rows() -> Iterator[tuple[str, ...]]:
    """In vLLM."""
    by_type = {"16": "auto", "8": "quantkv_int8", "4": "quantkv_int4", "2": "quantkv_int2"}
    engines = read("h200-vllm.jsonl")
    of = lambda job: {bits: next((e for e in engines if (e["job"], e["type"]) == (job, kind)), None) for bits, kind in by_type.items()}
    main = of("main")
    llama, vllm = "Llama-3-8B's shape", "vLLM, one H200"
    yield line(llama, vllm, "tokens that fit", {bits: engine["kv_tokens"] for bits, engine in main.items()})
    for scenario, sequences, what in (
        ("decode", 64, "decode, 64 sequences of 8,192"),
        ("decode", 8, "decode, 8 sequences of 32,768"),
        ("fit", None, "decode, as many sequences of 8,192 as fit"),
        ("prefill", 8, "prefill, 8 of 8,192"),
    ):
        yield line(llama, vllm, f"tokens/s: {what}", {bits: speed(engine, scenario, sequences) for bits, engine in main.items()})
    drafts = {bits: speed(engine, "verify", 64) for bits, engine in of("verify").items()}
    yield line(llama, vllm, "tokens/s: drafts of 4 tokens, 64 sequences of 8,192", drafts)
    two = {bits: speed(engine, "decode", 64) for bits, engine in of("two_gpus").items()}
    yield line("Llama-3-70B's shape, 20 layers", "vLLM, two H200", "tokens/s: decode, 64 sequences of 8,192", two)


def speed(engine: dict | None, scenario: str, sequences: int | None) -> float | None:
    """Tokens a second; None where that was not run."""
    found = [x for x in (engine or {}).get("found", []) if x["scenario"] == scenario and sequences in (None, x["sequences"])]
    return found[0]["tokens_per_s"] if found else None


def loop_rows() -> Iterator[tuple[str, ...]]:
    """A plain loop over `PagedCache`, each step one CUDA graph."""
    values = read("h200-end-to-end.json")
    of = {"16": ("FlashAttention-3", "bf16"), "8": ("quantkv", "int8"), "4": ("quantkv", "int4"), "2": ("quantkv", "int2")}
    rows = {bits: next(r for r in values["end_to_end"] if (r["reader"], r["stores"]) == kind) for bits, kind in of.items()}
    model, by = "Llama-3-8B's shape", "a plain loop, one H200"
    batch = f"decode, {values['sequences']} sequences of {values['length']:,}"
    yield line(model, by, f"tokens/s: {batch}", {bits: row["tokens_per_s"] for bits, row in rows.items()})
    yield line(model, by, f"GiB in all: {batch}", {bits: row["peak_bytes"] / 2**30 for bits, row in rows.items()}, False)


def generate_rows() -> Iterator[tuple[str, ...]]:
    """transformers' `generate`."""
    steps = [row for row in read("h200-transformers-step.json")["results"] if row["kind"] == "Step"]
    ms: Callable[[str, str], float] = lambda cache, way: next(row["step_ms"] for row in steps if (row["cache"], row["way"]) == (cache, way))
    model, by = "Llama-3-8B's shape", "transformers, one H200"
    figures = {"16": ms("StaticCache", "compiled"), "4": ms("int4", "compiled")}
    yield line(model, by, "ms a token: one sequence of 32,768, compiled", figures, False)
    yield line(model, by, "the same, eager", {"16": ms("DynamicCache", "eager"), "4": ms("int4", "eager")}, False)


def cpu_rows() -> Iterator[tuple[str, ...]]:
    """On a CPU: processor time."""
    values = read("cpu-decode.json")
    by = f"transformers, a CPU, {values['threads']} thread{'s' * (values['threads'] > 1)}"
    for run in values["runs"]:
        ms = {row["cache"]: row["cpu"]["ms"] for row in run["rows"]}
        figures = {"16": ms["DynamicCache"], "8": ms["int8"], "4": ms["int4"]}
        yield line("SmolLM2-135M", by, f"ms a token: one sequence of {run['context']:,}, float32", figures, False)


BLOCKS = {
    "front": front,
    "engines": engines,
    "presets": presets,
    "choose": choose,
    "times": times,
    "models": models,
    "errors": errors,
    "by_model": by_model,
}


def update(text: str) -> str:
    """A page with its blocks filled. KeyError for a block of an unknown name."""
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}\n{match[3]}", text)


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(update(path.read_text()))
