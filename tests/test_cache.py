"""PagedCache: its bytes, its refusals, its files; views with any strides; what nothing wrote never shows."""

import pytest
import torch

from direct import attend, write
from quantkv import CacheSpec, PagedCache, get_format
from quantkv.calls import PagedTensor
from quantkv.prepared import prepare_attend, prepare_write


def cache_of(name="int4", pages=6, d=64, d_v=None, **kwargs):
    return PagedCache(get_format(name).cache_spec(2, d, d_v), pages, **kwargs)


def rows(n, d=64, seed=0):
    return torch.randn(n, 2, d, generator=torch.Generator().manual_seed(seed), dtype=torch.bfloat16)


def test_measured_bytes_are_the_specs(format_name):
    cache = cache_of(format_name, pages=5)
    assert cache.nbytes == cache.buffer.untyped_storage().nbytes() == cache.spec.nbytes(5)
    assert cache.spec.capacity(cache.nbytes) == 5 * 16


@pytest.mark.parametrize(
    "name,expected",
    [
        ("none", 512),
        ("fp8", 256),
        ("int8", 264),
        ("fp8_token", 264),
        ("int4", 136),
        ("int2", 72),
        ("turboquant_k8v4", 196),
        ("turboquant_4bit_nc", 134),
        ("turboquant_k3v4_nc", 118),
        ("turboquant_3bit_nc", 102),
        ("k8v4", 200),
    ],
)
def test_bytes_of_a_token_and_head(name, expected):
    spec = get_format(name).cache_spec(8, 128)
    assert spec.bytes_per_token == 8 * expected and spec.compression == 512 / expected


def test_sections_do_not_overlap(format_name):
    spec = get_format(format_name).cache_spec(3, 64, 128, 8)
    end = 0
    for offset, size in spec.sections:
        assert offset >= end and offset % 16 == 0
        end = offset + size
    assert end <= spec.page_bytes and spec.page_bytes % 16 == 0


def test_a_record_is_contiguous(format_name):
    """Writing one token of one head touches only its record, and reading needs nothing else."""
    cache = cache_of(format_name)
    cache.buffer.fill_(0xAB)
    cache.write(rows(1), rows(1), torch.tensor([3 * 16 + 5]))
    touched = (cache.buffer != 0xAB).any(-1).nonzero().tolist()
    assert {page for page, _ in touched} == {3}


def test_spec_survives_its_dict():
    spec = get_format("tq_k3v4").cache_spec(4, 128)
    assert CacheSpec.from_dict(spec.to_dict()) == spec
    with pytest.raises(ValueError, match="fields"):
        CacheSpec.from_dict({"format": "int4"})


def test_negative_slots_are_skipped(format_name):
    cache = cache_of(format_name)
    before = cache.buffer.clone()
    cache.write(rows(3), rows(3), torch.tensor([-1, 17, -1]))
    changed = (cache.buffer != before).any(-1).any(-1)
    assert changed.tolist() == [False, True, False, False, False, False]


@pytest.mark.parametrize("source, target", [([0, 1, 2], [1, 2, 3]), ([1, 2, 3], [0, 1, 2]), ([0, 1, 4], [1, 0, 5])])
def test_pages_that_are_copied_are_those_that_were_there(source, target):
    """Also where pages are sources and targets: moved up, moved down, changed for each other."""
    cache = cache_of()
    cache.buffer[:] = torch.arange(6, dtype=torch.uint8)[:, None, None]
    cache.copy_pages(torch.tensor(source), torch.tensor(target))
    expected = list(range(6))
    for new, page in zip(target, source):
        expected[new] = page
    assert cache.buffer[:, 1, -1].tolist() == expected and (cache.buffer == cache.buffer[:, :1, :1]).all()


def test_what_nothing_wrote_does_not_show(format_name):
    clean, dirty = cache_of(format_name), cache_of(format_name)
    dirty.buffer.fill_(0xFF)
    outs = []
    for cache in (clean, dirty):
        cache.write(rows(20), rows(20, seed=1), torch.arange(20) + 32)
        outs.append(
            cache.attend(
                rows(2).repeat(1, 2, 1),
                block_table=torch.tensor([[2, 3, 77]]),
                seq_lens=torch.tensor([20]),
                cu_seqlens_q=torch.tensor([0, 2]),
            )
        )
    assert outs[0].isfinite().all() and torch.equal(*outs)


def test_pages_behind_the_window_may_be_gone():
    cache = cache_of(pages=8)
    cache.write(rows(64), rows(64, seed=1), torch.arange(64))
    q, batch = rows(1).repeat(1, 2, 1), dict(seq_lens=torch.tensor([64]), window=20)
    kept = cache.attend(q, block_table=torch.tensor([[0, 1, 2, 3]]), **batch)
    cache.buffer[:2] = 0xFF
    assert torch.equal(cache.attend(q, block_table=torch.tensor([[-5, 999, 2, 3]]), **batch), kept)


