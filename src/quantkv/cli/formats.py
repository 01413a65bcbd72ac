"""`quantkv formats`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from . import output
from .output import Json

if TYPE_CHECKING:
    from ..format import Codec

HEAD_SIZE = 128
LETTERS = {"hopper": "H", "prefill": "P", "triton": "T", "cpu": "C", "reference": "R"}


def add_to(commands: typer.Typer) -> None:
    """Register the command."""
    commands.command("formats")(formats_command)


def formats_command(json_file: Json = None) -> None:
    """List the formats: what each stores, in how many bytes, and who reads and writes it."""
    output.check_file("--json", json_file)
    rows = described()
    output.write_json(json_file, json.dumps(rows, indent=1))
    if json_file == output.PRINTED:
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..implementations import NAMES
    from .common import print_table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, head in enumerate(("format", "also", "K", "V", "bits", "bytes", "compression", "read", "written", "calibration")):
        table.add_column(head, justify="right" if 4 <= index <= 6 else "left", overflow="fold")
    for row in rows:
        cells = [row["name"], ", ".join(row["aliases"]), row["k"], "same" if row["v"] == row["k"] else row["v"]]
        cells += [f"{row['bits']:.2f}", f"{row['bytes']:g}", f"{16 / row['bits']:.2f}"]
        letters = ("".join(LETTERS[name] for name in NAMES if name in row[kind]) for kind in ("read", "written"))
        table.add_row(*map(Text, (*cells, *letters, row["calibration"])))
    print_table(table)
    known = ", ".join(f"{LETTERS[name]}: {name}" for name in NAMES)
    lines = [
        f"bits a value and bytes of a token and kv head, K and V with metadata, at head size {HEAD_SIZE}; none: as a model computes",
        f"{known}; those that this machine can use: quantkv doctor. A/B stores K as A does and V as B does",
        "calibration: what `quantkv calibrate` gives it; none is needed",
    ]
    if any("triton" in row["not_known"] for row in rows):
        lines.append("what Triton reads and writes is not known here: pip install 'quantkv[triton]'")
    for line in lines:
        Console(highlight=False).print(Text(line, style="dim"), soft_wrap=True)


def described() -> list[dict[str, Any]]:
    """What the registry says of each format."""
    from ..calibration import gains_from_key_mean
    from ..format import aliases_of, available_formats, get_format
    from ..implementations import NAMES, can_serve

    rows = []
    for name in available_formats():
        fmt = get_format(name)
        gains = (["key mean"] if gains_from_key_mean(fmt.k) else []) + (["Hessian"] if fmt.k.encode_in or fmt.v.encode_in else [])
        size = next(size for size in (HEAD_SIZE, *range(8, 1025, 8)) if _takes(fmt, size))
        spec = fmt.cache_spec(1, size)
        served = {word: {n: can_serve(n, fmt, kind) for n in NAMES} for word, kind in (("read", "attend"), ("written", "write"))}
        rows.append(
            {
                "name": name,
                "aliases": aliases_of(name),
                "notes": fmt.notes,
                "k": words_of(fmt.k),
                "v": words_of(fmt.v),
                "bits": spec.bits_per_element,
                "bytes": spec.bytes_per_token,
                "head_size": size,
                **{word: [n for n, can in by.items() if can] for word, by in served.items()},
                "not_known": sorted({n for by in served.values() for n, can in by.items() if can is None}),
                "calibration": " and ".join(gains) or "-",
            }
        )
    return rows


def _takes(fmt: Any, size: int) -> bool:
    try:
        return bool(fmt.cache_spec(1, size))
    except ValueError:
        return False


def words_of(codec: Codec) -> str:
    """What a row of a side is, in a few words."""
    import torch

    plain = codec.code_dtype not in (torch.uint8, torch.int8)
    kind = str(codec.code_dtype).removeprefix("torch.").removesuffix("fn") if plain else f"{codec.row.code_bits} bits"
    rotated = "" if codec.map == "none" else ", rotated"
    beside = f", {codec.row.meta_bytes} bytes a row" if codec.row.meta else ""
    return f"{kind}{rotated}{beside}"
