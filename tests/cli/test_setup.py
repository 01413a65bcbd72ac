"""What scripts/setup.sh says, and the pins that it installs by: what of them can be told without a network.

scripts/check_resolution.sh resolves them for every Python.
"""

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PINNED = {"numba", "torch", "triton", "transformers"}
SITE = {"mkdocs-material", "mkdocstrings", "mkdocstrings-python", "pymdown-extensions"}  # pins of the extra docs


def pins(python):
    """Name to version on Linux with that Python."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    found = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python, "sys_platform": "linux"}):
            assert requirement.name not in found
            (specifier,) = requirement.specifier
            assert specifier.operator == "=="
            found[requirement.name] = specifier.version
    return found


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("python", PYTHONS)
def test_one_pin_each_that_everything_installed_admits(python):
    """quantkv's own ranges are among them, and torch's triton where torch comes from the index."""
    chosen = pins(python)
    assert set(chosen) == PINNED | SITE
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "platform_system": "Linux"}
    seen = set()
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"].lower()
        if chosen.get(name) == package.version.partition("+")[0] and (needs := package.metadata["Requires-Python"]):
            assert SpecifierSet(needs).contains(f"{python}.0"), f"{name} {package.version} is not for Python {python}"
        for requirement in map(Requirement, package.requires or ()):
            wanted = requirement.marker is None or any(
                requirement.marker.evaluate({**environment, "extra": e}) for e in ("", "dev", "cpu", "triton", "transformers", "docs")
            )
            if requirement.name in chosen and wanted and name in ("quantkv", *PINNED):
                assert requirement.specifier.contains(chosen[requirement.name]), (
                    f"{name} needs {requirement}, the pin is {chosen[requirement.name]}"
                )
                seen.add((name, requirement.name))
    assert seen >= {("quantkv", name) for name in PINNED}


@pytest.fixture
def setup(tmp_path):
    """Run setup.sh beside a .venv whose pip and python are shell scripts: (exit code, stdout, stderr)."""

    def setup(pip, python):
        (tmp_path / "scripts").mkdir()
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
        for name, body in (("pip", pip), ("python", python)):
            file = tmp_path / ".venv" / "bin" / name
            file.write_text(f"#!/bin/sh\n{body}\n")
            file.chmod(0o755)
        found = subprocess.run([tmp_path / "scripts" / "setup.sh"], capture_output=True, text=True, env=os.environ)
        return found.returncode, found.stdout, found.stderr

    return setup


def test_says_how_much_before_it_fetches(setup):
    code, out, err = setup("echo Collecting a; echo '  Downloading b.whl (9.9 MB)'; echo '  Downloading c.whl (526.6 MB)'", "exit 1")
    assert (code, err) == (0, "")
    first, *_ = out.splitlines()
    assert "about 3.1 GB" in first and out.count("Downloading") == 2 and out.index("3.1 GB") < out.index("Downloading c.whl (526.6 MB)")
    assert "Collecting" not in out


def test_says_nothing_when_all_is_there(setup):
    assert setup("echo Requirement already satisfied", "exit 0") == (0, "", "")


def test_shows_why_pip_failed(setup):
    code, out, err = setup("echo Collecting a; echo 'ERROR: Cannot install'; echo; echo 'The conflict is caused by:'; exit 1", "exit 0")
    assert code == 1 and "Collecting" not in out + err
    assert err.startswith("ERROR: Cannot install\n\nThe conflict is caused by:\n") and ".venv/setup.log" in err


def test_refuses_a_python_that_is_too_old(tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.18 && exit 0\nexit 1\n')
    old.chmod(0o755)
    found = subprocess.run([tmp_path / "scripts" / "setup.sh"], capture_output=True, text=True, env={**os.environ, "PYTHON": str(old)})
    assert found.returncode == 1 and "Python 3.10 or later is needed" in found.stderr and "3.9.18" in found.stderr
    assert not (tmp_path / ".venv").exists()
