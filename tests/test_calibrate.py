"""What one forward pass measures, against plain loops over what a model's own code does."""

import importlib
import inspect
import logging

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache  # noqa: E402

from architectures import ARCHITECTURES, before  # noqa: E402
from quantkv.geometry import Geometry, Heads  # noqa: E402
from quantkv.integrations.transformers import QuantizedCache, calibrate, use_quantkv_attention  # noqa: E402
from quantkv.integrations.transformers_model import geometry_of  # noqa: E402
from quantkv.model_analysis.rotation import Layout, Table  # noqa: E402
from quantkv.policy import Policy  # noqa: E402
from test_transformers import tiny  # noqa: E402

MODULE = importlib.import_module("quantkv.model_analysis.calibrate")
SKIPPED, BUCKET = MODULE.SKIPPED, MODULE.KEY_MEAN_BUCKET
LIMIT = 2 * BUCKET
FAMILIES = {  # each for another way to turn
    "Llama": {},
    "Ministral 3": {},  # YaRN: cosines and sines with a factor
    "Llama 4": {},  # complex numbers of neighbours; a layer that does not turn
    "Gemma 3": {},  # one rotation of sliding layers, one of full ones
    "Gemma 4, shared keys": {},  # layers that read keys of others; head sizes that differ
    "Phi": {"partial_rotary_factor": 0.5},
    "GPT-NeoX": {"rotary_pct": 0.25},
    "GLM": {"partial_rotary_factor": 0.5},  # neighbours, of half of the dimensions
    "Cohere": {},
    "GPT-OSS": {},  # half as many cosines as dimensions
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "RecurrentGemma": {},  # turns inside its attention
    "Qwen2-VL": {},  # three axes
}


def build(name, **changes):
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    return architecture._replace(sizes={**architecture.sizes, **changes}).build()


def contexts(count=4, tokens=80):
    return torch.randint(2, 90, (count, tokens), generator=torch.Generator().manual_seed(0))


def without_attention(model):
    """The same, what attention and recurrences say left out: then the input of no layer depends on positions."""
    with torch.no_grad():
        for name, part in model.named_modules():
            if set(name.split(".")) & {*MODULE.PROJECTIONS, "linear_out"} and hasattr(part, "weight"):
                part.weight.zero_()
    return model


class Recorder(DynamicCache):
    """Keeps the keys of one forward pass, by layer."""

    def update(self, key, value, layer_idx, *args, **kwargs):
        self.keys[layer_idx] = key
        return key, value


@torch.no_grad()
def record(model, ids, position):
    """Keys `[B, HK, N, D]` by layer, and for each the queries `[B, HQ, N, D]` that read them. position: of all tokens; None: from 0 on."""
    cache, queries = Recorder(config=model.config.get_text_config()), {}
    cache.keys = {}

    def attention(module, query, key, value, mask, **kwargs):
        number = next(n for n, known in cache.keys.items() if known is key)
        queries.setdefault(number, []).append(query)
        return MODULE.plain_attention(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("recorded", attention)
    AttentionMaskInterface.register("recorded", MODULE.sdpa_mask)
    decoder = MODULE.decoder_of(model)
    own = decoder.config._attn_implementation
    decoder.set_attn_implementation({"": "recorded"})
    positions = {} if position is None else {"position_ids": torch.full_like(ids, position)}
    model(ids, past_key_values=cache, **positions)
    decoder.set_attn_implementation({"": own})
    return cache.keys, queries


def said(caplog):
    """Of what was logged, what is ours."""
    return [record.message for record in caplog.records if record.name.startswith("quantkv")]


def second_moments(queries, heads):
    """`[HK, D, D]` over the tokens that count, one outer product after the other."""
    total, count = 0.0, 0
    for query in queries:
        for group in query[:, :, SKIPPED:].double().unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 3).transpose(0, 1).split(4096):
            total, count = total + torch.einsum("thd,the->hde", group, group), count + len(group)
    return total / count


