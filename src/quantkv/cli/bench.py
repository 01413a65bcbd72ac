"""`quantkv bench`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..bench.contestants import Contestant
    from ..bench.run import Result, Row
    from ..bench.shapes import Shape

FORMATS = "bf16,int8,fp8_token,int4,int2,k8v4,tq_k8v4,tq4,tq3"
STYLES = {"wrong": "red", "failed": "red", "unavailable": "dim"}


def add_to(commands: typer.Typer) -> None:
    """Register the command."""
    commands.command("bench")(bench_command)


def bench_command(
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="B8xL32768,...",
            show_default="the shapes of the documentation",
            help="B sequences of L tokens, Q queries each (1); or N tokens to write; both: a step. HQ, HK heads (32, 8), "
            "D head size (128), P page (16), W window.",
        ),
    ] = None,
    kinds: Annotated[
        str, typer.Option("--kinds", metavar="A,B,...", help="Without --shape: which of them.")
    ] = "decode,verify,step,write,prefill",
    formats: Annotated[str, typer.Option("--formats", metavar="A,B,...", help="Formats of quantkv; K/V pairs two.")] = FORMATS,
    implementations: Annotated[
        str | None,
        typer.Option(
            "--implementations",
            metavar="A,B,...",
            show_default="all that run here",
            help="Of quantkv: reference, cpu, triton, hopper, dense (prefill).",
        ),
    ] = None,
    rivals: Annotated[bool, typer.Option("--rivals/--no-rivals", help="Also what else can be imported.")] = True,
    peers: Annotated[
        Path | None, typer.Option("--peers", metavar="DIR", help="fa3.xz and stub/: FlashAttention-3 and an engine's kernels, no packages.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to a file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png|svg", help="Plot time against bytes.")] = None,
    device: Annotated[str | None, typer.Option("--device", show_default="cuda if there is one, else cpu")] = None,
) -> None:
    """Time quantkv's kernels and every rival side by side, each only after its answer was checked against float64."""
    from . import report
    from .common import formats_of, print_table
    from .interrupt import Interrupted

    report.check_output("--json", json_file)
    report.check_output("--plot", plot_file, (".png", ".svg"))
    import torch

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = _shapes(shape, kinds, where.type)
    contestants = _contestants(formats_of(formats), implementations, where)
    if peers is not None and not peers.is_dir():
        raise FileNotFoundError(f"--peers {peers}: no such directory")
    if rivals and where.type == "cuda":
        from ..bench.rivals import rivals as all_rivals

        contestants += all_rivals(peers)
    from rich.console import Console

    errors = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    if where.type == "cpu":
        errors.print("no GPU: this times the PyTorch reference, which is made to be right, not fast", style="yellow")
    from ..bench import tables
    from ..bench.run import empty, run

    result, complete = empty(where), True
    try:
        run(chosen, contestants, where, on_row=lambda row: errors.print(_progress(row), style=STYLES.get(row.status)), result=result)
    except KeyboardInterrupt:
        if not result.rows:
            raise
        complete = False
    Console(highlight=False).print(tables.subtitle(result), style="dim", soft_wrap=True)
    for table in _tables(result):
        print_table(table)
    if json_file is not None:
        json_file.write_text(json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        errors.print(f"figures: {json_file}", style="dim")
    if plot_file is not None:
        from ..bench import plot

        plot.draw(plot_file, result)
        errors.print(f"plot: {plot_file}", style="dim")
    if not complete:
        raise Interrupted(f"the {len(result.rows)} rows above were finished")
    wrong = [row for row in result.rows if row.status == "wrong" and row.ours]
    if wrong:
        raise ValueError(f"{wrong[0].name} {wrong[0].stores} at {wrong[0].shape}: {wrong[0].reason}")


def _shapes(text: str | None, kinds: str, device_type: str) -> Iterable[Shape]:
    from ..bench.shapes import DEFAULT, SMALL, Shape

    if text is not None:
        return [Shape.parse(part.strip()) for part in text.split(",")]
    named = [part.strip() for part in kinds.split(",")]
    if not set(named) <= set(DEFAULT):
        raise ValueError(f"--kinds {kinds}: allowed: {', '.join(DEFAULT)}")
    return [shape for kind in named for shape in (SMALL if device_type == "cpu" else DEFAULT)[kind]]


def _contestants(formats: list[str], implementations: str | None, device: Any) -> list[Contestant]:
    from ..bench.contestants import implementations as found
    from ..bench.contestants import quantkv

    available = found(device)
    named = available if implementations is None else [part.strip() for part in implementations.split(",")]
    if not set(named) <= set(available):
        raise ValueError(f"--implementations {implementations}: on {device.type} there are {', '.join(available)}")
    return [quantkv(implementation, name) for name in formats for implementation in named]


def _progress(row: Row) -> str:
    from ..bench.tables import microseconds

    what = f"{microseconds(row.us)} us" if row.us is not None else f"{row.status}: {row.reason}"
    return f"{row.kind} {row.shape}  {row.name} {row.stores}  {what}".replace("[", "(").replace("]", ")")


def _tables(result: Result) -> Iterable[Any]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ..bench import tables

    for shape, rows in tables.grouped(result):
        kind = rows[0].kind
        table = Table(
            title=f"{tables.TITLES[kind]}, {shape}", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False
        )
        for index, header in enumerate(tables.headers(kind)):
            table.add_column(header, justify="left" if index < 2 else "right", no_wrap=index != 2)
        for row in rows:
            if row.status != "unavailable":
                style = STYLES.get(row.status) or ("bold" if row.ours else None)
                table.add_row(*(Text(cell) for cell in tables.cells(row)), style=style)
        yield table
