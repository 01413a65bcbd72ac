"""What is missing, cut short or too long: one line on stderr, exit code 2."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from gguf import GGUFReader
from safetensors.torch import load_file, save_file

from quantkv.cli import models, reading
from quantkv.integrations.transformers_model import max_positions

# Nothing but quantkv's own dependencies can be imported, as after `pip install quantkv`.
CORE = """
import importlib.metadata, runpy, sys
from packaging.requirements import Requirement
plain = lambda name: name.lower().replace("-", "_")
known, left = set(), ["quantkv"]
while left:
    known.add(plain(name := left.pop()))
    needed = [r for r in map(Requirement, importlib.metadata.requires(name) or ()) if not r.marker or r.marker.evaluate({"extra": ""})]
    left += [requirement.name for requirement in needed if plain(requirement.name) not in known]
packages = importlib.metadata.packages_distributions()
class Blocker:
    def find_spec(self, name, path=None, target=None):
        owners = packages.get(name.partition(".")[0])
        if owners and not set(map(plain, owners)) & known:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
import quantkv
assert quantkv.get_format("int4").cache_spec(2, 64).page_bytes
sys.argv = ["quantkv", *sys.argv[1:]]
runpy.run_module("quantkv", run_name="__main__", alter_sys=True)
"""
WITHOUT = "import runpy, sys; sys.modules[sys.argv.pop(1)] = None; runpy.run_module('quantkv', run_name='__main__', alter_sys=True)"


@pytest.fixture
def copied(model_dir, tmp_path):
    """A copy of the model's folder, to damage."""
    return shutil.copytree(model_dir, tmp_path / "model")


@pytest.fixture
def fails(run):
    """Run the command line, which must refuse: its one line on stderr."""

    def fails(*args):
        code, out, err = run(*args)
        assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, err
        return err

    return fails


def test_module_runs():
    found = subprocess.run([sys.executable, "-m", "quantkv", "--help"], capture_output=True, text=True, check=True)
    assert "eval" in found.stdout and "generate" in found.stdout and "bench" in found.stdout


