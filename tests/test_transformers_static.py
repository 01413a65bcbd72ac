"""A cache of fixed size: passes of one token that the host takes no part in, compiled, captured, and eager, against `DynamicCache`."""

import copy
import gc

import pytest
import torch
from packaging.version import Version

transformers = pytest.importorskip("transformers")

from transformers import CompileConfig, DynamicCache  # noqa: E402

from quantkv.engine import cache_positions, decode_metadata  # noqa: E402
from quantkv.integrations.transformers import QuantizedCache, captured, layers, use_cuda_graphs, use_quantkv_attention  # noqa: E402
from test_transformers import logits, prompts, tiny  # noqa: E402

BATCHES = {"alone": [24], "padded": [24, 17, 9, 3]}
NEW = 24


def generate(model, lengths, cache, **options):
    ids, mask = prompts(lengths)
    fixed = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **fixed, **options)


def expected(model, lengths, **options):
    """Tokens over DynamicCache; leaves the model with quantkv's attention."""
    model.set_attn_implementation("eager")
    tokens = generate(model, lengths, DynamicCache(config=model.config), **options)
    use_quantkv_attention(model)
    return tokens


def compilation(backend="aot_eager", **options):
    config = CompileConfig(backend=backend, mode=None, **options)
    config._compile_all_devices = True
    return config


@pytest.fixture
def stats():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_generate_compiles_once_into_one_graph(name, lengths, stats):
    """No graph break, no compilation for another token, another cache, another format or another size; the same tokens."""
    model = tiny(name)
    tokens = expected(model, lengths)
    for fmt, size in (("none", 64), ("none", 64), ("int8", 96)):
        cache = QuantizedCache(model.config, fmt, num_tokens=size)
        got = generate(model, lengths, cache, compile_config=compilation(fullgraph=True))
        assert fmt != "none" or torch.equal(got, tokens)
        assert stats["unique_graphs"] == 1
        assert int(cache.get_seq_length()) == 24 + NEW - 1
        cache.crop(0)  # learns from the device what passed it by
        assert cache.cache_positions.padding == [24 - n for n in lengths] and cache.get_seq_length() == 24 + NEW - 1
        del cache
        gc.collect()


@pytest.mark.parametrize("size", [0, 64, 30])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_eager_passes_over_a_fixed_size_and_beyond(lengths, options, size):
    model = tiny("gemma2")
    tokens = expected(model, lengths, **options)
    cache = QuantizedCache(model.config, "none", num_tokens=size)
    assert cache.is_compileable == (size > 0)
    assert torch.equal(generate(model, lengths, cache, disable_compile=True, **options), tokens)
    assert cache.is_compileable == (size == 64)


class Replay:
    """A CUDA graph's stand-in: a replay calls the model as it is called while it is captured."""

    capturing = False

    def __init__(self, call):
        self.call, self.output = call, None

    def replay(self):
        Replay.capturing = True
        try:
            output = self.call()
        finally:
            Replay.capturing = False
        if self.output is not None:
            self.output.logits.copy_(output.logits)
        else:
            self.output = output


@pytest.fixture
def graphs(monkeypatch):
    """Captures on a CPU; how often."""
    made = []

    def stand_in(call):
        graph = Replay(call)
        made.append(graph)
        before = {id(d): (d, copy.deepcopy(d.state), d.valid.clone()) for d in decodings}
        counters = [(c, c.clone()) for c in counted]
        graph.replay()
        for d, state, valid in before.values():
            d.state.copy_(state), d.valid.copy_(valid)
        for counter, value in counters:
            counter.copy_(value)
        return graph, graph.output

    decodings, counted = decode_metadata._MADE, []
    original = cache_positions.CachePositions._load

    def load(self):
        original(self)
        if self.counter is not None and not any(self.counter is c for c in counted):
            counted.append(self.counter)

    monkeypatch.setattr(cache_positions.CachePositions, "_load", load)
    monkeypatch.setattr(captured, "captured", stand_in)
    for module in (cache_positions, layers):
        monkeypatch.setattr(module, "is_capturing", lambda: Replay.capturing or torch.compiler.is_compiling())
    return made


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_captured_pass_is_replayed(name, lengths, graphs):
    model = tiny(name)
    tokens = expected(model, lengths)
    use_cuda_graphs(model)
    for _ in range(2):
        cache = QuantizedCache(model.config, "none", num_tokens=64)
        assert torch.equal(generate(model, lengths, cache, compile_config=compilation()), tokens)
        cache.crop(0)
        assert cache.get_seq_length() == 24 + NEW - 1
    assert len(graphs) == 2  # one for each cache


