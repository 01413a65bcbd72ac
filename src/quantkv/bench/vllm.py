"""The Triton kernels of the engine whose formats these are (vLLM 0.33), from a folder that holds them: the kernels that an
int8, fp8, int4 or TurboQuant cache is served with today."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..calls import PagedTensor
from ..formats import get_format
from ..implementations.reference.write import dequantize
from ..maps import LayerMaps, hadamard
from .contestants import Contestant
from .problem import Entry, Problem, Unavailable

NAME, OPS = "vLLM Triton", "vllm.v1.attention.ops."
WRITER = OPS + "triton_reshape_and_cache_flash"
# our name -> their mode, dtype of the codes, bytes of an element
PER_TOKEN_HEAD = {
    "bf16": ("NONE", torch.bfloat16, 2),
    "int8": ("INT8_PER_TOKEN_HEAD", torch.int8, 1),
    "fp8_token": ("FP8_PER_TOKEN_HEAD", torch.float8_e4m3fn, 1),
    "int4": ("INT4_PER_TOKEN_HEAD", torch.uint8, 0.5),
}
TURBOQUANT = {"tq_k8v4": "turboquant_k8v4", "tq4": "turboquant_4bit_nc", "tq3": "turboquant_3bit_nc"}
SEGMENTS = 16  # splits of a decode, vLLM's own choice
WRITTEN_AT_ONCE = 1 << 16


def engine(peers: Path) -> list[Contestant]:
    """The engine's kernels for every format that both have."""
    found = []
    for stores in PER_TOKEN_HEAD:
        arithmetic = "uncentred" if stores == "int4" else "16 bit"
        prepare = lambda p, stores=stores: _per_token_head(p, stores, peers)
        found.append(Contestant(NAME, stores, prepare, arithmetic=arithmetic))
    for stores in TURBOQUANT:
        prepare = lambda p, stores=stores: _turboquant(p, stores, peers)
        found.append(Contestant(NAME, stores, prepare, kinds=("decode", "write")))
    return found


def _import(problem: Problem, peers: Path, module: str):
    stub = peers / "stub"
    if problem.device.type != "cuda":
        raise Unavailable("needs a CUDA GPU")
    if not stub.is_dir():
        raise Unavailable(f"{stub}: no such folder")
    if str(stub) not in sys.path:
        sys.path.insert(0, str(stub))
    try:
        return __import__(module, fromlist=["_"])
    except ImportError as error:
        raise Unavailable(f"import {module}: {error}") from error


def _rows(stores: str, head_size: int, device: torch.device, k: PagedTensor, v: PagedTensor):
    """What vLLM's cache holds, by this package's formats: the bytes are the same."""
    fmt = get_format(stores)
    maps = LayerMaps.of(fmt, head_size, head_size, device)
    sides = ((k, fmt.k, maps.k), (v, fmt.v, maps.v))
    return lambda slots: tuple(dequantize(*side, slots, dtype=torch.float64) for side in sides)


def _in_parts(problem: Problem, write) -> None:
    for at in range(0, len(problem.slots), WRITTEN_AT_ONCE):
        part = slice(at, at + WRITTEN_AT_ONCE)
        write(problem.key[part], problem.value[part], problem.slots[part])


def write_16_bit(problem: Problem, peers: Path, caches: Sequence[torch.Tensor]) -> Callable[..., None]:
    """(key, value `[T, HK, D]`, slots `[T]`) into 16-bit caches `[num_blocks, P, HK, D]`."""
    writer = _import(problem, peers, WRITER).triton_reshape_and_cache_flash
    one = torch.ones(1, device=problem.device)
    return lambda key, value, slots: writer(key, value, *caches, slots, "auto", one, one)


