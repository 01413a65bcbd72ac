"""What `use_quantkv_attention` does to a model, and caches whose layers are not all alike."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from architectures import ARCHITECTURES, before  # noqa: E402
from families import generate, logits, prompts  # noqa: E402
from quantkv.geometry import Heads  # noqa: E402
from quantkv.integrations.transformers import QuantizedCache, use_quantkv_attention  # noqa: E402
from quantkv.integrations.transformers.recurrent_and_latent import LatentLayer  # noqa: E402
from quantkv.integrations.transformers_model import CACHE, geometry_of  # noqa: E402


def build(name):
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    if not architecture.is_known:
        pytest.skip(f"transformers {transformers.__version__} has no {architecture.family}")
    return architecture.build()


# ---- a model that is read with another cache, or none


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Llama 4", "Gemma 2", "GPT-OSS", "Qwen3-Next", "Gemma 3n", "Llava"])
@torch.no_grad()
def test_without_a_quantized_cache_a_model_attends_as_before(name):
    """No cache, the cache that the model makes itself, a DynamicCache read in chunks; padded and not; windows, soft caps, sinks."""
    model = build(name)
    if name in ("Gemma 2", "GPT-OSS"):
        model.set_attn_implementation("eager")  # transformers' sdpa leaves out soft caps and sinks

    def outputs():
        inputs = prompts()
        real = inputs["attention_mask"].bool()
        whole = [model(**inputs, use_cache=use).logits[real] for use in (False, True)]
        return [*whole, model(inputs["input_ids"][:1], use_cache=False).logits, logits(model, DynamicCache(config=model.config))]

    expected = outputs()
    use_quantkv_attention(model)
    for got, want in zip(outputs(), expected):
        assert torch.allclose(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


def test_weights_and_gradients_without_a_quantized_cache():
    model = build("Llama")
    inputs = prompts()
    model.set_attn_implementation("eager")
    expected = model(**inputs, output_attentions=True, use_cache=False)
    use_quantkv_attention(model)
    got = model(**inputs, output_attentions=True, use_cache=False)
    real = inputs["attention_mask"].bool()
    for a, b in zip(got.attentions, expected.attentions):
        assert torch.equal(a.transpose(1, 2)[real], b.transpose(1, 2)[real])
    model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# ---- which parts of a model are switched


@pytest.mark.parametrize("name", ["Llava", "Qwen2-VL", "Gemma 3 with images"])
def test_encoders_of_images_stay_as_they_are(name):
    model = build(name)
    before = model.config.vision_config._attn_implementation
    use_quantkv_attention(model)
    assert model.config.vision_config._attn_implementation == before == "sdpa"
    assert model.config.get_text_config()._attn_implementation == "quantkv"
    model.set_attn_implementation("eager")
    assert model.config.get_text_config()._attn_implementation == model.config.vision_config._attn_implementation == "eager"


def test_an_image_is_read():
    model = build("Llava")
    ids = torch.randint(2, 80, (1, 12), generator=torch.Generator().manual_seed(0))
    ids[:, 2:5] = model.config.image_token_index  # 4 patches less the class token
    image = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    ids = torch.cat([ids[:, :5], torch.full((1, 1), model.config.image_token_index), ids[:, 5:]], 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": image}
    expected = generate(model, DynamicCache(config=model.config), inputs)
    use_quantkv_attention(model)
    assert torch.equal(generate(model, QuantizedCache(model.config, "none"), inputs), expected)


@pytest.mark.parametrize("name", ["Falcon", "Bloom", "MPT", *["GPT-J", "CodeGen"] * before("5.24"), "GPT-Neo", "XGLM", "T5"])
def test_models_that_cannot_be_switched_are_refused_before_anything_changes(name):
    model = build(name)
    before = model.config._attn_implementation
    with pytest.raises(NotImplementedError, match=type(model).__name__):
        use_quantkv_attention(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "Falcon-H1", "DeepSeek V3", "Qwen3-Next"])
def test_a_compiled_model_answers_as_one_that_is_not(name):
    """A padded prompt, for two of the models in two chunks, single tokens, and for these two a call without a cache."""
    inputs = prompts()
    chunked = name in ("Llama", "Gemma 2")
    cuts = [(0, 12), (12, 18), (18, 19), (19, 20)] if chunked else [(0, 18), (18, 19), (19, 20)]
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    answers = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = use_quantkv_attention(build(name))
        call = torch.compile(model, backend="eager") if compiled else model
        cache, outs = QuantizedCache(model.config, "int4"), []
        with torch.no_grad():
            for a, b in cuts:
                outs.append(call(ids[:, a:b], attention_mask=mask[:, :b], **{CACHE: cache}).logits)
            if chunked:
                outs.append(call(ids[:1]).logits)
        answers.append(outs)
    real = mask.bool()
    for i, (got, want) in enumerate(zip(*answers)):
        at = real[:, slice(*cuts[i])] if i < len(cuts) else slice(None)
        assert torch.allclose(got[at], want[at], rtol=0, atol=1e-4 * float(want[at].abs().max()))


@torch.no_grad()
def test_compiling_layers_that_share_keys_is_refused():
    """Since transformers 5.24 torch.compile may leave out all of such a pass, which then answers as it is."""
    torch._dynamo.reset()
    model, ids = use_quantkv_attention(build("Gemma 3n")), torch.arange(1, 21)[None]
    assert not QuantizedCache(model.config, num_tokens=64).is_compileable

    def answers(call):
        cache = QuantizedCache(model.config)
        return torch.cat([call(part, **{CACHE: cache}).logits for part in ids.split([18, 1, 1], 1)], 1)

    try:
        found = answers(torch.compile(model, backend="eager"))
    except NotImplementedError as refused:
        assert "share keys and values" in str(refused)
    else:
        assert not before("5.24") and torch.equal(found, answers(model))


# ---- layers of more than one sort


def test_what_is_in_pages_and_what_is_not():
    cache = QuantizedCache(build("Nemotron-H").config, "int4")
    assert list(cache.quantized_layers) == [1] and cache.passed_layers == {0: "LinearAttentionLayer"}
    cache = QuantizedCache(build("Falcon-H1").config, "int4")
    assert list(cache.quantized_layers) == [0, 1] == list(cache.passed_layers)
    assert QuantizedCache(build("Llama").config).passed_layers == {}


def test_formats_of_layers_without_keys_are_none():
    model = use_quantkv_attention(build("Qwen3-Next"))
    cache = QuantizedCache(model.config, [None, "int8"])
    logits(model, cache)
    assert [spec.format for spec in cache.specs] == ["int8"]
    for wrong, match in ((["int8", "int8"], r"format\[0\]=int8"), ([None, None], r"format\[1\]=None"), ([None], "2 layers")):
        with pytest.raises(ValueError, match=match):
            QuantizedCache(model.config, wrong)


def test_layers_that_keep_more_than_keys_are_not_compiled():
    assert QuantizedCache(build("Llama").config, num_tokens=64).is_compileable
    assert not any(QuantizedCache(build(name).config, num_tokens=64).is_compileable for name in ("Falcon-H1", "DeepSeek V3"))
    assert not any(layer.is_compileable for layer in QuantizedCache(build("Falcon-H1").config, num_tokens=64).layers)


def test_heads_of_two_sizes():
    model = use_quantkv_attention(build("Gemma 4"))
    cache = QuantizedCache(model.config, "int4")
    logits(model, cache)
    assert [(spec.head_size, spec.num_kv_heads) for spec in cache.specs] == [(16, 2), (32, 2)]
    assert geometry_of(model.config).heads == {0: Heads(2, 16, 16), 1: Heads(2, 32, 32)}


@pytest.mark.parametrize(
    "fmt, name", [("int4", "int4+fp32"), ("none", "fp32+fp32"), ("k8v4", "k8v4+fp32"), ("int4+int8", "int4+int8"), ("4bit", "int4+int8")]
)
def test_a_latent_is_stored_in_the_k_half(fmt, name):
    """32 latent dimensions at the width of the format and 16 rotated ones, at full width where it does not say another, for one head."""
    model = use_quantkv_attention(build("DeepSeek V3"))
    cache = QuantizedCache(model.config, fmt)
    logits(model, cache)
    spec = cache.spec
    assert (spec.format, spec.num_kv_heads, spec.head_size, spec.head_size_v) == (name, 1, 32, 16)
    assert copy.deepcopy(cache).spec == pickle.loads(pickle.dumps(cache)).spec == spec


@torch.no_grad()
def test_latents_that_were_not_stored_leave_an_error_until_a_reset(monkeypatch):
    """It fails in the first layer, which alone has taken the tokens: the same call again would go on with the pass that failed."""
    model = use_quantkv_attention(build("DeepSeek V3"))
    cache = QuantizedCache(model.config, "int4")
    expected = logits(model, cache)
    cache.reset()

    def store(self, key, value):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(LatentLayer, "store", store)
        with pytest.raises(MemoryError):
            logits(model, cache)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must be reset"):
            logits(model, cache)
    cache.reset()
    assert torch.equal(logits(model, cache), expected)


@pytest.mark.parametrize("name", ["DeepSeek V3", "Falcon-H1", "Gemma 3n"])
@torch.no_grad()
def test_the_first_pass_loses_nothing(name):
    """Where layers keep latents or states, and where they read the rows of others. What follows reads quantized rows before it."""
    model = use_quantkv_attention(build(name))
    exact = logits(model, QuantizedCache(model.config, "none"))
    fmt = "int4" if name == "DeepSeek V3" else "int2"
    own, stored = (logits(model, QuantizedCache(model.config, fmt, prompt=prompt)) for prompt in ("own", "stored"))
    assert torch.allclose(own[:, :16], exact[:, :16], atol=1e-5) and not torch.allclose(stored[:, :16], exact[:, :16], atol=0.01)
    assert not torch.allclose(own[:, 16:], exact[:, 16:], atol=0.01)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Falcon-H1", "DeepSeek V3", "Gemma 3n", "Jamba", "LFM2"])
@torch.no_grad()
def test_a_batch_is_rearranged_in_every_layer(name):
    """Repeated, selected and reordered between two passes: as the cache of the rearranged batch."""
    model = use_quantkv_attention(build(name))
    ids = torch.randint(2, 90, (3, 24), generator=torch.Generator().manual_seed(6))
    cache, order = QuantizedCache(model.config, "int4"), [2, 0, 0, 1]
    model(ids[:, :20], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices((5, 0, 1, 3))
    cache.batch_select_indices([True] * 4)
    cache.reorder_cache(torch.tensor([0, 1, 2, 3]))
    assert cache.batch_size == 4
    got = model(ids[order, 20:], past_key_values=cache).logits
    fresh = QuantizedCache(model.config, "int4")
    model(ids[order, :20], past_key_values=fresh)
    want = model(ids[order, 20:], past_key_values=fresh).logits
    assert torch.allclose(got, want, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("name", ["Qwen3-Next", "Falcon-H1", "DeepSeek V3", "Gemma 3n", "LFM2"])
@torch.no_grad()
def test_reset_and_copies_hold_every_layer(name):
    model = use_quantkv_attention(build(name))
    cache = QuantizedCache(model.config, "int4")
    assert not cache.is_initialized
    expected = logits(model, cache)
    assert cache.is_initialized
    duplicates = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    more = torch.tensor([[5], [7]])
    outs = [model(more, past_key_values=c).logits for c in (cache, *duplicates)]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size == -1
    assert torch.equal(logits(model, cache), expected)


@torch.no_grad()
def test_crop_of_layers_that_keep_states():
    """Convolutions go back if their past was recorded; recurrences never do, and nothing is cropped then."""
    ids = torch.randint(2, 90, (2, 24), generator=torch.Generator().manual_seed(6))
    for name, record in (("Qwen3-Next", True), ("LFM2", False)):
        model = use_quantkv_attention(build(name))
        cache = QuantizedCache(model.config, "int4")
        if record:
            cache.activate_past_recording()
        model(ids[:, :20], past_key_values=cache)
        with pytest.raises(RuntimeError, match="crop"):
            cache.crop(-3)
        assert cache.get_seq_length() == 20
        cache.crop(0)
        model(ids[:, 20:], past_key_values=cache)
    cache = QuantizedCache(model.config, "int4")
    cache.activate_past_recording()
    model(ids[:, :20], past_key_values=cache)
    cache.crop(-3)
    got = model(ids[:, 17:], past_key_values=cache).logits
    fresh = QuantizedCache(model.config, "int4")
    model(ids[:, :17], past_key_values=fresh)
    assert torch.allclose(got, model(ids[:, 17:], past_key_values=fresh).logits, atol=1e-5)


MLA = ("DeepSeek V2", "DeepSeek V3", "GLM-4.7-Flash", "MiniCPM3", "LongCat-Flash", "Youtu", "Kimi Linear")


@pytest.mark.parametrize("name", [name for name in MLA if any(a.name == name and a.is_known for a in ARCHITECTURES)])
@torch.no_grad()
def test_queries_read_pages_of_latents(name, monkeypatch):
    """A prompt, a chunk and single tokens, without a row that is read back; attention that is transformers' gets rows read back."""
    model = build(name)
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            module.scaling *= 1.7  # as a long RoPE has it: not that of the rows' size
    ids = torch.randint(2, 90, (2, 40), generator=torch.Generator().manual_seed(7))
    want = model(ids).logits
    read = []
    monkeypatch.setattr(LatentLayer, "_read_back", lambda self, *args, own=LatentLayer._read_back: read.append(1) or own(self, *args))
    for implementation in ("sdpa", "quantkv"):
        model.set_attn_implementation(implementation)
        for prompt in ("own", "stored"):
            cache = QuantizedCache(model.config, "none", dtype=torch.float32, prompt=prompt)
            cuts = (0, 20, 36, 37, 40)
            found = torch.cat([model(ids[:, a:b], past_key_values=cache).logits for a, b in pairwise(cuts)], 1)
            assert (found - want).norm() <= 2e-6 * want.norm()
        assert (len(read) > 0) == (implementation == "sdpa")
        read.clear()


@torch.no_grad()
def test_projections_of_latents_that_are_not_plain_weights():
    """As a quantized layer's, or one with an adapter: what they make of unit vectors is read. One that is no linear map is refused."""
    model = use_quantkv_attention(build("DeepSeek V3"))
    ids = torch.randint(2, 90, (2, 20), generator=torch.Generator().manual_seed(7))
    cuts = (0, 12, 13, 20)

    def answer(prompt="own"):
        cache = QuantizedCache(model.config, "int4", prompt=prompt)
        return torch.cat([model(ids[:, a:b], past_key_values=cache).logits for a, b in pairwise(cuts)], 1)

    want = answer()
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = torch.nn.Sequential(layer.self_attn.kv_b_proj)
    assert (answer() - want).norm() <= 1e-6 * want.norm()
    model.model.layers[1].self_attn.kv_b_proj.append(torch.nn.Tanh())
    with pytest.raises(NotImplementedError, match=r"DeepseekV3Attention: its keys are not kv_b_proj of a latent.*sdpa"):
        answer()
    model.set_attn_implementation("sdpa")
    answer()
