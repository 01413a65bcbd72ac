"""The tables of docs/vllm.md, from lines that run.py and pages_travel.py left.

python benchmarks/vllm_engine/report.py DIR/results.jsonl [DIR/travel.jsonl ...]
"""

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
    "drafts": "{sequences} x {context:,}",
    "verify": "drafts of 4, accepted as they come, {sequences} x {context:,}",  # of lines before 2026-11-26
}
JOBS = dict.fromkeys(("two_gpus", "two_gpus_reasoning"), "two GPUs, Llama-3-70B with 20 layers: ")
JOBS |= {"two_gpus_latents": "two GPUs, DeepSeek-V3 with 16 layers, 16 heads on each: "}
JOBS |= {f"latents{n}": f"DeepSeek-V3 with 16 layers, {n} heads: " for n in (16, 128)}
JOBS |= {"ngram": "4 drafts found in the text, 2.5 tokens a step accepted: ", "eagle3": "3 drafts of EAGLE-3, 2.5 tokens a step accepted: "}
JOBS |= {"mtp": "3 drafts of MTP, 2.5 tokens a step accepted: "}
LEFT_OUT = ("smoke", "sleep", "sleep_latents", "cache", "invariant")  # models of two layers


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
    results = [json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    for section in (speeds, batches, ranks, travel):
        if lines := section(results):
            print("\n".join(lines))


def speeds(results: list[dict]) -> list[str]:
    """The table of tokens a second, by scenario and type."""
    types = list(dict.fromkeys(engine["type"] for engine in results if engine["job"] in ("main", "reasoning", "long_prompts", *JOBS)))
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
    head = f"| tokens a second (speedup over 16 bits) | {' | '.join('16 bits' if t == BASE else t for t in types)} |"
    rows = [f"| {title} | {' | '.join(cells.get(t, '') for t in types)} |" for title, cells in table.items()]
    return [head, f"|---|{'---|' * len(types)}", *rows] if rows else []


def batches(results: list[dict]) -> list[str]:
    """The table of answers in batches of other sizes."""
    rows = [
        f"| {engine['job']}, {engine['type']} | {_difference(found['again'])} | {_difference(found['three_of_four'])} |"
        for engine, found in _found(results, "padding")
    ]
    head = "\n| answers of 24 tokens, equal up to | the same batch again | three prompts in the graph of four |"
    return [head, "|---|---|---|", *rows] if rows else []


def ranks(results: list[dict]) -> list[str]:
    """Answers, and statistics of kv heads, of one rank against two."""
    lines = []
    answers = {(engine["job"], engine["type"]): found.get("answers") for engine, found in _found(results, "padding")}
    for kv_type in dict.fromkeys(engine["type"] for engine in results):
        pair = [answers.get((job, kv_type)) for job in ("one_rank", "two_ranks")]
        if all(pair):
            lines.append(f"\n{kv_type}, one GPU against two: {_difference(compare(*pair))}")
    for engine, found in _found(results, "measured"):
        if "difference" in found:
            name, most = max(found["difference"].items(), key=lambda item: item[1])
            lines.append(
                f"\n{engine['type']}, statistics of kv heads, one GPU against two: relative difference at most {most:.1e} ({name})"
            )
    return lines


def travel(results: list[dict]) -> list[str]:
    """The table of prompts whose pages came by NIXL, and answers of two ranks from one rank's pages; of lines of pages_travel.py."""
    ended = [line for line in results if "error" not in line]
    times = [line for line in ended if line["job"] == "times"]
    lines = []
    if times:
        lines.append(
            "\n| prompts whose pages came by NIXL (over 16 bits; lower is better) | MB a prompt | ms to the first token | ms if computed |"
        )
        lines.append("|---|---|---|---|")
    for line in times:
        alike = [x for x in times if x["type"] == BASE and all(x.get(name) == line.get(name) for name in ("layout", "block", "context"))]
        base = alike[0] if alike else line
        sent, waited = (
            f"{factor * number(line):,.1f}" + (f" ({number(line) / number(base):.2f}x)" if base is not line else "")
            for factor, number in ((1e-6, _bytes), (1e3, _first_token))
        )
        layout = f", {line['layout']}" if line.get("layout") else ""
        name = f"{line['type']}, {line['context']:,} tokens, blocks of {line['block']}{layout}"
        lines.append(f"| {name} | {sent} | {waited} | {1e3 * line['prompt_computed_s']:,.1f} |")
    for line in ended:
        if line["job"] == "ranks":
            for name, pages in (("travelled_against_stayed", "one GPU's pages"), ("computed_by_two_against_stayed", "pages of their own")):
                lines.append(f"\n{line['type']}, blocks of {line['block']}, two GPUs from {pages} against one: {_difference(line[name])}")
    return lines


def _found(results: list[dict], scenario: str) -> list[tuple[dict, dict]]:
    """What engines found in a scenario, each with its engine, without failures."""
    return [(e, found) for e in results for found in e.get("found", []) if found["scenario"] == scenario and "error" not in found]


def _bytes(line: dict) -> float:
    return line["a_request"]["nixl_bytes_transferred"]


def _first_token(line: dict) -> float:
    return line["first_token_s_median"]


def _difference(found: dict) -> str:
    tokens = ", ".join(map(str, found["equal_tokens"]))
    return f"{tokens} tokens; log-probabilities within {found['largest_log_difference']:.3f}"


if __name__ == "__main__":
    main()
