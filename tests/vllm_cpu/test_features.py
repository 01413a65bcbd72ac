"""The tables of docs/vllm-features.md say what is seen: of the features and families that no other test asks for, and in every row."""

from pathlib import Path

import pytest
from family_rows import NAMES, observe
from features import FEATURES, GPU_ONLY, NOT_RUN, REFUSED, SERVED, ask

PAGE = (Path(__file__).parent.parent.parent / "docs" / "vllm-features.md").read_text()
QUICK = ("events", "connectors_preset", "embeddings", "context_parallel")
AGAIN = ("Qwen3-MoE", "GPT-J", "Kimi Linear")  # experts; biases; a refusal
FOUND = [feature for feature in FEATURES if feature.key in QUICK]


def rows(table: str) -> list[list[str]]:
    """Cells of a table that scripts/vllm_tables.py writes."""
    lines = PAGE.split(f"<!-- {table}, from")[1].split(f"<!-- end of {table} -->")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]


@pytest.mark.parametrize("feature", FOUND, ids=lambda feature: feature.key)
def test_what_the_table_says_of_a_feature_is_seen(feature):
    assert [feature.name, feature.asked, ask(feature)] in rows("features")


@pytest.mark.parametrize("name", AGAIN)
def test_what_the_table_says_of_a_family_is_seen(name):
    assert [name, observe(name)] in rows("families")


def test_each_feature_has_a_row():
    """In the order in which they are asked. What other tests ask for, or nobody, is said in their words."""
    assert [row[:2] for row in rows("features")] == [[feature.name, feature.asked] for feature in FEATURES]
    assert [row[2] for row, feature in zip(rows("features"), FEATURES) if feature.said] == [f.said for f in FEATURES if f.said]


def test_each_family_has_a_row():
    assert [row[0] for row in rows("families")] == NAMES


def test_rows_begin_with_one_of_four_words():
    words = SERVED, REFUSED, GPU_ONLY, NOT_RUN
    assert all(row[-1].startswith(words) for table in ("features", "families") for row in rows(table))


def test_the_tests_that_rows_name_exist():
    for feature in FEATURES:
        for test in feature.tests:
            file, _, name = test.partition("::")
            text = (Path(__file__).parent / file).read_text()
            assert f"def {name}(" in text or not name
