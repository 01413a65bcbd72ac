"""What else reads a paged cache on a GPU: whatever of it can be imported. Nothing here is ever required."""

from __future__ import annotations

import importlib
import lzma
import math
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from . import xqa
from .contestants import Contestant
from .problem import Entry, Problem, Unavailable
from .shapes import Shape

ATTENTION = ("decode", "verify", "prefill")
APPENDING = (*ATTENTION, "step")
FP8 = torch.float8_e4m3fn
BOTH = (("bf16", torch.bfloat16), ("fp8", FP8))
WORKSPACE_BYTES = 256 << 20
XQA_PAGE = 64
FLASH3_HEAD = 256


def rivals(peers: Path | None = None) -> list[Contestant]:
    """All rivals; which of them can run shows when they are prepared. peers: a folder with `fa3.xz`, FlashAttention-3 as a
    torch library, `xqa/`, libraries of XQA (`xqa.load`), and `stub/`, an engine's Triton kernels."""
    if peers and torch.cuda.is_available():
        with suppress(Unavailable):  # it says so when it is prepared; first, because quantkv's prefill uses it where it is there
            load_flash3(peers)
    found = [
        _rival("SDPA", "bf16", _sdpa, torch.bfloat16, ("decode", "prefill")),
        _rival("FlashAttention-2", "bf16", _flash2, torch.bfloat16, APPENDING),
        _rival("FlashAttention-4", "bf16", _flash4, torch.bfloat16),
    ]
    for stores, dtype in BOTH:
        flash3 = (lambda p, d: _flash3_library(p, d, peers)) if peers else _flash3
        found.append(_rival("FlashAttention-3", stores, flash3, dtype, APPENDING if stores == "bf16" else ATTENTION))
        found.append(_rival("FlashInfer", stores, _flashinfer, dtype))
        found.append(_xqa_rival("XQA", stores, peers=peers))
    if peers:
        from .vllm import engine

        found += engine(peers)
    return found


def xqa_ways(peers: Path | None = None) -> list[Contestant]:
    """XQA in other ways than FlashInfer would call it for the shape: over larger pages, and Hopper's kernel over 16 bits."""
    larger = [_xqa_rival(f"XQA page {XQA_PAGE}", stores, peers=peers, page=XQA_PAGE) for stores, _ in BOTH]
    ways = (("XQA Hopper", 0), (f"XQA Hopper page {XQA_PAGE}", XQA_PAGE))
    return larger + [_xqa_rival(name, "bf16", peers=peers, page=page, hopper=True) for name, page in ways]


def _xqa_rival(name: str, stores: str, **how) -> Contestant:
    return _rival(name, stores, lambda problem, dtype: _xqa(problem, dtype, **how), dict(BOTH)[stores], ("decode",))


def _rival(name: str, stores: str, prepare: Callable, dtype: torch.dtype, kinds: tuple[str, ...] = ATTENTION) -> Contestant:
    # FlashInfer keeps 16-bit queries; the others quantize queries and probabilities too.
    arithmetic = "8 bit" if dtype == FP8 and name != "FlashInfer" else "16 bit"
    return Contestant(name, stores, lambda problem: _prepare(prepare, problem, dtype), kinds=kinds, arithmetic=arithmetic)


def _prepare(prepare: Callable, problem: Problem, dtype: torch.dtype) -> Entry:
    if problem.device.type != "cuda":
        raise Unavailable("needs a CUDA GPU")
    call, note = prepare(problem, dtype)
    written_bytes = 0 if problem.shape.kind != "step" else 2 * problem.key[problem.new].nbytes + 2 * problem.value[problem.new].nbytes
    return Entry(call, problem.plain_rows(dtype), problem.plain_bytes(dtype.itemsize) + written_bytes, note=note)


def _module(name: str):
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(f"import {name}: {error}") from error


def _one_head_size(shape: Shape) -> None:
    if shape.head_size_v != shape.D:
        raise Unavailable(f"head sizes {shape.D}, {shape.head_size_v}: one is needed")


def _head_size_of_flash3(shape: Shape) -> None:
    if shape.D > FLASH3_HEAD:
        raise Unavailable(f"head size {shape.D}: at most {FLASH3_HEAD}")


def _window(problem: Problem) -> tuple[int, int]:
    return (problem.shape.W - 1, 0) if problem.shape.W else (-1, -1)


