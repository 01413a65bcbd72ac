"""What the steps of an evaluation cost, before the first of them is through: for the time that is left."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .eval import EXACT
from .trials import Greedy, Trial
from .waiting import Step

if TYPE_CHECKING:
    from ..geometry import Heads
    from ..integrations.transformers.teacher_forced import FakeQuantizedCache
    from ..policy import Policy

TOKENS = 64  # that each format is tried with
CONTINUED = f"{EXACT}, continued"


def steps_of(trials: Iterable[Trial], policies: Iterable[str]) -> list[Step]:
    """The steps of `evaluate` over these, in its order; a unit of cost is a token."""
    return [Step(name, len(trial.ids)) for trial in trials for name in (CONTINUED if isinstance(trial, Greedy) else EXACT, *policies)]


@torch.inference_mode()
def beyond(model: Any, policies: Mapping[str, Policy]) -> dict[str, float]:
    """Seconds for a token that a pass takes longer with each policy: storing and reading rows back in every layer, tried on a few."""
    from ..integrations.transformers.config import geometry_of
    from ..integrations.transformers.teacher_forced import FakeQuantizedCache

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
    """Of `TOKENS` random rows of a layer; the first time, in which tables are made, is left out."""
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = heads.head_size, heads.head_size_v
    rows = [torch.randn(heads.num_kv_heads, TOKENS, size, generator=generator, device="cpu").to(device) for size in sizes]
    for _ in range(2):
        begun = time.perf_counter()
        fake.rows(layer, *rows)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - begun
