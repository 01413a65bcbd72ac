"""Caches of latents with queries to them, and what attention over them gives by the oracle."""

import torch

from oracle import attention
from quantkv import PagedCache, get_format
from quantkv.testing import LSE_BUDGET, OUTPUT_BUDGET, relative_error

LATENT, ROPE, HEADS, SIZE = 32, 16, 3, 8
SCALE = (24 + ROPE) ** -0.5  # of a model whose keys have 24 numbers that are not rotated
QUERIES, KEYS = (4, 1, 3, 0), (21, 30, 3, 9)


def make(
    fmt="int4", *, dtype=torch.float32, maps=None, latent=LATENT, rope=ROPE, size=SIZE, keys=KEYS, queries=QUERIES, device="cpu", **scales
):
    """A cache, filled in a random order of pages, and where everything is: (cache, batch, (slots, positions), (latents, rotated))."""
    g = torch.Generator().manual_seed(1)
    spec = get_format(fmt, dtype).latent_spec(latent, rope, size, dtype)
    pages = [spec.num_blocks(n) for n in keys]
    cache = PagedCache(spec, sum(pages) + 1, device, maps=maps, **scales)
    cache.buffer.fill_(0xFF)  # NaN in every float that nothing writes
    order = torch.randperm(cache.num_blocks, generator=g)
    table = torch.full((len(keys), max(pages) + 1), -(2**30), dtype=torch.int32)
    slots, positions = [], []
    for s, n in enumerate(keys):
        table[s, : pages[s]], order = order[: pages[s]], order[pages[s] :]
        p = torch.arange(n)
        slots.append(table[s, p // size].long() * size + p % size)
        positions.append(p)
    slots, positions = torch.cat(slots), torch.cat(positions)
    rows = [torch.randn(len(slots), 1, n, generator=g).to(dtype) for n in (latent, rope)]
    slots, rows = slots.to(device), [t.to(device) for t in rows]
    cache.write(*rows, slots, implementation="reference")
    starts, lens = torch.tensor([0, *queries]).cumsum(0).int(), torch.tensor(keys).int()
    batch = {name: t.to(device) for name, t in (("block_table", table), ("seq_lens", lens), ("cu_seqlens_q", starts))}
    return cache, batch, (slots, positions), rows


def queries(cache, dtype=torch.float32, heads=HEADS, count=sum(QUERIES)):
    g = torch.Generator().manual_seed(2)
    return torch.randn(count, heads, cache.spec.query_sizes[0], generator=g).to(cache.device, dtype)


def expected(cache, q, batch, slots, **options):
    """Every sequence and head by the oracle, in float64: keys are whole rows, values what comes first of them."""
    latents, rotated = (t.cpu() for t in cache.dequantize(slots, dtype=torch.float64))
    q = q.double().cpu()
    keys, start, out, lse = torch.cat([latents, rotated], 2)[:, 0], 0, [], []
    for s, n in enumerate(batch["seq_lens"].tolist()):
        a, b = batch["cu_seqlens_q"][s : s + 2].tolist()
        of = keys[start : start + n]
        heads = [
            attention(q[a:b, h].double(), of, of[:, : latents.shape[2]], context=n - (b - a), scale=SCALE, **options)
            for h in range(q.shape[1])
        ]
        out.append(torch.stack([o for o, _ in heads], 1))
        lse.append(torch.stack([m for _, m in heads], 1))
        start += n
    return torch.cat(out), torch.cat(lse)


def check_within(out, lse, want, want_lse, dtype, budget=None):
    """AssertionError unless an output and a log-sum-exp lie within the budgets of `dtype`. budget: another one of outputs."""
    assert relative_error(out.float(), want) <= (OUTPUT_BUDGET[dtype] if budget is None else budget)
    seen = want_lse.isfinite()
    assert torch.equal(lse.isfinite().cpu(), seen)
    assert (lse.cpu().double() - want_lse)[seen].abs().max() <= LSE_BUDGET[dtype]
