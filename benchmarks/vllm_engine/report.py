"""The tables of docs/vllm.md from what run.py left: python benchmarks/vllm_engine/report.py DIR/results.jsonl"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from answers import compare

BASE = "auto"  # vLLM's 16 bits, by FlashAttention-3
TITLES = {
    "prefill": "prompts, {sequences} x {context:,}",
    "decode": "decode, {sequences} x {context:,}",
    "fit": "decode, all x {context:,} that fit",
    "serving": "{requests} requests, {rate:g} a second: tokens/s; 99th percentile between tokens",
    "reasoning": "{requests} requests of {prompt:,} and about {answer:,} new tokens",
    "verify": "drafts of 4, {sequences} x {context:,}",
}
JOBS = {"two_gpus": "two GPUs, Llama-3-70B with 20 layers: "}
JOBS |= {f"latents{n}": f"DeepSeek-V3 with 16 layers, {n} heads: " for n in (16, 128)}
LEFT_OUT = ("smoke", "cache", "invariant")  # models of two layers


def cell(scenario: str, found: dict, base: dict) -> str:
    """Tokens a second, and that over 16 bits'."""
    if "error" in found:
        return found["error"][:40]
    if "tokens_per_s" not in found:
        return ""
    text = f"{found['tokens_per_s']:,.0f}"
    if scenario == "fit":
        text = f"{found['sequences']} sequences: {text}"
    if "between_tokens_ms" in found:
        text += f"; {found['between_tokens_ms']['99']:.0f} ms"
    return text + (f" ({found['tokens_per_s'] / base['tokens_per_s']:.2f}x)" if base is not found and "tokens_per_s" in base else "")


def main() -> None:
    results = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    types = list(dict.fromkeys(engine["type"] for engine in results if engine["job"] in ("main", "reasoning", *JOBS)))
    types.sort(key=lambda t: (t.startswith("quantkv"), t != BASE))
    table: dict[str, dict[str, str]] = {}
    for engine in results:
        if engine["job"] == "main" and engine.get("kv_tokens"):
            table.setdefault("tokens that fit", {})[engine["type"]] = f"{engine['kv_tokens']:,}"
    for engine in results:
        for found in engine.get("found", []):
            scenario = found["scenario"]
            if scenario not in TITLES or engine["job"] in LEFT_OUT:
                continue
            title = JOBS.get(engine["job"], "") + TITLES[scenario].format(**found)
            rivals = [e for e in results if e["job"] == engine["job"] and e["type"] == BASE]
            alike = [
                x for e in rivals for x in e.get("found", []) if x["scenario"] == scenario and x.get("context") == found.get("context")
            ]
            table.setdefault(title, {})[engine["type"]] = cell(scenario, found, alike[0] if alike else {})
    print(f"| tokens a second (speedup over 16 bits) | {' | '.join('16 bits' if t == BASE else t for t in types)} |")
    print(f"|---|{'---|' * len(types)}")
    for title, cells in table.items():
        print(f"| {title} | {' | '.join(cells.get(t, '') for t in types)} |")
    print("\n| answers of 24 tokens, equal up to | the same batch again | three prompts in the graph of four |\n|---|---|---|")
    ranks = {}
    for engine in results:
        for found in engine.get("found", []):
            if found["scenario"] == "padding" and "error" not in found:
                ranks[engine["job"], engine["type"]] = found.get("answers")
                print(f"| {engine['job']}, {engine['type']} | {_difference(found['again'])} | {_difference(found['three_of_four'])} |")
    for kv_type in dict.fromkeys(engine["type"] for engine in results):
        pair = [ranks.get((job, kv_type)) for job in ("one_rank", "two_ranks")]
        if all(pair):
            print(f"\n{kv_type}, one GPU against two: {_difference(compare(*pair))}")


def _difference(found: dict) -> str:
    tokens = ", ".join(map(str, found["equal_tokens"]))
    return f"{tokens} tokens; log-probabilities within {found['largest_log_difference']:.3f}"


if __name__ == "__main__":
    main()
