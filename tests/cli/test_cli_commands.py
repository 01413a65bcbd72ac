"""The commands end to end on a tiny model, with transformers' DynamicCache (plus noise) in the quantized cache's place."""

import json
import math
import statistics
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from transformers import LlamaConfig

import quantkv
from quantkv.cli import eval as eval_module
from quantkv.cli import generate, models, plot, policies, readers, text, trials
from quantkv.policy import Policy


def test_eval_writes_table_json_and_plot(run, noisy, model_dir, text_file, tmp_path):
    files = tmp_path / "out.json", tmp_path / "out.svg"
    code, out, err = run(
        "eval",
        "--model",
        model_dir,
        "--text",
        text_file,
        "--kv",
        "int4,fp32,int8",
        "--context",
        64,
        "--tokens",
        300,
        "--json",
        files[0],
        "--plot",
        files[1],
    )
    assert code == 0, err
    assert all(word in out for word in ("int4", "int8", "fp32", "exact", "64 tokens decoded behind prompts of 48 in contexts of 64"))
    assert model_dir.name in out and "through the cache" in out and "prompt:" in out
    values = json.loads(files[0].read_text())
    assert set(values) == {"schema", "runs", "tuned", "versions"} and values["tuned"] == []
    (run,) = values["runs"]
    assert (run["complete"], run["context"], run["tokens"], run["text"]) == (True, 64, 64, "text.txt")
    assert (run["read"], run["prompt"], run["prompt_tokens"], run["contexts"]) == ("through the cache", 48, 192, 4)
    assert [f["format"] for f in run["formats"]] == ["fp32", "int8", "int4"]  # largest first
    exact, int8, int4 = run["formats"]
    assert abs(exact["kl"]) < 1e-6 and exact["same_top1"] == 100
    assert exact["perplexity"] == pytest.approx(run["reference"]["perplexity"], rel=1e-5)
    assert exact["kl"] < int8["kl"] < int4["kl"]
    assert exact["prompt"].keys() <= exact.keys() and 0 < int8["prompt"]["kl"] < int4["prompt"]["kl"]  # this cache is noisy at once
    assert exact["prompt"]["perplexity"] == pytest.approx(run["reference"]["prompt"]["perplexity"], rel=1e-5)
    spec = quantkv.get_format("int8").cache_spec(1, 64)
    assert int8["bytes_per_token"] == 2 * spec.bytes_per_token and int8["bytes_per_head"] == spec.bytes_per_token
    assert len(int8["kl_of_contexts"]) == 4 and int8["kl"] == pytest.approx(sum(int8["kl_of_contexts"]) / 4)
    assert int8["kl_error"] == pytest.approx(statistics.stdev(int8["kl_of_contexts"]) / 2)
    assert ElementTree.parse(files[1]).getroot().tag.endswith("svg")


def test_eval_prints_json(run, noisy, model_dir, text_file):
    """Alone on standard output; the table goes where the progress does."""
    args = ("--model", model_dir, "--text", text_file, "--kv", "int4", "--context", 64, "--tokens", 256)
    code, out, err = run("eval", "--json", *args)
    assert code == 0 and json.loads(out)["runs"][0]["formats"][0]["format"] == "int4"
    assert "64 tokens decoded behind prompts of 48 in contexts of 64" in err and "figures:" not in err


def test_quick_is_teacher_forced_and_says_so(run, model_dir, text_file):
    args = ("--model", model_dir, "--text", text_file, "--kv", "int2,4bit", "--context", 128, "--tokens", 256, "--quick")
    code, out, err = run("eval", "--json", *args)
    assert code == 0, err
    (told,) = json.loads(out)["runs"]
    assert (told["read"], told["tokens"], told["prompt"], told["prompt_tokens"]) == ("teacher-forced", 256, 0, 0)
    assert "teacher-forced" in err and "prompt:" not in err and not any("prompt" in row for row in told["formats"])


def test_the_default_is_presets_through_the_cache(run, model_dir, text_file):
    """A prompt in one pass loses nothing; in chunks it does, and the last chunk is shown."""
    args = ("--model", model_dir, "--text", text_file, "--context", 128, "--tokens", 256, "--decode", 4)
    code, out, err = run("eval", "--json", *args)
    assert code == 0, err
    (whole,) = json.loads(out)["runs"]
    rows = {row["format"]: row for row in whole["formats"]}
    assert set(rows) == {"int4", "8bit", "4bit", "3bit", "2bit"} and whole["tokens"] == 8 and whole["prompt_tokens"] == 248
    assert all(abs(row["prompt"]["kl"]) < 1e-6 for row in rows.values())  # both passes are of float32
    assert 0 < rows["8bit"]["kl"] < rows["4bit"]["kl"] < rows["3bit"]["kl"] < rows["2bit"]["kl"]
    code, out, err = run("eval", "--json", "--kv", "int2", "--chunk", 50, *args)
    assert code == 0, err
    (cut,) = json.loads(out)["runs"]
    assert cut["prompt_tokens"] == 2 * 24 and cut["formats"][0]["prompt"]["kl"] > 1e-3
    assert cut["read"] == "through the cache, 50 tokens of a prompt a pass"


