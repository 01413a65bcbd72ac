"""examples/, each as it stands, with a tiny model. scripts/examples.sh runs them with SmolLM2, tests/vllm_cpu the one that serves."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quantkv import get_format
from quantkv.cli import models
from quantkv.implementations.cpu.compiling import missing

FOLDER = Path(__file__).parent.parent.parent / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def load(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example(model_dir, capsys):
    """Run an example with the tiny model: (exit code, stdout)."""

    def run(name, *arguments):
        code = load(name).main(["--model", str(model_dir), "--device", "cpu", *map(str, arguments)])
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def tiny(model_dir):
    return models.load(str(model_dir))


def numbers(pattern, out):
    found = re.search(pattern, out)
    assert found, out
    return [int(n.replace(",", "")) for n in found.groups()]


@pytest.mark.parametrize("name", NAMES)
def test_each_says_how_to_run_it(name):
    assert f"\n    python examples/{name}.py " in load(name).__doc__
    assert f"`{name}.py`" in (FOLDER / "README.md").read_text()
    assert name == "serve_vllm" or f"examples/{name}.py" in (FOLDER.parent / "scripts" / "examples.sh").read_text()


@pytest.mark.parametrize("kv", ["none", "levels4"])
def test_chat_in_one_cache(example, kv):
    code, out = example("chat", "--kv", kv, "--say", "one", "--say", "two", "--max-new-tokens", 12)
    assert code == 0
    held, stored, at_16_bits = numbers(r"([\d,]+) tokens in ([\d,]+) bytes of .*; ([\d,]+) at 16 bits", out)
    spec = get_format(kv, torch.float32).cache_spec(1, 64)
    assert stored == 2 * spec.nbytes(spec.num_blocks(held))  # 2 layers of one kv head
    assert at_16_bits == held * 2 * 2 * 64 * 2
    (said,) = numbers(r"of (\d+) tokens that were said", out)
    assert 12 <= said <= 24  # rendered anew, what the first answer said may be other tokens


def test_chat_computes_new_tokens_only_and_follows_its_template(tiny):
    """`rendered` may say otherwise than what was generated: the cache goes back to where both part."""
    chat, read = load("chat").Chat(tiny.model, tiny.tokenizer, "none"), []
    tiny.model.get_input_embeddings().register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
    chat.rendered = lambda: list(range(10))
    chat.ask("", 4)
    assert read == [10, 1, 1, 1] and chat.said == [10, 11, 12, 13]
    chat.rendered = lambda: [*chat.tokens, 7, 8, 9]
    chat.ask("", 4)
    assert read[4:] == [4, 1, 1, 1]  # the last token of an answer is read with what follows it
    chat.rendered = lambda: [*chat.tokens[:12], 1, 2, 3]
    chat.ask("", 4)
    assert read[8:] == [3, 1, 1, 1] and chat.said == [10, 11, 15, 16, 17, 18]
    assert chat.likeliest(chat.new_cache()) == 1


def test_a_saved_prefix_answers_as_before(example, text_file):
    code, out = example("saved_prefix", "--document", text_file, "--tokens", 100, "--max-new-tokens", 8)
    assert code == 0 and "the pages are those that were saved" in out and "every answer is the one" in out
    assert numbers(r"(\d+) tokens read in .*; [\d,]+ bytes saved, ([\d,]+) would be 16 bits", out) == [100, 100 * 2 * 2 * 64 * 2]


@pytest.mark.parametrize("seen", ["pages", "answers"])
def test_a_saved_prefix_that_was_changed_is_seen(model_dir, text_file, monkeypatch, seen):
    module = load("saved_prefix")
    loaded = module.load

    def damaged(file):
        cache = loaded(file)
        cache.layers[1].pages.buffer[cache.layers[1].sequences.table.rows[0]] = 0
        return cache

    monkeypatch.setattr(module, "load", damaged)
    if seen == "answers":
        monkeypatch.setattr(module, "pages", lambda cache: [])
    assert module.main(["--model", str(model_dir), "--document", str(text_file), "--tokens", "64", "--max-new-tokens", "8"]) == 1


@pytest.mark.parametrize("name,where", [("speculative", "generated"), ("paged_engine", "by_transformers")])
def test_another_text_than_that_of_transformers_is_seen(model_dir, monkeypatch, name, where):
    module = load(name)
    original = getattr(module, where)

    def other(*arguments, **guessing):
        found = original(*arguments, **guessing)
        if name == "paged_engine" or guessing:
            found[0][-1] = (found[0][-1] + 1) % 256
        return found

    monkeypatch.setattr(module, where, other)
    more = ["--requests", "1"] if name == "paged_engine" else ["--max-new-tokens", "4"]
    assert module.main(["--model", str(model_dir), "--device", "cpu", *more]) == 1


def test_speculative_decoding_says_what_plain_decoding_says(example, monkeypatch, tmp_path):
    prompt = tmp_path / "prompt"
    prompt.write_text("abc abc abc abc ab")
    code, out = example("speculative", "--prompt-file", prompt, "--max-new-tokens", 40)
    assert code == 0 and "none: " in out and out.count("is that of plain greedy decoding") == 2
    accepted, guessed, passes, alone = numbers(r"none: (\d+) of (\d+) guesses accepted .*; (\d+) passes of the model instead of (\d+)", out)
    assert alone == 40 and accepted == 40 - passes and 0 < accepted <= guessed


def test_an_assistant_that_is_the_model_itself_is_always_right(example, model_dir):
    code, out = example("speculative", "--assistant", model_dir, "--max-new-tokens", 24, "--kv", "fp32", "--guesses", 3)
    assert code == 0
    accepted, guessed = numbers(r"none: (\d+) of (\d+) guesses", out)
    assert guessed - accepted <= 3  # the last pass may have guessed beyond the end


def test_the_engine_beside_transformers(example):
    code, out = example("paged_engine", "--requests", 5, "--sequences", 3)
    assert code == 0
    same, total = numbers(r"cache of fp32: (\d+) of (\d+) tokens are those of transformers", out)
    assert same == total == sum(8 + 8 * (3 * i % 6) for i in range(5))
    assert numbers(r"([\d,]+) tokens of the prompts were found", out)[0] > 1000
    assert ("served by: reference" if missing() else "served by: cpu") in out


class Served:
    """Prompts that begin alike in pairs and triples, through engines of several sizes."""

    def __init__(self, tiny):
        self.module, self.model = load("paged_engine"), tiny.model
        draw = torch.Generator().manual_seed(0)
        begun = [torch.randint(0, 256, (n,), generator=draw).tolist() for n in (40, 37, 5)]
        ends = [torch.randint(0, 256, (n,), generator=draw).tolist() for n in (3, 9, 1, 20, 2, 11, 30, 4)]
        self.prompts = [begun[i % 3] + end for i, end in enumerate(ends)]
        self.counts = [5, 1, 12, 7, 20, 3, 9, 18]
        self.wanted = self.module.by_transformers(self.model, self.prompts, self.counts, 1)
        self.model.set_attn_implementation("engine")

    def engine(self, **sizes):
        return self.module.Engine(self.model, "none", **{"max_length": 96, **sizes})


@pytest.fixture
def served(tiny):
    return Served(tiny)


@pytest.mark.parametrize(
    "sizes",
    [{"max_sequences": 1}, {"max_sequences": 3, "chunk": 7}, {"max_sequences": 8, "num_pages": 9}, {"max_sequences": 4, "num_pages": 5}],
    ids=["one", "chunks", "few pages", "fewest pages"],
)
def test_the_engine_whatever_its_room(served, sizes):
    engine = served.engine(**sizes)
    for _ in range(2):  # the second time over what the first left behind
        assert engine.generate(served.prompts, served.counts) == served.wanted
    assert engine.table.num_pages == engine.caches[0].num_blocks >= engine.table.used_pages
    assert not engine.limits and sorted(engine.idle) == list(range(sizes["max_sequences"]))
    assert engine.generated == 2 * sum(served.counts) and (engine.reused > 0) == (len(engine.tokens) > 1)


def test_the_engine_computes_what_prompts_share_once(served):
    """Eight at once: the first of each three computes what the others begin with, to the token."""
    engine = served.engine(max_sequences=8)
    assert engine.generate(served.prompts, served.counts) == served.wanted
    assert engine.reused >= 40 * 2 + 37 * 2


def test_the_engine_is_asked_the_same_again(served):
    """The last token of a prompt is computed in any case: what follows it is in no page."""
    engine, prompt, wanted = served.engine(max_sequences=2), served.prompts[4], served.wanted[4]
    assert engine.generate([prompt] * 3, [20, 10, 20]) == [wanted, wanted[:10], wanted]
    assert engine.reused == 2 * (len(prompt) - 1)


def test_the_graph_of_a_step_runs_over_tensors_that_are_filled_anew(served):
    """What a GPU replays, run without one: the same tensors for every step, sequences padded."""
    engine = served.engine(max_sequences=5)
    engine.static = served.module.Step(engine.caches, engine.inputs({}, 5)[0], max_seq_len=96)
    engine.output, replays = torch.zeros(5, dtype=torch.int64), []
    engine.graph = SimpleNamespace(replay=lambda: replays.append(engine.output.copy_(engine.static.run(engine.model))))
    untouched = [cache.buffer[-1].clone() for cache in engine.caches]
    assert engine.generate(served.prompts, served.counts) == served.wanted
    assert len(replays) >= max(served.counts) - 1
    assert all(torch.equal(cache.buffer[-1], page) for cache, page in zip(engine.caches, untouched))


def test_the_engine_refuses_what_can_never_run(served):
    engine = served.engine(num_pages=3)
    with pytest.raises(ValueError, match=r"prompts\[1\]: 40 tokens and 9 new ones; 1 to 48 in all are allowed"):
        engine.generate([[1], [2] * 40], [1, 9])
    with pytest.raises(ValueError, match=r"prompts\[0\]: 0 tokens"):
        engine.generate([[]], [1])
    assert engine.table.used_pages == 0


@pytest.mark.parametrize(
    "option", [{"softcap": 30.0}, {"sliding_window": 8}, {"s_aux": torch.ones(2)}, {"scaling": 1.0}], ids=lambda o: next(iter(o))
)
def test_the_engine_drops_no_option_of_a_model(option):
    rows = torch.zeros(1, 2, 3, 64)
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        load("paged_engine").attention(None, rows, rows, rows, None, **{"scaling": 64**-0.5, **option})
