"""quantkv.engine, without an engine: what adapters have in common."""

from dataclasses import replace

import pytest
import torch

from quantkv import PagedCache, get_format, implementations, maps
from quantkv.calibration import Calibration, LayerMoments
from quantkv.calls import AttentionOptions, Batch
from quantkv.copies import CacheWithCopies
from quantkv.engine import warm_up
from quantkv.engine.forward_metadata import ForwardMetadata
from quantkv.engine.full_precision_group import FullPrecisionGroup
from quantkv.engine.layer import LayerAttention, PagedLayer
from quantkv.engine.layer_config import LayerConfig, Shard, full_precision_tokens
from quantkv.engine.observed import value_moments
from quantkv.engine.padded_metadata import PaddedMetadata
from quantkv.engine.warm_up import StepLimits, claim_scratch, who_serves
from quantkv.full_precision import FullPrecisionTokens
from quantkv.geometry import Heads
from quantkv.maps import LayerMaps, LinearMap
from quantkv.policy import Policy

SIZE, BLOCK = 16, 16
CPU = torch.device("cpu")


def rows(count, heads, seed=0):
    return torch.randn(2, count, heads, SIZE, generator=torch.Generator().manual_seed(seed))


def rotations(heads):
    """A rotation for each kv head."""
    whole = torch.randn(heads, SIZE, SIZE, generator=torch.Generator().manual_seed(7))
    q = torch.linalg.qr(whole)[0].contiguous()
    return LinearMap(q, q.mT.contiguous())


def layer_of(fmt, heads=2, **config):
    return PagedLayer(LayerConfig(get_format(fmt), **config), Heads(heads, SIZE, SIZE), torch.float32)


