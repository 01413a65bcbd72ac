"""What an evaluation shows: a table, a JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

SCHEMA = 2


def change(percent: float) -> tuple[str, str]:
    """A change in percent, and how it is: "good" below 1 %, "fair" below 5 %, "bad" beyond and for NaN."""
    kind = "good" if abs(percent) < 1 else "fair" if abs(percent) < 5 else "bad"
    return f"{percent:+.2f}" if abs(percent) < 100 else f"{percent:+.0f}", kind


def _change(percent: float) -> Text:
    text, kind = change(percent)
    return Text(text, style={"good": "green", "fair": "yellow", "bad": "red"}[kind])


def kl_text(kl: float) -> str:
    """Four decimals; below them an order of magnitude, and 0 for what is exact up to rounding."""
    if abs(kl) < 1e-8:
        return "0"
    return f"{kl:.0e}" if abs(kl) < 0.00005 else f"{kl:.4f}"


def with_error(value: float, error: float | None, digits: int = 1) -> str:
    """A value with its standard error, where there is one."""
    shown = f"{value:.{digits}f}"
    return shown if error is None or not math.isfinite(error) else f"{shown} ± {error:.{digits}f}"


def kl_with_error(row: dict[str, Any]) -> str:
    """A row's KL as a table shows it, with its standard error where that says something."""
    error = row.get("kl_error")
    small = row["kl"] is None or not abs(row["kl"]) >= 0.00005
    return kl_text(number(row["kl"])) if small or error is None or not math.isfinite(error) else with_error(row["kl"], error, 4)


def number(value: float | None) -> float:
    """What JSON has null for is not finite."""
    return math.nan if value is None else value


Column = tuple[str, Callable[[dict[str, Any]], Any]]
SIZES: list[Column] = [
    ("bits a\nvalue", lambda r: f"{r['bits_per_element']:.2f}"),
    ("bytes a token\nand kv head", lambda r: f"{r['bytes_per_head']:.1f}"),
    ("x\nsmaller", lambda r: f"{r['compression']:.2f}"),
]
TESTED: dict[str, list[Column]] = {  # by what a row has where it was tried
    "kl": [
        ("per-\nplexity", lambda r: f"{number(r['perplexity']):.2f}"),
        ("change\n%", lambda r: number(r["perplexity_change"])),
        ("\nKL", kl_with_error),
        ("same\ntop-1 %", lambda r: f"{r['same_top1']:.1f}"),
    ],
    "prompt": [("prompt:\nKL", lambda r: kl_with_error(r["prompt"]))],
    "copy": [("copied,\nfound %", lambda r: with_error(r["copy"]["share"], r["copy"]["error"]))],
    "codes": [
        ("codes,\ndigits %", lambda r: with_error(r["codes"]["share"], r["codes"]["error"])),
        ("near, middle,\nfar", lambda r: " ".join(f"{r['codes'].get(part, math.nan):.0f}" for part in ("near", "middle", "far"))),
    ],
    "greedy": [
        ("greedy,\ntokens", lambda r: with_error(r["greedy"]["tokens"], r["greedy"]["error"])),
        ("identical,\nof all", lambda r: f"{r['greedy']['identical']} of {r['greedy']['continuations']}" if "of" in r["greedy"] else ""),
    ],
}


def columns(run: dict[str, Any]) -> list[Column]:
    """What there is to show of a run: header and cell of a row."""
    tried = [column for test, given in TESTED.items() if any(test in row for row in run["formats"]) for column in given]
    return [*SIZES, *tried, ("\nseconds", lambda r: f"{r['seconds']:.1f}")]


TEST_OF = {header: test for test, given in TESTED.items() for header, _ in given}


def has(row: dict[str, Any], header: str) -> bool:
    """Whether a row was tried with what a column shows."""
    return header not in TEST_OF or TEST_OF[header] in row


def reference_cells(run: dict[str, Any]) -> list[str]:
    """The exact cache's, in the same columns."""
    exact = run["reference"]
    own = {
        "per-\nplexity": lambda r: f"{number(r['perplexity']):.2f}" if "perplexity" in r else "",
        "\nseconds": lambda r: f"{r['seconds']:.1f}",
    }
    cells = []
    for header, cell in columns(run):
        if header in own:
            cells.append(own[header](exact))
        else:
            cells.append(cell(exact) if TEST_OF.get(header, "kl") not in ("kl", "prompt") and has(exact, header) else "")
    return cells


def table(run: dict[str, Any]) -> Table:
    """The policies of a run (`Result.to_dict` with its model, text and reader), largest first, under the exact cache's own figures."""
    table = Table(
        title=title(run),
        box=box.SIMPLE_HEAD,
        caption=f"{run['read']}; bytes: K and V, full-precision tokens at their share; change, KL, top-1: against the exact cache"
        + (", of decoded tokens" if run.get("prompt") else ""),
        caption_justify="left",
        title_justify="left",
        title_style="bold",
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("format", style="bold", no_wrap=True)
    for header, _ in columns(run):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_row("exact", *reference_cells(run), style="dim", end_section=True)
    for row in run["formats"]:
        cells = [cell(row) if has(row, header) else "" for header, cell in columns(run)]
        table.add_row(row["format"], *(_change(cell) if isinstance(cell, float) else cell for cell in cells))
    return table


def title(run: dict[str, Any]) -> str:
    """The heading of a run: model, text, tokens, contexts."""
    return f"{run['model']}, {run['text']}: {tried(run)} in contexts of {run['context']:,}"


def tried(run: dict[str, Any]) -> str:
    """What the predictions of a run are of."""
    if not run["tokens"]:
        return f"{run['contexts']} trials"
    behind = f" decoded behind prompts of {run['prompt']:,}" if run.get("prompt") else ""
    return f"{run['tokens']:,} tokens{behind}"


def in_json(runs: Sequence[dict[str, Any]] = (), tuned: Sequence[dict[str, Any]] = ()) -> str:
    """Figures of evaluations and of tunings, unrounded, with what they were measured on; null for what is not finite."""
    import platform

    import torch
    import transformers

    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    values = {"schema": SCHEMA, "runs": list(runs), "tuned": list(tuned), "versions": versions}
    return json.dumps(plain(values), indent=2, allow_nan=False)


def read_json(path: Path) -> dict[str, Any]:
    """What `in_json` said, from a file. FileNotFoundError or ValueError naming the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a file of quantkv eval --json or quantkv tune --json is needed")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    lists = isinstance(values, dict) and all(isinstance(values.get(name), list) for name in ("runs", "tuned"))
    if not lists or values.get("schema") != SCHEMA:
        raise ValueError(f"{path}: a file of quantkv eval --json or quantkv tune --json is needed, of schema {SCHEMA}")
    return values


def plain(value: Any) -> Any:
    """The value with NaN and infinity, which JSON does not have, as None."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
