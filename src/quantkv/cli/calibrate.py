"""`quantkv calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import options, output
from .options import Device, Dtype, Model, ModelArgument
from .waiting import progress


def add_to(commands: typer.Typer) -> None:
    """Register the command."""
    commands.command("calibrate")(calibrate_command)


def calibrate_command(
    argument: ModelArgument = None,
    model: Model = None,
    text: Annotated[str, typer.Option("--text", metavar="FILE|news|docs", help=options.TEXT_HELP)] = "docs",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", show_default="MODEL.calibration.safetensors", help="Where to write it.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="Tokens of text, rounded down to whole contexts.")] = 4096,
    context: Annotated[int, typer.Option("--context", metavar="N", min=16, help="Tokens of a context.")] = 1024,
    positions: Annotated[
        int | None, typer.Option("--positions", metavar="N", min=1, show_default="the model's limit", help="Positions to cover.")
    ] = None,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Measure a model once over some text, so that its cache loses less in the same bytes."""
    from ..calibration import MIN_TOKENS

    model = options.model_of(argument, model)
    output.check_file("--out", out, (".safetensors",), replaced=True)
    if tokens < MIN_TOKENS:
        raise ValueError(f"--tokens {tokens}: at least {MIN_TOKENS} are needed")
    if tokens < context:
        raise ValueError(f"--tokens {tokens}: at least one context is needed (--context {context})")
    from rich.console import Console

    from . import models
    from . import text as texts

    errors = options.stderr()
    chosen = texts.load(text, tokens)
    found = options.find(model, device, dtype, errors)
    models.check_positions(found, f"--context {context}", context)
    contexts = texts.cut(chosen, found.tokenizer, context, tokens)
    if contexts.numel() < MIN_TOKENS:
        raise ValueError(f"--text {chosen.name}: {contexts.numel()} tokens in whole contexts, {MIN_TOKENS} are needed")
    if contexts.numel() < tokens // context * context:
        options.say(errors, f"--text {chosen.name}: only {contexts.numel():,} tokens in whole contexts", "yellow")
    out = Path(f"{found.name}.calibration.safetensors") if out is None else out
    output.check_file("--out", out, replaced=True)
    loaded = options.load(found, device, dtype, errors)
    from quantkv.integrations.transformers import calibrate

    with progress(errors, len(contexts)) as on_step:
        told = {"model": loaded.name, "text": chosen.name}
        made = calibrate(loaded.model, contexts, limit=positions, made_of=told, on_step=lambda done, total: on_step("contexts", done))
    made.save(out)
    _print_summary(Console(highlight=False, soft_wrap=True), made, out)


def _print_summary(console: Any, made: Any, out: Path) -> None:
    count, tokens = len(made.layers), made.made_of["tokens"]
    without = sum(layer.key_mean is None for layer in made.layers.values())
    console.print(f"{out}: {count} layers, {made.positions:,} positions, from {tokens:,} tokens; digest {made.digest[:16]}", markup=False)
    if without:
        console.print(f"{without} layers have no key means: how their keys turn with the position is not understood", style="yellow")
