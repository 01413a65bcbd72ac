"""Calls that one call of the project's attention cannot say, by several: float32 partials, combined and rounded once.

R-SWA: a query sees the keys of its sequence's prefix, and of the others those in its window: two calls over disjoint keys.
A scale for each sequence and kv head: K's is multiplied into the queries, V's into the output.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .. import checks, ops
from ..calls import AttendCall


def of_rows(scales: torch.Tensor, call: AttendCall) -> torch.Tensor:
    """`[T, HQ, 1]` float32 of scales `[S, HK]`: that of each query's sequence and kv head."""
    tokens, num_heads = call.q.shape[:2]
    token = torch.arange(tokens, device=call.q.device)
    sequence = torch.bucketize(token, call.batch.cu_seqlens_q[1:].contiguous(), right=True).clamp_max(scales.shape[0] - 1)
    return scales.float()[sequence].repeat_interleave(num_heads // scales.shape[1], 1)[..., None]


def prefix_and_window(call: AttendCall, prefix_lens: torch.Tensor) -> list[AttendCall]:
    """The keys before `prefix_lens [S]`, without the window; those from there on, in it, and with the sinks."""
    (segment,), options, lens = call.segments, call.options, call.batch.seq_lens
    checks.tensor("rswa_prefix_lens", prefix_lens, (call.batch.num_seqs,), checks.INDEX_DTYPES, lens.device)
    border = torch.minimum(prefix_lens.to(lens.dtype).clamp_min(0), lens)
    ranges = [torch.stack([torch.zeros_like(lens), border], 1), torch.stack([border, lens], 1)]
    parts = [segment._replace(key_range=key_range) for key_range in ranges]
    return [replace(call, segments=(parts[0],), options=replace(options, window=0, sinks=None)), replace(call, segments=(parts[1],))]


def attend(
    call: AttendCall, prefix_lens: torch.Tensor | None = None, k_scales: torch.Tensor | None = None, v_scales: torch.Tensor | None = None
) -> None:
    """Serve `call` into its out. prefix_lens: int `[S]`; keys before it are seen outside of the window too. k_scales, v_scales:
    `[S, HK]`, by which K's and V's rows are multiplied. Nothing runs before all of it is checked."""
    q = call.q if k_scales is None else call.q.float() * of_rows(k_scales, call)
    shape, new = call.out.shape, call.out.new_empty
    whole = replace(call, q=q, out=new(shape, dtype=torch.float32), options=replace(call.options, output_scale=None))
    if prefix_lens is None:
        result, _ = ops.attend(whole)
    else:
        partials = prefix_and_window(whole, prefix_lens)
        partials = [replace(p, out=new(shape, dtype=torch.float32), lse=new(shape[:2], dtype=torch.float32)) for p in partials]
        outs, lses = (torch.stack(found) for found in zip(*(ops.attend(partial) for partial in partials)))
        weights = torch.softmax(lses, 0).nan_to_num(0.0)  # no partial has a key: the output is 0
        result = (weights[..., None] * outs).sum(0)
    if v_scales is not None:
        result = result * of_rows(v_scales, call)
    if call.options.output_scale is not None:
        result = (result / call.options.output_scale).clamp(-448, 448)
    call.out.copy_(result)
