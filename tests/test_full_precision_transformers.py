"""Full-precision tokens in transformers' cache: equal to 16 bits where all tokens are exact, and to the token where some are."""

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from architectures import ARCHITECTURES, VOCABULARY  # noqa: E402
from quantkv.engine.sequences import Sequences  # noqa: E402
from quantkv.full_precision import FullPrecisionTokens  # noqa: E402
from quantkv.geometry import Kind  # noqa: E402
from quantkv.integrations.transformers import QuantizedCache, QuantizedLayer, quantkv_attention, use_cuda_graphs, use_quantkv_attention  # noqa: E402
from quantkv.policy import Policy  # noqa: E402
from test_transformers import MODELS, Attention, logits, prompts, tiny  # noqa: E402
from test_transformers_static import compilation, graphs, stats  # noqa: E402, F401

ALL = FullPrecisionTokens(0, 512)
SOME = FullPrecisionTokens(16, 24)


@pytest.fixture(scope="module")
def llama():
    return use_quantkv_attention(tiny("llama"))


@pytest.mark.parametrize("size", [0, 64])
@pytest.mark.parametrize("name", MODELS)
def test_all_tokens_exact_equal_eager(name, size):
    """Padded batch, whole prompt, a chunk and single tokens, past the window: nothing of int2 is to be seen."""
    model = tiny(name, attn_implementation="eager")
    ids, mask = prompts([50, 33, 7])
    cuts = [0, 24, *range(40, 50)]
    expected = logits(model, DynamicCache(config=model.config), ids, mask, cuts)
    use_quantkv_attention(model)
    actual = logits(model, QuantizedCache(model.config, Policy("int2", full_precision=ALL), num_tokens=size), ids, mask, cuts)
    plain = logits(model, QuantizedCache(model.config, "int2", num_tokens=size), ids, mask, cuts)
    real = mask.bool()
    assert (actual - expected)[real].abs().max() <= 1e-5 * expected[real].abs().max()
    assert (plain - expected)[real].abs().max() >= 0.1 * expected[real].abs().max()


