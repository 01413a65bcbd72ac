"""The reference engine's own bytes and outputs (tests/data, written by its kernels): 0 differing bytes, outputs within
FORMATS' budgets."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from direct import attend, write
from quantkv import AttentionOptions, get_format
from quantkv.calls import PagedTensor

DATA = Path(__file__).parent / "data"
SEPARATE = ("none", "fp8_per_tensor", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "int2_per_token_head")
COMBINED = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
OPTIONS = {"causal": {}, "window8": {"window": 8}, "softcap20": {"softcap": 20.0}, "sinks": {"sinks": True}}


@pytest.fixture(scope="module", params=[64, 128])
def golden(request):
    return load_file(DATA / f"d{request.param}_bf16.safetensors")


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def written(golden, mode):
    fmt, head_size = get_format(mode), golden["key"].shape[-1]
    sides = []
    for codec, name in ((fmt.k, "k_descale"), (fmt.v, "v_descale")):
        width = codec.row.code_bytes(head_size) // codec.code_dtype.itemsize
        meta = torch.zeros(8, 16, 2, len(codec.row.meta), dtype=getattr(torch, codec.row.meta[0])) if codec.row.meta else None
        scale = float(golden[name]) if mode == "fp8_per_tensor" else 1.0
        sides.append(PagedTensor(torch.zeros(8, 16, 2, width, dtype=codec.code_dtype), meta, scale))
    write(golden["key"], golden["value"], *sides, fmt, golden["slot_mapping"])
    return fmt, *sides


def relative_error(golden, mode, run, options):
    fmt, k, v = written(golden, mode)
    out, _ = attend(
        golden["query"],
        k,
        v,
        fmt,
        cu_seqlens_q=golden["cu_seqlens_q"],
        seq_lens=golden["seq_lens"],
        block_table=golden["block_table"],
        scale=golden["query"].shape[-1] ** -0.5,
        options=AttentionOptions(**options),
    )
    expected = golden[f"{mode}.out.{run}"]
    out = out[-expected.shape[0] :]  # decode: the last query of each of the two sequences
    return ((out - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("mode", SEPARATE)
def test_bytes_and_scales(golden, mode):
    _, k, v = written(golden, mode)
    for side, codes, scales in ((k, "key_cache", "k_scale_cache"), (v, "value_cache", "v_scale_cache")):
        assert (as_bytes(side.codes) != golden[f"{mode}.{codes}"]).sum() == 0
        if side.meta is not None:
            assert (side.meta[..., 0] != golden[f"{mode}.{scales}"]).sum() == 0


@pytest.mark.parametrize("mode", COMBINED)
def test_turboquant_slots(golden, mode):
    _, k, v = written(golden, mode)
    slot = torch.cat([as_bytes(t) for t in (k.codes, k.meta, v.codes, v.meta) if t is not None], -1)
    assert (slot != golden[f"{mode}.kv_cache"]).sum() == 0


@pytest.mark.parametrize("mode", SEPARATE)
@pytest.mark.parametrize("run", OPTIONS)
def test_outputs(golden, mode, run):
    if f"{mode}.out.{run}" not in golden:
        pytest.skip("not among the golden outputs")
    options = {"sinks": golden["sinks"]} if run == "sinks" else OPTIONS[run]
    assert relative_error(golden, mode, run, options) < 1e-5


@pytest.mark.parametrize("mode", COMBINED)
def test_turboquant_outputs(golden, mode):
    assert relative_error(golden, mode, "decode", {}) < 1e-3
