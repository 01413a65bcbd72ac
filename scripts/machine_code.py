"""Machine code of the kernels that the benchmarks launch, as digests: equal before and after a change of names.

    python scripts/machine_code.py --json FILE [--only decode packed ..] [--jobs 2]     # compiles for sm_90a; needs no GPU
    python scripts/machine_code.py --compare FILE FILE                                 # exit code 1 where the code differs

A digest is of the instructions of one compiled file, bit for bit, and of the constants that they read; names of files, symbols and sections
are left out, and so is where constants lie. Hopper's kernels are compiled by NVRTC (`quantkv[hopper]`), those of Triton by Triton's own
tools.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from quantkv import PagedCache, get_format
from quantkv.bench.shapes import Shape
from quantkv.calls import AttendCall, AttentionOptions, Batch, WriteCall
from quantkv.implementations.hopper import attend, prefill, write
from quantkv.implementations.hopper.host.sass import disassembler
from quantkv.maps import LayerMaps, LinearMap, default_map

MULTIPROCESSORS = 132  # of an H100 and an H200
SECTION = re.compile(r"\s*\.section\s+\.text\.")
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;?\s+/\* (0x[0-9a-f]{16}) \*/")
LOAD_OF_ADDRESS = re.compile(r"c\[0x4\]\[(0x[0-9a-f]+)\]")
DECODE = [  # shape, format: those of `quantkv bench`, of geometries.py and of sweep.py
    *((shape, name) for shape in ("B64xL8192", "L2048") for name in ("int4", "int8", "levels4", "trellis2")),
    *(("B8xL32768", name) for name in ("int2", "bf16", "levels2", "levels3", "tq4", "tq3", "fp8", "int8/tq4")),
    ("B16xL2048xD64", "int4"), ("B8xL8192xD256", "int4"), ("B8xL8192xD80", "int4"), ("B8xL8192xHQ16xHK2xD512", "int4"),
]  # fmt: skip
PACKED = [  # more packed query rows of a kv head: verification, and kv heads of many query heads
    *(("B64xL8192xQ4", name) for name in ("int4", "levels4", "trellis2")),
    *(("B64xL8192xQ8", name) for name in ("int4", "int8", "levels4", "trellis2", "bf16")),
    ("B32xL16384xHK2", "int4"), ("B64xL8192xHQ16xHK1", "int4"), ("B32xL8192xQ5", "tq4"),
    ("B32xL8192xQ5xD256", "int4"), ("B32xL8192xQ5xD80", "int4"),
]  # fmt: skip


class Cubin:
    """An ELF file of 64 bits: its sections, and what symbols stand for."""

    def __init__(self, data: bytes):
        self.data = data
        (at,) = struct.unpack_from("<Q", data, 0x28)
        size, count, names = struct.unpack_from("<HHH", data, 0x3A)
        self.headers = [struct.unpack_from("<IIQQQQIIQQ", data, at + i * size) for i in range(count)]
        self.names = [self._text(self.headers[names][4] + header[0]) for header in self.headers]

    def _text(self, at: int) -> str:
        return self.data[at : self.data.index(b"\0", at)].decode()

    def section(self, name: str) -> bytes:
        """The bytes of a section; none where the file has no such section."""
        if name not in self.names:
            return b""
        _, _, _, _, at, length, *_ = self.headers[self.names.index(name)]
        return self.data[at : at + length]

    def constants(self) -> dict[int, str]:
        """What the addresses in constant bank 4 point to: a digest of the bytes, by the place of the address in the bank."""
        symbols, found = self.section(".symtab"), {}
        for at, info, _ in struct.iter_unpack("<QQq", self.section(".rela.nv.constant4")):
            _, _, _, index, value, size = struct.unpack_from("<IBBHQQ", symbols, 24 * (info >> 32))
            found[at] = hashlib.sha256(self.section(self.names[index])[value : value + size]).hexdigest()[:16]
        return found


def compiled_code(data: bytes) -> str:
    """Digest of what a cubin executes: its instructions, bit for bit, but for where constants lie: their bytes count in place of it."""
    cubin = Cubin(data)
    constants, kernels = cubin.constants(), []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(data), file.flush()
        listing = subprocess.run([disassembler(), "-c", "-hex", file.name], capture_output=True, text=True, check=True).stdout.splitlines()
    for line, following in zip(listing, [*listing[1:], ""]):
        if SECTION.match(line):
            kernels.append([])
        elif (found := INSTRUCTION.match(line)) and (name := LOAD_OF_ADDRESS.search(found[1])):
            kernels[-1].append(f"{found[1].replace(name[0], constants[int(name[1], 16)])} {following.split()[1]}")
        elif found:
            kernels[-1].append(f"{found[2]} {following.split()[1]}")
    digests = sorted(hashlib.sha256("\n".join(kernel).encode()).hexdigest() for kernel in kernels)
    rest = (cubin.section(name) for name in sorted(cubin.names) if name.startswith((".nv.constant2", ".nv.constant3")))
    return hashlib.sha256(" ".join(digests).encode() + b"".join(rest)).hexdigest()[:16]


def calibrated(name: str, heads: int, size: int, matrix: bool = True, hessian: bool = False) -> LayerMaps:
    """Maps of a calibrated layer: a rotation of each head, or the format's own, key means by position, and a Hessian with `hessian`."""
    fmt, sides = get_format(name), []
    generator = torch.Generator().manual_seed(1)
    for codec, is_key in ((fmt.k, True), (fmt.v, False)):
        plain = default_map(codec, size)
        forward, inverse = (plain.forward, plain.inverse) if plain is not None else 2 * (torch.eye(size)[None],)
        if matrix:
            forward = torch.linalg.qr(torch.randn(heads, size, size, generator=generator))[0]
            inverse = forward.mT.contiguous()
        means = torch.randn(8, heads, size, generator=generator) if is_key else None
        rows = torch.randn(heads, 2 * size, size, generator=generator)
        sides.append(LinearMap(forward, inverse, means, rows.mT @ rows / (2 * size) if hessian else None))
    return LayerMaps(*sides)


