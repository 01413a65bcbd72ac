"""The table of docs/vllm.md from what run.py left: python benchmarks/vllm_engine/report.py DIR/results.jsonl"""

import json
import sys
from pathlib import Path

from answers import compare

BASE = "auto"  # vLLM's 16 bits


def rows(results: list[dict]) -> dict[tuple, dict[str, dict]]:
    """(job, scenario, sequences, context) -> type -> what was found."""
    table: dict[tuple, dict[str, dict]] = {}
    for engine in results:
        for found in engine.get("found", []):
            place = (found.get("sequences"), found.get("context")) if found["scenario"] != "fit" else ("all that fit", found.get("context"))
            table.setdefault((engine["job"], found["scenario"], *place), {})[engine["type"]] = found
    return table


def main() -> None:
    results = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    types = list(dict.fromkeys(engine["type"] for engine in results))
    room = {engine["type"]: engine["kv_tokens"] for engine in results if engine["job"] == "main" and engine.get("kv_tokens")}
    print(f"| tokens a second (x 16 bits) | {' | '.join(types)} |")
    print(f"|---|{'---|' * len(types)}")
    print(f"| tokens that fit | {' | '.join(f'{room[t]:,}' if t in room else '' for t in types)} |")
    for (job, scenario, sequences, context), found in rows(results).items():
        if scenario == "padding":
            continue
        base = found.get(BASE, {}).get("tokens_per_s")
        cells = []
        for kv_type in types:
            one = found.get(kv_type, {})
            speed = one.get("tokens_per_s")
            cell = one.get("error", "")[:40] if speed is None else f"{speed:,.0f}" + (f" ({speed / base:.2f}x)" if base else "")
            if "between_tokens_ms" in one:
                cell += f"; p99 {one['between_tokens_ms']['99'] if '99' in one['between_tokens_ms'] else one['between_tokens_ms'][99]} ms"
            if scenario == "fit" and speed:
                cell = f"{one['sequences']}: {cell}"
            cells.append(cell)
        where = f"{sequences} x {context}" if context else ""
        print(f"| {job}: {scenario} {where} | {' | '.join(cells)} |")
    for engine in results:
        for found in engine.get("found", []):
            if found["scenario"] == "padding" and "error" not in found:
                print(f"\n{engine['job']}, {engine['type']}: again {found['again']}; three of four {found['three_of_four']}")
    ranks = {(engine["job"], engine["type"]): found for engine in results for found in engine.get("found", []) if "answers" in found}
    for kv_type in types:
        if ("one_rank", kv_type) in ranks and ("two_ranks", kv_type) in ranks:
            print(f"\n{kv_type}, one GPU and two: {compare(*(ranks[job, kv_type]['answers'] for job in ('one_rank', 'two_ranks')))}")


if __name__ == "__main__":
    main()
