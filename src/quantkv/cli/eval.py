"""Run trials through a model with every policy of a cache, and compare its predictions with the exact cache's."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..policy import Policy
from ..spec import CacheSpec
from .metrics import Share, standard_error
from .policies import Size
from .readers import Reader, TeacherForced, last_logits
from .trials import Scores, Trial

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
        kl = {}
        if c.predictions:
            kl = {
                "perplexity": c.perplexity,
                "perplexity_change": c.perplexity_change,
                "kl": c.kl,
                "kl_error": c.kl_error,
                "kl_of_contexts": c.kl_of_contexts,
                "same_top1": c.top1,
            }
        return {"format": self.name, **sizes, **kl, **found(self.scores), "seconds": self.seconds}


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
        values["greedy"] = {"tokens": sum(agreed) / len(agreed), "error": standard_error(agreed), "continuations": len(agreed)}
    return values


def _digits(codes: Sequence[tuple[int, int, int]]) -> Share:
    return Share([right for _, right, _ in codes], [asked for _, _, asked in codes])


@dataclass
class Result:
    """A run of `evaluate`: the exact cache's figures and every policy's, largest first.

    complete: False where the run was interrupted; `trials` and `policies` are then what was finished.
    """

    context: int
    trials: int
    dtype: str
    exact: PolicyResult
    policies: list[PolicyResult]
    complete: bool = True

    @property
    def tokens(self) -> int:
        """Of text, whose predictions KL and perplexity are over."""
        return self.exact.scores.comparison.predictions

    def to_dict(self) -> dict[str, Any]:
        """The run's entry in the file of `--json`: the exact cache's figures, and those of each policy."""
        c = self.exact.scores.comparison
        perplexity = {"perplexity": c.reference_perplexity} if c.predictions else {}
        return {
            "complete": self.complete,
            "context": self.context,
            "tokens": self.tokens,
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
) -> Result:
    """Teacher-forced comparison of each policy with the model's own unquantized attention.

    trials: each starts with an empty cache. policies: by the names that tables show.
    context: tokens of which full-precision tokens have their share of the bytes; those of the first trial if None.
    read: how a policy is read: `TeacherForced` unless `ThroughCache` is given.
    on_step: called with a policy's name (or "exact") and the number of passes done, before each pass.

    Trials are the outer loop, so only one context's exact logits are held: `[T, vocabulary]`.
    After Ctrl-C it returns what was finished, with all figures over the same trials: those that every policy is through, or the
    policies that are through the first. KeyboardInterrupt where there is nothing yet.
    """
    context, finished = context or len(trials[0].ids), None
    try:
        for state in _finished(model, trials, policies, TeacherForced() if read is None else read, context, on_step):
            finished = state
    except KeyboardInterrupt:
        if finished is None:
            raise
    done, exact, results = finished
    results.sort(key=lambda r: (-r.size.bytes_per_token, r.scores.comparison.divergence))
    complete = done == len(trials) and len(results) == len(policies)
    return Result(context, done, str(model.dtype).removeprefix("torch."), exact, results, complete)


def _finished(
    model: Any, trials: Sequence[Trial], policies: Mapping[str, Policy], read: Reader, context: int, on_step: Callable[[str, int], None]
) -> Iterator[tuple[int, PolicyResult, list[PolicyResult]]]:
    """Trials done, the exact cache's result and the policies', each time that all of these are over the same trials."""
    step, exact_result, results = 0, PolicyResult(EXACT), [PolicyResult(name) for name in policies]
    for index, trial in enumerate(trials):
        on_step(EXACT, step)
        ids = trial.tokens(model)
        start = time.perf_counter()
        exact = last_logits(model, ids, trial.keep, use_cache=False)
        exact_result = copy.deepcopy(exact_result)
        _score(exact_result, trial, exact, exact, ids, start)
        step, before, results = step + 1, results, []
        for (name, policy), result in zip(policies.items(), copy.deepcopy(before)):
            on_step(name, step)
            start = time.perf_counter()
            logits, specs = read(model, ids, policy, trial.keep)
            _score(result, trial, exact, logits, ids, start)
            measure(result, specs, policy, model, context)
            results.append(result)
            step += 1
            if index == 0 or len(results) == len(policies):
                yield index + 1, exact_result, list(results)
        del exact
    on_step("", step)


def _score(result: PolicyResult, trial: Trial, exact: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, start: float) -> None:
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    result.seconds += time.perf_counter() - start
    trial.score(result.scores, exact, logits, ids)


def measure(result: PolicyResult, specs: dict[int, CacheSpec], policy: Policy, model: Any, context: int) -> None:
    """Take sizes from the geometry of the layers."""
    from ..integrations.transformers.config import plan_layers

    sliding = {number for number, plan in enumerate(plan_layers(model.config)) if plan.kind is not None and plan.kind.window}
    result.size = Size.of(specs, policy.full_precision, sliding, context)
