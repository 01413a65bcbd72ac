"""vLLM's names over any call: against the oracle, and with one argument that is anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from quantkv import vllm_api
from quantkv.vllm_api import KVQuantMode

from . import anything as a
from . import attention, refusals
from .anything import FLOATS, INDEX
from .attention import PLAIN, Case, Made, Part
from .refusals import Entry

SHARE = 2

FORMATS = {
    "int8": "INT8_PER_TOKEN_HEAD",
    "fp8_token": "FP8_PER_TOKEN_HEAD",
    "int4": "INT4_PER_TOKEN_HEAD",
    "int2": "INT2_PER_TOKEN_HEAD",
    "fp8": "FP8_PER_TENSOR",
    "fp8_e5m2": "FP8_PER_TENSOR",
    **dict.fromkeys(PLAIN, "NONE"),
}


@st.composite
def cases(draw) -> Case:
    case = draw(attention.cases())
    name = draw(st.sampled_from(list(FORMATS)))
    size, size_v = draw(attention.sizes_of([name]))
    scales = case.scales if name.startswith("fp8_e") or name == "fp8" else (1.0, 1.0)
    return replace(case, parts=(Part(name),), head_size=size, head_size_v=size_v, maps="own", scales=scales, not_finite="")


def arguments(made: Made) -> dict[str, Any]:
    """`unified_attention`'s for the call of a case."""
    case, cache, options, segment = made.case, made.caches[0], dict(made.options), made.segments[0]
    window, causal = options.pop("window", 0), options.pop("causal", True)
    window_size = (window - 1, 0 if causal is True else window - 1) if window else (-1, -1)
    names = {"alibi_sqrt": "use_alibi_sqrt", "prefix_ranges": "mm_prefix_range", "clamp_prefix_to_window": "mm_prefix_clamp_sliding_window"}
    options.pop("batch_invariant", None)
    per_token = cache.k.meta is not None
    dtype = torch.float8_e4m3fn if "output_scale" in options else made.q.dtype
    return dict(
        q=made.q,
        k=cache.k.codes,
        v=cache.v.codes,
        out=torch.empty(made.q.shape[0], made.q.shape[1], case.head_size_v, dtype=dtype),
        cu_seqlens_q=made.starts,
        max_seqlen_q=max(case.queries, default=0),
        seqused_k=torch.tensor(case.lens, dtype=made.index),
        max_seqlen_k=max(case.lens, default=0),
        softmax_scale=case.head_size**-0.5 if case.scale is None else case.scale,
        causal=causal,
        window_size=window_size,
        block_table=segment.block_table,
        softcap=options.pop("softcap", 0.0),
        q_descale=None,
        k_descale=case.scales[0] if case.scales[0] != 1 else None,
        v_descale=torch.tensor([case.scales[1]]),
        kv_quant_mode=getattr(KVQuantMode, FORMATS[case.parts[0].format]),
        k_scale_cache=cache.k.meta[..., 0] if per_token else None,
        v_scale_cache=cache.v.meta[..., 0] if per_token else None,
        **{names.get(name, name): value for name, value in options.items()},
    )


def check(case: Case) -> None:
    """The target: vLLM's names write the same bytes, and give the oracle's numbers."""
    made = Made(case)
    written = made.caches[0]
    write_all(made, written)
    given = arguments(made)
    vllm_api.unified_attention(**given)
    made.check(given["out"], None)


def write_all(made: Made, cache: Any) -> None:
    """Every row of the cache again, by vLLM's names, into tensors of one's own."""
    case, name = made.case, made.case.parts[0].format
    tokens = cache.num_blocks * case.block_size
    key, value = (made._rows(tokens, case.heads, size) for size in (case.head_size, case.head_size_v))
    slots = torch.arange(tokens, dtype=made.index)
    cache_there = type(cache)(cache.spec, cache.num_blocks, k_scale=cache.k.scale, v_scale=cache.v.scale)
    cache_there.write(key, value, slots)
    expected = [t for side in (cache_there.k, cache_there.v) for t in (side.codes, side.meta)]
    tensors = [None if t is None else torch.zeros(t.shape, dtype=t.dtype) for t in expected]
    k, k_meta, v, v_meta = tensors
    if k_meta is None:
        kind = "auto" if name in PLAIN else name
        vllm_api.triton_reshape_and_cache_flash(key, value, k, v, slots, kind, torch.tensor(cache.k.scale), cache.v.scale)
    else:
        mode = getattr(KVQuantMode, FORMATS[name])
        vllm_api.triton_reshape_and_cache_flash_per_token_head_quant(key, value, k, v, k_meta[..., 0], v_meta[..., 0], slots, mode)
    for got, want in zip(tensors, expected):
        assert got is None or torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8)), "other bytes than a cache's"


