"""Write an evaluation into a document: `python benchmarks/eval_table.py benchmarks/results/eval.json README.md`.

The JSON is that of `quantkv eval --json`: its first run counts. The lines between `<!-- eval -->` and `<!-- /eval -->` are replaced.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

HEADERS = ("format", "bits a value", "compression", "perplexity", "change", "KL", "same top-1")


def table(values: dict) -> str:
    lines = [
        "| " + " | ".join(HEADERS) + " |",
        "|---" + "|--:" * (len(HEADERS) - 1) + "|",
        f"| exact | | | {values['reference']['perplexity']:.2f} | | | |",
    ]
    for f in values["formats"]:
        kl = "0" if f["kl"] < 1e-8 else f"{f['kl']:.4f}" if f["kl"] >= 5e-5 else f"{f['kl']:.0e}"
        lines.append(
            f"| `{f['format']}` | {f['bits_per_element']:.2f} | {f['compression']:.2f} | {f['perplexity']:.2f} | "
            f"{f['perplexity_change']:+.2f} % | {kl} | {f['same_top1']:.1f} % |"
        )
    note = (
        f"{values['model']}, {values['text']}: {values['tokens']:,} tokens in contexts of {values['context']:,}; "
        "change, KL (nats a token) and top-1 against the exact cache."
    )
    return "\n".join([*lines, "", note])


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    values, path = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    values = values["runs"][0] if "runs" in values else values  # schema 1 had one run
    block = lambda match: f"{match[1]}{table(values)}\n{match[2]}"
    path.write_text(re.sub(r"(<!-- eval -->\n).*?(<!-- /eval -->)", block, path.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
