"""Keys with a key mean for each bucket of positions, in transformers: every pass must know where its tokens stand. Buckets are of 4
positions here, key means larger than keys, and 16-bit formats stand for all: a wrong position is a wrong answer."""

import copy
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from architectures import ARCHITECTURES  # noqa: E402
from quantkv import LayerMaps, LinearMap, maps  # noqa: E402
from quantkv.engine.cache_positions import CachePositions  # noqa: E402
from quantkv.engine.sequences import Sequences  # noqa: E402
from quantkv.geometry import Kind  # noqa: E402
from quantkv.integrations.transformers import QuantizedCache, QuantizedLayer, quantkv_attention, use_cuda_graphs, use_quantkv_attention  # noqa: E402
from quantkv.policy import Policy  # noqa: E402
from test_transformers import Attention, logits, prompts, stored, tiny  # noqa: E402
from test_transformers_static import BATCHES, NEW, compilation, expected, generate, graphs, stats  # noqa: E402, F401

BUCKET = 4


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(maps, "KEY_MEAN_BUCKET", BUCKET)


def key_mean_map(heads=2, size=64, seed=0):
    """A matrix for each head, and a key mean that is another in each bucket."""
    generator = torch.Generator().manual_seed(seed)
    forward = torch.linalg.qr(torch.randn(heads, size, size, generator=generator, dtype=torch.float64))[0].float()
    return LinearMap(forward, forward.mT.contiguous(), 4 * torch.randn(40, heads, size, generator=generator))


def policy(format="none", layers=2, **shape):
    return Policy(format, maps={i: LayerMaps(k=key_mean_map(**shape, seed=i)) for i in range(layers)})


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "llama4"])
def test_a_padded_batch_in_chunks(name):
    """A prompt, a chunk and single tokens, left-padded, past the window."""
    model = tiny(name, attn_implementation="eager")
    ids, mask = prompts([50, 33, 7])
    cuts, real = [0, 24, *range(40, 50)], mask.bool()
    want = logits(model, DynamicCache(config=model.config), ids, mask, cuts)
    got = logits(use_quantkv_attention(model), QuantizedCache(model.config, policy()), ids, mask, cuts)
    assert (got - want)[real].abs().max() <= 1e-4 * want[real].abs().max()


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 7}], ids=["greedy", "beams", "chunked"])
@pytest.mark.parametrize("prompt", ["own", "stored"])
def test_generate(options, prompt):
    model = tiny("llama")
    tokens = expected(model, [24, 17, 9, 3], **options)
    cache = QuantizedCache(model.config, policy(), prompt=prompt)
    assert torch.equal(generate(model, [24, 17, 9, 3], cache, **options), tokens)
    assert cache.layers[0].pages.maps.k.key_mean is not None and cache.layers[0].pages.num_blocks > 4  # grown, with its maps


def test_padding_after_tokens():
    """Positions count tokens, not places."""
    model = use_quantkv_attention(tiny("llama"))
    ids, _ = prompts([20, 20])
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 3:10] = 0
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        cache = QuantizedCache(model.config, policy())
        holes = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[1, mask[1].bool()]
        dense = model(ids[1:, mask[1].bool()], past_key_values=QuantizedCache(model.config, "none")).logits[0]
    assert torch.allclose(holes, dense, atol=1e-4 * float(dense.abs().max()))


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compiled(name, lengths, stats):  # noqa: F811
    model = tiny(name)
    tokens = expected(model, lengths)
    for _ in range(2):
        cache = QuantizedCache(model.config, policy(), num_tokens=64)
        assert torch.equal(generate(model, lengths, cache, compile_config=compilation(fullgraph=True)), tokens)
    assert stats["unique_graphs"] == 1


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_captured(name, lengths, graphs):  # noqa: F811
    model = tiny(name)
    tokens = expected(model, lengths)
    use_cuda_graphs(model)
    cache = QuantizedCache(model.config, policy(), num_tokens=64)
    assert torch.equal(generate(model, lengths, cache, compile_config=compilation()), tokens)
    assert len(graphs) == 1
    cache.crop(0)
    assert cache.get_seq_length() == 24 + NEW - 1


