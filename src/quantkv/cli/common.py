"""What several commands share."""

from __future__ import annotations

from typing import Any

from .. import policy_file


def caches_of(kv: str) -> tuple[list[str], list[str]]:
    """The names of formats, and the names of presets and files of policies, in `--kv A,4bit,FILE.json`."""
    words = [word.strip() for word in kv.split(",") if word.strip()]
    return [word for word in words if not policy_file.is_name(word)], [word for word in words if policy_file.is_name(word)]


def formats_of(names: str, single: bool = False) -> list[str]:
    """Formats of `--kv A,B`, or of `--kv A` where a single one is taken, checked before anything is loaded. "all" stands for every one."""
    import quantkv

    chosen: list[str] = []
    for name in filter(None, map(str.strip, names.split(","))):
        if name == "all":
            chosen += quantkv.available_formats()
            continue
        if name in policy_file.PRESETS:
            raise ValueError(f"--kv {name}: a preset, which is more than a format; its format is {policy_file.PRESETS[name]['format']}")
        try:
            quantkv.get_format(name)
        except ValueError as error:
            raise ValueError(f"--kv: {error}") from error
        chosen.append(name)
    if not chosen or (single and len(chosen) > 1):
        raise ValueError(
            f"--kv {names!r}: {'one name' if single else 'at least one name'} is needed, of {', '.join(quantkv.available_formats())}"
        )
    return list(dict.fromkeys(chosen))


def print_table(table: Any) -> None:
    """At the terminal's width, or at the table's own where the output is a file or a pipe."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=max(Console(width=1000).measure(table).maximum, 80))  # a measure is at most the console's width
    console.print(table)


def gigabytes(size: int) -> str:
    """A number of bytes, for people."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def duration(seconds: float) -> str:
    """Rounded, for people: 8 s, 3 min 20 s, 2 h 5 min."""
    whole = max(round(seconds), 1)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
