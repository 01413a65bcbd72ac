"""vLLM's one read entry point, for every mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import checks, ops
from ..calls import AttendCall, AttentionOptions, Batch, Segment
from ..format import Format
from ..formats import get_format
from ..maps import LayerMaps
from .modes import KVQuantMode
from .registry import get_backend
from .views import FP8_DTYPES, ContractError, cache_side, need_tensors, need_tensors_or_none, scale_value

Scale = float | torch.Tensor


def window_tokens(window_size: tuple[int, int]) -> int:
    """Tokens of the sliding window that `(left, right)` stands for; 0: none."""
    if not isinstance(window_size, Sequence) or len(window_size) != 2:
        checks.refuse("window_size", window_size, "a pair (left, right) is needed")
    left, right = window_size
    if (left, right) == (-1, -1):
        return 0
    if left < 0 or right not in (0, left):
        checks.refuse("window_size", (left, right), "(-1, -1) for no window, (w - 1, 0) or (w - 1, w - 1) for one of w tokens")
    return left + 1


def attend(
    fmt: Format,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
    softcap: float,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    use_alibi_sqrt: bool,
    qq_bias: torch.Tensor | None,
    output_scale: Scale | None,
    mm_prefix_range: torch.Tensor | None,
    k_scale_cache: torch.Tensor | None,
    v_scale_cache: torch.Tensor | None,
    causal: bool | torch.Tensor = True,
    chunk_lookback: int = -1,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """`unified_attention` over caches in `fmt`. max_seqlen_k, an upper bound, is not needed: lengths are read from seqused_k."""
    need_tensors(q=q, k_cache=k_cache, v_cache=v_cache, out=out, cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k, block_table=block_table)
    need_tensors_or_none(sinks=sinks, alibi_slopes=alibi_slopes, qq_bias=qq_bias, mm_prefix_range=mm_prefix_range)
    num_seqs, device = seqused_k.shape[0], k_cache.device
    checks.tensor("q", q, (None, None, None), checks.ROW_DTYPES, device)
    out_dtypes = checks.ROW_DTYPES if output_scale is None else (torch.float8_e4m3fn,)
    checks.tensor("out", out, (q.shape[0], q.shape[1], None), out_dtypes, device)
    k = cache_side("k_cache", k_cache, fmt.k, q.shape[2], k_scale_cache, k_scale)
    v = cache_side("v_cache", v_cache, fmt.v, out.shape[2], v_scale_cache, v_scale)
    if v.codes.shape[:3] != k.codes.shape[:3]:
        checks.refuse("v_cache.shape", tuple(v_cache.shape), f"pages and heads as in k_cache, {tuple(k_cache.shape[:3])}")
    if q.shape[1] % k_cache.shape[2]:
        checks.refuse("q.shape[1]", q.shape[1], f"a multiple of the {k_cache.shape[2]} kv heads is needed")
    checks.tensor("seqused_k", seqused_k, (num_seqs,), checks.INDEX_DTYPES, device)
    checks.tensor("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), checks.INDEX_DTYPES, device)
    checks.tensor("block_table", block_table, (num_seqs, None), checks.INDEX_DTYPES, device)
    if mm_prefix_range is not None and (mm_prefix_range.ndim != 3 or mm_prefix_range.shape[::2] != (num_seqs, 2)):
        raise ContractError(f"Unsupported mm_prefix_range shape: {tuple(mm_prefix_range.shape)}; ({num_seqs}, any, 2) is needed")
    options = AttentionOptions(
        causal=causal,
        window=window_tokens(window_size),
        chunk_lookback=chunk_lookback,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        alibi_sqrt=use_alibi_sqrt,
        qq_bias=qq_bias,
        prefix_ranges=mm_prefix_range,
        output_scale=None if output_scale is None else scale_value("output_scale", output_scale),
    )
    maps = LayerMaps.of(fmt, q.shape[2], out.shape[2], device)
    batch = Batch(cu_seqlens_q, seqused_k, max_seqlen_q)
    ops.attend(AttendCall(q, (Segment(k, v, fmt, block_table, maps),), batch, softmax_scale, options, out))


def per_tensor_format(mode: KVQuantMode, cache_dtype: torch.dtype) -> Format:
    """NONE: rows as given, or 8-bit floats if that is what the cache holds. FP8_PER_TENSOR: also their bytes (e4m3)."""
    if cache_dtype in FP8_DTYPES:
        return get_format(FP8_DTYPES[cache_dtype])
    if mode == KVQuantMode.NONE:
        return get_format("none", cache_dtype)
    if cache_dtype != torch.uint8:
        checks.refuse("k.dtype", cache_dtype, f"{mode.name} reads one of {', '.join(map(str, FP8_DTYPES))}, torch.uint8")
    return get_format("fp8")


def unified_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool | torch.Tensor,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
    softcap: float,
    q_descale: None,
    k_descale: Scale | None,
    v_descale: Scale | None,
    seq_threshold_3D: int | None = None,
    num_par_softmax_segments: int | None = None,
    softmax_segm_output: torch.Tensor | None = None,
    softmax_segm_max: torch.Tensor | None = None,
    softmax_segm_expsum: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    output_scale: Scale | None = None,
    qq_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    mm_prefix_range: torch.Tensor | None = None,
    use_alibi_sqrt: bool = False,
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE,
    k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
    chunk_lookback: int = -1,
) -> None:
    """Attention of `q [T, HQ, D]` over paged caches, written into `out [T, HQ, D_V]`. Semantics: `AttentionOptions`.

    k, v: the caches `[num_blocks, block_size, HK, D / P]`, any strides; D and D_V may differ.
    cu_seqlens_q: int `[S + 1]`; seqused_k: int `[S]`, keys of each sequence; block_table: int `[S, pages]`.
    max_seqlen_q: longest query; max_seqlen_k: bound on the keys, not needed.
    causal: a bool, or bool `[S]`. window_size: `(w - 1, 0)` for a window of w tokens, `(-1, -1)` for none. softcap: 0 for none.
    q_descale: None. k_descale, v_descale: scale of an 8-bit float cache with one for the tensor, a number or a tensor of any shape
        that holds one and no other; other caches have none, and then these are not read.
    seq_threshold_3D .. softmax_segm_expsum: scratch of vLLM's split over keys; the ops bring their own.
    alibi_slopes, sinks: float `[HQ]`. qq_bias: float `[Q, Q]`. mm_prefix_range: int `[S, R, 2]`, inclusive.
    output_scale: `out` is float8_e4m3fn and holds `clamp(result / output_scale, -448, 448)`.
    k_scale_cache, v_scale_cache: float32 `[num_blocks, block_size, HK]` in the modes with a scale for each (token, head).
    ValueError: an argument that cannot be honoured, by its name, before anything runs. Lists are not taken for tensors.
    """
    if q_descale is not None:
        checks.refuse("q_descale", q_descale, "None: queries are bf16, fp16 or fp32 and have no scale")
    call = dict(
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        seqused_k=seqused_k,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        window_size=window_size,
        block_table=block_table,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        use_alibi_sqrt=use_alibi_sqrt,
        qq_bias=qq_bias,
        output_scale=output_scale,
        mm_prefix_range=mm_prefix_range,
        k_scale_cache=k_scale_cache,
        v_scale_cache=v_scale_cache,
    )
    need_tensors(k=k, v=v)
    mode = KVQuantMode(kv_quant_mode)
    if mode in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR):
        fmt = per_tensor_format(mode, k.dtype)
        scales = {}
        if k.dtype.itemsize == 1:
            scales = {
                f"{side}_scale": 1.0 if scale is None else scale_value(f"{side}_descale", scale)
                for side, scale in (("k", k_descale), ("v", v_descale))
            }
        attend(fmt, q, k, v, out, **call, causal=causal, chunk_lookback=chunk_lookback, **scales)
        return
    backend = get_backend(mode)
    if backend.format is not None:
        attend(backend.format, q, k, v, out, **call, causal=causal, chunk_lookback=chunk_lookback)
        return
    for argument, value, only in (("causal", causal, True), ("chunk_lookback", chunk_lookback, -1)):
        if isinstance(value, torch.Tensor) or value != only:
            checks.refuse(argument, value, f"a backend with its own attention takes {only}")
    backend.unified_attention(
        q,
        k,
        v,
        out,
        **call,
        seq_threshold_3D=seq_threshold_3D,
        num_par_softmax_segments=num_par_softmax_segments,
        softmax_segm_output=softmax_segm_output,
        softmax_segm_max=softmax_segm_max,
        softmax_segm_expsum=softmax_segm_expsum,
    )