def test_contexts_side_by_side_say_what_each_says_alone(model_dir, text_file):
    loaded = models.load(str(model_dir))
    contexts = text.cut(text.read_file(text_file), loaded.tokenizer, 64, 192)
    read, policy = readers.ThroughCache(), {"4bit": Policy.given("4bit")}
    of = lambda made: eval_module.evaluate(loaded.model, made, policy, read=read).policies[0].scores
    together, alone = of([trials.TextTrial(contexts, 0, 20)]), of([trials.TextTrial(ids, 0, 20) for ids in contexts])
    # A rounding of float32 may give a row another code, which costs what a code does: a few of 60 predictions of 1e-2.
    assert together.comparison.kl_of_contexts == pytest.approx(alone.comparison.kl_of_contexts, rel=1e-2)
    assert together.comparison.predictions == 60 and together.prompt.predictions == 132


def evaluated(loaded, contexts, name, read=None):
    """The comparison of one format over contexts."""
    made = [trials.TextTrial(ids) for ids in contexts]
    return eval_module.evaluate(loaded.model, made, {name: Policy(name)}, read=read)


def test_perplexity_is_transformers_own_loss(noisy, model_dir, text_file):
    loaded = models.load(str(model_dir))
    contexts = text.cut(text.read_file(text_file), loaded.tokenizer, 50, 100)
    result = evaluated(loaded, contexts, "fp32")
    with torch.no_grad():
        losses = [loaded.model(ids[None], labels=ids[None]).loss.item() for ids in contexts]
    assert result.to_dict()["reference"]["perplexity"] == pytest.approx(math.exp(sum(losses) / 2), rel=1e-5)


@pytest.mark.parametrize("read", [readers.ThroughCache(), readers.ThroughCache(7), readers.TeacherForced()], ids=lambda r: r.name)
def test_an_exact_cache_changes_nothing(model_dir, text_file, read):
    loaded = models.load(str(model_dir))
    contexts = text.cut(text.read_file(text_file), loaded.tokenizer, 50, 100)
    comparison = evaluated(loaded, contexts, "fp32", read).policies[0].scores.comparison
    assert comparison.perplexity == pytest.approx(comparison.reference_perplexity, rel=1e-5)
    assert abs(comparison.kl) < 1e-6 and comparison.predictions == 100


def test_png_and_labels_that_do_not_overlap(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    rows = []
    for i, name in enumerate(quantkv.available_formats()):
        spec = quantkv.get_format(name).cache_spec(3, 64)
        kl = 2.0**-spec.bits_per_element
        row = {"format": name, "bytes_per_head": spec.bytes_per_token / 3, "kl": kl, "kl_error": kl / 5, "perplexity_change": 1.0 + i / 7}
        rows.append(row)
    rows.append({**rows[0], "format": "broken", "kl": math.nan})
    file = tmp_path / "a.png"
    plot.draw(file, {"model": "model", "text": "news", "tokens": 4096, "context": 1024, "formats": rows})
    assert file.read_bytes().startswith(b"\x89PNG")
    labels = [t for t in drawn[0].axes[0].texts if "%" in t.get_text() or "exact" in t.get_text()]
    labels = [t for t in labels if t.get_text().split()[0] in quantkv.available_formats()]
    boxes = [t.get_window_extent() for t in labels]
    assert len(boxes) == len(rows) - 1
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_formats_that_cannot_take_the_head_size_are_named():
    config = LlamaConfig(hidden_size=160, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    given = {name: Policy(name) for name in ("int8", "int2")}
    kept, reasons = policies.fitting(given, config, strict=False)
    assert list(kept) == ["int8"] and list(reasons) == ["int2"] and "80" in reasons["int2"]
    with pytest.raises(ValueError, match=r"int2: head_size=80"):
        policies.fitting(given, config, strict=True)


def test_front_is_what_nothing_beats():
    rows = [{"format": f, "bytes_per_head": size, "kl": kl} for f, size, kl in (("a", 4, 0.1), ("b", 4, 0.2), ("c", 2, 0.5), ("d", 3, 0.6))]
    assert [row["format"] for row in plot.front(rows)] == ["a", "c"]


def test_generate_compare(run, noisy, model_dir):
    args = ("generate", "Hello", "--model", model_dir, "--max-new-tokens", 24, "--compare", "--kv")
    code, out, err = run(*args, "fp32")
    assert code == 0, err
    assert "the same 24 tokens" in out
    code, out, err = run(*args, "int2")
    assert code == 0, err
    assert "int2 leaves the exact cache's text at token" in out and "instead of" in out


def test_generate_writes_from_the_4_bit_preset_unless_told(run, noisy, model_dir):
    code, out, err = run("generate", "Hello", "--model", model_dir, "--max-new-tokens", 1)
    assert code == 0 and "4bit cache" in out, err


@pytest.mark.parametrize("a, b, index", [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 5, 3], 1), ([0], [4, 5], 0), ([], [], None)])
def test_leaves_at(a, b, index):
    assert generate.leaves_at(a, b) == index


