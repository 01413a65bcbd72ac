"""The transformers cache and attention: equal to transformers' own where nothing is quantized, and consistent with itself where it is."""

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from quantkv import available_formats, get_format  # noqa: E402
from quantkv.engine.cache_positions import CachePositions  # noqa: E402
from quantkv.engine.forward_metadata import ForwardMetadata  # noqa: E402
from quantkv.engine.sequences import Sequences  # noqa: E402
from quantkv.geometry import Heads, Kind  # noqa: E402
from quantkv.integrations.transformers import QuantizedCache, QuantizedLayer, quantkv_attention, quantkv_mask, use_quantkv_attention  # noqa: E402
from quantkv.integrations.transformers.lazy_kv import PagedLength  # noqa: E402
from quantkv.integrations.transformers_model import LayerPlan, _heads  # noqa: E402

VOCABULARY = 128
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
MODELS = {  # each for one thing
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),  # bias in q, k, v
    "mistral": ("Mistral", {"sliding_window": 20}),
    "gemma2": ("Gemma2", {"sliding_window": 20, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64}),
    "gpt_oss": ("GptOss", {"sliding_window": 20, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "llama4": ("Llama4", {"attention_chunk_size": 20, "num_local_experts": 2, "intermediate_size_mlp": 128, "no_rope_layers": [1, 0]}),
}


def tiny(name, **changes):
    """A random model of two layers in float32."""
    family, extra = MODELS[name]
    config = getattr(transformers, family + ("TextConfig" if family == "Llama4" else "Config"))(**{**SIZES, **extra, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, family + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.5 * torch.randn_like(parameter))  # biases and sinks start at zero
            else:
                parameter.mul_(4)
    return model


@pytest.fixture(scope="module")
def llama():
    return use_quantkv_attention(tiny("llama"))


def prompts(lengths, seed=1):
    """Left-padded random tokens `[S, N]` and their mask."""
    width = max(lengths)
    ids = torch.randint(1, VOCABULARY, (len(lengths), width), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()


@torch.no_grad()
def logits(model, cache, ids, mask, cuts):
    """Logits of every token, run in chunks that start at `cuts`."""
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    ends = [*cuts[1:], ids.shape[1]]
    return torch.cat(
        [
            model(ids[:, a:b], attention_mask=mask[:, :b], position_ids=positions[:, a:b], past_key_values=cache).logits
            for a, b in zip(cuts, ends)
        ],
        1,
    )


@pytest.mark.parametrize("name", MODELS)
def test_unquantized_equals_eager(name):
    """Padded batch, whole prompt, a chunk and single tokens, past the window."""
    model = tiny(name, attn_implementation="eager")
    ids, mask = prompts([50, 33, 7])
    cuts = [0, 24, *range(40, 50)]
    expected = logits(model, DynamicCache(config=model.config), ids, mask, cuts)
    cache = QuantizedCache(model.config, "none")
    actual = logits(use_quantkv_attention(model), cache, ids, mask, cuts)
    real = mask.bool()
    assert (actual - expected)[real].abs().max() <= 1e-5 * expected[real].abs().max()
    assert cache.get_seq_length() == 50
    model.set_attn_implementation("eager")
    assert torch.equal(logits(model, DynamicCache(config=model.config), ids, mask, cuts)[real], expected[real])


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"num_beams": 3, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generate_equals_dynamic_cache(name, options):
    model = tiny(name, attn_implementation="eager")
    ids, mask = prompts([12] if "prompt_lookup_num_tokens" in options else [24, 17, 9, 3])
    if "prompt_lookup_num_tokens" in options:
        ids = ids.repeat(1, 3)
        mask = torch.ones_like(ids)

    def generate(cache):
        if "prompt_lookup_num_tokens" in options:
            cache.activate_past_recording()
        return model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=64, min_new_tokens=64, do_sample=False, **options
        )

    expected = generate(DynamicCache(config=model.config))
    use_quantkv_attention(model)
    assert torch.equal(generate(QuantizedCache(model.config, "none")), expected)


@pytest.mark.parametrize("name", available_formats())
def test_bytes_are_those_of_the_spec(llama, name):
    """64 tokens in 2 sequences: 4 pages of 16 each, in every layer."""
    ids, mask = prompts([64, 64])
    cache = QuantizedCache(llama.config, name, num_tokens=64)
    logits(llama, cache, ids, mask, [0, 30, 63])
    spec = get_format(name).cache_spec(num_kv_heads=2, head_size=64)
    assert cache.spec == spec
    assert cache.nbytes == cache.allocated_nbytes == 2 * spec.nbytes(8)
    assert sum(layer.pages.buffer.untyped_storage().nbytes() for layer in cache.layers) == cache.nbytes


def test_pool_grows_with_the_sequence(llama):
    ids, mask = prompts([200])
    cache = QuantizedCache(llama.config, "int8")
    logits(llama, cache, ids, mask, range(200))
    assert cache.nbytes == 2 * cache.spec.nbytes(13)
    assert cache.nbytes <= cache.allocated_nbytes <= 1.25 * cache.nbytes


def test_each_layer_its_format(llama):
    ids, mask = prompts([20])
    cache = QuantizedCache(llama.config, ["int8", "k4v2"])
    logits(llama, cache, ids, mask, [0])
    assert [spec.format for spec in cache.specs] == ["int8", "k4v2"]
    with pytest.raises(ValueError, match="differ"):
        _ = cache.spec
    with pytest.raises(ValueError, match="2 layers"):
        QuantizedCache(llama.config, ["int8"])


class Attention(torch.nn.Module):
    """What the attention function looks at in a model's module."""

    is_causal = True


@pytest.mark.parametrize("kind", [Kind(), Kind(20), Kind(20, chunked=True)])
@pytest.mark.parametrize("name", available_formats())
def test_the_answer_does_not_depend_on_the_cuts(name, kind):
    """The same rows in one pass and in several: not one byte differs, and the outputs only in the order in which a BLAS adds."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 48, 64, generator=generator) for heads in (4, 2, 2))
    mask = prompts([48, 31])[1].bool()
    results = []
    for cuts in ([0], [0, 5, 16, 17, 40]):
        layer = QuantizedLayer(name, Sequences(kind, 16), None, prompt="stored", num_tokens=48)
        layer.activate_past_recording()
        outs = []
        for a, b in zip(cuts, [*cuts[1:], 48]):
            pending = layer.update(key[:, :, a:b], value[:, :, a:b])
            outs.append(quantkv_attention(Attention(), query[:, :, a:b], *pending, mask[:, :b])[0])
        results.append((stored(layer), torch.cat(outs, 1)))
    (bytes_whole, whole), (bytes_cut, cut) = results
    assert torch.equal(bytes_whole, bytes_cut)
    assert torch.allclose(whole, cut, atol=1e-5)
    assert not whole[1, :17].any() and whole[1, 17:].any(-1).all()  # padding reads 0


def stored(layer):
    """Bytes of every sequence's tokens, page by page."""
    table, parts = layer.sequences.table, []
    for row, length in zip(table.rows, table.lengths):
        assert length <= len(row) * table.block_size
        for side in (layer.pages.k, layer.pages.v):
            for field in side.codes, side.meta:
                if field is not None:
                    parts.append(
                        field[row[: -(-length // table.block_size)]].contiguous().view(torch.uint8).flatten(0, 1)[:length].flatten()
                    )
    return torch.cat(parts)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("fmt", ["none", "int4"])
def test_crop_and_continue_equals_a_fresh_run(name, fmt):
    model = use_quantkv_attention(tiny(name))
    ids, mask = prompts([40, 10])
    other, _ = prompts([40, 40], seed=2)
    cache = QuantizedCache(model.config, fmt)
    cache.activate_past_recording()
    logits(model, cache, torch.cat([ids[:, :33], other[:, 33:]], 1), mask, [0, 36])
    cache.crop(-7)
    assert cache.get_seq_length() == 33
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        again = model(ids[:, 33:], attention_mask=mask, position_ids=positions[:, 33:], past_key_values=cache).logits
    fresh = logits(model, QuantizedCache(model.config, fmt), ids, mask, [0, 33])[:, 33:]
    assert torch.equal(again, fresh)


def test_a_crop_lets_go_of_the_rows_of_a_call_that_was_refused(llama):
    """The first layer had taken its new keys; nobody reads them any more, and they are the memory of a pass."""
    ids, mask = prompts([12])
    cache = QuantizedCache(llama.config, "int8")
    logits(llama, cache, ids, mask, [0])
    with pytest.raises(NotImplementedError, match="gradients"):
        llama(ids[:, :5], past_key_values=cache)
    assert cache.layers[0]._new is not None
    cache.crop(0)
    assert [layer._new for layer in cache.layers] == [None, None]
    assert cache.get_seq_length() == 12


def test_rows_on_their_way_to_the_attention_function_say_what_they_are_and_nothing_else():
    layer = QuantizedLayer("int4", Sequences(Kind(), 16), None, prompt="own", num_tokens=0)
    key, value = torch.randn(2, 1, 2, 5, 64)
    pending, _ = layer.update(key, value)
    assert (pending.shape, pending.dtype, pending.device) == (key.shape, key.dtype, key.device)
    assert pending.to(torch.float32) is pending
    for use in (
        lambda: pending.to(torch.float16),
        lambda: pending + 1,
        lambda: pending.transpose(1, 2),
        lambda: torch.matmul(pending, key.mT),
    ):
        with pytest.raises(RuntimeError, match="use_quantkv_attention"):
            use()


def test_crop_into_padding_and_to_nothing(llama):
    ids, mask = prompts([12, 3])
    cache = QuantizedCache(llama.config, "int8")
    logits(llama, cache, ids, mask, [0])
    cache.crop(-5)
    assert cache.layers[0].sequences.table.lengths == [7, 0]
    cache.crop(torch.tensor(-100))
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)


def test_pages_behind_a_window_are_given_back():
    model = use_quantkv_attention(tiny("mistral"))
    ids, mask = prompts([200])
    cache = QuantizedCache(model.config, "int4")
    logits(model, cache, ids, mask, range(200))
    assert cache.nbytes <= 2 * cache.spec.nbytes(3)  # 20 tokens touch at most three pages of 16
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-30)


def test_reset_starts_anew_with_another_batch(llama):
    ids, mask = prompts([20, 14, 9])
    cache = QuantizedCache(llama.config, "int4")
    logits(llama, cache, *prompts([33, 5], seed=3), [0])
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0 and cache.batch_size == -1
    again = logits(llama, cache, ids, mask, [0, 12])
    assert torch.equal(again, logits(llama, QuantizedCache(llama.config, "int4"), ids, mask, [0, 12]))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_batch_operations_equal_the_rearranged_batch(name):
    """Repeat, select and reorder between passes, then write on: sequences that shared pages part without touching each other."""
    model = use_quantkv_attention(tiny(name))
    ids, mask = prompts([40, 29, 11])
    order = [i for i in range(3) for _ in range(2)]
    keep = [5, 0, 2, 2]
    final = [order[i] for i in keep]
    cache = QuantizedCache(model.config, "int4")
    logits(model, cache, ids[:, :27], mask[:, :27], [0])
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 6
    cache.batch_select_indices(torch.tensor([True] * 6))
    cache.reorder_cache(torch.tensor(keep))
    tail = torch.randint(1, VOCABULARY, (4, 13), generator=torch.Generator().manual_seed(5))
    full_ids, full_mask = torch.cat([ids[final, :27], tail], 1), torch.cat([mask[final, :27], torch.ones_like(tail)], 1)
    positions = (full_mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        actual = model(tail, attention_mask=full_mask, position_ids=positions[:, 27:], past_key_values=cache).logits
    expected = logits(model, QuantizedCache(model.config, "int4"), full_ids, full_mask, [0, 27])[:, 27:]
    assert torch.allclose(actual, expected, atol=1e-5 * float(expected.abs().max()))


def test_shared_pages_are_counted_once(llama):
    ids, mask = prompts([64])
    cache = QuantizedCache(llama.config, "int4")
    logits(llama, cache, ids, mask, [0])
    alone = cache.nbytes
    cache.batch_repeat_interleave(8)
    assert cache.nbytes == alone
    cache.batch_select_indices(torch.tensor([3]))
    assert cache.nbytes == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_none_stores_the_models_dtype(dtype):
    model = use_quantkv_attention(tiny("llama").to(dtype))
    cache = QuantizedCache(model.config, "none")
    out = logits(model, cache, *prompts([9]), [0])
    assert out.dtype == dtype and cache.spec.bits_per_element == 8 * dtype.itemsize


def test_a_cache_outlives_inference_mode(llama):
    ids, mask = prompts([20])
    cache = QuantizedCache(llama.config, "int8")
    with torch.inference_mode():
        llama(ids[:, :10], attention_mask=mask[:, :10], past_key_values=cache)
    with torch.no_grad():
        llama(ids[:, 10:], attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == 20


# ---- refusals


@torch.no_grad()
def refused(error, match, model, *args, **kwargs):
    with pytest.raises(error, match=match):
        model(*args, **kwargs)


def test_another_attention_is_refused():
    ids, _ = prompts([9])
    for name in ("sdpa", "eager"):
        model = tiny("llama", attn_implementation=name)
        refused(RuntimeError, "use_quantkv_attention", model, ids, past_key_values=QuantizedCache(model.config))


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("length", ["new", "stored", "one less"])
def test_a_mask_of_fewer_tokens_than_there_are_is_refused(llama, new, length):
    """Of ones alone it was taken for one that says that nothing is padded."""
    ids, _ = prompts([9, 9])
    cache, there = QuantizedCache(llama.config, "int8"), 9 + new
    with torch.no_grad():
        llama(ids, past_key_values=cache)
    given = {"new": new, "stored": 9, "one less": there - 1}[length]
    mask, match = torch.ones(2, there, dtype=torch.long), rf"attention_mask\.shape=\(2, {given}\): \(2, {there}\) is needed"
    refused(ValueError, match, llama, ids[:, :new], attention_mask=mask[:, :given], past_key_values=cache)
    with torch.no_grad():
        llama(ids[:, :new], attention_mask=mask, past_key_values=cache)
    refused(
        ValueError,
        r"=\(2, 5\): \(2, 9\) is needed",
        llama,
        ids,
        attention_mask=mask[:, :5],
        past_key_values=QuantizedCache(llama.config, "int8"),
    )


def test_what_is_not_supported_is_refused_by_name(llama):
    ids, mask = prompts([9, 4])
    fresh = lambda: QuantizedCache(llama.config, "int8")
    refused(NotImplementedError, "padding masks", llama, ids, attention_mask=torch.zeros(2, 1, 9, 9), past_key_values=fresh())
    refused(NotImplementedError, "output_attentions", llama, ids, output_attentions=True, past_key_values=fresh())
    with pytest.raises(NotImplementedError, match="gradients"):
        llama(ids, past_key_values=fresh())
    cache = fresh()
    logits(llama, cache, ids, mask, [0])
    refused(ValueError, "3.*holds 2 sequences", llama, torch.ones(3, 1, dtype=torch.long), past_key_values=cache)
    for wrong in (None, torch.ones(2, 10, dtype=torch.long)):
        cache = fresh()
        logits(llama, cache, ids, mask, [0])
        refused(ValueError, "attention_mask", llama, ids[:, :1], attention_mask=wrong, past_key_values=cache)
    for options in ({"use_vmap": True, "allow_is_causal_skip": True}, {"allow_is_causal_skip": False}):
        with pytest.raises(NotImplementedError, match="custom masks"):
            quantkv_mask(q_length=4, kv_length=PagedLength.of(4, set()), **options)


def test_masks_count_from_0_unless_they_are_told_and_say_which_windows_were_asked_for():
    windows = set()
    padding = torch.tensor([[0, 1, 1, 1, 1, 1]])
    asked = {"q_length": 3, "kv_length": PagedLength.of(6, windows), "attention_mask": padding, "allow_is_causal_skip": True}
    assert quantkv_mask(**asked).tolist() == [[[[False, True, True]]]]
    assert quantkv_mask(**asked, q_offset=2, local_size=7).shape == (1, 1, 1, 5)
    assert windows == {None, 7}


def test_a_layer_says_what_it_is(llama):
    """Sliding with a window of one token too; initialized with its pages; a compiled pass asks for masks of unknown lengths from 0."""
    kinds = {kind: QuantizedLayer("int4", Sequences(kind, 16), None, prompt="own", num_tokens=0) for kind in (Kind(), Kind(1), Kind(20))}
    assert [layer.is_sliding for layer in kinds.values()] == [False, True, True]
    layer = kinds[Kind()]
    assert not layer.is_initialized and layer.get_mask_sizes(3) == (3, 0)
    layer.lazy_initialization(*torch.zeros(2, 1, 2, 4, 64))
    assert layer.is_initialized
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert layer.get_mask_sizes(3) == (-1, 0)


@pytest.mark.parametrize("heads, expected", [(2, Heads(2, 16, 16)), ([2, 4], None)])
def test_heads_of_a_configuration_that_is_not_known(heads, expected):
    class Config(transformers.PreTrainedConfig):
        model_type = "unheard_of"

        def __init__(self, num_key_value_heads=1, hidden_size=64, num_attention_heads=4, **kwargs):
            self.num_key_value_heads, self.hidden_size, self.num_attention_heads = num_key_value_heads, hidden_size, num_attention_heads
            super().__init__(**kwargs)

    assert _heads(Config(heads), LayerPlan(Kind())) == expected
    assert _heads(Config(heads), LayerPlan(Kind(), latent=16)) is None


def test_padding_after_tokens(llama):
    """Holes are fine where every key is seen; a window or a crop cannot tell where they were."""
    ids, _ = prompts([10, 10])
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 3:6] = 0
    cache = QuantizedCache(llama.config, "none")
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        holes = llama(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[1, mask[1].bool()]
        dense = llama(ids[1:, mask[1].bool()], past_key_values=QuantizedCache(llama.config, "none")).logits[0]
    assert torch.allclose(holes, dense, atol=1e-4 * float(dense.abs().max()))
    with pytest.raises(ValueError, match="crop"):
        cache.crop(-1)
    model = use_quantkv_attention(tiny("mistral"))
    refused(ValueError, "on the left", model, ids, attention_mask=mask, past_key_values=QuantizedCache(model.config))


@pytest.mark.parametrize("holes", [False, True])
def test_a_prompt_padded_on_the_right_is_continued_as_by_transformers(holes):
    """The next token comes from the output of the last padding token, which sees the tokens before it."""
    model = tiny("llama", attn_implementation="eager")
    ids, _ = prompts([12, 12, 12])
    mask = torch.ones_like(ids)
    mask[1, 7:], mask[2, 3:] = 0, 0
    if holes:
        mask[0, 3:5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
    use_quantkv_attention(model)
    assert torch.equal(model.generate(ids, past_key_values=QuantizedCache(model.config, "none"), **options), expected)
    windowed = use_quantkv_attention(tiny("mistral"))
    refused(ValueError, "on the left", windowed, ids, attention_mask=mask, past_key_values=QuantizedCache(windowed.config))


@pytest.mark.parametrize(
    "config, match",
    [
        (lambda: transformers.T5Config(), "encoder-decoder"),
        (lambda: transformers.MambaConfig(), "layer_types|MambaConfig"),
        (lambda: transformers.DeepseekV32Config(), "DeepseekV32Config.*index chooses"),
        (lambda: transformers.DiffLlamaConfig(), "DiffLlamaConfig"),
    ],
)
def test_models_without_plain_attention_are_refused(config, match):
    with pytest.raises(NotImplementedError, match=match):
        QuantizedCache(config())


@pytest.mark.parametrize("fmt", ["int4+int8", ["int4", "int4+bf16"], {"format": "int4", "layers": {"1": "int4+int8"}}])
def test_formats_of_latents_are_refused_where_layers_keep_keys_and_values(llama, fmt):
    with pytest.raises(ValueError, match=r"format='int4\+.*: one of latents.* takes 'int4'"):
        QuantizedCache(llama.config, fmt)


def test_an_unknown_format_is_refused_with_the_nearest(llama):
    with pytest.raises(ValueError, match="did you mean 'int4'"):
        QuantizedCache(llama.config, "imt4")


def test_a_pass_that_failed_leaves_an_error_not_a_wrong_answer(llama):
    ids, mask = prompts([9])
    cache = QuantizedCache(llama.config, "int8")
    logits(llama, cache, ids, mask, [0])
    attention = llama.model.layers[1].self_attn
    handle = attention.register_forward_pre_hook(lambda *_: 1 / 0)
    refused(ZeroDivisionError, "division", llama, ids[:, :1], past_key_values=cache)
    handle.remove()
    refused(RuntimeError, "reset", llama, ids[:, :1], past_key_values=cache)
    cache.reset()
    logits(llama, cache, ids, mask, [0])


# ---- what was refused changed nothing; what failed is refused until reset


def state(cache):
    """Everything that a call could change, but for bytes of pages that no sequence holds."""
    cache_positions = cache.cache_positions
    tables = [copy.deepcopy(None if s.table is None else vars(s.table)) for s in cache_positions.kinds]
    layers = [(layer.seen, layer.is_initialized, stored(layer).tolist() if layer.is_initialized else None) for layer in cache.layers]
    return cache_positions.seen, cache_positions.padding, cache_positions.holes, cache_positions.failed, tables, layers, cache.batch_size


def holes_in(ids):
    mask = torch.ones_like(ids)
    mask[1, 3:6] = 0
    return mask


@pytest.fixture(scope="module")
def gemma2():
    """One layer with a window of 20, one without."""
    return use_quantkv_attention(tiny("gemma2"))


@pytest.mark.parametrize("name, changes", [("gemma2", {}), ("llama4", {"no_rope_layers": [0, 1]})])
def test_a_refused_mask_changes_nothing(name, changes):
    """Whichever comes first, the layer with a window (gemma2) or the one without (llama4): both are asked before one advances."""
    model = use_quantkv_attention(tiny(name, **changes))
    ids, mask = prompts([24, 17])
    cache = QuantizedCache(model.config, "int8")
    fresh = state(cache)
    refused(ValueError, "on the left", model, ids, attention_mask=holes_in(ids), past_key_values=cache)
    assert state(cache) == fresh and cache.get_seq_length() == 0
    first = logits(model, cache, ids[:, :20], mask[:, :20], [0])
    before = state(cache)
    wrong = mask.clone()
    wrong[1, 22] = 0
    refused(ValueError, "on the left", model, ids[:, 20:], attention_mask=wrong, past_key_values=cache)
    refused(ValueError, "must say where", model, ids[:, 20:], past_key_values=cache)
    changed = prompts([24, 12])[1]
    refused(ValueError, "masked now", model, ids[:, 20:], attention_mask=changed, past_key_values=cache)
    refused(ValueError, "holds 2 sequences", model, ids[:1, 20:], attention_mask=mask[:1], past_key_values=cache)
    assert state(cache) == before
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        rest = model(ids[:, 20:], attention_mask=mask, position_ids=positions[:, 20:], past_key_values=cache).logits
    expected = logits(model, QuantizedCache(model.config, "int8"), ids, mask, [0, 20])
    assert torch.equal(torch.cat([first, rest], 1), expected)


def test_a_refused_first_call_fixes_nothing(llama):
    """Neither the batch size nor the sizes of heads nor the dtype."""
    cache = QuantizedCache(llama.config, "none")
    layer = cache.layers[0]
    query, key = torch.zeros(4, 8, 9, 32), torch.zeros(4, 8, 9, 32)
    for options, match in (
        ({"sinks": torch.zeros(3)}, r"sinks\.shape"),
        ({"softcap": -1.0}, r"softcap=-1\.0"),
        ({"softcap": float("nan")}, "softcap=nan"),
        ({"scale": float("inf")}, "scaling=inf"),
    ):
        layer.update(key, key)
        with pytest.raises(ValueError, match=match):
            layer.attend(query, None, **{"scale": None, **options})
    for q, k, v, match in (
        (query[:, :5], key, key, r"query\.shape\[1\]=5"),
        (query[..., :16], key, key, r"query\.shape"),
        (query, key, key[:, :4], r"value\.shape"),
        (query, key, key.half(), r"value\.dtype"),
        (query[:2], key, key, r"key\.shape"),
    ):
        layer.update(k, v)
        with pytest.raises(ValueError, match=match):
            layer.attend(q, None, scale=None)
    layer.update(key, key)
    with pytest.raises(ValueError, match=r"attention_mask\.shape=\(4, 8\)"):
        layer.attend(query, torch.ones(4, 8), scale=None)
    assert cache.batch_size == -1 and not layer.is_initialized
    ids, mask = prompts([9, 4, 7])
    assert torch.equal(logits(llama, cache, ids, mask, [0]), logits(llama, QuantizedCache(llama.config, "none"), ids, mask, [0]))


def test_layers_of_one_pass_have_one_mask():
    cache_positions = CachePositions()
    kinds = Sequences(Kind(), 16, cache_positions), Sequences(Kind(20), 16, cache_positions)
    layers = [QuantizedLayer("int8", kind, None, False, 0) for kind in kinds]
    rows, mask = torch.zeros(2, 2, 9, 64), prompts([9, 4])[1].bool()
    layers[0].update(rows, rows)
    layers[0].attend(rows, mask, scale=None)
    for other in (None, prompts([9, 5])[1].bool()):
        layers[1].update(rows, rows)
        with pytest.raises(ValueError, match="attention_mask=changed"):
            layers[1].attend(rows, other, scale=None)
    with pytest.raises(ValueError, match="tokens=2 x 3"):
        layers[1].update(rows[:, :, :3], rows[:, :, :3])
        layers[1].attend(rows[:, :, :3], mask[:, :3], scale=None)
    layers[1].update(rows, rows)
    layers[1].attend(rows, mask.clone(), scale=None)
    assert cache_positions.seen == 9 and [kind.table.lengths for kind in kinds] == [[9, 4], [9, 4]]


def test_a_crop_that_one_kind_of_layers_refuses_cuts_none(gemma2):
    ids, mask = prompts([60, 60])
    cache = QuantizedCache(gemma2.config, "int8")
    logits(gemma2, cache, ids[:, :50], mask[:, :50], range(50))
    before = state(cache)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-30)
    for wrong in (3, -1.5, True):
        with pytest.raises(ValueError, match="tokens_to_remove"):
            cache.crop(wrong)
    assert state(cache) == before
    with torch.no_grad():
        rest = gemma2(ids[:, 50:], attention_mask=mask, past_key_values=cache).logits
    expected = logits(gemma2, QuantizedCache(gemma2.config, "int8"), ids, mask, [*range(50), 50])[:, 50:]
    assert torch.equal(rest, expected)


def test_unknown_sequences_are_refused(gemma2):
    ids, mask = prompts([20, 9])
    cache = QuantizedCache(gemma2.config, "int8")
    logits(gemma2, cache, ids, mask, [0])
    before = state(cache)
    for call, match in (
        (lambda: cache.reorder_cache(torch.tensor([1, 2])), "indices=2"),
        (lambda: cache.reorder_cache(torch.tensor([0, -1])), "indices=-1"),
        (lambda: cache.reorder_cache(torch.tensor([0.0, 1.0])), r"indices=0\.0"),
        (lambda: cache.batch_select_indices(torch.tensor([2])), r"indices=\[2\]"),
        (lambda: cache.batch_select_indices(torch.tensor([True, False, True])), "indices="),
        (lambda: cache.batch_repeat_interleave(0), "repeats=0"),
        (lambda: cache.batch_repeat_interleave(1.0), r"repeats=1\.0"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
        assert state(cache) == before


def fail_in(place, model, cache, monkeypatch, **inputs):
    """A forward pass that fails before the attention of layer 1, or inside that of layer `place`."""
    with monkeypatch.context() as patch:
        if place == "between":
            patch.setattr(model.model.layers[1].self_attn, "forward", lambda *_, **__: 1 / 0)
        else:
            patch.setattr(ForwardMetadata, "attend", failing(cache.layers[place].pages))
        refused((ZeroDivisionError, KeyboardInterrupt), None, model, past_key_values=cache, **inputs)


def failing(pages):
    attend = ForwardMetadata.attend

    def call(step, cache, *args, **kwargs):
        if cache is pages:
            raise KeyboardInterrupt
        return attend(step, cache, *args, **kwargs)

    return call


@pytest.mark.parametrize("place", ["between", 0, 1])
def test_after_a_pass_that_failed_everything_is_refused_until_reset(gemma2, monkeypatch, place):
    """The layers are of two kinds, which do not hear of each other but by their cache positions."""
    ids, mask = prompts([30, 22])
    cache = QuantizedCache(gemma2.config, "int8")
    logits(gemma2, cache, ids[:, :20], mask[:, :20], [0])
    fail_in(place, gemma2, cache, monkeypatch, input_ids=ids[:, 20:21], attention_mask=mask[:, :21])
    refused(RuntimeError, "reset", gemma2, ids[:, 21:22], attention_mask=mask[:, :22], past_key_values=cache)
    refused(RuntimeError, "reset", gemma2, ids[:, 20:21], attention_mask=mask[:, :21], past_key_values=cache)
    for call in (
        lambda: cache.crop(-1),
        lambda: cache.crop(0),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0])),
    ):
        with pytest.raises(RuntimeError, match="reset"):
            call()
    again = pickle.loads(pickle.dumps(cache))
    assert again.cache_positions.failed
    refused(RuntimeError, "reset", gemma2, ids[:, 20:21], attention_mask=mask[:, :21], past_key_values=again)
    cache.reset()
    expected = logits(gemma2, QuantizedCache(gemma2.config, "int8"), ids, mask, [0, 25])
    assert torch.equal(logits(gemma2, cache, ids, mask, [0, 25]), expected)


def test_a_pass_that_leaves_a_layer_out_is_refused_in_the_next(gemma2):
    ids, mask = prompts([12])
    cache = QuantizedCache(gemma2.config, "int8")
    layers = gemma2.model.layers
    gemma2.config.num_hidden_layers, gemma2.model.layers = 1, layers[:1]
    try:
        logits(gemma2, cache, ids, mask, [0])
    finally:
        gemma2.config.num_hidden_layers, gemma2.model.layers = 2, layers
    refused(RuntimeError, "skipped layers", gemma2, ids[:, :1], past_key_values=cache)


# ---- copies


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("fmt", ["none", "int4", ["int8/tq4", "k4v2"]])
def test_a_copy_goes_on_like_the_cache_and_without_it(gemma2, fmt, duplicate):
    """A prompt read once, then continued in two ways."""
    ids, mask = prompts([40, 29])
    positions = (mask.cumsum(-1) - 1).clamp_min(0).repeat_interleave(2, 0)

    def begun():
        cache = QuantizedCache(gemma2.config, fmt)
        logits(gemma2, cache, ids[:, :30], mask[:, :30], [0])
        cache.batch_repeat_interleave(2)  # pages that are shared when the copy is made
        return cache

    @torch.no_grad()
    def go_on(cache, tail):
        options = {"attention_mask": mask.repeat_interleave(2, 0), "position_ids": positions[:, 30:], "past_key_values": cache}
        return gemma2(tail.repeat_interleave(2, 0)[:, 30:], **options).logits

    cache = begun()
    again = duplicate(cache)
    assert state(again) == state(cache) and again.specs == cache.specs and again.nbytes == cache.nbytes
    other = go_on(again, ids.roll(7, 1))
    expected = go_on(begun(), ids)
    assert torch.equal(go_on(cache, ids), expected) and not torch.allclose(other, expected, rtol=0.01)
    assert torch.equal(other, go_on(begun(), ids.roll(7, 1)))


# ---- a real model


@pytest.fixture(scope="module")
def smollm2():
    models = pytest.importorskip("quantkv.cli.models")
    try:
        models.packaged_gguf()
    except (ImportError, OSError, ValueError) as error:
        pytest.skip(f"SmolLM2 is not installed: {error}")
    loaded = models.load()
    return loaded.model, loaded.tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("batch, options", [(1, {}), (4, {}), (1, {"num_beams": 2})])
def test_a_real_model_generates_the_same_tokens(smollm2, batch, options):
    """32 greedy tokens over format none and over DynamicCache: alone, in a left-padded batch, with beams."""
    model, tokenizer = smollm2
    texts = [
        "The capital of France is",
        "Once upon a time, in a small village by the sea, there lived",
        "def fibonacci(n):",
        "Water boils at",
    ][:batch]
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    results = []
    for attention, make in (("sdpa", lambda: DynamicCache(config=model.config)), ("quantkv", lambda: QuantizedCache(model.config, "none"))):
        model.set_attn_implementation(attention)
        results.append(
            model.generate(
                **inputs,
                past_key_values=make(),
                max_new_tokens=32,
                min_new_tokens=32,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                **options,
            )
        )
    assert torch.equal(*results)
