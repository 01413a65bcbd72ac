"""Pages between a GPU and pinned host memory, and what decoding loses while they move: `python benchmarks/offload.py [--json FILE]`.

Gigabytes a second each way and both ways at once, alone and beside decode steps (each a write and an attend a layer, replayed as one CUDA
graph), and the time of a step with and without them. The pages that move lie apart, in random order, and are none that the step reads.
Before anything is timed, what was moved while a step ran is compared with what it was, and so is the step's output.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from quantkv import PagedCache, PageStore, get_format, prepare_attend, prepare_write
from quantkv.bench.timing import capture
from quantkv.offload import StoredPages, Transfer

HEADS, KV_HEADS, SIZE = 32, 8, 128  # Llama-3-8B's
ROUNDS = 5
COPIES = 12  # of all pages that move, each way, in a round
STEPS = 48  # of a round in which nothing moves
AHEAD = 3  # steps that wait on the GPU, so that it never waits for the host


class Model:
    """Layers, a batch that decodes in the first pages, and pages beyond them that move."""

    def __init__(self, args: argparse.Namespace) -> None:
        device, pages = torch.device(args.device), -(-args.length // 16)
        self.device, used = device, args.batch * pages
        spec = get_format(args.format).cache_spec(KV_HEADS, SIZE)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.caches = [PagedCache(spec, used + 2 * args.pages, device) for _ in range(args.layers)]
        rows = torch.randn(2, 16 * self.caches[0].num_blocks, KV_HEADS, SIZE, device=device, dtype=dtype)
        for cache in self.caches:
            cache.write(*rows, torch.arange(16 * cache.num_blocks, device=device))
        del rows
        table = torch.randperm(used, device=device).to(torch.int32).view(args.batch, pages)
        lens = torch.full((args.batch,), args.length, dtype=torch.int32, device=device)
        attend = prepare_attend(block_table=table, seq_lens=lens, max_query_len=1)
        write = prepare_write(table[:, -1].long() * 16 + (args.length - 1) % 16)
        q = torch.randn(args.batch, HEADS, SIZE, device=device, dtype=dtype)
        key, value = torch.randn(2, args.batch, KV_HEADS, SIZE, device=device, dtype=dtype)
        self.outs = [torch.empty_like(q) for _ in self.caches]

        def step() -> None:
            for cache, out in zip(self.caches, self.outs):
                write(cache, key, value)
                attend(cache, q, out=out)

        self.step = capture(step, 1).replay if device.type == "cuda" else step
        self.moving = [(torch.randperm(args.pages) + used + i * args.pages).tolist() for i in range(2)]  # those that go, those that come
        self.store = PageStore(self.caches, 2 * args.pages)
        self.gigabytes = args.pages * spec.block_bytes * args.layers / 1e9

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """What the current stream was given so far, as an event; None on a CPU, where it has ended."""
        return torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None

    def start(self, way: str, kept: StoredPages) -> Transfer:
        """Begin to copy all pages that move, to the host ("out") or to the device ("in")."""
        if way == "in":
            return self.store.load(kept, self.moving[1])
        stored = self.store.store(self.moving[0])
        self.store.release(stored)  # their room is taken again by the next, whose copies come later on the same stream
        return stored


def check(model: Model) -> None:
    """Bytes and outputs are the same when pages go and come while steps run."""
    model.step()
    model.synchronize()
    expected = [out.clone() for out in model.outs]
    going, coming = model.moving
    stored = model.store.store(going)
    for _ in range(4):
        model.step()
    transfer = model.store.load(stored, coming)
    for _ in range(4):
        model.step()
    transfer.synchronize()
    model.store.release(stored)
    model.synchronize()
    for cache, out, want in zip(model.caches, model.outs, expected):
        assert torch.equal(cache.buffer[going], cache.buffer[coming]), "pages differ after they moved"
        assert torch.equal(out, want), "a step's output differs while pages move"
    print("checked: bytes and outputs are the same while pages move")


def measure(model: Model, ways: tuple[str, ...], with_steps: bool) -> dict[str, float]:
    """Gigabytes a second each way, and milliseconds of a step. Steps run until the last copy has ended, and two copies of each way wait at
    any time, so that neither the GPU nor its bus waits for the host. Without `ways`: steps alone."""
    kept = model.store.store(model.moving[0])
    kept.synchronize()
    found = []
    for _ in range(ROUNDS):
        waiting = {way: deque() for way in ways}
        left, ahead, steps = dict.fromkeys(ways, COPIES), deque(), 0
        model.synchronize()
        begun = time.perf_counter()
        while any(left.values()) or any(waiting.values()) or (not ways and steps < STEPS):
            for way, copies in waiting.items():
                while copies and copies[0].done:
                    copies.popleft()
                while left[way] and len(copies) < 2:
                    copies.append(model.start(way, kept))
                    left[way] -= 1
            if with_steps:
                model.step()
                steps += 1
                ahead.append(model.mark())
                if len(ahead) > AHEAD and (event := ahead.popleft()):
                    event.synchronize()
        model.synchronize()
        elapsed = time.perf_counter() - begun
        found.append(
            ({"gb_per_s": COPIES * model.gigabytes / elapsed} if ways else {}) | ({"step_ms": elapsed / steps * 1e3} if with_steps else {})
        )
    model.store.release(kept)
    return {name: statistics.median(result[name] for result in found) for name in found[0]}


def show(name: str, result: dict[str, float], alone: float = math.nan) -> None:
    rate = f"{result['gb_per_s']:7.1f} GB/s" if "gb_per_s" in result else " " * 12
    step = f"{result['step_ms']:8.3f} ms a step ({result['step_ms'] / alone:.3f}x)" if "step_ms" in result else ""
    print(f"{name:32s} {rate} {step}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="int4")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--pages", type=int, default=2048, help="that move at a time, of every layer")
    parser.add_argument("--device", default="cuda", help="cpu: only to see that the script runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Model(args)
    check(model)
    print(f"{args.layers} layers of {args.format}, {args.batch} x {args.length} decode; {1e3 * model.gigabytes:.0f} MB at a time")
    found: dict[str, dict[str, float]] = {}
    for name, ways in (("decode alone", ()), ("to the host", ("out",)), ("to the device", ("in",)), ("both ways, each", ("out", "in"))):
        if ways:
            found[name] = measure(model, ways, False)
            show(name, found[name])
            name = f"{name}, beside decode"
        found[name] = measure(model, ways, True)
        show(name, found[name], found["decode alone"]["step_ms"])
    if args.json:
        device = torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"
        arguments = {name: value for name, value in vars(args).items() if name != "json"}
        args.json.write_text(json.dumps({"device": device, "arguments": arguments, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
