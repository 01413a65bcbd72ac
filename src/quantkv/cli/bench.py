"""`quantkv bench`."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import deprecated
from . import completion, options, output
from .options import Device
from .output import Json
from .waiting import progress

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
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME|DIR|FILE",
            show_default="32 query heads over 8 kv heads of 128",
            autocompletion=completion.models,
            help="Heads, head size and windows of a model: one that is known by name (llama-3.1-8b), or by its configuration. No weights "
            "are needed.",
        ),
    ] = None,
    kv: Annotated[
        str, typer.Option("--kv", metavar="A,B,...", autocompletion=completion.caches, help="Formats; K/V pairs two; all.")
    ] = FORMATS,
    implementations: Annotated[
        str | None,
        typer.Option(
            "--implementations",
            metavar="A,B,...",
            show_default="all that run here",
            help="Of quantkv: reference, cpu, triton, hopper, prefill.",
        ),
    ] = None,
    rivals: Annotated[bool, typer.Option("--rivals/--no-rivals", help="Also what else can be imported.")] = True,
    peers: Annotated[
        Path | None,
        typer.Option("--peers", metavar="DIR", help="fa3.xz, xqa/, stub/: FlashAttention-3, XQA and an engine's kernels, no packages."),
    ] = None,
    json_file: Json = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png|svg", help="Plot time against bytes.")] = None,
    device: Device = None,
) -> None:
    """Time attention over each format on this machine, beside what else is installed."""
    from .common import formats_of, print_table
    from .interrupt import Interrupted

    output.check_file("--json", json_file)
    output.check_file("--plot", plot_file, (".png", ".svg"))
    import torch

    from . import devices

    where = torch.device(devices.named(device))
    chosen = _shapes(shape, kinds, where.type, [{}] if model is None else heads_of(model))
    contestants = _contestants(formats_of(kv), implementations, where)
    if peers is not None and not peers.is_dir():
        raise FileNotFoundError(f"--peers {peers}: no such directory")
    if rivals and where.type == "cuda":
        from ..bench.rivals import rivals as all_rivals

        contestants += all_rivals(peers)
    elif rivals:
        from ..bench import cpu_rivals

        contestants += cpu_rivals.rivals()
    from rich.console import Console

    errors = options.stderr()
    if where.type == "cpu":
        options.say(errors, _on_cpu({contestant.name for contestant in contestants if contestant.ours}), "yellow")
    from ..bench import tables
    from ..bench.run import empty, run

    result, complete = empty(where), True
    total = sum(shape.kind in contestant.kinds for shape in chosen for contestant in contestants)
    try:
        with progress(errors, total) as on_step:
            done = itertools.count(1)

            def on_row(row: Row) -> None:
                options.say(errors, _progress(row), STYLES.get(row.status, ""))
                on_step(row.shape, next(done))

            run(chosen, contestants, where, on_row=on_row, result=result)
    except KeyboardInterrupt:
        if not result.rows:
            raise
        complete = False
    with output.tables(json_file):
        Console(highlight=False).print(tables.subtitle(result), style="dim", soft_wrap=True)
        for table in _tables(result):
            print_table(table)
    output.write_json(json_file, json.dumps(result.to_dict(), indent=1, allow_nan=False))
    if plot_file is not None:
        from ..bench import plot

        plot.draw(plot_file, result)
        options.say(errors, f"plot: {plot_file}")
    if not complete:
        raise Interrupted(f"the {len(result.rows)} rows above were finished")
    wrong = [row for row in result.rows if row.status == "wrong" and row.ours]
    if wrong:
        raise ValueError(f"{wrong[0].name} {wrong[0].stores} at {wrong[0].shape}: {wrong[0].reason}")


def _on_cpu(names: set[str]) -> str:
    """What is timed where there is no GPU. names: of quantkv's contestants."""
    from ..implementations.cpu.compiling import missing

    reference = "the PyTorch reference, which is made to be right, not fast"
    if "quantkv cpu" not in names:
        return f"no GPU: this times {reference}" + (f" ({reason})" if (reason := missing()) else "")
    return f"no GPU: decode, verification and most writes by quantkv's kernels for CPUs; prompts by {reference}"


def heads_of(model: str) -> list[dict[str, int]]:
    """HQ, HK, D and W of each kind of attention layer that a model has, the most frequent first. ValueError for what is no model,
    NotImplementedError for one with other layers."""
    from . import configs

    try:
        found = configs.describe(model).model
    except (ValueError, NotImplementedError) as error:
        raise type(error)(str(error).replace("MODEL", "--model", 1)) from error
    made = []
    counted = Counter((layer.kind, layer.window, layer.heads) for layer in found.attention.values())
    for (kind, window, heads), _ in counted.most_common():
        if kind not in ("full", "sliding") or heads.head_size != heads.head_size_v:
            raise NotImplementedError(
                f"--model {model}: {kind} attention, keys of {heads.head_size} and values of {heads.head_size_v}; allowed: full and "
                "sliding attention, keys and values of one size"
            )
        made.append({"HQ": found.num_heads, "HK": heads.num_kv_heads, "D": heads.head_size, "W": window})
    return made


def _shapes(text: str | None, kinds: str, device_type: str, models: list[dict[str, int]]) -> list[Shape]:
    """models: what each kind of a model's layers has in place of the defaults."""
    from ..bench.shapes import DEFAULT, SMALL, Shape

    if text is not None:
        return [Shape.parse(part.strip(), **heads) for heads in models for part in text.split(",")]
    named = [part.strip() for part in kinds.split(",")]
    if not set(named) <= set(DEFAULT):
        raise ValueError(f"--kinds {kinds}: allowed: {', '.join(DEFAULT)}")
    shapes = [shape for kind in named for shape in (SMALL if device_type == "cpu" else DEFAULT)[kind]]
    return [replace(shape, **heads) for heads in models for shape in shapes]


def _contestants(formats: list[str], implementations: str | None, device: Any) -> list[Contestant]:
    from ..bench.contestants import implementations as found
    from ..bench.contestants import quantkv

    available = found(device)
    named = available if implementations is None else [deprecated.implementation(part.strip()) for part in implementations.split(",")]
    if not set(named) <= set(available):
        raise ValueError(f"--implementations {implementations}: on {device.type} there are {', '.join(available)}")
    return [quantkv(implementation, name) for name in formats for implementation in named]


def _progress(row: Row) -> str:
    from ..bench.tables import microseconds

    what = f"{microseconds(row.us)} us" if row.us is not None else f"{row.status}: {row.reason}"
    return f"{row.kind} {row.shape}  {row.name} {row.stores}  {what}"


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
