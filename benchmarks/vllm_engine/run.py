"""Measures an unmodified vLLM with its own KV cache formats and with quantkv's, in one run: weights at random, real geometries.

    python benchmarks/vllm_engine/run.py --out DIR [--jobs main] [--types auto,fp8,quantkv_int4]

Needs vLLM 0.33 with quantkv in the same environment, and a GPU. Each job is an engine in a process of its own; what it finds is a
line of results.jsonl in --out, and `report.py` makes the table. Jobs:

    smoke      a model of two layers: does it start, does it repeat
    main       Llama-3-8B: prefill, a serving mix, and decode over contexts that count as computed, up to all that fit. The type
               quantkv_policy:FORMAT is FORMAT with a calibration (random numbers), rounded by its Hessian, and full-precision tokens. Its
               contexts, and a preset's, are computed, as full-precision tokens are of pages that were written here
    reasoning  the same model: short prompts, long answers, all at once
    long_prompts
               the same model: the time to the first token of one prompt of 32,768 and of 131,072 tokens. Every type of quantkv takes
               +8bit behind it: its prompts have 8-bit scores
    latents16, latents128
               DeepSeek-V3's geometry with 16 or 128 heads: 16 layers, each with an eighth of a dense layer's inner size and no experts
    gemma4     Gemma 4 26B's geometry, without experts: does it start, how soon, does it repeat
    sleep      a model of two layers from a checkpoint: answers after vLLM's sleep at either level, against those before
    sleep_latents   the same of two layers of DeepSeek-V3, weights at random: level 1
    cache      a model of two layers: answers from the prefix cache, and of requests that were preempted, against those asked alone
    offload    Llama-3-8B with vLLM's OffloadingConnector: the time to the first token of one prompt of 32,768 tokens, computed, found in
               the prefix cache, and brought back from the host's memory
    ngram, eagle3, mtp
               Llama-3-8B's geometry with drafts: 4 tokens found in the text (ngram), or 3 of an EAGLE-3 head, or of a layer of MTP, as
               MiMo-7B has it. Weights are random, so vLLM accepts drafts at random too, ACCEPTED tokens a step with every type
    invariant  VLLM_BATCH_INVARIANT=1: three sequences replay the graph of four with the tokens of four
    two_gpus, two_gpus_reasoning
               a quarter of Llama-3-70B's layers on two GPUs: decode; short prompts and long answers
    two_gpus_latents
               latents16 on each of two GPUs: 32 heads, a quarter of a dense layer's inner size
    one_rank, two_ranks   a model of two layers from a checkpoint, whose answers on one GPU and on two are compared; the type
               quantkv_policy has maps and offsets of its own for each kv head. A preset's statistics of its kv heads are kept and compared
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path

from answers import VOCABULARY
from offline import set_environment
from random_models import DEEPSEEK_V3, GEMMA_4, LLAMA_8B, LLAMA_70B, SMALL, write_config

GRAPHS = (1, 2, 4, *range(8, 129, 8), *range(144, 1024, 16))  # sequences that decode together: close to each other, as vLLM's own
POLICY = "quantkv_policy"
EIGHT_BIT = "+8bit"
LONG = (32768, 131072)  # tokens of a prompt
GEOMETRIES = {
    "gemma4": GEMMA_4,
    "mtp": LLAMA_8B | {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1},
    "long_prompts": LLAMA_8B | {"max_position_embeddings": 2 * LONG[-1]},
    "two_gpus": LLAMA_70B,
    "two_gpus_reasoning": LLAMA_70B,
    "two_gpus_latents": DEEPSEEK_V3 | {"num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 4608},
}
GEOMETRIES |= {f"latents{n}": DEEPSEEK_V3 | {"num_attention_heads": n, "num_key_value_heads": n} for n in (16, 128)}
SMALL_JOBS = ("smoke", "sleep", "cache", "invariant", "one_rank", "two_ranks")
GEOMETRIES |= dict.fromkeys(SMALL_JOBS, SMALL)
GEOMETRIES["sleep_latents"] = GEOMETRIES["latents16"] | {"num_hidden_layers": 2, "first_k_dense_replace": 2}
SLEEPING = {"sleep": (1, 2), "sleep_latents": (1,)}  # levels
FROM_CHECKPOINT = ("sleep", "one_rank", "two_ranks")
ON_TWO = ("two_gpus", "two_gpus_reasoning", "two_gpus_latents", "two_ranks")
DRAFTS = {"ngram": 4, "eagle3": 3, "mtp": 3}  # tokens of a draft
ACCEPTED = 2.5  # tokens of a step and sequence, the one that is no draft's included
JOBS = (
    "smoke",
    "main",
    "reasoning",
    "long_prompts",
    "latents16",
    "latents128",
    "gemma4",
    "sleep",
    "sleep_latents",
    "cache",
    "offload",
    *DRAFTS,
    "invariant",
    "one_rank",
    *ON_TWO,
)
REASONING = ("reasoning", "two_gpus_reasoning")
COMPUTED = ("gemma4", "cache", "long_prompts", "offload", *REASONING)  # jobs of which no context counts as computed
DECODING = ("main", "latents16", "latents128", *DRAFTS)  # jobs that take --decode
CACHES = ("QUANTKV_CACHE", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")  # folders of kernels
CACHE_BLOCKS = 66  # of 16 tokens: they hold one request of the longest, and not the four of the job `cache`
OFFLOADED_BYTES = 8 << 30  # of the host's memory: 32,768 tokens of Llama-3-8B have 4.3 GB at 16 bits
FIT = {"auto": 104, "fp8": 208, "quantkv_int8": 208, "quantkv_int4": 400, "quantkv_int2": 720}  # sequences of 8,192 on 141 GB


def calibrated_format(kv_type: str) -> str | None:
    """The format of a type quantkv_policy:FORMAT; None for any other."""
    return kv_type.removesuffix(EIGHT_BIT).partition(":")[2] or None


def computes_contexts(kv_type: str, args) -> bool:
    """Whether contexts are computed rather than counted as computed: full-precision tokens are of pages that were written here."""
    from quantkv.integrations.asked import presets

    return kv_type in args.computed.split(",") or calibrated_format(kv_type) is not None or vllm_type(kv_type) in presets()


def vllm_type(kv_type: str) -> str:
    """What vLLM takes for a type, which may have more to it."""
    return kv_type.removesuffix(EIGHT_BIT).partition(":")[0]


def plugins(kv_type: str) -> str:
    """The value of VLLM_PLUGINS: quantkv for its own types, none for vLLM's."""
    return "quantkv" if kv_type.startswith("quantkv_") else ""


