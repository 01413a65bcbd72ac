"""Formats by layer where vLLM's pages have one size: refused beside Mamba's states, and said aloud where it costs memory."""

import re

import engine
import pytest
import tiny_models

from quantkv.geometry import Kind
from quantkv.vllm_pages import Group
from test_options import policy

ARGUMENTS = {"skip_tokenizer_init": True, "max_model_len": 256}
PADS = r"vLLM pads the pages of all layers of this model .* with this policy (\S+) tokens take (\S+) bytes, (\S+)x of the (\S+) that"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return tiny_models.write("hybrid", tmp_path_factory.mktemp("hybrid"))


REFUSED = {  # the type, layers that are skipped, a policy
    "skipped layers": ("quantkv_int4", ["1"], None, "kv_cache_dtype_skip_layers=['1']"),
    "a mixed policy": ("quantkv_policy", [], {"format": "int4", "layers": {"1": "int8"}}, "int8 (136 bytes a token and kv head), int4 (72"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_hybrid_with_pages_of_two_sizes_is_refused_before_the_weights_are_loaded(hybrid, tmp_path, case):
    name, skipped, content, said = REFUSED[case]
    more = {} if content is None else policy(tmp_path, **content)
    report = engine.run(hybrid, name, **ARGUMENTS, kv_cache_dtype_skip_layers=skipped, **more)
    assert report.error.startswith("NotImplementedError: quantkv:") and said in report.error
    assert "states of a recurrence (Mamba)" in report.error and "LBNHC" not in report.error
    assert "Loading weights took" not in report.log


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
    """A window and full attention; int8 in one of them makes the other's pages as large."""
    folder = tiny_models.write("softcap", tmp_path / "model")
    asked = policy(tmp_path, format="int4", layers={"0": "int8"})
    report = engine.run(folder, "quantkv_policy", **ARGUMENTS, max_num_batched_tokens=256, **asked)
    assert report.error == ""
    int8, int4 = (16 * 2 * bytes for bytes in (136, 72))  # of a block of 2 kv heads
    assert report.page_bytes == [int8, int8]
    said = re.search(PADS, report.log)
    assert report.log.index("vLLM pads") < report.log.index("Loading weights took")
    length, held, times, needed = (float(word.replace(",", "")) for word in said.groups())
    full, window = 16, 16 + 1  # blocks: 256 tokens; of a window all of them are in flight, and it may begin within a block
    assert (length, held, needed) == (256, (full + window) * int8, window * int8 + full * int4)
    assert times == pytest.approx(held / needed, abs=0.005)
    tokens = int(re.search(r"KV cache size: (\S+) tokens", report.log)[1].replace(",", ""))
    blocks = report.tokens // 16
    assert tokens == blocks * 256 // sum(Group(1, kind, 16).blocks(256, 512) for kind in (Kind(), Kind(tiny_models.WINDOW)))


@pytest.mark.parametrize("family", ["llama", "softcap"])
def test_nothing_is_said_where_nothing_is_wasted(tmp_path, family):
    layers = {"0": "int8"} if family == "llama" else {"0": "levels5/levels3"}
    asked = policy(tmp_path, format="levels4", layers=layers)
    report = engine.run(tiny_models.write(family, tmp_path / "model"), "quantkv_policy", **ARGUMENTS, **asked)
    assert report.error == "" and "vLLM pads" not in report.log
