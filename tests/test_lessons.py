"""What broke in other quantized caches, as they reported it: one test for each. A captured graph with several queries and more than
2^31 elements are in test_ops.py, copies of pages in test_cache.py, an 8-bit output that is still rotated in test_vllm_api.py."""

import pytest
import torch

from direct import attend, write
from quantkv import PagedCache, get_format
from quantkv.calls import PagedTensor
from quantkv.testing import SampleBatch, check, relative_error

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
IMPLEMENTATIONS = ["reference", "triton"]
RAGGED = ((1, 5), (40, 21))  # queries and keys; neither sequence fills its last page


def batch(name, **arguments):
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(name, torch.float16)
    return SampleBatch.make(name, *RAGGED, **{"device": DEVICE, "dtype": dtype, **arguments})


def call(b):
    return {"cu_seqlens_q": b.cu_seqlens_q, "seq_lens": b.seq_lens, "block_table": b.block_table, "scale": b.cache.spec.head_size**-0.5}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_in_slots_that_nothing_wrote_is_not_read(codecs_of, implementation):
    """0 x NaN reached the output (flash-attention 1745, transformers 46765, vLLM 936, llama.cpp 3523)."""
    b = batch(codecs_of)
    poisoned, _ = b.attend(implementation=implementation)
    clean = PagedCache(b.cache.spec, b.cache.num_blocks, DEVICE, maps=b.cache.maps)
    at = b.slots // 16, b.slots % 16
    for ours, theirs in ((clean.k, b.cache.k), (clean.v, b.cache.v)):
        ours.codes.view(torch.uint8)[at] = theirs.codes.view(torch.uint8)[at]
        if ours.meta is not None:
            ours.meta[at] = theirs.meta[at]
    assert not torch.equal(clean.buffer, b.cache.buffer)
    out = clean.attend(b.q, block_table=b.block_table, seq_lens=b.seq_lens, cu_seqlens_q=b.cu_seqlens_q, implementation=implementation)
    assert torch.equal(out, poisoned)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["int8", "int4", "tq3"])
def test_padded_and_permuted_pages_keep_their_scales(name, implementation):
    """Scales beside the cache were lost when pages moved (vLLM 48412, 49716, 50702): here a page is moved by its bytes alone."""
    b = batch(name)
    expected, _ = b.attend(implementation=implementation)
    order = torch.randperm(b.cache.num_blocks, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    moved = PagedCache(b.cache.spec, 2 * b.cache.num_blocks, DEVICE, maps=b.cache.maps)
    moved.buffer.fill_(0xFF)
    moved.buffer[order * 2] = b.cache.buffer
    used = (b.block_table >= 0) & (b.block_table < b.cache.num_blocks)
    table = torch.where(used, order[b.block_table.clamp(0, b.cache.num_blocks - 1).long()].int() * 2, b.block_table)
    table = torch.cat([table, torch.full_like(table, 2**30)], 1)  # padding: addresses to crash on
    out = moved.attend(b.q, block_table=table, seq_lens=b.seq_lens, cu_seqlens_q=b.cu_seqlens_q, implementation=implementation)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["int8", "int4", "tq3"])
def test_layers_of_one_buffer_do_not_touch_each_other(name, implementation):
    """Layers that share an allocation wrote over each other's scales (vLLM 51091): strides across layers."""
    b = batch(name)
    expected, _ = b.attend(implementation=implementation)
    layers = torch.full((b.cache.num_blocks, 3, *b.cache.buffer.shape[1:]), 0xFF, dtype=torch.uint8, device=DEVICE)
    c = b.cache

    def view(t):
        """t, a view of the cache's buffer, in the middle layer."""
        size, offset = t.element_size(), t.storage_offset() + layers[0, 0].numel() // t.element_size()
        return layers.view(torch.uint8).flatten().view(t.dtype).as_strided(t.shape, (layers.stride(0) // size, *t.stride()[1:]), offset)

    k, v = (PagedTensor(view(s.codes.view(torch.uint8)).view(s.codes.dtype), view(s.meta)) for s in (c.k, c.v))
    write(b.key, b.value, k, v, c.format, b.slots, maps=c.maps, implementation=implementation)
    assert bool((layers[:, [0, 2]] == 0xFF).all()) and not bool((layers[:, 1] == 0xFF).all())
    out, _ = attend(b.q, k, v, c.format, **call(b), maps=c.maps, implementation=implementation)
    assert relative_error(out, expected) <= 1e-2


@pytest.mark.parametrize(
    "name, k_range, v_range",
    [
        ("int8", (0, 0.02), (0, 0.02)),
        ("fp8_token", (0, 0.005), (0, 0.005)),
        ("tq_k8v4", (0, 0.05), (0, 0.2)),
        ("tq4", (0, 0.1), (0, 0.2)),
        ("int4", (0.5, 0.7), (0.5, 0.7)),
    ],
)
def test_rows_on_one_side_of_zero(name, k_range, v_range):
    """An integer zero point of 0 to 15 saturates on rows that lie wholly on one side of zero, which is what a spike in channel 0
    becomes when it is rotated: int4's known limit (DESIGN.md). A row's minimum as a float, and a scale alone, do not."""
    rows = torch.randn(64, 2, 64, generator=torch.Generator().manual_seed(0))
    rows[..., 0] = 100
    cache = PagedCache(get_format(name).cache_spec(2, 64), 4, DEVICE)
    slots, rows = torch.arange(64, device=DEVICE), rows.half().to(DEVICE)
    cache.write(rows, rows, slots, implementation="triton")
    for stored, (low, high) in zip(cache.dequantize(slots), (k_range, v_range)):
        assert low <= relative_error(stored, rows) <= high


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_how_a_prompt_is_cut_changes_nothing(codecs_of, implementation):
    """First chunks attended over raw rows and later ones over quantized rows: here every query reads what is stored."""
    b = batch(codecs_of, num_kv_heads=1)
    whole = SampleBatch.make(codecs_of, (21,), (21,), num_kv_heads=1, device=DEVICE, dtype=b.q.dtype)
    expected, _ = whole.attend(implementation=implementation)
    parts = []
    for first, last in ((0, 3), (3, 20), (20, 21)):
        ends = {"seq_lens": torch.tensor([last], device=DEVICE), "cu_seqlens_q": torch.tensor([0, last - first], device=DEVICE)}
        parts.append(whole.cache.attend(whole.q[first:last], block_table=whole.block_table, **ends, implementation=implementation))
    assert relative_error(torch.cat(parts), expected) <= (2e-6 if whole.q.dtype == torch.float32 else 2e-3)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("implementation", ["triton", "auto"])
@pytest.mark.parametrize("name", ["fp8", "fp8_token", "int4", "tq4"])
def test_a_long_context_loses_no_precision(name, implementation):
    """8-bit accumulation lost precision over many keys (vLLM 23813): here every key has the same weight."""
    b = SampleBatch.make(name, (1,), (70_000,), head_size=128, num_kv_heads=1, group=4, device=DEVICE)
    b.q.zero_()
    check(b, b.attend(implementation=implementation, max_query_len=1))
