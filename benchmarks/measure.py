"""Measure this GPU and keep the figures: `python benchmarks/measure.py [--peers DIR] [targets] [scaling]`.

Writes benchmarks/results/GPU.json (the shapes of the targets) and GPU-scaling.json, and a plot beside each. Everything else,
tables and documents, is made from these files by benchmarks/tables.py.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from pathlib import Path

import torch

from quantkv.bench import plot, tables
from quantkv.bench.contestants import implementations, quantkv
from quantkv.bench.rivals import rivals
from quantkv.bench.run import run
from quantkv.bench.shapes import DEFAULT, shapes

RESULTS = Path(__file__).parent / "results"
FORMATS = ("bf16", "int8", "fp8_token", "int4", "int2", "k8v4", "tq_k8v4", "tq4", "tq3")
# Beside the shapes that `quantkv bench` has by default: other pages, groups, head sizes, shards, windows, one token to write.
MORE = shapes("B8xL32768xP64", "B64xL8192xP64", "B64xL8192xHQ64", "B64xL8192xD64", "B64xL8192xHQ16xD256", "B64xL8192xHQ4xHK1",
              "B64xL8192xHQ8xHK2", "B64xL32768xW4096", "N1", "L16391xQ4100")
SCALING_FORMATS = ("bf16", "int8", "int4", "int2")
SCALING = shapes(*(f"L{1024 * 4**i}" for i in range(6)), *(f"B{4**i}xL4096" for i in range(5)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["targets", "scaling"], help="targets, scaling")
    parser.add_argument("--peers", type=Path, help="a folder with rivals, as `quantkv bench` takes it")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--shapes", nargs="+", help="these instead of the targets'")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no shape after so long")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU: nothing to measure")
    device = torch.device("cuda")
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower().replace("nvidia", "")).strip("-")
    begun = time.monotonic()
    targets = shapes(*arguments.shapes) if arguments.shapes else [s for kind in DEFAULT.values() for s in kind] + list(MORE)
    plans = {"targets": (name, targets, arguments.formats),
             "scaling": (f"{name}-scaling", SCALING, SCALING_FORMATS)}
    for what in arguments.what:
        file, some, formats = plans[what]
        ours = [quantkv(i, f) for i in implementations(device) if i != "reference" for f in formats]
        contestants = ours + rivals(arguments.peers)
        in_time = (s for s in some if time.monotonic() - begun < arguments.seconds)
        result = run(in_time, contestants, device, on_row=lambda row: print(row.shape, *tables.cells(row), flush=True))
        path = RESULTS / f"{file}.json"
        path.write_text(json.dumps(result.to_dict(), indent=1) + "\n")
        (plot.draw_growth if what == "scaling" else plot.draw)(path.with_suffix(".svg"), result)


if __name__ == "__main__":
    main()
