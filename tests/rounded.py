"""Writes of rows that are rounded by a Hessian: a layer with Hessians, and what a kernel's bytes cost beside the reference's."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from quantkv import PagedCache, get_format
from quantkv.calls import WriteCall
from quantkv.maps import LayerMaps, LinearMap, default_map, rounding_of
from quantkv.testing import POISON, rows
from test_rounding import cost, hessian_of


def layer(name, head_size=128, heads=2, *, hessians=(True, True), key_mean=False, shared=False, even=False, seed=0):
    """Maps of a layer: the format's own, with Hessians for K and V where `hessians` says so, one for all heads if `shared`.
    even: keys of each head go through powers of two of their own first."""
    fmt, sides = get_format(name), []
    for i, codec in enumerate((fmt.k, fmt.v)):
        plain = default_map(codec, head_size)
        table = 3 * torch.randn(4, heads, head_size, generator=torch.Generator().manual_seed(seed + 7)) if key_mean and i == 0 else None
        hessian = hessian_of(1 if shared else heads, head_size, seed + i) if hessians[i] else None
        forward, inverse = plain.forward, plain.inverse
        if even and i == 0:
            steps = torch.randint(-4, 1, (heads, head_size), generator=torch.Generator().manual_seed(seed + 9)).float().exp2()
            forward, inverse = forward * steps[:, None], inverse / steps[..., None]
        new = hessian is not None or table is not None or forward is not plain.forward
        sides.append(LinearMap(forward, inverse, table, hessian) if new else plain)
    return LayerMaps(*sides)


@dataclass
class Rows:
    """Rows of one write; some tokens have no slot, some keys are far from their key mean, a row is zero."""

    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def make(cls, tokens, maps, heads=2, head_size=128, dtype=torch.bfloat16):
        generator = torch.Generator().manual_seed(3)
        slots = torch.randperm(tokens + 30, generator=generator)[:tokens]
        slots[[7, tokens - 2]] = torch.tensor([-1, -5])
        key, value = (rows(tokens, heads, head_size, dtype, seed) for seed in (0, 1))
        positions = torch.arange(tokens) * 300 // tokens
        if maps.by_position:
            key = (key.float() + maps.k.key_mean_rows(positions)).to(dtype)
            key[[3, 9]] *= 0.01
        return cls(key, value, slots, positions)

    def caches(self, name, maps, count=2, device="cpu"):
        """Full of poison; each with the maps."""
        heads, head_size = self.key.shape[1:]
        spec = get_format(name).cache_spec(heads, head_size)
        made = [PagedCache(spec, len(self.slots) // 16 + 3, device, maps=maps) for _ in range(count)]
        for cache in made:
            cache.buffer.fill_(POISON)
        return made

    @property
    def given(self):
        return self.key, self.value, self.slots, self.positions


@dataclass
class Compared:
    """mean, worst: what a row costs by the Hessian, over what the reference's bytes cost. other: share of rows with other codes. scale: the
    largest relative difference of scales where codes are the same."""

    mean: float
    worst: float
    other: float
    scale: float


def on_host(cache: PagedCache) -> PagedCache:
    """A copy."""
    spec, maps = cache.spec, LayerMaps(cache.maps.k.to("cpu"), cache.maps.v.to("cpu"))
    return PagedCache(spec, cache.k.codes.shape[0], buffer=cache.buffer.cpu(), maps=maps)


def compare(cache, expected, given: Rows) -> list[Compared]:
    """For K and V, of those that are rounded; the others' bytes, and all that was not to be written, are asserted to be the same."""
    kept, results = given.slots >= 0, []
    slots, positions = given.slots[kept], given.positions[kept]
    at = slots // 16, slots % 16
    free = torch.ones(cache.k.codes.shape[:2], dtype=torch.bool)
    free[at] = False
    fmt, maps = cache.format, cache.maps
    for rows_, side, other, codec, map_ in (
        (given.key, cache.k, expected.k, fmt.k, maps.k),
        (given.value, cache.v, expected.v, fmt.v, maps.v),
    ):
        assert bool((side.codes.view(torch.uint8)[free] == POISON).all())
        codes, meta, codes_there, meta_there = (t[at] for t in (side.codes, side.meta, other.codes, other.meta))
        if rounding_of(codec, map_) is None:
            assert (codes != codes_there).float().mean() < 1e-3
            same = (codes == codes_there).all(-1)  # another code, where a sum's last bit decides, has another scale
            torch.testing.assert_close(meta[same], meta_there[same], rtol=4e-3, atol=0)
            torch.testing.assert_close(meta[~same], meta_there[~same], rtol=2e-2, atol=0)
            continue
        x = rows_[kept].float()
        row = map_.apply(x if map_.key_mean is None else x - map_.key_mean_rows(positions), torch.float32)
        if map_.key_mean is not None:
            assert torch.equal(meta < 0, meta_there < 0) and 0 < (meta < 0).sum() < len(meta)
            row = torch.where(meta < 0, -map_.apply(x, torch.float32), row)
        hessian = map_.rounding.hessian.double()
        costs = [
            cost(codec.dequantize(c, m.abs(), torch.float64) - row.double(), hessian) for c, m in ((codes, meta), (codes_there, meta_there))
        ]
        size, same = row.square().sum(-1), (codes == codes_there).all(-1)
        assert bool((meta.abs()[size == 0] < 1e-6).all())
        costs = [c[size > 0] for c in costs]
        scale = (meta[same] / meta_there[same] - 1).abs().max().item() if bool(same.any()) else math.nan
        results.append(
            Compared((costs[0].mean() / costs[1].mean()).item(), (costs[0] / costs[1]).max().item(), 1 - same.float().mean().item(), scale)
        )
    return results


def call_of(cache, given: Rows) -> WriteCall:
    return WriteCall(given.key, given.value, cache.k, cache.v, cache.format, given.slots, cache.maps, given.positions)


def check_contained(name: str, maps: LayerMaps, tokens: int, device: Callable[[], Any], *shape: int) -> None:
    """AssertionError unless rows that are not finite have a scale that is no number and change no other row. device: makes what serves.
    shape: heads and head size, by default as of `Rows.make`."""
    given = Rows.make(tokens, maps, *shape)
    broken = replace(given, key=given.key.clone(), value=given.value.clone())
    broken.key[12], broken.value[13] = torch.nan, torch.inf
    cache, other = given.caches(name, maps)
    for to, source in ((cache, given), (other, broken)):
        device().serve(call_of(to, source))
    for side, side_there, token in ((cache.k, other.k, 12), (cache.v, other.v, 13)):
        slots = torch.cat([given.slots[:token], given.slots[token + 1 :]])
        at = slots[slots >= 0] // 16, slots[slots >= 0] % 16
        assert torch.equal(side.codes[at], side_there.codes[at]) and torch.equal(side.meta[at], side_there.meta[at])
        assert bool(side_there.meta[given.slots[token] // 16, given.slots[token] % 16].isnan().all())
