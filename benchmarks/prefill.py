"""Prompts over a quantized cache, checked and timed in one run with FlashAttention-3 over 16-bit pages and cuDNN over dense rows:

    python benchmarks/prefill.py [--peers DIR] [--format int4] [--cases NAME ...] [--seconds S] [--json FILE]
    python benchmarks/prefill.py --device cpu --divide 128

For each case, microseconds of quantkv's prefill path by every kernel that is here and takes the case (quantkv's own for Hopper;
FlashAttention-3; cuDNN by its frontend's package; cuDNN as torch calls it; torch's flash kernel), each as it is cut now and, marked
"before", with each sequence on its own and one stream, marked "captured" the first kernel's call as a CUDA graph, which has no host
work, and marked "8 bits" with 8-bit scores; and by Triton, which served the options before. Times are CUDA events around calls
that are enqueued ahead, in an order by chance, host work included where it is slower; the best of the rivals' own numbers is beside them.
Every result is compared with float64 attention over what the cache holds, at queries at both ends, at edges of windows and by chance,
before it is timed. Exit code 1 where one is wrong. No case begins after --seconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quantkv import PagedCache, get_format, ops
from quantkv.bench import rivals
from quantkv.bench.problem import Unavailable
from quantkv.bench.run import save_rows
from quantkv.bench.timing import capture, measure
from quantkv.calls import AttendCall, Batch
from quantkv.implementations import refusal
from quantkv.implementations.prefill import attend as prefill
from quantkv.implementations.prefill import backends
from quantkv.options import AttentionOptions
from quantkv.testing import relative_error

PAGE = 16
TOLERANCE = 1e-2  # of the norm of a result in bfloat16, as of `quantkv bench`
EIGHT_BIT_TOLERANCE = 2e-2  # with 8-bit scores: the acceptance threshold (notebook/2026-11-27-8bit-prompts.md)
SAMPLES = 24  # queries of a sequence that are compared, of at most so many sequences
MIXED = [(384 + 32 * (i * 5 % 9), 384 + 32 * (i * 5 % 9)) for i in range(32)]  # 384 to 640, 512 in the mean or nearly
BEFORE = {"together": False, "overlap": False}
BEFORE_TOO = ("flash3", "hopper", "cudnn", "math")


class Case(NamedTuple):
    """lengths: (queries, keys) of each sequence. heads: of queries, of keys, and their size."""

    lengths: list[tuple[int, int]]
    heads: tuple[int, int, int] = (32, 8, 128)
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


CASES = {
    "1 x 8k": Case([(8192, 8192)]),
    "1 x 32k": Case([(32768, 32768)]),
    "8 x 4k": Case([(4096, 4096)] * 8),
    "32 x 512, mixed": Case(MIXED),
    "2k on 30k": Case([(2048, 32768)]),
    "8k on 128k": Case([(8192, 139264)]),
    "4k on 12k": Case([(4096, 16384)]),
    "window 1,024, 32k": Case([(32768, 32768)], (32, 16, 128), window=1024),
    "window 128, 32k": Case([(32768, 32768)], window=128),
    "softcap 50, 8k (Gemma 2)": Case([(8192, 8192)], (16, 8, 256), softcap=50.0),
    "sinks, window 128, 32k (gpt-oss)": Case([(32768, 32768)], (64, 8, 64), window=128, sinks=True),
    "4k on 12,388, odd": Case([(4099, 16487)]),
}


class Row(NamedTuple):
    """One time. us: None where it was refused, why is in note. error: relative, against float64."""

    case: str
    what: str
    us: float | None
    spread_us: float | None
    tflops: float | None
    error: float | None
    note: str = ""


class Problem:
    """A case's tensors. Keys, values and queries are as those of `quantkv.bench`: scores near 1."""

    def __init__(self, case: Case, format_name: str, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        hq, hk, size = case.heads
        counts, keys = zip(*case.lengths)
        normal = lambda *shape: torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).bfloat16()
        self.case, self.device, self.q = case, device, normal(sum(counts), hq, size)
        key, value = normal(sum(keys), hk, size), normal(sum(keys), hk, size)
        pages = [-(-n // PAGE) for n in keys]
        order = torch.randperm(sum(pages), generator=generator, device=device).int()
        self.table = torch.zeros(len(keys), max(pages), dtype=torch.int32, device=device)
        for s, row in enumerate(order.split(pages)):
            self.table[s, : pages[s]] = row
        self.position = torch.cat([torch.arange(n, device=device) for n in keys])
        sequence = torch.arange(len(keys), device=device).repeat_interleave(torch.tensor(keys, device=device))
        self.slots = self.table[sequence, self.position // PAGE].long() * PAGE + self.position % PAGE
        self.cache = PagedCache(get_format(format_name).cache_spec(hk, size, block_size=PAGE), sum(pages), device)
        self.plain = PagedCache(get_format("none").cache_spec(hk, size, block_size=PAGE), sum(pages), device)
        for cache in (self.cache, self.plain):
            cache.write(key, value, self.slots, self.position)
        starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
        lens = torch.tensor(keys, device=device).int()
        self.batch = Batch(starts, lens, lengths=tuple(case.lengths))
        self.sinks = torch.linspace(-1, 3, hq, device=device).bfloat16() if case.sinks else None
        self.options = AttentionOptions(window=case.window, softcap=case.softcap, sinks=self.sinks)
        self.scale, self.out = size**-0.5, torch.empty_like(self.q)
        self.flops = 4 * hq * size * sum(_seen(n, m, case.window) for n, m in case.lengths)

    def call(self, cache: PagedCache, precision: str = "16bit") -> AttendCall:
        options = replace(self.options, prompt_precision=precision)
        return AttendCall(self.q, (cache.segment(self.table),), self.batch, self.scale, options, self.out)

    def error(self, out: torch.Tensor, cache: PagedCache) -> float:
        """The largest of the sequences that are looked at, of some of their queries."""
        found, first, row, window = [], 0, 0, self.case.window
        chance = torch.Generator().manual_seed(1)
        for s, (queries, keys) in enumerate(self.case.lengths):
            if s in (0, 1, len(self.case.lengths) // 2, len(self.case.lengths) - 1):
                edges = [0, 1, window - 1, window, window + 1, queries // 2, queries - 2, queries - 1]
                some = {i for i in edges if 0 <= i < queries} | {*torch.randint(queries, (SAMPLES - 8,), generator=chance).tolist()}
                index = torch.tensor(sorted(some), device=self.device)
                slots = self.slots[first : first + keys]
                k, v = (t.double() for t in cache.dequantize(slots, self.position[first : first + keys], torch.float32))
                want = self._attention(self.q[row + index].double(), k, v, keys - queries + index)
                found.append(relative_error(out[row + index], want))
            first, row = first + keys, row + queries
        return max(found)

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        grouped = q.unflatten(1, (k.shape[1], -1))  # [M, HK, G, D]
        score = self.scale * torch.einsum("mhgd,nhd->hgmn", grouped, k)
        if self.case.softcap:
            score = self.case.softcap * torch.tanh(score / self.case.softcap)
        behind = position[:, None] - torch.arange(len(k), device=q.device)
        score = score.masked_fill((behind < 0) | (behind >= (self.case.window or len(k))), -torch.inf)
        sums = score.logsumexp(-1, keepdim=True)
        if self.sinks is not None:
            sums = torch.logaddexp(sums, self.sinks.double().view(k.shape[1], -1, 1, 1))
        return torch.einsum("hgmn,nhd->mhgd", torch.exp(score - sums), v).flatten(1, 2)


def _seen(queries: int, keys: int, window: int) -> int:
    """Pairs of a query and a key that it sees."""
    context = keys - queries
    return sum(min(context + i + 1, window or keys) for i in range(queries))


def contestants(problem: Problem) -> dict[str, tuple[Callable[[], Any], PagedCache]]:
    """What is timed, and the cache that its result is compared over."""
    case, found = problem.case, {}
    needs = {"window": bool(case.window), "softcap": bool(case.softcap)}
    if hasattr(torch.ops._vllm_fa3_C, "fwd"):
        found["FlashAttention-3 bf16 pages"] = flash3(problem), problem.plain
    if not any(needs.values()) and problem.device.type == "cuda" and len({*case.lengths}) == 1 and case.lengths[0][0] == case.lengths[0][1]:
        found["cuDNN bf16 dense"] = cudnn(problem), problem.plain
    for name in backends.fitting(problem.device, problem.q.dtype, case.heads[2], case.heads[2], **needs):
        for mark, how in (("", {}), (", before", BEFORE))[: 2 if name in BEFORE_TOO else 1]:
            found[f"{name}{mark}"] = ours(problem, backend=name, **how), problem.cache
        if problem.device.type == "cuda" and not any(what.endswith("captured") for what in found):
            found[f"{name}, captured"] = captured(ours(problem, backend=name)), problem.cache
        if name == "hopper":
            found["hopper, 8 bits"] = ours(problem, "8bit", backend=name), problem.cache
            found["hopper, 8 bits, captured"] = captured(ours(problem, "8bit", backend=name)), problem.cache
    call = problem.call(problem.cache)
    reason = refusal("triton", call)
    if reason is None:
        launch = ops.prepare(call, "triton")
        found["triton"] = (lambda: launch(call)), problem.cache
    return found


def ours(problem: Problem, precision: str = "16bit", **how) -> Callable[[], None]:
    call = problem.call(problem.cache, precision)
    plan = prefill.plan(call, **how)
    return lambda: prefill.follow(call, plan)


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """The call as a graph, which the first replay captures."""
    graphs = []

    def replay() -> None:
        if not graphs:
            graphs.append(capture(call, 1))
        graphs[0].replay()

    return replay


def flash3(problem: Problem) -> Callable[[], None]:
    """Over 16-bit pages, one call."""
    case, c = problem.case, problem.plain
    arguments = {
        "cu_seqlens_q": problem.batch.cu_seqlens_q,
        "seq_lens": problem.batch.seq_lens,
        "block_table": problem.table,
        "scale": problem.scale,
        "max_query_len": problem.batch.max_query_len,
        "max_keys": problem.batch.max_seq_len,
        "window": (case.window - 1, 0) if case.window else (-1, -1),
        "softcap": case.softcap,
        "sinks": problem.sinks,
    }
    return lambda: rivals.flash3_over_pages(problem.q, c.k.codes, c.v.codes, problem.out, **arguments)


def cudnn(problem: Problem) -> Callable[[], None]:
    """torch's attention over dense rows, by cuDNN alone."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    size, batch = problem.case.heads[2], len(problem.case.lengths)
    rows = problem.plain.dequantize(problem.slots, problem.position, torch.bfloat16)
    q, k, v = (t.view(batch, -1, t.shape[1], size).transpose(1, 2) for t in (problem.q, *rows))

    def call() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=problem.scale)
        problem.out = out.transpose(1, 2).flatten(0, 1)

    return call


def of_case(name: str, case: Case, given, device: torch.device, wrong: list[str]) -> list[Row]:
    """Everything at one case; the rounds of all take turns."""
    problem, rows, times, errors, notes = Problem(case, given.format, device), [], {}, {}, {}
    chance = random.Random(0)
    own = problem.out
    for what, (call, cache) in contestants(problem).items():
        problem.out.fill_(torch.nan)
        try:
            call()
            errors[what] = problem.error(problem.out, cache)
        except (RuntimeError, ValueError, TypeError) as error:
            notes[what] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            wrong.append(f"{name}: {what}: {notes[what]}")
            continue
        finally:
            problem.out = own
        allowed = EIGHT_BIT_TOLERANCE if "8 bits" in what else TOLERANCE
        if not errors[what] <= allowed:
            wrong.append(f"{name}: {what}: differs by {errors[what]:.1e} of the norm; {allowed:.0e} is allowed")
        else:
            times[what] = call, []
    for _ in range(given.rounds):  # in an order by chance: what comes behind others finds a warmer GPU
        for call, us in chance.sample([*times.values()], len(times)):
            us.append(measure(call, device, graph=False)[0])
    for what in [*errors, *notes]:
        us = times[what][1] if what in times else []
        middle = statistics.median(us) if us else None
        rate = problem.flops / middle / 1e6 if middle else None
        rows.append(Row(name, what, middle, max(us) - min(us) if us else None, rate, errors.get(what), notes.get(what, "")))
    return rows


def show(rows: list[Row]) -> None:
    flash = next((row.us for row in rows if row.what.startswith("FlashAttention-3")), None)
    for row in rows:
        us = "-" if row.us is None else f"{row.us:,.0f}"
        cells = us, "-" if row.tflops is None else f"{row.tflops:.0f}", f"{flash / row.us:.2f}x" if flash and row.us else "-"
        error = "-" if row.error is None else f"{row.error:.0e}"
        print(f"{row.case:34} {row.what:28} {cells[0]:>9} {cells[1]:>6} {cells[2]:>7} {error:>6} {row.note}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="a folder with rivals")
    parser.add_argument("--format", default="int4")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--divide", type=int, default=1, help="lengths and windows are divided by this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=130)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA GPU: --device cpu --divide 128 shows only that all is right")
    device, found, wrong, start = torch.device(given.device), [], [], time.monotonic()
    if given.peers and device.type == "cuda":
        try:
            rivals.load_flash3(given.peers)
        except Unavailable as reason:
            print(f"FlashAttention-3: {reason}")
    print(f"{'case':34} {'what':28} {'us':>9} {'TF/s':>6} {'FA3 /':>7} {'error':>6}")
    for name in given.cases:
        if time.monotonic() - start > given.seconds:
            print(f"{name}: not begun, {given.seconds:.0f} s are over")
            continue
        case = CASES[name]
        lengths = [(max(n // given.divide, 1), max(m // given.divide, 1)) for n, m in case.lengths]
        rows = of_case(name, case._replace(lengths=lengths, window=-(-case.window // given.divide)), given, device, wrong)
        found += rows
        show(rows)
    if given.json:
        save_rows(given.json, device, [row._asdict() for row in found], format=given.format, seconds=time.monotonic() - start)
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
