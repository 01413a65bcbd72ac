"""The documentation site: it builds without a warning, its tables are those of the recorded results, and it documents every public name."""

import importlib
import importlib.util
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("quantkv", "quantkv.integrations.transformers", "quantkv.vllm_api")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", PACKAGES)
def test_every_name_is_in_the_reference(site, name):
    inventory = (site / "objects.inv").read_bytes()
    documented = {line.split()[0] for line in zlib.decompress(inventory.split(b"zlib.\n", 1)[1]).decode().splitlines()}
    package = importlib.import_module(name)
    public = [getattr(package, public) for public in package.__all__ if not public.startswith("__")]
    assert {f"{value.__module__}.{value.__qualname__}" for value in public} <= documented


def test_outside_files_are_reached(site):
    """Links to files beside docs/ lead to pages of the site."""
    assert 'href="design.html#the-idea-one-algebra-for-every-format"' in (site / "kernels.html").read_text()
    assert 'href="kernels.html"' in (site / "design.html").read_text()
    assert 'src="h200-growth.svg"' in (site / "performance.html").read_text()


def test_no_comment_is_shown(site):
    """What tells the tests how to run a block is not for readers."""
    for path in site.rglob("*.html"):
        text = path.read_text()
        assert "&lt;!-- " not in text.replace("&lt;!-- run", ""), path


def test_tables_are_those_of_the_results():
    spec = importlib.util.spec_from_file_location("site_tables", ROOT / "benchmarks" / "site_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for page in tables.PAGES:
        text = (ROOT / page).read_text()
        assert tables.BLOCK.search(text), page
        assert tables.update(text) == text, f"{page}: run benchmarks/site_tables.py"
