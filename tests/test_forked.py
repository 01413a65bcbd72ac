"""Tasks in forked processes, and a layer's kernels that another process compiles while an engine loads its weights."""

import io
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from quantkv import assumed, warmup
from quantkv.engine import ahead, background
from quantkv.engine.background import Background, Wanted
from quantkv.engine.layer_config import LayerConfig
from quantkv.engine.warm_up import StepLimits
from quantkv.forked import ForkedExecutor
from quantkv.geometry import Heads
from quantkv.implementations.triton import launch
from quantkv.policy import Policy
from quantkv.policy_file import PRESETS

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
LOGGER = logging.getLogger("quantkv.test")
H100 = assumed.GPUS["h100"]
SMALL = Wanted(
    format="levels4",
    full_precision=(16, 24),
    statistics=True,
    num_heads=4,
    heads=(2, 64, 64),
    dtype="bfloat16",
    gpu=H100,
    limits=StepLimits(4, 300, 600, 1, 40),
    block_size=16,
    own_rows=True,
)


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


@pytest.fixture
def collected(monkeypatch):
    """What would be compiled: NVRTC's configurations, and arguments of Triton's launches."""
    found = []

    def compile_ahead(launches, pool, device):
        found.extend((made.kernel.fn.__name__, str(made.options), str(made.arguments.get("F"))) for made in launches)
        return len(launches)

    monkeypatch.setattr(warmup._Ahead, "compile", lambda self, configs: (c := set(configs), found.extend(c), self.begun.update(c)))
    monkeypatch.setattr(launch, "compile_ahead", compile_ahead)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is compiled is worked out without a GPU")
def test_a_layer_as_plain_data_needs_the_same_kernels(collected):
    """As one that a policy describes: through JSON, as the other process gets it."""
    policy, heads = Policy.from_dict(PRESETS["4bit"]), Heads(*SMALL.heads)
    config = ahead.stood_in(LayerConfig.of(policy, 0, torch.bfloat16, heads), 0, heads)
    layer = ahead.PagedLayer(config, heads, torch.bfloat16)
    ahead.compile_layer(layer, ahead.LayerAttention(4), H100, SMALL.limits, 16)
    wanted, collected[:] = set(collected), []
    told = Wanted.read(SMALL.text)
    told.compile(ForkedExecutor())
    assert set(collected) == wanted and len(wanted) > 15
    collected.clear()
    replace(told, options={"window": 100}, own_rows=False).compile(ForkedExecutor())
    assert set(collected) != wanted


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path))
    return tmp_path / "ahead"


def processes(monkeypatch, main):
    """Let the other process run `main`, a script, in place of its own; the list of what it is given."""
    monkeypatch.setattr(background, "MAIN", main)


DONE = "import sys, json; json.load(sys.stdin); open(sys.argv[2] + '.done', 'w').write('{}')"


def test_it_is_waited_for_and_done_once(places, monkeypatch, caplog):
    processes(monkeypatch, "import time; time.sleep(0.3)\n" + DONE)
    caplog.set_level(logging.INFO)
    one, other = Background(), Background()
    one.begin(SMALL, LOGGER), one.begin(SMALL, LOGGER)
    other.begin(SMALL, LOGGER)  # another rank, while the first is at it
    assert len(one.processes) == 1 and not other.processes
    assert other.wait(LOGGER) > 0.1 and len([*places.glob("*.done")]) == 1
    one.wait(LOGGER)
    assert "waited" in caplog.text and not [r for r in caplog.records if r.levelno > logging.INFO]
    caplog.clear()
    again = Background()
    again.begin(SMALL, LOGGER)
    assert not again.processes and not again.places and again.wait(LOGGER) < 0.1 and not caplog.records
    again.begin(replace(SMALL, block_size=64), LOGGER)
    assert len(again.processes) == 1
    again.wait(LOGGER)


def test_what_fails_there_is_told_and_left_to_the_warm_up(places, monkeypatch, caplog):
    processes(monkeypatch, "import sys; sys.exit(3)")
    made = Background()
    made.begin(SMALL, LOGGER)
    made.wait(LOGGER)
    assert "status 3: they are compiled now" in caplog.text and not [*places.glob("*.done")]
    made = Background()
    made.begin(SMALL, LOGGER)
    assert len(made.processes) == 1  # it is tried again
    made.wait(LOGGER)


def test_nobody_waits_for_ever(places, monkeypatch, caplog):
    processes(monkeypatch, "import time; time.sleep(60)")
    made = Background()
    made.begin(SMALL, LOGGER)
    (process,) = made.processes
    assert 0.2 <= made.wait(LOGGER, 0.2) < 30 and "not there after 0 s" in caplog.text
    process.kill(), process.wait()


@pytest.mark.parametrize("folder", ["file", "no process"])
def test_an_engine_starts_without_it(folder, tmp_path, monkeypatch, caplog):
    """Where nothing can be kept, or no process begins, one line says so."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path / folder))
    if folder == "no process":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    made = Background()
    made.begin(SMALL, LOGGER)
    assert "not compiled while the model loads" in caplog.text and made.wait(LOGGER) < 10


@pytest.mark.parametrize("failed", [0, 1])
def test_a_kernel_that_fails_leaves_no_note(failed, tmp_path, monkeypatch):
    """So that the next start tries again."""
    monkeypatch.setattr(background.Wanted, "compile", lambda wanted, executor: setattr(executor, "failed", failed) or {"nvrtc": 2})
    monkeypatch.setattr(sys, "stdin", io.StringIO(SMALL.text))
    monkeypatch.setattr(background.gc, "freeze", lambda: None)
    assert background.main(str(tmp_path / "place")) == failed
    assert [path.read_text() for path in tmp_path.iterdir()] == ([] if failed else ['{"nvrtc": 2}'])


def test_the_other_process(places, tmp_path):
    """It runs, sees no GPU, and tells a failed kernel: here a format that is none."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", background.MAIN, str(background.PACKAGE.parent), str(tmp_path / "place")]
    found = subprocess.run(command, input=replace(SMALL, format="int5").text, env=environment, capture_output=True, text=True)
    assert found.returncode == 1 and "int5" in found.stderr and not (tmp_path / "place.done").exists()
