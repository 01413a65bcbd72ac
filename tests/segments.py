"""Calls whose keys lie in several caches: exact first and latest tokens beside quantized ones, say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quantkv import AttentionOptions, LayerMaps, LinearMap, PagedCache, get_format, ops
from quantkv.calls import AttendCall, Batch
from quantkv.implementations.reference.attend import compute
from quantkv.maps import block_hadamard, hadamard
from quantkv.testing import LSE_BUDGET, OUTPUT_BUDGET, POISON, relative_error, rows

NOWHERE = -(2**30)  # a page: an address to crash on
LENS = (300, 33, 1, 500)
DECODE, VERIFY, WIDE = (1, 1, 1, 1), (2, 4, 1, 3), (8, 8, 1, 8)
SINKS = {"sinks": torch.linspace(-2, 2, 8)}
LONG = (700, 33, 1, 1300)
SINKS_32 = {"sinks": torch.linspace(-2, 2, 32)}
PLAIN = dict(num_kv_heads=8, device="cuda")  # on a GPU


class Part(NamedTuple):
    """A segment to make. starts, ranges: its key_start and key_range, for each sequence. maps: its own, not the format's."""

    format_name: str
    starts: Sequence[int] | None = None
    ranges: Sequence[tuple[int, int]] | None = None
    maps: LayerMaps | None = None

    def held(self, s: int, length: int) -> range:
        """Positions of a sequence that are written: those that are read."""
        low, high = (0, length) if self.ranges is None else self.ranges[s]
        low = max(low, 0 if self.starts is None else self.starts[s])
        return range(low, max(min(high, length), low))


