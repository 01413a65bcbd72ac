"""Measures an unmodified SGLang with its own KV cache and with quantkv's: weights at random, Llama-3-8B's geometry.

    python benchmarks/sglang_engine/run.py --out DIR [--jobs smoke,decode] [--types triton,quantkv_int4]

Needs SGLang 0.5.23 with quantkv in the same environment, and a GPU. Each job is an engine in a process of its own; what it finds is a
line of results.jsonl in --out. Steps are timed in SGLang's scheduler, from the results of one step to those of the next. Jobs:

    smoke   a model of two layers: greedy answers of prompts alone, together, again, three of four (which replay the graph of four), and
            from the radix cache; how far those of quantkv_none are those of SGLang's own backend
    decode  Llama-3-8B: prompts of random tokens, each its own, and then steps in which all sequences decode (--decode)
    fit     Llama-3-8B: tokens that fit (--memory), and nothing else

Types are quantkv's backends, and of SGLang's own `triton`, `fp8` (the same with --kv-cache-dtype fp8_e4m3) and any other name of
--attention-backend. Graphs of prompts are off unless --prompt-graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm_engine"))
from answers import Answer, compare
from answers import prompts as given_prompts
from random_models import LLAMA_8B, write_config

if __name__ == "__mp_main__":  # SGLang's scheduler
    import watched

    watched.watch()

SMALL = {"num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 2048}
GRAPHS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "SGLANG_HOST_IP": "127.0.0.1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def engine(job: str, kv_type: str, out: Path, args: argparse.Namespace) -> Any:
    """An `Engine` of SGLang for this job and this type."""
    import sglang

    small = job == "smoke"
    sequences = 8 if small else max(shape[0] for shape in args.decode)
    options = {
        "model_path": write_config(out / "models" / ("small" if small else "llama"), **(SMALL if small else LLAMA_8B)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "dtype": "bfloat16",
        "context_length": 2048 if small else max(length for _, length in args.decode) + 512,
        "attention_backend": "triton" if kv_type == "fp8" else kv_type,
        "kv_cache_dtype": "fp8_e4m3" if kv_type == "fp8" else "auto",
        "max_running_requests": sequences,
        "max_total_tokens": 16384 if small else None,
        "mem_fraction_static": 0.3 if small else args.memory,
        "cuda_graph_bs_decode": [*(n for n in GRAPHS if n < sequences), sequences],
        "disable_prefill_cuda_graph": not args.prompt_graphs,
        "disable_flashinfer_autotune": True,
        "disable_radix_cache": not small,
        "device": args.device,
        "port": 30000 + 1000 * args.types.split(",").index(kv_type),  # engines that run at the same time look for others near it
        "random_seed": 0,
        "log_level": "info",
    }
    return sglang.Engine(**{name: value for name, value in (options | json.loads(args.extra)).items() if value is not None})


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts as SGLang takes them."""
    return [given["prompt_token_ids"] for given in given_prompts(count, length, seed)]


def ask(llm: Any, inputs: list[list[int]], tokens: int, logprobs: bool = False) -> list[dict]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return llm.generate(input_ids=inputs, sampling_params=sampling, return_logprob=logprobs)


def steps_of(file: Path) -> list[list]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def greedy(llm: Any, inputs: list[list[int]], tokens: int = 32) -> tuple[list[Answer], list[int]]:
    """Greedy answers of requests that are asked together, and how many tokens of each prompt were in the radix cache."""
    outputs = ask(llm, inputs, tokens, logprobs=True)
    infos = [output["meta_info"] for output in outputs]
    logs = [[float(entry[0]) for entry in info["output_token_logprobs"]] for info in infos]
    return [(list(output["output_ids"]), of) for output, of in zip(outputs, logs)], [info["cached_tokens"] for info in infos]


def smoke(llm: Any) -> dict[str, Any]:
    """Two layers: the same questions in several ways."""

    def afresh(*given: list[int]) -> list[Answer]:
        llm.flush_cache()
        return greedy(llm, [*given])[0]

    inputs = [prompts(1, n, n)[0] for n in (17, 64, 200, 333)]
    alone = [answer for given in inputs for answer in afresh(given)]
    four, again = afresh(*inputs), afresh(*inputs)
    hit, cached = greedy(llm, inputs)
    return {
        "again": compare(four, again),
        "three_of_four": compare(afresh(*inputs[:3]), four),
        "alone": compare(alone, four),
        "radix": {"cached": cached, **compare(again, hit)},
        "answers": four,
    }


