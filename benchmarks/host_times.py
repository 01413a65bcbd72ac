"""What a call costs the host: microseconds of Python and driver for each attend and write, eager, beside FlashAttention-3's operator.

    PYTHONPATH=src python benchmarks/host_times.py [--peers DIR] [--json FILE]

The GPU's part is kept small (one sequence, or short prompts), so that the host is what is waited for; "prepared" calls are those that
layers of one step share, "eager" ones are made and checked anew. Prompts: by every dense kernel that is here, with what calls of one plan
keep for each other and without (by a plan whose memory forgets). Also the scratch memory of decode over wide block tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from quantkv import PagedCache, get_format
from quantkv.bench.rivals import flash3_over_pages, load_flash3
from quantkv.calls import AttendCall, Batch
from quantkv.implementations.hopper.attend import scratch_bytes
from quantkv.implementations.prefill import attend as prefill
from quantkv.implementations.prefill import backends
from quantkv.prepared import prepare_attend, prepare_write

HEADS, KV_HEADS, SIZE, BATCH, LENGTH = 32, 8, 128, 8, 256
CALLS = 200
PROMPTS = [(128 + 16 * i,) * 2 for i in range(BATCH)]  # no sequence is longer than LENGTH


class Forgetful(dict):
    """What calls of a plan keep for the next one, of a plan whose next call finds nothing."""

    def __setitem__(self, key: object, value: object) -> None:
        pass


def host_us(call) -> float:
    """Median over rounds of the host's time of one call; the device is idle before each round and never behind by more than one."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    rounds = []
    for _ in range(15):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(rounds)


def of_prompts(cache: PagedCache, table: torch.Tensor) -> dict[str, float]:
    """By each dense kernel: all prompts as one call, and the longest alone."""
    found = {}
    for what, lengths in (("prompts", PROMPTS), ("one prompt", PROMPTS[-1:])):
        starts = torch.tensor([0, *[queries for queries, _ in lengths]], device="cuda").cumsum(0).int()
        lens = torch.tensor([keys for _, keys in lengths], device="cuda").int()
        q = torch.randn(int(starts[-1]), HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
        call = AttendCall(q, (cache.segment(table[: len(lengths)]),), Batch(starts, lens, lengths=tuple(lengths)))
        for backend in backends.fitting(q.device, q.dtype, SIZE, SIZE):
            for mark, kept in (("", {}), (", nothing kept", Forgetful())):
                plan = replace(prefill.plan(call, backend=backend), kept=kept)
                found[f"{what}, {backend}{mark}"] = host_us(lambda plan=plan, call=call: prefill.follow(call, plan))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="a folder with FlashAttention-3, as `quantkv bench` takes it")
    parser.add_argument("--implementations", nargs="+", default=["hopper", "triton"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    on_gpu = {"device": "cuda"}
    cache = PagedCache(get_format("int4").cache_spec(KV_HEADS, SIZE), BATCH * LENGTH // 16, "cuda")
    table = torch.arange(BATCH * LENGTH // 16, dtype=torch.int32, **on_gpu).view(BATCH, -1)
    lens = torch.full((BATCH,), LENGTH, dtype=torch.int32, **on_gpu)
    starts = torch.arange(BATCH + 1, dtype=torch.int32, **on_gpu)
    q = torch.randn(BATCH, HEADS, SIZE, dtype=torch.bfloat16, **on_gpu)
    key, value = torch.randn(2, BATCH, KV_HEADS, SIZE, dtype=torch.bfloat16, **on_gpu)
    slots = torch.arange(BATCH, **on_gpu) * LENGTH
    cache.write(key.repeat(LENGTH, 1, 1), value.repeat(LENGTH, 1, 1), torch.arange(BATCH * LENGTH, **on_gpu))
    batch = {"block_table": table, "seq_lens": lens, "cu_seqlens_q": starts, "max_query_len": 1}
    found = {}
    if args.peers:
        load_flash3(args.peers)
        plain = torch.randn(2, BATCH * LENGTH // 16, 16, KV_HEADS, SIZE, dtype=torch.bfloat16, **on_gpu)
        out, options = torch.empty_like(q), {"scale": SIZE**-0.5, "max_query_len": 1, "max_keys": LENGTH}
        rest = {"cu_seqlens_q": starts, "seq_lens": lens, "block_table": table, **options}
        found["FlashAttention-3's operator"] = host_us(lambda: flash3_over_pages(q, *plain, out, **rest))
    for implementation in args.implementations:
        attend, write = prepare_attend(**batch, implementation=implementation), prepare_write(slots, implementation=implementation)
        found[f"attend, {implementation}, prepared"] = host_us(lambda attend=attend: attend(cache, q))
        found[f"attend, {implementation}, eager"] = host_us(lambda i=implementation: cache.attend(q, **batch, implementation=i))
        found[f"write, {implementation}, prepared"] = host_us(lambda write=write: write(cache, key, value))
        found[f"write, {implementation}, eager"] = host_us(lambda i=implementation: cache.write(key, value, slots, implementation=i))
    found |= of_prompts(cache, table)
    wide = torch.zeros(256, 131072 // 16, dtype=torch.int32, **on_gpu)
    many = Batch(torch.arange(257, dtype=torch.int32, **on_gpu), torch.full((256,), 1024, dtype=torch.int32, **on_gpu), 1, 1024)
    rows = torch.empty(256, HEADS, SIZE, dtype=torch.bfloat16, **on_gpu)
    scratch = scratch_bytes(AttendCall(rows, (cache.segment(wide),), many))
    for name, microseconds in found.items():
        print(f"{name:32s} {microseconds:7.1f} us")
    print(f"scratch of 256 sequences of 1,024 with block tables for 131,072: {scratch / 2**20:.2f} MiB")
    if args.json:
        record = {"device": torch.cuda.get_device_name(), "us": found, "scratch_bytes": scratch}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
