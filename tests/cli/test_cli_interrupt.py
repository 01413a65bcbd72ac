"""Ctrl-C: what it says, and that finished rows are kept."""

import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext

import pytest

from quantkv.bench import timing
from quantkv.cli import common, eval_command, readers
from quantkv.cli import eval as eval_module

evaluated = eval_module.evaluate
FORMATS = "fp32,int8,int4"
TEXT = "The quick brown fox jumps over the lazy dog. " * 20
# A package whose import takes the exception for something else, as torch's and transformers' do.
IMPORT = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
except BaseException:
    raise ModuleNotFoundError("No module named 'torch'", name="torch") from None
"""
# The same signal in an evaluation, before the second format's sizes are taken.
EVALUATION = """
import os, signal, sys
from quantkv.cli import app, eval
measure, measured = eval.measure, []
def interrupted(result, *rest):
    measured.append(result.name)
    if len(measured) == 2:
        os.kill(os.getpid(), signal.SIGINT)
    measure(result, *rest)
eval.measure = interrupted
app(sys.argv[1:])
"""


@pytest.fixture
def evaluate(run, noisy, model_dir, text_file, tmp_path, monkeypatch):
    """Run an evaluation in contexts of 256 tokens: (exit code, stdout, stderr, figures)."""
    text_file.write_text(TEXT)
    monkeypatch.setattr(eval_command, "LOGITS_AT_ONCE", 1)  # one context after the other

    def evaluate(tokens, interrupted_pass=None, *more):
        cache, count = noisy, itertools.count()

        def make_cache(model, name):
            if next(count) == interrupted_pass:
                raise KeyboardInterrupt
            return cache(model, name)

        file = tmp_path / "out.json"
        file.unlink(missing_ok=True)
        with monkeypatch.context() as patch:
            read = readers.ThroughCache(None, make_cache, lambda model: nullcontext())
            patch.setattr(eval_module, "evaluate", lambda *a, **k: evaluated(*a, **{**k, "read": read}))
            args = ("eval", "--model", model_dir, "--text", text_file, "--kv", FORMATS, "--context", 256, "--tokens", tokens)
            code, out, err = run(*args, "--json", file, *more)
        return code, out, err, json.loads(file.read_text())["runs"][0] if file.exists() else None

    return evaluate


def without_times(figures):
    for name in ("contexts_asked", "formats_asked"):
        del figures[name]
    for row in (figures["reference"], *figures["formats"]):
        del row["seconds"]
    return figures


@pytest.mark.parametrize("interrupted_pass", [3, 5])
def test_whole_contexts_are_kept(evaluate, interrupted_pass):
    """Interrupted in the second context: the figures are those of a run over the first, none of them over more."""
    code, _, _, first = evaluate(256)
    assert code == 0
    code, out, err, figures = evaluate(768, interrupted_pass)
    assert code == 130 and err.splitlines()[-1] == "interrupted: the figures are over 1 of 3 contexts, of 3 of 3 formats"
    assert "64 tokens decoded behind prompts of 192 in contexts of 256" in out and all(name in out for name in FORMATS.split(","))
    assert figures.pop("complete") is False and first.pop("complete") is True
    assert without_times(figures) == without_times(first)


def test_formats_that_are_through_the_first_context_are_kept(evaluate, tmp_path):
    _, _, _, first = evaluate(256)
    code, out, err, figures = evaluate(768, 2, "--plot", tmp_path / "out.svg")
    assert code == 130 and err.splitlines()[-1] == "interrupted: the figures are over 1 of 3 contexts, of 2 of 3 formats"
    assert "int8" in out and "int4" not in out
    assert "int8" in (tmp_path / "out.svg").read_text()
    assert without_times(figures)["formats"] == without_times(first)["formats"][:2]


def test_nothing_finished(evaluate):
    code, out, err, figures = evaluate(256, 0)
    assert (code, out, err.strip(), figures) == (130, "", "interrupted", None)


def test_rows_of_bench_are_kept(run, tmp_path, monkeypatch):
    measure, count = timing.measure, itertools.count()

    def interrupted(*args):
        if next(count) == 3:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(timing, "measure", interrupted)
    shapes = "B1xL64xHQ4xHK2xD64,N20xHQ4xHK2xD64"
    args = ("bench", "--device", "cpu", "--shape", shapes, "--kv", "int4,int8", "--json", tmp_path / "out.json")
    code, out, err = run(*args)
    assert code == 130 and err.splitlines()[-1] == "interrupted: the 3 rows above were finished"
    assert (out.count("quantkv cpu"), out.count("quantkv reference")) == (1, 2)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    found = sorted((r["kind"], r["name"], r["stores"]) for r in rows)
    assert found == [("decode", "quantkv cpu", "int4"), *(("decode", "quantkv reference", name) for name in ("int4", "int8"))]
    monkeypatch.setattr(timing, "measure", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(*args)[0] == 130


def interruptible(*args, **how):
    """A Python process to which Ctrl-C means what it means in a terminal: what runs in the background ignores it."""
    to_default = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, preexec_fn=to_default, **how)


def test_signal_during_an_import(tmp_path):
    (tmp_path / "typer.py").write_text(IMPORT)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    found = interruptible("-m", "quantkv", env={**os.environ, "PYTHONPATH": path})
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "interrupted\n")


def test_signal_during_an_evaluation(model_dir, text_file):
    args = ("eval", "--model", model_dir, "--text", text_file, "--kv", "int8,int4", "--context", 256, "--tokens", 256)
    found = interruptible("-c", EVALUATION, *map(str, args))
    assert found.returncode == 130 and "int8" in found.stdout and "int4" not in found.stdout
    assert found.stderr.splitlines()[-1] == "interrupted: the figures are over 1 of 1 contexts, of 1 of 2 formats"


@pytest.mark.parametrize("seconds, words", [(0.2, "1 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599.7, "1 h 0 min"), (7500, "2 h 5 min")])
def test_durations(seconds, words):
    assert common.duration(seconds) == words
