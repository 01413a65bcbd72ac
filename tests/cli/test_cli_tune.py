"""Formats by layer within a budget, what they are chosen by, and the report."""

import html.parser
import itertools
import json
import math
import random
import re

import pytest
import torch
from transformers import LlamaConfig

from quantkv.calibration import Calibration, LayerMoments
from quantkv.cli import eval as evaluation
from quantkv.cli import html as report_html
from quantkv.cli import models, text, trials, tune
from quantkv.cli.allocation import Choice, allocate, hull
from quantkv.full_precision import FullPrecisionTokens
from quantkv.model_analysis.sensitivity import sensitivities
from quantkv.policy import Policy


def random_choices(seed, places=5, count=3):
    """By place: sizes that rise, losses that fall ever less."""
    source = random.Random(seed)
    made = {}
    for place in range(places):
        factor = source.uniform(0.1, 10)
        sizes = list(itertools.accumulate(source.choice([8, 16]) for _ in range(count)))
        made[place] = [Choice(f"f{i}", size, factor * 4.0**-i * source.uniform(0.9, 1.1)) for i, size in enumerate(sizes)]
    return made


@pytest.mark.parametrize("seed", range(20))
def test_allocation_is_the_best_for_what_it_takes(seed):
    """Within one step of the best: as a step no longer fits, its gain is the most that is left on the table."""
    choices = random_choices(seed)
    combinations = [dict(zip(choices, given)) for given in itertools.product(*choices.values())]
    total = lambda chosen: (sum(c.bytes for c in chosen.values()), sum(c.loss for c in chosen.values()))
    for most in (70, 95, 120, 10_000):
        try:
            chosen = allocate(choices, most)
        except ValueError:
            assert min(total(one)[0] for one in combinations) > most
            continue
        size, loss = total(chosen)
        best = min(total(one)[1] for one in combinations if total(one)[0] <= most)
        assert size <= most and best <= loss
        largest_step = max(a.loss - b.loss for given in choices.values() for a, b in itertools.pairwise(hull(given)))
        assert loss <= best + largest_step + 1e-12
    assert {c.name for c in allocate(choices).values()} == {"f2"}  # no budget: the best everywhere


@pytest.mark.parametrize("seed", range(10))
def test_allocation_for_a_loss_takes_the_fewest_bytes_of_its_steps(seed):
    choices = random_choices(seed)
    for least in (8.0, 2.0, 0.5):
        try:
            chosen = allocate(choices, least_loss=least)
        except ValueError as error:
            assert sum(given[-1].loss for given in choices.values()) > least and "are possible" in str(error)
            continue
        size, loss = sum(c.bytes for c in chosen.values()), sum(c.loss for c in chosen.values())
        assert loss <= least
        # On the front: no choice of all places takes fewer bytes and loses no more.
        others = (dict(zip(choices, given)) for given in itertools.product(*choices.values()))
        assert not any(sum(c.bytes for c in one.values()) < size and sum(c.loss for c in one.values()) <= loss for one in others)


def test_hull_leaves_out_what_no_budget_chooses():
    given = [Choice("a", 8, 1.0), Choice("worse", 12, 1.1), Choice("inside", 16, 0.9), Choice("b", 24, 0.2), Choice("same", 24, 0.3)]
    assert [c.name for c in hull(given)] == ["a", "b"]


def test_a_budget_that_is_too_small_says_what_is_possible():
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_hidden_layers=3)
    room = tune.Room(config, ["levels2", "levels4"], Policy("levels2", full_precision=FullPrecisionTokens(16, 24)), 1024)
    share = 256 * (16 + 31.5) / 1024
    room.check(36 + share)
    with pytest.raises(ValueError, match=rf"--budget 47: {36 + share:.1f} to {68 + share:.1f} bytes"):
        room.check(47)
    lost = {
        (layer, side, name): 1.0 / (1 + layer) / (16 if name == "levels4" else 1)
        for layer in range(3)
        for side in "kv"
        for name in room.names
    }
    chosen = allocate(room.choices(lost), room.left(52 + share))  # half of the steps
    assert room.bytes_per_head(chosen) == pytest.approx(36 + 2 * 16 * 3 / 6 + share)
    made = tune.policy_of(chosen, Policy("levels2", full_precision=FullPrecisionTokens(16, 24), prompt="stored", prompt_precision="8bit"))
    assert made.full_precision == FullPrecisionTokens(16, 24) and (made.prompt, made.prompt_precision) == ("stored", "8bit")
    assert [made.of(layer).name for layer in range(3)] == ["levels4", "levels4/levels2", "levels2"]