def test_generation_ends_with_an_end_token(noisy, model_dir):
    loaded, written = models.load(str(model_dir)), []
    ids = generate.encode(loaded.tokenizer, "Hello", raw=True)
    steps = generate.Writer(loaded.model, loaded.tokenizer, None, written.append).answer(ids, 8)
    loaded.model.generation_config.eos_token_id = [steps[2].token]
    ended = generate.Writer(loaded.model, loaded.tokenizer, None, written.append).answer(ids, 8)
    first = [s.token for s in steps].index(steps[2].token)
    assert [s.token for s in ended] == [s.token for s in steps[: first + 1]]


def test_generate_is_transformers_greedy(noisy, model_dir):
    loaded = models.load(str(model_dir))
    ids = generate.encode(loaded.tokenizer, "Hello", raw=True)
    steps = generate.Writer(loaded.model, loaded.tokenizer, "fp32", lambda text: None).answer(ids, 16)
    expected = loaded.model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :]
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
        (["eval", "--kv", "int5"], ["int5", "--kv"]),
        (["eval", "--kv", ","], ["--kv"]),
        (["eval", "--plot", "x.pdf"], ["--plot", "x.pdf", ".png"]),
        (["eval", "--json", "no/such/dir/x.json"], ["--json", "no such directory"]),
        (["eval", "--tokens", "10", "--context", "100"], ["--tokens", "--context 100"]),
        (["eval", "--context", "1"], ["--context"]),
        (["eval", "--context", "64", "--tokens", "256", "--decode", "64"], ["--decode 64", "64 tokens of a context"]),
        (["eval", "--quick", "--decode", "8"], ["--decode", "--quick"]),
        (["eval", "--quick", "--chunk", "8"], ["--chunk", "--quick"]),
        (["eval", "--context", "100", "--tokens", "255"], ["--tokens 255", "256"]),
        (["eval", "--tests", "kl,recall"], ["--tests", "recall", "codes"]),
        (["eval", "--tests", "copy", "--lengths", "12"], ["--lengths 12", "64"]),
        (["eval", "--tests", "copy", "--depths", "0,2"], ["--depths 2"]),
        (["eval", "--tests", "greedy", "--context", "100"], ["--context 100", "greedy"]),
        (["eval", "--kv", "none.json"], ["none.json"]),
        (["eval", "--full-precision", "16"], ["--full-precision 16", "16,24"]),
        (["eval", "--kv", "int4", "--calibration", "none.safetensors"], ["none.safetensors"]),
        (["eval", "--html", "no/such/dir/x.html"], ["--html", "no such directory"]),
        (["eval", "--text", "no-such.txt"], ["no-such.txt"]),
        (["eval", "--model", "/no/such/model"], ["/no/such/model"]),
        (["eval", "--device", "nowhere"], ["--device", "nowhere", "allowed: cpu"]),
        (["generate", "x", "--device", "meta"], ["--device", "meta", "allowed: cpu"]),
        (["bench", "--device", ""], ["--device ''", "allowed: cpu"]),
        (["generate", "x", "--model", ""], ["--model ''"]),
        (["generate", "x", "--model", ".", "--kv", "int4", "--full-precision", "3"], ["--full-precision 3"]),
        (["generate", "x", "--model", ".", "--full-precision", "16,24"], ["--kv 4bit", "--full-precision", "--kv levels4"]),
        (["generate", "--chat", "--raw"], ["--raw", "--chat"]),
        (["tune", "a", "--model", "b"], ["MODEL a", "--model b"]),
        (["calibrate", "a", "--model", "b"], ["MODEL a", "--model b"]),
        (["tune", "--budget", "nan"], ["--budget nan"]),
        (["tune", "--kl", "inf"], ["--kl inf"]),
        (["eval", "--kv", "all,nope.json"], ["--kv", "nope.json"]),
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
