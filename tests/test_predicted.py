"""Predicted shares of the memory ceiling: within 10 % of what was measured, and in the docs as predictions."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def predicted():
    spec = importlib.util.spec_from_file_location("predicted_script", ROOT / "benchmarks" / "predicted.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_predictions_are_within_a_tenth_of_what_was_measured(predicted):
    rows = [row for row in predicted.measured() if row[1]["format"] in ("int4", "levels4") and predicted.in_domain(row[1]["shape"])]
    assert [sum(row[0] == gpu for row in rows) for gpu in ("H100", "H200")] == [10, 12]
    errors = {(row[0], row[1]["format"], row[1]["shape"]): predicted.error(row, predicted.FITTED, predicted.POWER) for row in rows}
    assert all(abs(of) <= 0.10 for of in errors.values()), errors
    assert max(abs(of) for at, of in errors.items() if at[0] == "H100") < 0.04  # what was fitted


def test_what_was_fitted_comes_out_again(predicted):
    worth, fit = predicted.fitted(predicted.POWER)
    assert (fit, round(worth, 4)) == (predicted.FITTED, 0.0192)


def test_the_page_has_the_table_as_the_script_prints_it(predicted):
    page = (ROOT / "docs" / "limits.md").read_text()
    assert "\n".join(predicted.table()) in page
    assert "predicted, not measured" in page


def test_fewer_instructions_are_never_slower(predicted):
    """Of a loop with a fifth fewer of each class, on every GPU."""
    for name, gpu in predicted.GPUS.items():
        loop = predicted.loops_of("now")[(name, "int4", "B64xL8192")]
        fewer = {**loop, "instructions": {of: 0.8 * count for of, count in loop["instructions"].items()}}
        times = [predicted.microseconds(each, gpu, gpu.gbps, predicted.FITTED) for each in (loop, fewer)]
        assert times[1] < times[0] > loop["nbytes"] / gpu.gbps / 1e3, name
