"""Full-precision tokens in stock vLLM, which knows nothing of them: nothing of int2 is to be seen where all tokens are exact."""

import engine
import pytest
import references
import tiny_models
import torch
from test_smollm2 import BOUNDS, CHUNKED, LAYERS, TIGHT, TOKENS

import prompts
from test_options import policy

PREFIX = {"enable_prefix_caching": True}


@pytest.fixture(scope="module")
def asked(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2, trust_remote_code=False)
    return [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts.PROMPTS]


@pytest.fixture(scope="module")
def expected(smollm2, asked):
    return [references.continued(smollm2, prompt, TOKENS) for prompt in asked]


@pytest.mark.parametrize("arguments", [CHUNKED, TIGHT, PREFIX], ids=["chunked", "preempted", "prefix"])
def test_all_tokens_exact_say_what_transformers_says(smollm2, asked, expected, tmp_path, arguments):
    """Copies are made again after a preemption, and found with the pages of a prefix while the pool holds them."""
    given = policy(tmp_path, format="int2", full_precision={"sink": 16, "recent": 512})
    report = engine.run(smollm2, "quantkv_policy", asked, tokens=TOKENS, rounds=1 + (arguments is PREFIX), **given, **arguments)
    assert report.error == "" and set(report.formats) == {"int2"} and len(report.formats) == LAYERS
    assert (report.preemptions > 0) == (arguments is TIGHT)
    assert all(answers.tokens == expected for answers in report.answers)
    assert (sum(report.answers[-1].cached) > 300) == (arguments is PREFIX)


def test_a_connector_that_loads_within_a_step_is_refused(tmp_path):
    given = policy(tmp_path, format="int4", full_precision={"recent": 24})
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    folder = tiny_models.write("llama", tmp_path / "model")
    report = engine.run(folder, "quantkv_policy", skip_tokenizer_init=True, max_model_len=256, kv_transfer_config=connector, **given)
    assert "policy.full_precision with kv_connector='ExampleConnector'" in report.error + report.log


@pytest.mark.parametrize("arguments", [TIGHT, PREFIX], ids=["preempted", "prefix"])
def test_lost_copies_cost_no_more_than_the_format(smollm2, asked, tmp_path, arguments):
    """Of int4 with few full-precision tokens: blocks that are taken away and computed again, and blocks of a prefix whose copies are
    gone."""
    given = policy(tmp_path, format="int4", full_precision={"sink": 16, "recent": 24})
    whole = engine.run(smollm2, "quantkv_policy", asked, tokens=TOKENS, **given)
    found = engine.run(smollm2, "quantkv_policy", asked, tokens=TOKENS, rounds=1 + (arguments is PREFIX), **given, **arguments)
    assert (found.preemptions > 0) == (arguments is TIGHT)
    off = differences(found, whole)
    assert len(off) > TOKENS * len(asked) / 2 and off.mean() < BOUNDS["int4"]


@pytest.mark.parametrize("family", ["llama", "window"])
@pytest.mark.parametrize("kv", ["quantkv_int4", "quantkv_4bit"])
def test_a_preempted_sequence_goes_on_as_a_new_prompt_of_its_tokens(tmp_path, family, kv):
    """To the last bit: its rows are computed again as a prompt's, whose queries see them as given. Pages, and copies, of the first round
    are in the way of the second."""
    folder = tiny_models.write(family, tmp_path / "model")
    asked, tokens, cut = [tiny_models.prompt(seed, length) for seed, length in enumerate((90, 150))], 48, 24
    arguments = {"skip_tokenizer_init": True, "max_model_len": 256, "async_scheduling": False}
    report = engine.run(folder, kv, asked, tokens=tokens, rounds=2, preempted=cut, **arguments)
    assert report.error == "" and report.preemptions == 2 * len(asked)
    for answers in report.answers:
        known = [prompt + ids[:cut] for prompt, ids in zip(asked, answers.tokens)]
        (new,) = engine.run(folder, kv, known, tokens=tokens - cut, **arguments).answers
        assert new.tokens == [ids[cut:] for ids in answers.tokens]
        assert new.logprobs == [given[cut:] for given in answers.logprobs]
    whole = engine.run(folder, kv, asked, tokens=tokens, **arguments)
    off = differences(report, whole)
    assert off[:cut].max() == 0
    quantized = kv == "quantkv_int4" or family == "llama"  # beside a window of few tokens all of 4bit are at full precision
    assert (off.max() > 1e-4) == quantized  # without preemption, queries of the answer read stored rows


def differences(*reports):
    """|difference of log-probabilities| of the tokens of two answers, as far as they are the same."""
    assert [report.error for report in reports] == ["", ""]
    (first, second), off = (report.answers[-1] for report in reports), []
    for tokens, others, given, other in zip(first.tokens, second.tokens, first.logprobs, second.logprobs):
        same = next((i for i, (t, o) in enumerate(zip(tokens, others)) if t != o), len(tokens))
        off.append((torch.tensor(given[:same]) - torch.tensor(other[:same])).abs())
    return torch.cat(off)