BASE = Case(1, (9, 3, 12), (2, 1, 1), (Part("int8"),), heads=2, group=2, options={"sinks": True}, scales=(1.0, 1.0))
STARTS = {"cu_seqlens_q": ("cu_seqlens_q", "seq_lens"), "seqused_k": ("seqused_k", "seq_lens", "block_table", "cu_seqlens_q")}
STARTS |= {
    "softmax_scale": ("softmax_scale", "scale"),
    "max_seqlen_q": ("max_seqlen_q", "max_query_len"),
    "q": ("q", "out", "k_cache.shape", "head_size"),
    "k": ("k", "page"),
}


def is_window(left: Any, right: Any) -> bool:
    return all(isinstance(side, int) for side in (left, right)) and left >= 0 and right in (0, left)


def _unified(_: Any, **given: Any) -> None:
    vllm_api.unified_attention(**{**arguments(Made(BASE)), **given})


def entries() -> dict[str, Entry]:
    made = Made(BASE)
    pages = made.caches[0].num_blocks
    shape = tuple(made.caches[0].k.codes.shape)
    legal = {
        "q": a.tensor((4, 4, 16), FLOATS),
        "k": a.tensor(shape, ["int8"]),
        "v": a.tensor(shape, ["int8"]),
        "out": a.tensor((4, 4, 16), FLOATS),
        "cu_seqlens_q": a.never,
        "seqused_k": a.tensor((3,), INDEX, low=2, high=13),
        "softmax_scale": a.number(),
        "causal": a.either(a.boolean, a.tensor((3,), ["bool", *INDEX])),
        "block_table": lambda v: a.tensor((3, None), INDEX, low=0, high=pages)(v) and v.shape[1] >= 2,
        "softcap": a.number(0, high=512),
        "q_descale": lambda v: v is None,
        "alibi_slopes": a.tensor((4,), FLOATS, none=True),
        "sinks": a.tensor((4,), FLOATS, none=True),
        "qq_bias": lambda v: v is None or (a.tensor((None, None), FLOATS)(v) and v.shape[0] >= 2),
        "mm_prefix_range": a.tensor((3, None, 2), INDEX, none=True),
        "use_alibi_sqrt": lambda v: v is False,
        "use_td": a.boolean,
        "window_size": lambda v: isinstance(v, (list, tuple)) and len(v) == 2 and (list(v) == [-1, -1] or is_window(*v)),
        "chunk_lookback": a.integer(-1),
        "mm_prefix_clamp_sliding_window": a.boolean,
        "k_scale_cache": a.tensor(shape[:3], ["float32"]),
        "kv_quant_mode": a.never,
        "rswa_prefix_lens": lambda v: v is None,
        "rswa_window": lambda v: v is None,
    }
    names = {
        **STARTS,
        "use_alibi_sqrt": ("alibi_sqrt",),
        "mm_prefix_range": ("mm_prefix_range", "prefix_ranges"),
        "chunk_lookback": ("chunk_lookback", "window"),
        "mm_prefix_clamp_sliding_window": ("clamp",),
        "window_size": ("window",),
        "kv_quant_mode": ("mode", "k_cache"),
        "k_scale_cache": ("scale cache of k_cache", "k_scale_cache"),
        "rswa_prefix_lens": ("rswa",),
        "rswa_window": ("rswa",),
        "v": ("v", "k.codes"),
    }
    return {"unified_attention": Entry(lambda: None, _unified, {}, legal, names)}


refusals.ENTRIES |= entries()
