"""The table of quality: rows are saved one by one and found again, and a prompt that is computed once changes none."""

import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quantkv.cli import eval as evaluation

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(text_file, monkeypatch):
    """The script, with parts that a tiny model reads at once."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("through_cache", BENCHMARKS / "through_cache.py")
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "through_cache", made)
    spec.loader.exec_module(made)
    text_file.write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    small = {"contexts": 3, "prompt": 100, "texts": (str(text_file),)}
    monkeypatch.setitem(made.PARTS, "domains", replace(made.PARTS["domains"], kv="int4,4bit,2bit", decode=12, **small))
    monkeypatch.setitem(made.PARTS, "chunked", replace(made.PARTS["chunked"], kv="int4", decode=12, **small | {"chunk": 32}))
    monkeypatch.setitem(made.PARTS, "short", replace(made.PARTS["short"], kv="int4,int2", **small))
    monkeypatch.setattr(evaluation, "measure", evaluation.measure)  # the script's own is gone after the test
    return made


@pytest.fixture
def measured(script, model_dir, text_file, tmp_path, monkeypatch):
    """Run the script over a text: the runs of its file."""
    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path / "cache"))

    def measured(file, *more):
        given = ["--model", f"tiny={model_dir}", "--domain", str(text_file), "--out", str(tmp_path / file), *more]
        monkeypatch.setattr(sys, "argv", ["through_cache.py", *given])
        script.main()
        return json.loads((tmp_path / file).read_text())["runs"]

    return measured


def test_a_prompt_that_is_computed_once_changes_nothing(measured):
    once, whole = measured("a.json", "--part", "domains"), measured("b.json", "--part", "domains", "--whole")
    assert [[row["format"] for row in run["formats"]] for run in (once[0], whole[0])] == [["4bit", "2bit", "int4"]] * 2
    for a, b in zip(once[0]["formats"], whole[0]["formats"]):
        # A rounding of float32 may give a row another code, which costs what a code does: a few of 36 predictions of 1e-2.
        assert a["kl_of_contexts"] == pytest.approx(b["kl_of_contexts"], rel=1e-2) and a["kl"] > 1e-5
        assert abs(b["prompt"]["kl"]) < 1e-6 and "prompt" not in a
    assert once[0]["tokens"] == 36 and whole[0]["prompt_tokens"] == 300


def test_rows_are_saved_one_by_one_and_measured_once(measured, capsys):
    (run,) = measured("a.json", "--part", "domains", "--kv", "int4")
    assert [row["format"] for row in run["formats"]] == ["int4"]
    first = run["formats"][0]
    (run,) = measured("a.json", "--part", "domains")
    assert sorted(row["format"] for row in run["formats"]) == ["2bit", "4bit", "int4"]
    assert first in run["formats"]  # with its seconds: it was not measured again
    assert measured("a.json", "--part", "domains") == [run]
    assert "`4bit`" in capsys.readouterr().out


def test_the_rows_that_an_interrupted_run_has_finished_are_kept(measured, script, monkeypatch):
    own = script.Reader.__call__

    def fails(self, model, ids, policy, *given):
        if policy.format == "trellis2":
            raise RuntimeError("the machine stops")
        return own(self, model, ids, policy, *given)

    monkeypatch.setattr(script.Reader, "__call__", fails)
    with pytest.raises(RuntimeError, match="stops"):
        measured("a.json", "--part", "domains")
    monkeypatch.setattr(script.Reader, "__call__", own)
    (run,) = measured("a.json", "--part", "domains", "--kv", "2bit")
    assert [row["format"] for row in run["formats"]] == ["4bit", "int4", "2bit"]


def test_chunks_and_greedy_continuations(measured):
    (run,) = measured("a.json", "--part", "chunked")
    assert run["prompt_tokens"] == 3 * 4 and run["formats"][0]["prompt"]["kl"] > 1e-5  # the last of 32, 32, 32 and 4 tokens
    _, run = measured("a.json", "--part", "short")
    agreed = {row["format"]: row["greedy"] for row in run["formats"]}
    assert {row["of"] for row in agreed.values()} == {40} and agreed["int2"]["tokens"] < agreed["int4"]["tokens"]


def test_caches_and_a_text_that_a_part_does_not_have(measured, text_file, tmp_path):
    other = tmp_path / "other text"
    other.write_text("Pack my box with five dozen liquor jugs. " * 20, encoding="utf-8")
    (run,) = measured("a.json", "--part", "domains", "--kv", "none,int4", "--text", str(other))
    assert [row["format"] for row in run["formats"]] == ["none", "int4"] and run["text"] == "other text" and run["device"] == "cpu"
    assert abs(run["formats"][0]["kl"]) < 1e-6 < run["formats"][1]["kl"]  # a cache that stores rows as they are loses roundings of float32
    with pytest.raises(ValueError, match="int5"):
        measured("b.json", "--part", "domains", "--kv", "int5")


def test_rows_of_rivals_stay_beside_each_other(measured, script, text_file, monkeypatch):
    class Rival(script.readers.ThroughCache):
        def __init__(self, backend, chunk):
            super().__init__(chunk)
            self.size = script.policies.Size(*{"quanto": (10.0, 5.0, 4), "hqq": (8.0, 4.0, 4)}[backend])

    monkeypatch.setattr(script, "Rival", Rival)
    monkeypatch.setitem(script.PARTS, "rivals", replace(script.PARTS["rivals"], contexts=2, prompt=100, decode=12))
    (run,) = measured("a.json", "--part", "rivals", "--text", str(text_file))
    held = {row["format"]: row["bytes_per_head"] for row in run["formats"]}
    assert list(held) == ["4bit", "transformers quanto 4-bit", "transformers hqq 4-bit"]
    assert [*held.values()][1:] == [5.0, 4.0]  # what each holds, not what the cache holds that stands in for it


def test_added_rows_replace_those_over_fewer_contexts(script):
    def run(contexts, device, **losses):
        head = dict.fromkeys(script.HEAD, "same") | {"contexts": contexts, "device": device}
        return head | {"formats": [{"format": name, "kl": kl} for name, kl in losses.items()]}

    held = [run(4, "cpu", int4=1.0, int8=2.0), run(16, "gpu", int2=3.0), run(4, "cpu", int4=4.0) | {"text": "another"}]
    script.add(held, [run(16, "gpu", int4=5.0), run(2, "cpu", int2=6.0), run(4, "cpu", int8=7.0)])
    shown = [(of["text"], of["contexts"], {row["format"]: row["kl"] for row in of["formats"]}) for of in held]
    assert shown == [("same", 4, {"int8": 7.0}), ("same", 16, {"int2": 3.0, "int4": 5.0}), ("another", 4, {"int4": 4.0})]


def test_tables_of_added_files_stand_in_documents(measured, script, tmp_path, monkeypatch):
    measured("gpu.json", "--part", "short", "--kv", "int4")
    page, out = tmp_path / "page.md", tmp_path / "table.json"
    page.write_text("before\n<!-- through:short -->\nold\n<!-- /through:short -->\n<!-- through:codes -->\nkept\n<!-- /through:codes -->\n")
    given = ["--model", "none", "--out", str(out), "--add", str(tmp_path / "gpu.json"), "--into", str(page)]
    monkeypatch.setattr(sys, "argv", ["through_cache.py", *given])
    script.main()
    lines = page.read_text().splitlines()
    assert "| tiny, text.txt | `int4` |" in lines[4] and "old" not in lines and lines[5:] == ["<!-- /through:short -->", *lines[6:]]
    assert "kept" in lines and json.loads(out.read_text())["runs"][0]["part"] == "short"


def test_tables_in_documents_are_those_of_the_file_that_the_page_names(script):
    root, held = BENCHMARKS.parent, []
    for page in [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("notebook/*.md")]:
        written = page.read_text(encoding="utf-8")
        for name in re.findall("<!-- through:(.*?) -->", written):
            file = root / re.search(r"--out (benchmarks/results/[\w-]+\.json)", written)[1]
            runs = json.loads(file.read_text())["runs"]
            assert all(run.keys() >= set(script.HEAD) for run in runs)
            lines = script.table([run for run in runs if run["part"] == name])
            assert "\n".join([f"<!-- through:{name} -->", *lines, f"<!-- /through:{name} -->"]) in written, (page.name, name)
            held.append((page.name, name))
    assert {("2026-11-25-quality-table.md", name) for name in script.PARTS} < set(held)
    assert {("quality.md", name) for name in ("rivals", "domains")} < set(held)


def test_answers_of_a_chat_are_compared_token_by_token_and_told_as_they_were_counted(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from chat_answers import QUESTIONS, until_they_part

    assert [until_they_part([1, 2, 3], other) for other in ([1, 2, 3], [1, 2], [1, 2, 3, 4], [1, 5, 3], [])] == [3, 2, 3, 1, 0]
    rows = json.loads((BENCHMARKS / "results" / "chat-answers.json").read_text())
    page = (BENCHMARKS.parent / "docs" / "quality.md").read_text(encoding="utf-8")
    said = re.search(r"- \*\*Answers of a chat\*\*.*?(?=\n- )", page, re.DOTALL)[0]
    for model in ("SmolLM2-135M", "Qwen2.5-Coder-0.5B"):
        found = [f"{row['identical']} with `{row['cache']}`" for row in rows if (row["model"], row["questions"]) == (model, len(QUESTIONS))]
        assert len(found) == 5 and f"of {model}, {', '.join(found)}" in re.sub(r"\s+", " ", said)