@pytest.mark.parametrize("name", FAMILIES)
def test_against_the_models_own_rotation(name, caplog):
    """Every token at every position, turned by the model's own code, one forward pass a position."""
    model, ids = without_attention(build(name, **FAMILIES[name])), contexts()
    if name == "RecurrentGemma" and before("5.23"):
        with pytest.raises(NotImplementedError, match="of this transformers keeps states in the model itself"):
            calibrate(model, ids, limit=LIMIT)
        return
    made = calibrate(model, ids, limit=LIMIT)
    assert not said(caplog)
    made.check(geometry_of(model.config))
    means, moments, squares = {n: [] for n in made.layers}, dict.fromkeys(made.layers, 0.0), dict.fromkeys(made.layers, 0.0)
    for position in range(LIMIT):
        keys, queries = record(model, ids, position)
        for number, key in keys.items():
            means[number].append(key[:, :, SKIPPED:].double().mean((0, 2)))
            squares[number] = squares[number] + key[:, :, SKIPPED:].double().square().mean((0, 2)) / LIMIT
            moments[number] = moments[number] + second_moments(queries[number], key.shape[1]) / LIMIT
    turned = 0
    for number, layer in made.layers.items():
        key_mean = layer.key_mean.double()
        brute = torch.stack([torch.stack(part).mean(0) for part in (means[number][:BUCKET], means[number][BUCKET:])])
        if len(key_mean) == 1:
            assert torch.equal(means[number][0], means[number][-1])  # it does not turn
        turned += len(key_mean) > 1
        assert (key_mean - brute).norm() <= 1e-3 * brute.norm()  # of half precision
        assert (layer.key_hessian.double() - moments[number]).norm() <= 1e-4 * moments[number].norm()
        spread = squares[number] - torch.stack([part for part in brute for _ in range(BUCKET)])[:LIMIT].square().mean(0)
        assert (layer.key_spread - spread).norm() <= 1e-3 * spread.norm()
    assert turned >= 1 and len(made.layers) == len(keys)


def test_positions_are_all_the_same():
    """What is seen elsewhere is turned to the same places; how contexts are batched changes nothing."""
    model, ids = without_attention(build("Llama")), contexts()
    made = calibrate(model, ids, limit=LIMIT)
    elsewhere = calibrate(model, ids, torch.randint(0, 200, ids.shape, generator=torch.Generator().manual_seed(1)), limit=LIMIT)
    for number, layer in made.layers.items():
        for part, t in layer.tensors().items():
            other = elsewhere.layers[number].tensors()[part]
            assert (t.float() - other.float()).norm() <= 1e-3 * t.float().norm(), part


def test_batches(monkeypatch):
    model, ids, steps = build("Gemma 3"), contexts(), []
    made = calibrate(model, ids, limit=LIMIT)
    monkeypatch.setattr(MODULE, "TOKENS_AT_ONCE", 80)
    one_by_one = calibrate(model, ids, limit=LIMIT, on_step=lambda *step: steps.append(step))
    assert steps == [(i, 4) for i in range(5)]
    for number, layer in made.layers.items():
        for part, t in layer.tensors().items():
            assert torch.allclose(t.float(), one_by_one.layers[number].tensors()[part].float(), atol=2e-3 * float(t.abs().max())), part


def test_without_rotation():
    """Learned positions: the mean key, and the queries' moments as they are."""
    model, ids = build("GPT-2"), contexts()
    made = calibrate(model, ids)
    keys, queries = record(model, ids, None)
    for number, layer in made.layers.items():
        assert torch.allclose(layer.key_mean[0].float(), keys[number][:, :, SKIPPED:].mean((0, 2)), atol=1e-2)
        assert torch.allclose(layer.key_hessian.double(), second_moments(queries[number], 4), rtol=1e-4, atol=1e-4)
    assert made.positions == BUCKET  # one bucket, for all


