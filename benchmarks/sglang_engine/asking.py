"""What is measured in a running engine of SGLang. Steps are those that its scheduler wrote to a file (`watched.py`)."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from answers import Answer, compare
from answers import prompts as given_prompts
from traffic import Arrival, Latencies
from watched import TIMED


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
    return answers_of(outputs), [output["meta_info"]["cached_tokens"] for output in outputs]


def answers_of(outputs: list[dict]) -> list[Answer]:
    return [(list(output["output_ids"]), [float(entry[0]) for entry in output["meta_info"]["output_token_logprobs"]]) for output in outputs]


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


def mixed(llm: Any, steps_file: Path, arrivals: list[Arrival], rate: float) -> dict[str, Any]:
    """Requests that arrive while others are answered. A token counts when the scheduler has it."""
    inputs = [given["prompt_token_ids"] for given in given_prompts(len(arrivals), [of.prompt for of in arrivals], 9)]
    latencies, began = Latencies(), len(steps_of(steps_file))

    async def one(number: int) -> None:
        await asyncio.sleep(start + arrivals[number].at - time.perf_counter())
        latencies.arrived(f"{TIMED}{number}", time.perf_counter())
        sampling = {"temperature": 0, "max_new_tokens": arrivals[number].answer, "ignore_eos": True}
        await llm.async_generate(input_ids=inputs[number], sampling_params=sampling, rid=f"{TIMED}{number}")

    async def all_of_them() -> None:
        await asyncio.gather(*map(one, range(len(arrivals))))

    start = time.perf_counter()
    llm.loop.run_until_complete(all_of_them())
    seconds, seen, held = time.perf_counter() - start, steps_of(steps_file)[began:], {}
    for now, kind, *_, timed in seen:
        for name, tokens in timed.items() if kind != "retract" else ():
            if tokens > held.get(name, 0):
                latencies.answered(name, tokens - held.get(name, 0), now)
                held[name] = tokens
    return {
        "requests": len(arrivals),
        "rate": rate,
        "prompt_tokens": sum(of.prompt for of in arrivals),
        "answer_tokens": sum(of.answer for of in arrivals),
        "together": max(step[2] for step in seen if step[1] == "decode"),
        "retracted": retracted(seen),
        **latencies.found(seconds),
    }


def long(llm: Any, steps_file: Path, requests: int, prompt: int, answer: int) -> dict[str, Any]:
    """Long answers of requests that are asked at once, and how long a step takes early and late in them."""
    began, start = len(steps_of(steps_file)), time.perf_counter()
    outputs = ask(llm, prompts(requests, prompt, 11), answer)
    seconds, seen = time.perf_counter() - start, steps_of(steps_file)[began:]
    times = [1e3 * (b[0] - a[0]) for a, b in pairwise(step for step in seen if step[1] == "decode" and step[2] == requests)]
    quarter = len(times) // 4
    medians = {name: round(statistics.median(of), 3) for name, of in (("first", times[:quarter]), ("last", times[-quarter:]))}
    return {
        "requests": requests,
        "prompt": prompt,
        "answer": answer,
        "all_finished": all(len(output["output_ids"]) == answer for output in outputs),
        "seconds": round(seconds, 2),
        "tokens_per_s": round(requests * answer / seconds, 1),
        "step_ms_median_by_quarter": medians,
        "retracted": retracted(seen),
    }


def retracted(steps: list[list]) -> int:
    """How often a request lost its pages."""
    return sum(step[2] for step in steps if step[1] == "retract")


def answered(llm: Any, steps_file: Path, inputs: list[list[int]], tokens: int) -> dict[str, Any]:
    """Greedy answers of requests that are asked together, each other one of an eighth of `tokens`; of drafts, those that
    were made and accepted. Behind short answers SGLang lets in more requests than its pool has room for."""
    llm.flush_cache()
    began, start = len(steps_of(steps_file)), time.perf_counter()
    lengths = [tokens if i % 2 else tokens // 8 for i in range(len(inputs))]
    # Without ignore_eos: SGLang keeps room for requests that say it, and retracts none.
    outputs = llm.generate(
        input_ids=inputs, sampling_params=[{"temperature": 0, "max_new_tokens": n} for n in lengths], return_logprob=True
    )
    seconds, infos = time.perf_counter() - start, [output["meta_info"] for output in outputs]
    found = {
        "all_finished": [len(output["output_ids"]) for output in outputs] == lengths,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(sum(lengths) / seconds, 1),
        "retracted": retracted(steps_of(steps_file)[began:]),
        "answers": answers_of(outputs),
    }
    if made := sum(info.get("spec_verify_ct", 0) for info in infos):
        found |= {"drafted": sum(info["spec_num_proposed_drafts"] for info in infos)}
        found |= {"accepted": sum(info["spec_num_correct_drafts"] for info in infos)}
        found["tokens_per_verification"] = round(sum(len(output["output_ids"]) - 1 for output in outputs) / made, 3)
    return found


def beside(plain: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two runs of `answered` over the same requests, without and with what is asked, and how far their answers are equal."""
    compared = compare(plain.pop("answers"), given := other.pop("answers"))
    equal = [same for same, (tokens, _) in zip(compared["equal_tokens"], given) if same == len(tokens)]
    parted = [same for same, (tokens, _) in zip(compared["equal_tokens"], given) if same < len(tokens)]
    compared |= {"equal_answers": f"{len(equal)} of {len(given)}", "first_difference": min(parted, default=None)}
    return {"without": plain, "with": other, **compared}
