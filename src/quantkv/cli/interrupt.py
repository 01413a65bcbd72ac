"""Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 130


class Interrupted(Exception):
    """Ctrl-C while a command ran, with words on what was kept. It is no KeyboardInterrupt, whose words typer drops."""


@contextmanager
def ends_imports() -> Iterator[None]:
    """Ctrl-C inside an import ends the process, and is KeyboardInterrupt elsewhere.

    As an exception it aborts torch's initialisation in C++, and transformers reports a module that is not installed.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            shown = "\x1b[?25h" if sys.stderr.isatty() else ""  # the cursor, which a spinner hides
            os.write(2, f"{shown}interrupted\n".encode())
            os._exit(EXIT_CODE)
        frame = frame.f_back
    raise KeyboardInterrupt