def test_page_order_does_not_matter(format_name):
    order = torch.tensor([4, 1, 5, 0])
    outs = []
    for pages in (torch.arange(4), order):
        cache = cache_of(format_name)
        t = torch.arange(60)
        cache.write(rows(60), rows(60, seed=1), pages[t // 16] * 16 + t % 16)
        outs.append(cache.attend(rows(1).repeat(1, 2, 1), block_table=pages[None], seq_lens=torch.tensor([60])))
    assert torch.equal(*outs)


def test_copied_pages_read_alike(format_name):
    cache = cache_of(format_name)
    cache.write(rows(16), rows(16, seed=1), torch.arange(16))
    cache.copy_pages(torch.tensor([0]), torch.tensor([4]))
    for a, b in zip(cache.dequantize(torch.arange(16)), cache.dequantize(torch.arange(16) + 64)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["token-major", "head-major", "padded", "layers interleaved"])
def test_foreign_layouts(layout, format_name):
    """The same bytes through any strides: what an engine's own cache tensors look like."""
    fmt = get_format(format_name)
    blocks, size, heads, d = 5, 16, 2, 64

    def empty(width, dtype):
        if layout == "head-major":
            return torch.zeros(blocks, heads, size, width, dtype=dtype).transpose(1, 2)
        if layout == "padded":
            return torch.zeros(blocks, size, heads, width + 3, dtype=dtype)[..., :width]
        if layout == "layers interleaved":
            return torch.zeros(blocks, 7, size, heads, width, dtype=dtype)[:, 4]
        return torch.zeros(blocks, size, heads, width, dtype=dtype)

    def side(codec):
        codes = empty(codec.row.code_bytes(d) // codec.code_dtype.itemsize, codec.code_dtype)
        return PagedTensor(codes, empty(len(codec.row.meta), getattr(torch, codec.row.meta[0])) if codec.row.meta else None)

    k, v = side(fmt.k), side(fmt.v)
    ours = cache_of(format_name, pages=blocks)
    slots = torch.arange(40) + 16
    write(rows(40), rows(40, seed=1), k, v, fmt, slots)
    ours.write(rows(40), rows(40, seed=1), slots)
    batch = dict(block_table=torch.tensor([[1, 2, 3]]), seq_lens=torch.tensor([40]), cu_seqlens_q=torch.tensor([0, 1]))
    q = rows(1).repeat(1, 2, 1).float()
    for implementation in ("reference", "auto"):
        out, _ = attend(q, k, v, fmt, scale=0.125, implementation=implementation, **batch)
        assert torch.equal(out, ours.attend(q, scale=0.125, implementation=implementation, **batch))


def test_strided_inputs():
    cache, other = cache_of(), cache_of()
    wide = torch.randn(20, 2, 3, 64, dtype=torch.bfloat16)
    cache.write(wide[:, :, 0], wide[:, :, 2], torch.arange(20))
    other.write(wide[:, :, 0].contiguous(), wide[:, :, 2].contiguous(), torch.arange(20))
    assert torch.equal(cache.buffer, other.buffer)


def test_per_tensor_scales():
    cache = cache_of("fp8", k_scale=2.0, v_scale=0.25)
    x = 500 * torch.ones(1, 2, 64)  # over 448, within 2 * 448
    cache.write(x, x / 8, torch.tensor([0]))
    k, v = cache.dequantize(torch.tensor([0]))
    assert (k / 500 - 1).abs().max() < 0.04 and (v / 62.5 - 1).abs().max() < 0.04


# ---- refusals: the argument, its value, what is allowed; nothing stored is lost

WRITE = dict(key=rows(4), value=rows(4), slot_mapping=torch.arange(4))


@pytest.mark.parametrize(
    "change,match",
    [
        ({"key": rows(4, 32)}, r"key\.shape=\(4, 2, 32\)"),
        ({"key": rows(4).double()}, r"key\.dtype=torch\.float64"),
        ({"value": rows(3)}, r"value\.shape=\(3, 2, 64\)"),
        ({"value": rows(4).float()}, r"value\.dtype=torch\.float32"),
        ({"key": rows(4).to("meta")}, r"key\.device=meta"),
        ({"slot_mapping": torch.arange(4) + 95}, r"slot_mapping=98: slots end at 95"),
        ({"slot_mapping": torch.arange(4.0)}, r"slot_mapping\.dtype=torch\.float32"),
        ({"slot_mapping": torch.arange(5)}, r"slot_mapping\.shape=\(5,\)"),
        ({"positions": torch.arange(3)}, r"positions\.shape=\(3,\)"),
    ],
)
def test_write_refuses(change, match):
    cache = cache_of()
    with pytest.raises(ValueError, match=match):
        cache.write(**{**WRITE, **change})
    assert not cache.buffer.any()


ATTEND = dict(
    q=rows(3).repeat(1, 2, 1),
    block_table=torch.tensor([[0, 1], [2, 3]]),
    seq_lens=torch.tensor([20, 5]),
    cu_seqlens_q=torch.tensor([0, 2, 3]),
)


@pytest.mark.parametrize(
    "change,match",
    [
        ({"q": rows(3)[:, :1]}, r"q\.shape\[1\]=1: a multiple of the 2 kv heads"),
        ({"q": rows(3, 32)}, r"q\.shape"),
        ({"cu_seqlens_q": None}, "cu_seqlens_q=None: 3 queries for 2 sequences"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 2])}, r"cu_seqlens_q=\[0, 2, 2\]"),
        ({"cu_seqlens_q": torch.tensor([0, 4, 3])}, r"cu_seqlens_q=\[0, 4, 3\]"),
        ({"seq_lens": torch.tensor([20, 40])}, r"block_table\.shape\[1\]=2: the keys up to position 40 need 3 pages"),
        ({"seq_lens": torch.tensor([20, 0])}, r"seq_lens=\[20, 0\]"),
        ({"block_table": torch.tensor([[0, 6], [2, 3]])}, r"block_table=0\.\.6"),
        ({"block_table": torch.tensor([[0, -1], [2, 3]])}, r"block_table=-1\.\."),
        ({"sinks": torch.zeros(3)}, r"sinks\.shape=\(3,\)"),
        ({"softcap": -1.0}, r"softcap=-1\.0"),
        ({"window": -1}, "window=-1"),
        ({"chunk_lookback": 3, "window": 2}, "window=2: chunk_lookback=3"),
        ({"alibi_sqrt": True}, "alibi_sqrt=True"),
        ({"output_scale": 0.0}, r"output_scale=0\.0"),
        ({"prefix_ranges": torch.zeros(2, 2)}, r"prefix_ranges\.shape"),
        ({"causal": torch.tensor([1, 0])}, r"causal\.dtype=torch\.int64"),
        ({"dropout": 0.1}, r"options=\['dropout'\]"),
    ],
)
def test_attend_refuses(change, match):
    with pytest.raises(ValueError, match=match):
        cache_of().attend(**{**ATTEND, **change})


