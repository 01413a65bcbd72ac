"""Retrieval, greedy agreement and their standard errors, on logits that are made up."""

import math
import statistics

import pytest
import torch

from quantkv.cli import eval as evaluation
from quantkv.cli import models, policies, readers, text, trials
from quantkv.cli.eval import PolicyResult
from quantkv.cli.metrics import Share, standard_error
from quantkv.cli.policies import Size
from quantkv.formats import get_format
from quantkv.full_precision import FullPrecisionTokens
from quantkv.policy import Policy

VOCABULARY = 300


def saying(ids, wrong=()):
    """Logits [T, vocabulary] that predict each next token, but not the tokens at the positions `wrong`."""
    following = torch.cat([ids[1:], ids[:1]]).clone()
    for position in wrong:
        following[position - 1] = (following[position - 1] + 1) % VOCABULARY
    return torch.nn.functional.one_hot(following, VOCABULARY).float()


def kept(trial, logits):
    return logits[-trial.keep :]


def test_a_copied_passage_is_asked_behind_its_first_tokens():
    ids = torch.randperm(VOCABULARY)[:256]
    (trial,) = trials.copies(ids[None], 40, [0, 1])
    assert trial.ids[:176].equal(ids[:176])
    assert trial.ids[176:216].equal(ids[64:104]) and trial.ids[216:].equal(ids[136:176])  # depth 0 and 1
    scores = trials.Scores()
    # Wrong: a token that is not asked (the 15th), the first that is, one in the middle of the second passage, and its last.
    logits = saying(trial.ids, [176 + 14, 176 + 15, 216 + 30, 255])
    trial.score(scores, kept(trial, logits), kept(trial, logits), trial.ids)
    assert {cell: (share.right, share.asked) for cell, share in scores.copied.items()} == {(256, 0): ([24], [25]), (256, 1): ([23], [25])}
    found = evaluation.found(scores)["copy"]
    assert found["share"] == pytest.approx(94) and found["asked"] == 50
    assert [cell["depth"] for cell in found["cells"]] == [0, 1]


def test_passages_that_do_not_fit_are_refused():
    for length, depths in ((15, [0]), (65, [0, 0.5]), (200, [0])):
        with pytest.raises(ValueError, match=rf"--passage {length}.*allowed: 16 to {(256 - 64) // (len(depths) + 1)}"):
            trials.copies(torch.zeros(1, 256, dtype=torch.long), length, depths)


def test_names_and_codes(model_dir):
    tokenizer = models.load(str(model_dir)).tokenizer
    filler = text.plain(tokenizer, "It was a long day. " * 100)
    trial = trials.codes(filler, tokenizer, [7], 800, seed=1)
    assert len(trial.ids) == 800 and trial.ids[0] == 7 and len(trial.marks) == 6  # 200 // 33 bytes at most
    for start, count, distance in trial.marks:
        digits = tokenizer.decode(trial.ids[start : start + count])
        assert count == 4 and digits.isdigit() and tokenizer.decode(trial.ids[start - distance :][:count]) == digits
        told, asked = (tokenizer.decode(trial.ids[at - 30 : at + 5]).rpartition(" The code of ")[2] for at in (start - distance, start))
        assert told == asked and told.endswith(f" is {digits}.")
    first, last = sorted(trial.marks)[0], sorted(trial.marks)[-1]
    scores = trials.Scores()
    logits = saying(trial.ids, [first[0], first[0] + 3, last[0] + 1])
    trial.score(scores, kept(trial, logits), kept(trial, logits), trial.ids)
    codes = evaluation.found(scores)["codes"]
    asked = 4 * len(trial.marks)
    assert codes["asked"] == asked and codes["share"] == pytest.approx(100 * (asked - 3) / asked)
    assert codes["whole"] == pytest.approx(100 * (len(trial.marks) - 2) / len(trial.marks))
    assert trials.codes(filler, tokenizer, [7], 800, seed=1).ids.equal(trial.ids)  # the seed decides
    assert not trials.codes(filler, tokenizer, [7], 800, seed=2).ids.equal(trial.ids)
    with pytest.raises(ValueError, match="--lengths 300: too short"):
        trials.codes(filler, tokenizer, [], 300, seed=0)
    with pytest.raises(ValueError, match="text is too short"):
        trials.codes(filler[:100], tokenizer, [], 800, seed=0)


def test_thirds_of_codes_go_by_distance():
    scores = trials.Scores(codes=[(500, 1, 4), (10, 4, 4), (300, 2, 4), (20, 3, 4), (310, 2, 4), (600, 0, 4)])
    codes = evaluation.found(scores)["codes"]
    assert (codes["near"], codes["middle"], codes["far"]) == (87.5, 50, 12.5)


@pytest.mark.parametrize("wrong, agreed", [([], 6), ([20], 0), ([25], 5), ([23, 24], 3)])
def test_greedy_agreement_ends_with_the_first_other_token(wrong, agreed):
    ids = torch.randperm(VOCABULARY)[:26]
    trial, scores = trials.Greedy(ids[:20], 7), trials.Scores()
    trial.score(scores, None, kept(trial, saying(ids, wrong)), ids)
    assert scores.agreed == [agreed]


