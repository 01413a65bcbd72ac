"""write and attend on any device: they choose an implementation, and are `torch.library` operators under torch.compile.

Nothing on the GPU path waits for the device, so both can be captured in a CUDA graph and replayed with other lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import checks
from .calls import AttentionOptions, Memo, Segment, Side
from .flat import OPTION_TENSORS, flatten_cache, flatten_options, flatten_segments, unflatten_cache, unflatten_segments
from .format import Format, get_format
from .implementations import reference
from .maps import LayerMaps

IMPLEMENTATIONS = ("auto", "hopper", "dense", "triton", "reference")


def choose(implementation: str, device: torch.device) -> str:
    """Check a choice against the device. "auto" stays "auto" on a GPU, where the call decides (`resolve`); elsewhere it is "reference".

    ValueError for one that cannot run there: an explicit choice never becomes another one.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "auto":
        return "auto" if device.type == "cuda" else "reference"
    if implementation == "triton" and device.type != "cuda" and not _interpreted():
        raise ValueError(f"implementation='triton': tensors are on {device}, and the kernels need a GPU (or TRITON_INTERPRET=1)")
    return implementation


def resolve(
    implementation: str,
    q: torch.Tensor,
    segments: Sequence[Segment],
    out: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    options: AttentionOptions = AttentionOptions(),
    max_query_len: int | None = None,
    batch_invariant: bool = False,
) -> tuple[str, dict[str, str]]:
    """The implementation that serves a call of attend, and why each one that was tried before it does not: the one place that chooses.

    On a GPU "auto" tries the Hopper decode kernel, then dense attention over a dequantized scratch, then takes the Triton kernel,
    which serves every call. ValueError where an explicit choice cannot serve this one.
    """
    chosen = choose(implementation, q.device)
    if chosen in ("triton", "reference"):
        return chosen, {}
    from .implementations.dense import attend as prefill
    from .implementations.hopper import calls as hopper

    def dense() -> str | None:
        s = segments[0]
        if len(segments) > 1 or s.key_start is not None or s.key_range is not None:
            return "several segments, or a range of keys"
        if out.dtype != q.dtype:
            return f"out of {out.dtype}: q's dtype is needed"
        return prefill.refusal(q, s.v, s.fmt, seq_lens.shape[0], options, batch_invariant)

    rules = {
        "hopper": lambda: hopper.refusal(
            q,
            segments,
            out,
            seq_lens=seq_lens,
            cu_seqlens_q=cu_seqlens_q,
            options=options,
            max_query_len=max_query_len,
            batch_invariant=batch_invariant,
        ),
        "dense": dense,
    }
    refusals = {}
    for name in rules if chosen == "auto" else (chosen,):
        reason = rules[name]()
        if reason is None:
            return name, refusals
        refusals[name] = reason
    if chosen != "auto":
        raise ValueError(f"implementation={chosen!r}: {refusals[chosen]}")
    return "triton", refusals


def _interpreted() -> bool:
    from .implementations.triton import launch

    return launch.INTERPRETED


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    k: Side,
    v: Side,
    fmt: Format | str,
    slot_mapping: torch.Tensor,
    *,
    maps: LayerMaps | None = None,
    positions: torch.Tensor | None = None,
    implementation: str = "auto",
    memo: Memo | None = None,
) -> None:
    """Encode `key [T, HK, D]` and `value [T, HK, D_V]`, any strides, into the slots `slot_mapping [T]` of a cache.

    Slot s is token `s % block_size` of page `s // block_size`; tokens with a negative slot are skipped.
    maps: the layer's linear maps; those that the format asks for if None.
    positions: int `[T]`, needed where the keys' map has an offset.
    implementation: "auto", "hopper", "triton" or "reference". ValueError where it cannot run. On a GPU "auto" is the Hopper kernel
    where that serves the call, else Triton's. memo: see `Memo`; the reference alone uses it.
    """
    if implementation == "dense":
        raise ValueError("implementation='dense': writes are by auto, hopper, triton or reference")
    implementation = choose(implementation, key.device)
    if maps is not None and maps.k is not None and maps.k.offset is not None and positions is None:
        raise ValueError("positions=None: the keys' map has an offset for each bucket of positions")
    if torch.compiler.is_compiling():
        tensors, factors = ([], []) if maps is None else maps.flatten()
        fmt = get_format(fmt, key.dtype)
        _write_op(*flatten_cache(k, v), key, value, slot_mapping, positions, tensors, factors, fmt.name, [k.scale, v.scale], implementation)
    else:
        _write(key, value, k, v, get_format(fmt, key.dtype), slot_mapping, maps, positions, implementation, memo)


