"""Packed blocks of vLLM's pool: each layer in one group, no group larger than a block, little lost. vLLM's own plan: tests/vllm_cpu."""

import random

import pytest

from quantkv.geometry import Kind
from quantkv.vllm_pages import BLOCK_SIZES, PooledLayer, packed, packed_beside_states, page_tokens, pool_beside_states, pool_of, unified

ROWS = (68, 72, 100, 136, 164, 196, 264, 512, 520)  # bytes of a token of one head
FULL, WINDOW, CHUNKS = Kind(), Kind(1024), Kind(2048, True)


def layers_of(seed):
    """Of two or three kinds, in formats drawn at random."""
    draw = random.Random(seed)
    kinds = [FULL, WINDOW, CHUNKS][: draw.choice((2, 2, 3))]
    heads = {kind: draw.choice((1, 2, 8)) for kind in kinds}
    rows = draw.sample(ROWS, draw.choice((1, 2, 5)))
    return [PooledLayer(kind, heads[kind] * draw.choice(rows)) for kind in kinds for _ in range(draw.randint(2, 12))]


def check(found, layers, step):
    assert sorted(n for group in found.groups for n in group.layers) == list(range(len(layers)))
    for group in found.groups:
        assert {layers[n].kind for n in group.layers} == {group.kind}
        size = 1 if group.kind is None else group.block_size
        assert size * sum(layers[n].nbytes for n in group.layers) <= found.block_bytes
        assert group.kind is None or group.block_size % step == 0
        assert found.block_bytes % (16 * group.pages) == 0


@pytest.mark.parametrize("step", [16, 64])
@pytest.mark.parametrize("seed", range(8))
def test_packed_pools(seed, step):
    layers = layers_of(seed)
    found = packed(layers, step)
    check(found, layers, step)
    needed = [sum(layer.nbytes for layer in layers if layer.kind == kind) for kind in {layer.kind for layer in layers}]
    rows = sum(found.block_bytes / group.block_size for group in found.groups)
    assert found.density >= 1 and rows >= sum(needed)
    assert found.density < (1.03 if step == 16 else 1.05)
    for group in found.groups:
        assert group.block_size // group.pages in BLOCK_SIZES


def test_pages_are_small_where_copies_were_allocated_for_small_ones():
    assert [page_tokens(size) for size in (16, 48, 64, 80, 96, 128, 192)] == [16, 16, 64, 16, 32, 128, 64]
    assert [page_tokens(size, 16) for size in (16, 48, 64, 128)] == [16] * 4
    found = packed(layers_of(0), 16, 16)
    assert {group.block_size // group.pages for group in found.groups} == {16}


def test_pools_that_need_no_packing_are_vllms_own():
    alike = [PooledLayer(kind, 136) for kind in (FULL, WINDOW) for _ in range(6)]
    for layers in (alike, [PooledLayer(FULL, row) for row in ROWS]):
        found = pool_of(layers, 16)
        assert not found.packed and found == unified(layers, 16) and found.density == 1
    assert pool_of([*alike, PooledLayer(FULL, 264)], 16).packed


def test_blocks_beside_states():
    """A block holds as many tokens as the states of a group have bytes, or vLLM's own where all layers have one size."""
    rows, states = [PooledLayer(FULL, 8 * row) for row in (136, 264, 512)], [PooledLayer(None, 1_000_000)] * 9
    found = pool_beside_states([*rows, *states], 2, 16)
    check(found, [*rows, *states], 16)
    assert found.packed and found.padding(131072) < 1.02
    needed = 2 * 9 * 1_000_000 + 131072 * 8 * (136 + 264 + 512)
    assert found.unpadded_bytes(131072) == needed
    blocks = sum(2 if group.kind is None else -(-131072 // group.block_size) for group in found.groups)
    assert found.sequence_bytes(131072) == blocks * found.block_bytes
    fixed = packed_beside_states([*rows, *states], 2, 16, 256)
    check(fixed, [*rows, *states], 16)
    assert fixed.groups[0].block_size == 256
    own = pool_beside_states([*rows[:1] * 3, *states], 1, 16)
    assert not own.packed and own.groups[0].block_size == 928 and own.block_bytes == 3 * 928 * 8 * 136
    assert pool_beside_states([*rows, PooledLayer(WINDOW, 136), *states], 1, 16) is None
