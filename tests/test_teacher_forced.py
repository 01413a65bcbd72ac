"""A teacher-forced pass against real pages, token by token: the same rows, and attention over them to the rounding of float32."""

import importlib
import math
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from direct import attend_segments  # noqa: E402
from full_precision_engine import Engine  # noqa: E402
from quantkv import PagedCache, get_format  # noqa: E402
from quantkv.calls import AttentionOptions  # noqa: E402
from quantkv.cli.policies import full_precision_share  # noqa: E402
from quantkv.engine.fake_quantized import attend, fake_quantized, full_precision_from  # noqa: E402
from quantkv.full_precision import FullPrecisionTokens  # noqa: E402
from quantkv.geometry import Kind  # noqa: E402
from quantkv.integrations.transformers import QuantizedCache, use_quantkv_attention  # noqa: E402
from quantkv.maps import LayerMaps, LinearMap  # noqa: E402
from quantkv.model_analysis.teacher_forced import FakeQuantizedCache, teacher_forced  # noqa: E402
from quantkv.policy import Policy  # noqa: E402
from test_transformers import logits, prompts, tiny  # noqa: E402

HQ, HK, D, N = 4, 2, 64, 75
module = importlib.import_module("quantkv.model_analysis.teacher_forced")


def rows(seed=0, heads=HK, count=N):
    return torch.randn(heads, count, D, generator=torch.Generator().manual_seed(seed))


def a_map(seed, key_mean=False, hessian=False):
    """A map that is no Hadamard matrix, another for each head."""
    generator = torch.Generator().manual_seed(seed)
    forward = torch.linalg.qr(torch.randn(HK, D, D, generator=generator, dtype=torch.float64)).Q * 1.5
    table = torch.randn(2, HK, D, generator=generator) if key_mean else None
    spread = torch.randn(HK, D, D, generator=generator) if hessian else None
    weights = None if spread is None else spread @ spread.mT / D + torch.eye(D)
    return LinearMap(forward.float(), torch.linalg.inv(forward).float(), table, weights)


