"""Calls that read the rows of their own tokens as given, and the pages only before them: every implementation against float64 attention
over dequantized pages and given rows, one query and one key at a time."""

from dataclasses import replace

import pytest
import torch

from oracle import attention
from quantkv import implementations
from quantkv.implementations.dense import attend as prefill
from quantkv.implementations.dense import backends
from quantkv.implementations.triton import launch
from quantkv.testing import LSE_BUDGET, OUTPUT_BUDGET, POISON, Batch, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
READERS = [name for name in implementations.NAMES if name not in ("dense", "hopper")]
GROUP, HEADS = 2, 2
QUERIES, KEYS = (5, 1, 3, 9, 0), (21, 18, 3, 26, 7)  # a chunk, a decode, a prompt, a chunk over a page's end, nothing


def batch(name="int2", queries=QUERIES, keys=KEYS, dtype=torch.float32, **arguments):
    given = {"head_size": 32, "num_kv_heads": HEADS, "group": GROUP, "dtype": dtype, "device": DEVICE, "block_size": 8, **arguments}
    return Batch.make(name, queries, keys, **given)


def own_of(b):
    """The rows of the tokens of q: views with strides of a fused product; and those of others, which nobody must read."""
    rows, first = [], 0
    for queries, keys in zip(b.cu_seqlens_q.diff().tolist(), b.seq_lens.tolist()):
        rows += range(first + keys - queries, first + keys)
        first += keys
    fused = torch.full((len(rows), HEADS, b.key.shape[2] + b.value.shape[2] + 8), float("nan"), dtype=b.key.dtype, device=DEVICE)
    key, value = fused[..., 8 : 8 + b.key.shape[2]], fused[..., 8 + b.key.shape[2] :]
    key.copy_(b.key[rows]), value.copy_(b.value[rows])
    return key, value


