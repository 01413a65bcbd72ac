"""What a newcomer meets first: help, version, completion; and that one thing has one name in all commands."""

import os
import subprocess
import sys

import pytest
from typer.main import get_command

import quantkv
from quantkv.cli import completion, output
from quantkv.cli.main import commands

RUN = """
import sys
from quantkv.cli import app
try:
    app(sys.argv[1:])
finally:
    assert not {"torch", "transformers", "matplotlib"} & set(sys.modules)
"""


def light(*args, **environment):
    """Run the command line, which must not load torch: its standard output."""
    found = subprocess.run([sys.executable, "-c", RUN, *args], capture_output=True, text=True, env={**os.environ, **environment})
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_help_lists_commands_and_formats():
    shown = light("--help", TERMINAL_WIDTH="200", COLUMNS="200")
    assert "--version" in shown and "--install-completion" in shown
    places = [
        shown.index(f" {name} ") for name in ("doctor", "formats", "plan", "generate", "eval", "calibrate", "tune", "report", "bench")
    ]
    assert places == sorted(places)
    words = shown.partition("Formats:")[2].replace(",", " ").replace(";", " ").split()
    assert set(quantkv.available_formats()) <= set(words)


def test_version(run):
    assert run("--version") == (0, f"quantkv {quantkv.__version__}\n", "")


@pytest.mark.parametrize(
    "words, found",
    [
        ("quantkv generate --kv lev", {"levels2", "levels8"}),
        ("quantkv eval --kv int8,tq", {"int8,tq4", "int8,tq_k8v4"}),
        ("quantkv bench --model llama-3", {"llama-3-8b"}),
        ("quantkv ca", {"calibrate"}),
    ],
)
def test_a_shell_completes(words, found):
    asked = {"_QUANTKV_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    given = light(**asked).split()
    assert found <= set(given) and all(one.startswith(words.split()[-1]) for one in given)


def test_caches_are_completed_in_lists_and_pairs(tmp_path, monkeypatch):
    (tmp_path / "mine.json").touch()
    monkeypatch.chdir(tmp_path)
    assert completion.caches("m") == ["mine.json"] and completion.caches("int4,m") == ["int4,mine.json"]
    assert completion.caches("fp32,int8/trel") == ["fp32,int8/trellis2"]
    assert completion.caches("no") == []
    assert completion.caches("4b") == ["4bit"] and completion.caches("int4,8b") == ["int4,8bit"] and completion.caches("int8/4b") == []
    assert set(quantkv.available_formats()) <= set(completion.caches(""))


@pytest.mark.parametrize(
    "typed, spelled",
    [
        ("plan m --json", "plan m --json=-"),
        ("plan --json m", "plan --json=- m"),
        ("formats --json", "formats --json=-"),
        ("doctor --json=a.json m", "doctor --json=a.json m"),
        ("eval --json", "eval --json=-"),
        ("eval --json --kv int4", "eval --json=- --kv int4"),
        ("eval --json a.json --kv int4", "eval --json a.json --kv int4"),
        ("bench --json -", "bench --json -"),
        ("tune m --json a", "tune m --json a"),
        ("tune --json -- m", "tune --json=- -- m"),
        ("generate -- --json", "generate -- --json"),
        ("--json eval", "--json eval"),
    ],
)
def test_json_takes_a_file_or_none(typed, spelled):
    assert output.spelled(typed.split()) == spelled.split()


def test_one_name_for_one_thing():
    """Old names are gone, and an option that several commands have takes the same everywhere."""
    seen = {}
    for name in ("generate", "eval", "calibrate", "tune", "bench"):
        options = {option.opts[0]: option for option in get_command(commands).commands[name].params if option.param_type_name == "option"}
        assert {"--model", "--device"} <= options.keys() and not {"--formats", "--policy"} & options.keys()
        assert ("--kv" in options) == (name != "calibrate")
        for option in ("--device", "--dtype", "--json", "--full-precision", "--calibration", "--text", "--plot"):
            if option in options:
                seen.setdefault(option, set()).add(options[option].metavar)
    for name in ("plan", "formats", "doctor"):
        (option,) = [option for option in get_command(commands).commands[name].params if option.name == "json_file"]
        seen["--json"].add(option.metavar)
    assert len(seen) == 7 and all(len(metavars) == 1 for metavars in seen.values()), seen
