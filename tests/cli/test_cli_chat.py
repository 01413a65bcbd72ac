"""`quantkv generate --chat`: several turns in one cache."""

import io
import itertools
import json
import shutil
import sys

import pytest
import torch
from transformers import DynamicCache

from quantkv.cli import generate, models

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}~\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = "~"  # the byte-level tokenizer has no words: a character ends a turn


@pytest.fixture(scope="module")
def loaded(model_dir):
    return models.load(str(model_dir))


@pytest.fixture
def fed(loaded, monkeypatch):
    """How many tokens each forward pass reads."""
    counts, forward = [], loaded.model.forward

    def counted(input_ids, **options):
        counts.append(input_ids.shape[1])
        return forward(input_ids, **options)

    monkeypatch.setattr(loaded.model, "forward", counted)
    return counts


@pytest.fixture
def templated(loaded, monkeypatch):
    """The tokenizer with a chat template whose turns end with END, as the model's answers may."""
    (end,) = loaded.tokenizer(END)["input_ids"]
    monkeypatch.setattr(loaded.tokenizer, "chat_template", CHATML)
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", end)
    return loaded


def continuation(model, ids, count):
    """Greedy, by transformers."""
    return model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None)[0, len(ids) :].tolist()


@pytest.mark.parametrize("kv", [None, "fp32"])
def test_turns_go_on_in_one_cache(loaded, fed, kv):
    """The second answer is that of a model that reads everything at once; the pass before it reads only what is new."""
    writer = generate.Writer(loaded.model, loaded.tokenizer, kv, lambda text: None)
    first, second = loaded.tokenizer("Hello")["input_ids"], loaded.tokenizer(" you")["input_ids"]
    answers = [[step.token for step in writer.answer(ids, 6)] for ids in (first, second)]
    assert fed == [5, *[1] * 5, 1 + 4, *[1] * 5] and writer.held == 5 + 6 + 4 + 5
    fed.clear()
    assert answers[0] == continuation(loaded.model, first, 6)
    assert answers[1] == continuation(loaded.model, [*first, *answers[0], *second], 6)
    if kv is None:
        assert isinstance(writer.cache, DynamicCache)


@pytest.mark.parametrize("ended", [True, False])
def test_turns_are_the_templates_text(templated, ended, monkeypatch):
    """All that was read and written is the conversation as the template writes it, whether an answer ended by itself or was cut."""
    answers = iter(["hi there" + END * ended, "bye" + END * ended])
    read = []

    def scripted(model, ids, cache, max_new_tokens, ends):
        read.extend(ids.tolist())
        tokens = templated.tokenizer(next(answers))["input_ids"]
        for token in tokens:
            yield generate.Step(token, torch.ones(1))
        read.extend(tokens[:-1])  # the last one is not read

    monkeypatch.setattr(generate, "greedy", scripted)
    writer = generate.Writer(templated.model, templated.tokenizer, None, lambda text: None)
    conversation = generate.Conversation(templated.tokenizer)
    for prompt in (" one ", "two", "three"):
        ids = conversation.asked(prompt)
        if prompt == "three":
            read += [*writer.unread, *ids]
            break
        conversation.answered(writer.answer(ids, 99))
    text = "<user>one~\n<assistant>hi there~\n<user>two~\n<assistant>bye~\n<user>three~\n<assistant>"
    assert templated.tokenizer.decode(read) == text


def test_an_answer_that_looks_like_the_mark(templated):
    conversation = generate.Conversation(templated.tokenizer)
    conversation.asked(generate.MARK)
    conversation.messages.append({"role": "assistant", "content": generate.MARK})
    new = templated.tokenizer.decode(conversation.asked("x"))
    assert new == "~\n<user>x~\n<assistant>"


@pytest.mark.parametrize(
    "template, words",
    [("{% for %}", "--raw"), ("{{ raise_exception('users only') }}", "users only"), ("{{ messages[-1]['content'] }}", "earlier answers")],
)
def test_templates_that_fail(templated, monkeypatch, template, words):
    monkeypatch.setattr(templated.tokenizer, "chat_template", template)
    conversation = generate.Conversation(templated.tokenizer)
    with pytest.raises(ValueError, match=words):
        conversation.asked("a")
        conversation.messages.append({"role": "assistant", "content": "b"})
        conversation.asked("c")


@pytest.fixture
def piped(monkeypatch):
    return lambda text: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


def test_copies_are_told_apart_from_pages(run, model_dir, piped):
    """In a short conversation they are most of the memory, and in a long one next to nothing."""
    policy = '{"policy_version": 1, "format": "int8", "full_precision": {"sink": 16, "recent": 24}}'
    (file := model_dir.parent / "copies.json").write_text(policy)
    piped(b"ab\n")
    code, _, err = run("generate", "--chat", "--model", model_dir, "--kv", file, "--max-new-tokens", 3)
    pages, copies = 2 * 16 * (2 * 64 + 2 * 4), 2 * 5 * 16 * 2 * 64 * 4  # layers, pages, K and V; copies in float32
    assert code == 0 and f"tokens in {pages:,} bytes; 16 bits would take" in err
    assert f". Copies of the first and latest tokens take {copies:,}, however many" in err


def test_piped(run, model_dir, piped):
    """A turn a line, PROMPT first; the cache's tokens and bytes after each."""
    piped(b"ab\n\n  cde\n")
    code, out, err = run("generate", "Hello", "--chat", "--model", model_dir, "--kv", "int8", "--max-new-tokens", 3)
    assert code == 0 and len(out.splitlines()) >= 3, err
    spec_bytes = 2 * 16 * (2 * 64 + 2 * 4)  # layers, a page, K and V with a scale each
    assert [line.partition("; 16")[0] for line in err.splitlines()] == [
        f"5 tokens read, 3 written; the cache holds 7 tokens in {spec_bytes:,} bytes",
        f"4 tokens read, 3 written; the cache holds 13 tokens in {spec_bytes:,} bytes",
        f"5 tokens read, 3 written; the cache holds 20 tokens in {2 * spec_bytes:,} bytes",
    ]


def test_bad_turns(run, model_dir, piped, tmp_path):
    short = shutil.copytree(model_dir, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    args = ("generate", "--chat", "--model", short, "--max-new-tokens")
    piped(b"abc\n\xff\n")
    code, _, err = run(*args, 2)
    assert code == 2 and err.splitlines()[-1] == "error: standard input: not UTF-8 (invalid start byte); UTF-8 text is needed"
    piped(b"abc\ndef\n")
    code, _, err = run(*args, 14)  # 3 + 14, then 4 + 14
    last = "error: --max-new-tokens 14 after a conversation of 21 tokens: short has 32 positions, 34 are needed; allowed: at most 12"
    assert code == 2 and err.splitlines()[-1] == last


def test_what_was_written_is_kept(run, noisy, model_dir, monkeypatch):
    greedy = generate.greedy

    def interrupted(*args):
        yield from itertools.islice(greedy(*args), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "greedy", interrupted)
    code, out, err = run("generate", "Hello", "--model", model_dir, "--kv", "fp32")
    assert code == 130 and err.splitlines()[-1] == "interrupted: the 3 tokens above were finished"
    assert len(out.splitlines()) >= 2
