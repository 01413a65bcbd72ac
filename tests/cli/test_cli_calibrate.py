"""`quantkv calibrate`, and what `generate` makes of a policy."""

import json

import pytest

from conftest import TEXT
from quantkv.calibration import Calibration
from quantkv.cli import models


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def calibrate(run, model_dir, text, *more):
    return run("calibrate", str(model_dir), "--text", str(text), "--tokens", "512", "--context", "128", *more)


def test_a_file_that_a_policy_names(run, model_dir, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = calibrate(run, model_dir, text, "--positions", "256")
    made = Calibration.load(tmp_path / f"{model_dir.name}.calibration.safetensors")
    assert code == 0 and made.digest[:16] in out and "2 layers, 256 positions, from 512 tokens" in out
    assert made.made_of == {"model": model_dir.name, "text": "text.txt", "contexts": 4, "tokens": 512}
    assert made.geometry.heads == {0: (1, 64, 64), 1: (1, 64, 64)}
    policy = {"policy_version": 1, "format": "levels4", "calibration": f"{model_dir.name}.calibration.safetensors"}
    (tmp_path / "mine.json").write_text(json.dumps(policy))
    generate = ("generate", "hello", "--model", str(model_dir), "--raw", "--max-new-tokens", "3", "--kv")
    code, out, _ = run(*generate, str(tmp_path / "mine.json"))
    assert code == 0 and "mine cache" in out
    code, _, error = run(*generate, str(tmp_path / "yours.json"))
    assert code == 2 and error.startswith("error: --kv: policy=") and "yours.json" in error


REFUSED = {
    "few tokens": (("--tokens", "255"), "--tokens 255: at least 256 are needed"),
    "less than a context": (("--context", "1024"), "--tokens 512: at least one context is needed (--context 1024)"),
    "a short text": (("--tokens", "2048", "--context", "1024"), "fewer than one context (--context 1024)"),
    "few tokens in contexts": (("--tokens", "300", "--context", "160"), "160 tokens in whole contexts, 256 are needed"),
    "no such text": (("--text", "absent.txt"), "--text absent.txt: no such file"),
    "no folder": (("--out", "absent/file.safetensors"), "--out absent/file.safetensors: no such directory"),
    "another ending": (("--out", "file.json"), "--out file.json: the name must end in .safetensors"),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED)
def test_refused_before_the_model_is_loaded(arguments, message, run, model_dir, text, monkeypatch):
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("the model was loaded"))
    code, _, error = calibrate(run, model_dir, text, *arguments)
    assert code == 2 and message in error


def test_more_tokens_than_the_text_has(run, model_dir, text, tmp_path):
    code, _, error = calibrate(run, model_dir, text, "--tokens", "4096", "--out", str(tmp_path / "c.safetensors"))
    assert code == 0 and "--text text.txt: only 896 tokens in whole contexts" in error
    assert Calibration.load(tmp_path / "c.safetensors").made_of["tokens"] == 896
