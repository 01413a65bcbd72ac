"""What calls by vLLM's names refuse, and what they take although it comes in an odd shape."""

import math

import pytest
import torch

from quantkv import vllm_api as backend
from quantkv.vllm_api import KVQuantMode as Mode
from vllm_api_calls import BLOCK_SIZE, BLOCKS, DEVICE, HEADS, golden, read, turboquant_read, turboquant_write, write

pytestmark = pytest.mark.usefixtures("on_device")
on_a_cpu = pytest.mark.skipif(DEVICE.type != "cpu", reason="on a GPU no table is read before it is used: nothing waits for the device")


@pytest.mark.parametrize(
    "one", [0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]]), torch.tensor([0.5]).bfloat16()], ids=str
)
@pytest.mark.parametrize("shape", [None, (2, 1), (1, 3), (2, 3), "copied"])
def test_one_scale_may_come_in_any_shape(one, shape):
    """Engines expand the scale of a layer to `[sequences, kv heads]`, of which there may be one."""
    g = golden(64)
    k, v = (g[f"none.{side}_cache"].view(torch.bfloat16).to(torch.float8_e4m3fn) for side in ("key", "value"))
    expected = read(64, k, v, mode=Mode.FP8_PER_TENSOR, k_descale=0.5, v_descale=0.5)
    if shape is not None:
        one = torch.as_tensor(one).reshape(1).to(DEVICE).expand((2, 3) if shape == "copied" else shape)
        one = one.contiguous() if shape == "copied" else one
    assert torch.equal(read(64, k, v, mode=Mode.FP8_PER_TENSOR, k_descale=one, v_descale=one), expected)


@pytest.mark.parametrize(
    "scale",
    [0.0, -1.0, math.nan, math.inf, "1", torch.tensor([0.5, 0.25]), torch.empty(0), torch.ones(2).bool(), torch.full((2,), math.nan)],
    ids=str,
)
def test_what_is_no_scale_is_refused(scale):
    rows = torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, 64).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="k_descale"):
        read(64, rows, rows, mode=Mode.FP8_PER_TENSOR, k_descale=scale)


TENSORS_READ = ("q", "k", "v", "out", "cu_seqlens_q", "seqused_k", "block_table", "sinks", "alibi_slopes", "qq_bias", "mm_prefix_range")


def test_lists_are_not_taken_for_tensors():
    g, mode = golden(64), Mode.INT4_PER_TOKEN_HEAD
    stored = write(mode, 64)
    positional = {"k": stored[0], "v": stored[1], "k_scale_cache": stored[2], "v_scale_cache": stored[3]}
    for name in (*TENSORS_READ, "k_scale_cache", "v_scale_cache"):
        with pytest.raises(ValueError, match=f"{name.removesuffix('_scale_cache')}.*=list: a tensor is needed"):
            read(64, mode=mode, **{**positional, name: [1, 2]})
    with pytest.raises(ValueError, match="causal=list"):
        read(64, mode=mode, **positional, causal=[True, False])
    with pytest.raises(ValueError, match=r"window_size=7: a pair \(left, right\) of integers is needed"):
        read(64, mode=mode, **positional, window_size=7)
    names = ["key", "value", "key_cache", "value_cache", "k_scale_cache", "v_scale_cache", "slot_mapping"]
    good = dict(zip(names, (g["key"], g["value"], *stored, g["slot_mapping"])))
    before = [t.clone() for t in stored]
    for name in names:
        with pytest.raises(ValueError, match="=list: a tensor is needed"):
            backend.triton_reshape_and_cache_flash_per_token_head_quant(**{**good, name: [1, 2]}, kv_quant_mode=mode)
        if "scale" not in name:
            rows = torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, 64).to(torch.float8_e4m3fn)
            arguments = {"key": g["key"], "value": g["value"], "key_cache": rows, "value_cache": rows, "slot_mapping": g["slot_mapping"]}
            with pytest.raises(ValueError, match="=list: a tensor is needed"):
                backend.triton_reshape_and_cache_flash(**{**arguments, name: [1]}, kv_cache_dtype="fp8", k_scale=1.0, v_scale=1.0)
    with pytest.raises(ValueError, match="kv_cache=list"):
        backend.triton_reshape_and_cache_flash_diffkv(g["key"], g["value"], [1], g["slot_mapping"], "auto", 1.0, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(stored, before))


@on_a_cpu
@pytest.mark.parametrize(
    "changes, match",
    [
        ({"block_table": torch.tensor([[0, 1], [2, 3]])}, "block_table"),  # 37 keys in two pages of 16
        ({"block_table": torch.tensor([[0, -1, 2], [3, 4, 5]])}, "block_table"),
        ({"block_table": torch.tensor([[0, 1, BLOCKS], [3, 4, 5]])}, "block_table"),
        ({"seqused_k": torch.tensor([64, 20])}, "block_table"),
        ({"seqused_k": torch.tensor([3, 20])}, "seq_lens|seqused_k"),  # fewer keys than queries
        ({"cu_seqlens_q": torch.tensor([0, 7, 6])}, "cu_seqlens_q"),
        ({"cu_seqlens_q": torch.tensor([1, 5, 6])}, "cu_seqlens_q"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else None,
)
@pytest.mark.parametrize("mode", [Mode.NONE, Mode.INT4_PER_TOKEN_HEAD], ids=lambda m: m.name)
def test_a_cpu_checks_lengths_and_pages_before_anything_runs(mode, changes, match):
    """Keys in pages that the table does not name, and pages that are not there, are refused; nothing is written."""
    g = golden(64)
    k, v, *scales = write(mode, 64) if mode else [g[f"none.{side}_cache"].view(torch.bfloat16) for side in ("key", "value")]
    out = torch.full_like(g["query"], 7.0)
    with pytest.raises(ValueError, match=match):
        read(64, k, v, *scales, mode=mode, out=out, **changes)
    assert (out == 7).all()


def test_pages_that_no_query_sees_may_be_anything():
    """Behind a window, and beyond a sequence's last page: engines leave there what they like."""
    g, mode = golden(64), Mode.INT8_PER_TOKEN_HEAD
    stored, table, lens = write(mode, 64), g["block_table"].clone(), g["seq_lens"].tolist()
    expected = read(64, *stored, mode=mode, window_size=(7, 0))
    for s, (length, queries) in enumerate(zip(lens, (5, 1))):
        table[s, : max(length - queries - 7, 0) // BLOCK_SIZE] = -9
        table[s, -(-length // BLOCK_SIZE) :] = 10**6
    assert not torch.equal(table, g["block_table"])
    assert torch.equal(read(64, *stored, mode=mode, window_size=(7, 0), block_table=table), expected)


@on_a_cpu
@pytest.mark.parametrize("change", [{"seq_lens": torch.tensor([64, 20])}, {"block_table": torch.tensor([[0, -1, 2], [3, 4, 5]])}])
def test_turboquant_checks_its_pages_on_a_cpu(change):
    with pytest.raises(ValueError, match="block_table"):
        turboquant_read(64, "turboquant_4bit_nc", turboquant_write(64, "turboquant_4bit_nc"), **change)
