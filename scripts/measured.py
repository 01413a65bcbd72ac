"""Write src/quantkv/measured.json, how many times as fast as 16 bits decode attention was on each GPU, from benchmarks/results:
`python scripts/measured.py`.

Of each format the fastest implementation that was found right, beside FlashAttention-3 over bf16 pages in the same run; of a format that
two files have, the first file's. tests/test_capacity.py compares it with the results.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from quantkv.bench.shapes import Shape  # noqa: E402

FILE = ROOT / "src" / "quantkv" / "measured.json"
RESULTS = ("h200.json", "h200-levels.json")
SHAPES = ("B8xL32768", "B64xL8192", "B64xL8192xD64", "B64xL8192xHQ16xD256")  # of one page size and no window; 4 query heads on a kv head
RIVAL = ("FlashAttention-3", "bf16")


def table() -> dict:
    gpus: dict = {}
    for name in RESULTS:
        held = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        gpu = gpus.setdefault(held["device"], {"beside": " ".join(RIVAL), "files": [], "shapes": {}})
        gpu["files"].append(f"benchmarks/results/{name}")
        for shape in SHAPES:
            rows = [row for row in held["rows"] if row["kind"] == "decode" and row["shape"] == shape and row["status"] == "ok"]
            rival = [row["us"] for row in rows if (row["name"], row["stores"]) == RIVAL]
            times: dict[str, float] = {}
            for row in rows:
                if row["ours"] and "+" not in row["stores"]:
                    times[row["stores"]] = min(row["us"], times.get(row["stores"], row["us"]))
            if rival and times:
                found = gpu["shapes"].setdefault(shape, {"head_size": Shape.parse(shape).D, "speed": {}})
                found["speed"] = {stores: round(rival[0] / us, 3) for stores, us in times.items()} | found["speed"]
    return gpus


def text() -> str:
    return json.dumps(table(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
