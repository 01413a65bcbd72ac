"""TurboQuant and the transforms by vLLM's names."""

import pytest
import torch

from quantkv import vllm_api as backend
from quantkv.vllm_api import turboquant
from vllm_api_calls import (
    BLOCK_SIZE,
    BLOCKS,
    DEVICE,
    HEADS,
    OUTPUT_BOUND,
    PRESETS,
    check_stored,
    golden,
    layouts,
    read,
    relative_error,
    turboquant_arguments,
    turboquant_read,
    turboquant_write,
)

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("preset", PRESETS)
def test_turboquant_reproduces_the_golden_file(preset, head_size):
    g = golden(head_size)
    kv_cache = turboquant_write(head_size, preset)
    check_stored(kv_cache, g[f"{preset}.kv_cache"], 0 if preset == "turboquant_k8v4" else 8)
    for pi_t in ({}, {"PiT": None}):
        out = turboquant_read(head_size, preset, g[f"{preset}.kv_cache"], **pi_t)
        assert out.dtype == torch.float32
        assert relative_error(out, g[f"{preset}.out.decode"]) <= OUTPUT_BOUND["turboquant"]


@pytest.mark.parametrize("preset", PRESETS)
def test_strided_turboquant_slots_hold_and_give_the_same(preset):
    plain = turboquant_write(64, preset)
    slots = golden(64)["slot_mapping"]
    for name, view in layouts(tuple(plain.shape), torch.uint8):
        turboquant_write(64, preset, view)
        assert torch.equal(*(t.flatten(0, 1)[slots[slots >= 0]] for t in (view, plain))), name
        assert torch.equal(turboquant_read(64, preset, view), turboquant_read(64, preset, plain)), name


@pytest.mark.parametrize(
    "preset, key, value, slot",
    [
        ("turboquant_k8v4", 128, 68, 196),
        ("turboquant_4bit_nc", 66, 68, 134),
        ("turboquant_k3v4_nc", 50, 68, 118),
        ("turboquant_3bit_nc", 50, 52, 102),
    ],
)
def test_turboquant_presets(preset, key, value, slot):
    config = backend.TurboQuantConfig.from_cache_dtype(preset, 128)
    assert (config.key_packed_size, config.value_packed_size, config.slot_size_aligned) == (key, value, slot)
    assert config.key_fp8 == (preset == "turboquant_k8v4") and config.norm_correction == preset.endswith("_nc")
    assert config.key_mse_bits == {128: 0, 66: 4, 50: 3}[key] and config.centroid_bits in (3, 4)
    with pytest.raises(ValueError, match="turboquant_9bit"):
        backend.TurboQuantConfig.from_cache_dtype("turboquant_9bit", 128)


@pytest.mark.parametrize("bits", [3, 4])
def test_centroids_are_the_fixed_point_of_lloyd_max(bits):
    """Each level is its cell's mean under N(0, 1 / d), within vLLM's own 0.1 %."""
    levels = backend.get_centroids(64, bits).double().to(DEVICE) * 8
    edges = torch.cat([torch.tensor([-torch.inf]), (levels[:-1] + levels[1:]) / 2, torch.tensor([torch.inf])])
    density = torch.exp(-(edges**2) / 2) / (2 * torch.pi) ** 0.5
    means = (density[:-1] - density[1:]) / torch.special.ndtr(edges).diff()
    assert levels.shape == (2**bits,) and torch.allclose(levels, means, rtol=2e-3)
    with pytest.raises(ValueError, match="bits=5"):
        backend.get_centroids(64, 5)


def test_another_rotation_is_supported():
    """With any orthogonal matrix the result stays near that of the exact rows; with a wrong one at the read it does not."""
    torch.manual_seed(2)
    g = golden(64)
    rotation = torch.linalg.qr(torch.randn(64, 64))[0]
    kv_cache = turboquant_write(64, "turboquant_4bit_nc", rotation=rotation)
    assert not torch.equal(kv_cache, g["turboquant_4bit_nc.kv_cache"])
    rows = kv_cache.flatten(0, 1)[g["slot_mapping"][:57]]
    codes = torch.stack(backend.unpack_int4_nibbles(rows[..., :32]), -1).flatten(-2)
    key = g["key"][:57].float()
    unit = key / key.norm(dim=-1, keepdim=True).clamp_min(1e-8)
    levels = backend.get_centroids(64, 4).to(DEVICE)
    expected = torch.bucketize(unit @ rotation, (levels[:-1] + levels[1:]) / 2, right=True)
    assert (codes != expected).float().mean() < 1e-3
    query = torch.randn(2, 6, 64)
    exact = read(
        64,
        *(g[f"none.{side}_cache"].view(torch.bfloat16) for side in ("key", "value")),
        q=query,
        out=torch.empty(2, 6, 64),
        cu_seqlens_q=torch.arange(3),
    )
    right = relative_error(turboquant_read(64, "turboquant_4bit_nc", kv_cache, rotation, query=query), exact)
    wrong = relative_error(turboquant_read(64, "turboquant_4bit_nc", kv_cache, query=query), exact)
    assert right < wrong / 3