def attend_call(text: str, name: str, maps: Callable[..., LayerMaps] | None = None, bounded: bool = True, **options) -> AttendCall:
    """A call of a benchmark's shape on a CPU. bounded: the host knows the lengths, and that they are even."""
    shape, fmt = Shape.parse(text), get_format(name)
    cache = PagedCache(fmt.cache_spec(shape.HK, shape.D), 4, maps=maps and maps(name, shape.HK, shape.D))
    table = torch.zeros(shape.B, -(-shape.L // 16), dtype=torch.int32)
    q = torch.zeros(shape.B * shape.Q, shape.HQ, shape.D, dtype=torch.bfloat16)
    lengths = ((shape.Q, shape.L),) * shape.B if bounded else None
    batch = Batch(
        torch.arange(shape.B + 1, dtype=torch.int32) * shape.Q, torch.full((shape.B,), shape.L, dtype=torch.int32), shape.Q, None, lengths
    )
    return AttendCall(q, (cache.segment(table),), batch, shape.D**-0.5, AttentionOptions(**options))


def with_exact_rows(name: str, own_kernel: bool) -> AttendCall:
    """The call of segments.py: a few 16-bit rows beside rows of a format. own_kernel: too many of them for the combine kernel."""
    call = attend_call("B8xL32768", name)
    exact = PagedCache(get_format("bf16").cache_spec(8, 128), 4)
    given = dict(key_start=torch.zeros(8, dtype=torch.int32), key_range=torch.zeros(8, 2, dtype=torch.int32))
    beside = exact.segment(torch.zeros(8, 64 if own_kernel else 4, dtype=torch.int32), **given)
    first = PagedCache(get_format(name).cache_spec(8, 128), 4).segment(call.segments[0].block_table, key_range=given["key_range"])
    return AttendCall(call.q, (first, beside), call.batch, call.scale, call.options)


def write_call(text: str, name: str, maps: LayerMaps | None = None) -> WriteCall:
    """A write of a benchmark's shape on a CPU."""
    shape, fmt = Shape.parse(text), get_format(name)
    cache = PagedCache(fmt.cache_spec(shape.HK, shape.D), 4, maps=maps)
    rows, slots = torch.zeros(shape.N, shape.HK, shape.D, dtype=torch.bfloat16), torch.zeros(shape.N, dtype=torch.int64)
    return WriteCall(rows, rows, cache.k, cache.v, cache.format, slots, cache.maps, slots if cache.maps.by_position else None)


def configurations() -> dict[str, Callable[[], list]]:
    """For each label, what makes the configurations of Hopper's kernels."""
    found: dict[str, Callable[[], list]] = {}

    def read(label: str, make: Callable[[], AttendCall]) -> None:
        found[label] = lambda: list(attend.compiled_for(make()))

    for shape, name in DECODE:
        read(f"decode {shape} {name}", lambda s=shape, n=name: attend_call(s, n))
    read("decode B64xL8192 int4, lengths unknown", lambda: attend_call("B64xL8192", "int4", bounded=False))
    read("decode B64xL8192 int4, softcap and window", lambda: attend_call("B64xL8192", "int4", bounded=False, softcap=30.0, window=1000))
    read("decode B64xL8192 int4, chunks", lambda: attend_call("B64xL8192", "int4", bounded=False, window=1000, chunk_lookback=1))
    for name in ("levels4", "int4", "trellis2"):
        read(f"decode B64xL8192 {name}, calibrated", lambda n=name: attend_call("B64xL8192", n, calibrated))
    for name in ("int4", "levels4"):
        for own in (False, True):
            read(
                f"decode B8xL32768 {name}, exact rows {'with a kernel' * own or 'by combine'}", lambda n=name, o=own: with_exact_rows(n, o)
            )
    for shape, name in (("B64xL8192", "int4"), ("B2xL2048", "int4"), ("B64xL8192xQ4", "levels4"), ("B32xL16384xHK2", "int4")):
        read(f"invariant {shape} {name}", lambda s=shape, n=name: attend_call(s, n, batch_invariant=True))
    found["decode after write int4"] = lambda: [
        part.config for part in attend.Plan(attend_call("B64xL8192", "int4", bounded=False), MULTIPROCESSORS, 1, True).parts.values()
    ]
    for shape, name in PACKED:
        read(f"packed {shape} {name}", lambda s=shape, n=name: attend_call(s, n))
    read("packed B64xL8192xQ8 levels4, calibrated", lambda: attend_call("B64xL8192xQ8", "levels4", calibrated))
    for shape, name in (
        *(("N8192", n) for n in ("int4", "int8", "int2", "levels4", "levels2", "tq4", "trellis2", "fp8")),
        ("N64", "int4"),
        ("N8192xD80", "int4"),
    ):
        found[f"write {shape} {name}"] = lambda s=shape, n=name: write.configurations(write_call(s, n))
    for name in ("levels4", "levels2", "trellis2"):
        maps = lambda n=name: calibrated(n, 8, 128, matrix=False, hessian=True)
        found[f"round N8192 {name}"] = lambda n=name, m=maps: write.configurations(write_call("N8192", n, m()))
    for sizes, window in (((128, 128), False), ((128, 128), True), ((64, 64), False), ((256, 256), False), ((192, 128), False)):
        of = (*sizes, 4, True, window, window, False)
        found[f"prefill D{sizes[0]} DV{sizes[1]}{' window' * window}"] = lambda o=of: [prefill.PrefillConfig(*o)]
    return found


def _without_a_gpu() -> None:
    attend.launch.device_index = lambda device: 0
    attend.launch.multiprocessors = lambda index: MULTIPROCESSORS


def _of_label(label: str) -> list[str]:
    _without_a_gpu()
    return sorted(compiled_code(config.cubin()) for config in set(configurations()[label]()))


def _of_triton(name: str, queries: int) -> list[str]:
    os.environ["TRITON_INTERPRET"] = "0"
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from aot import compile_kernels

    return sorted(compiled_code(result.asm["cubin"]) for _, result in compile_kernels(name, "sm90", query_lens=(queries,)))


def differences(before: dict[str, list[str]], after: dict[str, list[str]]) -> list[str]:
    """Labels whose code differs, or that one of both lacks."""
    return [label for label in sorted({*before, *after}) if before.get(label) != after.get(label)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="what labels begin with: decode, invariant, packed, write, round, prefill, triton"
    )
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    if given.compare:
        before, after = (json.loads(path.read_text()) for path in given.compare)
        print(*(differs := differences(before, after)), sep="\n")
        print(f"{len({*before, *after})} configurations, {len(differs)} differ")
        return 1 if differs else 0
    chosen = lambda label: label.startswith(tuple(given.only))
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        made = {label: pool.submit(_of_label, label) for label in configurations() if chosen(label)}
        triton = {f"triton {name} Q{queries}": (name, queries) for name in ("int4", "levels4") for queries in (1, 64)}
        made |= {label: pool.submit(_of_triton, *of) for label, of in triton.items() if chosen(label)}
        digests = {}
        for label, future in made.items():
            digests[label] = future.result()
            print(label, *digests[label], flush=True)
    if given.json:
        given.json.write_text(json.dumps(digests, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
