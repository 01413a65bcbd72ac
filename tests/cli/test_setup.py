"""What scripts/setup.sh says, and the pins that it installs by: what of them can be told without a network.

scripts/check_resolution.sh resolves them for every Python.
"""

import importlib.metadata
import os
import re
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


def scripts(folder, *files):
    """The scripts that set up an environment, and more files of the repository, in a folder of the test's own."""
    for name in ("scripts/setup.sh", "scripts/vllm_cpu.sh", "scripts/installing.sh", *files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder / "scripts"


def executable(file, body):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


@pytest.fixture
def setup(tmp_path):
    """Run setup.sh beside a .venv whose pip and python are shell scripts: (exit code, stdout, stderr)."""

    def setup(pip, python):
        for name, body in (("pip", pip), ("python", python)):
            executable(tmp_path / ".venv" / "bin" / name, body)
        found = subprocess.run([scripts(tmp_path) / "setup.sh"], capture_output=True, text=True, env=os.environ)
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


@pytest.mark.parametrize("script, environment", [("setup.sh", ".venv"), ("vllm_cpu.sh", ".vllm")])
def test_says_how_long_pip_has_been_at_work(tmp_path, script, environment):
    """A line for every ten seconds that pass, here as fast as `sleep` says that they do: pip goes on when the first line is out."""
    folder = scripts(tmp_path, "pyproject.toml", "constraints.txt", "scripts/vllm_cpu/requirements.txt", "scripts/vllm_cpu/pyproject.toml")
    slept, told = tmp_path / "slept", tmp_path / "told"
    heard = f"while ! grep -qs wheel {tmp_path / environment / 'setup.log'}; do /bin/sleep 0.01; done"
    executable(tmp_path / "bin" / "sleep", f"[ -e {slept} ] && : > {told} && exec /bin/sleep 600\n{heard}; : > {slept}")
    executable(tmp_path / environment / "bin" / "pip", f"echo Building wheel for a; while [ ! -e {told} ]; do /bin/sleep 0.01; done")
    executable(tmp_path / environment / "bin" / "python", "exit 1")
    own = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    env = {name: value for name, value in os.environ.items() if name != "QUANTKV_VLLM_ENV"} | own
    found = subprocess.run([folder / script], capture_output=True, text=True, env=env, timeout=300)
    assert (found.returncode, found.stderr) == (0, "")
    assert re.search(r"^pip, \d+ s so far: Building wheel for a$", found.stdout, re.MULTILINE)


def test_refuses_a_python_that_is_too_old(tmp_path):
    folder, old = scripts(tmp_path), tmp_path / "python"
    executable(old, '[ "$1" = --version ] && echo Python 3.9.18 && exit 0\nexit 1')
    found = subprocess.run([folder / "setup.sh"], capture_output=True, text=True, env={**os.environ, "PYTHON": str(old)})
    assert found.returncode == 1 and "Python 3.10 or later is needed" in found.stderr and "3.9.18" in found.stderr
    assert not (tmp_path / ".venv").exists()
