"""What full-precision tokens cost a decode step: microseconds of one layer's write and attention, in one run, each part left out in turn.

    PYTHONPATH=src python benchmarks/full_precision_step.py [--shapes 64x8192 8x32768] [--layers 4] [--json FILE]

A step of `--layers` layers, 32 query heads and 8 kv heads of 128, is captured in a CUDA graph; figures are of one layer. Pages hold the
same random rows over and over. `advance` is what a step does once, before its layers: on the device (captured), and as the host sees it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from calibrated_write import maps_of  # of this folder

from quantkv import PagedCache, get_format, prepare_attend, prepare_write
from quantkv.bench.timing import measure
from quantkv.copies import CacheWithCopies, CopiedPages, FullPrecisionStep, cache_of_copies
from quantkv.full_precision import FullPrecisionTokens
from quantkv.maps import LayerMaps

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 128, 16
TOKENS = FullPrecisionTokens(16, 24)
FORMATS = (  # what it is, format, a Hessian, a key mean
    ("int4", "int4", False, False),
    ("levels4", "levels4", False, False),
    ("levels4, Hessian", "levels4", True, False),
    ("levels4, Hessian and key mean", "levels4", True, True),
)


class Layers:
    """Caches of one format, and the tensors of a step of decode over them."""

    def __init__(self, fmt: str, maps: LayerMaps | None, sequences: int, keys: int, count: int) -> None:
        width = -(-keys // PAGE)
        spec = get_format(fmt).cache_spec(KV_HEADS, SIZE, block_size=PAGE)
        self.caches = [PagedCache(spec, sequences * width, "cuda", **({"maps": maps} if maps else {})) for _ in range(count)]
        self.table = torch.randperm(sequences * width, dtype=torch.int32, device="cuda").view(sequences, width)
        self.lengths = torch.full((sequences,), keys, dtype=torch.int32, device="cuda")
        self.ends = torch.arange(sequences + 1, dtype=torch.int32, device="cuda")
        self.slots = self.table[:, (keys - 1) // PAGE].long() * PAGE + (keys - 1) % PAGE
        self.positions = torch.full((sequences,), keys - 1, dtype=torch.int64, device="cuda")
        self.q = torch.randn(sequences, HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
        self.rows = torch.randn(2, max(sequences, PAGE), KV_HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
        first = torch.arange(PAGE, device="cuda")
        for cache in self.caches:
            cache.write(*self.rows[:, :PAGE], first, first if cache.maps.by_position else None)
            cache.buffer[1:] = cache.buffer[:1]
        self.key, self.value = self.rows[:, :sequences]

    def add_copies(self) -> None:
        """16-bit copies, as a step after a prompt finds them: each page of interest has one."""
        sequences = len(self.lengths)
        copied = CopiedPages(TOKENS, PAGE, sequences, self.caches[0].num_blocks, torch.device("cuda"))
        self.copied, self.step = copied, FullPrecisionStep(TOKENS, PAGE, sequences, sequences, torch.device("cuda"))
        self.with_copies = [CacheWithCopies(c, cache_of_copies(c, copied.num_copies, torch.bfloat16), copied) for c in self.caches]
        copied.watch(self.caches[-1])
        base = int(TOKENS.first_recent_page(self.lengths[:1], PAGE))
        pages = torch.cat([self.table[:, :1], self.table[:, base : base + copied.recent]], 1).flatten().long()
        copies = torch.arange(len(pages), device="cuda")
        copied.copy_of[pages], copied.owner[copies] = copies, pages
        for rows, kept in copied._pairs():
            kept[copies] = rows[pages]
        self.advance()
        assert int(self.step.between[0, 1]) == base * PAGE, "copies were doubted"

    def advance(self) -> None:
        self.copied.advance(self.table, self.lengths, self.ends, self.slots, self.step)

    def write(self, caches=None, full_precision=None):
        """A function that writes all layers."""
        caches = caches or self.caches
        write = prepare_write(self.slots, self.positions, full_precision=full_precision)
        return lambda: [write(cache, self.key, self.value) for cache in caches]

    def attend(self, caches=None, full_precision=None):
        """A function that attends over all layers."""
        caches = caches or self.caches
        given = dict(block_table=self.table, seq_lens=self.lengths, cu_seqlens_q=self.ends, max_query_len=1)
        attend = prepare_attend(**given, full_precision=full_precision)
        return lambda: [attend(cache, self.q) for cache in caches]

    def copies_alone(self):
        """A function that writes the copies of all layers and nothing else."""
        write = prepare_write(self.slots, full_precision=self.step)
        return lambda: [write._store(cache.copies, self.key, self.value, self.step.slots[: len(self.slots)]) for cache in self.with_copies]

    def note(self):
        """A function that notes the rows of the last layer once for each layer."""
        return lambda: [self.with_copies[-1].stored(self.slots, self.step) for _ in self.caches]


def both(*parts):
    """A function that calls each of these, layer by layer: a graph has no order beyond that."""
    return lambda: [part() for part in parts]


def steps(layers: Layers, copies: bool) -> dict[str, object]:
    """What is timed, by name."""
    found = {"write": layers.write(), "attend": layers.attend()}
    found["write, attend"] = both(layers.write(), layers.attend())
    if copies:
        layers.add_copies()
        step, caches = layers.step, layers.with_copies
        found["copies: write of copies alone"] = layers.copies_alone()
        found["copies: write of both (with the last layer's note)"] = layers.write(caches, step)
        found["copies: note, once"] = layers.note()
        found["copies: attend"] = layers.attend(caches, step)
        found["copies: write of both, attend"] = both(layers.write(caches, step), layers.attend(caches, step))
        found["copies: write of pages alone, attend"] = both(layers.write(), layers.attend(caches, step))
        found["copies: write of both, attend to pages alone"] = both(layers.write(caches, step), layers.attend())
    return found


def host_us(call, repeats: int = 50) -> float:
    """Microseconds that the host takes to launch."""
    call(), torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    taken = time.perf_counter() - begun
    torch.cuda.synchronize()
    return taken / repeats * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["64x8192", "8x32768", "256x2048"], help="sequences x keys")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results, device = [], torch.device("cuda")
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for shape in args.shapes:
        sequences, keys = map(int, shape.split("x"))
        for what, fmt, hessian, key_mean in FORMATS:
            maps = maps_of(fmt, SIZE, hessian, key_mean) if hessian or key_mean else None
            layers = Layers(fmt, maps, sequences, keys, args.layers)
            for part, call in steps(layers, copies=what != "int4").items():
                us, how = measure(call, device)
                results.append(dict(shape=shape, format=what, part=part, us=round(us / args.layers, 2), how=how))
                print(*results[-1].values(), sep="\t", flush=True)
            if what == FORMATS[-1][0]:
                for how, us in (("graph", measure(layers.advance, device)[0]), ("host", host_us(layers.advance))):
                    results.append(dict(shape=shape, format=what, part="advance, once a step", us=round(us, 2), how=how))
                    print(*results[-1].values(), sep="\t", flush=True)
            del layers
    if args.json is not None:
        args.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
