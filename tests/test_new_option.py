"""The worked example of docs/extending.md: a new option for each head touches options.py and the implementation that supports it. Until one
does, every implementation refuses it by name."""

import importlib.util
from dataclasses import replace

import pytest
import torch

import new_option
from quantkv import calls, implementations, ops, options
from quantkv.testing import SampleBatch, relative_error


def call(gain):
    batch = SampleBatch.make("int8", (3, 1), (20, 9), num_kv_heads=2, group=2, dtype=torch.float32)
    return replace(batch.call(), options=new_option.Options(head_gain=gain))


@pytest.mark.parametrize("implementation", implementations.NAMES)
def test_refused_by_name_until_it_is_supported(implementation):
    with pytest.raises(ValueError, match="head_gain: not supported here; supported by no other"):
        ops.attend(call(torch.ones(4)), implementation)


@pytest.mark.parametrize("implementation", implementations.NAMES)
def test_refused_by_name_where_it_is_a_field_of_the_package(implementation, monkeypatch):
    """As if options.py had it: each implementation's module is loaded anew, over options with one field more."""
    for module in (options, calls):
        monkeypatch.setattr(module, "AttentionOptions", new_option.Options)
    try:
        loaded = implementations.module(implementation, "attend")
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    spec = importlib.util.spec_from_file_location(loaded.__name__, loaded.__file__)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    stock = implementations.module
    monkeypatch.setattr(
        implementations, "module", lambda name, kind: fresh if (name, kind) == (implementation, "attend") else stock(name, kind)
    )
    with pytest.raises(ValueError, match="head_gain: not supported here; supported by no other"):
        ops.attend(call(torch.ones(4)), implementation)
    assert fresh.SUPPORTED == stock(implementation, "attend").SUPPORTED


def test_checked_like_every_other():
    with pytest.raises(ValueError, match=r"head_gain\.shape=\(3,\): \(4,\) is needed"):
        call(torch.ones(3))


def test_supported_by_the_reference(monkeypatch):
    gain = torch.tensor([1.0, 2.0, -1.0, 0.5])
    plain, _ = ops.attend(replace(call(gain), options=new_option.AttentionOptions(), out=None))
    monkeypatch.setattr(new_option.reference, "SUPPORTED", new_option.SUPPORTED)
    monkeypatch.setattr(new_option.reference, "compute", new_option.compute)
    out, _ = ops.attend(call(gain))
    assert relative_error(out, plain * gain[:, None]) < 1e-6
    with pytest.raises(ValueError, match="head_gain: not supported here; supported by reference"):
        ops.attend(call(gain), "prefill")