def _write(key, value, k, v, fmt, slot_mapping, maps, positions, implementation, memo=None):
    if maps is None:
        maps = LayerMaps.of(fmt, key.shape[2], value.shape[2], key.device)
    if implementation in ("auto", "hopper"):
        from .implementations.hopper import calls as hopper

        reason = hopper.write(key, value, k, v, fmt, slot_mapping, maps, positions)
        if reason is None:
            return
        if implementation == "hopper":
            raise ValueError(f"implementation='hopper': {reason}")
    if implementation == "reference":
        reference.write(key, value, k, v, fmt, slot_mapping, maps, positions, memo)
    else:
        from .implementations.triton import launch

        with torch.cuda.device_of(key):  # Triton launches on the current device
            launch.write(key, value, k, v, fmt, slot_mapping, maps, positions)


@torch.library.custom_op(
    "quantkv::write",
    mutates_args=("cache",),
    schema="(Tensor(a!)[] cache, int[] layout, Tensor key, Tensor value, Tensor slot_mapping, Tensor? positions, "
    "Tensor?[] maps, float[] factors, str fmt, float[] scales, str implementation) -> ()",
)
def _write_op(cache, layout, key, value, slot_mapping, positions, maps, factors, fmt, scales, implementation):
    fmt = get_format(fmt)
    k, v = unflatten_cache(cache, layout, fmt, scales)
    _write(key, value, k, v, fmt, slot_mapping, LayerMaps.unflatten(maps, factors) if maps else None, positions, implementation)


@_write_op.register_fake
def _(*args):
    return None