def hide(b):
    """Pages of sequences with several queries hold NaN where their own tokens are, and are not there where they hold no others."""
    first, size = 0, b.cache.spec.block_size
    table = b.block_table.clone()
    for s, (queries, keys) in enumerate(zip(b.cu_seqlens_q.diff().tolist(), b.seq_lens.tolist())):
        if queries > 1:
            for side in (b.cache.k, b.cache.v):
                for slot in b.slots[first + keys - queries : first + keys].tolist():
                    side.codes[slot // size, slot % size].view(torch.uint8).fill_(POISON)
                    if side.meta is not None:
                        side.meta[slot // size, slot % size].fill_(float("nan"))
            table[s, -(-(keys - queries) // size) :] = -(2**30)
        first += keys
    return replace(b, block_table=table)


def expected(b, own, **options):
    """Attention in float64 by the definition: out `[T, HQ, D_V]`, log-sum-exp `[T, HQ]`."""
    read = b.cache.dequantize(b.slots, b.positions, torch.float64)
    keys, values = (t.cpu() for t in read)
    first, outs, sums = 0, [], []
    starts = b.cu_seqlens_q.tolist()
    tensors = {name: options.pop(name, None) for name in ("sinks", "alibi_slopes", "causal", "prefix_ranges", "key_range")}
    for s, length in enumerate(b.seq_lens.tolist()):
        queries = slice(starts[s], starts[s + 1])
        count = queries.stop - queries.start
        k, v = keys[first : first + length].clone(), values[first : first + length].clone()
        first += length
        if count > 1:
            k[length - count :], v[length - count :] = (t[queries].double().cpu() for t in own)
        of_head = []
        for h in range(GROUP * HEADS):
            given = {n: None if tensors[f"{n}s"] is None else float(tensors[f"{n}s"][h]) for n in ("sink",)}
            given["slope"] = None if tensors["alibi_slopes"] is None else float(tensors["alibi_slopes"][h])
            if tensors["causal"] is not None:
                given["causal"] = tensors["causal"] if isinstance(tensors["causal"], bool) else bool(tensors["causal"][s])
            if tensors["prefix_ranges"] is not None:
                given["prefix_ranges"] = tensors["prefix_ranges"][s].tolist()
            given |= {"context": length - count, "scale": b.q.shape[2] ** -0.5, **options}
            of_head.append(attention(b.q[queries, h].double().cpu(), k[:, h // GROUP], v[:, h // GROUP], **given))
        outs.append(torch.stack([out for out, _ in of_head], 1)), sums.append(torch.stack([lse for _, lse in of_head], 1))
    return torch.cat(outs), torch.cat(sums)


def check(result, wanted, dtype, budget=None):
    (out, lse), (expected_out, sums) = result, wanted
    assert relative_error(out, expected_out) <= (budget or OUTPUT_BUDGET[dtype])
    finite = sums.isfinite()
    assert torch.equal(finite, lse.cpu().isfinite()), "a query sees a key that it must not see, or misses all"
    assert (lse.cpu().double() - sums)[finite].abs().max() <= LSE_BUDGET[dtype]


def serve(b, implementation, own, **options):
    if reason := implementations.refusal(implementation, b.call(own=own, **options)):
        pytest.skip(reason)
    return b.attend(own=own, implementation=implementation, **options)


OPTIONS = {
    "plain": {},
    "window": {"window": 4},
    "wide window": {"window": 12},
    "chunks": {"window": 8, "chunk_lookback": 0},
    "softcap and sinks": {"softcap": 3.0, "sinks": torch.linspace(-1, 2, 4)},
    "alibi": {"alibi_slopes": torch.linspace(0.05, 0.3, 4)},
    "not causal": {"causal": False},
    "causal by sequence": {"causal": torch.tensor([True, False, False, True, True])},
    "prefix ranges": {"window": 6, "prefix_ranges": torch.tensor([[[3, 18]], [[0, 0]], [[0, 2]], [[20, 24]], [[0, 0]]])},
    "qq bias": {"qq_bias": torch.linspace(-2, 2, 81).view(9, 9)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("implementation", READERS)
def test_own_rows_and_pages_before_them(implementation, name):
    options = {n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in OPTIONS[name].items()}
    b = batch()
    own = own_of(b)
    wanted = expected(b, own, **options)
    check(serve(hide(b), implementation, own, **options), wanted, torch.float32)


TRITON = [False, True] if launch.INTERPRETED or DEVICE == "cuda" else [False]
FLOAT32 = 100 * 2.0**-24  # a row, a mapped query, a part and the result are each rounded to float32, by sums of up to 100 terms
FRESH = (9, 4, 5), (9, 4, 5)  # prompts that no token precedes
CUTS = {
    "whole": {},
    "slices": {"scratch_bytes": 1},
    "sequence by sequence": {"together": False},
    "two streams": {"overlap": True, "scratch_bytes": 1},
}


@pytest.mark.parametrize("triton", TRITON)
@pytest.mark.parametrize("shape", [(QUERIES, KEYS), FRESH, ((7,), (7,)), ((6,), (19,))], ids=["mixed", "fresh", "prompt", "chunk"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["int2", "tq4", "levels2"])
def test_prefill_has_own_rows_beside_pages_in_one_scratch(name, cut, shape, triton, monkeypatch):
    """Mapped and not, of several sequences in a round and of one; with planned lengths too, as of a kernel whose mask is aligned to the top
    left."""
    monkeypatch.setattr(backends, "PLANNED", 8)
    monkeypatch.setattr(prefill, "MAPPED_BACK", 0)
    b = batch(name, *shape)
    own = own_of(b)
    wanted = expected(b, own)
    call = hide(b).call(own=own, lengths=tuple(zip(*shape)))
    prefill.serve(call, triton=triton, backend="math", **CUTS[cut])
    check((call.out, call.lse), wanted, torch.float32, FLOAT32)


@pytest.mark.parametrize("name", ["int8", "tq4", "fp8", "levels2", "k8v4", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", READERS)
def test_formats_and_dtypes(implementation, dtype, name):
    if name == "bf16" and dtype == torch.float16:
        pytest.skip("a bfloat16 cache takes rows of its own type")
    b = batch(name, dtype=dtype)
    own = own_of(b)
    wanted = expected(b, own)
    check(serve(hide(b), implementation, own), wanted, dtype)