def _lengths(problem: Problem) -> dict[str, torch.Tensor]:
    """The lengths as FlashAttention's packages take them, and in a step the new rows, which they append."""
    s = problem.shape
    if s.kind != "step":
        return {"cache_seqlens": problem.seq_lens}
    k, v = (rows[problem.new].view(s.B, s.N, s.HK, -1) for rows in (problem.key, problem.value))
    return {"cache_seqlens": problem.seq_lens - s.N, "k": k, "v": v}


def _sdpa(problem: Problem, dtype: torch.dtype):
    """PyTorch's own attention over a dense cache `[B, HK, L, D]`: no pages."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    s = problem.shape
    if s.W:
        raise Unavailable("no window without a mask in memory")
    q = problem.q.view(s.B, s.Q, s.HQ, s.D).transpose(1, 2)
    k, v = (t.view(s.B, s.L, s.HK, -1).transpose(1, 2).contiguous() for t in (problem.key, problem.value))
    if s.Q == 1:
        call = lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(0, 1)
        return call, "dense cache"
    # Its lower-right mask takes no grouped heads: the keys are copied beforehand, at no cost to its time.
    k, v = (t.repeat_interleave(s.HQ // s.HK, 1) for t in (k, v))
    mask = causal_lower_right(s.Q, s.L)
    return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(0, 1), "dense cache"


def _flash2(problem: Problem, dtype: torch.dtype):
    attend = _module("flash_attn").flash_attn_with_kvcache
    page = 256  # the smallest that it takes
    cache_k, cache_v, table = problem.paged(dtype, page)
    s, lengths = problem.shape, _lengths(problem)
    q = problem.q.view(s.B, s.Q, s.HQ, s.D)
    call = lambda: attend(
        q, cache_k, cache_v, **lengths, block_table=table, softmax_scale=problem.scale, causal=True, window_size=_window(problem)
    ).flatten(0, 1)
    return call, f"page {page}"


def _flash3(problem: Problem, dtype: torch.dtype):
    attend = _module("flash_attn_interface").flash_attn_with_kvcache
    _head_size_of_flash3(problem.shape)
    cache_k, cache_v, table = problem.paged(dtype)
    s, lengths = problem.shape, _lengths(problem)
    q = problem.q.view(s.B, s.Q, s.HQ, s.D).to(dtype)
    call = lambda: attend(
        q, cache_k, cache_v, **lengths, page_table=table, softmax_scale=problem.scale, causal=True, window_size=_window(problem)
    ).flatten(0, 1)
    return call, ""


def load_flash3(peers: Path) -> None:
    """Load FlashAttention-3 as an engine ships it, a library of torch operators without a package, from `peers / "fa3.xz"`.
    `Unavailable` where it is not there or cannot be loaded. From then on quantkv's prefill uses it too."""
    if hasattr(torch.ops._vllm_fa3_C, "fwd"):
        return
    packed = peers / "fa3.xz"
    if not packed.exists():
        raise Unavailable(f"{packed}: no such file")
    library = Path(tempfile.mkdtemp()) / "_vllm_fa3_C.abi3.so"
    library.write_bytes(lzma.decompress(packed.read_bytes()))
    try:
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"{packed}: {error}") from error
    finally:
        library.unlink()


def flash3_over_pages(
    q,
    k,
    v,
    out,
    *,
    cu_seqlens_q,
    seq_lens,
    block_table,
    scale,
    max_query_len,
    max_keys,
    window=(-1, -1),
    descale=None,
    softcap=0.0,
    sinks=None,
) -> None:
    """What `load_flash3` brought, causal, into out. q, out: `[T, HQ, D]`. k, v: `[num_blocks, P, HK, D]`, any strides.
    descale: `[S, HK]`, of 8-bit rows. sinks: bf16 `[HQ]`."""
    # q k v | k_new v_new q_v | out | cu_seqlens q k k_new | seqused q k | max_seqlen q k | page table, kv_batch_idx, leftpad_k |
    # rotary cos sin seqlens | descales | scale causal window softcap | rotary interleaved, scheduler, splits (0: its own choice),
    # pack_gqa, sm margin, sinks, and a context-parallel world of one
    torch.ops._vllm_fa3_C.fwd(
        q,
        k,
        v,
        None,
        None,
        None,
        out,
        cu_seqlens_q,
        None,
        None,
        None,
        seq_lens,
        max_query_len,
        max_keys,
        block_table,
        None,
        None,
        None,
        None,
        None,
        descale,
        descale,
        descale,
        scale,
        True,
        *window,
        softcap,
        True,
        None,
        0,
        None,
        0,
        sinks,
        1,
        0,
        None,
    )


