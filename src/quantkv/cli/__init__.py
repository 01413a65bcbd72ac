"""The command line: `quantkv`. Heavy packages are imported by the command that needs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from . import interrupt

__all__ = ["app"]

BAD_INPUT = 2
LONGEST_LINE = 2000  # characters


def app(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0, 2 for bad input, 130 where it was interrupted. $QUANTKV_TRACEBACK=1 shows why."""
    try:
        with interrupt.ends_imports():
            code = _run(args)
    except KeyboardInterrupt:
        _fail("interrupted", interrupt.EXIT_CODE)
    except interrupt.Interrupted as kept:
        _fail(f"interrupted: {kept}", interrupt.EXIT_CODE)
    except (ValueError, NotImplementedError, OSError, ImportError) as error:
        if os.environ.get("QUANTKV_TRACEBACK"):
            raise
        _fail(f"error: {_missing(error) if isinstance(error, ImportError) else error}")
    except Exception as error:
        if (short := _out_of_memory(error)) is not None:
            _fail(f"error: {short}")
        if not hasattr(error, "format_message"):  # typer's own errors, whichever package it takes them from
            raise
        if not error.format_message():  # no command given: typer has shown the help
            sys.exit(BAD_INPUT)
        _fail(f"error: {error.format_message()}")
    sys.exit(code if isinstance(code, int) else 0)


def _run(args: Sequence[str] | None) -> Any:
    import typer

    from .main import commands
    from .output import spelled

    try:
        code = commands(args=spelled(sys.argv[1:] if args is None else args), prog_name="quantkv", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    if code == interrupt.EXIT_CODE:  # what newer releases of typer make of Ctrl-C
        raise KeyboardInterrupt
    return code


def _out_of_memory(error: Exception) -> str | None:
    """What to say where memory ran out, of the machine or of a GPU; None for other errors."""
    what = str(error).strip().partition("\n")[0].partition(". ")[0]
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in what:
        return f"out of memory ({what or type(error).__name__}); allowed: what fits: fewer tokens, a smaller context, another --device"
    return None


def _missing(error: ImportError) -> str:
    package = (error.name or "").partition(".")[0]
    what = f"the package {package} is not installed" if package and isinstance(error, ModuleNotFoundError) else str(error)
    return f"{what}; the command line needs: pip install 'quantkv[cli]'"


def _fail(message: str, code: int = BAD_INPUT) -> NoReturn:
    """One line on stderr, red where a terminal shows it; without rich, which may be what is missing, a plain one."""
    line = " ".join(message.split())
    line = line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ..."  # a value of a damaged file may be as long as the file
    try:
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True).print(Text(line, style="red"), soft_wrap=True)
    except ImportError:
        print(line, file=sys.stderr)
    sys.exit(code)
