"""Every snippet of README.md and docs/ is run, or its command parsed, or it says why not (`documents.py`)."""

import contextlib
import importlib
import io
import json
import re
import shutil
import subprocess
from itertools import pairwise

import pytest

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

pytest.importorskip("transformers")
import typer

from documents import PAGES, ROOT, Block, blocks, commands, given, inline_code
from quantkv.cli.main import commands as application
from quantkv.integrations import asked as server_options
from quantkv.integrations import vllm as plugin
from quantkv.policy import Policy

BLOCKS = [block for page in PAGES for block in blocks(page)]
NO_CHECK = ("cd", "curl", "export", "git", "kill", "tar")  # of a command of these nothing is ours
PRINTED = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)


def of(*languages: str) -> list[str]:
    """Pages that have a block of one of these languages which is to be run."""
    return list(dict.fromkeys(b.page for b in BLOCKS if b.language in languages and not b.marks.keys() & {"not run", "shows"}))


def those(page: str, *languages: str) -> list[Block]:
    return [b for b in BLOCKS if b.page == page and b.language in languages and not b.marks.keys() & {"not run", "shows"}]


def test_every_language_is_known():
    strange = [str(b) for b in BLOCKS if b.language not in ("", "python", "json", "text") and "shows" not in b.marks]
    assert not strange, "blocks in a language that nothing checks: add a mark, or a check to this file"


@pytest.mark.parametrize("page", of("python"))
def test_python_runs(page, tmp_path, monkeypatch):
    """In the page's order and in one namespace. What `print(x)  # y` prints is y."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in those(page, "python"):
        names |= given(block.marks["given"]) if "given" in block.marks else {}
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * block.line + block.code, str(ROOT / page), "exec"), names)
        expected = PRINTED.findall(block.code)
        assert not expected or out.getvalue().splitlines() == expected, block


@pytest.mark.parametrize("block", [b for b in BLOCKS if "shows" in b.marks], ids=str)
def test_block_is_the_file(block):
    assert block.code.strip() == (ROOT / block.marks["shows"]).read_text().strip()


@pytest.mark.parametrize("page", of("json"))
def test_json_is_read(page, tmp_path):
    """Policies by what reads policies; what they name beside them is left out."""
    for block in those(page, "json"):
        values = json.loads(block.code)
        if "policy_version" in values:
            path = tmp_path / "policy.json"
            path.write_text(json.dumps({name: value for name, value in values.items() if name not in ("maps", "calibration")}))
            assert Policy.load(path).format == values["format"]


@pytest.mark.parametrize("page", of(""))
def test_shell_commands_exist(page):
    for block in those(page, ""):
        for words in commands(block.code):
            check_command(words)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])  # that one names what is gone, too
def test_what_the_text_names_exists(page):
    """Commands, files, and names of the package."""
    for code in inline_code(page):
        if named := re.match(r"quantkv(\.\w+)+", code):
            find(named[0])
        if re.match(r"quantkv [a-z-]+( |$)", code):
            parse(next(commands(code))[1:], whole=False)
        for path in re.findall(r"^(?:docs|tests|benchmarks|scripts|examples)/[\w/.-]+", code):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("block", [b for b in BLOCKS if "not run" in b.marks], ids=str)
def test_what_is_not_run_says_why(block):
    pytest.skip(block.marks["not run"])


def check_command(words: list[str]) -> None:
    """AssertionError or the command line's own error where a command, a file or an option of it does not exist."""
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    if not words or words[0] in NO_CHECK:
        return
    name, *arguments = words
    if name == "quantkv":
        parse(arguments)
    elif name == "python" and arguments[:2] == ["-m", "quantkv"]:
        parse(arguments[2:])
    elif name == "pip":
        check_install(arguments)
    elif name == "vllm":
        check_vllm(arguments)
    elif name == "sglang":
        check_sglang(arguments)
    else:
        check_script(arguments if name == "python" else words, executable=name != "python")


def find(name: str) -> object:
    """What a dotted name of the package stands for. AttributeError or ModuleNotFoundError where there is none."""
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module(name)
    package, _, last = name.rpartition(".")
    return getattr(find(package), last)


def parse(arguments: list[str], whole: bool = True) -> None:
    """As the command line does, without running anything. whole: arguments that are missing are an error."""
    group = typer.main.get_command(application)
    context = group.make_context("quantkv", list(arguments))
    rest = [*context._protected_args, *context.args]
    name, command, rest = group.resolve_command(context, rest)
    try:
        command.make_context(name, [word for word in rest if word != "--help"], parent=context)
    except Exception as error:
        if whole or type(error).__name__ != "MissingParameter":  # typer's own, whichever package it takes it from
            raise


def check_install(arguments: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"\[([\w,-]+)\]", " ".join(arguments)):
        assert set(named.split(",")) <= extras.keys(), named


def check_vllm(arguments: list[str]) -> None:
    """vLLM is not installed here; tests/vllm_cpu starts it. What is ours of its options is checked."""
    options = dict(pairwise(arguments))
    kind = options.get("--kv-cache-dtype")
    assert kind is None or kind in server_options.options(), kind
    assert json.loads(options.get("--additional-config", "{}")).keys() <= {plugin.POLICY_OPTION}


def check_sglang(arguments: list[str]) -> None:
    """SGLang is not installed here; tests/sglang_cpu starts it. What is ours of its options is checked."""
    asked = dict(pairwise(arguments)).get("--attention-backend")
    assert asked in server_options.options(), asked


def check_script(words: list[str], executable: bool) -> None:
    """The file is there and mentions every option."""
    path = ROOT / words[0]
    assert path.is_file(), words[0]
    if executable:
        assert path.stat().st_mode & 0o111, f"{words[0]} cannot be run"
        assert subprocess.run([shutil.which("bash") or "bash", "-n", str(path)], check=False).returncode == 0
    text = path.read_text()
    for option in re.findall(r"(?<!\S)\[?(--[a-z-]+)", " ".join(words[1:])):
        assert f'"{option}"' in text or "$@" in text or "${@" in text, (words[0], option)


def test_a_wrong_command_is_found():
    """The check of commands sees what it is there for."""
    for line in ("quantkv eval --fromats int4", "quantkv evil", "python benchmarks/none.py", "vllm serve M --kv-cache-dtype quantkv_int5"):
        with pytest.raises(Exception, match=r"fromats|evil|none\.py|int5"):
            check_command(next(commands(line)))
    with pytest.raises(AssertionError, match="int5"):
        check_command(next(commands("sglang serve --model-path M --attention-backend quantkv_int5")))
    with pytest.raises(AttributeError, match="resolve"):
        find("quantkv.ops.resolve")
    with pytest.raises(AssertionError, match="nothing"):
        check_command(["pip", "install", ".[nothing]"])
