"""Drafts, by a head of the model (EAGLE) or by another model: what they change is how many tokens a step has, and not which."""

import json
from pathlib import Path
from types import SimpleNamespace

import engine
import pytest
import references
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from test_models import ALLOWED, SWA

from quantkv.integrations.sglang.drafts import ONLY, chains, check_arguments

PROMPTS = [tiny_models.prompt(seed, length) for seed, length in enumerate((17, 40, 70))]
TOKENS, COUNT = 24, 3
CHAIN = {"speculative_num_steps": COUNT, "speculative_eagle_topk": 1, "json_model_override_args": "{}"}
POOL = "quantkv.integrations.sglang.pool.QuantKVPool"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_models.write("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def drafts(llama, tmp_path_factory):
    """What drafts for it, by the name of SGLang's algorithm: itself, a head, and a head that sees two of its layers."""
    folder = tmp_path_factory.mktemp("drafts")
    tiny_models.write_eagle(folder / "eagle", Path(llama))
    _change(folder / "eagle", {"architectures": ["LlamaForCausalLMEagle"]}, {"fc.bias": torch.zeros(128)})
    return {"STANDALONE": llama, "EAGLE": str(folder / "eagle"), "EAGLE3": write_eagle3(folder / "eagle3", Path(llama))}


def _change(folder, config, weights):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    held = load_file(folder / "model.safetensors")
    save_file(held | weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_eagle3(folder, target):
    """A layer behind the hidden states of both layers of a llama, of random weights but for what it says."""
    generator, held = torch.Generator().manual_seed(3), load_file(target / "model.safetensors")
    drawn = {name.removeprefix("model."): t.clone() for name, t in held.items() if name.startswith("model.layers.0.")}
    for name in ("q_proj", "k_proj", "v_proj"):  # read a token beside the hidden state
        own = drawn[f"layers.0.self_attn.{name}.weight"]
        drawn[f"layers.0.self_attn.{name}.weight"] = torch.cat([own, 0.1 * torch.randn(own.shape, generator=generator)], 1)
    size = held["model.norm.weight"].shape[0]
    drawn |= {"layers.0.hidden_norm.weight": torch.ones(size), "norm.weight": held["model.norm.weight"].clone()}
    drawn |= {"fc.weight": torch.cat([torch.zeros(size, size), torch.eye(size)], 1), "lm_head.weight": held["lm_head.weight"].clone()}
    folder.mkdir()
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text()) | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    config |= {"draft_vocab_size": config["vocab_size"], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def ask(folder, name, algorithm=None, drafts=None, **given):
    chain = {} if algorithm is None else {"speculative_algorithm": algorithm, "speculative_draft_model_path": drafts[algorithm], **CHAIN}
    report = engine.run(folder, f"quantkv_{name}", PROMPTS, tokens=TOKENS, **{"json_model_override_args": "{}", **chain, **given})
    assert report.error == "", report.log[-4000:]
    return report


def same_tokens(report, folder):
    wanted = [references.continued(folder, prompt, TOKENS) for prompt in PROMPTS]
    return all(answers.tokens == wanted for answers in report.answers)


def accepted(folder, prompt):
    """How many drafts of a model that drafts for itself are right, and how many it makes. SGLang gives it the tokens behind the first, and
    counts those beyond the last token that was asked for too."""
    answer, held, right, made = references.continued(folder, prompt, TOKENS + COUNT), 1, 0, 0
    while held < TOKENS:
        found = references.continued(folder, (prompt + answer[:held])[1:], COUNT)
        same = next((i for i, pair in enumerate(zip(found, answer[held:], strict=False)) if len(set(pair)) > 1), COUNT)
        held, right, made = held + same + 1, right + same, made + COUNT
    return right, made


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE", "EAGLE3"])
def test_the_unquantized_format_says_what_transformers_says(llama, drafts, algorithm):
    report = ask(llama, "none", algorithm, drafts)
    assert same_tokens(report, llama)
    assert report.pools == [POOL, POOL]
    assert report.formats == ["fp32"] * (4 if algorithm == "STANDALONE" else 3)
    answers = report.answers[0]
    assert sum(answers.drafted) > sum(answers.accepted) > 0  # what is refused is overwritten


def test_a_model_that_drafts_for_itself_is_as_often_right_as_transformers_says(llama, drafts):
    """Behind long prompts, whose first token counts for little: the last draft of a chain is right too."""
    long = [tiny_models.prompt(seed, length) for seed, length in ((5, 300), (6, 400), (7, 450))]
    given = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": drafts["STANDALONE"], **CHAIN}
    report = engine.run(llama, "quantkv_none", [*PROMPTS, *long], tokens=TOKENS, **given)
    answers = report.answers[0]
    found = list(zip(answers.accepted, answers.drafted))
    assert found == [accepted(llama, prompt) for prompt in (*PROMPTS, *long)]
    assert sum(answers.accepted[3:]) > sum(answers.drafted[3:]) / 2, found


def test_a_single_draft(llama, drafts):
    report = ask(llama, "none", "EAGLE", drafts, speculative_num_steps=1)
    assert same_tokens(report, llama) and sum(report.answers[0].drafted) > 0


@pytest.mark.parametrize("stored", ["int8", "int4"])
def test_quantized_pages_say_what_they_say_without_drafts(llama, drafts, stored):
    plain, found = ask(llama, stored), ask(llama, stored, "EAGLE", drafts)
    assert found.answers[0].tokens == plain.answers[0].tokens
    assert found.formats == [stored] * 3
    off = [(torch.tensor(a) - torch.tensor(b)).abs().max() for a, b in zip(found.answers[0].logprobs, plain.answers[0].logprobs)]
    assert max(off) < 0.01, off  # a code now and then: sums of another batch differ in their last bits


@pytest.mark.parametrize(
    "arguments",
    [
        engine.TIGHT,
        {"chunked_prefill_size": 32},
        {"chunked_prefill_size": 32, "enable_mixed_chunk": True},
        {"disable_radix_cache": False, "rounds": 2},
        {"page_size": 64},
    ],
    ids=["retracted", "chunked", "mixed", "radix", "pages_of_64"],
)
def test_what_the_scheduler_does(llama, drafts, arguments):
    report = ask(llama, "none", "EAGLE", drafts, **arguments)
    assert same_tokens(report, llama)
    assert (report.retracted > 0) == (arguments is engine.TIGHT)
    assert "rounds" not in arguments or sum(report.answers[1].cached) > 0


def test_full_precision_tokens_with_a_model_that_drafts(llama, drafts, tmp_path):
    """Pages of 2 bits, all of whose tokens are at full precision in the model: its answers are right, whatever is drafted."""
    file = tmp_path / "policy.json"
    policy = {"policy_version": 1, "format": "int2", "layers": {"1": "int4"}, "full_precision": {"sink": 16, "recent": 200}}
    file.write_text(json.dumps(policy))
    report = ask(llama, "policy", "STANDALONE", drafts, environment={"QUANTKV_POLICY": str(file)})
    assert same_tokens(report, llama)
    assert report.formats == ["int2", "int4", "int2", "int2"]
    assert sum(report.answers[0].drafted) > sum(report.answers[0].accepted) > 0  # drafts read 2 bits alone
    assert "quantkv: the model that drafts stores its rows in int2, without what else the policy says" in report.log


def test_statistics_are_those_of_the_model(llama, drafts):
    plain, report = ask(llama, "4bit"), ask(llama, "4bit", "STANDALONE", drafts)
    assert report.answers[0].tokens == plain.answers[0].tokens
    assert report.log.count("key means and Hessians of 2 layers") == 1
    assert report.formats == ["levels4"] * 4 and sum(report.answers[0].drafted) > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"speculative_algorithm": "NGRAM"}, ["speculative_algorithm='NGRAM'", "moves the rows", "None, EAGLE, EAGLE3, STANDALONE"]),
        ({"speculative_algorithm": "NEXTN"}, ["speculative_algorithm='NEXTN'", "MTP"]),
        ({"speculative_algorithm": "DFLASH"}, ["speculative_algorithm='DFLASH'", "it was not run"]),
        ({"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}, ["speculative_eagle_topk=4", "allowed: 1, a chain"]),
        ({"speculative_eagle_topk": None, "speculative_num_steps": None}, ["speculative_eagle_topk=None", "allowed: 1, a chain"]),
        ({"speculative_num_steps": None}, ["speculative_num_steps=None", "needs a number"]),
        ({"speculative_draft_attention_backend": "triton"}, ["speculative_draft_attention_backend='triton'", "allowed: None"]),
        ({"speculative_draft_window_size": 64}, ["speculative_draft_window_size=64", "allowed: None"]),
        ({"speculative_adaptive": True}, ["speculative_adaptive=True", "allowed: False"]),
        ({"enable_multi_layer_eagle": True}, ["enable_multi_layer_eagle=True", "allowed: False"]),
        ({"pp_size": 2}, ["pp_size=2", "allowed: 1"]),
    ],
    ids=lambda given: "-".join(map(str, next(iter(given.items())))) if isinstance(given, dict) else None,
)
def test_what_is_refused(llama, drafts, arguments, said):
    given = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": drafts["EAGLE"], **CHAIN, **arguments}
    report = engine.run(llama, "quantkv_int4", **given)
    assert report.error and all(part in report.error for part in said), report.error
    assert "Load weight begin" not in report.log


