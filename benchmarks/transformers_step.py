"""One token through `model.generate` of transformers, and a long prompt in chunks, with transformers' own caches and quantized ones:

    python benchmarks/transformers_step.py [--shapes 1x2048 1x32768 4x32768] [--formats none int8 int4] [--json FILE]
    python benchmarks/transformers_step.py --tiny --device cpu

Prints, for each cache, the median milliseconds of a token (from one call of the stopping criteria to the next: all of generate is in it),
what the first tokens took together (compilation included), and the peak memory; then seconds of a prompt, cold and warm. The model has
Llama-3-8B's geometry and random weights. Contexts are filled with random keys and values. Ways to decode:

    eager      model.generate(disable_compile=True)
    compiled   as generate does by itself with a cache of fixed size: torch.compile, "reduce-overhead"
    captured   use_cuda_graphs(model): a CUDA graph of the eager pass
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache, StoppingCriteria, StoppingCriteriaList

from quantkv.bench.run import device_name, versions
from quantkv.integrations.transformers import QuantizedCache, use_cuda_graphs, use_quantkv_attention

EAGER, COMPILED, CAPTURED = "eager", "compiled", "captured"
CHUNK = 2048  # tokens of a prompt at once
FILL = 8192  # tokens of a context at once


@dataclass
class Step:
    """Decoding with one cache. step_ms: median; first_s: until the first step that took no more than twice that."""

    cache: str
    way: str
    sequences: int
    context: int
    step_ms: float
    fastest_ms: float
    slowest_ms: float
    first_s: float
    cache_gib: float
    peak_gib: float
    tokens: list[int]


@dataclass
class Prompt:
    """A prompt in chunks: seconds of the first time, and of the second."""

    cache: str
    tokens: int
    cold_s: float
    warm_s: float


class Clock(StoppingCriteria):
    """Notes when each token was there."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times = device, [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        _wait(self.device)
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def build(arguments: argparse.Namespace, device: torch.device) -> LlamaForCausalLM:
    sizes = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "mlp": 128, "vocabulary": 128} if arguments.tiny else vars(arguments)
    config = LlamaConfig(
        num_hidden_layers=sizes["layers"],
        hidden_size=sizes["hidden"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        intermediate_size=sizes["mlp"],
        vocab_size=sizes["vocabulary"],
        max_position_embeddings=1 << 17,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        dtype=torch.bfloat16,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    return model


def make(name: str, model: LlamaForCausalLM, tokens: int, static: bool) -> Any:
    """An empty cache, and the attention that reads it."""
    if name in ("DynamicCache", "StaticCache"):
        model.set_attn_implementation("sdpa")
        return DynamicCache(config=model.config) if name == "DynamicCache" else StaticCache(config=model.config, max_cache_len=tokens)
    use_quantkv_attention(model)
    return QuantizedCache(model.config, name, num_tokens=tokens if static else 0)


def fill(cache: Any, model: LlamaForCausalLM, sequences: int, context: int) -> None:
    """Random keys and values, as many as a prompt would leave."""
    config, device = model.config, model.device
    generator = torch.Generator(device).manual_seed(0)
    size = config.hidden_size // config.num_attention_heads
    for start in range(0, context, FILL):
        count = min(FILL, context - start)
        for i, layer in enumerate(model.model.layers):
            shape = (sequences, config.num_key_value_heads, count, size)
            key, value = (torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2))
            rows = cache.update(key, value, i)
            if isinstance(cache, QuantizedCache):
                query = torch.randn(sequences, config.num_attention_heads, count, size, device=device, dtype=torch.bfloat16)
                attend = transformers.AttentionInterface()[config._attn_implementation]
                attend(layer.self_attn, query, *rows, None, scaling=layer.self_attn.scaling)
    _wait(device)


def decode(name: str, way: str, model: LlamaForCausalLM, sequences: int, context: int, steps: int) -> Step:
    device = model.device
    vars(model).pop("get_compiled_call", None)
    if way == CAPTURED:
        use_cuda_graphs(model)
    cache = make(name, model, context + steps + 8, way != EAGER)
    fill(cache, model, sequences, context)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    ids = torch.ones(sequences, context + 1, dtype=torch.long, device=device)
    clock = Clock(device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=steps,
        do_sample=False,
        disable_compile=way == EAGER,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    ms = [1e3 * (b - a) for a, b in zip(clock.times, clock.times[1:])]
    late = ms[len(ms) // 2 :]
    median = statistics.median(late)
    first = next((i for i, m in enumerate(ms) if m <= 2 * median), len(ms))
    on_gpu = device.type == "cuda"
    return Step(
        name,
        way,
        sequences,
        context,
        median,
        min(late),
        max(late),
        sum(ms[:first]) / 1e3,
        _bytes(cache) / 2**30,
        torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        out[0, context + 1 : context + 9].tolist(),
    )


def _bytes(cache: Any) -> int:
    if isinstance(cache, QuantizedCache):
        return cache.allocated_nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def prompt(name: str, model: LlamaForCausalLM, tokens: int, chunk: int, profiled: bool) -> Prompt:
    device, times = model.device, []
    ids = torch.randint(1, model.config.vocab_size, (1, tokens), device=device)
    for _ in range(2):
        cache = make(name, model, tokens + 8, False)
        _wait(device)
        start = time.perf_counter()
        _run(model, cache, ids, chunk)
        _wait(device)
        times.append(time.perf_counter() - start)
    if profiled and device.type == "cuda":
        _profile(name, model, ids, chunk)
    return Prompt(name, tokens, *times)


def _run(model: LlamaForCausalLM, cache: Any, ids: torch.Tensor, chunk: int) -> None:
    for part in ids.split(chunk, 1):
        model(part, past_key_values=cache, logits_to_keep=1)


def _profile(name: str, model: LlamaForCausalLM, ids: torch.Tensor, chunk: int) -> None:
    """Where the time of the last chunks goes."""
    cache = make(name, model, ids.shape[1] + 8, False)
    _run(model, cache, ids[:, : -2 * chunk], chunk)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        _run(model, cache, ids[:, -2 * chunk :], chunk)
        _wait(model.device)
    for key in ("self_cuda_time_total", "self_cpu_time_total"):
        print(f"--- {name}, the last two chunks, by {key}")
        print(profile.key_averages().table(sort_by=key, row_limit=14, max_name_column_width=70), flush=True)


def attempt(results: list[Any], what: str, call: Callable[[], Any]) -> None:
    """One failure does not lose the run."""
    start = time.perf_counter()
    try:
        result = call()
        results.append(result)
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(result).items()}
        print(f"{what}: {shown} ({time.perf_counter() - start:.1f} s)", flush=True)
    except Exception:
        print(f"FAILED {what} ({time.perf_counter() - start:.1f} s)\n{traceback.format_exc()}", flush=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    """0, or 1 where a way failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", default=["1x32768", "1x2048", "4x32768"], help="sequences x tokens of context")
    parser.add_argument("--formats", nargs="+", default=["int4", "int8", "none"])
    parser.add_argument("--ways", nargs="+", default=[CAPTURED, EAGER, COMPILED], choices=[CAPTURED, EAGER, COMPILED])
    parser.add_argument("--steps", type=int, default=40, help="tokens to generate")
    parser.add_argument("--prompt", type=int, default=1 << 15, help="tokens of the prompt that is timed; 0: none")
    parser.add_argument("--chunk", type=int, default=CHUNK)
    parser.add_argument("--profile", nargs="*", default=[], help="caches whose prompt is profiled: DynamicCache, int4")
    parser.add_argument("--budget", type=float, default=280, help="seconds after which nothing more is begun")
    parser.add_argument("--tiny", action="store_true", help="a small model and short contexts, for a look at the script itself")
    for name, value in {"layers": 32, "hidden": 4096, "heads": 32, "kv-heads": 8, "mlp": 14336, "vocabulary": 128256}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    device, began = torch.device(arguments.device), time.perf_counter()
    if arguments.tiny:
        arguments.shapes, arguments.prompt, arguments.chunk, arguments.steps = ["1x64", "2x48"], 256, 64, 12
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes]
    model = build(arguments, device)
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e9:.2f}e9 parameters, {time.perf_counter() - began:.1f} s", flush=True)
    plan = [(f"prompt {name}", lambda n=name: prompt(n, model, arguments.prompt, arguments.chunk, n in arguments.profile))
            for name in ["DynamicCache", *arguments.formats] if arguments.prompt]  # fmt: skip
    for way in arguments.ways:
        for sequences, context in shapes:
            own = {EAGER: ["DynamicCache"], COMPILED: ["StaticCache"], CAPTURED: []}[way]
            for name in [*arguments.formats, *own]:
                what = f"{way} {name} {sequences} x {context}"
                plan.append((what, lambda a=(name, way, model, sequences, context, arguments.steps): decode(*a)))
    results, missing = [], []
    with torch.no_grad():
        for what, call in plan:
            if time.perf_counter() - began > arguments.budget:
                missing.append(what)
            else:
                attempt(results, what, call)
    if missing:
        print(f"not begun after {arguments.budget:.0f} s: {'; '.join(missing)}", file=sys.stderr)
    if arguments.json:
        about = {"device": device_name(device), "versions": {**versions(), "transformers": transformers.__version__}}
        rows = [{"kind": type(result).__name__, **asdict(result)} for result in results]
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({**about, "not_begun": missing, "results": rows}, indent=1) + "\n")
    return int(len(results) + len(missing) < len(plan))


if __name__ == "__main__":
    sys.exit(main())
