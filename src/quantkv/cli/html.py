"""`quantkv report`: evaluations and tunings as one HTML file, with everything in it."""

from __future__ import annotations

import base64
import importlib.util
import math
from collections.abc import Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import typer

from . import options, output, report

STYLE = """
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #1f2933; background: #fff;
  max-width: 76rem; margin: 2.5rem auto; padding: 0 1.25rem }
h1 { font-size: 1.7rem; margin-bottom: .2rem }
h2 { font-size: 1.25rem; margin-top: 3rem; padding-top: 1rem; border-top: 1px solid #e4e7eb }
h3 { font-size: 1rem; margin: 2rem 0 .4rem }
p, li { max-width: 46rem } .quiet { color: #52606d; font-size: .9rem }
.scroll { overflow-x: auto } img { max-width: 100%; height: auto; display: block; margin: .75rem 0 }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; margin: .75rem 0 }
th, td { padding: .28rem .45rem; text-align: right; white-space: nowrap } th:first-child, td:first-child { text-align: left }
thead th { border-bottom: 2px solid #9aa5b1; vertical-align: bottom; font-weight: 600; white-space: pre }
tbody tr { border-bottom: 1px solid #e4e7eb } tr.exact { color: #52606d } tr.best td:first-child { font-weight: 600; color: #0b6e99 }
.good { color: #1b7f4b } .fair { color: #9a6700 } .bad { color: #b42318 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem; max-width: 54rem } dt { font-weight: 600 } dd { margin: 0 }
"""
MEANINGS = {
    "bytes a token and kv head": "of one layer, K and V with all metadata; 16-bit copies of the first and latest tokens at their "
    "share of a context. A row is in blue where no other has both fewer bytes and a smaller KL.",
    "change": "of the perplexity, against the model with an exact cache.",
    "KL": "of the exact predictions from these, in nats a token: 0 where nothing is lost. With its standard error, from how "
    "contexts differ.",
    "prompt: KL": "of the prompt's own predictions; the columns before it are then of the tokens decoded behind it, one at a time.",
    "same top-1": "predictions whose likeliest token is the same.",
    "copied, found": "a context ends with passages from earlier in it: of their tokens after the first 15, how many are predicted.",
    "codes, digits": "names and their codes stand between text and are asked again: how many digits are right; near, middle and far by "
    "how many tokens back a name was told.",
    "greedy": "tokens until a greedy continuation leaves that of the exact cache, of 64; how many continuations are identical.",
    "+16,24": "the first 16 and the latest 24 tokens (by whole pages) are also kept at 16 bits, and read so.",
    "cal": "written with a calibration of the model.",
}


def add_to(commands: typer.Typer) -> None:
    """Register the command."""
    commands.command("report")(report_command)


def report_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE.json ...", help="Of `quantkv eval --json` and `quantkv tune --json`.")],
    html: Annotated[Path, typer.Option("--html", metavar="FILE", help="The report.")] = Path("report.html"),
) -> None:
    """Put what eval and tune measured into one HTML file, with plots."""
    output.check_file("--html", html)
    check_plots("--html", html)
    runs, tuned = [], []
    for file in files:
        values = report.read_json(file)
        runs += values["runs"]
        tuned += values["tuned"]
    write(html, runs, tuned)
    options.say(options.stderr(), f"report: {html}")


def check_plots(argument: str, file: Path | None) -> None:
    """ValueError where a file with plots is wanted and matplotlib is absent."""
    if file is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{argument} {file}: needs the package matplotlib: pip install matplotlib")


