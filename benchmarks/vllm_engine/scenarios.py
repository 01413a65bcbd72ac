"""What is measured in a running engine. Times are of the host's clock around whole steps; tokens are those that the engine returned."""

from __future__ import annotations

import time

import numpy as np
import profiled
import torch
import workers
from answers import Answer, compare, prompts
from connector import BenchConnector
from traffic import Latencies, mix
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind


def sampling(tokens: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA, **more)


def drain(engine, names: list[str]) -> None:
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()


def begin(engine, inputs: list[dict], params: SamplingParams, limit: float = 60.0) -> tuple[list[str], float, int]:
    """Add requests and step until each has a token: their names, seconds, steps. Those that wait longer than `limit` are dropped."""
    names = [f"request-{i}" for i in range(len(inputs))]
    for name, given in zip(names, inputs):
        engine.add_request(name, given, params)
    started, start, steps = set(), time.perf_counter(), 0
    while len(started) < len(names):
        started |= {o.request_id for o in engine.step() if o.outputs[0].token_ids}
        steps += 1
        if time.perf_counter() - start > limit and started:
            engine.abort_request([name for name in names if name not in started])
            names = [name for name in names if name in started]
    torch.cuda.synchronize()
    return names, time.perf_counter() - start, steps


def steady(engine, steps: int, profile: bool = False) -> dict:
    """Tokens a second over `steps` steps, and the milliseconds of one. profile: then also where the time of further steps goes."""
    for _ in range(8):
        engine.step()
    torch.cuda.synchronize()
    tokens, times = 0, [time.perf_counter()]
    for _ in range(steps):
        tokens += sum(len(o.outputs[0].token_ids) for o in engine.step())
        times.append(time.perf_counter())
    torch.cuda.synchronize()
    seconds = time.perf_counter() - times[0]
    return {
        "tokens_per_s": round(tokens / seconds, 1),
        "step_ms": round(seconds / steps * 1e3, 3),
        "step_ms_median": round(float(np.median(np.diff(times))) * 1e3, 3),
        "tokens_per_step": round(tokens / steps, 2),
        **({"profile": profiled.of_steps(engine)} if profile else {}),
    }


def decode(llm, sequences: int, context: int, steps: int = 128, profile: bool = False) -> dict:
    """All sequences decode, over contexts that count as computed."""
    engine = llm.llm_engine
    names, *_ = begin(engine, prompts(sequences, context), sampling(steps + 300))
    found = {"sequences": len(names), "context": context, **steady(engine, steps, profile)}
    drain(engine, names)
    return found


def prefill(llm, sequences: int, context: int) -> dict:
    """Prompts until the first token of each, computed in chunks; the second of two runs, as the first compiles."""
    engine = llm.llm_engine
    for seed in (5, 7):
        names, seconds, steps = begin(engine, prompts(sequences, context, seed), sampling(4))
        drain(engine, names)
    rate = round(sequences * context / seconds, 1)
    return {"sequences": len(names), "context": context, "steps": steps, "first_tokens_s": round(seconds, 3), "tokens_per_s": rate}


def offloaded(llm, context: int, rounds: int = 5) -> dict:
    """Seconds to the first token of one prompt: computed; found in the prefix cache; whose pages come back from the host's memory. The
    last two differ by `moved_s`, of which the copies of the pages take `copied_s`. Medians of `rounds`."""
    engine, loads = llm.llm_engine, workers.note_loads()
    (given,) = prompts(1, context, 13)

    def ask(given: dict) -> tuple[float, int, list[int]]:
        """Seconds, how many tokens were not computed, and the first one of the answer."""
        torch.cuda.synchronize()
        start, found = time.perf_counter(), None
        engine.add_request("request-0", given, sampling(1))
        while engine.has_unfinished_requests():
            for output in engine.step():
                found = (time.perf_counter() - start, output.num_cached_tokens, list(output.outputs[0].token_ids))
        return found

    computed, _, answer = ask(given)
    for seed in range(20):  # steps in which the worker hears that pages have arrived
        time.sleep(0.1)
        ask(prompts(1, 100, 100 + seed)[0])
    here = [ask(given) for _ in range(rounds)]
    back, copied = [], []
    for _ in range(rounds):
        loads.clear()
        if not llm.reset_prefix_cache():
            raise RuntimeError("pages are in use still")
        back.append(ask(given))
        time.sleep(0.2)
        ask(prompts(1, 100, 99)[0])
        copied.append([sum(column) for column in zip(*loads)])
    here_s, back_s = (float(np.median([seconds for seconds, *_ in asked])) for asked in (here, back))
    found = {"computed_s": computed, "here_s": here_s, "back_s": back_s, "moved_s": back_s - here_s}
    found["copied_s"] = float(np.median([seconds for _, seconds in copied]))
    found = {name: round(seconds, 4) for name, seconds in found.items()}
    found |= {"tokens_here": [n for _, n, _ in here], "tokens_back": [n for _, n, _ in back]}
    found["bytes"] = copied[0][0]
    return {"context": context, **found, "same_answer": sum(token == answer for *_, token in back)}


