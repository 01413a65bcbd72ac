"""Statistics without a file: what a cache measures by itself, when, and what it says where it cannot."""

import copy
import itertools
import logging
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from quantkv import get_format, weights  # noqa: E402
from quantkv.calibration import gains_from_key_mean  # noqa: E402
from quantkv.engine.observed import calibration_of, latent_moments  # noqa: E402
from quantkv.full_precision import FullPrecisionTokens  # noqa: E402
from quantkv.integrations.at_start import contexts, measured  # noqa: E402
from quantkv.integrations.transformers import QuantizedCache, calibrate, first_use, use_quantkv_attention  # noqa: E402
from quantkv.model_analysis import statistics  # noqa: E402
from quantkv.policy import Policy  # noqa: E402
from quantkv.policy_file import PRESETS  # noqa: E402
from test_transformers import tiny  # noqa: E402

IDS = torch.randint(1, 128, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path))
    monkeypatch.setattr(statistics, "_known", type(statistics._known)())
    yield tmp_path
    first_use._waiting.clear()


@pytest.fixture
def model():
    return use_quantkv_attention(tiny("qwen2"))


def run(model, cache, ids=IDS):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


@pytest.mark.parametrize("name", PRESETS)
def test_presets_measure_the_model_before_the_first_row(model, name, caplog):
    caplog.set_level(logging.INFO, "quantkv")
    cache = QuantizedCache(model.config, name)
    given = PRESETS[name]
    run(model, cache)
    assert "key means and Hessians of Qwen2ForCausalLM" in caplog.text and "no statistics" not in caplog.text
    made = statistics.statistics_of(model)
    policy = Policy(given["format"], calibration=made, full_precision=FullPrecisionTokens(**given["full_precision"]))
    expected = QuantizedCache(model.config, policy)
    run(model, expected)
    mean = gains_from_key_mean(get_format(given["format"]).k)
    for layer, other in zip(cache.quantized_layers.values(), expected.quantized_layers.values()):
        assert torch.equal(layer.pages.buffer, other.pages.buffer) and (layer.pages.maps.k.key_mean is not None) == mean
    assert Policy.given(name) == Policy.from_dict(given)


def test_the_default_is_4bit(model):
    cache = QuantizedCache(model.config)
    assert (cache._policy, cache.quantized_layers[0].requested) == (Policy.given("4bit"), "levels4")


def test_key_biases_cost_nothing(model):
    """What breaks plain 4-bit keys of such a model is no loss with nothing set up."""
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data *= 20
    exact = run(model, QuantizedCache(model.config, "none"))
    caches = {name: QuantizedCache(model.config, name, prompt="stored") for name in ("int4", "4bit", "8bit", "int8")}
    lost = {name: float((run(model, cache) - exact).norm()) for name, cache in caches.items()}
    assert lost["4bit"] < lost["int4"] / 4 and lost["8bit"] < lost["int8"] / 2, lost


@pytest.mark.parametrize("name, warned", [("int4", True), ("int8", True), ("levels4", True), ("none", False), ("4bit", False)])
def test_keys_that_are_stored_with_large_biases_are_worth_a_warning(model, name, warned, caplog):
    model.model.layers[1].self_attn.k_proj.bias.data[3] = -77.0
    cache = QuantizedCache(model.config, name)
    run(model, cache), run(model, cache), run(model, QuantizedCache(model.config, name))  # once for a model, whatever its caches
    assert caplog.text.count("the keys of Qwen2Attention have biases of up to 77") == warned
    assert ("'4bit'" in caplog.text) == warned


def test_one_pass_for_all_caches_of_a_model(model, monkeypatch):
    passes = []
    monkeypatch.setattr(statistics, "calibrate", lambda *args, **kwargs: passes.append(1) or calibrate(*args, **kwargs))
    for _ in range(3):
        run(model, QuantizedCache(model.config, "4bit"))
    assert len(passes) == 1
    assert not first_use._waiting and first_use._hook is None


