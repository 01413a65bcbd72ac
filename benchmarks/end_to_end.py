"""Tokens a second and peak memory of a whole model at decode, with 16-bit and quantized caches side by side:

    python benchmarks/end_to_end.py [--peers DIR] [--formats ...] [--json FILE]
    python benchmarks/end_to_end.py --tiny --device cpu

A model of Llama-3-8B's geometry with random weights, a plain loop over `PagedCache.write` and `PagedCache.attend`; on a GPU a
whole step (embedding to the next token, lengths and slots included) is one captured graph that is replayed for each step. The
caches are filled with random rows through `write`: decoding costs the same, and no prompt of 262,144 tokens must be computed.

Checked first, for each cache: over a short context each layer's attention, given the same q, k and v, is that of the exact cache
within the error of the format's rows, and replays of the graph give the logits of eager steps.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn.functional import linear, rms_norm, silu

from quantkv import PagedCache, get_format, implementations
from quantkv.bench import rivals
from quantkv.bench.run import device_name, versions
from quantkv.calls import AttendCall, Batch
from quantkv.prepared import prepare_attend

FORMATS = ("bf16", "int8", "int4", "tq4", "int2")
FLASH3, QUANTKV = "FlashAttention-3", "quantkv"
SHORT = 512  # tokens of the context over which caches are compared
FILLED_AT_ONCE = 1 << 15  # tokens
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Geometry:
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    mlp: int = 14336
    vocabulary: int = 128256
    rope_base: float = 500_000.0


TINY = Geometry(layers=2, hidden=64, heads=4, kv_heads=2, head_size=32, mlp=128, vocabulary=256)


class Model:
    """A decoder of Llama's kind; the embedding `[V, H]`, and weights `[out, in]` with rows of norm about 1."""

    def __init__(self, g: Geometry, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            w = torch.empty(rows, columns, dtype=DTYPE, device=device)
            return w.normal_(std=columns**-0.5, generator=generator)

        self.geometry = g
        self.embedding = weight(g.vocabulary, g.hidden) * g.hidden**0.5
        self.head = weight(g.vocabulary, g.hidden)
        qkv = (g.heads + 2 * g.kv_heads) * g.head_size
        self.layers = [
            (weight(qkv, g.hidden), weight(g.hidden, g.heads * g.head_size), weight(2 * g.mlp, g.hidden), weight(g.hidden, g.mlp))
            for _ in range(g.layers)
        ]
        self.norm = torch.ones(g.hidden, dtype=DTYPE, device=device)
        self.frequency = g.rope_base ** -(torch.arange(0, g.head_size, 2, device=device) / g.head_size)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Callable) -> torch.Tensor:
        """Logits `[S, V]` of one new token a sequence. attention: (layer, q, k, v) `[S, heads, D]` -> `[S, HQ, D]`."""
        g = self.geometry
        angle = positions[:, None, None] * self.frequency
        cosine, sine = (f(torch.cat([angle, angle], -1)).to(DTYPE) for f in (torch.cos, torch.sin))
        x = self.embedding[tokens]
        for layer, (qkv, output, gate_up, down) in enumerate(self.layers):
            rows = linear(self._normed(x), qkv).unflatten(1, (-1, g.head_size))
            qk, v = rows.split([g.heads + g.kv_heads, g.kv_heads], 1)
            low, high = qk.chunk(2, -1)
            q, k = torch.addcmul(qk * cosine, torch.cat([-high, low], -1), sine).split([g.heads, g.kv_heads], 1)
            x = x + linear(attention(layer, q, k, v).flatten(1), output)
            gate, up = linear(self._normed(x), gate_up).chunk(2, -1)
            x = x + linear(silu(gate) * up, down)
        return linear(self._normed(x), self.head)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.norm.shape, self.norm, 1e-5)