def test_turboquant_refuses_what_it_cannot_support():
    preset = "turboquant_4bit_nc"
    kv_cache = turboquant_write(64, preset)
    for argument, value in {
        "centroids": backend.get_centroids(64, 4) * 1.01,
        "norm_correction": False,
        "PiT": -torch.eye(64),
        "Pi": torch.ones(64, 64),
        "key_packed_size": 33,
        "mse_bits": 5,
    }.items():
        with pytest.raises(ValueError, match=argument):
            turboquant_read(64, preset, kv_cache, **{argument: value})
    with pytest.raises(ValueError, match="PiT"):
        turboquant_write(64, preset, rotation=2 * torch.eye(64))
    with pytest.raises(ValueError, match=r"kv_cache\.shape"):
        turboquant_write(64, preset, kv_cache[..., :-2])
    with pytest.raises(ValueError, match=r"kv_cache\.stride"):
        turboquant_write(64, preset, torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, 71, dtype=torch.uint8)[..., :70])


def test_matrices_and_tables_are_read_once_until_written(monkeypatch):
    reads = []
    monkeypatch.setattr(turboquant, "named_map", lambda *a, f=turboquant.named_map: reads.append(a) or f(*a))
    _, _, _, rotation = turboquant_arguments(64, "turboquant_4bit_nc")
    for _ in range(3):
        turboquant_write(64, "turboquant_4bit_nc", rotation=rotation)
    assert len(reads) == 1
    rotation.mul_(2)
    with pytest.raises(ValueError, match="orthogonal"):
        turboquant_write(64, "turboquant_4bit_nc", rotation=rotation)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_hadamard_transform_is_the_matrix_and_its_own_inverse(dtype):
    torch.manual_seed(3)
    for size in (1, 2, 64, 256):
        x = torch.randn(5, 3, size).to(dtype)
        y = backend.fast_hadamard_transform(x)
        i = torch.arange(size)
        parity = torch.tensor([bin(n).count("1") & 1 for n in range(size)])[i[:, None] & i]
        expected = (x.double() @ (1 - 2 * parity).double()).to(dtype)
        assert y.dtype == dtype
        assert torch.allclose(y, expected, rtol=2 * torch.finfo(dtype).eps, atol=size * torch.finfo(torch.float32).eps)
        if dtype != torch.bfloat16:
            assert torch.allclose(backend.fast_hadamard_transform(y), size * x, atol=1e-3)
    for bad in (96, 0):
        with pytest.raises(ValueError, match=f"shape.*={bad}"):
            backend.fast_hadamard_transform(torch.zeros(2, bad))
    with pytest.raises(ValueError, match="dtype"):
        backend.fast_hadamard_transform(torch.zeros(2, 4, dtype=torch.int32))


@pytest.mark.parametrize("size, block", [(64, 64), (128, 128), (192, 64), (80, 16)])
def test_rht_inverse_gives_the_rows_times_its_block(size, block):
    torch.manual_seed(4)
    x = torch.randn(7, size, dtype=torch.float64)
    y = backend.single_rht(x)
    assert torch.allclose(backend.single_rht(y, inverse=True), block * x)
    assert torch.allclose(y.norm(dim=-1), block**0.5 * x.norm(dim=-1))
    assert not torch.allclose(y, backend.fast_hadamard_transform(x.unflatten(-1, (-1, block))).flatten(-2))  # signs were used


def test_nibbles_round_trip():
    lo, hi = (t.flatten() for t in torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij"))
    packed = backend.pack_int4_nibbles(lo.to(torch.uint8), hi.to(torch.uint8))
    assert packed.dtype == torch.uint8 and torch.equal(packed.long(), lo + 16 * hi)
    assert all(torch.equal(a.long(), b) for a, b in zip(backend.unpack_int4_nibbles(packed), (lo, hi)))
