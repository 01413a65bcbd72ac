"""`quantkv tune`: formats by layer for a budget of bytes or of loss."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..full_precision import BLOCK_SIZE
from . import completion, options, output, policies
from .allocation import Choice, allocate, limits
from .common import formats_of
from .options import CalibrationFile, Device, Dtype, FullPrecisionOption, Model, ModelArgument
from .output import Json
from .waiting import Step, progress

if TYPE_CHECKING:
    from ..model_analysis.sensitivity import Sensitivities
    from ..policy import Policy

FORMATS = "levels2,levels3,levels4"
SIDES = ("k", "v")


def add_to(commands: typer.Typer) -> None:
    """Register the command."""
    commands.command("tune")(tune_command)


def tune_command(
    argument: ModelArgument = None,
    model: Model = None,
    budget: Annotated[
        float | None, typer.Option("--budget", metavar="BYTES", help="Of a token and kv head on average, as eval shows them.")
    ] = None,
    kl: Annotated[float | None, typer.Option("--kl", metavar="NATS", help="As few bytes as lose no more, as predicted.")] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.json", help="The policy, for eval, generate, transformers and vLLM.")] = Path(
        "policy.json"
    ),
    kv: Annotated[
        str,
        typer.Option(
            "--kv", metavar="A,B,...", autocompletion=completion.caches, help="Formats to choose from, for each layer's keys and values."
        ),
    ] = FORMATS,
    calibration: CalibrationFile = None,
    full_precision: FullPrecisionOption = None,
    text: Annotated[
        str, typer.Option("--text", metavar="FILE|news|docs", help=options.TEXT_HELP + " Not what you evaluate with.")
    ] = "docs",
    context: Annotated[int, typer.Option("--context", min=128, help="Tokens of a context.")] = 1024,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of text, rounded down to whole contexts.")] = 1024,
    json_file: Json = None,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Choose formats layer by layer for the bytes that you have, and write them to a policy file."""
    from ..calibration import MIN_TOKENS
    from . import report
    from . import text as texts

    model = options.model_of(argument, model)
    output.check_file("--out", out, (".json",), replaced=True)
    output.check_file("--json", json_file)
    if (budget is None) == (kl is None):
        raise ValueError("--budget, --kl: one of them is needed")
    if kl is not None and not 0 < kl < math.inf:
        raise ValueError(f"--kl {kl}: a positive number of nats is needed")
    if budget is not None and not 0 < budget < math.inf:
        raise ValueError(f"--budget {budget}: a positive number of bytes is needed")
    names = formats_of(kv)
    if len(names) < 2 or any("/" in name for name in names):
        raise ValueError(f"--kv {kv}: two or more are needed to choose from, each for keys and for values alike")
    if tokens < max(context, MIN_TOKENS):
        raise ValueError(f"--tokens {tokens}: at least {max(context, MIN_TOKENS)} are needed")
    tried = policies.policies_of(",".join(names), calibration, full_precision)
    console = options.stderr()
    chosen_text = texts.load(text, tokens)
    found = options.find(model, device, dtype, console)
    from . import models

    models.check_positions(found, f"--context {context}", context)
    base = next(iter(tried.values()))
    policies.fitting(tried, found.config, strict=True)
    room = Room(found.config, names, base, context)
    if budget is not None:
        room.check(budget)
    contexts = texts.cut(chosen_text, found.tokenizer, context, tokens)
    loaded = options.load(found, device, dtype, console)
    from ..model_analysis.sensitivity import sensitivities

    steps = [Step("gradients"), *[Step("layer")] * len(room.layers)] * len(contexts)
    with progress(console, steps) as on_step:
        lost = sensitivities(loaded.model, contexts, names, base, on_step)
    try:
        chosen = allocate(room.choices(lost), room.left(budget), kl)
    except ValueError as error:
        raise ValueError(f"--kl {error}") from error
    _save(policy_of(chosen, base), out, calibration)
    size, predicted = room.bytes_per_head(chosen), sum(choice.loss for choice in chosen.values())
    counts = Counter(f"{chosen[layer, 'k'].name}/{chosen[layer, 'v'].name}" for layer in room.layers)
    with output.tables(json_file):
        print(f"{size:.1f} bytes a token and kv head; KL about {predicted:.4f} nats a token")
        print("layers with K/V: " + ", ".join(f"{count} {name}" for name, count in counts.most_common()))
    options.say(console, f"policy: {out}")
    if json_file is not None:
        told = {"model": found.name, "text": chosen_text.name, "context": context, "tokens": contexts.numel(), "policy": out.name}
        tuned = [{**told, **figures(lost, chosen), "bytes_per_head": size, "predicted": predicted}]
        output.write_json(json_file, report.in_json(tuned=tuned))


