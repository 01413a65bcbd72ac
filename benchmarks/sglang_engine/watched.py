"""What is put into SGLang's scheduler, a process of its own that imports this benchmark's main module before anything else."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from random_models import draw_weights_of

TIMED = "timed-"  # how names of requests begin whose tokens are counted after each step
FACTS, STEPS = "QUANTKV_BENCH_FACTS", "QUANTKV_BENCH_STEPS"  # of the environment: the files that take what the scheduler sees


def facts(scheduler: Any) -> dict[str, Any]:
    """Choices of a scheduler: who attends, the pool, the graphs of decode, who serves."""
    runner = scheduler.tp_worker.model_runner
    size = runner.token_to_kv_pool.get_kv_size_bytes()
    backend = getattr(runner.attn_backend, "full_attn_backend", runner.attn_backend)  # beside that of linear attention
    pool = getattr(runner.token_to_kv_pool, "full_kv_pool", runner.token_to_kv_pool)
    found = {
        "backend": type(backend).__name__,
        "pool": type(pool).__name__,
        "pool_dtype": str(runner.kv_cache_dtype),
        "kv_tokens": runner.max_total_num_tokens,
        "kv_bytes": int(sum(size) if isinstance(size, tuple) else size),
        "page_size": runner.page_size,
        "decode_graphs": list(getattr(getattr(runner, "decode_cuda_graph_runner", None), "capture_bs", None) or []),
    }
    if found["backend"].startswith("QuantKV"):
        from quantkv.integrations import sglang as plug_in

        found["served"], found["calls"] = dict(plug_in.served), dict(plug_in.calls)
    return found


def watch() -> None:
    """Have the loader of dummy weights draw them, and a scheduler write its facts after its start, and a line for each step whose results
    it has: the clock, "decode" or "prefill", sequences, new tokens, whether a CUDA graph ran, and tokens so far of timed requests. A line
    "retract" has the clock and how many requests lost their pages."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = draw_weights_of
    own_start, own_step, own_retract = Scheduler.__init__, Scheduler.process_batch_result, ScheduleBatch.retract_decode
    file: Any = None

    def start(self: Any, *args: Any, **named: Any) -> None:
        nonlocal file
        own_start(self, *args, **named)
        with open(os.environ[FACTS], "w") as found:
            json.dump(facts(self), found)
        file = open(os.environ[STEPS], "a", buffering=1)  # noqa: SIM115  as long as the scheduler lives

    def write(*line: Any) -> None:
        file.write(json.dumps([time.perf_counter(), *line]) + "\n")

    def step(self: Any, batch: Any, result: Any, *args: Any, **named: Any) -> Any:
        made = own_step(self, batch, result, *args, **named)
        decodes = batch.forward_mode.is_decode()
        tokens = len(batch.reqs) if decodes else int(getattr(batch, "extend_num_tokens", None) or 0)
        graph = getattr(result, "can_run_cuda_graph", None)
        timed = {request.rid: len(request.output_ids) for request in batch.reqs if request.rid.startswith(TIMED)}
        write("decode" if decodes else "prefill", len(batch.reqs), tokens, None if graph is None else bool(graph), timed)
        return made

    def retract(self: Any, *args: Any, **named: Any) -> Any:
        made = own_retract(self, *args, **named)
        write("retract", len(made[0]))
        return made

    Scheduler.__init__, Scheduler.process_batch_result, ScheduleBatch.retract_decode = start, step, retract
