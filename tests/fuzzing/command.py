"""The command line with any words: what is wrong with them is said in one line, with exit code 2, before a model is looked for."""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass

from hypothesis import strategies as st

from quantkv.cli import app

SHARE = 1
COMMANDS = ("eval", "generate", "calibrate", "tune", "report", "bench", "no-such-command", "")
OPTIONS = (
    "--kv",
    "--model",
    "--device",
    "--dtype",
    "--full-precision",
    "--budget",
    "--calibration",
    "--policy",
    "--out",
    "--no-such-option",
    "--max-new-tokens",
)
VALUES = ("", "int4", "int4/int4/int4", "nowhere/at/all", "-1", "16,24", "x,y", "1e400", "float31", "é", "\0")


@dataclass(frozen=True)
class Case:
    words: tuple[str, ...]


@st.composite
def cases(draw) -> Case:
    """Every case names a model that is not there, so that nothing is computed."""
    words = [draw(st.sampled_from(COMMANDS))]
    for option in draw(st.lists(st.sampled_from(OPTIONS), max_size=4)):
        words += [option, *draw(st.lists(st.sampled_from(VALUES), max_size=1))]
    if draw(st.booleans()):
        words.insert(1, "prompt")
    return Case((*words, "--model", "nowhere/at/all"))


def check(case: Case) -> None:
    """The target."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            app(list(case.words))
        except SystemExit as end:
            code = end.code
    assert code == 2, f"exit code {code}"
    lines = [line for line in said.getvalue().split(os.linesep) if line.strip() and not line.endswith(" s so far")]  # of a slow machine
    assert len(lines) == 1, f"{len(lines)} lines: {lines[:3]}"