def _flash3_library(problem: Problem, dtype: torch.dtype, peers: Path):
    if not (peers / "fa3.xz").exists():
        return _flash3(problem, dtype)
    load_flash3(peers)
    _head_size_of_flash3(problem.shape)
    k, v, table = problem.paged(dtype)
    s, q = problem.shape, problem.q.to(dtype)
    out = problem.q.new_empty(*q.shape[:2], s.head_size_v)
    batch = {
        "cu_seqlens_q": problem.cu_seqlens_q,
        "seq_lens": problem.seq_lens,
        "block_table": table,
        "scale": problem.scale,
        "max_query_len": s.Q,
        "max_keys": s.L,
        "window": _window(problem),
        "descale": None if dtype != FP8 else torch.ones(s.B, s.HK, device=problem.device),
    }

    def call():
        flash3_over_pages(q, k, v, out, **batch)
        return out

    if s.kind != "step":
        return call, ""
    from .vllm import write_16_bit  # what the engine writes its pages with

    write = write_16_bit(problem, peers, (k, v))
    new = [t[problem.new] for t in (problem.key, problem.value, problem.slots)]

    def step():
        write(*new)
        return call()

    return step, "and vLLM's write"


def _flash4(problem: Problem, dtype: torch.dtype):
    attend = _module("flash_attn.cute").flash_attn_varlen_func
    page = 128  # its tile: smaller pages take a slower path
    k, v, table = problem.paged(dtype, page)
    s = problem.shape
    q = problem.q.view(s.B, s.Q, s.HQ, s.D)
    window = (problem.shape.W - 1, 0) if problem.shape.W else (None, None)

    def call():
        out = attend(
            q,
            k,
            v,
            seqused_k=problem.seq_lens,
            page_table=table,
            softmax_scale=problem.scale,
            causal=True,
            window_size=window,
            num_splits=0 if s.Q == 1 else 1,
        )
        return (out[0] if isinstance(out, tuple) else out).flatten(0, 1)

    return call, f"page {page}"


def _flashinfer(problem: Problem, dtype: torch.dtype):
    flashinfer = _module("flashinfer")
    s = problem.shape
    _one_head_size(s)
    k, v, table = problem.paged(dtype)
    pages = table.shape[1]
    start = torch.arange(s.B + 1, device=problem.device, dtype=torch.int32)
    last = torch.full((s.B,), s.L - (pages - 1) * s.P, device=problem.device, dtype=torch.int32)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=problem.device)
    types = {"q_data_type": problem.q.dtype, "kv_data_type": dtype, "sm_scale": problem.scale}
    types["window_left"] = _window(problem)[0]
    if s.Q == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(start * pages, table.flatten(), last, s.HQ, s.HK, s.D, s.P, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(problem.cu_seqlens_q, start * pages, table.flatten(), last, s.HQ, s.HK, s.D, s.P, causal=True, **types)
    return lambda: wrapper.run(problem.q, (k, v)), "tensor cores"


def _xqa(problem: Problem, dtype: torch.dtype, peers: Path | None = None, page: int = 0, hopper: bool = False):
    """TensorRT-LLM's decode kernel, from FlashInfer: its libraries where peers has them, its package otherwise. It scales scores by
    `D ** -0.5` itself. page: another size of page than the shape's. hopper: of `xqa.load`."""
    s = problem.shape
    _one_head_size(s)
    if not math.isclose(problem.scale, s.D**-0.5):
        raise Unavailable("its softmax scale is fixed")
    if page == s.P:
        raise Unavailable(f"pages of {page} are the shape's own")
    page = page or s.P
    if peers and (peers / "xqa").is_dir():
        attend = xqa.load(peers / "xqa", s, dtype, page, hopper)
    elif hopper:
        raise Unavailable("FlashInfer's package has it over 8 bits alone")
    else:
        attend = _module("flashinfer.xqa").xqa
    k, v, table = problem.paged(dtype, page)
    q = problem.q.view(s.B, 1, s.HQ, s.D)
    out = torch.empty_like(q)
    workspace, semaphores = (
        torch.zeros(n, dtype=t, device=problem.device) for n, t in ((WORKSPACE_BYTES, torch.uint8), (8 << 20, torch.uint32))
    )
    lengths = problem.seq_lens.view(s.B, 1).to(torch.uint32)

    def call():
        attend(q, k, v, table, lengths, out, workspace, semaphores, s.HK, page, sliding_win_size=s.W)
        return out.view(s.B, s.HQ, s.D)

    return call, ""
