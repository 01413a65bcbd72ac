"""write and attend under torch.compile and in CUDA graphs, and at sizes that only a GPU holds."""

import pytest
import torch

from quantkv import PagedCache, get_format, maps
from quantkv.testing import SampleBatch, check, relative_error

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def decode_step(cache, key, value, q, slots, batch):
    cache.write(key, value, slots)
    out, lse = cache.attend(q * 2, max_query_len=1, return_lse=True, **batch)
    return out + 1, lse


def test_a_default_device_of_the_caller_changes_nothing(format_name):
    """Engines build models under `with torch.device(...)`: tables that are made there once must not lie elsewhere for ever."""
    b = SampleBatch.make(format_name, (1, 2), (20, 40), dtype=torch.bfloat16)
    out, _ = b.attend(implementation="reference")
    maps.named_map.cache_clear(), maps._default_map.cache_clear()
    with torch.device("meta"):
        cache = PagedCache(b.cache.spec, b.cache.num_blocks, "cpu")
        cache.write(b.key, b.value, b.slots, implementation="reference")
        again = cache.attend(b.q, block_table=b.block_table, seq_lens=b.seq_lens, cu_seqlens_q=b.cu_seqlens_q, implementation="reference")
    assert torch.equal(again, out)


@pytest.mark.parametrize("name", ["int4", "fp8_token", "tq3"])
def test_compiles_into_one_graph(name):
    """Writes through views of several dtypes of one buffer reach the cache, and the read that follows sees them."""
    spec = get_format(name).cache_spec(2, 64)
    compiled, eager = PagedCache(spec, 8, DEVICE), PagedCache(spec, 8, DEVICE)
    step = torch.compile(decode_step, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    table = torch.arange(8, dtype=torch.int32, device=DEVICE).view(2, 4)
    starts = torch.arange(3, dtype=torch.int32, device=DEVICE)
    for i in range(3):
        key, value = torch.randn(2, 2, 2, 64, device=DEVICE).bfloat16()
        q = torch.randn(2, 4, 64, device=DEVICE).bfloat16()
        batch = {"block_table": table, "seq_lens": torch.full((2,), i + 1, device=DEVICE), "cu_seqlens_q": starts}
        arguments = (key, value, q, torch.tensor([i, 64 + i], device=DEVICE), batch)
        (out, lse), (expected, expected_lse) = step(compiled, *arguments), decode_step(eager, *arguments)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        assert torch.equal(compiled.buffer, eager.buffer)


@needs_gpu
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_captured_graph_with_other_lengths_and_several_queries(name):
    """Speculative verification: one capture, replayed with longer and shorter sequences and other rows."""
    b = SampleBatch.make(name, (4, 4), (900, 70), device=DEVICE, dtype=torch.bfloat16)
    lens, slots = b.seq_lens.clone(), b.slots[:8].clone()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    call = {"block_table": b.block_table, "seq_lens": lens, "cu_seqlens_q": b.cu_seqlens_q, "max_query_len": 4, "return_lse": True}

    def step():
        b.cache.write(b.key[:8], b.value[:8], slots)
        return b.cache.attend(b.q, **call)

    with torch.cuda.stream(stream):
        step()
        with torch.cuda.graph(graph, stream=stream):
            out, lse = step()
    for new in ((900, 70), (4, 5), (333, 64)):
        lens.copy_(torch.tensor(new))
        b.q.copy_(torch.randn_like(b.q))
        graph.replay()
        torch.cuda.synchronize()
        check(SampleBatch(b.cache, b.q, b.key, b.value, b.slots, b.positions, b.cu_seqlens_q, lens, b.block_table), (out, lse))


@needs_gpu
def test_more_than_two_to_the_31_elements():
    """Pages far behind the reach of 32-bit offsets."""
    spec = get_format("int8").cache_spec(8, 128)
    cache = PagedCache(spec, 2**31 // spec.block_bytes * 2 + 64, DEVICE)
    assert cache.nbytes > 2**32
    key, value = torch.randn(2, 32, 8, 128, device=DEVICE).bfloat16()
    pages = torch.tensor([cache.num_blocks - 1, cache.num_blocks - 7], device=DEVICE)
    slots = pages.repeat_interleave(16) * 16 + torch.arange(16, device=DEVICE).repeat(2)
    cache.write(key, value, slots)
    stored, _ = cache.dequantize(slots)
    assert relative_error(stored, key) < 0.01
    q = torch.randn(1, 8, 128, device=DEVICE).bfloat16()
    call = {"seq_lens": torch.tensor([32], device=DEVICE)}
    out = cache.attend(q, block_table=pages[None].int(), **call)
    near = PagedCache(spec, 2, DEVICE)
    near.buffer.copy_(cache.buffer[pages])
    assert torch.equal(out, near.attend(q, block_table=torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE), **call))
