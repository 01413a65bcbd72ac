"""What prompts read of themselves in transformers: their own rows as given, by default; or what was stored of them."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from quantkv import assumed, get_format  # noqa: E402
from quantkv.engine.fake_quantized import fake_quantized  # noqa: E402
from quantkv.integrations.transformers import QuantizedCache, use_quantkv_attention  # noqa: E402
from quantkv.maps import LayerMaps  # noqa: E402
from quantkv.policy import Policy  # noqa: E402
from test_transformers import MODELS, logits, prompts, tiny  # noqa: E402


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_in_one_pass_loses_nothing(name):
    """Left-padded, past the window; the next pass reads quantized rows before it."""
    model = use_quantkv_attention(tiny(name))
    ids, mask = prompts([40, 22])
    exact = logits(model, QuantizedCache(model.config, "none"), ids, mask, [0, 34])
    own, stored = (logits(model, QuantizedCache(model.config, "int2", prompt=prompt), ids, mask, [0, 34]) for prompt in (None, "stored"))
    real = mask.bool()
    real[:, 34:] = False
    assert torch.allclose(own[real], exact[real], rtol=0, atol=1e-5 * float(exact.abs().max()))
    assert not torch.allclose(stored[real], exact[real], rtol=0.01)
    assert not torch.allclose(own[:, 34:], exact[:, 34:], rtol=0.01)


def test_a_prompt_padded_on_the_right_loses_nothing(llama):
    """It is continued from what its last padding token says."""
    ids, _ = prompts([20, 20])
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 13:] = 0
    with torch.no_grad():
        exact, own = (llama(ids, attention_mask=mask, past_key_values=QuantizedCache(llama.config, fmt)).logits for fmt in ("none", "int2"))
    assert torch.allclose(own, exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


def reread_in_place(cache, fmt):
    """A DynamicCache whose rows are what pages give back of them."""
    for layer in cache.layers:
        for name, codec, side in (("keys", fmt.k, "k"), ("values", fmt.v, "v")):
            rows = getattr(layer, name)
            map_ = getattr(LayerMaps.of(fmt, rows.shape[3], rows.shape[3], rows.device), side)
            setattr(layer, name, torch.stack([fake_quantized(one, codec, map_) for one in rows]).to(rows.dtype))


@pytest.mark.parametrize("fmt", ["int2", "tq4"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "gemma2", "gpt_oss"])
@torch.no_grad()
def test_a_chunk_reads_pages_before_it_and_its_own_rows(name, fmt):
    """As the model's own attention does where the earlier chunks' rows, and no others, were written to pages and read back."""
    ids, mask = prompts([18, 18])
    model = tiny(name, attn_implementation="eager")
    plain, want = DynamicCache(config=model.config), []
    for part in ids.split([9, 5, 4], 1):
        want.append(model(part, past_key_values=plain).logits)
        unread = copy.deepcopy(plain)
        reread_in_place(plain, get_format(fmt, torch.float32))
        for layer, earlier in zip(plain.layers, unread.layers):  # rows that were read back before stay as they are
            done = layer.keys.shape[2] - part.shape[1]
            layer.keys[:, :, :done], layer.values[:, :, :done] = earlier.keys[:, :, :done], earlier.values[:, :, :done]
    use_quantkv_attention(model)
    got = logits(model, QuantizedCache(model.config, fmt), ids, mask, [0, 9, 14])
    want = torch.cat(want, 1)
    assert (got - want).abs().max() <= 1e-3 * want.abs().max()  # a row off by a rounding may take another code


def test_who_asks_for_what(llama):
    """The argument goes before the policy; nothing said is own rows."""
    for asked, given, prompt in (
        ("int4", {}, "own"),
        ("int4", {"prompt": "stored"}, "stored"),
        (Policy("int4", prompt="stored"), {}, "stored"),
        ({"format": "int4", "prompt": "stored"}, {}, "stored"),
        (Policy("int4", prompt="stored"), {"prompt": "own"}, "own"),
    ):
        assert {layer.prompt for layer in QuantizedCache(llama.config, asked, **given).layers} == {prompt}
    for fresh, prompt in ((True, "own"), (False, "stored")):
        with pytest.warns(DeprecationWarning, match="prompt='own' or prompt='stored'"):
            assert QuantizedCache(llama.config, fresh_prefill=fresh).layers[0].prompt == prompt


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@torch.no_grad()
def test_prompts_with_8_bit_scores(name):
    """Whole, in chunks and padded: a prompt loses little, and something. A pass of fewer than 128 tokens over the same pages loses
    nothing, not a bit."""
    model = use_quantkv_attention(tiny(name))
    ids, mask = prompts([300, 260])
    caches = {precision: QuantizedCache(model.config, "4bit", prompt_precision=precision) for precision in (None, "8bit")}
    plain, rounded = (logits(model, cache, ids, mask, [0, 140]).log_softmax(-1) for cache in caches.values())
    real = mask.bool()
    kl = (plain.exp() * (plain - rounded)).sum(-1)[real]
    assert 1e-8 < kl.mean() < 0.002, kl.mean()
    again = copy.deepcopy(caches[None])
    for layer in again.layers:
        layer.prompt_precision = "8bit"
    for count in (1, 127):
        more, all_seen = torch.cat([ids, ids[:, :count]], 1), torch.cat([mask, torch.ones(2, count, dtype=mask.dtype)], 1)
        given = {"attention_mask": all_seen, "position_ids": all_seen.cumsum(-1)[:, -count:] - 1}
        found = [model(more[:, 300:], past_key_values=copy.deepcopy(cache), **given).logits for cache in (caches[None], again)]
        assert torch.equal(*found)


def test_who_asks_for_which_precision(llama):
    """The argument goes before the policy; nothing said is 16 bits. A GPU that has no kernel, and latents, refuse it."""
    rounded = Policy("int4", prompt_precision="8bit")
    for asked, given, precision in (
        ("int4", {}, "16bit"),
        ("4bit", {"prompt_precision": "8bit"}, "8bit"),
        (rounded, {}, "8bit"),
        ({"format": "int4", "prompt_precision": "8bit"}, {}, "8bit"),
        (rounded, {"prompt_precision": "16bit"}, "16bit"),
    ):
        assert {layer.prompt_precision for layer in QuantizedCache(llama.config, asked, **given).layers} == {precision}
    with pytest.raises(ValueError, match=r"prompt_precision='fp8': one of 16bit, 8bit is needed"):
        QuantizedCache(llama.config, prompt_precision="fp8")
    with assumed.assuming(assumed.GPUS["a100"]):
        cache, ids = QuantizedCache(llama.config, rounded), prompts([128])[0]
        with torch.no_grad(), pytest.raises(ValueError, match=r"^prompt_precision=8bit: no dense backend"):
            llama(ids, past_key_values=cache)
        assert cache.get_seq_length() == 0
    latent = transformers.DeepseekV3Config(num_hidden_layers=2, first_k_dense_replace=2)
    assert QuantizedCache(latent, "int4").layers[0].prompt_precision == "16bit"
    with pytest.raises(NotImplementedError, match="prompt_precision='8bit': latents"):
        QuantizedCache(latent, rounded)


def test_refusals(llama, tmp_path):
    with pytest.raises(ValueError, match=r"prompt='fresh': one of own, stored is needed"):
        QuantizedCache(llama.config, prompt="fresh")
    with pytest.raises(ValueError, match=r"fresh_prefill=True: prompt='own' says it"), pytest.warns(DeprecationWarning):
        QuantizedCache(llama.config, prompt="own", fresh_prefill=True)
    with pytest.raises(ValueError, match=r"prompt=1: one of own, stored is needed"):
        Policy("int4", prompt=1)
    with pytest.raises(ValueError, match=r"policy\.prompt='': one of own, stored is needed"):
        Policy.from_dict({"format": "int4", "prompt": ""})
    for prompt in ("own", "stored"):
        Policy("int4", prompt=prompt).save(tmp_path / "policy.json")
        assert Policy.load(tmp_path / "policy.json").prompt == prompt
        assert ("prompt" in (tmp_path / "policy.json").read_text()) == (prompt == "stored")  # older versions read the others


@pytest.fixture(scope="module")
def llama():
    return use_quantkv_attention(tiny("llama"))
