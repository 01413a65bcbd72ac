"""An option is supported or refused by name, by every implementation and under torch.compile: none is ever dropped."""

from dataclasses import fields

import pytest
import torch

from quantkv import AttentionOptions, implementations, ops
from quantkv.flat import flatten_options, unflatten_options
from quantkv.testing import SampleBatch, check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUERIES, KEYS, HEADS = (4, 2), (40, 23), 6


def _t(x, **how):
    return torch.tensor(x, device=DEVICE, **how)


# A value of each option, with the options that it needs, that changes what attention gives.
SAMPLES = {
    "causal": {"causal": False},
    "window": {"window": 5},
    "chunk_lookback": {"chunk_lookback": 1, "window": 8},
    "softcap": {"softcap": 0.5},
    "sinks": {"sinks": torch.linspace(-1, 2, HEADS, device=DEVICE)},
    "alibi_slopes": {"alibi_slopes": torch.linspace(0.1, 0.6, HEADS, device=DEVICE)},
    "alibi_sqrt": {"alibi_sqrt": True, "alibi_slopes": torch.linspace(0.1, 0.6, HEADS, device=DEVICE)},
    "qq_bias": {"qq_bias": torch.linspace(-2, 2, 16, device=DEVICE).view(4, 4)},
    "prefix_ranges": {"prefix_ranges": _t([[[36, 39]], [[2, 22]]], dtype=torch.int32), "window": 3},
    "clamp_prefix_to_window": {"clamp_prefix_to_window": True, "prefix_ranges": _t([[[2, 39]], [[2, 22]]]), "window": 3},
    "output_scale": {"output_scale": 0.01},
    "batch_invariant": {"batch_invariant": True},
    "prompt_precision": {"prompt_precision": "8bit"},
}
SAME_ANSWER = ("batch_invariant", "prompt_precision")  # other splits, the same attention; and no sequence is a prompt


def test_every_option_has_a_sample():
    assert SAMPLES.keys() == {f.name for f in fields(AttentionOptions)}


def batch():
    return SampleBatch.make("int8", QUERIES, KEYS, num_kv_heads=2, group=3, dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("implementation", implementations.NAMES)
def test_an_option_is_supported_or_refused_by_name(implementation, name):
    b = batch()
    supported = implementations.module(implementation, "attend").SUPPORTED
    assert supported <= SAMPLES.keys()
    call = b.call(**SAMPLES[name])
    missing = [n for n in call.options.given() if n not in supported]  # prompt_precision is not: no sequence is a prompt
    if missing:
        with pytest.raises(ValueError, match=f"{missing[0] if len(missing) == 1 else ''}.*: not supported here; supported by .*reference"):
            ops.attend(call, implementation)
        return
    if implementations.refusal(implementation, call) is not None:
        pytest.skip("this call is for another reason another implementation's")
    out, lse = b.attend(implementation=implementation, **SAMPLES[name])
    check(b, (out, lse), **SAMPLES[name])
    without = {n: v for n, v in SAMPLES[name].items() if n != name}
    plain = b.oracle(**without)[0]
    changed = (out.cpu().double() - plain).norm(dim=-1) / plain.norm(dim=-1)
    assert changed.max() > 0.02 or name in SAME_ANSWER, "the sample does not show whether the option is supported"


@pytest.mark.parametrize("name", SAMPLES)
def test_an_option_survives_torch_compile(name):
    options = AttentionOptions(**SAMPLES[name])
    back = unflatten_options(*flatten_options(options))
    for f in fields(AttentionOptions):
        given, got = getattr(options, f.name), getattr(back, f.name)
        assert got is given if isinstance(given, torch.Tensor) else (type(got), got) == (type(given), given)
    b = batch()
    torch._dynamo.reset()
    attend = torch.compile(lambda: b.attend(**SAMPLES[name]), fullgraph=True, backend="aot_eager")
    (out, lse), (expected, expected_lse) = attend(), b.attend(**SAMPLES[name])
    assert torch.equal(out.float(), expected.float()) and torch.equal(lse, expected_lse)


def test_no_option_is_given_by_default():
    assert AttentionOptions().given() == []
    for name, sample in SAMPLES.items():
        assert set(AttentionOptions(**sample).given()) == set(sample), name
