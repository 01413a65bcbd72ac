"""Prefill in one engine of vLLM and decode in another, by NIXL between GPUs of one host: bytes, time to the first token, equal tokens.

    python benchmarks/vllm_engine/pages_travel.py --out DIR [--types auto,quantkv_int4] [--blocks 128] [--context 32768] [--ranks]

Needs vLLM 0.33 with quantkv and NIXL in the same environment, and two GPUs; `--devices 0,0` has both engines share one. Weights at
random. The time to the first token is that of the engine that decodes, for a prompt whose pages the other engine holds: the transfer, and
a step for the prompt's last token. With `--ranks` two ranks, which split the kv heads, decode from the pages of one rank. Their answers
are compared with those from pages that stayed. Each pair of engines is a line of travel.jsonl in --out, which `report.py` reads too.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import psutil
import run
from answers import compare, prompts
from offline import set_environment
from random_models import LLAMA_8B, SMALL, write_config

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/vllm_cpu"))  # peers.py: engines side by side, with NIXL between them

SMALL_CONTEXT, TOKENS = 1025, 16  # of the answers that are compared
LAYOUT = "VLLM_KV_CACHE_LAYOUT"  # set for both engines, it is noted; vLLM chooses where it is not


def peer(folder: Path, model: str, kv_type: str, devices: str, args: argparse.Namespace, **arguments: Any) -> Any:
    """A `peers.Peer` on these GPUs, in CUDA graphs. arguments: more of vLLM's `LLM`."""
    import peers
    import workers

    given = {"enforce_eager": False, "num_gpu_blocks_override": None, "max_num_batched_tokens": 8192, **arguments}
    given = run.common_arguments(kv_type, [1]) | given | json.loads(args.extra)
    environment = {"CUDA_VISIBLE_DEVICES": devices, "VLLM_PLUGINS": run.plugins(kv_type)}
    return peers.Peer(model, kv_type, folder, environment=environment, policy="fail", buffers="cuda", prepare=workers.no_multicast, **given)


def prompt(seed: int, length: int) -> list[int]:
    """The tokens of one prompt."""
    return prompts(1, length, seed)[0]["prompt_token_ids"]


