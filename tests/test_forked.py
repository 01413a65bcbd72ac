"""Tasks in forked processes."""

import os
import signal
import time
from functools import partial

import pytest

from quantkv.forked import ForkedExecutor

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")


def note(folder, name, until=None):
    """A task: writes its process, and waits for a file."""
    (folder / name).write_text(str(os.getpid()))
    while until is not None and not (folder / until).exists():
        time.sleep(0.01)


def test_tasks_run_in_processes_of_their_own(tmp_path):
    with ForkedExecutor(2) as executor:
        futures = [executor.submit(partial(note, tmp_path, str(i))) for i in range(5)]
        executor.drain()
        assert [future.result(0) for future in futures] == [None] * 5
    pids = {(tmp_path / str(i)).read_text() for i in range(5)}
    assert len(pids) == 5 and str(os.getpid()) not in pids and not executor.failed


def test_so_many_at_once_and_the_longest_first(tmp_path):
    executor = ForkedExecutor(2)
    for name in "ab":
        executor.submit(partial(note, tmp_path, name, "go"))
    order = tmp_path / "order"
    written = lambda name: order.open("a").write(name)
    for name, cost in (("short", 1), ("longest", 3), ("long", 2)):
        executor.submit(partial(written, name + " "), cost=cost)
    assert len(executor.running) == 2 and len(executor.waiting) == 3
    executor.workers = 1  # once both are done
    (tmp_path / "go").touch()
    executor.drain()
    assert order.read_text() == "longest long short "


def test_a_task_that_fails_is_told_and_the_others_run(tmp_path, capfd):
    executor = ForkedExecutor(1)
    tasks = lambda: 1 / 0, lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: None
    failing, dying, good = map(executor.submit, tasks)
    executor.drain()
    assert "ZeroDivisionError" in capfd.readouterr().err and executor.failed == 2
    for future, status in ((failing, "1"), (dying, "-9")):
        with pytest.raises(RuntimeError, match=f"status {status}$"):
            future.result(0)
    assert good.result(0) is None


def test_what_is_cancelled_does_not_run(tmp_path):
    executor = ForkedExecutor(1)
    executor.submit(partial(note, tmp_path, "first"))
    future = executor.submit(partial(note, tmp_path, "second"))
    executor.shutdown(cancel_futures=True)
    assert future.cancelled() and [path.name for path in tmp_path.iterdir()] == ["first"]