class Room:
    """What each layer's keys and values can take, in bytes of a token.

    config: the model's. policy: its full-precision tokens take their share of `context`.
    """

    def __init__(self, config: Any, names: list[str], policy: Policy, context: int) -> None:
        from ..formats import get_format
        from ..integrations.transformers_model import geometry_of, plan_layers

        geometry, plans = geometry_of(config), plan_layers(config)
        if None in geometry.heads.values():
            raise NotImplementedError("tune: the heads of this model differ from layer to layer")
        self.layers, self.names = list(geometry.heads), names
        self.heads = sum(heads.num_kv_heads for heads in geometry.heads.values())
        self.full_precision = 0.0
        self.sizes: dict[tuple[int, str, str], float] = {}
        for layer, heads in geometry.heads.items():
            share = policies.full_precision_share(policy.full_precision, context, bool(plans[layer].kind.window))
            self.full_precision += 2 * heads.num_kv_heads * (heads.head_size + heads.head_size_v) * share
            for name in names:
                spec = get_format(name).cache_spec(*heads, BLOCK_SIZE)
                k_codes, v_codes, k_meta, v_meta = (size for _, size in spec.sections)
                for side, size in zip(SIDES, (k_codes + k_meta, v_codes + v_meta)):
                    self.sizes[layer, side, name] = size * spec.num_kv_heads / spec.block_size

    def choices(self, lost: Sensitivities | None = None) -> dict[tuple[int, str], list[Choice]]:
        """Choices by layer and side. lost: None where it is not known yet."""
        places = [(layer, side) for layer in self.layers for side in SIDES]
        loss = lambda *key: 0.0 if lost is None else lost[key]
        return {place: [Choice(name, self.sizes[(*place, name)], loss(*place, name)) for name in self.names] for place in places}

    def left(self, budget: float | None) -> float:
        """Bytes of a token for the pages of all layers, of a budget for one kv head."""
        return float("inf") if budget is None else budget * self.heads - self.full_precision

    def check(self, budget: float) -> None:
        """ValueError, with what is possible, for less than the smallest formats take."""
        least, most, _ = limits(self.choices())
        if self.left(budget) < least * (1 - 1e-9):
            low, high = ((size + self.full_precision) / self.heads for size in (least, most))
            raise ValueError(f"--budget {budget:g}: {low:.1f} to {high:.1f} bytes a token and kv head are possible")

    def bytes_per_head(self, chosen: dict[tuple[int, str], Choice]) -> float:
        """Bytes of a token and kv head under a choice of formats, full-precision tokens included."""
        return (sum(choice.bytes for choice in chosen.values()) + self.full_precision) / self.heads


def policy_of(chosen: dict[tuple[int, str], Choice], base: Policy) -> Policy:
    """The most common format for all layers, and the others by number; calibration and full-precision tokens of `base`."""
    from ..formats import get_format
    from ..policy import Policy

    layers = {layer for layer, _ in chosen}
    names = {layer: get_format(f"{chosen[layer, 'k'].name}/{chosen[layer, 'v'].name}").name for layer in layers}
    common = Counter(names.values()).most_common(1)[0][0]
    others = {layer: name for layer, name in sorted(names.items()) if name != common}
    prompts = {"prompt": base.prompt, "prompt_precision": base.prompt_precision}
    return Policy(common, others, calibration=base.calibration, full_precision=base.full_precision, **prompts)


def figures(lost: Sensitivities, chosen: dict[tuple[int, str], Choice]) -> dict[str, Any]:
    """What was found, as plain values: KL by side and format, one number a layer, and the formats chosen."""
    layers = sorted({layer for layer, _, _ in lost})
    names = list(dict.fromkeys(name for _, _, name in lost))
    kl = {side: {name: [lost[layer, side, name] for layer in layers] for name in names} for side in SIDES}
    return {"layers": layers, "kl": kl, "chosen": {side: [chosen[layer, side].name for layer in layers] for side in SIDES}}


def _save(policy: Policy, out: Path, calibration: Path | None) -> None:
    """The calibration's file is named where it lies in the policy's folder or below; from elsewhere it is written beside the policy."""
    name = None
    if calibration is not None:
        with contextlib.suppress(ValueError):
            name = Path(os.path.abspath(calibration)).relative_to(os.path.abspath(out.parent)).as_posix()
    policy.save(out, name)
