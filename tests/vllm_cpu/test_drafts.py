"""Models that draft, EAGLE, MTP and another model: what they change is how many tokens a step has, and not which."""

from pathlib import Path

import engine
import pytest
import references
import tiny_models

from test_options import policy

PROMPTS = [tiny_models.prompt(seed, length) for seed, length in enumerate((17, 40, 70))]
TOKENS = 24
ARGUMENTS = {"skip_tokenizer_init": True, "max_model_len": 256, "tokens": TOKENS}
COUNT = 3
SAME = {"method": "draft_model", "num_speculative_tokens": COUNT}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_models.write("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def eagle(llama, tmp_path_factory):
    return tiny_models.write_eagle(tmp_path_factory.mktemp("drafts") / "eagle", Path(llama))


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latents")
    tiny_models.write("latents", folder)
    tiny_models.add_mtp(folder)
    return str(folder)


def ask(folder, name, **given):
    report = engine.run(folder, f"quantkv_{name}", PROMPTS, **ARGUMENTS, **given)
    assert report.error == ""
    return report


def same_tokens(report, folder):
    return report.answers[0].tokens == [references.continued(folder, prompt, TOKENS) for prompt in PROMPTS]


def test_a_model_that_drafts_for_itself_is_always_right(llama):
    report = ask(llama, "none", speculative_config={"model": llama, **SAME})
    assert same_tokens(report, llama)
    assert report.formats == ["fp32"] * 4  # two layers of each model
    assert report.drafted == report.accepted > 0


def test_eagle(llama, eagle):
    given = {"model": eagle, "method": "eagle", "num_speculative_tokens": COUNT}
    report = ask(llama, "none", speculative_config=given)
    assert same_tokens(report, llama)
    assert report.formats == ["fp32"] * 3 and report.drafted > 0
    plain, found = ask(llama, "int8"), ask(llama, "int8", speculative_config=given)
    assert found.answers[0].tokens == plain.answers[0].tokens
    assert found.formats == ["int8"] * 3


def test_full_precision_tokens_with_a_model_that_drafts(llama, tmp_path):
    """Pages of 2 bits, all of whose tokens are at full precision in the model: its answers are right, whatever is drafted."""
    asked = policy(tmp_path, format="int2", layers={"1": "int4"}, full_precision={"sink": 16, "recent": 200})
    report = ask(llama, "policy", speculative_config={"model": llama, **SAME}, **asked)
    assert same_tokens(report, llama)
    assert report.formats == ["int2", "int4", "int2", "int2"]
    assert report.drafted > report.accepted > 0  # drafts read 2 bits alone
    assert "quantkv: the model that drafts stores its rows in int2, without what else the policy says" in report.log


def test_statistics_are_those_of_the_model(llama):
    report = ask(llama, "4bit", speculative_config={"model": llama, **SAME})
    assert "key means and Hessians of 2 layers" in report.log
    assert report.formats == ["levels4"] * 4 and report.drafted > 0


@pytest.mark.parametrize("count", [1, 2])
def test_drafts_of_latents(latents, count):
    """DeepSeek's own layer that drafts, whose latents lie in pages too."""
    given = {"method": "mtp", "num_speculative_tokens": count}
    report = ask(latents, "none", speculative_config=given)
    assert same_tokens(report, latents)
    assert report.formats == ["fp32+fp32"] * 3 and report.drafted > 0
    plain, found = ask(latents, "int8"), ask(latents, "int8", speculative_config=given)
    assert found.answers[0].tokens == plain.answers[0].tokens
