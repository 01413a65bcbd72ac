"""Everything public called with anything: the answer of an oracle made from the documents, or an exception that names the cause.

A target is a module with `cases()`, a hypothesis strategy of calls in plain data, and `check(case)`, which raises where the answer is
wrong. SHARE: of all cases."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from . import attention, command, configurations, files, names, refusals, rows, tables

TARGETS = {
    "attention": attention,
    "rows": rows,
    "refusals": refusals,
    "vllm names": names,
    "page table": tables,
    "files": files,
    "configurations": configurations,
    "command line": command,
}


@contextmanager
def elsewhere() -> Iterator[None]:
    """Runs what it holds in an empty folder, so that a path that was made up is none of the repository's. AssertionError where a file was
    left there: no target may write to such a path."""
    home = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(home)
        left = sorted(os.listdir(folder))
        assert not left, f"files were written to paths that were made up: {left}"
