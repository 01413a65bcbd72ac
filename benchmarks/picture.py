"""The picture of the front page: `python benchmarks/picture.py docs/picture.svg`.

Left: tokens a second of decode in vLLM, of results/h200-vllm.jsonl; levels4 is of another run, results/h200-vllm-levels.jsonl, and stands
beside int4 of that one. Right: what is lost, of results/quality.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
DECODE = {"scenario": "decode", "sequences": 64, "context": 8192}
CACHES = {  # type in vLLM: name
    "auto": "16 bits (FlashAttention-3)",
    "fp8": "vLLM's 8 bits (fp8)",
    "quantkv_int8": "int8",
    "quantkv_levels4": "levels4",
    "quantkv_int4": "int4",
    "quantkv_int2": "int2",
}
RECIPES = {  # recipe: name
    "int4": "int4, as vLLM stores it",
    "levels4 +16,24": "levels4, calibrated",
    "tuned 64 +16,24": "formats by layer, calibrated",
    "trellis2 +16,24": "trellis2, calibrated",
}
OTHERS, OURS, TEXT = "#9aa5b1", "#0b6e99", "#1f2933"


def speeds(name: str) -> dict[str, tuple[float, int]]:
    """Tokens a second, and tokens that fit, by type: of a file of vllm_engine/run.py."""
    engines = [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]
    return {
        engine["type"]: (run["tokens_per_s"], engine["kv_tokens"])
        for engine in engines
        for run in engine["found"]
        if engine["job"] == "main" and DECODE.items() <= run.items()
    }


def losses() -> dict[str, tuple[float, float]]:
    """KL and bytes of a token and kv head, by recipe: SmolLM2 on news."""
    runs = json.loads((RESULTS / "quality.json").read_text())["runs"]
    (run,) = [run for run in runs if (run["part"], run["model"], run["text"]) == ("kl", "smollm2", "news")]
    return {row["format"]: (row["kl"], row["bytes_per_head"]) for row in run["formats"]}


def bars(axes: Any, names: list[str], values: list[float], notes: list[str], colors: list[str]) -> None:
    axes.barh(names, values, color=colors, height=0.66)
    for y, (value, note) in enumerate(zip(values, notes)):
        axes.annotate(note, (value, y), (5, 0), textcoords="offset points", va="center", fontsize=8.5, color=TEXT)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=9)
    axes.set_xticks([])


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    fast, other_run, lost = speeds("h200-vllm.jsonl"), speeds("h200-vllm-levels.jsonl"), losses()
    base, base_tokens = fast["auto"]

    def note(name: str) -> str:
        if name not in fast:
            return f"{other_run[name][0]:,.0f} (in a run with int4 {other_run['quantkv_int4'][0]:,.0f})"
        speed, tokens = fast[name]
        return f"{speed:,.0f}" + ("" if name == "auto" else f"   {speed / base:.1f}x; {tokens / base_tokens:.1f}x the tokens fit")

    figure = Figure(figsize=(11, 3.1), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    values = [(fast.get(name) or other_run[name])[0] for name in CACHES]
    colors = [OURS if name.startswith("quantkv") else OTHERS for name in CACHES]
    bars(left, list(CACHES.values()), values, [note(name) for name in CACHES], colors)
    left.set_xlim(0, 1.75 * max(values))
    left.set_title("Tokens a second in vLLM", loc="left", fontsize=11, fontweight="bold")
    left.set_xlabel("64 sequences of 8,192 tokens, Llama-3-8B's shape, one H200", fontsize=8.5, color=TEXT, loc="left")
    values = [lost[recipe][0] for recipe in RECIPES]
    notes = [f"{kl:.4f}   {size:.0f} bytes" for kl, size in (lost[recipe] for recipe in RECIPES)]
    bars(right, list(RECIPES.values()), values, notes, [OTHERS] + [OURS] * (len(RECIPES) - 1))
    right.set_xlim(0, 1.45 * max(values))
    right.set_title("What is lost, nats a token (KL)", loc="left", fontsize=11, fontweight="bold")
    right.set_xlabel("SmolLM2-135M on news; at 16 bits 256 bytes", fontsize=8.5, color=TEXT, loc="left")
    figure.savefig(sys.argv[1], metadata={"Date": None} if sys.argv[1].endswith(".svg") else None)


if __name__ == "__main__":
    main()
