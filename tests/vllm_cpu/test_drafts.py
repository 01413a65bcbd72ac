"""Drafts of EAGLE, EAGLE-3, MTP, another model and suffixes: what they change is how many tokens a step has, and not which."""

from importlib.util import find_spec
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
def eagle3(tmp_path_factory):
    """A llama, and a head that drafts for it."""
    folder = tmp_path_factory.mktemp("eagle3")
    target = Path(tiny_models.write("llama", folder / "llama"))
    tiny_models.follow_tokens(target)
    return str(target), tiny_models.write_eagle3(folder / "head", target)


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latents")
    tiny_models.write("latents", folder)
    tiny_models.add_mtp(folder)
    return str(folder)


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    folder = tmp_path_factory.mktemp("linear")
    tiny_models.write("linear", folder)
    tiny_models.follow_tokens(folder, layers=0.25, head=0.5)
    tiny_models.add_mtp_of_qwen3_next(folder)
    return str(folder)


def ask(folder, name, prompts=PROMPTS, **given):
    report = engine.run(folder, f"quantkv_{name}", prompts, **ARGUMENTS, **given)
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


def same_as_without_drafts(target, name, speculative, prompts=PROMPTS):
    """Tokens of a quantized type, with drafts that were right among them.

    Drafts that are verified read each other's rows as given, which moves a log-probability by about what the format loses. Where prompts
    and drafts read pages alone ("stored"), answers have the tokens that they have without drafts.
    """
    stored = {"additional_config": {"quantkv_prompt": "stored"}}
    drafts = {"speculative_config": speculative}
    plain, found = (ask(target, name, prompts, **stored, **more) for more in ({}, drafts))
    assert found.formats and set(found.formats) == {name} and found.drafted > found.accepted >= 10
    assert found.answers[0].tokens == plain.answers[0].tokens
    for one, other in zip(found.answers[0].logprobs, plain.answers[0].logprobs):
        assert one == pytest.approx(other, abs=2e-4)
    own, given = (ask(target, name, prompts, **more).answers[0] for more in (drafts, {}))
    for tokens, others, one, other in zip(own.tokens, given.tokens, own.logprobs, given.logprobs):
        same = next((i for i, pair in enumerate(zip(tokens, others)) if len(set(pair)) == 2), TOKENS)
        assert one[: same + 1] == pytest.approx(other[: same + 1], abs=0.05)  # the token at which they part is a tie, nearly


def test_eagle_3(eagle3):
    """A head that reads rows of three layers: some of its drafts are right, others are not, and tokens are those without drafts."""
    target, head = eagle3
    given = {"model": head, "method": "eagle3", "num_speculative_tokens": COUNT}
    report = ask(target, "none", speculative_config=given)
    assert same_tokens(report, target) and report.answers[0].tokens == ask(target, "none").answers[0].tokens
    assert report.formats == ["fp32"] * 3 and report.drafted > report.accepted >= 10
    same_as_without_drafts(target, "int8", given)


@pytest.mark.skipif(find_spec("arctic_inference") is None, reason="pip install --no-deps --no-build-isolation arctic-inference==0.1.1")
def test_suffix_decoding(eagle3):
    """Drafts are what followed a suffix before, in the prompt or in answers: prompts here repeat what the model tends to say."""
    target, _ = eagle3
    given = {"method": "suffix", "num_speculative_tokens": COUNT}
    asked = [[7 * i % 128 for i in range(first, first + length)] for first, length in ((0, 140), (50, 160), (90, 200))]
    report = ask(target, "none", asked, speculative_config=given)
    assert report.answers[0].tokens == [references.continued(target, prompt, TOKENS) for prompt in asked]
    assert report.formats == ["fp32"] * 2 and report.drafted > report.accepted >= 10
    same_as_without_drafts(target, "int8", given, asked)


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
    if count == 1:  # a preset's layer that drafts stores latents as those of the model do
        report = ask(latents, "4bit", speculative_config=given)
        assert report.error == "" and report.formats == ["int4+int8"] * 3 and report.drafted > 0


@pytest.mark.parametrize("count", [1, 3])
def test_drafts_of_qwen3_next(linear, count):
    """Its own layer that drafts, beside layers whose states go back to the last draft that was right. vLLM's linear attention of a CPU
    takes bfloat16 alone."""
    given = {"speculative_config": {"method": "mtp", "num_speculative_tokens": count}, "dtype": "bfloat16"}
    for name, kind in (("none", "bf16"), ("int8", "int8")):
        plain, found = ask(linear, name, dtype="bfloat16"), ask(linear, name, **given)
        assert same_tokens(found, linear) and same_tokens(plain, linear)
        assert plain.formats == [kind] and found.formats == [kind] * 2  # the model's, and the layer's that drafts
        assert found.drafted > found.accepted >= 20
        for one, other in zip(found.answers[0].logprobs, plain.answers[0].logprobs):
            assert one == pytest.approx(other, abs=0.1)