def attend(
    q: torch.Tensor,
    k: Side,
    v: Side,
    fmt: Format | str,
    *,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    options: AttentionOptions = AttentionOptions(),
    maps: LayerMaps | None = None,
    out: torch.Tensor | None = None,
    max_query_len: int | None = None,
    implementation: str = "auto",
    batch_invariant: bool = False,
    memo: Memo | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`softmax(scale * q . k^) . v^` over the pages of each sequence: out `[T, HQ, D_V]`, log-sum-exp `[T, HQ]` float32.

    q: `[T, HQ, D]`, the queries of all sequences one after the other; out has its dtype, or float8_e4m3fn with an output scale.
    cu_seqlens_q: int `[S + 1]`, where each sequence's queries start. seq_lens: int `[S]`, keys, the new ones included.
    block_table: int `[S, pages]`; entries of pages that no query sees may hold anything.
    options: see `AttentionOptions`. maps: as in `write`. out: written to instead of a new tensor.
    max_query_len: no sequence has more queries; a promise that makes decode and verification faster, not checked on a GPU.
    implementation: "auto", "hopper", "dense", "triton" or "reference": see `resolve`. ValueError where it cannot run.
    batch_invariant: fixed splits and tiles: a sequence gets the same bits alone and in any batch. It takes scratch memory: a
        float32 output for every 1,024 positions that the block table has room for.
    memo: see `Memo`; the reference alone uses it. return_lse: None in place of the log-sum-exp if False.
    """
    fmt = get_format(fmt, q.dtype)
    if maps is None:
        maps = LayerMaps.of(fmt, q.shape[2], fmt.v.head_size(v.codes), q.device)
    return attend_segments(
        q,
        [Segment(k, v, fmt, block_table, maps, options.key_start, options.key_range)],
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        scale=scale,
        options=options,
        out=out,
        max_query_len=max_query_len,
        implementation=implementation,
        batch_invariant=batch_invariant,
        memo=memo,
        return_lse=return_lse,
    )


def attend_segments(
    q: torch.Tensor,
    segments: Sequence[Segment],
    *,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    options: AttentionOptions = AttentionOptions(),
    out: torch.Tensor | None = None,
    max_query_len: int | None = None,
    implementation: str = "auto",
    batch_invariant: bool = False,
    memo: Memo | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attend` where the keys of a sequence lie in several caches: exact first and latest tokens, say, the others quantized.

    The segments are disjoint; each has its format, block table and range of positions. All have the same kv heads and head
    sizes, and those with a V map share it and its per-tensor scale, as do those without. Other arguments as in `attend`.
    """
    implementation = choose(implementation, q.device)
    checks.options(options, seq_lens.shape[0], q.shape[1], q.device)
    if len(segments) > 1:
        _check_segments(segments)
    compiling = torch.compiler.is_compiling()
    if out is None and implementation == "reference" and not compiling:
        result, lse = reference.attend_segments(
            q, segments, cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens, scale=scale, options=options, memo=memo, return_lse=return_lse
        )
        return result if options.output_scale is not None else result.to(q.dtype), lse
    shape = (*q.shape[:2], segments[0].fmt.v.head_size(segments[0].v.codes))
    if out is None:
        out = torch.empty(shape, dtype=q.dtype if options.output_scale is None else torch.float8_e4m3fn, device=q.device)
    elif out.shape != shape or out.stride(2) != 1 or (out.dtype == torch.float8_e4m3fn) != (options.output_scale is not None):
        raise ValueError(
            f"out: shape {tuple(out.shape)}, strides {out.stride()}, {out.dtype}; {shape} with a dense last axis is needed, "
            "float8_e4m3fn with an output scale and only then"
        )
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if compiling:
        _attend_op(
            out,
            lse,
            q,
            cu_seqlens_q,
            seq_lens,
            *flatten_segments(segments),
            *flatten_options(options),
            float(scale),
            max_query_len,
            batch_invariant,
            implementation,
        )
    else:
        _attend(out, lse, q, segments, cu_seqlens_q, seq_lens, scale, options, max_query_len, batch_invariant, implementation)
    return out, lse if return_lse else None


def _attend(out, lse, q, segments, cu_seqlens_q, seq_lens, scale, options, max_query_len, batch_invariant, implementation):
    lengths = {"cu_seqlens_q": cu_seqlens_q, "seq_lens": seq_lens}
    how = {"options": options, "max_query_len": max_query_len, "batch_invariant": batch_invariant}
    implementation, _ = resolve(implementation, q, segments, out, **lengths, **how)
    if implementation == "reference":
        results = reference.attend_segments(q, segments, **lengths, scale=scale, options=options)
        for target, result in zip((out, lse), results):
            target.copy_(result)
    elif implementation == "hopper":
        from .implementations.hopper import calls as hopper

        hopper.attend(q, segments[0], out, lse, **lengths, scale=scale, options=options, max_query_len=max_query_len)
    elif implementation == "dense":
        from .implementations.dense import attend as prefill

        s = segments[0]
        lse.copy_(prefill.attend(q, s.k, s.v, s.fmt, **lengths, block_table=s.block_table, scale=scale, maps=s.maps, out=out)[1])
    else:
        from .implementations.triton import launch

        with torch.cuda.device_of(q):
            launch.attend(q, segments, out, lse, **lengths, scale=scale, **how)


def _check_segments(segments: Sequence[Segment]) -> None:
    mapped = {(id(s.maps.v), s.v.scale) for s in segments if s.maps.v is not None}
    if len(mapped) > 1 or len({s.v.scale for s in segments if s.maps.v is None}) > 1:
        raise ValueError("segments: those with a V map must share it and its scale, those without a V map the scale")


@torch.library.custom_op(
    "quantkv::attend",
    mutates_args=("out", "lse"),
    schema="(Tensor(a!) out, Tensor(b!) lse, Tensor q, Tensor cu_seqlens_q, Tensor seq_lens, Tensor[] caches, int[] layouts, "
    "Tensor?[] tables, Tensor?[] maps, float[] factors, str formats, Tensor?[] option_tensors, bool[] flags, int window, "
    "int chunk_lookback, float softcap, float? output_scale, float scale, int? max_query_len, bool batch_invariant, "
    "str implementation) -> ()",
)
def _attend_op(
    out,
    lse,
    q,
    cu_seqlens_q,
    seq_lens,
    caches,
    layouts,
    tables,
    maps,
    factors,
    formats,
    option_tensors,
    flags,
    window,
    chunk_lookback,
    softcap,
    output_scale,
    scale,
    max_query_len,
    batch_invariant,
    implementation,
):
    options = AttentionOptions(
        causal=flags[0] if option_tensors[0] is None else option_tensors[0],
        window=window,
        chunk_lookback=chunk_lookback,
        softcap=softcap,
        alibi_sqrt=flags[1],
        clamp_prefix_to_window=flags[2],
        output_scale=output_scale,
        **dict(zip(OPTION_TENSORS, option_tensors[1:])),
    )
    _attend(
        out,
        lse,
        q,
        unflatten_segments(caches, layouts, tables, maps, factors, formats),
        cu_seqlens_q,
        seq_lens,
        scale,
        options,
        max_query_len,
        batch_invariant,
        implementation,
    )


@_attend_op.register_fake
def _(*args):
    return None
