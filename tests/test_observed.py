"""`engine.observed`: attention of a pass without pages, and what is made of the rows that it shows."""

import math

import pytest
import torch

from quantkv import PagedCache, get_format
from quantkv.engine.layer import LayerAttention
from quantkv.engine.observed import SKIPPED, LayerSums, causal_attention, layer_moments
from quantkv.options import AttentionOptions

TOKENS, HEADS, GROUP, SIZE = 40, 2, 3, 16
RANDOM = torch.Generator().manual_seed(0)
QUERY, KEY, VALUE = (torch.randn(TOKENS, heads, SIZE, generator=RANDOM) for heads in (HEADS * GROUP, HEADS, HEADS))
OF_HEADS = torch.linspace(-1, 2, HEADS * GROUP)


@pytest.mark.parametrize(
    ("options", "of_heads"),
    [
        (AttentionOptions(), {}),
        (AttentionOptions(window=7), {}),
        (AttentionOptions(window=8, chunk_lookback=0), {}),
        (AttentionOptions(window=16, chunk_lookback=1, softcap=0.5), {}),
        (AttentionOptions(window=7), {"sinks": OF_HEADS}),
        (AttentionOptions(), {"alibi_slopes": OF_HEADS.abs()}),
    ],
    ids=["plain", "window", "chunks", "lookback_softcap", "sinks", "alibi"],
)
def test_attention_without_pages_is_that_of_pages(options, of_heads):
    attention = LayerAttention(HEADS * GROUP, 0.3, options, **of_heads)
    pages = PagedCache(get_format("none", torch.float32).cache_spec(HEADS, SIZE, block_size=16), 3, "cpu")
    pages.write(KEY, VALUE, torch.arange(TOKENS))
    table, lengths = torch.arange(3, dtype=torch.int32)[None], torch.tensor([TOKENS], dtype=torch.int32)
    batch = {"block_table": table, "seq_lens": lengths, "cu_seqlens_q": torch.tensor([0, TOKENS], dtype=torch.int32)}
    given = {name: getattr(options, name) for name in ("window", "chunk_lookback", "softcap")}
    expected = pages.attend(QUERY, **batch, scale=0.3, **given, **of_heads)
    torch.testing.assert_close(causal_attention(attention, QUERY, KEY, VALUE), expected, rtol=1e-5, atol=1e-5)


def rotate(positions):
    """Pairs of neighbours turn by angles that halve from pair to pair."""
    angles = positions[:, None] / 2.0 ** torch.arange(SIZE // 2)
    turned = torch.stack([angles.cos(), angles.sin(), -angles.sin(), angles.cos()], -1).unflatten(-1, (2, 2))
    return torch.stack([torch.block_diag(*pairs) for pairs in turned])


@pytest.mark.parametrize("limit", [100, 300])
def test_statistics_stand_at_every_position(limit):
    sums = LayerSums()
    sums.add(QUERY, KEY)
    sums.rotation = "a"
    [made] = layer_moments({0: sums}, {0: torch.eye(SIZE).repeat(HEADS, 1, 1)}, {"a": rotate}, limit).values()
    matrices = rotate(torch.arange(limit))
    first = torch.einsum("hd,pde->phe", KEY[SKIPPED:].mean(0), matrices[:64]).mean(0)
    torch.testing.assert_close(made.key_mean[0].float(), first, rtol=2**-10, atol=2**-10)
    assert made.key_mean.shape == (math.ceil(limit / 64), HEADS, SIZE)
    last = torch.arange(-(-limit // 64) * 64).clamp(max=limit - 1)  # of a bucket that ends beyond the limit
    everywhere = torch.einsum("thd,pde->pthe", KEY[SKIPPED:].double(), rotate(last).double()).unflatten(0, (-1, 64))
    strays = (everywhere - everywhere.mean((1, 2), keepdim=True)).square().mean((0, 1, 2))
    assert (made.key_spread - strays).norm() < 0.05 * strays.norm()
    rows = QUERY[SKIPPED:].unflatten(1, (HEADS, GROUP))
    seen = torch.einsum("thgd,thge->hde", rows, rows) / (TOKENS - SKIPPED) / GROUP
    expected = torch.einsum("pde,hdf,pfg->heg", matrices, seen, matrices) / limit
    assert (made.key_hessian - expected).norm() < (1e-5 if limit <= 256 else 0.02) * expected.norm()


def test_rows_whose_rotation_is_not_known_have_no_mean():
    sums = LayerSums()
    sums.add(QUERY, KEY)
    values = {0: torch.eye(SIZE).repeat(HEADS, 1, 1)}
    assert layer_moments({0: sums}, values, {}, 100)[0].key_mean.shape == (1, HEADS, SIZE)
    sums.understood = False
    assert layer_moments({0: sums}, values, {}, 100)[0].key_mean is None
