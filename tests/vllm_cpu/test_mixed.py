"""Formats by layer where vLLM's pool has blocks of one size: packed, the same answers; refused or said aloud where vLLM plans alone."""

import re

import engine
import pytest
import tiny_models
import torch

from quantkv.geometry import Kind
from quantkv.vllm_pages import BLOCK_SIZES, Group
from test_options import policy

ARGUMENTS = {"skip_tokenizer_init": True, "max_model_len": 256}
ALONE = {"VLLM_KV_CACHE_LAYOUT": "LBHNC"}  # vLLM plans its blocks alone
PADS = r"vLLM's pages of this model .* with this policy (\S+) tokens take (\S+) bytes, (\S+)x of the (\S+) that"
PACKS = r"blocks of (\S+) bytes hold the pages of"
MIXED = {"format": "int4", "layers": {"1": "int8", "4": "none"}}
EXACT = {"full_precision": {"sink": 16, "recent": 24}}
PROMPTS = [tiny_models.prompt(seed, length) for seed, length in enumerate((5, 40, 345, 400))]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return tiny_models.write("hybrid", tmp_path_factory.mktemp("hybrid"))


def tokens_of(report):
    return int(re.search(r"KV cache size: (\S+) tokens", report.log)[1].replace(",", ""))


def same(reports, tolerance):
    packed, alone = reports
    for one, other in zip(packed.answers, alone.answers, strict=True):
        assert one.tokens == other.tokens
        assert (torch.tensor(one.logprobs) - torch.tensor(other.logprobs)).abs().max() <= tolerance


