"""Prints the table of docs/sglang.md from what run.py wrote: `python report.py ../results/h200-sglang.jsonl`.

A speed is divided by that of the first type of the same run, whose lines stand together in the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NAMES = {
    "triton": "16 bits, SGLang's `triton`",
    "fa3": "16 bits, SGLang's `fa3`",
    "fp8": "FP8, SGLang's `triton`",
    "quantkv_none": "16 bits, `quantkv_none`",
    "quantkv_int4": "`quantkv_int4`",
    "quantkv_4bit": "`quantkv_4bit`",
}


def shapes_of(line: dict) -> dict[tuple[int, int], float]:
    """Tokens a second of an engine that decoded, by sequences and context."""
    return {(found["sequences"], found["context"]): found["tokens_per_s"] for found in line.get("found", []) if "tokens_per_s" in found}


def table(lines: list[dict]) -> str:
    """The table, of engines of one run that decoded."""
    runs = [line for line in lines if line["job"] == "decode" and shapes_of(line)]
    first = runs[0]
    shapes = list(shapes_of(first))
    head = ["KV cache", *(f"{count} x {context:,}, tokens/s" for count, context in shapes), "tokens that fit"]
    rows = []
    for line in runs:
        speeds = [f"{shapes_of(line)[shape]:,.0f} ({shapes_of(line)[shape] / shapes_of(first)[shape]:.2f}x)" for shape in shapes]
        rows.append([NAMES[line["type"]], *speeds, f"{line['kv_tokens']:,} ({line['kv_tokens'] / first['kv_tokens']:.2f}x)"])
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


if __name__ == "__main__":
    print(table([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))
