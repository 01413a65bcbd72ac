"""Where what a command found goes: `--json`, checks of files before any work."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .. import deprecated

PRINTED = "-"  # the FILE of `--json` that is standard output
TAKE_A_WORD = ("eval", "bench", "tune")  # commands in which the word after `--json` is its FILE

Json = Annotated[
    str | None, typer.Option("--json", metavar="[=FILE]", show_default=False, help="The figures as JSON: on standard output, or in a file.")
]


def spelled(args: Sequence[str]) -> list[str]:
    """The words of a command line with `--json` spelled out: a bare one prints, `--json=FILE` writes a file, and where there is no other
    argument that it could be, so does `--json FILE`. Options are called as they are now."""
    args = [deprecated.option(word) for word in args]
    command, made = next((word for word in args if not word.startswith("-")), None), []
    for index, word in enumerate(args):
        if word == "--":
            return made + list(args[index:])
        following = args[index + 1] if index + 1 < len(args) else "--"
        takes_it = command in TAKE_A_WORD and (following == PRINTED or not following.startswith("-"))
        made.append(f"{word}={PRINTED}" if word == "--json" and not takes_it else word)
    return made


def check_file(argument: str, path: str | Path | None, suffixes: tuple[str, ...] = (), replaced: bool = False) -> None:
    """Refuse, before any work, a file that could not be written at the end of it. replaced: by `whole_file`, which writes to its folder."""
    if path is None or path == PRINTED:
        return
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{argument} {path}: the name must end in {' or '.join(suffixes)}")
    if path.is_dir():
        raise ValueError(f"{argument} {path}: a directory; a file's name is needed")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{argument} {path}: no such directory: {folder}")
    for needed in ([path] if path.exists() else []) + ([folder] if replaced or not path.exists() else []):
        if not os.access(needed, os.W_OK):
            raise ValueError(f"{argument} {path}: no permission to write it")


def tables(json_file: str | None) -> contextlib.AbstractContextManager:
    """While it lasts, what is printed is for people: it goes to standard error where standard output is for JSON."""
    return contextlib.redirect_stdout(sys.stderr) if json_file == PRINTED else contextlib.nullcontext()


def write_json(json_file: str | None, text: str) -> None:
    """A JSON text to where `--json` says, if anywhere."""
    if json_file == PRINTED:
        print(text)
    elif json_file is not None:
        from . import options

        Path(json_file).write_text(text + "\n", encoding="utf-8")
        options.say(options.stderr(), f"figures: {json_file}")