def test_constructor_refuses():
    with pytest.raises(ValueError, match="num_blocks=0"):
        cache_of(pages=0)
    with pytest.raises(ValueError, match="block_size=12"):
        get_format("int4").cache_spec(2, 64, block_size=12)
    with pytest.raises(ValueError, match=r"k_scale=-1\.0"):
        cache_of("fp8", k_scale=-1.0)
    with pytest.raises(ValueError, match=r"slots=0\.\.96"):
        cache_of().dequantize(torch.tensor([0, 96]))
    with pytest.raises(ValueError, match=r"target=6\.\.6"):
        cache_of().copy_pages(torch.tensor([0]), torch.tensor([6]))


def test_prepared_calls_shared_by_layers_give_the_same_bits(format_name):
    """A forward pass of two layers with different contents, a padded batch and a skipped token."""
    batch = dict(block_table=torch.tensor([[3, 1], [4, 5]]), seq_lens=torch.tensor([20, 17]))
    slots = torch.tensor([3 * 16, -1, 4 * 16 + 5])
    write, attend = prepare_write(slots), prepare_attend(**batch, window=9)
    for layer in range(3):
        alone, shared = cache_of(format_name), cache_of(format_name)
        for cache in (alone, shared):
            for t in (cache.k.codes, cache.v.codes):
                t.view(torch.uint8).copy_(torch.arange(t.view(torch.uint8).numel()).view(t.view(torch.uint8).shape) % 50)
        key, value = rows(3, seed=layer), rows(3, seed=layer + 2)
        alone.write(key, value, slots)
        write(shared, key, value)
        q = rows(2, seed=layer + 4).repeat(1, 2, 1)
        sinks = torch.full((q.shape[1],), float(layer))
        assert torch.equal(alone.buffer, shared.buffer)
        for options in ({}, {"sinks": sinks}):
            out, lse = alone.attend(q, **batch, window=9, return_lse=True, **options)
            for given in (None, torch.empty_like(out)):
                got, got_lse = attend(shared, q, out=given, return_lse=True, **options)
                assert torch.equal(out, got) and torch.equal(lse, got_lse) and (given is None or got is given)
    assert len(attend._prepared) == 4 and len(write._prepared) == 1  # nothing was worked out again for a later layer
    with pytest.raises(ValueError, match="slot_mapping"):
        write(cache_of(format_name, pages=2), key, value)
    # The next step: other numbers in the same tensors.
    slots.copy_(torch.tensor([4 * 16 + 6, 7, -1])), batch["seq_lens"].copy_(torch.tensor([21, 9]))
    alone.write(key, value, slots), write(shared, key, value)
    assert torch.equal(alone.buffer, shared.buffer) and torch.equal(alone.attend(q, **batch, window=9), attend(shared, q))
    batch["block_table"][0] = 99
    with pytest.raises(ValueError, match="block_table=99"):
        attend(shared, q)
    batch["block_table"][0] = 3
    with pytest.raises(ValueError, match=r"sinks\.shape=\(1,\)"):
        attend(shared, q, sinks=torch.zeros(1))
    with pytest.raises(ValueError, match="softcap"):
        attend(shared, q, softcap=torch.ones(1))
