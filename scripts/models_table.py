"""Write the tables of docs/models.md from what tiny models of each architecture do: `python scripts/models_table.py`, two minutes.

tests/test_families.py runs the same and compares.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from architectures import ARCHITECTURES  # noqa: E402
from families import Row, observe  # noqa: E402

MARKS = (
    ("<!-- from scripts/models_table.py -->", "<!-- end of models that work -->"),
    ("<!-- refused, from scripts/models_table.py -->", "<!-- end of models that are refused -->"),
)
HEADS = (
    "| model | layers in pages | transformers' own layers | same tokens | errors of int8, int4 |\n" + "|---" * 5 + "|",
    "| model | why it is refused |\n|---|---|",
)


def tables(rows: list[Row]) -> list[str]:
    """Of the models that work, and of those that are refused."""
    return ["\n".join([head, *(row.line for row in rows if bool(row.refused) == refused)]) for head, refused in zip(HEADS, (False, True))]


def main() -> None:
    rows = [observe(architecture) for architecture in ARCHITECTURES]
    path = ROOT / "docs" / "models.md"
    text = path.read_text()
    for (start, end), table in zip(MARKS, tables(rows)):
        before, rest = text.split(start)
        _, after = rest.split(end)
        text = f"{before}{start}\n\n{table}\n\n{end}{after}"
    path.write_text(text)


if __name__ == "__main__":
    main()
