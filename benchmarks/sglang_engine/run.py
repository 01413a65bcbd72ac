"""Measures an unmodified SGLang with its own KV cache and with quantkv's: weights at random, Llama-3-8B's geometry.

    python benchmarks/sglang_engine/run.py --out DIR [--jobs smoke,decode] [--types triton,quantkv_int4]

Needs SGLang 0.5.23 with quantkv in the same environment, and a GPU. Each job is an engine in a process of its own; what it finds is a
line of results.jsonl in --out. Steps are timed in SGLang's scheduler, from the results of one step to those of the next. Jobs:

    smoke   a model of two layers: greedy answers of prompts alone, together, again, three of four (which replay the graph of four), and
            from the radix cache; how far those of quantkv_none are those of SGLang's own backend
    decode  Llama-3-8B: prompts of random tokens, each its own, and then steps in which all sequences decode (--decode)
    fit     Llama-3-8B: tokens that fit (--memory), and nothing else
    mix     Llama-3-8B: requests that arrive at random, with mixed lengths (--mix): tokens a second, and latencies
    long    Llama-3-8B: long answers, all at once (--long)
    retract two layers: greedy answers from a pool for a third of them, so that SGLang retracts, beside those from a pool for all
    hybrid  a quarter of Qwen3-Next's layers, of few experts: linear attention in three of four; steps as in decode (--decode)
    drafts  two layers that draft for themselves (STANDALONE): greedy answers beside those without drafts, and tokens accepted

--tiny runs any of them on a CPU: small sizes, float32, no graphs. SGLang's own type there is torch_native.

Types are quantkv's backends, and of SGLang's own `triton`, `fp8` (the same with --kv-cache-dtype fp8_e4m3) and any other name of
--attention-backend. Graphs of prompts are off unless --prompt-graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm_engine"))
import asking
from answers import VOCABULARY, compare
from asking import ask, prompts, steps_of
from random_models import LLAMA_8B, QWEN3_NEXT, write_config
from traffic import mix

if __name__ == "__mp_main__":  # SGLang's scheduler
    import watched

    watched.watch()

SMALL = {"num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 2048}
SMALL_JOBS, ASKED = ("smoke", "retract", "drafts"), ("retract", "drafts")
TINY = {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 512}
TINY_HYBRID = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
TINY_HYBRID |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
TINY_HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
TINY_SIZES = {
    "decode": [(4, 64)],
    "steps": 32,
    "mix": (12, 4.0),
    "mix_prompt": (16, 128),
    "mix_answer": (8, 32),
    "long": (4, 16, 64),
    "asked": (12, 48, 96),
}
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


def geometry(job: str, args: argparse.Namespace) -> dict[str, Any]:
    """The configuration of a job's model."""
    if job == "hybrid":
        return QWEN3_NEXT | (TINY_HYBRID if args.tiny else {})
    return {**(SMALL if job in SMALL_JOBS else LLAMA_8B), **(TINY if args.tiny else {}), "eos_token_id": VOCABULARY}  # no token ends one


def room(job: str, args: argparse.Namespace) -> tuple[int, int]:
    """Sequences that a job runs at once, and tokens of the longest."""
    if job == "mix":
        return 64, args.mix_prompt[1] + args.mix_answer[1]
    if job == "long":
        return args.long[0], sum(args.long[1:])
    if job in ASKED:
        return args.asked[0], sum(args.asked[1:])
    return (8, 1536) if job == "smoke" else (max(count for count, _ in args.decode), max(length for _, length in args.decode))