@torch.no_grad()
def test_crop_reorder_and_go_on():
    """Tokens that are written again after a crop, and sequences that changed places, have the positions that they had."""
    model = tiny("llama")
    ids, mask = prompts([30, 19])
    results = []
    for attention in ("eager", "quantkv"):
        model.set_attn_implementation(attention)
        cache = QuantizedCache(model.config, policy()) if attention == "quantkv" else DynamicCache(config=model.config)
        logits(model, cache, ids, mask, [0, 21, 22, 23])
        cache.crop(-7)
        cache.reorder_cache(torch.tensor([1, 0]))
        if attention == "quantkv":
            cache = copy.deepcopy(cache)
        turned_ids, turned_mask = ids.flip(0), mask.flip(0)
        positions = turned_mask.cumsum(-1) - 1
        outs = [
            model(turned_ids[:, a:b], attention_mask=turned_mask[:, :b], position_ids=positions[:, a:b], past_key_values=cache).logits
            for a, b in ((23, 27), (27, 28), (28, 29), (29, 30))
        ]
        results.append(torch.cat(outs, 1))
    assert (results[0] - results[1]).abs().max() <= 1e-4 * results[0].abs().max()


@pytest.mark.parametrize("kind", [Kind(), Kind(20), Kind(20, chunked=True)])
@pytest.mark.parametrize("name", ["int4", "levels4", "levels2"])
def test_bytes_do_not_depend_on_the_cuts(name, kind):
    """The same rows in one pass and in several, with key means, a Hessian and padding: not one byte differs."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 48, 64, generator=generator) for heads in (4, 2, 2))
    factor = torch.randn(2, 64, 64, generator=generator)
    made, mask, results = key_mean_map(), prompts([48, 31])[1].bool(), []
    given = LayerMaps(k=LinearMap(made.forward, made.inverse, made.key_mean, hessian=factor @ factor.mT))
    for cuts in ([0], [0, 5, 16, 17, 40, 41, 42]):
        layer = QuantizedLayer(name, Sequences(kind, 16, CachePositions()), None, prompt="stored", num_tokens=48)
        layer.config = replace(layer.config, maps=given)
        layer.activate_past_recording()
        for a, b in zip(cuts, [*cuts[1:], 48]):
            pending = layer.update(key[:, :, a:b], value[:, :, a:b])
            quantkv_attention(Attention(), query[:, :, a:b], *pending, mask[:, :b])
        results.append(stored(layer))
    assert torch.equal(*results)


@pytest.mark.parametrize("attention", ["quantkv", "eager"])
@torch.no_grad()
def test_latents(attention):
    """Maps of latents have a matrix, in pages and read back; key means by position are refused, since latents are values too."""
    model = next(a for a in ARCHITECTURES if a.name == "DeepSeek V3").build()
    given = policy(heads=1, size=32)
    rotated = replace(given, maps={i: LayerMaps(k=replace(side.k, key_mean=None)) for i, side in given.maps.items()})
    ids = torch.randint(2, 90, (2, 28), generator=torch.Generator().manual_seed(4))
    if attention == "quantkv":
        use_quantkv_attention(model)
    else:
        model.set_attn_implementation(attention)
    outs = []
    for configuration in ("none", rotated):
        cache = QuantizedCache(model.config, configuration)
        outs.append(torch.cat([model(part, past_key_values=cache).logits for part in ids.split([16, 9, 1, 1, 1], 1)], 1))
    assert torch.allclose(*outs, atol=1e-4 * float(outs[0].abs().max()))
    cache = QuantizedCache(model.config, given)
    with pytest.raises(ValueError, match=r"maps.k.key_mean: shape \(40, 1, 32\); latents take none"):
        model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 0


@torch.no_grad()
def test_refusals():
    config = tiny("llama").config
    with pytest.raises(ValueError, match=r"policy.maps=\[2\]: the model has layers 0 to 1"):
        QuantizedCache(config, policy(layers=3))
    with pytest.raises(ValueError, match=r"policy.layers=\[5\]"):
        QuantizedCache(config, Policy("int4", {5: "int8"}))
    model, cache = use_quantkv_attention(tiny("llama")), QuantizedCache(config, policy(heads=3))
    with pytest.raises(ValueError, match=r"maps.k.forward.shape=\(3, 64, 64\): the cache has 2 kv heads of 64"):
        model(torch.ones(1, 4, dtype=torch.long), past_key_values=cache)
    assert cache.get_seq_length() == 0