def serving(llm, requests: int, rate: float, new: int = 256, shortest: int = 512, longest: int = 16384) -> dict:
    """Requests that arrive at random (`rate` a second, exponential gaps), prompts from `shortest` to `longest` tokens (log-uniform):
    chunks of prompts are computed beside decode. Tokens a second from the first arrival to the last token; the time to the first
    token, and between tokens of a request, whole steps included."""
    engine, latencies = llm.llm_engine, Latencies()
    waiting = list(enumerate(mix(requests, rate, (shortest, longest), (new, new))))
    lengths = [arrival.prompt for _, arrival in waiting]
    inputs, start = prompts(requests, lengths, 9), time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        now = time.perf_counter() - start
        while waiting and waiting[0][1].at <= now:
            i, arrival = waiting.pop(0)
            engine.add_request(f"request-{i}", inputs[i], sampling(arrival.answer))
            latencies.arrived(f"request-{i}", now)
        if not engine.has_unfinished_requests():
            time.sleep(0.001)
            continue
        for o in engine.step():
            if count := len(o.outputs[0].token_ids):
                latencies.answered(o.request_id, count, time.perf_counter() - start)
    seconds = time.perf_counter() - start
    return {"requests": requests, "rate": rate, "prompt_tokens": sum(lengths), **latencies.found(seconds)}


def speculative(llm, sequences: int, context: int, steps: int = 64, profile: bool = False) -> dict:
    """Sequences that verify drafts. Prompts repeat a few hundred tokens and answers may use those only, so that drafts are found in the
    text in nearly every step; how many tokens a step of all sequences accepts is in tokens_per_step."""
    engine, allowed = llm.llm_engine, list(range(3, 67))
    rng = np.random.default_rng(7)
    inputs = [{"prompt_token_ids": np.resize(rng.integers(3, 67, 256), context).tolist()} for _ in range(sequences)]
    names, _, _ = begin(engine, inputs, sampling(8 * steps, allowed_token_ids=allowed))
    found = {"sequences": len(names), "context": context, **steady(engine, steps, profile)}
    drain(engine, names)
    return found


def redrafted(llm, sequences: int = 33, context: int = 1000, steps: int = 16) -> dict:
    """Drafts, and the same made again a draft at a time: see `workers.draft_twice`. A graph of so many sequences has padding."""
    engine = llm.llm_engine
    llm.collective_rpc(workers.draft_twice)
    names, *_ = begin(engine, prompts(sequences, context, 3), sampling(8 * steps))
    for _ in range(steps):
        engine.step()
    drain(engine, names)
    return llm.collective_rpc(workers.drafted)[0]


