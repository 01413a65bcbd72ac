"""Loops of decode by Triton as they are compiled for GPUs that need not be there: instructions of a tile by class, and how many tiles.

    python benchmarks/predicted_loops.py --gpus H100 A100 .. --shapes B8xL32768 .. --formats int4 levels4 --json FILE    # needs no GPU

`predicted.py` makes times of them. A tile is the keys that one program takes at a time. Of NVIDIA's machine code the path that a tile takes
whose keys all queries see is counted; of AMD's the loop from its label to its branch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget

import quantkv
from quantkv import PagedCache, get_format
from quantkv.bench.shapes import Shape, shapes
from quantkv.calls import AttendCall, AttentionOptions, Batch
from quantkv.implementations.hopper.host import sass
from quantkv.implementations.triton import attend, launch

sys.path.insert(0, str(Path(quantkv.__file__).parents[2] / "tests"))
from predicted import GPUS, Gpu

from aot import Compiler

CLASSES = {  # what the opcode of an instruction begins with, longer ones first
    "tensor": ("HMMA", "IMMA", "v_mfma"),
    "mufu": ("MUFU", "v_exp", "v_log", "v_rcp"),
    "half": ("HFMA2", "HADD2", "HMUL2", "HMNMX2", "v_pk_"),
    "copy": ("LDGSTS", "global_load_lds", "buffer_load_dword_lds"),
    "load": ("LDG", "LD.", "global_load", "buffer_load"),
    "shared": ("LDSM", "LDS", "STS", "SHFL", "REDUX", "ds_"),
    "imad": ("IMAD",),
    "fma": ("FFMA", "FMUL", "FADD"),
    "scalar": ("s_", "U", "R2UR", "S2R", "BRA", "BAR", "DEPBAR", "LDGDEPBAR", "NOP", "WARPSYNC", "BSSY", "BSYNC"),
    "local": ("LDL", "STL", "scratch_"),
}
CLASS_OF = sorted(((start, name) for name, starts in CLASSES.items() for start in starts), key=lambda pair: -len(pair[0]))


def class_of(opcode: str) -> str:
    """The class of an instruction; "alu" for what no other has."""
    return next((name for start, name in CLASS_OF if opcode.startswith(start)), "alu")


def call_of(shape: Shape, name: str) -> AttendCall:
    """A call of a shape on a CPU."""
    fmt = get_format(name)
    cache = PagedCache(fmt.cache_spec(shape.HK, shape.D, shape.DV or None, shape.P), 4)
    table = torch.zeros(shape.B, -(-shape.L // shape.P), dtype=torch.int32)
    q = torch.zeros(shape.B * shape.Q, shape.HQ, shape.D, dtype=torch.bfloat16)
    batch = Batch(torch.arange(shape.B + 1, dtype=torch.int32) * shape.Q, torch.full((shape.B,), shape.L, dtype=torch.int32), shape.Q)
    return AttendCall(q, (cache.segment(table),), batch, shape.D**-0.5, AttentionOptions(window=shape.W))


def compiled_for(call: AttendCall, gpu: Gpu) -> tuple[object, attend.AttendPlan]:
    """What Triton makes of attend for a call on a GPU, and the plan of the call there."""
    ptx = 0 if gpu.arch.startswith("gfx") else int(gpu.arch)
    launch.Target.of = staticmethod(lambda device: launch.Target(ptx, "tf32x3" if ptx else "ieee", gpu.processors, gpu.shared))
    target = GPUTarget("cuda", ptx, 32) if ptx else GPUTarget("hip", gpu.arch, 64)
    compiled, stock = [], (attend.attend_kernel, attend.combine_kernel)
    attend.attend_kernel, attend.combine_kernel = (Compiler(function, target, compiled) for function in stock)
    try:
        attend.run(call)
    finally:
        attend.attend_kernel, attend.combine_kernel = stock
    return compiled[0][1], attend.AttendPlan.of(call)


def amd_loop(text: str) -> list[str]:
    """Opcodes of the shortest loop of AMD's assembly that multiplies and exponentiates."""
    labels: dict[str, int] = {}
    code: list[str] = []
    found: list[list[str]] = []
    for line in map(str.strip, text.splitlines()):
        if label := re.match(r"(\.LBB\d+_\d+):", line):
            labels[label[1]] = len(code)
        elif re.match(r"(s|v|ds|global|buffer|flat|scratch)_", line):
            code.append(line.split()[0])
            branch = re.match(r"s_c?branch\S*\s+(\.LBB\d+_\d+)", line)
            if branch and branch[1] in labels:
                body = code[labels[branch[1]] :]
                if any("mfma" in name for name in body) and any("v_exp" in name for name in body):
                    found.append(body)
    return min(found, key=len)


def loop_of(compiled: object) -> list[str]:
    """Opcodes that a warp issues for one tile."""
    if "amdgcn" in compiled.asm:
        return amd_loop(compiled.asm["amdgcn"])
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "attend.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        return sass.step(cubin)


def facts(shape: Shape, name: str, gpu: Gpu) -> dict:
    """What a prediction needs to know of a call: its loop, how many programs there are, and how many tiles each takes."""
    call = call_of(shape, name)
    compiled, plan = compiled_for(call, gpu)
    opcodes, tiling = loop_of(compiled), plan.tiling
    keys = min(shape.L, shape.W + shape.Q - 1) if shape.W else shape.L
    tiles = -(-keys // tiling.block_n)
    splits = plan.splits[0]
    fmt = get_format(name)
    return {
        "shape": str(shape),
        "format": name,
        "arch": gpu.arch,
        "processors": gpu.processors,
        "nbytes": int(shape.tokens_read * fmt.cache_spec(shape.HK, shape.D, shape.DV or None, shape.P).bytes_per_token),
        "keys": tiling.block_n,
        "warps": tiling.num_warps,
        "resident": tiling.resident,
        "programs": plan.blocks * shape.HK * min(splits, tiles),
        "tiles": -(-tiles // splits),
        "splits": splits,
        "shared": compiled.metadata.shared,
        "instructions": dict(sorted(Counter(map(class_of, opcodes)).items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--shapes", nargs="+", default=["B8xL32768", "B64xL8192"])
    parser.add_argument("--formats", nargs="+", default=["int4", "levels4"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = []
    for gpu in given.gpus:
        for shape in shapes(*given.shapes):
            for name in given.formats:
                row = {"gpu": gpu, **facts(shape, name, GPUS[gpu])}
                found.append(row)
                total = sum(row["instructions"].values())
                print(f"{gpu} {shape} {name}: {total} instructions for {row['keys']} keys and a warp of {row['warps']}", row, flush=True)
    if given.json:
        given.json.write_text(json.dumps({"triton": triton.__version__, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