def test_they_are_kept_by_the_weights(model, own_folder, monkeypatch):
    made = statistics.statistics_of(model)
    (file,) = (own_folder / "statistics").iterdir()
    statistics._known.clear()
    with monkeypatch.context() as patch:
        patch.setattr(statistics, "calibrate", lambda *args, **kwargs: pytest.fail("measured again"))
        assert statistics.statistics_of(tiny("qwen2")).digest == made.digest
    other = tiny("qwen2")
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight.neg_()
    assert statistics.statistics_of(other).digest != made.digest
    file.write_bytes(file.read_bytes()[:-8])  # damaged: measured again, and kept again
    statistics._known.clear()
    assert statistics.statistics_of(model).digest == made.digest
    statistics._known.clear()
    assert file.stat().st_size > 1000 and len(list((own_folder / "statistics").iterdir())) == 2


def test_what_is_kept_is_measured_again_where_it_is_of_another_model(model, caplog):
    """Of other heads, say. Where nothing is kept nothing is said."""
    caplog.set_level(logging.INFO, "quantkv")
    file = statistics._file(model)
    assert statistics._kept(None, model) is statistics._kept(file, model) is None and not caplog.records
    made = statistics.statistics_of(model)
    assert statistics._kept(file, model).digest == made.digest
    statistics._keep(calibration_of({0: latent_moments(torch.ones(4))}, 1, "text"), file)
    assert statistics._kept(file, model) is None and "measured again" in caplog.text


