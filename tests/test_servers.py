"""What the adapters of servers share, without a server: options, refusals, steps, the pass that measures a model."""

import inspect
import logging
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from quantkv import Batch, PagedCache, get_format
from quantkv.engine import warm_up
from quantkv.engine.layer import LayerAttention
from quantkv.engine.layer_config import LayerConfig
from quantkv.engine.observed import SKIPPED, causal_attention
from quantkv.integrations import asked, serving
from quantkv.integrations.seen_layers import SeenLayers, ServedModel
from quantkv.integrations.vllm.around import around
from quantkv.policy import Policy


def policy_of(name, path=None):
    return asked.policy_of("cache_type", name, "FILE_OF_IT", path, "FILE_OF_IT=FILE")


def test_a_policy_is_that_of_a_preset_or_of_the_file_that_its_name_needs(tmp_path):
    Policy("int8", {1: "int4"}).save(tmp_path / "policy.json")
    path = str(tmp_path / "policy.json")
    assert policy_of("quantkv_policy", path).layers == {1: "int4"} and policy_of("quantkv_policy", path) is policy_of(
        "quantkv_policy", path
    )
    assert policy_of("quantkv_4bit") == Policy.given("4bit") and policy_of("quantkv_4bit") is policy_of("quantkv_4bit")
    assert policy_of("quantkv_int4") is None and policy_of("auto") is None
    needed = "--cache-type quantkv_policy and FILE_OF_IT=FILE need each other"
    for name, given in (("quantkv_policy", None), ("quantkv_int4", path), ("quantkv_4bit", path)):
        with pytest.raises(ValueError) as refused:
            policy_of(name, given)
        assert str(refused.value) == f"cache_type={name!r}, FILE_OF_IT={given!r}: {needed}"


def test_what_prompts_read_is_what_an_option_says_before_a_policy():
    stored = Policy("int4", prompt="stored")
    assert [asked.of_prompts("prompt", policy, "PROMPT", None) for policy in (None, Policy("int4"), stored)] == ["own", "own", "stored"]
    rounded = Policy("int4", prompt_precision="8bit")
    precisions = [asked.of_prompts("prompt_precision", policy, "PRECISION", None) for policy in (None, stored, rounded)]
    assert precisions == ["16bit", "16bit", "8bit"] and asked.of_prompts("prompt_precision", rounded, "PRECISION", "16bit") == "16bit"
    with pytest.raises(ValueError, match=r"^PRECISION='fp8': one of 16bit, 8bit is needed"):
        asked.of_prompts("prompt_precision", rounded, "PRECISION", "fp8")
    assert asked.of_prompts("prompt", stored, "PROMPT", "own") == "own" and asked.of_prompts("prompt", None, "PROMPT", "stored") == "stored"
    with pytest.raises(ValueError, match="PROMPT='fresh': one of own, stored is needed"):
        asked.of_prompts("prompt", None, "PROMPT", "fresh")


def test_a_value_that_is_not_served_is_refused_with_what_is():
    served = {"graphs": False, "ranks": 1}
    asked.check_only(SimpleNamespace(graphs=False, ranks=1), served)
    with pytest.raises(NotImplementedError) as refused:
        asked.check_only(SimpleNamespace(graphs=False, ranks=2), served, "layer 3: ", " with int4")
    assert str(refused.value) == "quantkv: layer 3: ranks=2 is not supported with int4; allowed: 1"


def test_a_policy_is_held_against_layers_and_formats():
    tried = []
    asked.check_policy(Policy("int4", {1: "int8"}), 2, None, tried.append)
    assert sorted(tried) == ["int4", "int8"]
    with pytest.raises(ValueError, match="layers"):
        asked.check_policy(Policy("int4", {2: "int8"}), 2, None, tried.append)


def test_who_serves_a_format_is_kept_and_said(monkeypatch, caplog):
    monkeypatch.setattr(serving, "served", {})
    logger = logging.getLogger("quantkv.test")
    with caplog.at_level(logging.INFO, logger.name):
        serving.tell(logger, "int4", {"write of 1 tokens": "cpu"}, 30)
    assert serving.served == {"int4": {"write of 1 tokens": "cpu"}}
    assert [record.getMessage() for record in caplog.records] == ["quantkv: 30 layers of int4: write of 1 tokens by cpu"]


def test_kinds_of_layers_are_warmed_up_together_when_all_have_pages(monkeypatch):
    """Once each; before a step, whether or not all have pages; and when an engine gives pages again, only kinds that are new."""
    found, warm_ups = [], warm_up.WarmUps()
    together = warm_up.together

    @contextmanager
    def marked():
        found.append("begin")
        with together():
            yield
        found.append("end")

    monkeypatch.setattr(warm_up, "together", marked)

    def bind(*given):
        for layer, kind in given:
            warm_ups.has_pages(layer, kind, partial(found.append, kind))

    warm_ups.expect("abc")
    bind(("a", 1), ("b", 1))
    assert not found
    bind(("c", 2))
    assert found == ["begin", 1, 2, "end"]
    found.clear(), warm_ups.expect("abc")
    bind(("a", 1), ("b", 3))
    warm_ups.has_pages("c")
    assert found == ["begin", 3, "end"]
    found.clear(), warm_ups.expect("ab")
    bind(("a", 4))
    warm_ups.finish(), warm_ups.finish()
    assert found == ["begin", 4, "end"]