def common_arguments(kv_type: str, graphs: list[int]) -> dict:
    """Arguments of vLLM's LLM that all engines have. graphs: sequences of the CUDA graphs of decode."""
    return {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "attention_backend": "CUSTOM" if plugins(kv_type) else None,
        "max_model_len": 33280,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": graphs},
    }


def drafts(job: str, out: Path) -> dict:
    """vLLM's speculative configuration of a job with drafts."""
    found = {"num_speculative_tokens": DRAFTS[job], "rejection_sample_method": "synthetic", "synthetic_acceptance_length": ACCEPTED}
    if job == "ngram":
        return found | {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    if job == "mtp":
        return found | {"method": "mtp"}
    head = LLAMA_8B | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": VOCABULARY}
    return found | {"method": "eagle3", "model": write_config(out / "models" / "eagle3-head", **head)}


def engine(job: str, kv_type: str, out: Path, args) -> object:
    """An LLM of vLLM for this job and this KV type."""
    import checkpoint
    import workers
    from vllm import LLM

    geometry = GEOMETRIES.get(job, LLAMA_8B)
    folder = Path(write_config(out / "models" / ("checkpoint" if job in FROM_CHECKPOINT else job), **geometry))
    most = max([64, *(int(size.split("x")[0]) for size in args.decode.split(",") if job in DECODING)])
    if job in REASONING:
        most = args.thinking[0]
    elif job == "main" and args.fit:
        most = max(most, FIT.get(kv_type, 0))
    graphs = [*(n for n in GRAPHS if n < most), most]
    options = common_arguments(kv_type, graphs) | {
        "load_format": "dummy",
        "kv_cache_dtype": vllm_type(kv_type),
        "additional_config": {"quantkv_prompt_precision": "8bit"} if kv_type.endswith(EIGHT_BIT) else {},
        "max_num_seqs": most,
        "max_num_batched_tokens": 8192 + most,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.2 if geometry is SMALL else 0.9,
        "disable_log_stats": True,
        "seed": 0,
    }
    if kv_type.startswith("turboquant_"):
        workers.keep_flash_attention_3()
    if job in SLEEPING:
        options["enable_sleep_mode"] = True
    if job == "cache":
        options |= {"enable_prefix_caching": True, "max_model_len": 1024, "block_size": 16, "num_gpu_blocks_override": CACHE_BLOCKS}
    if job == "long_prompts":
        options["max_model_len"] = LONG[-1] + 1024
    if job == "offload":
        memory = {"cpu_bytes_to_use": OFFLOADED_BYTES}
        options["kv_transfer_config"] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": memory}
        options["enable_prefix_caching"] = True
    if job not in FROM_CHECKPOINT:
        workers.draw_weights_at_load()
    if fmt := calibrated_format(kv_type):
        options["additional_config"]["quantkv_policy"] = checkpoint.write_calibrated_policy(folder, geometry, fmt)
    if job in ON_TWO:
        options["tensor_parallel_size"] = 2
        workers.no_multicast()
    if job in FROM_CHECKPOINT:
        options["load_format"] = "safetensors"
        checkpoint.write_weights(folder, geometry)
        if kv_type == POLICY:
            options["additional_config"]["quantkv_policy"] = checkpoint.write_policy(folder, geometry)
    if job in DRAFTS:
        options["speculative_config"] = drafts(job, out)
        queries = (1, 1 + DRAFTS[job])  # of a sequence: in a step that drafts, and in one that verifies
        options["compilation_config"]["cudagraph_capture_sizes"] = sorted({n * q for n in (1, 8, 32, 40, 48, most) for q in queries})
    if job not in COMPUTED and not computes_contexts(kv_type, args):
        options["kv_transfer_config"] = {"kv_connector": "BenchConnector", "kv_connector_module_path": "connector", "kv_role": "kv_both"}
    return LLM(str(folder), **options | json.loads(args.extra))


def measure(job: str, kv_type: str, out: Path, args) -> dict:
    os.environ["VLLM_PLUGINS"] = plugins(kv_type)
    if job == "invariant":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if args.fresh:
        for name in CACHES:
            os.environ[name] = str(out / "caches" / f"{job}-{kv_type.replace(':', '-')}" / name)
    start = time.perf_counter()
    import ranks
    import scenarios
    import workers

    from quantkv.integrations.asked import presets

    llm = engine(job, kv_type, out, args)
    if job in ON_TWO and job not in FROM_CHECKPOINT:  # again: workers that were spawned have vLLM's dummies
        llm.collective_rpc(workers.draw_weights)
    found = {"job": job, "type": kv_type, "start_s": round(time.perf_counter() - start, 1), **llm.collective_rpc(workers.facts)[0]}
    print("STARTED", json.dumps(found), flush=True)

    def note(name: str, scenario, *arguments) -> None:
        began = time.perf_counter()
        try:
            result = scenario(llm, *arguments)
        except Exception as error:  # the others are still worth having
            traceback.print_exc()
            result = {"error": repr(error)[:500]}
        found.setdefault("found", []).append({"scenario": name, **result, "took_s": round(time.perf_counter() - began, 1)})
        print("FOUND", json.dumps(found["found"][-1]), flush=True)

    if job in (*SMALL_JOBS, "gemma4", "main"):
        note("padding", scenarios.padding)
    if job == "gemma4":
        return found
    if job in SLEEPING:
        for level in SLEEPING[job]:
            note("sleep", scenarios.slept, level)
        return found
    if job in FROM_CHECKPOINT:
        if kv_type in presets():
            note("measured", ranks.measured, out, job, kv_type)
        return found
    if job == "cache":
        note("prefix", scenarios.prefix)
        note("preempted", scenarios.preempted)
        return found
    if job in REASONING:
        note("reasoning", scenarios.reasoning, *args.thinking)
        return found
    if job == "offload":
        note("offloaded", scenarios.offloaded, 32768)
        return found
    if job == "long_prompts":
        for tokens in LONG:
            note("prefill", scenarios.prefill, 1, tokens)
        return found
    if job == "main" and args.prompts:
        note("prefill", scenarios.prefill, 8, 8192)
        note("prefill", scenarios.prefill, 2, 32768)
    if job == "main" and args.requests:
        note("serving", scenarios.serving, args.requests, args.rate)
    if not computes_contexts(kv_type, args):
        scenarios.tile(llm, 128 if job in ("smoke", "invariant") else 4096)
    scenario = partial(scenarios.speculative if job in DRAFTS else scenarios.decode, profile=args.profile)
    for size in args.decode.split(",") if job in DECODING else ["4x200"] if job in ("smoke", "invariant") else ["64x8192"]:
        note("drafts" if job in DRAFTS else "decode", scenario, *map(int, size.split("x")))
    if job in DRAFTS and job != "ngram":
        note("redrafted", scenarios.redrafted)
    if job == "main" and args.fit and kv_type in FIT:
        note("fit", scenarios.decode, FIT[kv_type], 8192, 48)
    return found


def child(job: str, kv_type: str, log: Path, args) -> None:
    """In a forked process, whose output goes to a log; its workers end with it."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1), os.dup2(target, 2)
    status = 1
    try:
        log.with_suffix(".json").write_text(json.dumps(measure(job, kv_type, log.parent, args)))
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


def wait(process: int, limit: float) -> str | None:
    """How the process failed, None if it did not."""
    began, done = time.perf_counter(), 0
    try:
        while time.perf_counter() - began < limit:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                return f"status {status}" if status else None
            time.sleep(0.05)
    finally:
        if not done:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
    return f"no end after {limit:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", default="main", help=f"of {', '.join(JOBS)}, separated by commas")
    parser.add_argument("--types", default="auto,fp8,int8_per_token_head,int4_per_token_head,quantkv_int8,quantkv_int4,quantkv_int2")
    parser.add_argument("--decode", default="64x8192,8x32768", help="sequences x context")
    parser.add_argument("--profile", action="store_true", help="also where a step's time goes, by torch's profiler, of --decode")
    parser.add_argument("--requests", type=int, default=0, help="of the serving mix; 0: it is left out")
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second that arrive in it")
    parser.add_argument("--fit", action="store_true", help="also all sequences of 8,192 that fit")
    parser.add_argument("--prompts", action="store_true", help="also prefill")
    parser.add_argument("--computed", default="", help="types whose contexts are computed though they could count as computed")
    parser.add_argument("--fresh", action="store_true", help="every engine begins with no kernels on the disk: start_s is a first start's")
    parser.add_argument("--thinking", default="256x1024x2048", help="of the job reasoning: requests x prompt x mean answer")
    parser.add_argument("--deadline", type=float, default=1e9, help="start no engine later than this many seconds")
    parser.add_argument("--limit", type=float, default=300, help="seconds of one engine")
    parser.add_argument("--extra", default="{}", help="JSON with more arguments of vLLM's LLM")
    args = parser.parse_args()
    args.thinking = tuple(map(int, args.thinking.split("x")))
    args.out.mkdir(parents=True, exist_ok=True)
    set_environment(VLLM_ALLOW_INSECURE_SERIALIZATION="1")  # functions are sent to the workers
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # with its engine
    start = time.perf_counter()
    import vllm.model_executor.models.llama
    import vllm.v1.worker.gpu_worker  # imported once, before the engines are forked

    print(f"imports {time.perf_counter() - start:.0f} s, vLLM {vllm.__version__}", flush=True)
    for job in args.jobs.split(","):
        for kv_type in args.types.split(","):
            if time.perf_counter() - start > args.deadline:
                print(f"{job} {kv_type}: not started, {args.deadline:.0f} s are over", flush=True)
                continue
            log = args.out / f"{job}-{kv_type.replace(':', '-')}.log"
            process = os.fork()
            if process == 0:
                child(job, kv_type, log, args)
            failed = wait(process, args.limit)
            text = log.read_text(errors="replace")
            if failed:
                print(f"{job} {kv_type}: {failed}; the end of its log:\n{text[-3000:]}", flush=True)
            found = json.loads(log.with_suffix(".json").read_text()) if not failed else {"job": job, "type": kv_type, "failed": failed}
            room = re.findall(r"GPU KV cache size: ([\d,]+) tokens", text)
            found["kv_tokens"] = int(room[-1].replace(",", "")) if room else None
            print(json.dumps({k: v for k, v in found.items() if k not in ("served", "runner")}), flush=True)
            with open(args.out / "results.jsonl", "a") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
