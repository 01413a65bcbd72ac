"""Pipes with the names of files: nothing waits for whoever would write them."""

import json
import os
import shutil
import threading

import pytest
import torch

from fuzzing import files
from quantkv import whole_file
from quantkv.calibration import Calibration
from quantkv.cli import configs
from quantkv.known_models import config_of
from quantkv.policy import Policy

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")


def returns(call):
    """What a call returns or raises; a failure where it waits."""
    found = []

    def catch():
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=catch, daemon=True)
    thread.start()
    thread.join(20)
    assert found, "it waits for a pipe's writer"
    return found[0]


@pytest.fixture
def folder(tmp_path):
    """A policy and a page file, with all that they name."""
    files.cache_of().save(tmp_path / files.NAMES["pages"])
    files.policy_of().save(tmp_path / files.NAMES["policy"])
    return tmp_path


@pytest.mark.parametrize("file", files.NAMES)
def test_a_pipe_in_a_file_s_place_is_refused(folder, file):
    path = folder / files.NAMES[file]
    path.unlink()
    os.mkfifo(path)
    if file == "pages":
        target = files.cache_of()
        before = target.buffer.clone()
        error = returns(lambda: target.load(path))
        assert isinstance(error, OSError) and torch.equal(target.buffer, before)
    else:
        error = returns(lambda: Policy.load(folder / files.NAMES["policy"]))
        assert isinstance(error, ValueError)
    assert "a pipe; a regular file is needed" in str(error) and str(path) in str(error)


def test_folders_and_devices_are_no_files(tmp_path):
    for path, kind in ((tmp_path, "a folder"), ("/dev/zero", "a device")):
        with pytest.raises(ValueError, match=f"calibration=.*{kind}; a regular file is needed"):
            Calibration.load(path)


def test_a_pipe_named_as_a_temporary_file_stays(folder):
    """Whoever may write to a shared folder can put it there."""
    pipe = folder / ".quantkv-0123456789abcdef.tmp"
    os.mkfifo(pipe)
    assert returns(lambda: files.cache_of().save(folder / "new.pages")) is None
    assert whole_file.TEMPORARY.fullmatch(pipe.name) and pipe.exists()
    loaded = files.cache_of()
    loaded.load(folder / "new.pages")
    assert torch.equal(loaded.buffer, files.cache_of().buffer)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_plans_read_no_pipe(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama-3-8b")))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    error = returns(lambda: configs.describe(str(tmp_path)))
    assert isinstance(error, ValueError) and str(error).startswith("MODEL ")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json", "model.gguf"])
def test_models_are_read_from_no_pipe(tmp_path, monkeypatch, name):
    from quantkv.cli import models

    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    if name not in ("config.json", "model.gguf"):
        (folder / "config.json").write_text(json.dumps(config_of("llama-3-8b")))
    os.mkfifo(folder / name)
    error = returns(lambda: models.find(str(folder)))
    assert isinstance(error, (ValueError, OSError)), error
    assert ("no config.json" if name == "config.json" else name) in str(error)


def test_a_conversion_removes_what_it_can(tmp_path, monkeypatch):
    """A pipe that is named as what a killed conversion left is no folder."""
    from quantkv.cli import models

    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path / "cache"))
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF" + bytes(100))
    final = models.converted(gguf, convert=lambda _, target: (target / "config.json").write_text("{}"))
    shutil.rmtree(final)
    os.mkfifo(final.parent / f"{final.name}.partial-abc")
    assert returns(lambda: models.converted(gguf, convert=lambda _, target: (target / "config.json").write_text("{}"))) == final