def _per_token_head(problem: Problem, stores: str, peers: Path) -> Entry:
    writer = _import(problem, peers, WRITER)
    reader = _import(problem, peers, OPS + "triton_unified_attention")
    modes = _import(problem, peers, "vllm.v1.kv_cache_interface").KVQuantMode
    name, dtype, width = PER_TOKEN_HEAD[stores]
    mode, s, device = modes[name], problem.shape, problem.device
    size = (problem.num_blocks, s.P, s.HK)
    row = int(s.D * width) if dtype.itemsize == 1 else s.D
    caches = [torch.zeros(*size, row, dtype=dtype, device=device) for _ in range(2)]
    one = torch.ones(1, device=device)
    if stores == "bf16":
        scales, write = [None, None], write_16_bit(problem, peers, caches)
    else:
        scales = [torch.zeros(size, device=device) for _ in range(2)]
        quantize = writer.triton_reshape_and_cache_flash_per_token_head_quant
        write = lambda k, v, slots: quantize(k, v, *caches, *scales, slots, mode)
    meta = [None if t is None else t[..., None] for t in scales]
    rows = _rows(stores, s.D, device, *(PagedTensor(c, m) for c, m in zip(caches, meta)))
    row_bytes = s.D * width + (0 if stores == "bf16" else 4)
    if s.kind == "write":
        nbytes = int(2 * s.N * s.HK * (2 * s.D + row_bytes))
        return Entry(lambda: write(problem.key, problem.value, problem.slots), rows, nbytes)
    _in_parts(problem, write)

    most = max(128 // s.HK, 1)  # sequences that are served with splits
    partial = [torch.empty(most, s.HQ, SEGMENTS, *last, device=device) for last in ((1 << (s.D - 1).bit_length(),), (), ())]
    out = torch.empty_like(problem.q)
    window = (s.W - 1, 0) if s.W else (-1, -1)

    def call():
        reader.unified_attention(
            problem.q,
            *caches,
            out,
            problem.cu_seqlens_q,
            s.Q,
            problem.seq_lens,
            s.L,
            problem.scale,
            True,
            window,
            problem.block_table,
            0.0,
            None,
            one,
            one,
            seq_threshold_3D=most,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=partial[0],
            softmax_segm_max=partial[1],
            softmax_segm_expsum=partial[2],
            kv_quant_mode=mode,
            k_scale_cache=scales[0],
            v_scale_cache=scales[1],
        )
        return out

    nbytes = int(2 * s.tokens_read * s.HK * row_bytes)
    if s.kind != "step":
        return Entry(call, rows, nbytes)
    key, value, slots = (t[problem.new] for t in (problem.key, problem.value, problem.slots))
    write(-key, -value, slots)  # what is not written before it is read shows

    def step():
        write(key, value, slots)
        return call()

    return Entry(step, rows, nbytes + int(2 * len(slots) * s.HK * (2 * s.D + row_bytes)))


def _turboquant(problem: Problem, stores: str, peers: Path) -> Entry:
    s, device, fmt = problem.shape, problem.device, get_format(stores)
    if s.W:
        raise Unavailable("no window")
    config = _import(problem, peers, "vllm.model_executor.layers.quantization.turboquant.config").TurboQuantConfig
    solve = _import(problem, peers, "vllm.model_executor.layers.quantization.turboquant.centroids").get_centroids
    store = _import(problem, peers, OPS + "triton_turboquant_store").triton_turboquant_store
    decode = _import(problem, peers, OPS + "triton_turboquant_decode").triton_turboquant_decode_attention
    c = config.from_cache_dtype(TURBOQUANT[stores], s.D)
    centroids = solve(s.D, c.centroid_bits).to(device)
    levels = centroids.sort().values
    midpoints = (levels[:-1] + levels[1:]) / 2
    rotation = (hadamard(s.D) / s.D**0.5).float().to(device)
    cache = torch.zeros(problem.num_blocks, s.P, s.HK, c.slot_size_aligned, device=device, dtype=torch.uint8)
    sizes = (c.key_mse_bits, c.key_packed_size, c.effective_value_quant_bits, c.key_fp8)
    write = lambda k, v, slots: store(k, v, cache, slots, rotation, midpoints, *sizes)

    def side(codec, at: int) -> PagedTensor:
        """A slot holds K codes, K metadata, V codes, V metadata."""
        end = at + codec.row.code_bytes(s.D)
        meta = cache[..., end : end + codec.row.meta_bytes].view(torch.float16) if codec.row.meta else None
        return PagedTensor(cache[..., at:end].view(codec.code_dtype), meta)

    rows = _rows(stores, s.D, device, side(fmt.k, 0), side(fmt.v, c.key_packed_size))
    row_bytes = c.slot_size_aligned
    if s.kind == "write":
        nbytes = s.N * s.HK * (4 * s.D + row_bytes)
        return Entry(lambda: write(problem.key, problem.value, problem.slots), rows, nbytes)
    _in_parts(problem, write)
    call = lambda: decode(
        problem.q, cache, problem.block_table, problem.seq_lens, rotation, centroids, problem.scale, *sizes, c.norm_correction, rotation
    )
    return Entry(call, rows, s.tokens_read * s.HK * row_bytes)
