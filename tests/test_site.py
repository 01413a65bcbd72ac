"""The documentation site: it builds without a warning, its tables are those of the recorded results, and it documents every public name."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("quantkv", "quantkv.integrations.transformers", "quantkv.vllm_api")


def test_site_builds(tmp_path):
    """Without a warning; one test, since one build takes seconds."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement of the theme's
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    inventory = (tmp_path / "objects.inv").read_bytes()
    documented = {line.split()[0] for line in zlib.decompress(inventory.split(b"zlib.\n", 1)[1]).decode().splitlines()}
    for name in PACKAGES:
        package = importlib.import_module(name)
        public = [getattr(package, public) for public in package.__all__ if not public.startswith("__")]
        assert {f"{value.__module__}.{value.__qualname__}" for value in public} <= documented, name

    # Links to files beside docs/ lead to pages of the site; what tells the tests how to run a block is not for readers.
    assert 'href="design.html#the-idea-one-algebra-for-every-format"' in (tmp_path / "kernels.html").read_text()
    assert 'href="kernels.html"' in (tmp_path / "design.html").read_text()
    assert 'src="h200-growth.svg"' in (tmp_path / "performance.html").read_text()
    assert [path for path in tmp_path.rglob("*.html") if "&lt;!-- " in path.read_text()] == []


def script_of(name, folder="benchmarks"):
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_tables_are_those_of_the_results():
    tables = script_of("site_tables")
    for page in tables.PAGES:
        text = (ROOT / page).read_text()
        assert tables.BLOCK.search(text), page
        assert tables.update(text) == text, f"{page}: run benchmarks/site_tables.py"


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_expected_errors_are_found_again(name, monkeypatch):
    """What docs/engine.md tells an engine to expect, over fewer rows: a mean of 128 tokens of 8 heads lies within a tenth."""
    script = script_of("expected_errors")
    recorded = json.loads((ROOT / "benchmarks" / "results" / "expected-errors.json").read_text())
    (row,) = [row for row in recorded["formats"] if row["format"] == name]
    monkeypatch.setattr(script, "SEQUENCES", 1)
    monkeypatch.setattr(script, "LENGTH", 128)
    assert script.errors(name) == {"format": name} | {key: pytest.approx(row[key], rel=0.1) for key in ("row_error", "attention_error")}


def test_matrix_of_features_is_that_of_the_results():
    """docs/features.md says of each format and head size what the recorded runs found, cell by cell."""
    matrix = script_of("feature_matrix")
    text = (ROOT / "docs" / "features.md").read_text()
    assert text == matrix.page(), "run benchmarks/feature_matrix.py --page"
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    lines = {name: marks for name, *marks in cells}
    sizes = lines["format, by head size"]
    for fmt, marks in {
        "`int4`": {"64": "●", "80": "●", "192, V 128": "●"},
        "`trellis2`": {"64": "●", "80": "○"},  # Hopper has it in multiples of 64
        "`int2`": {"128": "●", "80": "–", "192, V 128": "–"},  # its rotation takes powers of two
        "`fp32`": {"128": "○"},
    }.items():
        assert {size: lines[fmt][sizes.index(size)][0] for size in marks} == marks, fmt
    assert lines["ALiBi"] == ["●", "–"] and lines["sinks"] == ["●", "●"]


def test_figures_are_those_of_the_results():
    """The files that the script draws, and what a figure says of quantization: the rotation keeps a row's length."""
    figures = script_of("figures", "scripts")
    assert {path.name for path in figures.FOLDER.iterdir()} == set(figures.FIGURES)
    for name, draw in figures.FIGURES.items():
        assert (figures.FOLDER / name).read_text() == draw(), f"{name}: run scripts/figures.py"
        ElementTree.fromstring(draw())
    turned = figures.rotated(figures.ROW)
    assert sum(x * x for x in turned) == pytest.approx(sum(x * x for x in figures.ROW))
    assert [round(100 * figures.error(row)) for row in (figures.ROW, turned)] == [9, 5]  # percent, as the figure says
    pages = "".join((ROOT / page).read_text() for page in ("README.md", "docs/how-it-works.md", "docs/four-bits.md"))
    assert all(f"figures/{name})" in pages for name in figures.FIGURES)
    points = {kind: figures.point(kind) for kind in figures.POINTS}
    one_run = {"auto": 2049.6, "fp8": 2892.8, "int8_per_token_head": 849.6, "turboquant_4bit_nc": 728.5, "quantkv_int4": 4289.0}
    one_run |= {"quantkv_8bit": 2955.5, "quantkv_4bit": 3984.3, "quantkv_3bit": 4350.5, "quantkv_2bit": 4018.3}
    earlier = {"int4_per_token_head": 1126.0}
    assert {kind: speed for kind, (speed, _, _) in points.items()} == one_run | earlier
    losses = {kind.removeprefix("quantkv_"): kl for kind, (_, _, kl) in points.items()}
    assert losses["int4_per_token_head"] == losses["int4"] == max(losses.values())
    order = ["int4", "turboquant_4bit_nc", "2bit", "fp8", "3bit", "4bit", "int8_per_token_head", "8bit", "auto"]
    assert sorted(set(losses) - {"int4_per_token_head"}, key=losses.get, reverse=True) == order and losses["auto"] == 0


def test_the_front_page_counts_models_as_their_tables_do():
    works, refused = re.findall(r"from scripts/models_table.py -->(.*?)<!-- end of", (ROOT / "docs" / "models.md").read_text(), re.DOTALL)
    counts = [len(re.findall(r"^\| ", rows, re.MULTILINE)) - 1 for rows in (works, refused)]
    said = re.search(r"\*\*Models\*\*: (\d+) architectures .* (\d+) others", (ROOT / "README.md").read_text())
    assert [int(n) for n in said.groups()] == counts