@pytest.mark.parametrize("exact", [False, True])
def test_packed_pages_answer_as_those_that_vllm_pads(tmp_path, exact):
    """One int8 and one 16-bit layer among int4, windows beside full attention. Prompts come in chunks and then from the prefix cache,
    of which hits end where blocks of both kinds end; what is then computed anew reads other rows as given, and no more differs."""
    folder = tiny_models.write("six_layers", tmp_path / "model")
    asked = {"skip_tokenizer_init": True, **policy(tmp_path, **MIXED, **(EXACT if exact else {}))}
    asked |= {"tokens": 8, "rounds": 2, "enable_prefix_caching": True, "max_num_batched_tokens": 128}
    reports = [engine.run(folder, "quantkv_policy", PROMPTS, **asked, environment=place) for place in ({}, ALONE)]
    packed, alone = reports
    assert (packed.error, alone.error) == ("", "") and packed.formats == ["int4", "int8", "int4", "int4", "fp32", "int4"]
    assert (packed.layout, len(packed.block_sizes)) == ("BLHNC", 2) and (alone.layout, len(alone.block_sizes)) == ("LBHNC", 6)
    assert set(packed.block_sizes).isdisjoint(BLOCK_SIZES)  # so that blocks hold several pages
    assert tokens_of(packed) > 3 * tokens_of(alone)
    both = torch.tensor(packed.block_sizes).prod().item() // 16
    assert [[n // both * both for n in found.cached] for found in alone.answers] == [found.cached for found in packed.answers]
    assert packed.answers[1].cached == [0, 0, both, both]
    first = [type(r)(answers=r.answers[:1]) for r in reports]
    same(first, 0.0)
    same(reports, 0.25)


def test_sliding_layers_of_another_format(tmp_path):
    """With sinks, as gpt-oss."""
    folder = tiny_models.write("sinks", tmp_path / "model")
    asked = {**ARGUMENTS, **policy(tmp_path, format="int8", layers={"0": "int4"}), "tokens": 8, "max_num_batched_tokens": 256}
    prompts = [prompt[:200] for prompt in PROMPTS]
    packed, alone = (engine.run(folder, "quantkv_policy", prompts, **asked, environment=place) for place in ({}, ALONE))
    assert (packed.error, packed.layout, packed.formats) == ("", "BLHNC", ["int4", "int8"])
    same((packed, alone), 0.0)
    int8, int4 = (2 * bytes for bytes in (136, 72))
    window, full = packed.block_sizes
    nbytes = int(re.search(PACKS, packed.log)[1].replace(",", ""))
    assert 1 <= nbytes / max(window * int4, full * int8) < 1.01 and nbytes / min(window * int4, full * int8) < 1.03


REFUSED = {  # the type, layers that are skipped, a policy
    "skipped layers": ("quantkv_int4", ["1"], None, "kv_cache_dtype_skip_layers=['1']"),
    "a mixed policy": ("quantkv_policy", [], {"format": "int4", "layers": {"1": "int8"}}, "int8 (136 bytes a token and kv head), int4 (72"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_hybrid_with_pages_of_two_sizes_is_refused_where_blocks_are_not_packed(hybrid, tmp_path, case):
    """Before the weights are loaded."""
    name, skipped, content, said = REFUSED[case]
    more = {} if content is None else policy(tmp_path, **content)
    report = engine.run(hybrid, name, **ARGUMENTS, kv_cache_dtype_skip_layers=skipped, environment=ALONE, **more)
    assert report.error.startswith("NotImplementedError: quantkv:") and said in report.error
    assert "states of a recurrence (Mamba)" in report.error and "VLLM_KV_CACHE_LAYOUT unset or BLHNC" in report.error
    assert "Loading weights took" not in report.log


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("cached", [False, True])
def test_a_hybrid_with_pages_of_two_sizes_starts(hybrid, tmp_path, case, cached):
    """Its blocks hold a state, or the pages of both layers, and the log says what a request takes."""
    name, skipped, content, _ = REFUSED[case]
    more = {} if content is None else policy(tmp_path, **content)
    report = engine.run(hybrid, name, **ARGUMENTS, kv_cache_dtype_skip_layers=skipped, enable_prefix_caching=cached, **more)
    assert report.error == "" and report.layout == "BLHNC"
    rows, *states = report.page_bytes
    size = report.block_sizes[0]
    first = 2 * (136 if content else 512)
    assert rows == size * first and size % 16 == 0
    nbytes, row = int(re.search(PACKS, report.log)[1].replace(",", "")), first + 2 * 72
    assert states[0] <= size * row + 16 * row and size * row <= nbytes < (size + 16) * row
    assert f"a request takes at least one block of {size} tokens, and a block or more in each of {len(states)} groups" in report.log


@pytest.mark.parametrize(
    "content", [{"format": "int4", "layers": {"0": "int8"}}, {"format": "levels4", "layers": {"1": "levels5/levels3"}}]
)
def test_a_hybrid_with_pages_of_one_size_starts(hybrid, tmp_path, content):
    """Layers without keys and values may be named, and formats of the same bytes differ: a state is larger than 128 tokens of them."""
    report = engine.run(hybrid, "quantkv_policy", **ARGUMENTS, **policy(tmp_path, **content))
    assert report.error == ""
    assert report.formats == [content["layers"].get("1", content["format"]), content["format"]]
    assert max(report.block_sizes) > 128


def test_padding_is_said_before_the_weights_are_loaded(tmp_path):
    """A window and full attention; int8 in one of them makes the other's pages as large, where vLLM plans alone."""
    folder = tiny_models.write("softcap", tmp_path / "model")
    asked = policy(tmp_path, format="int4", layers={"0": "int8"})
    report = engine.run(folder, "quantkv_policy", **ARGUMENTS, max_num_batched_tokens=256, environment=ALONE, **asked)
    assert report.error == ""
    int8, int4 = (16 * 2 * bytes for bytes in (136, 72))  # of a block of 2 kv heads
    assert report.page_bytes == [int8, int8]
    said = re.search(PADS, report.log)
    assert report.log.index("vLLM's pages of this model") < report.log.index("Loading weights took")
    length, held, times, needed = (float(word.replace(",", "")) for word in said.groups())
    full, window = 16, 16 + 1  # blocks: 256 tokens; of a window all of them are in flight, and it may begin within a block
    assert (length, held, needed) == (256, (full + window) * int8, window * int8 + full * int4)
    assert times == pytest.approx(held / needed, abs=0.005)
    blocks = report.tokens // 16
    assert tokens_of(report) == blocks * 256 // sum(Group((), kind, 16).blocks(256, 512) for kind in (Kind(), Kind(tiny_models.WINDOW)))


@pytest.mark.parametrize("family", ["llama", "softcap"])
def test_nothing_is_said_where_nothing_is_wasted(tmp_path, family):
    layers = {"0": "int8"} if family == "llama" else {"0": "levels5/levels3"}
    asked = policy(tmp_path, format="levels4", layers=layers)
    report = engine.run(tiny_models.write(family, tmp_path / "model"), "quantkv_policy", **ARGUMENTS, **asked)
    assert report.error == "" and "vLLM's pages of this model" not in report.log and "quantkv: blocks of" not in report.log