def test_the_pass_runs_in_full_precision_and_makes_no_inference_tensors(model, monkeypatch):
    """In whatever mode the model is called."""
    seen = []

    def calibrates(*args, **kwargs):
        seen.append((torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
        return calibrate(*args, **kwargs)

    monkeypatch.setattr(statistics, "calibrate", calibrates)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        statistics.statistics_of(model)
    assert seen == [(False, False)]


def test_the_folder_that_keeps_statistics_is_made(model, own_folder, monkeypatch):
    monkeypatch.setenv("QUANTKV_CACHE", str(own_folder / "new" / "cache"))
    statistics.statistics_of(model)
    assert len(list((own_folder / "new" / "cache" / "statistics").iterdir())) == 1


def test_a_folder_that_cannot_be_written_to_is_no_error(model, own_folder, caplog):
    caplog.set_level(logging.INFO, "quantkv")
    (own_folder / "statistics").write_text("no folder")
    made = statistics.statistics_of(model)
    assert caplog.text.count("is not kept") == 1 and statistics.statistics_of(model) is made


@pytest.mark.parametrize(("outer", "inner", "asked"), [("a", "b", "a"), ("", "b", "b"), ("a", "", "a")])
def test_the_tokenizer_is_that_of_the_model_or_of_its_text_part(outer, inner, asked, monkeypatch):
    given = []
    monkeypatch.setattr(statistics, "sample_tokens", lambda *of: given.append(of) or (torch.zeros(1, 512), "text"))
    monkeypatch.setattr(statistics, "max_positions", lambda config: 256)
    text = SimpleNamespace(name_or_path=inner, vocab_size=99)
    config = SimpleNamespace(name_or_path=outer, get_text_config=lambda decoder: text if decoder else None)
    ids, source = statistics._ids(SimpleNamespace(config=config, device=torch.device("cpu")))
    assert given == [(asked, 99, 512)] and ids.shape == (2, 256) and source == "text"


@pytest.mark.parametrize(("took", "level"), [(2.0, "INFO"), (2.25, "WARNING")])
def test_a_pass_of_more_than_two_seconds_is_said_to_everyone(took, level, model, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "quantkv")
    clock = iter((10.0, 10.0 + took))
    monkeypatch.setattr(statistics, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    statistics.statistics_of(model)
    (said,) = [record for record in caplog.records if "key means and Hessians" in record.message]
    assert said.levelname == level and f": {took:.1f} s, once for these weights" in said.message


def test_no_hook_stays_where_no_cache_waits(model):
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    caches = [QuantizedCache(model.config, "4bit") for _ in range(2)]
    assert len(hooks) == before + 1
    run(model, caches[0])
    assert len(hooks) == before


def test_the_pass_leaves_the_model_as_it_was(model):
    model.train()
    before = model.config._attn_implementation, model.training, torch.get_rng_state()
    cache = QuantizedCache(model.config, "4bit")
    model.eval()
    exact = run(model, QuantizedCache(model.config, "none"))
    with torch.inference_mode():
        model(IDS, past_key_values=cache)
    assert (model.config._attn_implementation, torch.equal(before[2], torch.get_rng_state())) == (before[0], True)
    assert torch.equal(run(model, QuantizedCache(model.config, "none")), exact)
    run(model, cache, IDS[:, :1])  # a cache that was first used in inference mode goes on outside it


def test_a_model_that_cannot_be_measured(model, monkeypatch, caplog):
    def fails(*args, **kwargs):
        raise NotImplementedError("its keys are not understood")

    monkeypatch.setattr(statistics, "calibrate", fails)
    cache = QuantizedCache(model.config, "4bit")
    run(model, cache)
    assert "no statistics of Qwen2ForCausalLM, keys and values are stored without: its keys are not understood" in caplog.text
    assert cache.get_seq_length() == IDS.shape[1]
    required = QuantizedCache(model.config, {"format": "levels4", "statistics": "require"})
    with pytest.raises(NotImplementedError, match="not understood"):
        run(model, required)
    assert required.get_seq_length() == 0


def test_another_configuration(model, caplog):
    """A cache made from the configuration of a model that is not the one that is called."""
    other = copy.deepcopy(model.config)
    other.rope_parameters = {**other.rope_parameters, "rope_theta": 777.0}
    run(model, QuantizedCache(other, "4bit"))
    assert "no model with the configuration that it was made from was called" in caplog.text
    required = QuantizedCache(other, Policy("levels4", statistics="require"))
    with pytest.raises(ValueError, match=r"policy.statistics='require': no model .*; allowed: QuantizedCache\(model.config"):
        run(model, required)


def test_copies_wait_too(model):
    cache = copy.deepcopy(QuantizedCache(model.config, "4bit"))
    run(model, cache)
    assert cache.quantized_layers[0].pages.maps.k.key_mean is not None


def test_caches_that_are_never_used_are_not_kept(model):
    cache = QuantizedCache(model.config, "4bit")
    assert cache in first_use._waiting
    del cache
    import gc

    gc.collect()
    run(model, QuantizedCache(model.config, "int4"))
    assert not first_use._waiting and first_use._hook is None


@torch.no_grad()
def test_latents_are_stored_without_their_mean(caplog):
    """Of a model whose embeddings share a direction: read by absorbed queries, and read back for another attention."""
    caplog.set_level(logging.INFO, "quantkv")
    from architectures import ARCHITECTURES

    model = next(a for a in ARCHITECTURES if a.name == "DeepSeek V3").build()
    model.model.embed_tokens.weight += 0.5 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(2, 90, (2, 60), generator=torch.Generator().manual_seed(7))
    want = model(ids).logits
    for attention in ("quantkv", "sdpa"):
        model.set_attn_implementation(attention)
        lost = []
        for mode in ("off", "require"):
            cache, cuts = QuantizedCache(model.config, Policy("levels4", statistics=mode), prompt="stored"), (0, 30, 58, 59, 60)
            found = torch.cat([model(ids[:, a:b], past_key_values=cache).logits for a, b in itertools.pairwise(cuts)], 1)
            lost.append(float((found - want).norm() / want.norm()))
            assert (cache.layers[0].mean is None) == (mode == "off")
        assert lost[1] < lost[0] / 2
    assert caplog.text.count("quantkv: means of latents of DeepseekV3ForCausalLM") == 1


def latent_model():
    from architectures import ARCHITECTURES

    return next(a for a in ARCHITECTURES if a.name == "DeepSeek V3").build()


def test_how_long_latents_were_measured_is_said_once(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "quantkv")
    model, clock = latent_model(), iter((10.0, 13.5))
    monkeypatch.setattr(statistics, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    made = statistics.latent_means(Policy("levels4", statistics="auto"), model)
    assert statistics.latent_means(Policy("levels4", statistics="auto"), model) is made
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ["3.5 s"]


def test_latents_are_measured_in_one_context_without_gradients(monkeypatch):
    """In full precision, in whatever mode the model is called; the decoder is asked, where a model has an encoder too."""
    model, seen = latent_model(), []
    model.config.max_position_embeddings = 100
    own, text = model.forward, type(model.config).get_text_config
    monkeypatch.setattr(
        type(model.config), "get_text_config", lambda self, decoder=None, **more: seen.append(decoder) or text(self, decoder, **more)
    )

    def forward(ids, **given):
        seen.append((ids.shape, given["use_cache"], torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return own(ids, **given)

    model.forward = forward
    with torch.autocast("cpu", torch.bfloat16):
        made = statistics.latent_means(Policy("levels4", statistics="require"), model)
    assert seen.count(((1, 100), True, False, False)) == 1 and len(made) == model.config.num_hidden_layers
    assert all(asked is True for asked in seen if not isinstance(asked, tuple))


def test_latents_that_cannot_be_measured_are_stored_with_their_mean(caplog):
    model = latent_model()

    def fails(*args, **kwargs):
        raise NotImplementedError("its latents are not understood")

    model.forward = fails
    assert statistics.latent_means(Policy("levels4", statistics="auto"), model) == {}
    assert "no statistics of DeepseekV3ForCausalLM, latents are stored with their mean: its latents are not understood" in caplog.text
    with pytest.raises(NotImplementedError, match="not understood"):
        statistics.latent_means(Policy("levels4", statistics="require"), model)


def test_latents_wait_for_their_model():
    from architectures import ARCHITECTURES

    config = next(a for a in ARCHITECTURES if a.name == "DeepSeek V3").build().config
    assert QuantizedCache(config, "4bit").cache_positions.statistics == "auto"
    assert QuantizedCache(config, Policy("int2", statistics="require")).cache_positions.statistics == "require"
    layer = QuantizedCache(config, "int2").layers[0]
    layer.take_mean(torch.ones(32))
    assert layer.mean is None  # at 2 bits rows without it shrink


def test_policies_say_it(tmp_path):
    Policy("levels4", statistics="auto").save(tmp_path / "a.json")
    assert Policy.load(tmp_path / "a.json").statistics == "auto"
    Policy("levels4").save(tmp_path / "b.json")
    assert "statistics" not in (tmp_path / "b.json").read_text()
    for wrong in ("yes", None, 1):
        with pytest.raises(ValueError, match=r"^statistics=.*: one of off, auto, require is needed"):
            Policy("levels4", statistics=wrong)


def test_tokens_of_the_pass(model, tmp_path):
    ids, source = statistics._ids(model)
    assert ids.shape == (1, 512) and source == "512 tokens at random: no tokenizer of it is here"
    assert int(ids.min()) >= 0 and int(ids.max()) < 128
    short = tiny("qwen2", max_position_embeddings=100)
    assert statistics._ids(short)[0].shape == (5, 100)
    assert weights.of_module(model.model.layers[0].self_attn) is not None


@pytest.mark.parametrize(
    ("reason", "fault", "statistics", "said"),
    [
        (None, None, "auto", "means of 2 layers (text): 0.0 s"),
        ("it has an encoder", None, "auto", "keys and values are stored without key means and Hessians: it has an encoder"),
        (None, RuntimeError("no such layer"), "auto", "without key means and Hessians: no such layer"),
        (None, RuntimeError("no such layer"), "require", None),
        ("it has an encoder", None, "require", None),
    ],
)
def test_a_model_that_cannot_be_measured_is_served_without(reason, fault, statistics, said, caplog):
    made = calibration_of({0: latent_moments(torch.ones(4)), 1: latent_moments(torch.ones(4))}, 2, "text")

    def measure():
        if fault is not None:
            raise fault
        return made, "text"

    asked = statistics, reason, measure, logging.getLogger("quantkv.test"), "means"
    with caplog.at_level(logging.INFO, "quantkv.test"):
        if said is None:
            with pytest.raises(NotImplementedError, match=f"policy.statistics='require': the model cannot be measured: {reason or fault}"):
                measured(*asked)
        else:
            assert measured(*asked) is (made if reason is fault is None else None)
            assert said in caplog.text


def test_passes_that_measure_a_model_are_long_enough():
    parts, source = contexts(None, 50, 100, torch.device("cpu"))
    assert [len(part) for part in parts] == [100] * 5 and "512 tokens at random" in source  # 12 more are too few for a pass
    assert len(contexts(None, 50, 10**6, torch.device("cpu"))[0][0]) == 512
    with pytest.raises(NotImplementedError, match="steps of 16 tokens are too short"):
        contexts(None, 50, 16, torch.device("cpu"))