def step(queries, keys, pages=4, **more):
    """Metadata of sequences with these queries and keys; page i * pages + j is page j of sequence i."""
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    table = torch.arange(len(queries) * pages, dtype=torch.int32).view(-1, pages)
    slots = torch.cat([torch.arange(n - count, n) + i * pages * BLOCK for i, (count, n) in enumerate(zip(queries, keys))])
    batch = Batch(starts, torch.tensor(keys, dtype=torch.int32), max(queries))
    return ForwardMetadata(batch, table, slots, **more)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_rank_stores_its_heads_of_the_layer(ranks):
    """With fewer heads than ranks several store the same."""
    policy = Policy("int4", maps={3: LayerMaps(rotations(4), rotations(4))})
    whole = LayerConfig.of(policy, 3, torch.float32, Heads(4, SIZE, SIZE), 4)
    k, v = rows(20, 4)
    cache = PagedLayer(whole, Heads(4, SIZE, SIZE), torch.float32).allocate(2, BLOCK, CPU)
    cache.write(k, v, torch.arange(20))
    own = Heads(max(4 // ranks, 1), SIZE, SIZE)
    for rank in range(ranks):
        config = LayerConfig.of(policy, 3, torch.float32, own, 4, Shard(rank, ranks))
        part = PagedLayer(config, own, torch.float32).allocate(2, BLOCK, CPU)
        start = rank * 4 // ranks
        held = slice(start, start + own.num_kv_heads)
        part.write(k[:, held], v[:, held], torch.arange(20))
        assert torch.equal(part.buffer, cache.buffer[:, held])


def test_maps_of_other_heads_are_refused():
    policy = Policy("int4", maps={0: LayerMaps(rotations(3))})
    for heads, total, shard in ((2, 2, Shard()), (1, 2, Shard(1, 2))):
        with pytest.raises(ValueError, match=r"k.*3"):
            LayerConfig.of(policy, 0, torch.float32, Heads(heads, SIZE, SIZE), total, shard)


@pytest.mark.parametrize(
    ("fmt", "by_position", "kept"),
    [("int4", False, (16, 24)), ("int4", True, (0, 24)), ("none", False, None), ("fp32", False, None), ("int8/none", False, (16, 24))],
)
def test_which_tokens_a_layer_keeps_at_full_precision(fmt, by_position, kept):
    policy = Policy("int8", {1: fmt}, full_precision=FullPrecisionTokens(16, 24))
    found = LayerConfig.of(policy, 1, torch.bfloat16, by_position=by_position).full_precision
    assert found == (None if kept is None else FullPrecisionTokens(*kept))
    assert full_precision_tokens(FullPrecisionTokens(16, 0), by_position=True) is None


def test_a_pass_writes_and_reads_what_the_cache_does():
    """Rows beyond the slots are padding, and so are queries beyond num_tokens."""
    (k, v), q = rows(25, 2), rows(25, 4, 1)[0]
    layer, own = layer_of("int8"), PagedCache(get_format("int8").cache_spec(2, SIZE), 8)
    cache = layer.cache(layer.allocate(8, BLOCK, CPU))
    first = step([20, 3], [20, 3], num_tokens=23)
    first.write(cache, k, v)
    own.write(k[:23], v[:23], first.slots)
    assert torch.equal(cache.buffer, own.buffer)
    batch = {"seq_lens": first.batch.seq_lens, "cu_seqlens_q": first.batch.cu_seqlens_q}
    options = AttentionOptions(window=9, clamp_prefix_to_window=True)  # there are no images
    out = torch.full((25, 4, SIZE), 7.0)
    first.attend(cache, q, 0.25, options, out=out)
    expected = own.attend(q[:23], block_table=first.block_table, **batch, scale=0.25, window=9)
    assert torch.equal(out[:23], expected) and bool((out[23:] == 7).all())
    assert [attend.options for attend in first._attends.values()] == [AttentionOptions(window=9)]  # nothing to support beside it


def test_layers_of_one_page_table_share_what_is_prepared():
    (k, v), other = rows(4, 2), torch.arange(4) + 32
    layer, found = layer_of("int8"), step([4], [4])
    cache = layer.allocate(4, BLOCK, CPU)
    for slots in (None, None, other, other):
        found.write(cache, k, v, slots)
    for scale in (0.25, 0.25, 0.5):
        found.attend(cache, k, scale)
    assert len(found._writes) == 2 and len(found._attends) == 2


@pytest.mark.parametrize("context", [0, 6])
@pytest.mark.parametrize("padded", [False, True])
def test_a_pass_reads_its_own_rows_as_given(padded, context):
    """In place of what int4 made of them, which is stored all the same; before them it reads pages."""
    (k, v), q = rows(20, 2), rows(20, 4, 1)[0]
    layer, before = layer_of("int4"), rows(context, 2, 2)
    cache, plain = layer.allocate(8, BLOCK, CPU), PagedCache(get_format("fp32").cache_spec(2, SIZE), 8)
    found = step([13], [13 + context], pages=2)
    if context:
        earlier = found.block_table[0, torch.arange(context) // BLOCK].long() * BLOCK + torch.arange(context) % BLOCK
        cache.write(*before, earlier)
        plain.write(*cache.dequantize(earlier), earlier)
    if padded:  # the same tokens behind 7 of padding
        real, batch, pairs = torch.arange(7, 20), found.batch, ((13, 13 + context),)
        found = PaddedMetadata(real, found.slots, found.block_table, batch.seq_lens, batch.cu_seqlens_q, lengths=pairs, num_pages=1)
    else:
        (k, v), q = (k[7:], v[7:]), q[7:]
    found.write(cache, k, v)
    out = found.attend(cache, q, key=k, value=v)
    plain.write(k[-13:], v[-13:], found.slots)
    batch = {"seq_lens": found.batch.seq_lens, "cu_seqlens_q": found.batch.cu_seqlens_q}
    torch.testing.assert_close(out[-13:], plain.attend(q[-13:], block_table=found.block_table, **batch), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found.attend(cache, q)[-13:], out[-13:], rtol=0.01)
    if padded:
        assert not out[:7].any()


def test_memory_of_copies_is_taken_before_pages():
    tokens = FullPrecisionTokens(16, 24)
    layer, without = layer_of("int4", full_precision=tokens), layer_of("int4")
    for each in (layer, without):
        assert each.copies_nbytes == 0
        each.reserve_copies(BLOCK, 3, CPU)
    of_one = get_format("fp32").cache_spec(2, SIZE, block_size=BLOCK).block_bytes
    assert layer.copies_nbytes == tokens.copies_needed(BLOCK, 3) * of_one and without.copies_nbytes == 0


@pytest.mark.parametrize("fmt", ["tq4", "levels4+fp16"])
def test_no_rotation_is_on_the_device_before_pages_are(fmt, monkeypatch):
    """vLLM takes memory of copies from a pool that it forgets while it sleeps: a rotation in it would be noise in all that is stored then.
    Copies of latents get their rotation with the pages."""
    asked, own, made = [], LinearMap.to, maps._default_map.__wrapped__
    monkeypatch.setattr(maps, "_default_map", lambda kind, *given: made(kind, *given) if kind == "none" else made(kind, *note(*given)))
    monkeypatch.setattr(LinearMap, "to", lambda self, device: asked.append(str(device)) or own(self, device))
    note = lambda size, device: asked.append(device) or (size, device)
    latent = fmt.endswith("+fp16")
    heads = Heads(1, 256, 64) if latent else Heads(2, 64, 64)
    for given in (LayerMaps(), LayerMaps(LinearMap(*2 * [torch.eye(heads.head_size)[None]]))):
        layer = PagedLayer(LayerConfig(get_format(fmt), given, FullPrecisionTokens(16, 24)), heads, torch.float16)
        layer.reserve_copies(BLOCK, 3, torch.device("meta"))
        assert set(asked) == {"cpu"} and layer.copies.device.type == "meta" and layer.copies.maps.k is None
        layer = PagedLayer(layer.config, heads, torch.float16)
        layer.reserve_copies(BLOCK, 3, CPU)
        pages, held = layer.allocate(4, BLOCK, CPU), layer.copies.buffer
        group = FullPrecisionGroup([layer], num_seqs=2, num_tokens=64, pool_seqs=3, device=CPU)
        group.attach(step([20], [20]), pages, advance=False)
        assert layer.cache(pages).copies.buffer is held and layer.copies.maps.k is (pages.maps.k if latent else None)
        asked.clear()


def test_copies_stay_while_the_pool_grows_and_another_layer_reads_them():
    layer, reader = layer_of("int4", full_precision=FullPrecisionTokens(16, 0)), layer_of("int4", full_precision=FullPrecisionTokens(16, 0))
    reader.owner = layer
    pages = layer.allocate(8, BLOCK, CPU)
    assert layer.cache(pages) is pages and reader.cache(pages) is pages  # nothing says which pages have a copy
    group = FullPrecisionGroup([layer], num_seqs=2, num_tokens=64, pool_seqs=1, device=CPU)
    (k, v), q = rows(20, 2), rows(1, 4, 1)[0]
    first = step([20], [20])
    group.attach(first, pages)
    first.write(layer.cache(pages), k, v)
    held = layer.copies
    group.pool.make_room(num_seqs=3, num_blocks=8)
    cache = layer.cache(pages)
    assert layer.copies.num_blocks == 3 * held.num_blocks == group.pool.num_copies
    assert torch.equal(layer.copies.buffer[: held.num_blocks], held.buffer) and held.buffer.any()
    other = reader.cache(pages)
    assert isinstance(other, CacheWithCopies) and other.copies is cache.copies and reader.copies is None
    assert layer.cache(pages) is cache and reader.cache(pages) is other
    second = step([1], [20])
    second.slots = torch.full((1,), -1)
    group.attach(second, pages)
    mixed = torch.cat([k[:16], pages.dequantize(torch.arange(16, 20))[0]]), torch.cat([v[:16], pages.dequantize(torch.arange(16, 20))[1]])
    plain = PagedCache(get_format("fp32").cache_spec(2, SIZE), 4)
    plain.write(*mixed, torch.arange(20))
    expected = plain.attend(q, block_table=second.block_table, seq_lens=second.batch.seq_lens)
    assert torch.allclose(second.attend(other, q), expected, atol=1e-5)


def test_a_captured_step_moves_no_state():
    layer = layer_of("int4", full_precision=FullPrecisionTokens(16, 24))
    group = FullPrecisionGroup([layer], num_seqs=4, num_tokens=64, pool_seqs=2, device=CPU)
    pages, found = layer.allocate(8, BLOCK, CPU), [step([1, 1], [4, 4]) for _ in range(2)]
    group.attach(found[0], pages, advance=False)
    assert int(group.pool.now) == 0 and layer.pool is group.pool and group.pool.watched is pages
    group.attach(found[1], pages)
    assert int(group.pool.now) == 1
    assert [t.data_ptr() for t in found[0].full_precision.joined] == [t.data_ptr() for t in found[1].full_precision.joined]


def test_a_step_without_sequences_writes_no_copy():
    """An engine whose other ranks go on replays a graph over rows of padding: copies of the step before stay what they were."""
    layer = layer_of("int4", full_precision=FullPrecisionTokens(16, 24))
    group = FullPrecisionGroup([layer], num_seqs=4, num_tokens=64, pool_seqs=2, device=CPU)
    pages, (k, v) = layer.allocate(8, BLOCK, CPU), rows(20, 2)
    first, idle = step([20], [20]), step([1], [1])
    group.attach(first, pages)
    first.write(layer.cache(pages), k, v)
    held, beside = layer.copies.buffer.clone(), group.pool.copies[:-1].clone()
    assert int((group._whole.slots >= 0).sum()) == 20 and held.any()
    idle.slots = torch.full((1,), -1)
    group.attach(idle, pages, advance=False)
    idle.write(layer.cache(pages), k[:1] + 1, v[:1] + 1)
    assert torch.equal(layer.copies.buffer, held) and torch.equal(group.pool.copies[:-1], beside)


def test_a_group_keeps_the_most_that_a_layer_keeps():
    given = [FullPrecisionTokens(16, 0), FullPrecisionTokens(0, 40)]
    group = FullPrecisionGroup([layer_of("int4", full_precision=tokens) for tokens in given], 1, 1, 1, CPU)
    assert group.tokens == FullPrecisionTokens(16, 40)


def test_who_serves_a_layer_is_what_its_calls_choose(monkeypatch):
    """The kinds of calls that the engine makes, each resolved: here by a rule that no implementation has."""
    monkeypatch.setattr(implementations, "resolve", lambda call: ("cpu" if hasattr(call, "q") else "reference", {}))
    limits = StepLimits(num_seqs=8, num_tokens=64, max_seq_len=256, verified=3, table_width=8)
    told = who_serves(layer_of("int4"), LayerAttention(4), limits, CPU, 32)
    writes = {f"write of {n} tokens": "reference" for n in (1, 8, 64)}
    assert told == writes | {f"attend of {s} x {n} queries": "cpu" for n in (1, 3) for s in (1, 8)}


def test_what_is_compiled_at_start_is_of_the_largest_steps(monkeypatch):
    """Steps of one token a sequence, unless drafts are verified; batches of several kinds are those of the largest of each size."""
    asked = {}
    monkeypatch.setattr(warm_up.warmup, "mixed_batches", lambda *given: given)
    monkeypatch.setattr(warm_up.warmup, "warm_up", lambda pages, heads, **calls: asked.update(calls, heads=heads) or {"what": "who"})
    layer = PagedLayer(LayerConfig(get_format("int4")), Heads(2, 64, 64), torch.float32)
    pages = layer.allocate(1, 16, torch.device("cpu"))
    assert warm_up.warm_up(layer, LayerAttention(8, own_rows=False), StepLimits(4, 96, 256), pages) == {"what": "who"}
    sizes = [asked[name] for name in ("query_lens", "batch_sizes", "write_sizes")]
    assert sizes == [[1], [1, 4], [1, 4, 96]] and asked["chunks"] and asked["heads"] == 8
    assert asked["mixed"] == (8, 4, 96, 256, False) and asked["full_precision"] is None
    warm_up.warm_up(layer, LayerAttention(8), StepLimits(4, 96, 256, 3), pages)
    assert asked["query_lens"] == [1, 3] and not asked["chunks"] and asked["mixed"] == (8, 4, 96, 256, True)
    warm_up.warm_up(layer, LayerAttention(8), StepLimits(1, 96, 256), pages)
    assert asked["batch_sizes"] == [1] and asked["mixed"] == (8, 1, 96, 256, True)


@pytest.mark.parametrize("own", ["", "k", "v", "kv"])
def test_a_map_of_the_layers_own_goes_before_the_calibrations(own):
    moments = torch.eye(64).repeat(2, 1, 1) + torch.diag(torch.linspace(0, 1, 64))
    measured = Calibration(1, {0: LayerMoments(None, moments, moments)})
    eye = torch.eye(64).repeat(2, 1, 1)
    maps = {side: LinearMap(eye, eye) for side in own}
    found = LayerConfig(get_format("levels4"), LayerMaps(**maps)).with_calibration(measured, 0).maps
    made = measured.maps(0, get_format("levels4"))
    for side in "kv":
        theirs, ours = getattr(made, side), getattr(found, side)
        assert ours is maps[side] if side in own else torch.equal(ours.forward, theirs.forward)


def test_layers_that_the_same_kernels_serve_are_of_one_kind():
    layer, attention = layer_of("int4"), LayerAttention(4, 0.25)
    assert layer.kind(attention) == layer_of("int4").kind(LayerAttention(4, 0.5))
    sinks = replace(attention, sinks=torch.zeros(4))
    window = replace(attention, options=AttentionOptions(window=8))
    mapped = layer_of("int4", maps=LayerMaps(rotations(2)))
    kinds = [layer.kind(attention), layer.kind(sinks), layer.kind(window), mapped.kind(attention), layer_of("int8").kind(attention)]
    assert len(set(kinds)) == len(kinds)
    slopes = replace(attention, alibi_slopes=torch.zeros(4))
    assert [a.by_position for a in (attention, sinks, window, slopes)] == [False, False, True, True]


def test_scratch_memory_of_a_step():
    """256 MiB of keys and values; for each query its three results in 16 bits, itself, the combined one in float32; at most 512 MiB."""
    row = 32 * (2 * (128 + 3 * 128) + 4 * 128 + 16)
    assert implementations.scratch_bytes(1, 32, (128, 128), 2) == (256 << 20) + row
    assert implementations.scratch_bytes(1 << 20, 32, (128, 128), 2) == (256 << 20) + (512 << 20)
    claim_scratch(torch.zeros(1, 2, SIZE))  # on a CPU there is none to claim


@pytest.mark.parametrize("lends", [False, True])
def test_rows_are_lent_to_the_layers_that_read_anothers_pages(lends):
    """As copies, by the layer that owns the pages; a step of one query a sequence lends none."""
    k, v = rows(4, 2)
    batch = Batch(torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32), 3)
    step = ForwardMetadata(batch, torch.zeros(2, 1, dtype=torch.int32))
    given = step.own_rows("owner", k, v, lends)
    kept = k.clone()
    k.zero_()  # as what comes later in a graph may do
    assert torch.equal(given["key"], kept if lends else k) and torch.equal(given["value"], v)
    assert step.own_rows("another", None, None) == {}
    assert step.own_rows("owner", None, None) == (given if lends else {})
    one = ForwardMetadata(replace(batch, max_query_len=1), step.block_table)
    assert one.own_rows("owner", k, v, lends) == {} == one.lent


def test_scales_of_a_checkpoint_are_for_codecs_that_have_one_a_tensor():
    assert LayerConfig(get_format("fp8")).scales(0.5, None) == (0.5, 1.0)
    assert LayerConfig(get_format("int8/int4")).scales(0.5, 0.25) == (1.0, 1.0)


@pytest.mark.parametrize(("own", "ranks", "total"), [(2, 2, 4), (1, 1, 1), (1, 4, 3), (2, 1, 2)])
def test_kv_heads_of_all_ranks(own, ranks, total):
    """Where each rank has one, only the model says how many there are."""
    assert Shard(0, ranks).all_kv_heads(own, lambda: 3) == total


def test_the_projection_behind_a_layer_says_what_its_values_are_worth():
    """Of the first module with a number; an identity where none is found."""

    class Block(torch.nn.Module):
        def __init__(self, size):
            super().__init__()
            self.attention, self.o_proj = torch.nn.Module(), torch.nn.Linear(4 * size, 5, bias=False)

    model = torch.nn.ModuleList([Block(3), Block(3), torch.nn.Module()])
    sizes = 2, 3, 4
    found = value_moments(model, [(0, model[0].attention, sizes), (0, model[1].attention, sizes), (7, model[2], sizes)])
    weight = model[0].o_proj.weight.detach().view(5, 2, 2, 3)  # hidden, kv head, group, size
    torch.testing.assert_close(found[0], torch.einsum("ohgd,ohge->hde", weight, weight))
    assert found.keys() == {0, 7} and torch.equal(found[7], torch.eye(3).repeat(2, 1, 1))