def test_sensitivities_are_those_of_each_layer_alone(model_dir, text_file):
    """Against the KL of passes in which one layer's keys or values alone are quantized: the same order of magnitude, and of layers."""
    loaded = models.load(str(model_dir))
    contexts = text.cut(text.read_file(text_file), loaded.tokenizer, 400, 800)
    names = ["levels6", "levels8"]
    found = sensitivities(loaded.model, contexts, names, Policy("none"))
    assert sorted(found) == sorted((layer, side, name) for layer in range(2) for side in "kv" for name in names)
    made = [trials.TextTrial(ids) for ids in contexts]
    alone = {(layer, side, name): Policy("none", {layer: f"{name}/none" if side == "k" else f"none/{name}"}) for layer, side, name in found}
    result = evaluation.evaluate(loaded.model, made, {str(key): policy for key, policy in alone.items()})
    measured = {r.name: r.scores.comparison.kl for r in result.policies}
    for key, value in found.items():
        assert value == pytest.approx(measured[str(key)], rel=0.6), key
    assert all(p.requires_grad for p in loaded.model.parameters()) and loaded.model.config._attn_implementation != "quantkv_captured"


def test_full_precision_tokens_make_a_layer_insensitive(model_dir, text_file):
    loaded = models.load(str(model_dir))
    contexts = text.cut(text.read_file(text_file), loaded.tokenizer, 100, 100)
    found = sensitivities(loaded.model, contexts, ["int2"], Policy("int2", full_precision=FullPrecisionTokens(recent=100)))
    assert max(found.values()) < 1e-9


def test_tune_makes_a_policy_that_eval_takes(run, model_dir, text_file, tmp_path):
    policy, figures, report = tmp_path / "p.json", tmp_path / "t.json", tmp_path / "r.html"
    about = ("--text", text_file, "--context", 256, "--tokens", 512)
    code, out, err = run("tune", model_dir, "--budget", 60, "--full-precision", "16,0", *about, "--out", policy, "--json")
    assert code == 0, err
    figures.write_text(out)  # JSON and nothing else
    size, predicted = re.search(r"([\d.]+) bytes a token and kv head; KL about ([\d.]+)", err).groups()
    assert float(size) <= 60 and Policy.load(policy).full_precision == FullPrecisionTokens(16, 0)
    (one,) = json.loads(figures.read_text())["tuned"]
    assert (
        one["layers"] == [0, 1]
        and set(one["kl"]["k"]) == {"levels2", "levels3", "levels4"}
        and one["predicted"] == pytest.approx(float(predicted), abs=1e-4)
    )
    evaluated = tmp_path / "e.json"
    args = (
        "--kv",
        policy,
        "--kv",
        "levels2",
        "--full-precision",
        "16,0",
        "--tests",
        "kl,copy",
        "--lengths",
        256,
        "--passage",
        20,
        "--depths",
        "0,1",
    )
    code, out, err = run("eval", "--model", model_dir, *about, *args, "--json", evaluated)
    assert code == 0, err
    rows = {row["format"]: row for row in json.loads(evaluated.read_text())["runs"][0]["formats"]}
    assert rows["p"]["bytes_per_head"] == pytest.approx(one["bytes_per_head"]) and rows["p"]["kl"] < rows["levels2 +16,0"]["kl"]
    code, out, err = run("report", evaluated, figures, "--html", report)
    assert code == 0, err
    page = Page()
    page.feed(report.read_text())
    assert page.images == 3 and "p" in page.cells and "exact" in page.cells and not page.external


@pytest.mark.parametrize("place", ["", "below/", "../"])
def test_a_calibration_is_where_the_policy_finds_it(tmp_path, place):
    """It is named where it lies, and written beside the policy where that is elsewhere."""
    out, file = tmp_path / "here" / "p.json", tmp_path / "here" / place / "model.safetensors"
    (tmp_path / "here" / "below").mkdir(parents=True)
    eye = torch.eye(4)[None]
    made = Calibration(1, {0: LayerMoments(None, eye, eye)})
    made.save(file)
    tune._save(Policy("levels4", calibration=made), out, file)
    assert Policy.load(out).calibration.digest == made.digest
    named = json.loads(out.read_text())["calibration"]
    assert named == ("p.calibration.safetensors" if place == "../" else f"{place}model.safetensors")
    assert len(list(tmp_path.rglob("*.safetensors"))) == (2 if place == "../" else 1)


