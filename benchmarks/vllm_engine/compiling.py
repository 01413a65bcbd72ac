"""What an unmodified vLLM compiles after its start, with quantkv's pages: nothing, or a line says what.

    python benchmarks/vllm_engine/compiling.py --out DIR [--models llama,gpt_oss] [--blocks 16,64] [--types quantkv_int4]

Needs vLLM 0.33 with quantkv in the same environment, and a GPU. No network: weights at random, four layers, real heads and windows. Each
model, block size and type is an engine in a process of its own, `--workers` at a time; its log is in DIR. Then come requests of many
lengths, one after the other and together, in chunks and from the prefix cache, so that steps mix decode, short and long prompts.

vLLM's monitor of kernels is active from the end of the start, set to raise. Here it is asked to go on, so that a line names all that it
saw, and the exit code is 1 if a kernel of quantkv is among them; `--raise` lets it raise. It sees Triton; what NVRTC compiles is counted
beside it. Kernels of vLLM's own that compile late are listed, and do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from offline import set_environment
from random_models import DEEPSEEK_V3

LENGTH, TOKENS, SEQS = 2500, 1024, 16  # positions; tokens and sequences of a step, at most
BASE = {
    "dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
}
GEMMA = {
    "head_dim": 256,
    "sliding_window": 1024,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
MODELS = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "gemma3": GEMMA
    | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attention_bias": True,
        "rope_theta": 150000.0,
        "swiglu_limit": 7.0,
    },
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 1024},
    "qwen2": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "gemma2": GEMMA
    | {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "num_attention_heads": 16,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "phi3": {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 3072,
        "num_key_value_heads": 32,
        "head_dim": None,
        "sliding_window": 2047,
        "original_max_position_embeddings": 32768,
    },
    "deepseek": {name: value for name, value in DEEPSEEK_V3.items() if name not in ("num_hidden_layers", "first_k_dense_replace")}
    | {"first_k_dense_replace": 4, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": None},
}


def own_kernels() -> dict[str, Any]:
    """quantkv's Triton kernels that are loaded, by name."""
    import triton

    modules = [module for name, module in list(sys.modules.items()) if name.startswith("quantkv.")]
    return {x.__name__: x for module in modules for x in vars(module).values() if isinstance(x, triton.JITFunction)}


def watch(stop: bool) -> tuple[list[str], list[str]]:
    """Lists that take the names of what is compiled from now on: by Triton and whatever else vLLM's monitor sees, and by NVRTC for
    quantkv. stop: the monitor raises, as it is set to."""
    from vllm.utils import jit_monitor

    from quantkv.implementations.hopper import prefill, write
    from quantkv.implementations.hopper.decode import warps

    seen, by_nvrtc, known = [], [], set()
    report = jit_monitor._handle_jit_event

    def reported(*, backend: str, event: str, fn_name: str, detail: str | None = None) -> None:
        seen.append(name := fn_name.split(".")[-1])
        print(f"COMPILED {backend} {event} {fn_name} {detail}", flush=True)
        if name in (own := own_kernels()):  # what it was compiled for, this one last: which argument makes the difference
            for caches in own[name].device_caches.values():
                print(*(f"KEY {key}" for key in caches[0]), sep="\n", flush=True)
        traceback.print_stack(limit=14)
        if stop:
            report(backend=backend, event=event, fn_name=fn_name, detail=detail)

    jit_monitor._handle_jit_event = reported
    compile_cubin = warps.compile_cubin

    def compiled(source: Path, macros: dict, *rest) -> bytes:
        key = source, str(sorted(macros.items(), key=str))
        if key not in known:
            known.add(key)
            by_nvrtc.append(source.name)
            print(f"NVRTC {source.name} {macros}", flush=True)
        return compile_cubin(source, macros, *rest)

    for module in (warps, prefill, write):
        module.compile_cubin = compiled
    return seen, by_nvrtc


def ask(engine, requests: list[tuple[list[int], int]], apart: int, rng: random.Random) -> int:
    """Requests (prompt, new tokens), up to `apart` steps between one and the next. The steps that it took."""
    from vllm import SamplingParams

    waiting, steps, due, number = list(requests), 0, 0, id(requests)
    while waiting or engine.has_unfinished_requests():
        while waiting and steps >= due:
            prompt, new = waiting.pop(0)
            sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
            engine.add_request(f"{number}-{len(waiting)}", {"prompt_token_ids": prompt}, sampling)
            due = steps + rng.randint(0, apart)
        engine.step()
        steps += 1
    return steps


def traffic(rng: random.Random) -> list[tuple[list[tuple[list[int], int]], int]]:
    """Waves of requests, and the steps between two of a wave."""
    tokens = lambda count: [rng.randint(3, 3900) for _ in range(count)]
    asked = lambda lengths: [(tokens(n), rng.randint(1, 24)) for n in lengths]
    alone = [(asked([n]), 0) for n in (1, 3, 8, 9, 20, 40, 100, 130, 700, 2400)]
    together = asked([5, 12, 33, 70, 127, 128, 300, 900])
    again = [(prompt + tokens(rng.randint(1, 40)), 5) for prompt, _ in together]  # from the prefix cache, but for a few tokens
    many = [rng.choice((rng.randint(1, 16), rng.randint(9, 127), rng.randint(128, 2400))) for _ in range(60)]
    return [*alone, (together, 0), (again, 0), (asked(many[:30]), 3), (asked(many[30:]), 1)]