PROJECTIONS = {
    "Llama": lambda model, i: model.model.layers[i].self_attn.o_proj.weight,
    "Phi": lambda model, i: model.model.layers[i].self_attn.dense.weight,
    "OPT": lambda model, i: model.model.decoder.layers[i].self_attn.out_proj.weight,
    "GPT-2": lambda model, i: model.transformer.h[i].attn.c_proj.weight.mT,
    "GPT-NeoX": lambda model, i: model.gpt_neox.layers[i].attention.dense.weight,
    "LFM2": lambda model, i: model.model.layers[i].self_attn.out_proj.weight,
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_metric_of_values_is_what_an_error_does_behind_the_projection(name):
    model = build(name)
    made = calibrate(model, contexts(), limit=BUCKET)
    for number, layer in made.layers.items():
        weight = PROJECTIONS[name](model, number).detach().double()  # [hidden, HQ D]
        heads, size, _ = layer.heads.num_kv_heads, layer.heads.head_size_v, None
        group = weight.shape[1] // (heads * size)
        error = torch.randn(heads, size, dtype=torch.float64)
        for head in range(heads):
            read_by = range(head * group, (head + 1) * group)
            cost = sum((weight[:, q * size : (q + 1) * size] @ error[head]).square().sum() for q in read_by)
            assert torch.allclose(error[head] @ layer.value_hessian[head].double() @ error[head], cost, rtol=1e-5)


def norm_after_rotation():
    """With weights of its own: no rotation of keys gives what is stored."""
    model = build("Hunyuan")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_layernorm.weight") and "self_attn" in name:
                parameter.uniform_(0.5, 2)
    return model


def angles_from_nowhere():
    """No module that is known to give angles gave these, so those of other positions are not known."""
    model = build("Llama")
    rotary = model.model.rotary_emb
    rotary.__class__ = type("Angles", (torch.nn.Module,), {"forward": type(rotary).forward})
    return model


@pytest.mark.parametrize("make", [norm_after_rotation, angles_from_nowhere])
def test_what_is_not_understood_gets_no_offset(make, caplog):
    model, ids = make(), contexts()
    with caplog.at_level(logging.WARNING):
        made = calibrate(model, ids)
    assert [message.split(":")[1] for message in said(caplog)] == [" layer 0", " layer 1"]
    _, queries = record(model, ids, None)
    for number, layer in made.layers.items():
        assert layer.key_mean is None
        assert torch.allclose(layer.key_hessian.double(), second_moments(queries[number], 2), rtol=1e-4, atol=1e-4)
    assert made.positions == 0 and Policy("levels4", calibration=made).maps_of(0).k.key_mean is None


def test_layouts_are_told_apart():
    angle = torch.rand(9, 8)
    table = Table(1.3 * angle.cos(), 1.3 * angle.sin())
    rows = torch.randn(2, 3, 9, 24)
    known = [Layout(pairs, place, backwards) for pairs in ("halves", "neighbours") for place in ("first", "last") for backwards in (0, 1)]
    for layout in known:
        turn = layout.turn(table, 24)
        turned = turn.apply(rows)
        assert Layout.found(rows, turned, table, torch.float32) == layout
        assert torch.allclose(turn.inverse().apply(turned), rows, atol=1e-6)
        still = turned[..., 16:] if layout.place == "first" else turned[..., :8]
        assert torch.equal(still, rows[..., 16:] if layout.place == "first" else rows[..., :8])
    assert Layout.found(rows, rows.flip(-1), table, torch.float32) is None
    assert Layout.found(rows[..., :8], rows[..., :8], table, torch.float32) is None  # more angles than dimensions


def test_bfloat16(caplog):
    model, ids = build("Llama"), contexts()
    exact = calibrate(model, ids, limit=LIMIT)
    made = calibrate(model.bfloat16(), ids, limit=LIMIT)
    assert not said(caplog)
    for number, layer in made.layers.items():
        for part, t in layer.tensors().items():
            other = exact.layers[number].tensors()[part].float()
            assert (t.float() - other).norm() <= 0.05 * other.norm(), part


@pytest.mark.parametrize("attention", ["eager", "sdpa", "quantkv"])
def test_the_model_stays_as_it_was(attention):
    model, ids = build("Gemma 3"), contexts()
    model.train().set_attn_implementation(attention)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    rotary = model.model.rotary_emb.state_dict()
    before = model(ids[:1]).logits
    calibrate(model, ids)
    assert model.training and model.config._attn_implementation == attention and not MODULE.WATCHING
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert torch.equal(model(ids[:1]).logits, before) and all(
        torch.equal(t, rotary[n]) for n, t in model.model.rotary_emb.state_dict().items()
    )


@torch.no_grad()
def test_a_calibrated_cache_loses_less():
    """Keys with large biases, which is what a key mean is for."""
    model = use_quantkv_attention(tiny("qwen2"))
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias *= 4
    made = calibrate(model, contexts(8, 64), limit=LIMIT)
    ids = torch.randint(2, 90, (2, 100), generator=torch.Generator().manual_seed(7))
    exact = model(ids, past_key_values=QuantizedCache(model.config, "none")).logits
    lost = {}
    for name, policy in (("plain", "levels4"), ("calibrated", Policy("levels4", calibration=made))):
        cache = QuantizedCache(model.config, policy)
        chunks = [model(part, past_key_values=cache).logits for part in ids.split(37, 1)]
        lost[name] = float((torch.cat(chunks, 1) - exact).norm())
    assert lost["calibrated"] < 0.8 * lost["plain"], lost  # what is left is mostly of values


def test_another_models_calibration_is_refused():
    made = calibrate(build("Llama"), contexts(), limit=BUCKET)
    with pytest.raises(ValueError, match=r"made for 2 kv heads of 16 .* the model has 2 kv heads of 32"):
        QuantizedCache(build("Llama", head_dim=32).config, Policy("levels4", calibration=made))
    with pytest.raises(ValueError, match="made for 2 layers: the model has 3"):
        QuantizedCache(build("Llama", num_hidden_layers=3).config, Policy("levels4", calibration=made))
    with pytest.raises(NotImplementedError, match="latents"):
        QuantizedCache(build("DeepSeek V3").config, Policy("levels4", calibration=made))
    assert geometry_of(build("GPT-2").config) == Geometry(2, {0: Heads(4, 16, 16), 1: Heads(4, 16, 16)})
    assert geometry_of(build("Gemma 4").config).heads == {0: Heads(2, 16, 16), 1: Heads(2, 32, 32)}


REFUSED = {
    "few tokens": ("Llama", {"ids": contexts(3, 80)}, ValueError, "ids=240 tokens: at least 256"),
    "short contexts": ("Llama", {"ids": contexts(64, 8)}, ValueError, r"ids.shape\[1\]=8"),
    "one axis": ("Llama", {"ids": contexts().flatten()}, ValueError, "ids.shape"),
    "floats": ("Llama", {"ids": contexts().float()}, ValueError, "ids.dtype"),
    "positions of another shape": ("Llama", {"positions": torch.arange(80)}, ValueError, "positions.shape"),
    "no positions": ("Llama", {"limit": 0}, ValueError, "limit=0"),
    "latents": ("DeepSeek V3", {}, NotImplementedError, "DeepseekV3ForCausalLM keeps latents"),
    "no attention": ("Mamba", {}, NotImplementedError, "no attention layers|computes attention by itself"),
    "another attention": ("Bloom", {}, NotImplementedError, "BloomForCausalLM computes attention by itself"),
    "an encoder-decoder": ("T5", {}, NotImplementedError, "encoder-decoder"),
}


@pytest.mark.parametrize("name, changes, error, message", REFUSED.values(), ids=REFUSED)
def test_refusals(name, changes, error, message):
    with pytest.raises(error, match=message):
        calibrate(build(name), **{"ids": contexts(), **changes})


@pytest.mark.parametrize("shared", [False, True])
def test_a_pass_asks_for_one_logit_where_all_layers_still_see_all_tokens(shared, monkeypatch):
    """Models whose layers share keys leave the last ones out for tokens whose logits nobody asks for."""
    model, asked = use_quantkv_attention(tiny("llama")), []
    forward = type(model).forward

    def watched(self, *args, **kwargs):
        asked.append(kwargs.get("logits_to_keep", 0))
        return forward(self, *args, **kwargs)

    watched.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(type(model), "forward", watched)
    monkeypatch.setattr(MODULE, "shares_keys", lambda config: shared)
    calibrate(model, contexts(1, 256))
    assert set(asked) == {0 if shared else 1}
