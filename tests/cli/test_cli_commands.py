"""The commands end to end on a tiny model, with transformers' DynamicCache (plus noise) in the quantized cache's place."""

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch

import quantkv
from quantkv.cli import eval as eval_module
from quantkv.cli import generate, models, plot, text


def test_eval_writes_table_json_and_plot(run, noisy, model_dir, text_file, tmp_path):
    files = tmp_path / "out.json", tmp_path / "out.svg"
    code, out, err = run(
        "eval",
        "--model",
        model_dir,
        "--text",
        text_file,
        "--formats",
        "int4,fp32,int8",
        "--context",
        64,
        "--tokens",
        150,
        "--json",
        files[0],
        "--plot",
        files[1],
    )
    assert code == 0, err
    assert all(word in out for word in ("int4", "int8", "fp32", "exact", "128 tokens in contexts of 64", model_dir.name))
    values = json.loads(files[0].read_text())
    assert set(values) == {"schema", "complete", "model", "text", "context", "tokens", "chunk", "reference", "formats", "versions"}
    assert (values["complete"], values["context"], values["tokens"], values["text"]) == (True, 64, 128, "text.txt")
    assert [f["format"] for f in values["formats"]] == ["fp32", "int8", "int4"]  # largest first
    exact, int8, int4 = values["formats"]
    assert set(int8) == {
        "format",
        "bits_per_element",
        "bytes_per_token",
        "compression",
        "cache_bytes",
        "perplexity",
        "perplexity_change",
        "kl",
        "same_top1",
        "seconds",
    }
    assert abs(exact["kl"]) < 1e-6 and exact["same_top1"] == 100
    assert exact["perplexity"] == pytest.approx(values["reference"]["perplexity"], rel=1e-5)
    assert exact["kl"] < int8["kl"] < int4["kl"]
    assert int8["bytes_per_token"] == 2 * quantkv.get_format("int8").cache_spec(1, 64).bytes_per_token
    assert int8["cache_bytes"] == 64 * int8["bytes_per_token"]
    assert ElementTree.parse(files[1]).getroot().tag.endswith("svg")


def test_perplexity_is_transformers_own_loss(noisy, model_dir, text_file):
    loaded = models.load(str(model_dir))
    contexts = text.cut(text.read_file(text_file), loaded.tokenizer, 50, 100)
    result = eval_module.evaluate(loaded.model, contexts, ["fp32"])
    with torch.no_grad():
        losses = [loaded.model(ids[None], labels=ids[None]).loss.item() for ids in contexts]
    assert result.perplexity == pytest.approx(math.exp(sum(losses) / 2), rel=1e-5)


def test_chunks_change_nothing_for_an_exact_cache(noisy, model_dir, text_file):
    loaded = models.load(str(model_dir))
    contexts = text.cut(text.read_file(text_file), loaded.tokenizer, 50, 100)
    whole, cut = (eval_module.evaluate(loaded.model, contexts, ["fp32"], chunk=n).formats[0] for n in (None, 7))
    assert cut.comparison.perplexity == pytest.approx(whole.comparison.perplexity, rel=1e-5)
    assert abs(cut.comparison.kl) < 1e-6