def write(path: Path, runs: Sequence[dict[str, Any]], tuned: Sequence[dict[str, Any]] = ()) -> None:
    """The report of runs (`report.in_json`'s) and of tunings."""
    merged = merge(runs)
    models = list(dict.fromkeys([run["model"] for run in merged] + [one["model"] for one in tuned]))
    shown = [_run(run) for run in merged] + [_tuned(one) for one in tuned]
    terms = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in MEANINGS.items())
    body = (
        f"<h1>What a quantized KV cache costs</h1><p class=quiet>{escape(', '.join(models))}</p>{''.join(shown)}"
        f"<h2>What the figures mean</h2><dl>{terms}</dl>"
    )
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    page = f'<!doctype html>\n<html lang="en"><head>{head}<title>What a quantized KV cache costs</title><style>{STYLE}</style></head>'
    path.write_text(f"{page}<body>{body}</body></html>\n", encoding="utf-8")


def merge(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of one model over one text in the same way become one; of two rows with one name the later stays."""
    merged: dict[Any, dict[str, Any]] = {}
    for run in runs:
        key = tuple(run[name] for name in ("model", "text", "read", "context", "tokens"))
        known = merged.setdefault(key, {**run, "formats": []})
        named = {row["format"]: row for row in known["formats"]} | {row["format"]: row for row in run["formats"]}
        known["formats"] = sorted(named.values(), key=lambda row: -row["bytes_per_head"])
        known["reference"] = {**run["reference"], **known["reference"]}
        known["complete"] = known["complete"] and run["complete"]
    return list(merged.values())


def _run(run: dict[str, Any]) -> str:
    from . import plot

    rows = [row for row in run["formats"] if row.get("kl") is not None and math.isfinite(row["kl"])]
    parts = [
        f"<h2>{escape(run['model'])}, {escape(run['text'])}, contexts of {run['context']:,}</h2>",
        f"<p class=quiet>{escape(_about(run))}</p>",
        _table(run, rows),
    ]
    if len(rows) > 1:
        parts += ["<h3>Loss against bytes</h3>", _image(plot.loss_figure(run, rows), "KL against bytes, with the best for their size")]
    if any("copy" in row for row in run["formats"]):
        parts += ["<h3>A copied passage found again, by its depth</h3>", _image(plot.depth_figure(run), "share found by depth and length")]
    return "".join(parts)


def _about(run: dict[str, Any]) -> str:
    words = [f"{report.tried(run)} in contexts of {run['context']:,}"] if run["tokens"] else []
    words += [run["read"], f"{run['reference']['dtype']} arithmetic"]
    return "; ".join(words) + ("." if run["complete"] else ". Interrupted: these are the figures that were finished.")


def _table(run: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    from . import plot

    columns, best = report.columns(run), [row["format"] for row in plot.front(list(rows))]
    head = "".join(f"<th>{escape(header.strip())}</th>" for header, _ in columns)
    lines = [f"<tr class=exact><td>exact</td>{''.join(f'<td>{escape(cell)}</td>' for cell in report.reference_cells(run))}</tr>"]
    for row in run["formats"]:
        cells = (cell(row) if report.has(row, header) else "" for header, cell in columns)
        mark = " class=best" if row["format"] in best else ""
        lines.append(f"<tr{mark}><td>{escape(row['format'])}</td>{''.join(map(_cell, cells))}</tr>")
    return f"<div class=scroll><table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        text, kind = report.change(value)
        return f"<td class={kind}>{escape(text)}</td>"
    return f"<td>{escape(str(value))}</td>"


def _tuned(one: dict[str, Any]) -> str:
    from . import plot

    about = (
        f"Each layer's keys or values alone, over {one['tokens']:,} tokens of {one['text']}; the marks are what {one['policy']} chose: "
        f"{one['bytes_per_head']:.1f} bytes a token and kv head, KL about {one['predicted']:.4f}."
    )
    return (
        f"<h2>{escape(one['model'])}: sensitivity by layer</h2><p class=quiet>{escape(about)}</p>"
        f"{_image(plot.sensitivity_figure(one), 'KL by layer, side and format')}"
    )


def _image(figure: Any, meaning: str) -> str:
    """A figure inside the page: as an image of its own, so that the names in one SVG are not those in another."""
    buffer = BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{escape(meaning)}" src="data:image/svg+xml;base64,{data}">'