@torch.no_grad()
def test_pages_change_under_a_graph(graphs):
    """Beams part and join between replays."""
    model = tiny("gemma2", attn_implementation="eager")
    results = []
    for attention in ("eager", "quantkv"):
        model.set_attn_implementation(attention)
        quantized = attention == "quantkv"
        cache = QuantizedCache(model.config, "none", num_tokens=64) if quantized else DynamicCache(config=model.config)
        call = use_cuda_graphs(model).get_compiled_call(None) if quantized else model
        generator = torch.Generator().manual_seed(0)
        ids, outs = torch.randint(1, 128, (4, 21), generator=generator), []
        model(ids, past_key_values=cache)
        for i in range(21, 60):
            cache.reorder_cache(torch.randint(0, 4, (4,), generator=generator))
            ids = torch.randint(1, 128, (4, 1), generator=generator)
            out = call(input_ids=ids, position_ids=torch.full((4, 1), i), past_key_values=cache)
            outs.append(out.logits.clone())
        results.append(torch.stack(outs))
    assert len(graphs) == 1
    assert (results[0] - results[1]).abs().max() <= 1e-5 * results[0].abs().max()


def test_more_tokens_than_their_bound(stats, graphs):
    """Passes go on with the host's help, and give the same tokens; how they ran is not to be seen in them."""
    model = tiny("llama")
    tokens = expected(model, [24, 17])
    for capture in (False, True):
        if capture:
            use_cuda_graphs(model)
        cache = QuantizedCache(model.config, "none", num_tokens=30)
        assert torch.equal(generate(model, [24, 17], cache, compile_config=compilation("eager")), tokens)
        assert not cache.is_compileable and len(graphs) == capture


@pytest.mark.parametrize("fault", ["full", "mask"])
@torch.no_grad()
def test_what_the_host_does_not_see_is_never_a_wrong_answer(stats, fault):
    """A mask that changed, or no room: not a number for that sequence alone, and an error as soon as the host asks."""
    model = use_quantkv_attention(tiny("llama"))
    step = torch.compile(model, backend="eager", fullgraph=True)
    ids, mask = prompts([31, 17])
    cache = QuantizedCache(model.config, "none", num_tokens=32 if fault == "full" else 64)
    logits(model, cache, ids, mask, [0])

    def call(mask):
        positions = (mask.sum(1) - 1)[:, None]
        out = step(ids[:, :1], attention_mask=mask, position_ids=positions, past_key_values=cache).logits
        return out.isnan().flatten(1).any(1).tolist()

    ones = torch.ones(2, 1, dtype=torch.long)
    first, second = (torch.cat([mask, ones.expand(2, n)], 1) for n in (1, 2))
    assert call(first) == [False, False]
    if fault == "full":
        assert call(second) == [True, False]
    else:
        second[1, 20] = 0  # a token that is stored
        assert call(second) == [False, True]
    with pytest.raises(RuntimeError, match="must be reset"):
        cache.crop(-1)
    cache.reset()
    assert cache.get_seq_length() == 0


@torch.no_grad()
def test_any_pass_compiles(stats):
    """A prompt in chunks and single tokens, pages that are added as needed: one operator a layer, without a graph break."""
    model = use_quantkv_attention(tiny("gemma2"))
    ids, mask = prompts([40, 29])
    plain = logits(model, QuantizedCache(model.config, "int8"), ids, mask, [0, 24, *range(32, 40)])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(logits(compiled, QuantizedCache(model.config, "int8"), ids, mask, [0, 24, *range(32, 40)]), plain)


@torch.no_grad()
def test_another_attention_is_refused_while_it_is_traced(stats):
    model = tiny("llama", attn_implementation="sdpa")
    ids, _ = prompts([9])
    # torch 2.11 leaves the trace for the mask of sdpa, which is to be of UNKNOWN keys: it fails, and does not fill the memory
    of_torch = "|inconsistent with step sign" if Version(torch.__version__) < Version("2.12") else ""
    with pytest.raises(Exception, match="use_quantkv_attention|fake tensor" + of_torch):
        torch.compile(model, backend="eager")(ids, past_key_values=QuantizedCache(model.config))
    layers.HANDED.layer = None
