"""What several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def formats_of(names: str, argument: str = "--formats", single: bool = False) -> list[str]:
    """Check names before anything is loaded. "all" stands for every registered format."""
    import quantkv

    if names == "all" and not single:
        return list(quantkv.available_formats())
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen or (single and len(chosen) > 1):
        raise ValueError(
            f"{argument} {names!r}: {'one name' if single else 'at least one name'} is needed, of {', '.join(quantkv.available_formats())}"
        )
    for name in chosen:
        try:
            quantkv.get_format(name)
        except ValueError as error:
            raise ValueError(f"{argument}: {error}") from error
    return list(dict.fromkeys(chosen))


def recipe_of(kv: str, argument: str) -> tuple[str, Any]:
    """Name and recipe of a cache: a policy, where a JSON file is named, else a format's name. ValueError before anything is loaded."""
    if not kv.endswith(".json"):
        (name,) = formats_of(kv, argument=argument, single=True)
        return name, name
    from quantkv.policy import Policy

    try:
        return Path(kv).stem, Policy.load(kv)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from error


def print_table(table: Any) -> None:
    """At the terminal's width, or at the table's own where the output is a file or a pipe."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=max(Console(width=1000).measure(table).maximum, 80))  # a measure is at most the console's width
    console.print(table)
