"""Write the tables of docs/vllm-features.md: stock vLLM's features, and tiny models of each family, over quantkv's pages on a CPU.

    scripts/vllm_cpu.sh                               # sets the environment up
    .vllm/bin/python scripts/vllm_tables.py           # all rows: an hour on two cores
    .vllm/bin/python scripts/vllm_tables.py NAME ..   # the rows of these features (tests/vllm_cpu/features.py), or families

A row is written as soon as it was asked. One that is wrong is not written, and ends the script with exit code 1.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / path) for path in ("src", "scripts/vllm_cpu", "tests", "tests/vllm_cpu")]
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:4], os.environ.get("PYTHONPATH", "")])  # of servers

PAGE = ROOT / "docs" / "vllm-features.md"


def put(table: str, head: Sequence[str], row: str, names: Sequence[str]) -> None:
    """Write a row of a table of the page, in the place of the one that begins alike. names: how rows begin, in their order."""
    before, rest = PAGE.read_text().split(f"<!-- {table}, from scripts/vllm_tables.py -->")
    held, after = rest.split(f"<!-- end of {table} -->")
    rows = {line[2:].split(" | ")[0]: line for line in [*held.splitlines(), row] if line.startswith("| ")}
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(rows[name] for name in names if name in rows)]
    made = "\n".join(lines)
    PAGE.write_text(f"{before}<!-- {table}, from scripts/vllm_tables.py -->\n\n{made}\n\n<!-- end of {table} -->{after}")


def main(asked: Sequence[str]) -> int:
    import vllm.entrypoints.llm
    import vllm.v1.worker.cpu_worker  # noqa: F401  once, before the forks
    from family_rows import NAMES, observe
    from features import FEATURES, WRONG, ask

    if unknown := set(asked) - {feature.key for feature in FEATURES} - set(NAMES):
        print(f"neither features nor families: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    features = [feature for feature in FEATURES if not asked or feature.key in asked]
    seen = [("features", ("feature", "asked by", "on a CPU"), (f.name, f.asked), lambda f=f: ask(f)) for f in features]
    seen += [("families", ("model", "on a CPU"), (name,), lambda name=name: observe(name)) for name in NAMES if not asked or name in asked]
    wrong = 0
    for table, head, begin, look in seen:
        cells = (*begin, look())
        row = f"| {' | '.join(cells)} |"
        print(row, flush=True)
        if cells[-1].startswith(WRONG):
            wrong += 1
        else:
            put(table, head, row, [f.name for f in FEATURES] if table == "features" else NAMES)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
