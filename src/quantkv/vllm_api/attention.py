"""vLLM's read entry points, for every mode."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from numbers import Integral

import torch

from .. import checks, ops
from ..calls import AttendCall, AttentionOptions, Batch, Segment
from ..format import Format
from ..formats import get_format
from ..maps import LayerMaps
from . import partials
from .modes import KVQuantMode, mode_name
from .registry import get_backend
from .views import FP8_DTYPES, ContractError, cache_side, need_tensors, need_tensors_or_none, scale_value, scale_values

Scale = float | torch.Tensor
PER_TENSOR = (KVQuantMode.NONE.name, KVQuantMode.FP8_PER_TENSOR.name)


def window_tokens(window_size: tuple[int, int]) -> int:
    """Tokens of the sliding window that `(left, right)` stands for; 0: none."""
    if not isinstance(window_size, Sequence) or len(window_size) != 2 or not all(isinstance(n, Integral) for n in window_size):
        checks.refuse("window_size", window_size, "a pair (left, right) of integers is needed")
    left, right = window_size
    if (left, right) == (-1, -1):
        return 0
    if left < 0 or right not in (0, left):
        checks.refuse("window_size", (left, right), "(-1, -1) for no window, (w - 1, 0) or (w - 1, w - 1) for one of w tokens")
    return left + 1


def reference_window(rswa_prefix_lens: torch.Tensor | None, rswa_window: int | None, window: int, causal: bool | torch.Tensor) -> int:
    """Tokens of the window beside the prefix; 0 without one."""
    if rswa_prefix_lens is None and rswa_window is None:
        return 0
    if rswa_prefix_lens is None or rswa_window is None:
        missing = "rswa_window" if rswa_window is None else "rswa_prefix_lens"
        checks.refuse(missing, None, "rswa_prefix_lens and rswa_window come together")
    need_tensors(rswa_prefix_lens=rswa_prefix_lens)
    checks.integer("rswa_window", rswa_window, 1, "None or a number of tokens")
    if window:
        checks.refuse("window_size", (window - 1, 0), "(-1, -1) is needed with rswa_window, which is the window then")
    if causal is not True:
        checks.refuse("causal", causal if isinstance(causal, bool) else "a tensor", "True is needed with rswa_window")
    return rswa_window


def query_rows(q: torch.Tensor, out: torch.Tensor, q_descale: Scale | None) -> tuple[torch.Tensor, float]:
    """q in a dtype that the ops take, and what its scores are multiplied by. 8-bit floats are exact in each of those dtypes."""
    if q.dtype in FP8_DTYPES:
        dtype = out.dtype if out.dtype in checks.ROW_DTYPES else torch.bfloat16
        return q.to(dtype), 1.0 if q_descale is None else scale_value("q_descale", q_descale)
    if q_descale is not None:
        checks.refuse("q_descale", q_descale, f"None: queries of {q.dtype} have no scale, those of {', '.join(map(str, FP8_DTYPES))} do")
    return q, 1.0


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
    q_descale: Scale | None = None,
    k_descale: Scale | None = None,
    v_descale: Scale | None = None,
    rswa_prefix_lens: torch.Tensor | None = None,
    rswa_window: int | None = None,
    mm_prefix_clamp_sliding_window: bool = False,
) -> None:
    """`unified_attention` over caches in `fmt`."""
    need_tensors(q=q, k_cache=k_cache, v_cache=v_cache, out=out, cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k, block_table=block_table)
    need_tensors_or_none(sinks=sinks, alibi_slopes=alibi_slopes, qq_bias=qq_bias, mm_prefix_range=mm_prefix_range)
    checks.tensor("seqused_k", seqused_k, (None,), checks.INDEX_DTYPES)
    checks.number("softmax_scale", softmax_scale)
    checks.integer("chunk_lookback", chunk_lookback, -1, "-1 (none) or more")
    checks.instance("mm_prefix_clamp_sliding_window", mm_prefix_clamp_sliding_window, bool, "True or False")
    num_seqs, device = seqused_k.shape[0], k_cache.device
    checks.tensor("q", q, (None, None, None), (*checks.ROW_DTYPES, *FP8_DTYPES), device)
    out_dtypes = checks.ROW_DTYPES if output_scale is None else (torch.float8_e4m3fn,)
    checks.tensor("out", out, (q.shape[0], q.shape[1], None), out_dtypes, device)
    checks.tensor("seqused_k", seqused_k, (num_seqs,), checks.INDEX_DTYPES, device)
    checks.tensor("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), checks.INDEX_DTYPES, device)
    checks.tensor("block_table", block_table, (num_seqs, None), checks.INDEX_DTYPES, device)
    factors = [
        1.0 if scale is None else scale_values(argument, scale, (num_seqs, k_cache.shape[2]))
        for argument, scale in (("k_descale", k_descale), ("v_descale", v_descale))
    ]
    k_scales, v_scales = (f if isinstance(f, torch.Tensor) else None for f in factors)
    k = cache_side("k_cache", k_cache, fmt.k, q.shape[2], k_scale_cache, 1.0 if k_scales is not None else factors[0])
    v = cache_side("v_cache", v_cache, fmt.v, out.shape[2], v_scale_cache, 1.0 if v_scales is not None else factors[1])
    if v.codes.shape[:3] != k.codes.shape[:3]:
        checks.refuse("v_cache.shape", tuple(v_cache.shape), f"pages and heads as in k_cache, {tuple(k_cache.shape[:3])}")
    if q.shape[1] % k_cache.shape[2]:
        checks.refuse("q.shape[1]", q.shape[1], f"a multiple of the {k_cache.shape[2]} kv heads is needed")
    if mm_prefix_range is not None and (mm_prefix_range.ndim != 3 or mm_prefix_range.shape[::2] != (num_seqs, 2)):
        raise ContractError(f"Unsupported mm_prefix_range shape: {tuple(mm_prefix_range.shape)}; ({num_seqs}, any, 2) is needed")
    if isinstance(causal, torch.Tensor) and causal.dtype in checks.INDEX_DTYPES:
        causal = causal != 0
    window = window_tokens(window_size)
    beside_prefix = reference_window(rswa_prefix_lens, rswa_window, window, causal)
    options = AttentionOptions(
        causal=causal,
        window=window or beside_prefix,
        chunk_lookback=chunk_lookback if window or chunk_lookback < 0 else -1,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        alibi_sqrt=use_alibi_sqrt,
        qq_bias=qq_bias,
        prefix_ranges=mm_prefix_range,
        clamp_prefix_to_window=mm_prefix_clamp_sliding_window if window else False,
        output_scale=None if output_scale is None else scale_value("output_scale", output_scale),
    )
    maps = LayerMaps.of(fmt, q.shape[2], out.shape[2], device)
    rows, factor = query_rows(q, out, q_descale)
    batch, segments = Batch(cu_seqlens_q, seqused_k, max_seqlen_q), (Segment(k, v, fmt, block_table, maps),)
    call = AttendCall(rows, segments, batch, softmax_scale * factor, options, out)
    if rswa_prefix_lens is None and k_scales is None and v_scales is None:
        ops.attend(call)
    else:
        partials.attend(call, rswa_prefix_lens, k_scales, v_scales)


def per_tensor_format(name: str, cache_dtype: torch.dtype) -> Format:
    """NONE: rows as given, or 8-bit floats if that is what the cache holds. FP8_PER_TENSOR: also their bytes (e4m3)."""
    if cache_dtype in FP8_DTYPES:
        return get_format(FP8_DTYPES[cache_dtype])
    if name == KVQuantMode.NONE.name:
        return get_format("none", cache_dtype)
    if cache_dtype != torch.uint8:
        checks.refuse("k.dtype", cache_dtype, f"{name} reads one of {', '.join(map(str, FP8_DTYPES))}, torch.uint8")
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
    q_descale: Scale | None,
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
    kv_quant_mode: Enum | int = KVQuantMode.NONE,
    k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
    chunk_lookback: int = -1,
    *,
    rswa_prefix_lens: torch.Tensor | None = None,
    rswa_window: int | None = None,
    use_td: bool = False,
    mm_prefix_clamp_sliding_window: bool = False,
) -> None:
    """Attention of `q [T, HQ, D]` over paged caches, written into `out [T, HQ, D_V]`. docs/vllm-api.md has what each argument means.

    q: bf16, fp16, fp32, or 8-bit floats, of which q_descale, a number or a tensor of one, is the scale.
    k, v: the caches `[num_blocks, block_size, HK, D / P]`, any strides; D and D_V may differ. Rows may be longer by one float32
        where each (token, head) has a scale.
    cu_seqlens_q: int `[S + 1]`; seqused_k: int `[S]`, keys of each sequence; block_table: int `[S, pages]`.
    max_seqlen_q: longest query; max_seqlen_k: bound on the keys, not needed.
    causal: a bool, or bool or int `[S]`, 0: not. window_size: `(w - 1, 0)` for a window of w tokens, `(-1, -1)` for none;
        chunk_lookback: as in `AttentionOptions`, in force with a window. softcap: 0 for none.
    k_descale, v_descale: scale of an 8-bit float cache with one for the tensor: a number, a tensor of any shape that holds one and no
        other, or `[S, HK]`, one for each sequence and kv head. Other caches have none, and then these are not read.
    seq_threshold_3D .. softmax_segm_expsum: scratch of vLLM's split over keys; the ops bring their own. use_td: how vLLM's kernel loads
        rows on other GPUs; it changes no result.
    alibi_slopes, sinks: float `[HQ]`. qq_bias: float `[Q, Q]`. mm_prefix_range: int `[S, R, 2]`, inclusive;
        mm_prefix_clamp_sliding_window: not further back than the window.
    rswa_prefix_lens: int `[S]`, with rswa_window, tokens: causal attention to the keys before the one, and to those in the other.
    output_scale: `out` is float8_e4m3fn and holds `clamp(result / output_scale, -448, 448)`.
    kv_quant_mode: a member of this package's KVQuantMode or of an engine's, read by its name.
    k_scale_cache, v_scale_cache: float32 `[num_blocks, block_size, HK]` in the modes with a scale for each (token, head).
    ValueError: an argument that cannot be supported, by its name, before anything runs. Lists are not taken for tensors.
    """
    need_tensors(k=k, v=v)
    if not isinstance(use_td, bool):
        checks.refuse("use_td", use_td, "True or False is needed")
    call = dict(
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        seqused_k=seqused_k,
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
    further = dict(
        causal=causal,
        chunk_lookback=chunk_lookback,
        q_descale=q_descale,
        rswa_prefix_lens=rswa_prefix_lens,
        rswa_window=rswa_window,
        mm_prefix_clamp_sliding_window=mm_prefix_clamp_sliding_window,
    )
    name = mode_name(kv_quant_mode)
    if name in PER_TENSOR:
        scales = dict(k_descale=k_descale, v_descale=v_descale) if k.dtype.itemsize == 1 else {}
        attend(per_tensor_format(name, k.dtype), q, k, v, out, **call, **further, **scales)
        return
    backend = get_backend(kv_quant_mode)
    if backend.format is not None:
        attend(backend.format, q, k, v, out, **call, **further)
        return
    for argument, value in further.items():
        default = {"causal": True, "chunk_lookback": -1, "mm_prefix_clamp_sliding_window": False}.get(argument)
        if isinstance(value, torch.Tensor) or value != default:
            checks.refuse(argument, value, f"a backend with its own attention takes {default}")
    backend.unified_attention(
        q,
        k,
        v,
        out,
        **call,
        max_seqlen_k=max_seqlen_k,
        seq_threshold_3D=seq_threshold_3D,
        num_par_softmax_segments=num_par_softmax_segments,
        softmax_segm_output=softmax_segm_output,
        softmax_segm_max=softmax_segm_max,
        softmax_segm_expsum=softmax_segm_expsum,
    )


def unified_attention_diffkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool | torch.Tensor,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
    softcap: float,
    max_seqlen_q: int = 1,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    use_alibi_sqrt: bool = False,
    seq_threshold_3D: int | None = None,
    num_par_softmax_segments: int | None = None,
    softmax_segm_output: torch.Tensor | None = None,
    softmax_segm_max: torch.Tensor | None = None,
    softmax_segm_expsum: torch.Tensor | None = None,
    k_descale: Scale | None = None,
    v_descale: Scale | None = None,
    q_descale: Scale | None = None,
) -> None:
    """`unified_attention` over one combined cache `[num_blocks, block_size, HK, D + D_V]`, of which k and v are the views: rows as they
    are, or 8-bit floats with k_descale and v_descale."""
    unified_attention(
        q,
        k,
        v,
        out,
        cu_seqlens_q,
        max_seqlen_q,
        seqused_k,
        0,
        softmax_scale,
        causal,
        window_size,
        block_table,
        softcap,
        q_descale,
        k_descale,
        v_descale,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        use_alibi_sqrt=use_alibi_sqrt,
    )
