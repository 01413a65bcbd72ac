"""What the backends store and compute: golden bytes and outputs, foreign layouts, every option of attention."""

import pytest
import torch

import direct
from quantkv import vllm_api as backend
from quantkv.calls import AttentionOptions, PagedTensor
from quantkv.vllm_api import KVQuantMode as Mode
from quantkv.vllm_api import get_backend
from vllm_api_calls import (
    BLOCK_SIZE,
    BLOCKS,
    DEVICE,
    HEADS,
    OUTPUT_BOUND,
    PER_TOKEN_HEAD,
    as_bytes,
    check_stored,
    golden,
    layouts,
    read,
    relative_error,
    write,
)

pytestmark = pytest.mark.usefixtures("on_device")
ROTATED_BITS = {Mode.INT4_PER_TOKEN_HEAD: 4, Mode.INT2_PER_TOKEN_HEAD: 2}


def golden_runs(head_size, name):
    options = {
        "causal": {},
        "window8": {"window_size": (7, 0)},
        "softcap20": {"softcap": 20.0},
        "sinks": {"sinks": golden(head_size)["sinks"]},
    }
    return {run: o for run, o in options.items() if f"{name}.out.{run}" in golden(head_size)}


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("mode", PER_TOKEN_HEAD, ids=lambda m: m.name)
def test_per_token_head_modes_reproduce_the_golden_file(mode, head_size):
    g, name = golden(head_size), mode.name.lower()
    stored = write(mode, head_size)
    fields = [g[f"{name}.{field}"] for field in ("key_cache", "value_cache", "k_scale_cache", "v_scale_cache")]
    for tensor, field in zip(stored[:2], fields):
        check_stored(tensor, field, ROTATED_BITS.get(mode, 0))
    for tensor, field in zip(stored[2:], fields[2:]):
        torch.testing.assert_close(tensor, field, rtol=0 if DEVICE.type == "cpu" else 4e-3 if mode in ROTATED_BITS else 0, atol=0)
    runs = golden_runs(head_size, name)
    assert runs
    caches = [field.view(t.dtype) for field, t in zip(fields, stored)]
    for run, options in runs.items():
        out = read(head_size, *caches, mode=mode, **options)
        assert relative_error(out, g[f"{name}.out.{run}"]) <= OUTPUT_BOUND["per_token_head"], run


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize(
    "name, kv_cache_dtype, dtype",
    [("none", "auto", torch.bfloat16), ("fp8_per_tensor", "fp8", torch.uint8), ("fp8_per_tensor", "fp8_e4m3", torch.float8_e4m3fn)],
)
def test_per_tensor_modes_reproduce_the_golden_file(name, kv_cache_dtype, dtype, head_size):
    g = golden(head_size)
    k, v = (torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, head_size).to(dtype) for _ in "kv")
    backend.triton_reshape_and_cache_flash(g["key"], g["value"], k, v, g["slot_mapping"], kv_cache_dtype, g["k_descale"], g["v_descale"])
    assert torch.equal(as_bytes(k), g[f"{name}.key_cache"]) and torch.equal(as_bytes(v), g[f"{name}.value_cache"])
    mode = Mode.NONE if name == "none" else Mode.FP8_PER_TENSOR
    for run, options in golden_runs(head_size, name).items():
        descale = dict(k_descale=g["k_descale"].expand(2, HEADS), v_descale=float(g["v_descale"]))
        assert relative_error(read(head_size, k, v, mode=mode, **descale, **options), g[f"{name}.out.{run}"]) <= 1e-5, run


@pytest.mark.parametrize("mode", PER_TOKEN_HEAD, ids=lambda m: m.name)
def test_strided_caches_hold_and_give_the_same(mode):
    head_size = 64
    plain = write(mode, head_size)
    expected = read(head_size, *plain, mode=mode)
    shapes = [(tuple(t.shape), t.dtype) for t in plain[:2]] + [((*plain[2].shape, 1), torch.float32)] * 2
    for variants in zip(*(layouts(*s) for s in shapes)):
        name, views = variants[0][0], [view for _, view in variants]
        views[2:] = [view[..., 0] for view in views[2:]]
        write(mode, head_size, views[0], views[1], views[2:])
        slots = golden(head_size)["slot_mapping"]
        for got, want in zip(views, plain):
            rows = [as_bytes(t).flatten(0, 1)[slots[slots >= 0]] for t in (got, want)]
            assert torch.equal(*rows), name
        assert torch.equal(read(head_size, *views, mode=mode), expected), name