def test_png_and_labels_that_do_not_overlap(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    formats = []
    for i, name in enumerate(quantkv.available_formats()):
        spec = quantkv.get_format(name).cache_spec(3, 64)
        r = eval_module.FormatResult(name, spec.bits_per_element, 30 * spec.bytes_per_token, spec.compression)
        r.comparison = eval_module.Comparison(100, 99, 300.0 + i, 300.0, 100 * 2.0**-spec.bits_per_element, 90)
        formats.append(r)
    broken = eval_module.FormatResult("broken", 4.0, 6000.0, 4.0)
    broken.comparison = eval_module.Comparison(100, 99, math.nan, 300.0, math.nan, 90)
    file = tmp_path / "a.png"
    plot.draw(file, eval_module.Result(1024, 4096, None, "float32", 30.0, 1.0, [*formats, broken]), "model", "news")
    assert file.read_bytes().startswith(b"\x89PNG")
    labels = [t for t in drawn[0].axes[0].texts if "%" in t.get_text() or "exact" in t.get_text()]
    labels = [t for t in labels if t.get_text().split()[0] in quantkv.available_formats()]
    boxes = [t.get_window_extent() for t in labels]
    assert len(boxes) == len(formats)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_formats_that_cannot_take_the_head_size_are_named():
    from types import SimpleNamespace

    config = SimpleNamespace(hidden_size=160, num_attention_heads=2, num_key_value_heads=1)
    config.get_text_config = lambda: config
    reasons = eval_module.unusable(SimpleNamespace(config=config), ["int8", "int2"])
    assert list(reasons) == ["int2"] and "80" in reasons["int2"]


def test_front_is_what_nothing_beats():
    def result(name, size, kl):
        r = eval_module.FormatResult(name, bytes_per_token=size)
        r.comparison.predictions, r.comparison.divergence = 1, kl
        return r

    formats = [result("a", 4, 0.1), result("b", 4, 0.2), result("c", 2, 0.5), result("d", 3, 0.6)]
    assert [r.format for r in plot.front(formats)] == ["a", "c"]


def test_generate_compare(run, noisy, model_dir):
    args = ("generate", "Hello", "--model", model_dir, "--max-new-tokens", 24, "--compare", "--kv")
    code, out, err = run(*args, "fp32")
    assert code == 0, err
    assert "the same 24 tokens" in out
    code, out, err = run(*args, "int2")
    assert code == 0, err
    assert "int2 leaves the exact cache's text at token" in out and "instead of" in out


@pytest.mark.parametrize("a, b, index", [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 5, 3], 1), ([0], [4, 5], 0), ([], [], None)])
def test_leaves_at(a, b, index):
    assert generate.leaves_at(a, b) == index


def test_generation_ends_with_an_end_token(noisy, model_dir):
    loaded, written = models.load(str(model_dir)), []
    ids = generate.encode(loaded.tokenizer, "Hello", raw=True)
    steps, _ = generate.run(loaded.model, loaded.tokenizer, ids, None, 8, written.append)
    loaded.model.generation_config.eos_token_id = [steps[2].token]
    ended, _ = generate.run(loaded.model, loaded.tokenizer, ids, None, 8, written.append)
    first = [s.token for s in steps].index(steps[2].token)
    assert [s.token for s in ended] == [s.token for s in steps[: first + 1]]


def test_generate_is_transformers_greedy(noisy, model_dir):
    loaded = models.load(str(model_dir))
    ids = generate.encode(loaded.tokenizer, "Hello", raw=True)
    steps, _ = generate.run(loaded.model, loaded.tokenizer, ids, "fp32", 16, lambda text: None)
    expected = loaded.model.generate(ids[None], max_new_tokens=16, do_sample=False)[0, len(ids) :]
    assert [s.token for s in steps] == expected.tolist()


def test_streamer_holds_back_half_a_character(model_dir):
    tokenizer, written = models.load(str(model_dir)).tokenizer, []
    streamer = generate.Streamer(tokenizer, written.append)
    for token in tokenizer("a\u20acb")["input_ids"]:
        streamer.put(token)
    streamer.end()
    assert written == ["a", "\u20ac", "b"]


@pytest.mark.parametrize(
    "args, words",
    [
        (["eval", "--formats", "int5"], ["int5", "--formats"]),
        (["eval", "--formats", ","], ["--formats"]),
        (["eval", "--plot", "x.pdf"], ["--plot", "x.pdf", ".png"]),
        (["eval", "--json", "no/such/dir/x.json"], ["--json", "no such directory"]),
        (["eval", "--tokens", "10", "--context", "100"], ["--tokens", "--context 100"]),
        (["eval", "--context", "1"], ["--context"]),
        (["eval", "--text", "no-such.txt"], ["no-such.txt"]),
        (["eval", "--model", "/no/such/model"], ["/no/such/model"]),
        (["eval", "--device", "nowhere"], ["--device", "nowhere"]),
        (["eval", "--dtype", "int3"], ["--dtype", "int3", "float32"]),
        (["eval", "--no-such-option"], ["--no-such-option"]),
        (["generate"], ["PROMPT"]),
        (["generate", "x", "--kv", "int4,int8"], ["--kv", "one name"]),
        (["generate", "x", "--kv", "itn4"], ["--kv", "int4"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, args, words):
    code, out, err = run(*args)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and "Traceback" not in err
    assert all(word in err for word in ["error:", *words])


def test_empty_text_is_named(run, model_dir, tmp_path):
    (tmp_path / "empty.txt").touch()
    code, _, err = run("eval", "--model", model_dir, "--text", tmp_path / "empty.txt")
    assert code == 2 and "empty.txt" in err and err.count("\n") == 1


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom quantkv.cli import app\ntry: app(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
