"""How much a model loses where the keys, or the values, of one layer alone are stored in a format: from one backward pass.

To second order the KL between the exact predictions and others is that of a change e of an attention's output: half the mean of
`(g . e)^2`, g the gradient of the loss of a token drawn from the exact predictions. So one backward pass gives g for every layer, and each
format costs one attention of one layer instead of a pass of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..checks import refuse
from ..engine.fake_quantized import attend
from ..integrations.transformers_model import check_weights
from ..policy import Policy
from .statistics import with_statistics
from .teacher_forced import FakeQuantizedCache, attending

SKIPPED = 64  # queries at the beginning of a context, which see little of a cache
SIDES = ("k", "v")

Sensitivities = dict[tuple[int, str, str], float]  # by layer, side and format: nats a token


class Seen(NamedTuple):
    """What one layer's attention was given, and what it gave. Axes as in `fake_quantized.attend`; out `[N, HQ, D_V]`, with a gradient."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    softcap: float
    sinks: torch.Tensor | None
    out: torch.Tensor


class Capture:
    """Plain attention that keeps what each layer of a model saw over one context."""

    def __init__(self, fake: FakeQuantizedCache) -> None:
        self.fake, self.layers = fake, {}

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, softcap: float, sinks: Any
    ) -> torch.Tensor:
        out = attend(query, key, value, (key, value), scale, None, self.fake.plans[layer].kind, softcap, sinks)
        out.retain_grad()
        own = None if sinks is None else sinks.detach()
        self.layers[layer] = Seen(query.detach(), key.detach(), value.detach(), scale, softcap, own, out)
        return out


def sensitivities(
    model: PreTrainedModel,
    contexts: torch.Tensor,
    formats: Sequence[str],
    policy: Policy,
    on_step: Callable[[str, int], None] = lambda name, step: None,
) -> Sensitivities:
    """KL in nats a token by layer, side ("k" or "v") and format, of that layer's side alone.

    contexts: tokens `[N, T]` int64. policy: its calibration and full-precision tokens, which formats are tried with; its formats do not
    matter.
    on_step: called with what is done and the number of steps that are through, of N * (1 + layers): a context's gradients, then its layers.
    The sum over layers predicts the KL of all together within a factor of two. ValueError for contexts of at most 64 tokens.
    """
    if contexts.shape[1] <= SKIPPED:
        refuse("contexts.shape[1]", contexts.shape[1], f"more than {SKIPPED} tokens are needed")
    policy = with_statistics(policy, model)
    check_weights(model, policy.calibration)
    fakes = {
        name: FakeQuantizedCache(
            model.config, Policy(name, calibration=policy.calibration, full_precision=policy.full_precision), model.dtype
        )
        for name in formats
    }
    fake, sums, step = next(iter(fakes.values())), {}, 0
    for index, ids in enumerate(contexts):
        on_step("gradients", step)
        seen = _backward(model, ids.to(model.device), fake, index)
        step += 1
        for layer, one in sorted(seen.items()):
            on_step(f"layer {layer}", step)
            for (side, name), value in _losses(layer, one, fakes).items():
                sums[layer, side, name] = sums.get((layer, side, name), 0.0) + value / len(contexts)
            step += 1
    on_step("", step)
    return sums


def _backward(model: PreTrainedModel, ids: torch.Tensor, fake: FakeQuantizedCache, seed: int) -> dict[int, Seen]:
    """Every layer's rows and output over tokens `[T]`, with the gradient of the loss of tokens drawn from the predictions."""
    needed, capture = [p for p in model.parameters() if p.requires_grad], Capture(fake)
    try:
        for parameter in needed:
            parameter.requires_grad_(False)
        with attending(model, capture), torch.enable_grad():
            embedded = model.get_input_embeddings()(ids[None]).detach().requires_grad_()
            predicted = model(inputs_embeds=embedded, use_cache=False).logits[0].float().log_softmax(-1)
            chances = predicted.detach().exp().cpu()
            drawn = torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(seed)).to(ids.device)
            (-predicted.gather(1, drawn)[SKIPPED:].sum()).backward()
    finally:
        for parameter in needed:
            parameter.requires_grad_(True)
    return capture.layers


@torch.no_grad()
def _losses(layer: int, seen: Seen, fakes: dict[str, FakeQuantizedCache]) -> dict[tuple[str, str], float]:
    """Losses of one layer, by side and format."""
    query, key, value, scale, softcap, sinks, out = seen
    losses, known = {}, {}
    for name, fake in fakes.items():
        fmt = fake.policy.of(layer, fake.dtype)
        stored = fake.rows(layer, key, value)
        full_precision, kind = fake.full_precision(layer), fake.plans[layer].kind
        for side, codec, rows in (("k", fmt.k, (stored[0], value)), ("v", fmt.v, (key, stored[1]))):
            if (side, codec.name) not in known:
                change = (attend(query, key, value, rows, scale, full_precision, kind, softcap, sinks) - out.detach()) * out.grad
                by_query = change[SKIPPED:].sum((1, 2)).double()
                known[side, codec.name] = 0.5 * by_query.square().mean().item()
            losses[side, name] = known[side, codec.name]
    return losses
