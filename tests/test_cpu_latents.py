"""The compiled CPU kernels over latents: within the budget for every codec and option, and who is chosen."""

import pytest
import torch

from latent_batches import LATENT, SCALE, check_within, expected, make, queries
from quantkv import implementations, prepare_attend
from quantkv.calls import AttendCall, Batch
from quantkv.maps import LayerMaps, LinearMap
from quantkv.testing import OUTPUT_BUDGET, relative_error

pytest.importorskip("numba")

CPU = {"implementation": "cpu"}
RAGGED = (4, 1, 3, 0, 2), (700, 1, 3, 9, 133)  # over a cut of the kernel's work, and a sequence without queries


def check(fmt, heads=4, dtype=torch.float32, latent=64, maps=None, scales=(), **options):
    cache, batch, (slots, _), _ = make(
        fmt, dtype=dtype, latent=latent, size=16, queries=RAGGED[0], keys=RAGGED[1], maps=maps, **dict(scales)
    )
    q = queries(cache, dtype, heads, sum(RAGGED[0]))
    out, lse = cache.attend(q, **batch, scale=SCALE, return_lse=True, **CPU, **options)
    want, want_lse = expected(cache, q, batch, slots, **options)
    check_within(out, lse, want, want_lse, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fmt", ["int4", "levels4", "levels5", "int8", "fp8_token", "int2", "none", "tq4", "trellis2", "int4+int8", "int8+int4"]
)
def test_every_kind_of_codec(fmt, dtype):
    check(fmt, dtype=dtype)


@pytest.mark.parametrize("heads", [1, 3])
def test_numbers_of_heads_and_sizes_of_deepseek(heads):
    check("int4", heads, latent=512)


@pytest.mark.parametrize("options", [{"window": 20}, {"causal": False}, {"softcap": 3.0}, {"window": 24, "chunk_lookback": 1}], ids=str)
def test_options(options):
    check("int4+int8", **options)


def test_scales_of_the_layer():
    """Each of its own side; a value is a latent, and has the latents'."""
    check("fp8", scales={"k_scale": 0.25, "v_scale": 3.0})


def test_a_map_of_the_layer():
    g = torch.Generator().manual_seed(3)
    matrix = torch.linalg.qr(torch.randn(64, 64, generator=g, dtype=torch.float64))[0] * torch.linspace(0.5, 2, 64)
    check("int8", maps=LayerMaps(LinearMap(matrix.float()[None], torch.linalg.inv(matrix).float()[None])))


def test_a_prepared_call_follows_lengths_and_takes_parts_and_a_mean():
    cache, batch, (slots, _), _ = make("levels4", keys=(21, 30), queries=(1, 1))
    q, mean = queries(cache, heads=4, count=2), torch.linspace(-1, 1, LATENT)
    given = {name: batch[name] for name in ("block_table", "seq_lens")}
    step = prepare_attend(**given, max_query_len=1, scale=SCALE, **CPU)
    want, _ = expected(cache, q, batch, slots)
    assert relative_error(step(cache, (q[..., :LATENT], q[..., LATENT:]), mean=mean), want + mean) <= OUTPUT_BUDGET[torch.float32]
    batch["seq_lens"].sub_(4)
    slots = torch.cat([slots[:17], slots[21:47]])
    want, _ = expected(cache, q, batch, slots)
    assert relative_error(step(cache, q), want) <= OUTPUT_BUDGET[torch.float32]


def test_larger_products_are_the_references():
    cache, batch, _, _ = make("int4", keys=(21, 30), queries=(4, 1))

    def served(heads):
        call = AttendCall(
            queries(cache, heads=heads, count=5),
            (cache.segment(batch["block_table"]),),
            Batch(batch["cu_seqlens_q"], batch["seq_lens"]),
            SCALE,
        )
        return implementations.resolve(call)

    assert served(4) == ("cpu", {})
    assert served(5) == ("reference", {"cpu": "a sequence has 20 queries of all heads over latents: at most 16"})