def test_a_plan_beside_the_drafts_is_refused(llama, drafts):
    given = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": drafts["EAGLE"], **CHAIN}
    report = engine.run(llama, "quantkv_int4", environment={"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}, **given)
    assert "SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1 is not supported" in report.error


def test_pools_of_another_form_are_refused(tmp_path):
    folder, given = tiny_models.write("softcap", tmp_path), {**CHAIN, "json_model_override_args": json.dumps(SWA)}
    given |= {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": folder}
    report = engine.run(folder, "quantkv_int4", setup=ALLOWED, **given)
    assert report.error and "speculative_algorithm with a pool for windows is not supported" in report.log, report.log[-4000:]


@pytest.mark.parametrize("changes", [{"tree_topk": 4}, {"num_tokens_per_req": 3}], ids=["trees", "ragged"])
def test_steps_that_are_no_chains_are_refused(changes):
    """Whatever arguments said: each sequence would read keys that are not its own."""
    info = SimpleNamespace(**{"tree_topk": 1, "num_tokens_per_req": 4, **changes})
    given = SimpleNamespace(spec_info=info, batch_size=2, out_cache_loc=torch.arange(8), seq_lens=torch.tensor([5, 6]))
    with pytest.raises(NotImplementedError, match=r"trees of drafts, topk=4|8 new tokens in 2 sequences"):
        chains(given, torch.device("cpu"), known=False)


def test_graphs_of_prompts_beside_drafts_are_refused():
    """No CPU has them."""
    chain = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1, "speculative_num_steps": COUNT, **ONLY}
    for backend in ("disabled", "breakable"):
        view = SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=SimpleNamespace(backend=backend)), **chain)
        check_arguments(view, "quantkv_int4", resolved=False)
        if backend == "disabled":
            check_arguments(view, "quantkv_int4", resolved=True)
    with pytest.raises(NotImplementedError, match="allowed: --disable-prefill-cuda-graph"):
        check_arguments(view, "quantkv_int4", resolved=True)