def exact_positions(length, tokens):
    return torch.tensor([j < tokens.sink or j >= max(length - tokens.recent, 0) // 16 * 16 for j in range(length)])


@pytest.mark.parametrize("kind", [Kind(), Kind(20), Kind(20, chunked=True)])
@pytest.mark.parametrize("fmt", ["int4", "fp8", "k8v4", "levels2"])
def test_a_layer_reads_what_the_rule_says(fmt, kind):
    """Prompt, chunk and single tokens of a padded batch, against attention over the rows that the rule mixes."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 110, 64, generator=generator) for heads in (4, 2, 2))
    mask = prompts([110, 83])[1].bool()
    layer = QuantizedLayer(fmt, Sequences(kind, 16, full_precision=SOME), None, prompt="stored", num_tokens=0)
    layer.activate_past_recording()
    tokens = SOME if not kind.window else FullPrecisionTokens(0, SOME.recent)
    for a, b in zip([0, 30, 50, *range(51, 110)], [30, 50, *range(51, 111)]):
        pending = layer.update(key[:, :, a:b], value[:, :, a:b])
        out = quantkv_attention(Attention(), query[:, :, a:b], *pending, mask[:, :b])[0]
        for s, padding in enumerate((0, 27)):
            length = b - padding
            if length <= 0:
                continue
            slots = torch.tensor([layer.sequences.table.rows[s][j // 16] * 16 + j % 16 for j in range(length)])
            read = layer.pages.dequantize(slots)
            exact = exact_positions(length, tokens)[None, :, None]
            own = (t[s, :, padding:b] for t in (key, value))
            k, v = (torch.where(exact, o, r.transpose(0, 1)).repeat_interleave(2, 0) for o, r in zip(own, read))
            for i in range(max(a, padding), b):
                low = kind.first_seen(i - padding)
                weights = (query[s, :, i, None] @ k[:, low : i - padding + 1].mT * 64**-0.5).softmax(-1)
                assert torch.allclose(out[s, i - a], (weights @ v[:, low : i - padding + 1])[:, 0], atol=1e-5), (s, i)


def test_chunks_equal_one_shot(llama):
    """What is stored and what has copies does not depend on the cuts, nor what the passes after them read."""
    ids, mask = prompts([90, 71])
    runs = []
    for cuts in ([0], [0, 7, 40, 57]):
        cache = QuantizedCache(llama.config, Policy("int4", full_precision=SOME))
        logits(llama, cache, ids[:, :1], mask[:, :1], [0])  # the layers below see the same rows, whatever the cuts
        layer, generator = cache.layers[0], torch.Generator().manual_seed(0)
        layer.sequences.cache_positions.reset()
        layer.sequences.cache_positions.num_layers = 1
        query, key, value = (torch.randn(2, heads, 91, 64, generator=generator) for heads in (4, 2, 2))
        ends = [*cuts[1:], 90]
        for a, b in [*zip(cuts, ends), (90, 91)]:
            full = torch.nn.functional.pad(mask.bool(), (0, 1), value=True)[:, :b]
            out = quantkv_attention(Attention(), query[:, :, a:b], *layer.update(key[:, :, a:b], value[:, :, a:b]), full)[0]
        runs.append(out)
    assert torch.allclose(*runs, atol=1e-6)


@torch.no_grad()
def test_lost_copies_leave_the_plain_format(llama):
    """As after a preemption that keeps the pages: the very numbers of the format, until new pages begin."""
    ids, mask = prompts([60, 43])
    plain = QuantizedCache(llama.config, "int4")
    exact = QuantizedCache(llama.config, Policy("int4", full_precision=SOME))
    for cache in (plain, exact):
        logits(llama, cache, ids[:, :50], mask[:, :50], [0])
    kept = copy.deepcopy(exact)
    for pool in exact.layers[0].sequences.pools.values():
        pool.clear()
    rest = [llama(ids[:, 50:51], attention_mask=mask[:, :51], past_key_values=c).logits for c in (plain, exact, kept)]
    assert torch.equal(rest[0], rest[1]) and not torch.allclose(rest[0], rest[2], rtol=0.01)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@torch.no_grad()
def test_crop_select_repeat_and_reset(name):
    """With all tokens exact, whatever happens to a cache, it says what it says over 16 bits; a page that is copied is what it costs."""
    model = use_quantkv_attention(tiny(name))
    ids, mask = prompts([40, 33])
    other, _ = prompts([60, 60], seed=2)
    results = []
    for fmt in ("none", Policy("int2", full_precision=ALL)):
        cache = QuantizedCache(model.config, fmt)
        logits(model, cache, *prompts([70, 5, 20], seed=3), [0, 31])
        cache.reset()
        cache.activate_past_recording()
        logits(model, cache, torch.cat([ids[:, :20], other[:, 20:40]], 1), mask, [0, 15])
        cache.crop(-20)
        parts = [logits_from(model, cache, ids, mask, 20)]
        cache.batch_select_indices([1])
        cache.crop(-8)  # to where a page ends: nothing is copied
        parts.append(logits_from(model, cache, ids[1:], mask[1:], 32))
        results.append(torch.cat([p.flatten() for p in parts]))
    assert (results[0] - results[1]).abs().max() <= 1e-5 * results[0].abs().max()


def logits_from(model, cache, ids, mask, first):
    positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, first:]
    return model(ids[:, first:], attention_mask=mask, position_ids=positions, past_key_values=cache).logits


def test_a_batch_that_grows_gets_a_larger_pool(llama):
    ids, mask = prompts([48, 33])
    cache = QuantizedCache(llama.config, Policy("int2", full_precision=SOME))
    logits(llama, cache, ids[:, :47], mask[:, :47], [0])
    before = cache.full_precision_nbytes
    cache.batch_repeat_interleave(3)
    ids, mask = (t.repeat_interleave(3, 0) for t in (ids, mask))
    with torch.no_grad():
        rows = step(llama, cache, ids, mask, 47)
    assert cache.full_precision_nbytes == 3 * before and cache.allocated_nbytes >= cache.nbytes + cache.full_precision_nbytes
    assert torch.equal(rows[0], rows[1])  # both read a copy of the last page


def test_a_chunk_of_nothing_but_padding(llama):
    ids, mask = prompts([40])
    ids, mask = (torch.nn.functional.pad(t, (20, 0)) for t in (ids, mask))
    results = [
        logits(llama, QuantizedCache(llama.config, fmt), ids, mask, [0, 16, 30, 58]) for fmt in ("none", Policy("int2", full_precision=ALL))
    ]
    assert (results[0] - results[1])[:, 20:].abs().max() <= 1e-5 * results[0].abs().max()


@pytest.mark.parametrize("attention", ["quantkv", "sdpa"])
@pytest.mark.parametrize("prompt", ["own", "stored"])
@torch.no_grad()
def test_latents(attention, prompt):
    """Nothing of int2 is seen where all tokens are exact: by absorbed attention, and by rows that are read back. With few exact tokens
    something is, and less than with none."""
    model = next(a for a in ARCHITECTURES if a.name == "DeepSeek V3").build()
    ids, mask = prompts([60, 41])
    ids = ids % VOCABULARY
    ids, mask = (ids[:1], mask[:1]) if attention == "sdpa" else (ids, mask)  # which stores padding like any token
    want = model(ids, attention_mask=mask).logits[mask.bool()]
    model.set_attn_implementation(attention)
    lost = []
    for tokens in (ALL, SOME, None):
        cache = QuantizedCache(model.config, Policy("int2", full_precision=tokens), prompt=prompt)
        found = logits(model, cache, ids, mask, [0, 16, 30, 58, 59])[mask.bool()]
        assert (cache.full_precision_nbytes > 0) == (tokens is not None)
        lost.append(float((found - want).norm() / want.norm()))
    assert lost[0] <= 1e-5 < 0.01 < lost[1] < lost[2]


def test_layers_of_16_bits_have_no_copies(llama):
    ids, mask = prompts([40])
    cache = QuantizedCache(llama.config, Policy("int4", layers={0: "none"}, full_precision=SOME))
    logits(llama, cache, ids, mask, [0, *range(30, 40)])
    assert [layer.full_precision_nbytes > 0 for layer in cache.layers] == [False, True]
    assert cache.layers[1].sequences.pools[torch.device("cpu")].watched is cache.layers[1].pages


def step(model, cache, ids, mask, at):
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    return model(
        ids[:, at : at + 1], attention_mask=mask[:, : at + 1], position_ids=positions[:, at : at + 1], past_key_values=cache
    ).logits


@pytest.mark.parametrize("again", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copy", "pickle"])
@torch.no_grad()
def test_copies_of_a_cache_keep_their_full_precision_tokens(llama, again):
    ids, mask = prompts([60, 43])
    cache = QuantizedCache(llama.config, Policy("int2", full_precision=SOME))
    logits(llama, cache, ids[:, :50], mask[:, :50], [0, 30])
    other = again(cache)
    first, second = ([step(llama, c, ids, mask, i) for i in range(50, 60)] for c in (cache, other))
    assert all(map(torch.equal, first, second))


@torch.no_grad()
def test_reorder(llama):
    """Whole pages that beams share stay exact for both; the page that one of them copies is read quantized, until it begins another."""
    ids, mask = prompts([56, 56])
    cache = QuantizedCache(llama.config, Policy("int2", full_precision=FullPrecisionTokens(16, 8)))
    logits(llama, cache, ids[:, :40], mask[:, :40], [0])
    cache.reorder_cache(torch.tensor([1, 1]))
    sequences = cache.layers[0].sequences
    for i in range(40, 56):
        step(llama, cache, ids, mask, i)
        pool, rows = sequences.pools[torch.device("cpu")], sequences.table.rows
        copied = [[int(pool.copy_of[page]) >= 0 for page in row] for row in rows]
        assert rows[0][:2] == rows[1][:2] and rows[0][2] != rows[1][2]
        begun = [True] * (i >= 48)
        assert sorted(copied) == [[True, False, False, *begun], [True, False, True, *begun]]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generate_with_everything_exact(name, options):
    """Greedy and without lost copies the tokens are those of 16 bits; with beams, which copy pages, it runs, and differs from int2."""
    model = tiny(name, attn_implementation="eager")
    ids, mask = prompts([24, 17, 9, 3])
    fixed = {"attention_mask": mask, "max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False, **options}
    expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **fixed)
    use_quantkv_attention(model)
    found = model.generate(ids, past_key_values=QuantizedCache(model.config, Policy("int2", full_precision=ALL)), **fixed)
    plain = model.generate(ids, past_key_values=QuantizedCache(model.config, "int2"), **fixed)
    assert not torch.equal(plain, expected)
    assert torch.equal(found, expected) if not options else (found == expected).sum() > (plain == expected).sum()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compiled_and_captured_passes(name, stats, graphs):  # noqa: F811
    """One graph, whatever cache; the tokens of passes that the host takes part in."""
    model = use_quantkv_attention(tiny(name))
    ids, mask = prompts([24, 17, 9, 3])
    fixed = {"attention_mask": mask, "max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    expected = model.generate(ids, past_key_values=QuantizedCache(model.config, Policy("int4", full_precision=SOME)), **fixed)
    for _ in range(2):
        cache = QuantizedCache(model.config, Policy("int4", full_precision=SOME), num_tokens=96)
        assert torch.equal(model.generate(ids, past_key_values=cache, compile_config=compilation(fullgraph=True), **fixed), expected)
        assert stats["unique_graphs"] == 1
    use_cuda_graphs(model)
    for _ in range(2):
        cache = QuantizedCache(model.config, Policy("int4", full_precision=SOME), num_tokens=96)
        assert torch.equal(model.generate(ids, past_key_values=cache, compile_config=compilation(), **fixed), expected)
    assert len(graphs) == 2
