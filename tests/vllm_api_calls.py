"""The golden rows and queries through vLLM's names, for the tests of `quantkv.vllm_api`."""

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from quantkv import vllm_api as backend
from quantkv.vllm_api import KVQuantMode as Mode
from quantkv.vllm_api import get_backend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DATA = Path(__file__).parent / "data"
PER_TOKEN_HEAD = [mode for mode in Mode if mode.is_per_token_head]
PRESETS = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
CODE_DTYPES = {Mode.INT8_PER_TOKEN_HEAD: torch.int8, Mode.FP8_PER_TOKEN_HEAD: torch.float8_e4m3fn}
OUTPUT_BOUND = {"per_token_head": 1e-5, "turboquant": 1e-3}  # relative, as vLLM's documents give them
BLOCKS, BLOCK_SIZE, HEADS = 8, 16, 2


@cache
def golden(head_size):
    return {name: t.to(DEVICE) for name, t in load_file(DATA / f"d{head_size}_bf16.safetensors").items()}


def as_bytes(t):
    return t.contiguous().view(torch.uint8)


def check_stored(got, expected, bits):
    """The golden bytes, or codes of `bits` bits: on a CPU all of them. On a GPU a rotation is a sum in another order, and rounds a
    few rows otherwise: at most 0.4 % of the bytes then differ (docs/formats.md), each code by one level."""
    got, expected = as_bytes(got), as_bytes(expected)
    if DEVICE.type == "cpu" or bits == 0:
        assert torch.equal(got, expected)
        return
    assert (got != expected).float().mean() <= 0.004
    if bits in (2, 4):
        for shift in range(0, 8, bits):
            levels = [(t.int() >> shift) & (2**bits - 1) for t in (got, expected)]
            assert (levels[0] - levels[1]).abs().max() <= 1


def relative_error(result, expected):
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def empty_cache(mode, head_size, make=torch.zeros):
    """key_cache or value_cache of a mode."""
    size = get_backend(mode).packed_head_size(head_size)
    return make(BLOCKS, BLOCK_SIZE, HEADS, size, dtype=torch.uint8).view(CODE_DTYPES.get(mode, torch.uint8))


def write(mode, head_size, key_cache=None, value_cache=None, scales=None):
    """The golden rows in a mode: key_cache, value_cache, k_scale_cache, v_scale_cache."""
    g, owner = golden(head_size), get_backend(mode)
    key_cache = empty_cache(mode, head_size) if key_cache is None else key_cache
    value_cache = empty_cache(mode, head_size) if value_cache is None else value_cache
    scales = owner.allocate_scale_caches(BLOCKS, BLOCK_SIZE, HEADS, DEVICE) if scales is None else scales
    backend.triton_reshape_and_cache_flash_per_token_head_quant(
        g["key"], g["value"], key_cache, value_cache, *scales, g["slot_mapping"], mode
    )
    return key_cache, value_cache, *scales


def read(head_size, k, v, k_scale_cache=None, v_scale_cache=None, mode=Mode.NONE, out=None, **overrides):
    """unified_attention of the golden queries with the defaults of a causal call."""
    g = golden(head_size)
    out = torch.full_like(g["query"], torch.nan) if out is None else out
    call = dict(
        q=g["query"],
        k=k,
        v=v,
        out=out,
        cu_seqlens_q=g["cu_seqlens_q"],
        max_seqlen_q=5,
        seqused_k=g["seq_lens"],
        max_seqlen_k=37,
        softmax_scale=head_size**-0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=g["block_table"],
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        kv_quant_mode=mode,
        k_scale_cache=k_scale_cache,
        v_scale_cache=v_scale_cache,
    )
    backend.unified_attention(**{**call, **overrides})
    return out


def turboquant_arguments(head_size, preset):
    config = backend.TurboQuantConfig.from_cache_dtype(preset, head_size)
    levels = backend.get_centroids(head_size, config.centroid_bits)
    rotation = backend.fast_hadamard_transform(torch.eye(head_size)) / head_size**0.5
    levels = levels.to(DEVICE)
    return config, levels, (levels[:-1] + levels[1:]) / 2, rotation


def turboquant_write(head_size, preset, kv_cache=None, rotation=None):
    g = golden(head_size)
    config, _, midpoints, hadamard = turboquant_arguments(head_size, preset)
    if kv_cache is None:
        kv_cache = torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, config.slot_size_aligned, dtype=torch.uint8)
    backend.triton_turboquant_store(
        g["key"],
        g["value"],
        kv_cache,
        g["slot_mapping"],
        hadamard if rotation is None else rotation,
        midpoints,
        config.key_mse_bits,
        config.key_packed_size,
        config.effective_value_quant_bits,
        config.key_fp8,
    )
    return kv_cache


def turboquant_read(head_size, preset, kv_cache, rotation=None, **overrides):
    g = golden(head_size)
    config, levels, _, hadamard = turboquant_arguments(head_size, preset)
    rotation = hadamard if rotation is None else rotation
    call = dict(
        query=g["query"][4:6],
        kv_cache=kv_cache,
        block_table=g["block_table"],
        seq_lens=g["seq_lens"],
        Pi=rotation.mT,
        centroids=levels,
        scale=head_size**-0.5,
        mse_bits=config.key_mse_bits,
        key_packed_size=config.key_packed_size,
        value_quant_bits=config.effective_value_quant_bits,
        key_fp8=config.key_fp8,
        norm_correction=config.norm_correction,
        PiT=rotation,
    )
    return backend.triton_turboquant_decode_attention(**{**call, **overrides})


def layouts(shape, dtype):
    """Views of one shape in memory that is not token-major and contiguous; the rest of the memory is 0xFF."""
    blocks, size, heads, width = shape

    def memory(*n):
        return torch.full(n, 0xFF, dtype=torch.uint8)

    itemsize = dtype.itemsize
    yield "head-major", memory(blocks, heads, size, width * itemsize).view(dtype).transpose(1, 2)
    yield "padded", memory(blocks, size, heads, (width + 16) * itemsize).view(dtype)[..., :width]
    yield "every third block, offset", memory(3 * blocks, size, heads, width * itemsize).view(dtype)[1::3]