def engine(job: str, kv_type: str, args: argparse.Namespace, **more: Any) -> Any:
    """An `Engine` of SGLang for this job and this type."""
    import sglang

    small, (sequences, longest) = job in SMALL_JOBS, room(job, args)
    options = {
        "model_path": write_config(args.out / "models" / job, **geometry(job, args)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "dtype": "float32" if args.tiny else args.dtype,
        "context_length": longest + 512,
        "attention_backend": "triton" if kv_type == "fp8" else kv_type,
        "kv_cache_dtype": "fp8_e4m3" if kv_type == "fp8" else "auto",
        "max_running_requests": sequences,
        "max_total_tokens": sequences * (longest + 512) if small or args.tiny else None,
        "mem_fraction_static": 0.3 if small else args.memory,
        "cuda_graph_bs_decode": [*(n for n in GRAPHS if n < sequences), sequences],
        "disable_cuda_graph": args.tiny,
        "disable_prefill_cuda_graph": not args.prompt_graphs,
        "disable_flashinfer_autotune": True,
        "disable_radix_cache": job != "smoke",
        "device": "cpu" if args.tiny else "cuda",
        "port": 30000 + 1000 * args.types.split(",").index(kv_type),  # engines that run at the same time look for others near it
        "random_seed": 0,
        "log_level": "info",
        **more,
    }
    return sglang.Engine(**{name: value for name, value in (options | json.loads(args.extra)).items() if value is not None})


def asked_twice(job: str, kv_type: str, args: argparse.Namespace, steps_file: Path, first: Any) -> dict[str, Any]:
    """The same requests of an engine, and of another in its place that has little room (retract) or drafts (drafts)."""
    count, prompt, answer = args.asked
    inputs = prompts(count, prompt, 13)
    plain = asking.answered(first, steps_file, inputs, answer)
    first.shutdown()
    if job == "retract":
        more = {"max_total_tokens": count * (prompt + answer) // 3, "schedule_conservativeness": 0.3}
    else:
        model = str(args.out / "models" / job)
        more = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": model, "speculative_num_steps": 3}
        more |= {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    return asking.beside(plain, asking.answered(engine(job, kv_type, args, **more), steps_file, inputs, answer))


def measure(job: str, kv_type: str, args: argparse.Namespace) -> dict[str, Any]:
    """What one engine finds."""
    name = args.out / f"{job}-{kv_type}"
    facts_file, steps_file = name.with_suffix(".facts.json"), name.with_suffix(".steps")
    facts_file.unlink(missing_ok=True), steps_file.unlink(missing_ok=True)
    steps_file.touch()
    for variable, value in OFFLINE.items():
        os.environ.setdefault(variable, value)
    os.environ["QUANTKV_BENCH_FACTS"], os.environ["QUANTKV_BENCH_STEPS"] = str(facts_file), str(steps_file)
    if args.tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # SGLang's own kernels beside drafts
    if not kv_type.startswith("quantkv_"):
        os.environ["SGLANG_PLUGINS"] = "none"
    start = time.perf_counter()
    llm = engine(job, kv_type, args)
    found = {"job": job, "type": kv_type, "start_s": round(time.perf_counter() - start, 1), **json.loads(facts_file.read_text())}
    print("STARTED", json.dumps(found), flush=True)
    found["kv_bytes_per_token"] = round(found["kv_bytes"] / found["kv_tokens"], 1)
    if job == "smoke":
        found |= asking.smoke(llm)
        found["graph"] = all(step[4] for step in steps_of(steps_file) if step[1] == "decode")
    if job == "mix":
        ask(llm, prompts(2, 256, 5), 8)
        arrivals = mix(args.mix[0], args.mix[1], args.mix_prompt, args.mix_answer)
        found |= asking.mixed(llm, steps_file, arrivals, args.mix[1])
    if job == "long":
        found |= asking.long(llm, steps_file, *args.long)
    if job in ASKED:
        found |= asked_twice(job, kv_type, args, steps_file, llm)
    if job in ("decode", "hybrid"):
        ask(llm, prompts(2, 256, 5), 8)
        found["found"] = []
        for sequences, context in args.decode:
            try:
                found["found"].append(asking.decode(llm, steps_file, sequences, context, args.steps, found["kv_tokens"]))
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
    parser.add_argument("--jobs", default="smoke,decode", help="of those above, separated by commas")
    parser.add_argument("--types", default="triton,fp8,quantkv_none,quantkv_int4,quantkv_4bit")
    parser.add_argument("--decode", default="64x8192,8x32768", help="sequences x context")
    parser.add_argument("--steps", type=int, default=128, help="steps in which all sequences decode")
    parser.add_argument("--mix", default="96x6", help="requests x requests that arrive in a second")
    parser.add_argument("--mix-prompt", default="512x8192", help="tokens of its prompts, the least x the most")
    parser.add_argument("--mix-answer", default="64x512", help="likewise of its answers")
    parser.add_argument("--long", default="64x256x4096", help="requests x tokens of a prompt x of an answer")
    parser.add_argument("--asked", default="16x200x800", help="likewise of the jobs retract and drafts")
    parser.add_argument("--dtype", default="bfloat16", help="what the model computes in")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory for weights and pages")
    parser.add_argument("--prompt-graphs", action="store_true", help="SGLang's graphs of prompts too")
    parser.add_argument("--together", type=int, default=1, help="engines of the job smoke that run at the same time")
    parser.add_argument("--limit", type=float, default=240, help="seconds of one engine")
    parser.add_argument("--deadline", type=float, default=1e9, help="start no engine later than this many seconds")
    parser.add_argument("--tail", type=int, default=4000, help="characters of a log that are printed where an engine fails")
    parser.add_argument("--extra", default="{}", help="JSON with more arguments of SGLang's Engine")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # job:type, in the process of its engine
    args = parser.parse_args()
    args.decode = [tuple(map(int, size.split("x"))) for size in args.decode.split(",")]
    for name, kind in (("mix", float), ("mix_prompt", int), ("mix_answer", int), ("long", int), ("asked", int)):
        setattr(args, name, tuple(map(kind, getattr(args, name).split("x"))))
    args.mix = int(args.mix[0]), args.mix[1]
    for name, size in TINY_SIZES.items() if args.tiny else ():
        setattr(args, name, size)
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