class Decoding:
    """Sequences at decode: a cache for each layer, pages in random order, and `step`, which a graph can capture."""

    def __init__(self, model: Model, format_name: str, reader: str, sequences: int, length: int, room: int) -> None:
        g, self.model, self.reader, device = model.geometry, model, reader, model.norm.device
        spec = get_format(format_name, DTYPE).cache_spec(g.kv_heads, g.head_size)
        self.page, self.length, self.capacity = spec.block_size, length, length + room
        pages = spec.num_blocks(self.capacity)
        generator = torch.Generator(device).manual_seed(1)
        order = torch.randperm(sequences * pages, generator=generator, device=device)
        self.block_table = order.view(sequences, pages).int()
        self.sequence = torch.arange(sequences, device=device)
        self.cu_seqlens_q = torch.arange(sequences + 1, device=device, dtype=torch.int32)
        self.seq_lens = torch.empty(sequences, device=device, dtype=torch.int32)
        self.tokens = torch.empty(sequences, device=device, dtype=torch.int64)
        self.attend = prepare_attend(block_table=self.block_table, seq_lens=self.seq_lens, cu_seqlens_q=self.cu_seqlens_q, max_query_len=1)
        self.caches = [PagedCache(spec, sequences * pages, device) for _ in range(g.layers)]
        self.row_error = self._fill(generator)
        self.implementation = "" if reader == QUANTKV else reader  # what reads the pages
        self.rewind()

    def _fill(self, generator: torch.Generator) -> float:
        """Random rows into the first `length` positions -> relative error of some that were read back. Values are so large that
        a mean of `length` of them is about as large as a model's activations."""
        position = torch.arange(self.length, device=self.tokens.device)
        slots = (self.block_table[:, position // self.page].long() * self.page + position % self.page).flatten()
        wrong = right = 0.0
        for cache in self.caches:
            for part in slots.split(FILLED_AT_ONCE):
                size = (len(part), cache.spec.num_kv_heads, cache.spec.head_size)
                key, value = (torch.randn(size, generator=generator, device=part.device, dtype=DTYPE) for _ in range(2))
                value *= self.length**0.5
                cache.write(key, value, part)
            for got, rows in zip(cache.dequantize(part[:64]), (key[:64].float(), value[:64].float())):
                wrong, right = wrong + (got - rows).square().sum() / rows.square().sum(), right + 1
        return float(wrong / right) ** 0.5

    def rewind(self) -> None:
        """Back to the first step."""
        self.seq_lens.fill_(self.length)
        self.tokens.copy_(self.sequence)

    def step(self) -> torch.Tensor:
        """One token more for every sequence, the likeliest -> the logits that it was chosen by."""
        positions = self.seq_lens.long()
        slots = self.block_table[self.sequence, positions // self.page].long() * self.page + positions % self.page
        self.seq_lens += 1
        logits = self.model(self.tokens, positions, lambda layer, q, k, v: self.attention(layer, slots, q, k, v))
        self.tokens.copy_(logits.argmax(-1))
        return logits

    def attention(self, layer: int, slots: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The new rows into their slots, then attention over all."""
        cache = self.caches[layer]
        cache.write(k, v, slots)
        batch = {"cu_seqlens_q": self.cu_seqlens_q, "seq_lens": self.seq_lens, "block_table": self.block_table}
        if self.reader == QUANTKV:
            self.implementation = self.implementation or self._chosen(q)
            return self.attend(cache, q)
        out = torch.empty_like(q)
        rivals.flash3_over_pages(
            q, cache.k.codes, cache.v.codes, out, **batch, scale=q.shape[2] ** -0.5, max_query_len=1, max_keys=self.capacity
        )
        return out

    def _chosen(self, q: torch.Tensor) -> str:
        """The implementation of quantkv that serves these queries."""
        call = AttendCall(q, (self.caches[0].segment(self.block_table),), Batch(self.cu_seqlens_q, self.seq_lens, 1))
        return implementations.resolve(call)[0]


@dataclass
class Row:
    """One cache. cache_bytes: of all layers. peak_bytes: most that was allocated while decoding, weights included.
    step_ms: median. row_error: of keys and values as stored; attention_error: of the layers' attention over the short context;
    logits_error: of a step over it, where errors of all layers add up; replay_error: of the graph's logits. All relative, to what
    was put into the cache, to the exact cache twice, and to eager steps."""

    reader: str
    stores: str
    implementation: str
    cache_bytes: int
    peak_bytes: int | None
    step_ms: float
    tokens_per_s: float
    row_error: float
    attention_error: float
    logits_error: float
    replay_error: float | None


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def compare(batch: Decoding, exact: Decoding) -> tuple[float, float]:
    """One step of two batches, each filled with the same rows -> the largest error of a layer's attention, both given what the exact
    one computed so far; and that of the logits where each goes on with its own."""
    errors, attention = [], exact.attention

    def both(layer: int, *rows: torch.Tensor) -> torch.Tensor:
        expected = attention(layer, *rows)
        errors.append(relative(batch.attention(layer, *rows), expected))
        return expected

    batch.seq_lens += 1
    exact.attention = both
    expected = exact.step()
    del exact.attention  # the class's again
    batch.rewind()
    return max(errors), relative(batch.step(), expected)


def measure(model: Model, stores: str, reader: str, sequences: int, length: int, steps: int, exact: tuple[str, str]) -> Row:
    """Check, then time. exact: format and reader of the cache to compare with. RuntimeError where the check fails."""
    device = model.norm.device
    short = [Decoding(model, *way, sequences, SHORT, 1) for way in ((stores, reader), exact)]
    attention_error, logits_error = compare(*short)
    del short
    batch = Decoding(model, stores, reader, sequences, length, 2 * steps)
    # An error e of the keys changes a score, whose deviation is 1, by e; one of the values adds to it.
    if not attention_error <= 2 * batch.row_error + 0.01:
        raise RuntimeError(f"attention differs by {attention_error:.3g}, rows by {batch.row_error:.3g}")
    nbytes = sum(cache.nbytes for cache in batch.caches)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        replay_error, times = _replays(batch, steps)
        peak = torch.cuda.max_memory_allocated()
    else:
        replay_error, peak, times = None, None, [_clock(batch.step) for _ in range(steps)]
    ms = statistics.median(times)
    errors = (batch.row_error, attention_error, logits_error, replay_error)
    return Row(reader, stores, batch.implementation, nbytes, peak, ms, 1e3 * sequences / ms, *errors)


def _clock(call: Callable) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def _replays(batch: Decoding, steps: int) -> tuple[float, list[float]]:
    """Relative error of a captured step's logits, three steps in a row, and milliseconds of each of `steps` replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        batch.step()  # compiles and allocates
        batch.rewind()
        eager = torch.stack([batch.step() for _ in range(3)])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            logits = batch.step()
    torch.cuda.synchronize()
    batch.rewind()
    replayed = []
    for _ in range(3):
        graph.replay()
        replayed.append(logits.clone())
    error = relative(torch.stack(replayed), eager)
    if not error <= 1e-2:
        raise RuntimeError(f"a captured step differs from an eager one by {error:.3g}")
    batch.rewind()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return error, [a.elapsed_time(b) for a, b in pairwise(events)]


def in_words(row: Row) -> str:
    return (
        f"{row.reader} {row.stores} ({row.implementation}): {row.tokens_per_s:,.0f} tokens/s, {row.step_ms:.2f} ms a step, "
        f"caches {row.cache_bytes / 2**30:.2f} GiB, peak {(row.peak_bytes or 0) / 2**30:.2f} GiB; errors: rows {row.row_error:.1e}, "
        f"attention {row.attention_error:.1e}, logits {row.logits_error:.1e}, replay {row.replay_error or 0:.1e}"
    )


def main() -> int:
    """0, or 1 where a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peers", type=Path, help="a folder with FlashAttention-3, as `quantkv bench` takes it")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, help="tokens of context of each; 32,768, or 64 with --tiny")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tiny", action="store_true", help="2 small layers, for a look at the script itself")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    device, geometry = torch.device(arguments.device), TINY if arguments.tiny else Geometry()
    length = arguments.length or (64 if arguments.tiny else 1 << 15)
    ways = [(QUANTKV, name) for name in arguments.formats]
    if arguments.peers:
        rivals.load_flash3(arguments.peers)
        ways.insert(0, (FLASH3, "bf16"))
    with torch.no_grad():
        model = Model(geometry, device)
        exact, rows, failures = ("bf16", ways[0][0]), [], []
        for reader, stores in ways:
            try:
                rows.append(measure(model, stores, reader, arguments.sequences, length, arguments.steps, exact))
                print(in_words(rows[-1]), flush=True)
            except RuntimeError as error:
                failures.append(f"{reader} {stores}: {error}")
                print(failures[-1], file=sys.stderr, flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if arguments.json:
        result = {
            "device": device_name(device),
            "date": datetime.date.today().isoformat(),
            "versions": versions(),
            "geometry": asdict(geometry),
            "sequences": arguments.sequences,
            "length": length,
            "steps": arguments.steps,
            "end_to_end": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