def decode(llm: Any, steps_file: Path, sequences: int, context: int, steps: int, kv_tokens: int) -> dict[str, Any]:
    """Prompts, and steps in which all sequences decode: as many sequences as fit, of `sequences`."""
    new = steps + 24
    fit = min(sequences, kv_tokens // (context + new + 64))
    began = len(steps_of(steps_file))
    start = time.perf_counter()
    ask(llm, prompts(fit, context, 7), new)
    seconds, seen = time.perf_counter() - start, steps_of(steps_file)[began:]
    whole = [step for step in seen if step[1] == "decode" and step[2] == fit][8:-8]
    times = [after[0] - before[0] for before, after in pairwise(whole)]
    mean = (whole[-1][0] - whole[0][0]) / len(times)
    prefill = [step for step in seen if step[1] == "prefill"]
    return {
        "sequences": fit,
        "asked": sequences,
        "context": context,
        "tokens_per_s": round(fit / mean, 1),
        "step_ms": round(mean * 1e3, 3),
        "step_ms_median": round(statistics.median(times) * 1e3, 3),
        "steps": len(times),
        "graph": all(step[4] for step in whole),
        "prefill_steps": len(prefill),
        "prefill_tokens_per_s": round(sum(s[3] for s in prefill[1:]) / (prefill[-1][0] - prefill[0][0]), 1) if len(prefill) > 2 else None,
        "seconds": round(seconds, 1),
    }


def measure(job: str, kv_type: str, args: argparse.Namespace) -> dict[str, Any]:
    """What one engine finds."""
    name = args.out / f"{job}-{kv_type}"
    facts_file, steps_file = name.with_suffix(".facts.json"), name.with_suffix(".steps")
    facts_file.unlink(missing_ok=True), steps_file.unlink(missing_ok=True)
    steps_file.touch()
    for variable, value in OFFLINE.items():
        os.environ.setdefault(variable, value)
    os.environ["QUANTKV_BENCH_FACTS"], os.environ["QUANTKV_BENCH_STEPS"] = str(facts_file), str(steps_file)
    if not kv_type.startswith("quantkv_"):
        os.environ["SGLANG_PLUGINS"] = "none"
    start = time.perf_counter()
    llm = engine(job, kv_type, args.out, args)
    found = {"job": job, "type": kv_type, "start_s": round(time.perf_counter() - start, 1), **json.loads(facts_file.read_text())}
    print("STARTED", json.dumps(found), flush=True)
    if job == "smoke":
        found |= smoke(llm)
        found["graph"] = all(step[4] for step in steps_of(steps_file) if step[1] == "decode")
    if job == "decode":
        ask(llm, prompts(2, 256, 5), 8)
        found["found"] = []
        for sequences, context in args.decode:
            try:
                found["found"].append(decode(llm, steps_file, sequences, context, args.steps, found["kv_tokens"]))
            except Exception as error:  # the others are still worth having
                traceback.print_exc()
                found["found"].append({"sequences": sequences, "context": context, "error": repr(error)[:500]})
            print("FOUND", json.dumps(found["found"][-1]), flush=True)
    return found


def run_one(job: str, kv_type: str, args: argparse.Namespace) -> dict[str, Any]:
    """A job in a process of its own, whose output goes to a log."""
    log, result = args.out / f"{job}-{kv_type}.log", args.out / f"{job}-{kv_type}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--one", f"{job}:{kv_type}"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(args.limit)
            failed = None if status == 0 else f"status {status}"
        except subprocess.TimeoutExpired:
            failed = f"no end after {args.limit:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its scheduler too
        process.wait()
    if result.exists():
        return json.loads(result.read_text())
    print(f"{job} {kv_type}: {failed}; the end of its log:\n{log.read_text(errors='replace')[-args.tail :]}", flush=True)
    return {"job": job, "type": kv_type, "failed": failed}


def tell(found: dict[str, Any], results: Path, own: dict[str, Any] | None) -> None:
    """Print and keep what an engine found. own: what the smoke test of SGLang's own backend found."""
    if own is not None and "answers" in found and found is not own:
        found["against_own"] = compare(own["answers"], found["answers"])
    print(json.dumps({name: value for name, value in found.items() if name not in ("answers", "served", "decode_graphs")}), flush=True)
    with results.open("a") as file:
        file.write(json.dumps(found) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", default="smoke,decode", help="of smoke, decode, fit, separated by commas")
    parser.add_argument("--types", default="triton,fp8,quantkv_none,quantkv_int4,quantkv_4bit")
    parser.add_argument("--decode", default="64x8192,8x32768", help="sequences x context")
    parser.add_argument("--steps", type=int, default=128, help="steps in which all sequences decode")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory for weights and pages")
    parser.add_argument("--prompt-graphs", action="store_true", help="SGLang's graphs of prompts too")
    parser.add_argument("--together", type=int, default=1, help="engines of the job smoke that run at the same time")
    parser.add_argument("--limit", type=float, default=240, help="seconds of one engine")
    parser.add_argument("--deadline", type=float, default=1e9, help="start no engine later than this many seconds")
    parser.add_argument("--tail", type=int, default=4000, help="characters of a log that are printed where an engine fails")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--extra", default="{}", help="JSON with more arguments of SGLang's Engine")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # job:type, in the process of its engine
    args = parser.parse_args()
    args.decode = [tuple(map(int, size.split("x"))) for size in args.decode.split(",")]
    args.out = args.out.absolute()
    return args


def main() -> None:
    args, start = arguments(), time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        job, _, kv_type = args.one.partition(":")
        found = measure(job, kv_type, args)
        (args.out / f"{job}-{kv_type}.json").write_text(json.dumps(found))
        os._exit(0)  # the caller ends its scheduler
    own = None
    for job in args.jobs.split(","):

        def one(kv_type: str, job: str = job) -> dict[str, Any]:
            if time.perf_counter() - start > args.deadline:
                return {"job": job, "type": kv_type, "failed": f"not started, {args.deadline:.0f} s are over"}
            return run_one(job, kv_type, args)

        with ThreadPoolExecutor(args.together if job == "smoke" else 1) as engines:
            for found in engines.map(one, args.types.split(",")):
                if found["type"] == "triton" and "answers" in found:
                    own = found
                tell(found, args.out / "results.jsonl", own)
    print(f"{time.perf_counter() - start:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
