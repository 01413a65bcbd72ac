"""write and attend over sides that belong to no `PagedCache`, by an implementation that the test names."""

import torch

from quantkv import ops
from quantkv.calls import AttendCall, AttentionOptions, Batch, Segment, WriteCall
from quantkv.implementations.reference.attend import compute
from quantkv.maps import LayerMaps


def write(key, value, k, v, fmt, slot_mapping, maps=None, positions=None, implementation="reference"):
    if maps is None:
        maps = LayerMaps.of(fmt, key.shape[-1], value.shape[-1], key.device)
    ops.write(WriteCall(key, value, k, v, fmt, slot_mapping, maps, positions), implementation)


def attend_call(q, segments, *, cu_seqlens_q, seq_lens, scale, options=AttentionOptions(), out=None, **bounds):
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return AttendCall(q, tuple(segments), Batch(cu_seqlens_q, seq_lens, **bounds), scale, options, out, lse)


def attend_segments(q, segments, *, implementation="reference", dtype=None, **arguments):
    """out and log-sum-exp; with a dtype, computed in it by the reference."""
    call = attend_call(q, segments, **arguments)
    return ops.attend(call, implementation) if dtype is None else compute(call, dtype)


def attend(q, k, v, fmt, *, block_table, maps=None, key_start=None, key_range=None, **arguments):
    if maps is None:
        maps = LayerMaps.of(fmt, q.shape[-1], fmt.v.head_size(v.codes), q.device)
    return attend_segments(q, [Segment(k, v, fmt, block_table, maps, key_start, key_range)], **arguments)