class Page(html.parser.HTMLParser):
    """What a report holds: cells of tables, images, and what it would fetch from elsewhere."""

    def __init__(self):
        super().__init__()
        self.cells, self.images, self.external, self.inside = [], 0, [], False

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.inside = tag == "td"
        source = given.get("src") or given.get("href")
        if source and not source.startswith("data:"):
            self.external.append(source)
        if tag == "img":
            assert given["alt"]
            self.images += 1

    def handle_data(self, data):
        if self.inside:
            self.cells.append(data)


def test_reports_merge_runs_and_escape_names(tmp_path):
    def row(name, size, kl):
        return {
            "format": name,
            "bits_per_element": 4.0,
            "bytes_per_token": size,
            "bytes_per_head": size,
            "compression": 4.0,
            "seconds": 1.0,
            "perplexity": 3.0,
            "perplexity_change": 1.0,
            "kl": kl,
            "kl_error": None,
            "same_top1": 90.0,
        }

    about = {"model": "<m>", "text": "a & b", "read": "teacher-forced", "context": 64, "tokens": 256, "contexts": 4, "complete": True}
    reference = {"dtype": "float32", "perplexity": 2.9, "seconds": 1.0}
    runs = [
        {**about, "reference": reference, "formats": [row("a", 80.0, 0.1), row("b", 40.0, 0.2)]},
        {**about, "reference": reference, "formats": [row("b", 40.0, 0.3), row("c", 60.0, math.nan)]},
    ]
    (one,) = report_html.merge(runs)
    assert [(r["format"], r["kl"]) for r in one["formats"] if r["format"] != "c"] == [("a", 0.1), ("b", 0.3)] and len(one["formats"]) == 3
    assert len(report_html.merge([runs[0], {**runs[1], "context": 128}])) == 2
    report_html.write(tmp_path / "r.html", runs)
    shown = (tmp_path / "r.html").read_text()
    assert "&lt;m&gt;, a &amp; b" in shown and "<m>" not in shown and "nan" in shown


@pytest.mark.parametrize(
    "args, words",
    [
        (["tune"], ["--budget, --kl"]),
        (["tune", "--budget", "60", "--kl", "0.01"], ["--budget, --kl"]),
        (["tune", "--kl", "-1"], ["--kl", "positive"]),
        (["tune", "--budget", "60", "--kv", "int4"], ["--kv int4", "two or more"]),
        (["tune", "--budget", "60", "--kv", "int4,int8/int4"], ["--kv", "alike"]),
        (["tune", "--budget", "60", "--tokens", "200", "--context", "128"], ["--tokens 200", "256"]),
        (["tune", "--budget", "60", "--out", "policy.txt"], ["--out", ".json"]),
        (["tune", "--budget", "60", "--calibration", "none.safetensors"], ["none.safetensors"]),
        (["tune", "/no/such/model", "--budget", "60"], ["/no/such/model"]),
        (["report", "none.json"], ["none.json", "no such file"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, args, words):
    code, out, err = run(*args)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert all(word in err for word in ["error:", *words]), err


def test_budgets_and_geometries_are_refused_before_weights_are_loaded(run, model_dir, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(models.Found, "load", lambda *args: pytest.fail("weights were loaded"))
    about = ("--text", text_file, "--context", 256, "--tokens", 512)
    code, _, err = run("tune", model_dir, "--budget", 20, *about)
    assert code == 2 and "--budget 20: 36.0 to 68.0 bytes" in err and err.count("\n") == 1
    (tmp_path / "deep.json").write_text('{"policy_version": 1, "format": "int4", "layers": {"7": "int8"}}')
    code, _, err = run("eval", "--model", model_dir, "--kv", tmp_path / "deep.json", *about)
    assert code == 2 and "deep: policy.layers=[7]" in err and err.count("\n") == 1
    code, _, err = run("eval", "--model", model_dir, "--kv", "int4", "--text", text_file, "--context", 1000, "--tokens", 1000)
    assert code == 2 and "fewer than one context" in err
    (tmp_path / "short.txt").write_text("abc " * 50)
    code, _, err = run("eval", "--model", model_dir, "--kv", "int4", "--text", tmp_path / "short.txt", "--context", 64, "--tokens", 256)
    assert code == 2 and "192 tokens in whole contexts; 256 are needed" in err
