"""Pages between a GPU and pinned host memory, and what decoding loses while they move: `python benchmarks/offload.py [--json FILE]`.

Gigabytes a second each way and both ways at once, alone and beside decode steps (each a write and an attend a layer, replayed as one CUDA
graph), and the time of a step with and without them. The pages that move lie apart, in random order, and are none that the step reads.
Before anything is timed, what was moved while a step ran is compared with what it was, and so is the step's output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from quantkv import PagedCache, PageStore, get_format, prepare_attend, prepare_write
from quantkv.bench.timing import capture

HEADS, KV_HEADS, SIZE = 32, 8, 128  # Llama-3-8B's
ROUNDS = 7


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

    def step_ms(self, ended: Callable[[], bool], least: int = 1) -> tuple[float, int]:
        """Milliseconds of a step while something has not ended, and how many steps that were. The host waits after every second one."""
        self.synchronize_steps()
        start, count = time.perf_counter(), 0
        while count < least or not ended():
            self.step()
            self.step()
            self.synchronize_steps()
            count += 2
        return (time.perf_counter() - start) / count * 1e3, count

    def synchronize_steps(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


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
    """One direction or both: gigabytes a second each way, and milliseconds of a step beside them, where steps run until all has moved."""
    kept = model.store.store(model.moving[0])
    kept.synchronize()
    repeats, found = 4, []
    while len(found) < ROUNDS:
        model.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            under_way = []
            if "out" in ways:
                under_way.append(model.store.store(model.moving[0]))
                model.store.release(under_way[0])
            if "in" in ways:
                under_way.append(model.store.load(kept, model.moving[1]))
        result = {}
        if with_steps:
            result["step_ms"], count = model.step_ms(lambda under_way=under_way: all(transfer.done for transfer in under_way))
            if count < 16 and model.device.type == "cuda":
                repeats *= 2
                continue
        model.synchronize()
        found.append({"gb_per_s": repeats * model.gigabytes / (time.perf_counter() - start), **result})
    model.store.release(kept)
    return {name: statistics.median(result[name] for result in found) for name in found[0]}


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
    alone = statistics.median(model.step_ms(lambda: True, least=16)[0] for _ in range(ROUNDS))
    found = {"decode alone": {"step_ms": alone}}
    for name, ways in (("to the host", ("out",)), ("to the device", ("in",)), ("both ways, each", ("out", "in"))):
        found[name] = measure(model, ways, False)
        found[f"{name}, beside decode"] = measure(model, ways, True)
    print(f"{args.layers} layers of {args.format}, {args.batch} x {args.length} decode; {1e3 * model.gigabytes:.0f} MB at a time")
    for name, result in found.items():
        rate = f"{result['gb_per_s']:7.1f} GB/s" if "gb_per_s" in result else " " * 12
        step = f"{result['step_ms']:8.3f} ms a step ({result['step_ms'] / alone:.3f}x)" if "step_ms" in result else ""
        print(f"{name:32s} {rate} {step}")
    if args.json:
        device = torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"
        arguments = {name: value for name, value in vars(args).items() if name != "json"}
        args.json.write_text(json.dumps({"device": device, "arguments": arguments, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