class Several(NamedTuple):
    """The same call on a device and on the CPU."""

    call: AttendCall
    on_cpu: AttendCall

    @classmethod
    def make(
        cls,
        parts: Sequence[Part],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        *,
        head_size: int = 128,
        num_kv_heads: int = 2,
        group: int = 4,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        seed: int = 0,
        **options,
    ) -> Several:
        """Slots that are not read are poison, and pages that are not read do not exist."""
        longest = max(seq_lens)
        data = [[rows(longest, num_kv_heads, head_size, dtype, 7 * s + i + seed) for s in range(len(seq_lens))] for i in range(2)]
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        q = torch.randn(int(starts[-1]), num_kv_heads * group, head_size, generator=torch.Generator().manual_seed(seed)).to(dtype)
        lens, segments = torch.tensor(seq_lens, dtype=torch.int32), []
        for part in parts:
            spec = get_format(part.format_name, dtype).cache_spec(num_kv_heads, head_size, block_size=block_size)
            held = [part.held(s, length) for s, length in enumerate(seq_lens)]
            begins = [0] * len(held) if part.starts is None else part.starts
            pages_of = [range((h.start - b) // block_size, -(-(h.stop - b) // block_size)) if h else range(0) for h, b in zip(held, begins)]
            room = max(length - begin for length, begin in zip(seq_lens, begins))
            table = torch.full((len(held), max(-(-room // block_size), 1)), NOWHERE, dtype=torch.int32)
            order = torch.randperm(sum(map(len, pages_of)) + 1, generator=torch.Generator().manual_seed(seed)).int()
            cache, used = PagedCache(spec, len(order), maps=part.maps), 0
            cache.buffer.fill_(POISON)
            for s, (pages, h) in enumerate(zip(pages_of, held)):
                table[s, pages.start : pages.stop] = order[used : used + len(pages)]
                used += len(pages)
                positions = torch.arange(h.start, h.stop)
                slots = positions - begins[s]
                slots = table[s, slots // block_size].long() * block_size + slots % block_size
                cache.write(data[0][s][positions], data[1][s][positions], slots, positions, implementation="reference")
            tensors = [None if given is None else torch.tensor(given, dtype=torch.int32) for given in (part.starts, part.ranges)]
            on_device = PagedCache(spec, len(order), device, maps=part.maps)
            on_device.buffer.copy_(cache.buffer)
            segments.append([(c, table, *tensors) for c in (on_device, cache)])
        most, made = max(query_lens), []
        for i, place in enumerate((device, "cpu")):
            batch = Batch(starts.to(place), lens.to(place), most)
            own = [cache.segment(*(t if t is None else t.to(place) for t in tensors)) for cache, *tensors in (pair[i] for pair in segments)]
            given = {name: t.to(place) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
            lse = torch.full((q.shape[0], num_kv_heads * group), float("nan"), device=place)
            made.append(AttendCall(q.to(place), tuple(own), batch, None, AttentionOptions(**given), None, lse))
        return cls(*made)

    def check(self) -> None:
        """AssertionError unless what was put into the call's out and lse lies within its budget of the float64 reference."""
        call, dtype = self.call, self.call.q.dtype
        expected, expected_lse = compute(self.on_cpu, torch.float64)
        error = relative_error(call.out, expected)
        assert error <= OUTPUT_BUDGET[dtype], f"output differs by {error:.2e} of its norm"
        finite, lse = expected_lse.isfinite(), call.lse.cpu().double()
        assert torch.equal(finite, lse.isfinite()), "a query sees a key that it must not see, or misses all"
        assert (lse[~finite] == -torch.inf).all()
        size = (expected_lse.abs() / 8).clamp_min(1)  # the budget is what two or three roundings leave of scores of 8
        error = ((lse - expected_lse).abs() / size)[finite].max().item() if finite.any() else 0.0
        assert error <= LSE_BUDGET[dtype], f"log-sum-exp differs by {error:.2e}"


def exact(format_name: str, seq_lens: Sequence[int], latest: int = 24, first: int = 0, block_size: int = 16, maps=None) -> list[Part]:
    """Parts that hold the first and the latest tokens exactly, by whole pages, and the others in a format."""
    starts = [max(length - latest, 0) // block_size * block_size for length in seq_lens]
    firsts = [min(first, start) for start in starts]
    parts = [Part(format_name, None, list(zip(firsts, starts)), maps), Part("none", starts)]
    return parts + ([Part("none", None, [(0, end) for end in firsts])] if first else [])


def calibrated(heads=2, head_size=128, seed=1, buckets=5):
    """A matrix for each head, for K with key means, and for V."""
    generator = torch.Generator().manual_seed(seed)
    sides = []
    for key_mean in (torch.randn(buckets, heads, head_size, generator=generator), None):
        a = torch.linalg.qr(torch.randn(heads, head_size, head_size, generator=generator, dtype=torch.float64))[0]
        a = a * (1 + torch.rand(heads, 1, head_size, generator=generator))
        sides.append(LinearMap(a.float(), torch.linalg.inv(a).float(), key_mean))
    return LayerMaps(*sides)


def signed(head_size=128):
    """Hadamard matrices with signs, and for K a key mean."""
    sides = []
    for seed, key_mean in enumerate((torch.randn(4, 1, head_size, generator=torch.Generator().manual_seed(8)), None)):
        signs = 1.0 - 2.0 * (torch.rand(head_size, generator=torch.Generator().manual_seed(seed)) < 0.5)
        a = hadamard(head_size).float() * signs / head_size**0.5
        sides.append(LinearMap(a[None], a.mT[None].contiguous(), key_mean))
    return LayerMaps(*sides)


def evened(head_size=128, heads=2, buckets=None):
    """Of each head Hadamard matrices in blocks behind powers of two with signs, as presets have them, and for K key means."""
    generator, block = torch.Generator().manual_seed(3), head_size & -head_size
    h, sides = block_hadamard(head_size).float(), []
    for key_mean in (None if buckets is None else torch.randn(buckets, heads, head_size, generator=generator), None):
        steps = 2.0 ** -torch.randint(0, 3, (heads, head_size), generator=generator)
        steps *= 1 - 2 * torch.randint(0, 2, (heads, head_size), generator=generator)
        sides.append(LinearMap(h * steps[:, None], h / block / steps[:, :, None], key_mean))
    return LayerMaps(*sides)


def run(several):
    """Served, right, and equal to the bit when it is repeated."""
    ops.attend(several.call, "hopper")
    several.check()
    first = several.call.out.clone(), several.call.lse.clone()
    for t in (several.call.out, several.call.lse):
        t.fill_(float("nan"))
    ops.attend(several.call, "hopper")
    assert torch.equal(several.call.out, first[0]) and torch.equal(several.call.lse, first[1]), "two runs of one input differ"
