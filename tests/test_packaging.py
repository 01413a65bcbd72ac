"""scripts/release.sh and check_wheel.py: what of them needs no network and builds nothing. CI runs check_wheel.sh itself."""

import importlib.util
import io
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

import quantkv

ROOT = Path(__file__).parent.parent


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def release(tmp_path):
    """A repository that is ready for release 0.2.0, up to what builds; run: (exit code, stderr) of scripts/release.sh."""
    files = {
        "src/quantkv/__init__.py": '__version__ = "0.2.0"\n',
        "CITATION.cff": 'version: 0.2.0\ndate-released: "2027-01-31"\n',
        "CHANGELOG.md": "# Changelog\n\n## 0.2.0 (2027-01-31)\n\n## 0.1.0 (2026-12-01)\n",
        "scripts/check_wheel.sh": "#!/bin/sh\necho built >&2\nexit 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "scripts/check_wheel.sh").chmod(0o755)
    shutil.copy2(ROOT / "scripts/release.sh", tmp_path / "scripts")

    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit():
        git("add", "--all")
        git("commit", "--quiet", "--message", "all", "--allow-empty")

    def run(*arguments):
        done = subprocess.run([tmp_path / "scripts/release.sh", *arguments], capture_output=True, text=True)
        return done.returncode, done.stderr

    git("init", "--quiet")
    commit()
    run.folder, run.git, run.commit = tmp_path, git, commit
    return run


def test_a_release_that_is_ready_is_built(release):
    assert release("0.2.0") == (1, "built\n")
    assert subprocess.run(["git", "tag"], cwd=release.folder, capture_output=True).stdout == b""  # not before it was tried


@pytest.mark.parametrize("version", ["", "0.2", "v0.2.0", "0.2.0rc1", "0.2.0 "])
def test_a_version_is_three_numbers(release, version):
    code, said = release(version)
    assert code == 2 and said == f"scripts/release.sh: VERSION '{version}': three numbers are needed, as in 0.2.0\n"


@pytest.mark.parametrize(
    "file,old,new,said",
    [
        ("src/quantkv/__init__.py", "0.2.0", "0.1.0", "src/quantkv/__init__.py says version 0.1.0, not 0.2.0"),
        ("CITATION.cff", "0.2.0", "0.1.0", "CITATION.cff says version 0.1.0, not 0.2.0"),
        ("CITATION.cff", "2027-01-31", "2027-01-30", "CHANGELOG.md begins with '## 0.2.0 (2027-01-31)', where '## 0.2.0 (2027-01-30)'"),
        ("CITATION.cff", 'date-released: "2027-01-31"\n', "", "CITATION.cff has no date-released, or ''"),
        ("CHANGELOG.md", "0.2.0 (2027-01-31)", "0.2.0 (unreleased)", "CHANGELOG.md begins with '## 0.2.0 (unreleased)', where"),
        ("CHANGELOG.md", "## 0.2.0 (2027-01-31)\n\n", "", "CHANGELOG.md begins with '## 0.1.0 (2026-12-01)', where"),
    ],
)
def test_a_release_that_contradicts_itself_is_refused(release, file, old, new, said):
    path = release.folder / file
    path.write_text(path.read_text().replace(old, new))
    assert release("0.2.0")[1].startswith("scripts/release.sh: the working tree has changes")
    release.commit()
    code, found = release("0.2.0")
    assert code == 2 and found.startswith(f"scripts/release.sh: {said}")


def test_a_release_is_made_once(release):
    release.git("tag", "v0.2.0")
    assert release("0.2.0") == (2, "scripts/release.sh: the tag v0.2.0 is there already\n")


def test_what_cites_and_lists_this_version_agrees_with_it():
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == quantkv.__version__
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == quantkv.__version__
    Version(quantkv.__version__)


def wheel_with(tmp_path, names, requires=()):
    wheel, sdist = tmp_path / "quantkv-1-py3-none-any.whl", tmp_path / "quantkv-1.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, "")
        archive.writestr("quantkv-1.dist-info/METADATA", "".join(f"Requires-Dist: {r}\n" for r in requires))
    with tarfile.open(sdist, "w:gz") as archive:
        for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py", *(f"src/{name}" for name in names)):
            member = tarfile.TarInfo(f"quantkv-1/{name}")
            archive.addfile(member, io.BytesIO())
    return sdist, wheel


def test_what_a_wheel_lacks_or_has_beside_is_named(tmp_path):
    check, files = load("check_wheel"), ["quantkv/__init__.py", "quantkv/py.typed", "quantkv/decode.cu"]
    known = [f"src/{name}" for name in files] + ["docs/a.md", "tests/b.py"]
    assert check.faults(known, *wheel_with(tmp_path, files)) == []
    lacking = check.faults(known, *wheel_with(tmp_path, files[:2]))
    assert lacking == ["quantkv-1-py3-none-any.whl lacks quantkv/decode.cu", "quantkv-1.tar.gz lacks src/quantkv/decode.cu"]
    (beside,) = check.faults(known, *wheel_with(tmp_path, [*files, "quantkv/old.py"]))
    assert beside == "quantkv-1-py3-none-any.whl has quantkv/old.py, which is not in the repository"


def test_an_environment_has_what_the_metadata_asks_for_and_no_more(tmp_path):
    check = load("check_wheel")
    requires = ["numpy", 'typer; extra == "cli"', 'quantkv[models]; extra == "cli"', 'transformers; extra == "models"']
    _, wheel = wheel_with(tmp_path, [], requires)
    assert check.needed(wheel, "") == {"numpy"}
    cli = check.needed(wheel, "cli")
    assert cli > {"numpy", "typer", "transformers", "huggingface-hub", "click"} and "pytest" not in cli
    with pytest.raises(ModuleNotFoundError, match="no-such-package"):  # PackageNotFoundError, with its name
        check.needed(wheel_with(tmp_path, [], ["no-such-package"])[1], "")


def test_every_extra_is_resolved_for_every_python(monkeypatch):
    """By scripts/check_resolution.py: alone, as a user asks for it, where the pinned run and that for vLLM do not say so already."""
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11; the script brings tomli
    monkeypatch.setitem(sys.modules, "tomli", tomllib)
    monkeypatch.chdir(ROOT)
    check = load("check_resolution")
    text = (ROOT / "pyproject.toml").read_text()
    section = text[text.index("[project.optional-dependencies]") :].partition("\n\n")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    assert extras >= {"vllm", "transformers", "cli", "hopper", "triton", "dev"}
    assert {*check.extras()} == {"", *extras} - {"dev", "vllm"}