def reasoning(llm, requests: int, prompt: int, answer: int, limit: float = 150.0) -> dict:
    """Requests that think at length: all arrive at once, with short prompts, and answers of half to one and a half times `answer`. What
    did not end within `limit` seconds is left out. How many ran together is of all steps."""
    engine = llm.llm_engine
    names, *_ = begin(engine, prompts(2, prompt, 3), sampling(8))
    drain(engine, names)
    scheduler = engine.engine_core.engine_core.scheduler
    lengths = np.random.default_rng(1).integers(answer // 2, answer * 3 // 2, requests).tolist()
    preempted, tokens, running, start = preemptions(scheduler), 0, [], time.perf_counter()
    for i, given in enumerate(prompts(requests, prompt, 5)):
        engine.add_request(f"request-{i}", given, sampling(lengths[i]))
    while engine.has_unfinished_requests() and time.perf_counter() - start < limit:
        tokens += sum(len(o.outputs[0].token_ids) for o in engine.step())
        running.append(len(scheduler.running))
    seconds = time.perf_counter() - start
    finished = not engine.has_unfinished_requests()
    drain(engine, [f"request-{i}" for i in range(requests)])
    return {
        "requests": requests,
        "prompt": prompt,
        "answer": answer,
        "seconds": round(seconds, 1),
        "tokens_per_s": round(tokens / seconds, 1),
        "together": round(float(np.mean(running)), 1),
        "step_ms": round(seconds / len(running) * 1e3, 3),
        "preemptions": len(preempted),
        "finished": finished,
    }


def preemptions(scheduler) -> list:
    """A list that takes a request whenever the scheduler preempts it, from now on."""
    seen, preempt = [], scheduler._preempt_request

    def counted(request, *args, **options):
        seen.append(request)
        return preempt(request, *args, **options)

    scheduler._preempt_request = counted
    return seen


def greedy(llm, inputs: list[dict], tokens: int = 24) -> list[Answer]:
    """Greedy answers, of requests that are asked together."""
    return _answers(_ask(llm, inputs, tokens))


def _ask(llm, inputs: list[dict], tokens: int) -> list:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=1)
    return llm.generate(inputs, params, use_tqdm=False)


def _answers(outputs: list) -> list[Answer]:
    return [
        (list(o.token_ids), [step[t].logprob for t, step in zip(o.token_ids, o.logprobs)])
        for o in (output.outputs[0] for output in outputs)
    ]


def answers(llm, count: int = 4) -> list[Answer]:
    """Greedy answers of 24 tokens to the first `count` of four prompts."""
    return greedy(llm, [prompts(1, n, n)[0] for n in (17, 64, 200, 333)][:count])


def prefix(llm) -> dict:
    """Prompts asked alone, and again from the prefix cache."""
    first, again, cached = [], [], []
    for n in (100, 333, 600):
        inputs = prompts(1, n, n)
        first += greedy(llm, inputs)
        outputs = _ask(llm, inputs, 24)
        again += _answers(outputs)
        cached += [output.num_cached_tokens for output in outputs]
    return {"cached": cached, **compare(first, again)}


def preempted(llm, tokens: int = 200) -> dict:
    """Four requests, which the cache has no room for together, against the same asked alone."""
    inputs = [prompts(1, n, n + 1)[0] for n in (250, 280, 300, 333)]
    alone = [answer for given in inputs for answer in greedy(llm, [given], tokens)]
    llm.reset_prefix_cache()
    seen = preemptions(llm.llm_engine.engine_core.engine_core.scheduler)
    together = greedy(llm, inputs, tokens)
    return {"preemptions": len(seen), **compare(alone, together)}


def slept(llm, level: int) -> dict:
    """Answers before sleep and after it. What level 2 forgets is loaded again from the checkpoint, while pages have no memory yet."""
    before = answers(llm)
    llm.sleep(level)
    llm.wake_up(["weights"])
    if level == 2:
        llm.collective_rpc("reload_weights")
    llm.wake_up(["kv_cache"])
    return {"level": level, **compare(before, answers(llm))}


def padding(llm) -> dict:
    """Four prompts, twice, and three of them, which replay the graph of four."""
    four, again, three = answers(llm), answers(llm), answers(llm, 3)
    return {"again": compare(four, again), "three_of_four": compare(four, three), "answers": four}


def tile(llm, context: int = 4096) -> None:
    """Compute one prompt, copy its pages over the whole cache, and let contexts count as computed from then on."""
    from workers import tile as tile_pages

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    names, _, _ = begin(engine, prompts(1, context, 11), sampling(64))
    (request,) = scheduler.requests
    config = scheduler.kv_cache_config
    blocks = scheduler.kv_cache_manager.get_block_ids(request)[0][: context // config.kv_cache_groups[0].kv_cache_spec.block_size]
    llm.collective_rpc(tile_pages, args=(list(blocks), config.num_blocks))
    drain(engine, names)
    BenchConnector.computed = True
