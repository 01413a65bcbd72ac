"""Run trials through a model with every policy of a cache, and compare its predictions with the exact cache's."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from ..policy import Policy
from ..spec import CacheSpec
from .metrics import Comparison, Share, standard_error
from .policies import Size
from .readers import Reader, TeacherForced, last_logits
from .trials import Scores, TextTrial, Trial

EXACT = "exact"


@dataclass
class PolicyResult:
    """What one policy costs and saves. seconds: its forward passes'. size: None before the first of them."""

    name: str
    scores: Scores = field(default_factory=Scores)
    seconds: float = 0.0
    size: Size | None = None

    def to_dict(self) -> dict[str, Any]:
        """Its entry in the file of `--json`."""
        c, size = self.scores.comparison, self.size
        sizes = {
            "bits_per_element": size.bits_per_element,
            "bytes_per_token": size.bytes_per_token,
            "bytes_per_head": size.bytes_per_head,
            "compression": 16 / size.bits_per_element,
        }
        kl = predictions(c) if c.predictions else {}
        if self.scores.prompt.predictions:
            kl["prompt"] = predictions(self.scores.prompt)
        return {"format": self.name, **sizes, **kl, **found(self.scores), "seconds": self.seconds}


def predictions(c: Comparison) -> dict[str, Any]:
    """What predictions lose, as plain values."""
    return {
        "perplexity": c.perplexity,
        "perplexity_change": c.perplexity_change,
        "kl": c.kl,
        "kl_error": c.kl_error,
        "kl_of_contexts": c.kl_of_contexts,
        "same_top1": c.top1,
    }