@pytest.mark.parametrize("package", ["typer", "rich", "transformers"])
def test_without_the_extra(package, model_dir):
    args = ["generate", "Hello", "--model", str(model_dir)]
    found = subprocess.run([sys.executable, "-c", WITHOUT, package, *args], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == f"error: the package {package} is not installed; the command line needs: pip install 'quantkv[cli]'\n"


@pytest.mark.usefixtures("installed")
def test_with_core_dependencies_only():
    found = subprocess.run([sys.executable, "-c", CORE, "--help"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "error: the package typer is not installed; the command line needs: pip install 'quantkv[cli]'\n"


@pytest.mark.parametrize("package", ["filelock", "gguf"])
def test_without_what_gguf_needs(fails, gguf, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    err = fails("generate", "Hello", "--model", gguf)
    assert package in err and "pip install" in err


def test_gguf_is_converted_and_generates(run, gguf):
    code, out, err = run("generate", "Hello", "--model", gguf, "--kv", "int8", "--max-new-tokens", 2)
    assert code == 0, err
    assert "5 tokens read, 2 written; the cache holds 6 tokens in" in err and "int8 cache" in out


def test_gguf_cut_anywhere(fails, gguf, tmp_path):
    """In the counts, names and values of the header, before, in and at the end of the tensors."""
    whole, header = gguf.read_bytes(), GGUFReader(gguf).data_offset
    cut = tmp_path / "cut.gguf"
    for size in [*range(4, header, 41), header - 1, *range(header, len(whole), 4099), len(whole) - 4, len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError) as refused:
            models.converted(cut)
        assert f"--model {cut}: cut.gguf, {size:,} bytes, is cut short or damaged; allowed: a complete file" in str(refused.value)
    assert "cut short" in fails("generate", "Hello", "--model", cut)


@pytest.mark.parametrize("size", [0, 4, 8, 100, 428348, -1])
def test_safetensors_cut_anywhere(fails, copied, size):
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    err = fails("generate", "Hello", "--model", copied)
    assert f"--model {copied}: model.safetensors, {file.stat().st_size:,} bytes, is cut short or damaged" in err


def test_weights_that_are_not_there(fails, copied):
    """transformers fills them with random numbers."""
    file, name = copied / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    weights = load_file(file)
    kept = weights.pop(name)
    save_file(weights, file, metadata={"format": "pt"})
    assert f"--model {copied}: 1 of the model's tensors are not in its files, the first is {name}" in fails(
        "generate", "Hello", "--model", copied
    )
    save_file({**weights, name: kept[:3, :5].contiguous()}, file, metadata={"format": "pt"})
    assert f"--model {copied}: {name} is [3, 5] in its files, [64, 128] after its config" in fails("generate", "Hello", "--model", copied)


def test_tokenizer_cut(fails, copied):
    (copied / "tokenizer.json").write_text('{"version": "1.0", "model": {')
    assert f"--model {copied}: its tokenizer: " in fails("generate", "Hello", "--model", copied)


def test_torch_file_that_is_none(fails, copied):
    (copied / "model.safetensors").unlink()
    (copied / "pytorch_model.bin").write_bytes(b"PK" + bytes(100))
    assert f"--model {copied}: pytorch_model.bin, 102 bytes, is cut short or damaged" in fails("generate", "Hello", "--model", copied)


def test_messages_of_others_are_shortened(copied):
    with pytest.raises(ValueError, match=r"x: word word .* \.\.\.$") as refused, reading.reading("x"):
        raise RuntimeError("word " * 1000)
    assert len(str(refused.value)) < 310


@pytest.mark.parametrize("folder", ["file/cache", "/proc/cache"])
def test_cache_folder_that_cannot_be_made(fails, gguf, tmp_path, monkeypatch, folder):
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path / folder))
    assert f"the cache folder {tmp_path / folder / 'models'} cannot be written" in fails("generate", "Hello", "--model", gguf)


def test_conversion_says_what_it_takes(gguf, tmp_path):
    told = []
    folder = models.converted(gguf, announce=told.append)
    numbers = sum(tensor.n_elements for tensor in GGUFReader(gguf).tensors)
    assert len(told) == 1 and f"converting tiny.gguf once, to {4e-6 * numbers:.1f} MB in {folder.parent}: about 1 s" == told[0]
    assert abs((folder / "model.safetensors").stat().st_size - 4 * numbers) < 4096 and not (folder / "sample").exists()
    models.converted(gguf, announce=told.append)
    assert len(told) == 1


def test_conversion_needs_room(fails, gguf, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    err = fails("generate", "Hello", "--model", gguf)
    assert f"--model {gguf}: converted, it takes" in err and "QUANTKV_CACHE" in err
    assert not list((tmp_path / "cache" / "models").glob("*.partial-*"))


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.\nframe #1")]
)
def test_out_of_memory(fails, monkeypatch, model_dir, error):
    monkeypatch.setattr(models.Found, "load", lambda *args: (_ for _ in ()).throw(error))
    err = fails("generate", "Hello", "--model", model_dir)
    assert "out of memory" in err and "frame" not in err and "allowed: " in err


def test_prompt_that_is_not_text(fails, model_dir):
    assert "PROMPT 'a\\udcff': not UTF-8 at character 1" in fails("generate", "a\udcff", "--model", model_dir)


@pytest.fixture
def short_model(copied):
    """The model with 32 positions."""
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    return copied


def test_contexts_longer_than_the_model(run, fails, noisy, short_model, text_file):
    args = ("eval", "--model", short_model, "--text", text_file, "--kv", "int8", "--tokens", 256, "--context")
    err = fails(*args, 33)
    assert "--context 33: model has 32 positions, 33 are needed; allowed: at most 32" in err
    assert run(*args, 32)[0] == 0


def test_texts_longer_than_the_model(run, fails, noisy, short_model):
    args = ("generate", "Hello", "--model", short_model, "--max-new-tokens")
    err = fails(*args, 29)
    assert "--max-new-tokens 29 after a PROMPT of 5 tokens: model has 32 positions, 33 are needed; allowed: at most 28" in err
    assert run(*args, 28)[0] == 0
    assert "a shorter PROMPT" in fails("generate", "Hello" * 7, "--model", short_model)


@pytest.mark.parametrize(
    "config, positions",
    [
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        (
            {
                "max_position_embeddings": 32768,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        ({"max_position_embeddings": 131072, "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, 131072),
    ],
)
def test_positions(config, positions):
    text = SimpleNamespace(**config)
    assert max_positions(SimpleNamespace(get_text_config=lambda decoder: text)) == positions
