"""One engine of SGLang for each question, in a process of its own: what it says, which classes ran, and how large its pages are.

SGLang starts a scheduler in a process of its own. Here that process is a fork, which has imported everything: a start takes seconds. What
it sees goes to a file after each step.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TextIO

MEASURED = "MEASURED"  # of the environment: the file that takes what the engine has measured of its model
# SGLang's own way to test it: every few steps requests lose their pages, as if there were none left.
TIGHT = {"setup": "import sglang.srt.managers.scheduler as s; s.TEST_RETRACT, s.TEST_RETRACT_INTERVAL = True, 7"}
NEXT = 4
LLAMA = '{"architectures": ["LlamaForCausalLM"]}'  # a converted model does not say


@dataclass(frozen=True)
class Answers:
    """Of one call of generate, an item for each prompt."""

    tokens: list[list[int]]
    logprobs: list[list[list[float]]]  # of the NEXT most probable tokens at each step, the greedy one first
    prompt_logprobs: list[list[float]]  # of each token of a prompt but the first
    cached: list[int]  # tokens of a prompt that were found in the radix cache
    drafted: list[int]  # tokens that were drafted behind a prompt
    accepted: list[int]  # of these


@dataclass(frozen=True)
class Report:
    """What was seen. error: the message with which the engine did not start. log: what all of its processes printed."""

    error: str = ""
    log: str = ""
    answers: list[Answers] = field(default_factory=list)
    backend: str = ""  # the class that serves attention
    pools: list[str] = field(default_factory=list)  # classes of the pools
    formats: list[str] = field(default_factory=list)  # of quantkv, by layer; behind them those of the model that drafts
    page_bytes: list[int] = field(default_factory=list)  # of a page of each layer
    pool_bytes: int = 0
    tokens: int = 0  # that the cache holds
    window_tokens: int = 0  # that the pool for windows holds
    page_size: int = 0
    retracted: int = 0
    calls: dict[str, int] = field(default_factory=dict)  # quantkv's counters
    served: dict[str, Any] = field(default_factory=dict)


COMMON = {
    "device": "cpu",
    "dtype": "float32",
    "context_length": 512,
    "max_running_requests": 8,
    "max_total_tokens": 4096,
    "page_size": 16,
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
    "json_model_override_args": LLAMA,
    "random_seed": 0,
    "log_level": "info",
    "skip_server_warmup": True,
    "skip_tokenizer_init": True,  # questions are tokens
    "grammar_backend": "none",
}


def run(
    model: str,
    backend: str,
    prompts: Any = (),
    *,
    tokens: int = 1,
    rounds: int = 1,
    scored: bool = False,
    environment: Any = None,
    setup: str = "",
    **arguments: Any,
) -> Report:
    """Ask an engine with these arguments of SGLang's `Engine` to continue `prompts`, lists of tokens, greedily by `tokens` tokens, `rounds`
    times.

    scored: whether the tokens of prompts get log-probabilities too; then none is taken from the radix cache. environment: variables for
    the engine. setup: Python that runs before it. The same question is asked once a session.
    """
    given = [model, backend, list(prompts), tokens, rounds, scored, environment or {}, setup, {**COMMON, **arguments}]
    return _run(json.dumps(given))


@cache
def _run(question: str) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        log, result, seen = (Path(folder, name) for name in ("log", "result", "seen"))
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            with contextlib.suppress(BaseException), log.open("w") as file:
                _print_to(file)
                try:
                    result.write_text(repr(_report(seen, *json.loads(question))))
                except BaseException:
                    traceback.print_exc(file=file)
            os._exit(0)
        os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # its scheduler, where SGLang left it
        text = log.read_text(errors="replace")
        found = eval(result.read_text()) if result.exists() else {"error": "the engine's process ended"}  # written above
        found["answers"] = [Answers(**answers) for answers in found.get("answers", ())]
        return Report(log=text, **found)


def _print_to(file: TextIO) -> None:
    """In this process, whatever pytest has put in the place of its streams."""
    for number in (1, 2):
        os.dup2(file.fileno(), number)
    sys.stdout = sys.stderr = file


def _report(
    seen: Path,
    model: str,
    backend: str,
    prompts: list,
    tokens: int,
    rounds: int,
    scored: bool,
    environment: dict,
    setup: str,
    arguments: dict,
) -> dict[str, Any]:
    os.environ.update(environment)
    import multiprocessing

    import sglang
    from sglang.srt.managers.scheduler import Scheduler

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # SGLang asks for "spawn"
    exec(setup, {})  # of a test
    _watch(Scheduler, seen)
    try:
        engine = sglang.Engine(model_path=model, attention_backend=backend, **arguments)
    except BaseException as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    logprobs = {"return_logprob": True, "logprob_start_len": 0 if scored else -1, "top_logprobs_num": NEXT}
    asked = {"input_ids": prompts, "sampling_params": sampling, **logprobs}
    answers = [_answers(engine.generate(**asked)) for _ in range(rounds if prompts else 0)]
    return {"answers": answers, **json.loads(seen.read_text())}


def _answers(outputs: list) -> dict[str, Any]:
    infos = [output["meta_info"] for output in outputs]
    return {
        "tokens": [output["output_ids"] for output in outputs],
        "logprobs": [[[token[0] for token in step] for step in info["output_top_logprobs"]] for info in infos],
        "prompt_logprobs": [[token[0] for token in (info.get("input_token_logprobs") or [])[1:]] for info in infos],
        "cached": [info["cached_tokens"] for info in infos],
        "drafted": [info.get("spec_num_proposed_drafts", 0) for info in infos],
        "accepted": [info.get("spec_num_correct_drafts", 0) for info in infos],
    }


def _watch(scheduler: type, seen: Path) -> None:
    """Have the scheduler of the first rank write what it sees after its start and each step."""
    from sglang.srt.runtime_context import get_parallel

    from quantkv.integrations import sglang as plug_in

    own_start, own_step, own_retract = scheduler.__init__, scheduler.process_batch_result, _retract()

    def write(self: Any) -> None:
        if get_parallel().tp_rank:
            return
        runner = self.tp_worker.model_runner
        pool, of = runner.token_to_kv_pool, _layers(runner)
        pools = [getattr(pool, name) for name in ("full_kv_pool", "swa_kv_pool") if hasattr(pool, name)] or [pool]
        if self.draft_worker is not None:
            drafts = self.draft_worker.draft_worker.draft_runner
            pools.append(drafts.token_to_kv_pool)
            of += _layers(drafts)
        size = pool.get_kv_size_bytes()
        found = {
            "backend": f"{type(runner.attn_backend).__module__}.{type(runner.attn_backend).__qualname__}",
            "pools": [f"{type(p).__module__}.{type(p).__qualname__}" for p in pools],
            "formats": [layer.paged.config.format.name for layer in of],
            "page_bytes": [layer.paged.spec(runner.page_size).block_bytes for layer in of],
            "pool_bytes": int(sum(size) if isinstance(size, tuple) else size),
            "tokens": runner.max_total_num_tokens,
            "window_tokens": getattr(runner, "swa_max_total_num_tokens", None) or 0,
            "page_size": runner.page_size,
            "retracted": own_retract[0],
            "calls": dict(plug_in.calls),
            "served": dict(plug_in.served),
        }
        part = seen.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.rename(seen)

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        own_start(self, *args, **kwargs)
        if MEASURED in os.environ:
            self.tp_worker.model_runner.attn_backend.layers.measured.save(os.environ[MEASURED])
        plug_in.calls.clear()
        write(self)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        write(self)
        return own_step(self, *args, **kwargs)

    scheduler.__init__, scheduler.process_batch_result = start, step


def _layers(runner: Any) -> list:
    """quantkv's layers of a model, in order."""
    layers = getattr(runner.attn_backend, "layers", None)
    return [] if layers is None else [layers.of[number] for number in layers.numbers]


def _retract() -> list[int]:
    """How many requests lose their pages from now on."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    count, own = [0], ScheduleBatch.retract_decode

    def retract_decode(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = own(self, *args, **kwargs)
        count[0] += len(made[0])
        return made

    ScheduleBatch.retract_decode = retract_decode
    return count