def test_a_step_counts_its_calls(monkeypatch):
    monkeypatch.setattr(serving, "calls", type(serving.calls)())
    cache = PagedCache(get_format("int8").cache_spec(1, 64), 1)
    batch = Batch(torch.tensor([0, 3]).int(), torch.tensor([3]).int(), 3)
    step = serving.Step("mixed", batch, torch.zeros(1, 1, dtype=torch.int32), torch.arange(3))
    rows = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(0))
    step.write(cache, rows, rows)
    found = [step.attend(cache, rows, 0.125) for _ in range(2)]
    assert serving.calls == {"write": 1, "mixed": 2} and torch.equal(*found)
    assert torch.equal(found[0], cache.attend(rows, block_table=step.block_table, seq_lens=batch.seq_lens, cu_seqlens_q=batch.cu_seqlens_q))


@pytest.mark.parametrize(("stored", "own"), [("int8", True), ("none", False)])
def test_pages_of_rows_as_they_are_are_read_in_their_place(stored, own):
    config = LayerConfig(get_format(stored, torch.float32))
    assert LayerAttention(4).over(config).own_rows is own and not LayerAttention(4, own_rows=False).over(config).own_rows


def test_a_function_stands_around_anothers_once():
    class Theirs:
        __module__ = "elsewhere"
        size = 3

        def method(self, number):
            return [number, self.size]

        @classmethod
        def of_class(cls, number=1):
            return [number, cls.size]

    class Narrow(Theirs):
        size = 4

    for made in (Theirs.method, Theirs.of_class.__func__):
        made.__module__ = "elsewhere"

    def ours(own, of, *given, **named):
        return ["ours", *own(of, *given, **named)]

    for _ in range(2):
        around(Theirs, "method", ours)
        around(Narrow, "of_class", ours)  # which it has from another class: that one's stays as it was
    assert Theirs().method(2) == ["ours", 2, 3] and list(inspect.signature(Theirs.method).parameters) == ["self", "number"]
    assert Narrow.of_class(number=5) == ["ours", 5, 4] and Theirs.of_class() == [1, 3]


class Model(torch.nn.Module):
    """A model of one layer whose rows a test makes up."""


def measure(numbers, seen, forward, limit=512):
    model = Model()
    served = ServedModel(model, torch.device("cpu"), torch.float32, 5, 64, limit, 100, None)
    return seen.measure(served, numbers, [(number, model, (2, 4, 4)) for number in numbers], forward)


def test_a_pass_over_a_servers_model_makes_a_calibration():
    """Of rows without rotation: the mean of all but the first tokens. Layers whose rows do not count are left out."""
    seen, rows = SeenLayers("no.package"), []

    def forward(ids):
        generator = torch.Generator().manual_seed(len(rows))
        query, key = (torch.randn(len(ids), heads, 8, generator=generator) for heads in (4, 2))
        rows.append(key)
        seen.add(3, query, key)
        seen.add(None, query, 9 * key)
        seen.add_latents(7, key[:, 0])  # which nobody asks for

    made, source = measure({3}, seen, forward, 200)
    assert [len(key) for key in rows] == [200, 200, 112] and source.startswith("512 tokens at random")
    mean = torch.cat([key[SKIPPED:] for key in rows]).mean(0)
    assert made.num_layers == 5 and made.layers.keys() == {3}
    torch.testing.assert_close(made.layers[3].key_mean[0].float(), mean, rtol=2**-11, atol=1e-6)  # a rounding to half precision
    assert not made.layers[3].key_hessian.is_inference() and not seen.layers and not seen.latents


def test_latents_of_a_pass_have_one_mean():
    seen, rows = SeenLayers("no.package"), []

    def forward(ids):
        rows.append(torch.randn(len(ids), 8, generator=torch.Generator().manual_seed(len(rows))))
        seen.add_latents(4, rows[-1])
        seen.add_latents(None, 9 * rows[-1])
        assert seen.latents.keys() == {4}

    made, _ = measure({4}, seen, forward, 200)
    mean = torch.cat([latents[SKIPPED:] for latents in rows]).double().mean(0)
    assert len(rows) == 3 and torch.equal(made.layers[4].key_mean, mean.half()[None, None])


def test_layers_attend_to_the_rows_of_the_pass():
    """A layer without keys of its own reads the owner's, as they were; no rows are kept after the pass, or where it fails."""
    seen, attention = SeenLayers("no.package"), LayerAttention(4, 0.25)

    def forward(ids):
        query, key, value = (torch.randn(len(ids), heads, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
        due = causal_attention(attention, query, key, value)
        assert torch.equal(seen.attend(3, "owner", attention, query, key, value), due)
        key.zero_(), value.zero_()
        assert torch.equal(seen.attend(None, "owner", attention, query, None, None), due)
        assert seen.rows.keys() == {"owner"} and seen.layers[3].count == len(ids) - SKIPPED
        if len(ids) < 200:
            raise RuntimeError

    measure({3}, seen, lambda ids: forward(ids[:200]) if not seen.layers else None)
    assert not seen.rows
    with pytest.raises(RuntimeError):
        measure({3}, seen, lambda ids: forward(ids[:100]))
    assert not seen.rows


def test_layers_that_a_pass_did_not_reach_are_named():
    seen = SeenLayers("no.package")
    with pytest.raises(NotImplementedError, match=r"the pass did not reach layers \[1, 2\]"):
        measure({0, 1, 2}, seen, lambda ids: seen.add(0, torch.ones(len(ids), 4, 8), torch.ones(len(ids), 2, 8)))
    with pytest.raises(NotImplementedError, match="steps of 16 tokens are too short"):
        measure({0}, seen, lambda ids: None, 16)
