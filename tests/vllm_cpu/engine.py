"""One engine of vLLM for each question, in a process of its own: what it says, which classes ran, and how large its pages are."""

import contextlib
import json
import logging
import os
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True)
class Answers:
    """Of one call of generate, an item for each prompt."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    prompt_logprobs: list[list[float]]  # of each token of a prompt but the first
    cached: list[int]  # tokens of a prompt that were found in the prefix cache


@dataclass(frozen=True)
class Report:
    """What was seen from within the engine's process. error: the message with which it did not start.

    With several ranks the layers are in processes of their own: what they are and what they counted is then not known.
    """

    error: str = ""
    log: str = ""
    answers: list[Answers] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)  # implementations of the layers
    formats: list[str] = field(default_factory=list)  # of quantkv, by layer
    scales: list[tuple[float, float]] = field(default_factory=list)  # of keys and values, by layer
    page_bytes: list[int] = field(default_factory=list)  # of one block of one layer, by group of layers
    block_sizes: list[int] = field(default_factory=list)  # likewise
    tokens: int = 0  # that the cache holds
    layout: str = ""
    strides: tuple[int, ...] = ()  # of the first layer's cache
    preemptions: int = 0
    drafted: int = 0  # tokens that speculative decoding proposed, and that were accepted
    accepted: int = 0
    calls: dict[str, int] = field(default_factory=dict)  # quantkv's counters
    served: dict[str, Any] = field(default_factory=dict)


MEASURED = "MEASURED"  # of the environment: the file that takes what the engine has measured of its model
COMMON = {
    "max_model_len": 512,
    "dtype": "float32",
    "enforce_eager": True,
    "attention_backend": "CUSTOM",
    "compilation_config": {"custom_ops": ["none"]},  # the wheel has none for a CPU
    "block_size": 16,
    "max_num_seqs": 8,
    "enable_prefix_caching": False,
    "seed": 0,
    "disable_log_stats": False,
}


def run(
    model: str,
    kv_cache_dtype: str,
    prompts: Any = (),
    *,
    tokens: int = 1,
    rounds: int = 1,
    singly: int = 0,
    scored: bool = False,
    preempted: int = 0,
    environment: Any = None,
    **arguments: Any,
) -> Report:
    """Ask an engine with these arguments of vLLM's `LLM` to continue `prompts` greedily by `tokens` tokens, `rounds` times.

    prompts: texts, or lists of tokens. singly: rounds, the first ones, in which each prompt waits for the answer before it. scored: whether
    the tokens of prompts get log-probabilities too; then none is taken from the prefix cache. preempted: tokens of an answer after which
    all that run lose their blocks, once; 0: never. environment: variables for the engine. The same question is asked once a session.
    """
    asked = [tokens, rounds, singly, scored, preempted, environment or {}]
    return _run(json.dumps([model, kv_cache_dtype, list(prompts), *asked, {**COMMON, **arguments}]))


@cache
def _run(question: str) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        log, result = Path(folder, "log"), Path(folder, "result")
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException), log.open("w") as file:
                _print_to(file)
                try:
                    result.write_text(repr(_report(*json.loads(question))))
                except BaseException:
                    traceback.print_exc(file=file)
            os._exit(0)
        os.waitpid(child, 0)
        text = log.read_text(errors="replace")
        if not result.exists():
            raise RuntimeError(f"the engine's process ended without an answer:\n{text[-6000:]}")
        found = eval(result.read_text())  # written above
        found["answers"] = [Answers(**answers) for answers in found.get("answers", ())]
        return Report(log=text, **found)


def _print_to(file: TextIO) -> None:
    """In this process, whatever pytest has put in the place of its streams, each line once."""
    for number in (1, 2):
        os.dup2(file.fileno(), number)
    sys.stdout = sys.stderr = file
    logger = logging.getLogger("vllm")
    logger.handlers = [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]  # pytest adds its own
    for handler in logger.handlers:
        handler.stream = file


def _report(
    model: str,
    kv_cache_dtype: str,
    prompts: list,
    tokens: int,
    rounds: int,
    singly: int,
    scored: bool,
    preempted_after: int,
    environment: dict,
    arguments: dict,
) -> dict[str, Any]:
    os.environ.update(environment)
    from vllm import LLM, SamplingParams

    from quantkv.integrations import vllm as plug_in

    try:
        llm = LLM(model, kv_cache_dtype=kv_cache_dtype, **arguments)
    except BaseException as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    config = scheduler.kv_cache_config
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    layers = [layer for layer in context.values() if hasattr(layer, "impl")]
    if MEASURED in environment:
        layers[0].impl.measured.save(environment[MEASURED])
    preempted = _count(scheduler, "_preempt_request")
    if preempted_after:
        _preempt(scheduler, preempted_after)
    plug_in.calls.clear()
    sampling = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, prompt_logprobs=0 if scored else None, detokenize=False
    )
    asked = [prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in prompts]
    answers = []
    for number in range(rounds if prompts else 0):
        batches = [[prompt] for prompt in asked] if number < singly else [asked]
        answers.append(_answers([output for batch in batches for output in llm.generate(batch, sampling, use_tqdm=False)]))
    metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {
        "answers": answers,
        "classes": {f"{type(layer.impl).__module__}.{type(layer.impl).__qualname__}" for layer in layers},
        "formats": [getattr(getattr(layer.impl, "format", None), "name", "") for layer in layers],
        "scales": [getattr(getattr(layer.impl, "paged", None), "scales", ()) for layer in layers],
        "page_bytes": [group.kv_cache_spec.page_size_bytes for group in config.kv_cache_groups],
        "block_sizes": [group.kv_cache_spec.block_size for group in config.kv_cache_groups],
        "tokens": config.num_blocks * config.kv_cache_groups[0].kv_cache_spec.block_size,
        "layout": llm.llm_engine.vllm_config.cache_config.kv_cache_layout,
        "strides": tuple(layers[0].kv_cache.stride()) if layers else (),
        "preemptions": preempted[0],
        "drafted": metrics.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens", 0),
        "calls": dict(plug_in.calls),
        "served": dict(plug_in.served),
    }


def _answers(outputs: list) -> dict[str, Any]:
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    return {
        "tokens": ids,
        "logprobs": [[step[t].logprob for t, step in zip(i, output.outputs[0].logprobs)] for i, output in zip(ids, outputs)],
        "prompt_logprobs": [
            [step[t].logprob for t, step in zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:])] for output in outputs
        ],
        "cached": [output.num_cached_tokens for output in outputs],
    }


def _preempt(scheduler: Any, tokens: int) -> None:
    """Take the blocks of all that run, before each step in which the first of them has so many tokens of its answer."""
    schedule, seen = scheduler.schedule, set()

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        if scheduler.running and scheduler.running[0].num_output_tokens == tokens and scheduler.running[0].request_id not in seen:
            seen.add(scheduler.running[0].request_id)
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return schedule(*args, **kwargs)

    scheduler.schedule = scheduled


def _count(owner: Any, method: str) -> list[int]:
    """How often a method is called from now on."""
    count, original = [0], getattr(owner, method)

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return original(*args, **kwargs)

    setattr(owner, method, counted)
    return count
