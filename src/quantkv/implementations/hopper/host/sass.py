"""What a cubin's instructions are, and those of the decode kernel's inner loop, along the path that full tiles take."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+ )?\s*([A-Z0-9_.]+)(.*)")
SECTION = re.compile(r"\s*\.section\s+\.text\.(\w+)")
LABEL = re.compile(r"^(\.L_x_\d+):")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")
WANTED = 10_000  # a path is credited this for each copy or product on it, so the best path is the shortest that does all work


def disassembler() -> str:
    """nvdisasm of Triton's package, or the one on the PATH."""
    try:
        import triton

        path = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        return str(path) if path.exists() else "nvdisasm"
    except ImportError:
        return "nvdisasm"


def disassemble(cubin: Path) -> list[str]:
    """Lines of the cubin's listing, without an analysis of jumps through registers, which the kernels do not have."""
    return subprocess.run([disassembler(), "-c", "-ndf", str(cubin)], capture_output=True, text=True, check=True).stdout.splitlines()


def is_product(name: str) -> bool:
    """Whether an instruction is a product of the tensor cores: a warp's, or a warpgroup's."""
    return name.startswith(("HMMA", "HGMMA", "IGMMA"))


def kernels(cubin: Path) -> dict[str, list[tuple[str, ...]]]:
    """Listing of each kernel: the predicate, name and operands of every instruction."""
    found, name = {}, ""
    for line in disassemble(cubin):
        if section := SECTION.match(line):
            name = section.group(1)
        elif match := INSTRUCTION.match(line):
            found.setdefault(name, []).append(match.groups(default=""))
    return found


def opcodes(cubin: Path) -> list[str]:
    """Names of all instructions, each without its modifiers; what only fills up memory left out."""
    found = [match.group(2).split(".")[0] for line in disassemble(cubin) if (match := INSTRUCTION.match(line))]
    return [name for name in found if name != "NOP"]


def step(cubin: Path) -> list[str]:
    """Names of the instructions that a warp issues for one step of the loop over tiles; ValueError where no such loop is found."""
    code, labels = [], {}
    for line in disassemble(cubin):
        if label := LABEL.match(line.strip()):
            labels[label.group(1)] = len(code)
        elif found := INSTRUCTION.match(line):
            code.append((found.group(1), found.group(2), found.group(3)))

    def target(i):
        found = TARGET.search(code[i][2]) if code[i][1].startswith("BRA") and "DIV" not in code[i][1] else None
        return labels.get(found.group(1)) if found else None

    def cost(i):
        _, name, operands = code[i]
        if name.startswith("LDGSTS"):  # predicated or zero-filling copies belong to a tile that is not full
            cold = "ZFILL" in name or re.search(r"!?P\d", operands)
            return 1 + (30 * WANTED if cold else -WANTED)
        return 1 - (WANTED if is_product(name) else 0)

    def is_loop_over_tiles(start, end):
        names = {name for _, name, _ in code[start : end + 1]}
        return {"DEPBAR.LE", "MUFU.EX2"} <= names and any(map(is_product, names))

    loops = [(target(end), end) for end in range(len(code)) if target(end) is not None and target(end) <= end]
    loops = [loop for loop in loops if is_loop_over_tiles(*loop)]
    inner = [(a, b) for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)]
    if not inner:
        raise ValueError(f"{cubin}: no loop over tiles found")

    def path(start, end):
        least = {end: (cost(end), None)}
        for i in range(end - 1, start - 1, -1):
            follow = [] if target(i) is None or target(i) <= i else [target(i)]
            if code[i][0] or target(i) is None:
                follow.append(i + 1)
            ways = [(least[j][0], j) for j in follow if j in least]
            if ways:
                total, j = min(ways)
                least[i] = (total + cost(i), j)
        names, i = [], start
        while i is not None:
            names.append(code[i][1])
            i = least[i][1]
        return names

    # Of the loops over tiles, the one that takes most at a time; without a mask, where both take as many.
    paths = [path(start, end) for start, end in inner]
    return min(paths, key=lambda names: (-sum(map(is_product, names)), len(names)))
