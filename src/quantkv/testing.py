"""Inputs, an oracle and error budgets for whoever tests a format or a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from . import calls, deprecated
from .cache import PagedCache
from .calls import AttendCall, AttentionOptions, PagedTensor, Segment
from .formats import get_format
from .implementations.own import Lowered
from .implementations.reference.attend import compute
from .maps import LayerMaps

POISON = 0xFF  # NaN in every float format
__getattr__ = deprecated.module(__name__, "quantkv.testing", {"Batch": "SampleBatch"})


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """`||result - expected|| / ||expected||`; NaN where the result has one."""
    result, expected = result.double().cpu(), expected.double().cpu()
    return ((result - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def rows(tokens: int, heads: int, head_size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal rows `[T, H, D]` and what breaks a quantizer: zeros, a constant, an outlier channel, one-sided rows, a spike."""
    x = torch.randn(tokens, heads, head_size, generator=torch.Generator().manual_seed(seed), device="cpu")
    x[..., 1] *= 8
    if tokens > 8:
        x[2], x[3] = 0, 0.75
        x[4] = x[4].abs() + 3
        x[5, :, 0] = 100
    return x.to(dtype)


@dataclass(frozen=True)
class SampleBatch:
    """A cache filled by the reference, in pages in random order, and queries to it. What no token wrote is poison."""

    cache: PagedCache
    q: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor

    @classmethod
    def make(
        cls,
        format_name: str,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        *,
        head_size: int = 64,
        head_size_v: int | None = None,
        num_kv_heads: int = 2,
        group: int = 3,
        block_size: int = 16,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "cpu",
        maps: LayerMaps | None = None,
        seed: int = 0,
    ) -> SampleBatch:
        """query_lens, seq_lens: queries and keys of each sequence, the keys of the queries included. device: of everything."""
        generator = torch.Generator().manual_seed(seed)
        spec = get_format(format_name, dtype).cache_spec(num_kv_heads, head_size, head_size_v, block_size)
        pages = [spec.num_blocks(n) for n in seq_lens]
        width = max(pages) + 1
        order = torch.randperm(sum(pages) + 1, generator=generator, device="cpu").int()
        table = torch.full((len(pages), width), -(2**30), dtype=torch.int32, device="cpu")  # beyond the last page: an address to crash on
        for s, (first, count) in enumerate(zip(accumulate(pages, initial=0), pages)):
            table[s, :count] = order[first : first + count]
        lengths = torch.tensor(seq_lens, dtype=torch.int32, device="cpu")
        positions = torch.cat([torch.arange(n, device="cpu") for n in seq_lens])
        seq = torch.arange(len(pages), device="cpu").repeat_interleave(lengths)
        slots = table[seq, positions // block_size].long() * block_size + positions % block_size
        key = rows(len(slots), num_kv_heads, head_size, dtype, seed)
        value = rows(len(slots), num_kv_heads, spec.head_size_v, dtype, seed + 1)
        cache = PagedCache(spec, sum(pages) + 1, maps=maps)
        cache.buffer.fill_(POISON)
        cache.write(key, value, slots, positions, implementation="reference")
        on_device = PagedCache(spec, sum(pages) + 1, device, maps=maps)
        on_device.buffer.copy_(cache.buffer)
        starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device="cpu")
        q = torch.randn(sum(query_lens), num_kv_heads * group, head_size, generator=generator, device="cpu").to(dtype)
        tensors = (q, key, value, slots, positions, starts, lengths, table)
        return cls(on_device, *(t.to(device) for t in tensors))

    def attend(self, **arguments) -> tuple[torch.Tensor, torch.Tensor]:
        """`PagedCache.attend` over the batch, log-sum-exp included."""
        return self.cache.attend(
            self.q, block_table=self.block_table, seq_lens=self.seq_lens, cu_seqlens_q=self.cu_seqlens_q, return_lse=True, **arguments
        )

    def call(self, device: torch.device | str | None = None, **arguments: Any) -> AttendCall:
        """The call of `attend`, its tensors on `device` (None: where they are), for whoever serves it by hand."""

        def move(t):
            return t.to(device) if isinstance(t, torch.Tensor) and device is not None else t

        c, arguments = self.cache, {name: move(t) for name, t in arguments.items()}
        sides = (s._replace(codes=move(s.codes), meta=move(s.meta)) for s in (c.k, c.v))
        if device is not None:
            sides = (PagedTensor(*s[:3]) for s in sides)
        maps = c.maps if device is None else LayerMaps(*(m if m is None else m.to(device) for m in (c.maps.k, c.maps.v)))
        ranges = [arguments.pop(name, None) for name in ("key_start", "key_range")]
        own = arguments.pop("own", None)
        own = None if own is None else calls.OwnRows(*map(move, own))
        bounds = {name: arguments.pop(name) for name in ("max_query_len", "max_seq_len", "lengths") if name in arguments}
        segment = Segment(*sides, c.format, move(self.block_table), maps, *ranges)
        batch = calls.Batch(move(self.cu_seqlens_q), move(self.seq_lens), **bounds)
        q = move(self.q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        return AttendCall(q, (segment,), batch, None, AttentionOptions(**arguments), None, lse, own)

    def oracle(self, dtype: torch.dtype = torch.float64, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over the *dequantized* cache in `dtype`, on the CPU: out and log-sum-exp. So no quantization error can hide
        a kernel's."""
        call = self.call("cpu", **arguments)
        return compute(call if call.own is None else Lowered(call).of(call), dtype)


# Kernels multiply in 16 bits (8 bits of mantissa in a bfloat16 cache, 11 elsewhere) and add in float32. Relative error of the
# output, by dtype of the queries: twice what plain 16-bit attention, scores and probabilities rounded, leaves against float64.
OUTPUT_BUDGET = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 6e-3}
# Absolute error of the log-sum-exp: that of a score, which 16-bit queries leave at 2^-11 (2^-8) of its size.
LSE_BUDGET = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
FLOAT8_BUDGET = 0.04  # of an output in e4m3: half a step of 2^-3


def check(batch: SampleBatch, result: tuple[torch.Tensor, torch.Tensor], **options) -> None:
    """AssertionError unless out and log-sum-exp lie within their budgets of the float64 oracle."""
    (out, lse), (expected, expected_lse) = result, batch.oracle(**options)
    budget = OUTPUT_BUDGET[batch.q.dtype] if options.get("output_scale") is None else FLOAT8_BUDGET
    error = relative_error(out, expected)
    assert error <= budget, f"output differs by {error:.2e} of its norm; {budget:.0e} is allowed"
    finite = expected_lse.isfinite()
    assert torch.equal(finite, lse.cpu().isfinite()), "a query sees a key that it must not see, or misses all"
    error = (lse.cpu().double() - expected_lse)[finite].abs().max().item() if finite.any() else 0.0
    assert error <= LSE_BUDGET[batch.q.dtype], f"log-sum-exp differs by {error:.2e}"