def run(model: str, block: int, kind: str, folder: Path, extra: dict, stop: bool) -> dict:
    """One engine, started and asked."""
    from vllm import LLM

    from quantkv.integrations import vllm as plug_in

    plug_in.register()
    config = {name: value for name, value in (BASE | MODELS[model]).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    arguments = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "kv_cache_dtype": kind,
        "block_size": block,
        "max_model_len": LENGTH,
        "max_num_seqs": SEQS,
        "max_num_batched_tokens": TOKENS,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 512 << 20,
        "gpu_memory_utilization": 0.1,
        "seed": 0,
        "jit_monitor_mode": "error",
        "jit_monitor_verbose": True,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
        **({"attention_backend": "CUSTOM"} if kind.startswith("quantkv") else {}),
        **extra,
    }
    seen, by_nvrtc = watch(stop)
    began = time.perf_counter()
    llm = LLM(str(folder), **arguments)
    started, before, built = time.perf_counter() - began, len(seen), len(by_nvrtc)
    from vllm.utils import jit_monitor

    rng, steps = random.Random(0), 0
    for requests, apart in traffic(rng):
        steps += ask(llm.llm_engine, requests, apart, rng)
    groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    late, own = Counter(seen[before:]), own_kernels()
    return {
        "start_s": round(started, 1),
        "requests_s": round(time.perf_counter() - began - started, 1),
        "steps": steps,
        "monitored": jit_monitor.is_active(),
        "blocks": [group.kv_cache_spec.block_size for group in groups],
        "late": {name: n for name, n in late.items() if name in own},
        "late_of_others": {name: n for name, n in late.items() if name not in own},
        "late_nvrtc": Counter(by_nvrtc[built:]),
        "nvrtc": built,
        "calls": dict(plug_in.calls),
        "served": dict(plug_in.served),
    }


def child(name: str, job: tuple[str, int, str], out: Path, extra: dict, stop: bool) -> None:
    """In a process of its own: its log and its result are files."""
    log = os.open(out / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    try:
        folder = out / "models" / name
        folder.mkdir(parents=True, exist_ok=True)
        result = run(*job, folder, extra, stop)
    except BaseException as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"[:400]}
    (out / f"{name}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


def line(name: str, found: dict) -> tuple[bool, str]:
    """Whether nothing of quantkv's was compiled late, and what is said of an engine."""
    if "error" in found:
        return False, f"{name:32s} FAILED  {found['error'].splitlines()[0]}"
    own, theirs = found["late"], found["late_of_others"]
    good = not own and not found["late_nvrtc"] and found["monitored"]
    said = [
        "nothing compiled late" if good else f"LATE: Triton {own}, NVRTC {found['late_nvrtc']}",
        *([f"vLLM's own: {theirs}"] if theirs else []),
        *([] if found["monitored"] else ["vLLM's monitor was NOT ACTIVE"]),
        f"{found['steps']} steps in {found['requests_s']} s, start {found['start_s']} s",
        f"{found['nvrtc']} kernels by NVRTC at the start, blocks of {found['blocks']}, calls {found['calls']}",
    ]
    return good, f"{name:32s} {'ok' if good else 'NOT OK':7s} {'; '.join(said)}"


def main() -> int:
    """Run the jobs, a line for each as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--blocks", default="16,64")
    parser.add_argument("--types", default="quantkv_int4")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--limit", type=float, default=170, help="seconds of one engine")
    parser.add_argument("--deadline", type=float, default=330, help="seconds after which none is waited for")
    parser.add_argument("--extra", type=json.loads, default={}, help="arguments of vLLM's LLM, as JSON")
    parser.add_argument("--raise", dest="stop", action="store_true", help="let the monitor raise at the first kernel")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    set_environment(VLLM_USE_DEEP_GEMM="0")
    began = time.perf_counter()
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.worker.gpu_worker  # once, before the forks

    print(f"imports {time.perf_counter() - began:.0f} s, vLLM {vllm.__version__}", flush=True)
    jobs = [(m, int(b), t) for b in args.blocks.split(",") for m in args.models.split(",") for t in args.types.split(",")]
    waiting = [("-".join(map(str, job)), job) for job in jobs]
    running: dict[int, tuple[str, float]] = {}
    good, ended = 0, 0
    while waiting or running:
        over = time.perf_counter() - began > args.deadline
        while waiting and len(running) < args.workers and not over:
            name, job = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                child(name, job, args.out.resolve(), args.extra, args.stop)
            running[pid] = name, time.perf_counter()
        for pid, (name, since) in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            late = over or time.perf_counter() - since > args.limit
            if not done and not late:
                continue
            if not done:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            result, log = args.out / f"{name}.json", args.out / f"{name}.log"
            tail = log.read_text(errors="replace").splitlines()[-1:] if log.exists() else []
            missing = {"error": f"{'no end in time' if not done else f'ended with status {status}'}: {tail}"}
            fine, text = line(name, json.loads(result.read_text()) if result.exists() else missing)
            good, ended = good + fine, ended + 1
            print(text, flush=True)
            del running[pid]
        if over and not running:
            break
        time.sleep(0.1)
    for name, _ in waiting:
        print(f"{name:32s} FAILED  not started, {args.deadline:.0f} s are over")
    print(f"{good} of {len(jobs)} without a late kernel, {time.perf_counter() - began:.0f} s", flush=True)
    return int(good < len(jobs))


if __name__ == "__main__":
    sys.exit(main())
