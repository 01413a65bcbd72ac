"""Every architecture of docs/models.md, run: what is seen is what the table says."""

from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from architectures import ARCHITECTURES, Architecture  # noqa: E402
from families import EQUAL, OTHER, observe  # noqa: E402

LINES = (Path(__file__).parent.parent / "docs" / "models.md").read_text().splitlines()


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_the_table_says_what_is_seen(architecture: Architecture):
    if not architecture.is_known:
        pytest.skip(f"transformers {transformers.__version__} has no {architecture.family}")
    row = observe(architecture)
    assert OTHER not in row.line
    assert not same_version() or row.line in LINES, row.line
    assert row.refused or (row.greedy, row.beams, row.chat) == (EQUAL,) * 3


def same_version() -> bool:
    """Whether the table is of the transformers that is installed: others may lack a mode, or word a refusal otherwise."""
    return any(f"run with transformers {transformers.__version__} (" in line for line in LINES)


def test_the_table_has_no_other_rows():
    names = [line.split("|")[1].strip() for line in LINES if line.startswith("| ")]
    assert [name for name in names if name != "model"] == sorted(names_of(), key=names.index)
    assert len(set(names_of())) == len(ARCHITECTURES)


def names_of() -> list[str]:
    return [architecture.name for architecture in ARCHITECTURES]
