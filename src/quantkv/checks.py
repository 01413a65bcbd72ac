"""Argument checks that write and attend share: each raises ValueError naming the argument, its value and what is allowed."""

from __future__ import annotations

import torch

from .calls import AttentionOptions

INDEX_DTYPES = (torch.int32, torch.int64)
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refuse(argument: str, value: object, allowed: str) -> None:
    raise ValueError(f"{argument}={value}: {allowed}")


def tensor(argument: str, t: torch.Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    """Check type, shape (None: any size), dtype and device."""
    if not isinstance(t, torch.Tensor):
        refuse(argument, type(t).__name__, "a tensor is needed")
    if t.ndim != len(shape) or any(want not in (None, got) for want, got in zip(shape, t.shape)):
        refuse(f"{argument}.shape", tuple(t.shape), f"{tuple('any' if n is None else n for n in shape)} is needed")
    if t.dtype not in dtypes:
        refuse(f"{argument}.dtype", t.dtype, f"one of {', '.join(map(str, dtypes))} is needed")
    if t.device != device:
        refuse(f"{argument}.device", t.device, f"the cache is on {device}")


def in_range(argument: str, t: torch.Tensor, low: int, high: int, note: str = "") -> None:
    """Check `low <= t < high`. Reads the tensor: a synchronisation on an accelerator."""
    if t.numel():
        least, most = (int(x) for x in t.aminmax())
        if least < low or most >= high:
            refuse(argument, f"{least}..{most}", f"values lie in {low}..{high - 1}{note}")


def options(o: AttentionOptions, num_seqs: int, num_heads: int, device: torch.device) -> None:
    """Check the options of one attend call against its batch."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    for name, shape, dtypes in (
        ("sinks", (num_heads,), floats),
        ("alibi_slopes", (num_heads,), floats),
        ("qq_bias", (None, None), floats),
        ("prefix_ranges", (num_seqs, None, 2), INDEX_DTYPES),
        ("key_start", (num_seqs,), INDEX_DTYPES),
        ("key_range", (num_seqs, 2), INDEX_DTYPES),
    ):
        if getattr(o, name) is not None:
            tensor(name, getattr(o, name), shape, dtypes, device)
    if not isinstance(o.causal, bool):
        tensor("causal", o.causal, (num_seqs,), (torch.bool,), device)
    if o.window < 0:
        refuse("window", o.window, "0 (none) or a number of tokens is needed")
    if o.softcap < 0:
        refuse("softcap", o.softcap, "0 (none) or a positive number is needed")
    if o.chunk_lookback < -1:
        refuse("chunk_lookback", o.chunk_lookback, "-1 (none) or more is needed")
    if o.chunk_lookback >= 0 and o.window < o.chunk_lookback + 1:
        refuse("window", o.window, f"chunk_lookback={o.chunk_lookback} needs a window of at least {o.chunk_lookback + 1} tokens")
    if o.alibi_sqrt and o.alibi_slopes is None:
        refuse("alibi_sqrt", True, "alibi_slopes are needed with it")
    if o.output_scale is not None and not o.output_scale > 0:
        refuse("output_scale", o.output_scale, "a positive number is needed")
