"""What an evaluation shows: a table, a JSON file."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from .eval import FormatResult, Result


def _change(percent: float) -> Text:
    """Green below 1 %, yellow below 5 %, red beyond and for NaN."""
    style = "green" if abs(percent) < 1 else "yellow" if abs(percent) < 5 else "red"
    return Text(f"{percent:+.2f}" if abs(percent) < 100 else f"{percent:+.0f}", style=style)


def kl_text(kl: float) -> str:
    """Four decimals; below them an order of magnitude, and 0 for what is exact up to rounding."""
    if abs(kl) < 1e-8:
        return "0"
    return f"{kl:.0e}" if abs(kl) < 0.00005 else f"{kl:.4f}"


def _row(r: FormatResult) -> list[str | Text]:
    c = r.comparison
    return [
        r.format,
        f"{r.bits_per_element:.2f}",
        f"{r.bytes_per_token:,.0f}",
        f"{r.compression:.2f}",
        f"{c.perplexity:.2f}",
        _change(c.perplexity_change),
        kl_text(c.kl),
        f"{c.top1:.1f}",
        f"{r.seconds:.1f}",
    ]


def table(result: Result, model: str, text: str) -> Table:
    """The formats, largest first, under the exact cache's own figures."""
    table = Table(
        title=f"{model}, {text}: {result.tokens:,} tokens in contexts of {result.context:,}",
        box=box.SIMPLE_HEAD,
        caption="bytes: K and V of all layers; change, KL, top-1: against the exact cache",
        caption_justify="left",
        title_justify="left",
        title_style="bold",
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("format", style="bold", no_wrap=True)
    for header in ("bits a\nvalue", "bytes a\ntoken", "x\nsmaller", "per-\nplexity", "change\n%", "\nKL", "same\ntop-1 %", "\nseconds"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_row("exact", "", "", "", f"{result.perplexity:.2f}", "", "", "", f"{result.seconds:.1f}", style="dim", end_section=True)
    for r in result.formats:
        table.add_row(*_row(r))
    return table


def check_output(argument: str, path: Path | None, suffixes: tuple[str, ...] = ()) -> None:
    """Refuse, before any work, a file that could not be written at the end of it."""
    if path is None:
        return
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{argument} {path}: the name must end in {' or '.join(suffixes)}")
    if path.is_dir():
        raise ValueError(f"{argument} {path}: a directory; a file's name is needed")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{argument} {path}: no such directory: {path.absolute().parent}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ValueError(f"{argument} {path}: no permission to write it")


def write_json(path: Path, result: Result, model: str, text: str) -> None:
    """The table's figures, unrounded, with what they were measured on; null for what is not finite."""
    import platform

    import torch
    import transformers

    values: dict[str, Any] = {
        "schema": 1,
        "model": model,
        "text": text,
        **result.to_dict(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
    }
    path.write_text(json.dumps(_plain(values), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """The value with NaN and infinity, which JSON does not have, as None."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