def found(scores: Scores) -> dict[str, Any]:
    """Retrieval and greedy agreement as plain values; what was not tried is left out."""
    values: dict[str, Any] = {}
    if scores.copied:
        total = sum(scores.copied.values(), Share())
        cells = [
            {"length": length, "depth": depth, "share": share.percent, "error": share.error, "asked": sum(share.asked)}
            for (length, depth), share in sorted(scores.copied.items())
        ]
        values["copy"] = {"share": total.percent, "error": total.error, "asked": sum(total.asked), "cells": cells}
    if scores.codes:
        by_distance = sorted(scores.codes)
        total = _digits(by_distance)
        third = -(-len(by_distance) // 3)
        parts = zip(("near", "middle", "far"), (by_distance[i : i + third] for i in range(0, len(by_distance), third)))
        values["codes"] = {"share": total.percent, "error": total.error, "asked": sum(total.asked), "whole": total.whole}
        values["codes"] |= {name: _digits(part).percent for name, part in parts}
    if scores.agreed:
        agreed = scores.agreed
        whole = sum(map(scores.continued.__eq__, agreed))
        values["greedy"] = {"tokens": sum(agreed) / len(agreed), "error": standard_error(agreed), "continuations": len(agreed)}
        values["greedy"] |= {"of": scores.continued, "identical": whole}
    return values


def _digits(codes: Sequence[tuple[int, int, int]]) -> Share:
    return Share([right for _, right, _ in codes], [asked for _, _, asked in codes])


@dataclass
class Result:
    """A run of `evaluate`: the exact cache's figures and every policy's, largest first.

    context: tokens of one, of which the first `prompt` are a prompt. trials: contexts that were tried.
    complete: False where the run was interrupted; `trials` and `policies` are then what was finished.
    """

    context: int
    trials: int
    dtype: str
    exact: PolicyResult
    policies: list[PolicyResult]
    complete: bool = True
    prompt: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of text whose predictions KL and perplexity are over: behind prompts."""
        return self.exact.scores.comparison.predictions

    def to_dict(self) -> dict[str, Any]:
        """The run's entry in the file of `--json`: the exact cache's figures, and those of each policy."""
        c = self.exact.scores.comparison
        perplexity, told = {"perplexity": c.reference_perplexity} if c.predictions else {}, self.exact.scores.prompt
        if told.predictions:
            perplexity["prompt"] = {"perplexity": told.reference_perplexity}
        return {
            "complete": self.complete,
            "context": self.context,
            "prompt": self.prompt,
            "tokens": self.tokens,
            "prompt_tokens": told.predictions,
            "reference": {"dtype": self.dtype, **perplexity, **found(self.exact.scores), "seconds": self.exact.seconds},
            "formats": [result.to_dict() for result in self.policies],
        }


@torch.inference_mode()
def evaluate(
    model: Any,
    trials: Sequence[Trial],
    policies: Mapping[str, Policy],
    *,
    read: Reader | None = None,
    context: int | None = None,
    on_step: Callable[[str, int], None] = lambda name, step: None,
    on_finished: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Comparison of each policy with the model's own unquantized attention.

    trials: each starts with an empty cache. policies: by the names that tables show.
    context: tokens of which full-precision tokens have their share of the bytes; those of the first trial if None.
    read: how a policy is read: `TeacherForced` unless `ThroughCache` is given.
    on_step: called with a policy's name (or "exact") and the number of passes done, before each pass.
    on_finished: called with what is finished each time that all figures are over the same trials: after each policy of the first trial,
        then after each trial.

    Trials are the outer loop, so only one trial's exact logits are held: `[S, keep or T, vocabulary]`.
    After Ctrl-C it returns what was finished, with all figures over the same trials: those that every policy is through, or the
    policies that are through the first. KeyboardInterrupt where there is nothing yet.
    """
    context, finished = context or len(trials[0].ids), None
    prompt = next((trial.prompt for trial in trials if isinstance(trial, TextTrial)), 0)
    try:
        for done, exact, results in _finished(model, trials, policies, TeacherForced() if read is None else read, context, on_step):
            results.sort(key=lambda r: (-r.size.bytes_per_token, r.scores.comparison.divergence))
            complete = done == len(trials) and len(results) == len(policies)
            tried = sum(trial.sequences for trial in trials[:done])
            finished = Result(context, tried, str(model.dtype).removeprefix("torch."), exact, results, complete, prompt)
            on_finished(finished)
    except KeyboardInterrupt:
        if finished is None:
            raise
    return finished


def _finished(
    model: Any, trials: Sequence[Trial], policies: Mapping[str, Policy], read: Reader, context: int, on_step: Callable[[str, int], None]
) -> Iterator[tuple[int, PolicyResult, list[PolicyResult]]]:
    """Trials done, the exact cache's result and the policies', each time that all of these are over the same trials."""
    exact_result, results, steps = PolicyResult(EXACT), [PolicyResult(name) for name in policies], count()
    for index, trial in enumerate(trials):
        on_step(EXACT, next(steps))
        ids = trial.tokens(model)
        start = time.perf_counter()
        exact = last_logits(model, ids, trial.keep, use_cache=False)
        exact_result = copy.deepcopy(exact_result)
        _score(exact_result, trial, exact, exact, ids, start)
        before, results = results, []
        for (name, policy), result in zip(policies.items(), copy.deepcopy(before)):
            start = time.perf_counter()
            logits, specs = read(model, ids, policy, trial.prompt, trial.keep, lambda name=name: on_step(name, next(steps)))
            _score(result, trial, exact, logits, ids, start)
            measure(result, specs, policy, model, context)
            results.append(result)
            if index == 0 or len(results) == len(policies):
                yield index + 1, exact_result, list(results)
        del exact
    on_step("", next(steps))


def _score(result: PolicyResult, trial: Trial, exact: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, start: float) -> None:
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    result.seconds += time.perf_counter() - start
    for row in zip(exact, logits, ids):
        trial.score(result.scores, *row)


def measure(result: PolicyResult, specs: dict[int, CacheSpec], policy: Policy, model: Any, context: int) -> None:
    """Take sizes from the geometry of the layers."""
    from ..integrations.transformers_model import plan_layers

    sliding = {number for number, plan in enumerate(plan_layers(model.config)) if plan.kind is not None and plan.kind.window}
    result.size = Size.of(specs, policy.full_precision, sliding, context)
