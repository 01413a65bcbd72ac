"""What the steps of an evaluation cost, before the first of them is through: for the time that is left."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .eval import EXACT
from .readers import ThroughCache, last_logits
from .trials import Greedy, Trial
from .waiting import Step

if TYPE_CHECKING:
    from ..geometry import Heads
    from ..model_analysis.teacher_forced import FakeQuantizedCache
    from ..policy import Policy
    from .readers import Reader

TOKENS = 64  # that each format is tried with
DECODED = 2  # passes of one token that a trial through the cache times
CONTINUED = f"{EXACT}, continued"


def steps_of(trials: Iterable[Trial], policies: Iterable[str], read: Reader) -> list[Step]:
    """The steps of `evaluate` over these, in its order; a unit of cost is a token, or one pass of a token each."""
    steps = []
    for trial in trials:
        greedy = isinstance(trial, Greedy)
        tokens = trial.ids.shape[-1] + (trial.keep - 1 if greedy else 0)
        steps.append(Step(CONTINUED if greedy else EXACT, trial.ids.numel()))
        for name in policies:
            sizes = read.passes(tokens, trial.prompt)
            steps += [Step(name, size * trial.sequences) if size > 1 else Step(decoding(name)) for size in sizes]
    return steps


def decoding(name: str) -> str:
    """The kind of a policy's passes of one token."""
    return f"{name}, decoding"


@torch.inference_mode()
def beyond(model: Any, policies: Mapping[str, Policy], read: Reader) -> dict[str, float]:
    """Seconds for a token that a pass takes longer with each policy than without a cache, and seconds of a pass of one token, tried on a
    few."""
    return _through(model, policies, read) if isinstance(read, ThroughCache) else _forced(model, policies)


def _through(model: Any, policies: Mapping[str, Policy], read: ThroughCache) -> dict[str, float]:
    """Seconds by policy, from real passes over some tokens."""
    ids = torch.arange(TOKENS + 1 + DECODED, device=model.device)[None] % model.config.get_text_config(decoder=True).vocab_size
    found, begun = {CONTINUED: 0.0}, time.perf_counter()
    last_logits(model, ids[:, :TOKENS], 1, use_cache=False)
    plain = time.perf_counter() - begun
    times: list[float] = []
    for name, policy in policies.items():
        for _ in range(2):  # the first makes tables, and measures the model
            times.clear()
            read(model, ids, policy, TOKENS, 1, lambda: times.append(_now(ids)))
        first = times[-1 - DECODED]  # the first pass of one token begins
        found[name] = max(first - times[0] - plain, 0.0) / TOKENS
        found[decoding(name)] = (times[-1] - first) / DECODED
    return found


def _now(ids: torch.Tensor) -> float:
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    return time.perf_counter()


def _forced(model: Any, policies: Mapping[str, Policy]) -> dict[str, float]:
    """Seconds by policy, from storing and reading rows back in every layer."""
    from ..integrations.transformers_model import geometry_of
    from ..model_analysis.teacher_forced import FakeQuantizedCache

    heads, known = {layer: of for layer, of in geometry_of(model.config).heads.items() if of is not None}, {}
    found = {CONTINUED: 0.0}
    for name, policy in policies.items():
        own = id(policy) if policy.maps or policy.calibration is not None else None
        try:
            fake = FakeQuantizedCache(model.config, policy, model.dtype)
        except NotImplementedError:  # what only a real cache can evaluate
            found[name] = 0.0
            continue
        for layer, of in heads.items():
            key = policy.name_of(layer), of, own
            if key not in known:
                known[key] = _seconds(fake, layer, of, model.device)
            found[name] = found.get(name, 0.0) + known[key] / TOKENS
    return found


def _seconds(fake: FakeQuantizedCache, layer: int, heads: Heads, device: torch.device) -> float:
    """Seconds of `TOKENS` random rows of a layer; the first time, in which tables are made, is left out."""
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = heads.head_size, heads.head_size_v
    rows = [torch.randn(heads.num_kv_heads, TOKENS, size, generator=generator, device="cpu").to(device) for size in sizes]
    for _ in range(2):
        begun = time.perf_counter()
        fake.rows(layer, *rows)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - begun