def first_tokens(folder: Path, kv_type: str, block: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first token, and what NIXL counted, from an engine on one GPU to an engine on the other."""
    model = write_config(folder / "models" / "travel", **LLAMA_8B)
    devices = args.devices.split(",")
    given = {"load_format": "dummy", "gpu_memory_utilization": 0.8 / devices.count(devices[0]), "block_size": block}
    engines = []
    try:
        for device in devices:
            engines.append(peer(folder, model, kv_type, device, args, **given))
            if devices.count(device) > 1:  # an engine measures the memory that is free
                engines[-1].ready()
        here, there = engines if devices[0] == devices[1] else (engine.ready() for engine in engines)
        there.ask(prompt(0, args.context), 1)  # compiled before the clock
        alone = there.ask(prompt(99, args.context), 1)["seconds"]
        there.ask(prompt(1, args.context), 1, here.fill(prompt(1, args.context)))  # the handshake
        found, before = [], there.ask(prompt(2, 32), 1)["metrics"]
        for seed in range(3, 3 + args.repeat):
            answer = there.ask(prompt(seed, args.context), 1, here.fill(prompt(seed, args.context)))
            found.append(answer["seconds"])
        sums = {name: (answer["metrics"][name] - before[name]) / args.repeat for name in before if name in answer["metrics"]}
        return {
            "context": args.context,
            "first_token_s": [round(s, 5) for s in found],
            "first_token_s_median": round(statistics.median(found), 5),
            "prompt_computed_s": round(alone, 4),
            "a_request": {name.removeprefix("vllm:"): value for name, value in sums.items() if value},
        }
    finally:
        end(engines)


def one_to_two(folder: Path, kv_type: str, block: int, args: argparse.Namespace) -> dict[str, Any]:
    """Answers from one rank's pages: by the same engine from its prefix cache, and by two ranks."""
    import checkpoint

    model = Path(write_config(folder / "models" / "checkpoint", **SMALL))
    checkpoint.write_weights(model, SMALL)
    given = {"gpu_memory_utilization": 0.2, "block_size": block, "max_model_len": 2048}
    engines = [peer(folder, str(model), kv_type, "0", args, enable_prefix_caching=True, **given)]
    try:
        here = engines[0].ready()
        engines.append(peer(folder, str(model), kv_type, "0,1", args, tensor_parallel_size=2, **given))
        there = engines[1].ready()
        stayed, travelled, computed = [], [], []
        for seed in range(4):
            asked = prompt(seed, SMALL_CONTEXT)
            computed.append(there.ask(asked, TOKENS))
            travelled.append(there.ask(asked, TOKENS, here.fill(asked)))
            stayed.append(here.ask(asked, TOKENS))
        kept, sent, own = ([(answer["tokens"], answer["logprobs"]) for answer in of] for of in (stayed, travelled, computed))
        return {
            "cached": [answer["cached"] for answer in stayed],
            "finish": [answer["finish"] for answer in travelled],
            "travelled_against_stayed": compare(kept, sent),
            "computed_by_two_against_stayed": compare(kept, own),
            "tokens": TOKENS,
            "metrics": {name: value for name, value in travelled[-1]["metrics"].items() if value},
        }
    finally:
        end(engines)


JOBS = {"times": first_tokens, "ranks": one_to_two}  # by their names in travel.jsonl


def end(engines: list[Any]) -> None:
    """Kill these engines, those too that have ended. Where one had no time to end, all write where they were (PYTHONFAULTHANDLER)."""
    waited_for = sys.exc_info()[0] is TimeoutError
    for engine in engines:
        try:
            for process in psutil.Process(engine.process).children(recursive=True) if waited_for else ():
                process.send_signal(signal.SIGABRT)
            if waited_for:
                os.kill(engine.process, signal.SIGABRT)
                time.sleep(1)
                print(f"the end of an engine's log:\n{engine.log[-5000:]}", flush=True)
            engine.kill()
        except (OSError, psutil.Error):
            traceback.print_exc()


def too_long(*_: Any) -> None:
    """Handler of the alarm: TimeoutError, which ends a pair of engines."""
    raise TimeoutError("the engines took too long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--types", default="auto,quantkv_int4")
    parser.add_argument("--blocks", default="128", help="tokens of a block of vLLM's, several separated by commas")
    parser.add_argument("--context", type=int, default=32768, help="tokens of a prompt")
    parser.add_argument("--devices", default="0,1", help="the GPU of each of two engines")
    parser.add_argument("--repeat", type=int, default=5, help="prompts that are timed")
    parser.add_argument("--ranks", action="store_true", help="from one rank to two, in place of times")
    parser.add_argument("--limit", type=int, default=150, help="seconds of a pair of engines")
    parser.add_argument("--deadline", type=float, default=1e9, help="start no pair later than this many seconds")
    parser.add_argument("--extra", default="{}", help="JSON with more arguments of vLLM's LLM")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    set_environment(PYTHONFAULTHANDLER="1")
    faulthandler.enable()
    signal.signal(signal.SIGALRM, too_long)
    job, start = "ranks" if args.ranks else "times", time.perf_counter()
    for block in map(int, args.blocks.split(",")):
        for kv_type in args.types.split(","):
            found: dict[str, Any] = {"job": job, "type": kv_type, "layout": os.environ.get(LAYOUT), "block": block}
            if time.perf_counter() - start > args.deadline:
                print(json.dumps(found), "not started", flush=True)
                continue
            began = time.perf_counter()
            signal.alarm(args.limit)
            try:
                found |= JOBS[job](args.out, kv_type, block, args)
            except Exception as error:  # the others are still worth having
                traceback.print_exc()
                found["error"] = repr(error)[-1500:]
            signal.alarm(0)
            found["took_s"] = round(time.perf_counter() - began, 1)
            print(json.dumps(found), flush=True)
            with open(args.out / "travel.jsonl", "a") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
