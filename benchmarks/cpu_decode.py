"""Milliseconds a token on the CPU: one sequence decodes over each kind of cache in turn, in one run.

    python benchmarks/cpu_decode.py [--model DIR_OR_GGUF] [--contexts 2048 16384] [--formats int8 int4] [--json FILE]

Each cache is filled with the same random keys and values. Then, round after round, each decodes a few tokens; a cache's figure is the
median of its tokens, and its ratio the median, over rounds, of its time in a round over DynamicCache's in the same round, so that what
else the machine does hits all alike. Times are of the wall and of the processor (of all threads; those of OpenMP count while they wait).
quanto and hqq (transformers' QuantizedCache, 4 bits) run where they are installed. NAME@reference: without the compiled kernels.
--start measures, in place of that, what the kernels cost a process that compiles them, and one that finds them compiled.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers import QuantizedCache as TransformersQuantizedCache

from quantkv import implementations
from quantkv.cli.models import load
from quantkv.integrations.transformers import QuantizedCache, QuantizedLayer

PEERS = {"quanto 4-bit": ("quanto", 0), "hqq 4-bit": ("hqq", 1)}  # backend, quantization axis
BASELINE = "DynamicCache"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PLAIN = "@reference"
START = """
import time
import torch
from quantkv.testing import SampleBatch
before = time.process_time()
import numba
loaded = time.process_time()
b = SampleBatch.make("int4", (1,), (5,))
b.cache.write(b.key, b.value, b.slots, implementation="cpu")
b.attend(implementation="cpu")
print(loaded - before, time.process_time() - loaded)
"""


def caches(model: PreTrainedModel, formats: list[str]) -> dict[str, tuple[str, Callable[[], Cache]]]:
    """Name -> attention implementation, and what makes an empty cache."""
    made = {BASELINE: ("sdpa", lambda: DynamicCache(config=model.config))}
    for name in formats:
        made[name] = ("quantkv", lambda name=name: QuantizedCache(model.config, name.removesuffix(PLAIN)))
    for name, (backend, axis) in PEERS.items():
        make = lambda backend=backend, axis=axis: TransformersQuantizedCache(
            backend, model.config, nbits=4, axis_key=axis, axis_value=axis, q_group_size=64, residual_length=128
        )
        try:
            make()
        except ImportError:
            print(f"{name}: not installed, left out")
        else:
            made[name] = ("sdpa", make)
    return made


def starts() -> dict[str, dict[str, float]]:
    """Seconds of a processor to load numba, and then for the first write and attention, without and with compiled kernels on the disk."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-c", START]
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        outputs = [subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    names = "numba is loaded", "first write and attention"
    return {when: dict(zip(names, map(float, out.split()))) for when, out in zip(("compiling", "compiled before"), outputs)}


def fill(cache: Cache, config: Any, context: int) -> None:
    """The same rows in every layer of every cache: what they are changes no time."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(1, config.num_key_value_heads, context, size, generator=generator) for _ in range(2))
    for i in range(config.num_hidden_layers):
        if isinstance(cache, QuantizedCache):
            store(cache.layers[i], key, value)
        else:
            cache.update(key, value, i)


def store(layer: QuantizedLayer, key: torch.Tensor, value: torch.Tensor) -> None:
    """What `QuantizedLayer.attend` does with a pass's rows, without queries."""
    cache_positions = layer.sequences.cache_positions
    layer.lazy_initialization(key, value)
    cache_positions.enter(layer.seen, key.shape[0], key.shape[2], None)
    layer.make_room(layer.sequences.table.num_pages, [])
    layer.store(key, value)
    layer.turn = cache_positions.turn + 1
    cache_positions.leave()


@torch.inference_mode()
def measure(
    model: PreTrainedModel, variants: dict[str, tuple[str, Callable[[], Cache]]], context: int, rounds: int, tokens: int
) -> dict[str, list[list[dict[str, float]]]]:
    """Milliseconds of each token by each clock, `[rounds][tokens]` for each variant."""
    ids = torch.randint(0, model.config.vocab_size, (1, rounds * tokens), generator=torch.Generator().manual_seed(0))
    filled, times, on_cpu = {}, {name: [] for name in variants}, implementations.ON_CPU
    for name, (_, make) in variants.items():
        filled[name] = make()
        fill(filled[name], model.config, context)
    for r in range(rounds):
        for name, (attention, _) in variants.items():
            model.set_attn_implementation(attention)
            implementations.ON_CPU = ("reference",) if name.endswith(PLAIN) else on_cpu
            taken = []
            for i in range(r * tokens, (r + 1) * tokens):
                start = {clock: now() for clock, now in CLOCKS.items()}
                model(ids[:, i : i + 1], past_key_values=filled[name])
                taken.append({clock: 1e3 * (now() - start[clock]) for clock, now in CLOCKS.items()})
            times[name].append(taken)
    implementations.ON_CPU = on_cpu
    return times


def summarize(times: dict[str, list[list[dict[str, float]]]]) -> list[dict[str, Any]]:
    """One row a variant. The first token of a turn finds the other variants' data in the processor's caches: it does not count."""
    rows = [{"cache": name} for name in times]
    for clock in CLOCKS:
        in_round = {name: [statistics.median(t[clock] for t in taken[1:]) for taken in turns] for name, turns in times.items()}
        for row in rows:
            turns = in_round[row["cache"]]
            row[clock] = {
                "ms": statistics.median(t[clock] for taken in times[row["cache"]] for t in taken[1:]),
                "ms_least": min(turns),
                "ratio": statistics.median(a / b for a, b in zip(turns, in_round[BASELINE])),
            }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or GGUF file; SmolLM2-135M-Instruct if left out")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--formats", nargs="+", default=["int4", "int4@reference", "levels4", "int8", "none"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=8, help="tokens of a turn, at least 2")
    parser.add_argument("--start", action="store_true", help="measure the first call instead")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.start:
        found = {"seconds of a processor": starts()}
        print(found)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
        return
    if args.tokens < 2:
        parser.error("--tokens: at least 2 are needed, as the first of a turn does not count")
    model, runs = load(args.model).model, []
    about = {"threads": torch.get_num_threads(), "torch": torch.__version__, "processor": torch.backends.cpu.get_cpu_capability()}
    about |= {"machine": platform.machine(), "numba": importlib.util.find_spec("numba") is not None}
    for context in args.contexts:
        before = os.getloadavg()[0]
        rows = summarize(measure(model, caches(model, args.formats), context, args.rounds, args.tokens))
        runs.append({"context": context, "load": [before, os.getloadavg()[0]], "rows": rows})
        print(f"context {context}, {about}, load {runs[-1]['load']}")
        print(f"{'cache':<16}" + "".join(f"{clock + ', ms':>12}{'least':>9}{'of ' + BASELINE:>20}" for clock in CLOCKS))
        for row in rows:
            numbers = (f"{row[c]['ms']:>12.1f}{row[c]['ms_least']:>9.1f}{row[c]['ratio']:>20.3f}" for c in CLOCKS)
            print(f"{row['cache']:<16}" + "".join(numbers), flush=True)
    if args.json:
        args.json.write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