@pytest.mark.parametrize("mode", [Mode.INT8_PER_TOKEN_HEAD, Mode.INT4_PER_TOKEN_HEAD], ids=lambda m: m.name)
def test_key_and_value_head_sizes_may_differ(mode):
    """One cached token is read back as what was written, within a quantization step."""
    torch.manual_seed(1)
    owner, key, value = get_backend(mode), torch.randn(1, 1, 192), torch.randn(1, 1, 128)
    caches = [torch.zeros(1, BLOCK_SIZE, 1, owner.packed_head_size(d), dtype=torch.uint8) for d in (192, 128)]
    scales = owner.allocate_scale_caches(1, BLOCK_SIZE, 1, DEVICE)
    owner.reshape_and_cache(key, value, *caches, torch.tensor([3]), k_scale_cache=scales[0], v_scale_cache=scales[1])
    out = read(
        64,
        *caches,
        *scales,
        mode=mode,
        q=torch.randn(1, 3, 192),
        out=torch.empty(1, 3, 128),
        window_size=(0, 0),
        cu_seqlens_q=torch.tensor([0, 1]),
        seqused_k=torch.tensor([4]),
        block_table=torch.tensor([[0]]),
    )
    steps = 255 if mode == Mode.INT8_PER_TOKEN_HEAD else 15
    assert relative_error(out, value.expand(1, 3, 128)) < 2 / steps * float(value.abs().max() / value.std())


def test_options_mean_what_attention_options_say():
    head_size, mode = 64, Mode.INT8_PER_TOKEN_HEAD
    g, caches, fmt = golden(head_size), write(mode, head_size), get_backend(mode).format
    k, v = (PagedTensor(c, s.unsqueeze(-1)) for c, s in zip(caches[:2], caches[2:]))
    slopes, bias = torch.linspace(0.1, 0.6, 6), torch.linspace(-1, 1, 25).view(5, 5)
    ranges = torch.tensor([[[2, 9]], [[0, 0]]], dtype=torch.int32)
    per_sequence = torch.tensor([False, True])
    cases = (
        ({"causal": False}, {"causal": False}),
        ({"causal": per_sequence}, {"causal": per_sequence}),
        ({"causal": False, "window_size": (7, 7)}, {"causal": False, "window": 8}),
        ({"window_size": (7, 0), "chunk_lookback": 1}, {"window": 8, "chunk_lookback": 1}),
        ({"alibi_slopes": slopes}, {"alibi_slopes": slopes}),
        ({"alibi_slopes": slopes, "use_alibi_sqrt": True}, {"alibi_slopes": slopes, "alibi_sqrt": True}),
        ({"qq_bias": bias}, {"qq_bias": bias}),
        ({"mm_prefix_range": ranges, "window_size": (3, 0)}, {"prefix_ranges": ranges, "window": 4}),
    )
    plain = read(head_size, *caches, mode=mode)
    for theirs, ours in cases:
        expected, _ = direct.attend(
            g["query"],
            k,
            v,
            fmt,
            cu_seqlens_q=g["cu_seqlens_q"],
            seq_lens=g["seq_lens"],
            block_table=g["block_table"],
            scale=head_size**-0.5,
            options=AttentionOptions(**ours),
        )
        out = read(head_size, *caches, mode=mode, **theirs)
        assert relative_error(out, expected) < (1e-6 if DEVICE.type == "cpu" else 1e-5) < relative_error(out, plain), theirs


@pytest.mark.parametrize("scale", [0.01, torch.tensor([0.01])])
def test_output_scale_gives_8_bit_floats_rotated_back_first(scale):
    mode, out = Mode.INT4_PER_TOKEN_HEAD, torch.empty(6, 6, 64, dtype=torch.float8_e4m3fn)
    caches = write(mode, 64)
    read(64, *caches, mode=mode, out=out, output_scale=scale)
    expected = (golden(64)["int4_per_token_head.out.causal"] / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    differ = (out.float() != expected).float().mean()  # a last-bit difference before the cast may cross a rounding boundary
    assert differ < 1e-2 and relative_error(out.float(), expected) < 1e-3


def test_scales_in_tensors_follow_their_writes():
    g = golden(64)
    k, v = (g[f"none.{side}_cache"].view(torch.bfloat16).to(torch.float8_e4m3fn) for side in ("key", "value"))
    scale = torch.ones(1)
    first = read(64, k, v, mode=Mode.FP8_PER_TENSOR, v_descale=scale).clone()
    scale.fill_(2.0)
    assert torch.equal(read(64, k, v, mode=Mode.FP8_PER_TENSOR, v_descale=scale), 2 * first)
    with torch.inference_mode():
        untracked = torch.ones(1)
        assert torch.equal(read(64, k, v, mode=Mode.FP8_PER_TENSOR, v_descale=untracked), first)
        untracked.fill_(2.0)
        assert torch.equal(read(64, k, v, mode=Mode.FP8_PER_TENSOR, v_descale=untracked), 2 * first)
        scale.fill_(1.0)
        assert torch.equal(read(64, k, v, mode=Mode.FP8_PER_TENSOR, v_descale=scale), first)
    assert torch.equal(read(64, k, v, v_descale=2), 2 * first)  # NONE: the cache's dtype says that it holds 8-bit floats