def pages(fmt, key, value, maps=None):
    """A cache that was written one token after the other, and its block table."""
    spec = get_format(fmt, torch.float32).cache_spec(HK, D)
    cache = PagedCache(spec, -(-N // 16), "cpu", maps=maps)
    for i in range(N):
        at = torch.tensor([i])
        cache.write(key[:, i][None], value[:, i][None], at, at)
    return cache, torch.arange(cache.num_blocks)[None]


MAPS = LayerMaps(a_map(1, key_mean=True), a_map(2))
METRICS = LayerMaps(a_map(1, key_mean=True, hessian=True), a_map(2, hessian=True))
STORED = [("int4", None), ("int8/int2", None), ("tq3", None), ("fp8", None), ("none", None), ("int4", MAPS), ("levels3", MAPS)]
STORED += [("levels4/levels2", METRICS), ("levels2", None)]


@pytest.mark.parametrize("fmt, maps", STORED)
def test_rows_are_those_of_pages(fmt, maps):
    key, value = rows(1), rows(2)
    key[:, 5] *= 0.01  # a key that a signed codec stores without the key mean
    cache, _ = pages(fmt, key, value, maps)
    stored = [
        fake_quantized(t, codec, m) for t, codec, m in zip((key, value), (cache.format.k, cache.format.v), (cache.maps.k, cache.maps.v))
    ]
    at = torch.arange(N)
    for found, expected in zip(stored, cache.dequantize(at, at)):
        assert torch.equal(found, expected.transpose(0, 1))


def by_segments(query, cache, table, exact_cache, exact, kind, options):
    """Query by query over first | quantized | latest, as segments of one call each: [N, HQ, D]."""
    outs = []
    for p in range(N):
        length = p + 1
        first, start = 0, length
        if exact is not None:
            first = min(exact.sink, length)
            start = max((length - exact.recent) // 16 * 16, 0) if exact.recent else length
        start = max(start, first)
        parts = ((exact_cache, 0, first), (cache, first, start), (exact_cache, start, length))
        ranged = [
            c.segment(table, key_range=torch.tensor([[low, high]]))._replace(maps=LayerMaps(c.maps.k, cache.maps.v))
            for c, low, high in parts
            if low < high
        ]
        lens, starts = torch.tensor([length]), torch.tensor([0, 1])
        outs.append(attend_segments(query[:, p][None], ranged, seq_lens=lens, cu_seqlens_q=starts, scale=0.2, options=options)[0])
    return torch.cat(outs)


EXACT = [
    None,
    FullPrecisionTokens(16, 24),
    FullPrecisionTokens(16, 0),
    FullPrecisionTokens(0, 24),
    FullPrecisionTokens(0, 1),
    FullPrecisionTokens(32, 33),
    FullPrecisionTokens(0, 200),
]


@pytest.mark.parametrize("exact", EXACT, ids=str)
@pytest.mark.parametrize(
    "kind, softcap, sinks", [(Kind(), 0, False), (Kind(20), 0, True), (Kind(20, True), 0, False), (Kind(), 3.0, False)]
)
def test_attention_is_that_of_each_decoding_step(monkeypatch, exact, kind, softcap, sinks):
    monkeypatch.setattr("quantkv.engine.fake_quantized.QUERIES_AT_ONCE", 32)
    query, key, value = rows(0, HQ), rows(1), rows(2)
    cache, table = pages("int4", key, value, LayerMaps(a_map(1, key_mean=True)))
    exact_cache, _ = pages("none", key, value, LayerMaps(None, cache.maps.v))  # segments share the map of their values
    stored = tuple(t.transpose(0, 1) for t in cache.dequantize(torch.arange(N), torch.arange(N)))
    sink = torch.linspace(-1, 1, HQ) if sinks else None
    found = attend(query, key, value, stored, 0.2, exact, kind, softcap, sink)
    options = AttentionOptions(**kind.options, softcap=softcap, sinks=sink)
    expected = by_segments(query, cache, table, exact_cache, exact, kind, options)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    if exact is not None and exact.recent == 200:  # everything is exact
        torch.testing.assert_close(found, attend(query, key, value, (key, value), 0.2, None, kind, softcap, sink), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "latest, length, start", [(24, 1, 0), (24, 24, 0), (24, 39, 0), (24, 40, 16), (24, 1000, 976), (1, 16, 0), (1, 17, 16)]
)
def test_full_precision_tokens_begin_with_a_page(latest, length, start):
    assert full_precision_from(torch.tensor([length - 1]), latest).tolist() == [start]


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_what_follows_a_prompt_is_answered_as_a_cache_answers(name):
    """The prompt in one pass through a QuantizedCache, and then token by token."""
    model = use_quantkv_attention(tiny(name))
    ids, mask = prompts([60])
    plain = logits(model, None, ids, mask, [0])
    for exact, prompt in ((None, 37), (FullPrecisionTokens(16, 8), 37), (None, 1), (None, 60)):
        policy = Policy("int4", full_precision=exact)
        stepped = logits(model, QuantizedCache(model.config, policy, dtype=torch.float32), ids, mask, [0, *range(prompt, 60)])
        with torch.no_grad():
            with teacher_forced(model, policy, prompt):
                once = model(ids, use_cache=False).logits
            with teacher_forced(model, replace(policy, prompt="stored"), prompt):
                stored = model(ids, use_cache=False).logits
        lost = (stepped - plain).norm()
        assert (once - stepped).norm() <= 0.02 * lost + 1e-5 * plain.norm()
        if prompt > 1:
            torch.testing.assert_close(once[:, :prompt], plain[:, :prompt], rtol=0, atol=1e-4 * float(plain.abs().max()))
            assert exact is not None or (stored - plain).norm() > 1.2 * lost


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_prompts_have_the_scores_that_a_policy_asks_for(name):
    """In both ways, over rows that lose nothing; without own rows only through a cache."""
    model = use_quantkv_attention(tiny(name))
    ids, mask = prompts([170])
    plain, policy = logits(model, None, ids, mask, [0]), Policy("none", prompt_precision="8bit")
    stepped = logits(model, QuantizedCache(model.config, policy, dtype=torch.float32), ids, mask, [0, *range(150, 170)])
    with torch.no_grad(), teacher_forced(model, policy, 150):
        once = model(ids, use_cache=False).logits
    assert (once - stepped).norm() <= 0.02 * (stepped - plain).norm() and (stepped - plain).norm() >= 1e-4 * plain.norm()
    stored = replace(policy, prompt="stored")
    with teacher_forced(model, stored, 127):
        pass
    with (
        pytest.raises(ValueError, match=r"policy\.prompt_precision=8bit: with policy\.prompt='stored'"),
        teacher_forced(model, stored, 128),
    ):
        pass


@pytest.mark.parametrize("exact", [None, FullPrecisionTokens(16, 8)], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "gemma2", "gpt_oss", "llama4"])
def test_models_read_as_they_decode(name, exact):
    """Through a QuantizedCache token by token. Once a layer's rows are off by a rounding, a later layer may round a code the other way:
    the two differ by far less than the format does from 16 bits, and not at all where nothing is rounded."""
    model = use_quantkv_attention(tiny(name))
    ids, mask = prompts([60])
    plain = logits(model, None, ids, mask, [0])
    for fmt, bound in (("none", 1e-5), ("int8", 0.02), ("int4", 0.02)):
        policy = Policy(fmt, full_precision=exact)
        stepped = logits(model, QuantizedCache(model.config, policy, dtype=torch.float32), ids, mask, list(range(60)))
        with teacher_forced(model, policy), torch.no_grad():
            once = model(ids, use_cache=False).logits
        scale = plain.norm() if fmt == "none" else (stepped - plain).norm()
        assert (once - stepped).norm() <= bound * scale, fmt


@pytest.mark.parametrize("exact", [FullPrecisionTokens(10, 8), FullPrecisionTokens(17)], ids=str)
def test_first_tokens_are_whole_pages_as_in_a_cache(exact):
    """One layer, so that no rounding is carried on: what is left is the order of float32 sums."""
    model = use_quantkv_attention(tiny("llama", num_hidden_layers=1))
    ids, mask = prompts([40])
    policy = Policy("int2", full_precision=exact)
    stepped = logits(model, QuantizedCache(model.config, policy), ids, mask, list(range(40)))
    with teacher_forced(model, policy), torch.no_grad():
        once = model(ids, use_cache=False).logits
    assert (once - stepped).norm() <= 1e-5 * stepped.norm()


@pytest.mark.parametrize(
    "exact", [FullPrecisionTokens(10, 8), FullPrecisionTokens(17), FullPrecisionTokens(0, 24), FullPrecisionTokens(16, 1)], ids=str
)
def test_the_share_of_full_precision_tokens_is_that_of_a_cache(exact):
    """Tokens that a cache reads exactly, counted at each length over which the latest page can end."""
    engine = Engine(first=exact.sink, latest=exact.recent, seqs=1)
    engine.step([99])
    counts = [len(engine.step([1])[0]) for _ in range(16)]  # of 100 to 115 tokens
    assert full_precision_share(exact, 100) == pytest.approx(sum(counts) / len(counts) / 100)
    assert full_precision_share(exact, 12) == 1.0  # whole pages, and no more than there are
    assert full_precision_share(exact, 100, sliding=True) == pytest.approx(
        full_precision_share(exact, 100) - -(-exact.sink // 16) * 16 / 100
    )


def test_full_precision_tokens_of_a_model():
    """With as many latest tokens as there are, nothing is lost; where a layer has a window, first tokens change nothing."""
    for name, first_matters in (("llama", True), ("mistral", False)):
        model = tiny(name)
        ids, _ = prompts([45])

        def once(exact, model=model, ids=ids):
            with teacher_forced(model, Policy("int2", full_precision=exact)), torch.no_grad():
                return model(ids, use_cache=False).logits

        with torch.no_grad():
            exact = model(ids, use_cache=False).logits
        assert (once(FullPrecisionTokens(recent=45)) - exact).norm() <= 1e-5 * exact.norm()
        plain, first = once(None), once(FullPrecisionTokens(sink=16))
        assert torch.equal(plain, first) is not first_matters
        assert not math.isclose((once(FullPrecisionTokens(recent=16)) - exact).norm(), (plain - exact).norm(), rel_tol=0.05)


def test_the_models_attention_comes_back():
    model = tiny("llama")
    own = model.config._attn_implementation
    ids, _ = prompts([8])
    with teacher_forced(model, Policy("int4")) as fake, torch.no_grad():
        model(ids, use_cache=False)
    assert model.config._attn_implementation == own
    assert sorted(fake.specs) == [0, 1] and fake.specs[0].format == "int4"


def test_what_a_teacher_forced_pass_cannot_do_is_refused():
    model = tiny("llama")
    ids, mask = prompts([8, 5])
    with teacher_forced(model, Policy("int4")), torch.no_grad():
        with pytest.raises(NotImplementedError, match="padding"):
            model(ids, attention_mask=mask, use_cache=False)
        cache = transformers.DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="past_key_values=8 tokens"):
            model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match=r"policy\.layers=\[2\]"):
        FakeQuantizedCache(model.config, Policy("int4", {2: "int8"}))
    with (
        pytest.raises(ValueError, match=r"maps\.k"),
        teacher_forced(model, Policy("int4", maps={0: LayerMaps(LinearMap(torch.eye(32)[None], torch.eye(32)[None]))})),
    ):
        model(ids, use_cache=False)
    mamba = transformers.FalconH1Config(num_hidden_layers=2)
    with pytest.raises(NotImplementedError, match="through a QuantizedCache only"):
        FakeQuantizedCache(mamba, Policy("int4"))


def test_after_a_block_nothing_attends_for_it():
    model = use_quantkv_attention(tiny("llama"))
    with teacher_forced(model, Policy("int4")):
        assert module._attention.get(None) is not None
    assert module._attention.get(None) is None and model.config._attn_implementation == "quantkv"
