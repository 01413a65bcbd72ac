"""No code of a model's folder is run, whoever answers on standard input."""

import ast
import io
import json
import shutil
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

ROOT = Path(__file__).parents[2]
EVIL = """
from pathlib import Path
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
Path({marker!r}).touch()
class EvilConfig(PreTrainedConfig):
    model_type = "evil"
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
def generate(model, **kwargs):
    pass
"""


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """The file that the folder's code would make; standard input says yes to whatever is asked."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    return tmp_path / "ran"


def into(folder, marker, way):
    """Code of its own beside a model's files, named in one of the ways that transformers knows."""

    def change(name, **fields):
        file = folder / name
        given = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**given, **fields}))

    (folder / "custom_generate").mkdir()
    for file in ("evil.py", "custom_generate/generate.py"):
        (folder / file).write_text(EVIL.format(marker=str(marker)))
    if way == "config":
        change("config.json", model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})
    elif way == "model":
        change("config.json", auto_map={"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"})
    elif way == "tokenizer":
        change("tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map={"AutoTokenizer": [None, "evil.EvilTokenizer"]})
    elif way == "attention":
        change("config.json", attn_implementation="someone/kernels")
    return folder


@pytest.mark.parametrize("way", ["config", "model", "tokenizer", "generation", "attention"])
def test_code_of_a_folder_is_not_run(run, model_dir, tmp_path, marker, way):
    folder = into(shutil.copytree(model_dir, tmp_path / "model"), marker, way)
    code, out, err = run("generate", "Hello", "--model", folder, "--kv", "int8", "--max-new-tokens", 1)
    assert not marker.exists()
    if way in ("model", "generation"):  # the folder's other files say all that is needed
        assert code == 0, err
    else:
        assert (code, out) == (2, "") and err.count("\n") == 1 and str(folder) in err, err
        word = {"config": "custom code", "tokenizer": "custom code", "attention": "attn_implementation='someone/kernels'"}[way]
        assert word in err


ABOUT = ("--context", 128, "--tokens", 256, "--text")
COMMANDS = {"eval": ("--kv", "int8", *ABOUT), "calibrate": ABOUT, "tune": ("--budget", 60, *ABOUT), "bench": (), "plan": (), "doctor": ()}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_asks(run, model_dir, tmp_path, marker, text_file, command):
    folder = into(shutil.copytree(model_dir, tmp_path / "model"), marker, "config")
    given = (*COMMANDS[command], text_file) if COMMANDS[command] else ()
    code, out, err = run(command, *(["--model"] if command in ("bench", "eval") else []), folder, *given)
    assert not marker.exists() and code == 2 and out == "" and err.count("\n") == 1
    assert ("contains custom code" if given else "model_type='evil' is unknown") in err


def test_code_beside_a_gguf_file_is_not_run(run, gguf, model_dir, marker):
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, gguf.parent)
    into(gguf.parent, marker, "config")
    run("generate", "Hello", "--model", gguf, "--kv", "int8", "--max-new-tokens", 1)
    assert not marker.exists()


def test_whoever_loads_a_model_says_so():
    """In every script, example and test of the repository; those of the package go through one dict."""
    files = [file for folder in ("src", "examples", "scripts", "benchmarks", "tests") for file in (ROOT / folder).rglob("*.py")]
    found = 0
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
            if name == "from_pretrained":
                given = ast.unparse(node)
                assert "trust_remote_code=False" in given or "**FILES_ALONE" in given, f"{file}:{node.lineno}"
                found += 1
    assert found >= 4
