"""What a package index shows of README.md: no link that leads nowhere there."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quantkv.policy_file import PRESETS

pytest.importorskip("setuptools")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script():
    """setup.py, not run."""
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TEXT = "![plot](docs/a.svg) [page](docs/b.md#c) [site](https://example.org/d) [below](#e)"


def test_links_are_absolute(script):
    shown = script.long_description(TEXT, "https://example.org/q/")
    at = "https://example.org/q"
    assert shown == f"![plot]({at}/raw/main/docs/a.svg) [page]({at}/blob/main/docs/b.md#c) [site](https://example.org/d) [below](#e)"


def test_without_a_repository_links_are_text(script):
    assert script.long_description(TEXT, None) == " page [site](https://example.org/d) [below](#e)"


def test_badges_are_links_with_a_picture(script):
    badge = "[![CI](docs/a.svg)](CONTRIBUTING.md)"
    shown = script.long_description(badge, "https://example.org/q")
    assert shown == "[![CI](https://example.org/q/raw/main/docs/a.svg)](https://example.org/q/blob/main/CONTRIBUTING.md)"
    assert script.long_description(badge, None) == ""


def test_source_url(script):
    assert script.source_url('[project.urls]\nSource = "https://example.org/q"\n') == "https://example.org/q"
    assert script.source_url("[project]\n") is None


def test_metadata_has_the_readme(tmp_path):
    """As a build writes it."""
    pytest.importorskip("setuptools", minversion="77")  # that pyproject.toml asks for
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    package = tmp_path / "src" / "quantkv"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "src" / "quantkv" / "__init__.py", package)
    code = "from setuptools.build_meta import prepare_metadata_for_build_wheel as f; print(f('.'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    head, _, body = metadata.read_text().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    assert body.startswith("# quantkv")
    links = re.findall(r"\]\(([^)\s]+)\)", body)
    assert [link for link in links if not re.match(r"https?:|#", link)] == []


def test_every_relative_link_of_the_readme_exists(script):
    text = (ROOT / "README.md").read_text()
    pictures = re.findall(script.PICTURE, text)
    for _, _, path in (*script.LINK.findall(text), *script.LINK.findall(" ".join(pictures))):
        assert (ROOT / path.partition("#")[0]).exists(), path


def test_what_the_readme_starts_is_a_preset():
    """A first-time user, who calibrates nothing, gets none of the formats that lose much then."""
    asked = re.findall(r"--(?:kv-cache-dtype|attention-backend) quantkv_(\w+)", (ROOT / "README.md").read_text())
    assert len(asked) >= 3 and set(asked) <= set(PRESETS)
