"""Milliseconds a token on the CPU: one sequence decodes over each kind of cache in turn, in one run.

    python benchmarks/cpu_decode.py [--model DIR_OR_GGUF] [--context 2048] [--formats int8 int4] [--json FILE]

Each cache is filled with the same random context. Then, round after round, each decodes a few tokens; a cache's figure is the median
of its tokens, and its ratio the median, over rounds, of its time in a round over DynamicCache's in the same round, so that
what else the machine does hits all alike. quanto and hqq (transformers' QuantizedCache, 4 bits) run where they are installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers import QuantizedCache as TransformersQuantizedCache

from quantkv.cli.models import load
from quantkv.integrations.transformers import QuantizedCache

PEERS = {"quanto 4-bit": ("quanto", 0), "hqq 4-bit": ("hqq", 1)}  # backend, quantization axis
PREFILL_CHUNK = 512
BASELINE = "DynamicCache"


def caches(model: PreTrainedModel, formats: list[str]) -> dict[str, tuple[str, Callable[[], Cache]]]:
    """Name -> attention implementation, and what makes an empty cache."""
    made = {BASELINE: ("sdpa", lambda: DynamicCache(config=model.config))}
    for name in formats:
        made[name] = ("quantkv", lambda name=name: QuantizedCache(model.config, name))
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


@torch.inference_mode()
def measure(
    model: PreTrainedModel, variants: dict[str, tuple[str, Callable[[], Cache]]], context: int, rounds: int, tokens: int
) -> dict[str, list[list[float]]]:
    """Milliseconds of each token, `[rounds][tokens]` for each variant."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, context + rounds * tokens), generator=generator)
    filled = {}
    for name, (attention, make) in variants.items():
        model.set_attn_implementation(attention)
        cache = filled[name] = make()
        for start in range(0, context, PREFILL_CHUNK):
            model(ids[:, start : min(start + PREFILL_CHUNK, context)], past_key_values=cache, logits_to_keep=1)
    times = {name: [] for name in variants}
    for r in range(rounds):
        for name, (attention, _) in variants.items():
            model.set_attn_implementation(attention)
            taken = []
            for i in range(context + r * tokens, context + (r + 1) * tokens):
                start = time.perf_counter()
                model(ids[:, i : i + 1], past_key_values=filled[name])
                taken.append(1e3 * (time.perf_counter() - start))
            times[name].append(taken)
    return times


def summarize(times: dict[str, list[list[float]]]) -> list[dict[str, float | str]]:
    """One row a variant. The first token of a turn finds the other variants' data in the processor's caches: it does not count."""
    in_round = {name: [statistics.median(taken[1:]) for taken in turns] for name, turns in times.items()}
    return [
        {
            "cache": name,
            "ms": statistics.median(t for taken in times[name] for t in taken[1:]),
            "ms_least": min(turns),
            "ratio": statistics.median(a / b for a, b in zip(turns, in_round[BASELINE])),
        }
        for name, turns in in_round.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or GGUF file; SmolLM2-135M-Instruct if left out")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--formats", nargs="+", default=["none", "int8", "int4", "k8v4", "int2", "fp8_token", "tq4"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=8, help="tokens of a turn, at least 2")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.tokens < 2:
        parser.error("--tokens: at least 2 are needed, as the first of a turn does not count")
    model = load(args.model).model
    rows = summarize(measure(model, caches(model, args.formats), args.context, args.rounds, args.tokens))
    print(f"context {args.context}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'cache':<14}{'ms a token':>12}{'least':>9}{'of ' + BASELINE:>20}")
    for row in rows:
        print(f"{row['cache']:<14}{row['ms']:>12.1f}{row['ms_least']:>9.1f}{row['ratio']:>20.3f}")
    if args.json:
        args.json.write_text(json.dumps({"context": args.context, "threads": torch.get_num_threads(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