def test_greedy_agreement_is_that_of_two_generations(model_dir):
    from transformers import DynamicCache

    from quantkv.cli.decoding import greedy
    from quantkv.cli.generate import leaves_at

    loaded = models.load(str(model_dir))
    prompt = torch.tensor(text.plain(loaded.tokenizer, "The quick brown fox jumps over the lazy dog. " * 2))
    policy = {"int2": Policy("int2")}
    result = evaluation.evaluate(loaded.model, [trials.Greedy(prompt[:n], 25) for n in (20, 40, 60)], policy)
    expected = []
    for n in (20, 40, 60):
        exact = [s.token for s in greedy(loaded.model, prompt[:n], DynamicCache(config=loaded.model.config), 24, set())]
        with readers.quantized_attention(loaded.model):
            own = [s.token for s in greedy(loaded.model, prompt[:n], readers.quantized_cache(loaded.model, "int2"), 24, set())]
        index = leaves_at(own, exact)
        expected.append(24 if index is None else index)
    assert result.policies[0].scores.agreed == expected and result.exact.scores.agreed == [24] * 3
    greedy_of = evaluation.found(result.policies[0].scores)["greedy"]
    assert (greedy_of["identical"], greedy_of["of"], greedy_of["continuations"]) == (sum(n == 24 for n in expected), 24, 3)
    side_by_side = torch.stack([prompt[:40], prompt[5:45]])
    result = evaluation.evaluate(loaded.model, [trials.Greedy(side_by_side, 25)], policy, read=readers.ThroughCache())
    assert len(result.policies[0].scores.agreed) == 2 and result.policies[0].scores.agreed[0] == expected[1]


def test_standard_errors():
    values = [0.1, 0.4, 0.25, 0.3]
    assert standard_error(values) == pytest.approx(statistics.stdev(values) / 2)
    assert math.isnan(standard_error([1.0])) and math.isnan(Share([1], [4]).error) and math.isnan(Share().percent)
    same = Share([3, 1, 2, 4], [4] * 4)  # groups of one size: of the mean of their shares
    assert same.error == pytest.approx(100 * statistics.stdev([0.75, 0.25, 0.5, 1.0]) / 2)
    single = Share([1, 0, 1, 1, 0], [1] * 5)  # groups of one: the binomial's, with n - 1
    assert single.error == pytest.approx(100 * math.sqrt(0.6 * 0.4 / 4))
    assert (same + single).percent == pytest.approx(100 * 13 / 21) and same.whole == 25


def test_bytes_of_full_precision_tokens_are_at_their_share():
    spec = get_format("levels4").cache_spec(3, 64)
    specs = {0: spec, 1: spec}
    plain = policies.Size.of(specs, None, set(), 1024)
    assert plain.bytes_per_head == 68 and plain.bytes_per_token == 2 * 3 * 68 and plain.bits_per_element == 4.25
    exact = FullPrecisionTokens(16, 24)  # 24 to 39 of the latest, 31.5 on average
    assert policies.Size.of(specs, exact, set(), 1024).bytes_per_head == pytest.approx(68 + 256 * (16 + 31.5) / 1024)
    one_slides = policies.Size.of(specs, exact, {1}, 1024)
    assert one_slides.bytes_per_head == pytest.approx(68 + 256 * (8 + 31.5) / 1024)
    assert policies.Size.of(specs, exact, set(), 32).bytes_per_head == 68 + 256  # no more copies than tokens


def test_policies_have_their_names_and_their_tokens(tmp_path):
    (tmp_path / "mine.json").write_text('{"policy_version": 1, "format": "int4", "layers": {"0": "int8"}}')
    made = policies.policies_of(f"int4,int8/int4,{tmp_path / 'mine.json'}", full_precision="16,24")
    assert list(made) == ["int4 +16,24", "int8/int4 +16,24", "mine"]
    assert (
        made["int4 +16,24"].full_precision == FullPrecisionTokens(16, 24)
        and made["mine"].full_precision is None
        and made["mine"].layers == {0: "int8"}
    )
    with pytest.raises(ValueError, match="named twice"):
        policies.policies_of(f"int4,{tmp_path / 'mine.json'},{tmp_path / 'mine.json'}")
    with pytest.raises(ValueError, match="a policy brings its own"):
        policies.policies_of(str(tmp_path / "mine.json"), full_precision="16,24")


def test_figures_without_text():
    """Passages alone: nothing is said of what was not measured."""
    scores = trials.Scores(copied={(64, 0.5): Share([3, 4], [4, 4])})
    values = PolicyResult("int4", scores, size=Size(100.0, 10.0, 200)).to_dict()
    assert values["copy"]["share"] == 87.5 and not {"kl", "perplexity", "same_top1"} & values.keys()
