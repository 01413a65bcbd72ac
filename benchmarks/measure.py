"""Measure this GPU and keep the figures: `python benchmarks/measure.py [--peers DIR] [targets] [growth]`.

Writes benchmarks/results/GPU.json (the shapes of the targets, in order of their weight) and GPU-growth.json (decode against context
and against batch size). Everything else, plots, tables and documents, is made from these files by benchmarks/tables.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from quantkv.bench import tables
from quantkv.bench.contestants import Contestant, implementations, quantkv
from quantkv.bench.problem import Problem
from quantkv.bench.rivals import load_flash3, rivals
from quantkv.bench.run import Result, run
from quantkv.bench.shapes import Shape, shapes
from quantkv.bench.vllm import engine

RESULTS = Path(__file__).parent / "results"
FORMATS = ("bf16", "int8", "fp8_token", "int4", "int2", "k8v4", "tq_k8v4", "tq4", "tq3")
OWN_MAPS = "int4+maps"
FEW = ("int8", "int4", "int2", "tq4")
FLASH3 = "FlashAttention-3"
# What is chosen on a Hopper GPU; writes of formats that its kernel does not take are Triton's.
CHOSEN = {"decode": ("hopper",), "verify": ("hopper",), "step": ("hopper",), "write": ("hopper", "triton"), "prefill": ("prefill",)}


@dataclass(frozen=True)
class Stage:
    """Shapes, and who takes part at them: quantkv in these formats by every implementation, and every rival; or, of these, the
    implementation that is chosen there, and FlashAttention-3 over 16 bits."""

    shapes: tuple[Shape, ...]
    formats: Sequence[str] = FORMATS
    everyone: bool = False

    def takes(self, shape: Shape, contestant: Contestant) -> bool:
        if contestant.ours and contestant.stores not in self.formats:
            return False
        if self.everyone:
            return True
        if contestant.ours:
            return contestant.name.removeprefix("quantkv ") in CHOSEN[shape.kind]
        return (contestant.name, contestant.stores) == (FLASH3, "bf16")


STAGES = {
    "targets": (
        Stage(shapes("B8xL32768", "B64xL8192"), (*FORMATS, OWN_MAPS), everyone=True),
        Stage(shapes("L2048xN1")),
        Stage(shapes("L16384xQ4096", "N64", "N8192"), everyone=True),
        Stage(shapes("B64xL8192xQ4", "B64xL8192xQ8"), FEW),
        Stage(shapes("L131072", "B128xL1024"), everyone=True),
        Stage(
            shapes(
                "B16xL2048",
                "B64xL32768xW4096",
                "B8xL32768xP64",
                "B64xL8192xP64",
                "B64xL8192xHQ64",
                "B8xL32768xHQ64",
                "B64xL8192xD64",
                "B64xL8192xHQ16xD256",
                "B64xL8192xHQ4xHK1",
                "B64xL8192xHQ8xHK2",
            ),
            FEW,
        ),
        Stage(shapes("L2048", "N1", "L16391xQ4100"), FEW),
    ),
    "growth": (Stage(shapes(*(f"L{1024 * 4**i}" for i in range(6)), *(f"B{4**i}xL4096" for i in range(5))), ("int8", "int4", "int2")),),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=list(STAGES), help=", ".join(STAGES))
    parser.add_argument("--peers", type=Path, help="a folder with rivals, as `quantkv bench` takes it")
    parser.add_argument("--formats", nargs="+", help="these only")
    parser.add_argument("--shapes", nargs="+", help="these instead of the targets', with everyone")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no shape after so long")
    parser.add_argument("--keep", action="store_true", help="keep what the file has of shapes that are not measured now")
    parser.add_argument("--into", type=Path, default=RESULTS, help="a folder for the files")
    arguments = parser.parse_args()
    if not set(arguments.what) <= set(STAGES):
        parser.error(f"{' '.join(arguments.what)}: allowed are {', '.join(STAGES)}")
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU: nothing to measure")
    for what in arguments.what:
        measure(what, arguments)


def ours(format_name: str) -> list[Contestant]:
    return [quantkv(i, format_name) for i in implementations(torch.device("cuda")) if i != "reference"]


def compile_ahead(stages: Sequence[Stage], arguments: argparse.Namespace) -> None:
    """Call everything that is compiled at run time once, by as many processes as there are cores: compiled kernels are kept on disk,
    where this process finds them. Serially they take several times as long as all measurements."""
    begun = time.monotonic()
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for stage in stages:
            for shape in stage.shapes:
                for format_name in arguments.formats or stage.formats:
                    pool.submit(call_once, stage, shape, format_name, arguments.peers)
    print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)


def call_once(stage: Stage, shape: Shape, format_name: str, peers: Path | None) -> None:
    """Every contestant of one format at one shape."""
    if peers and shape.kind == "prefill":
        load_flash3(peers)
    problem = Problem(shape, torch.device("cuda"))
    for contestant in ours(format_name) + (engine(peers) if peers else []):
        if contestant.stores == format_name and shape.kind in contestant.kinds and stage.takes(shape, contestant):
            with suppress(Exception):  # what it is shows when it is measured
                contestant.prepare(problem).call()
    torch.cuda.synchronize()


def measure(what: str, arguments: argparse.Namespace) -> None:
    """Run, and write the file and the plot."""
    device, stages = torch.device("cuda"), STAGES[what]
    if arguments.shapes and what == "targets":
        stages = (Stage(shapes(*arguments.shapes), everyone=True),)
    compile_ahead(stages, arguments)
    begun = time.monotonic()
    stage_of = {shape: stage for stage in stages for shape in stage.shapes}
    formats = arguments.formats or list(dict.fromkeys(f for stage in stages for f in stage.formats))
    result = run(
        (shape for shape in stage_of if time.monotonic() - begun < arguments.seconds),
        [c for f in formats for c in ours(f)] + rivals(arguments.peers),
        device,
        on_row=lambda row: print(f"{time.monotonic() - begun:5.1f} {row.shape}", *tables.cells(row), flush=True),
        takes_part=lambda shape, contestant: stage_of[shape].takes(shape, contestant),
    )
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower().replace("nvidia", "")).strip("-")
    path = arguments.into / (f"{name}.json" if what == "targets" else f"{name}-{what}.json")
    if arguments.keep and path.exists():
        result.keep(Result.from_dict(json.loads(path.read_text())))
    path.write_text(json.dumps(result.to_dict(), indent=1) + "\n")


if __name__ == "__main__":
    main()
