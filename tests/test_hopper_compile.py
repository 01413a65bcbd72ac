"""The Hopper kernels compile for every format without a GPU, and a warp's step stays within its instruction budget."""

import pytest
import torch

pytest.importorskip("cuda.core")
from quantkv.kernels.hopper import decode as hopper
from quantkv.kernels.hopper.nvrtc import compile_cubin
from quantkv.kernels.hopper.sass import step_instructions

# instructions for 16 tokens of one kv head, keys and values, head size 128, one column tile
BUDGET = {
    ("int8", "int8"): 290, ("fp8", "fp8"): 260, ("int8", "int4"): 270, ("int4", "int4"): 260, ("int2", "int2"): 300,
    ("e4m3", "affine4"): 260, ("codebook4", "affine4"): 375, ("codebook3", "affine4"): 420, ("codebook3", "affine3"): 440,
}  # fmt: skip


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path / "cache"))


def config(key, value, head_size=128, columns=4, **kwargs):
    size = hopper.page_bytes(key, value, head_size, 16)
    return hopper.choose(key, value, head_size, 4, 8, 16, size, True, columns, False, **kwargs)


def build(chosen):
    return compile_cubin("decode.cu", chosen.macros())


@pytest.mark.parametrize("key, value", BUDGET)
def test_step_fits_its_budget(key, value, tmp_path):
    chosen = config(key, value)
    cubin = tmp_path / "decode.cubin"
    cubin.write_bytes(build(chosen))
    count = step_instructions(cubin) / chosen.tiles_per_step
    assert 150 < count <= BUDGET[key, value]


@pytest.mark.parametrize("head_size, columns", [(64, 4), (256, 4), (128, 16), (128, 32), (128, 1)])
def test_other_shapes_compile(head_size, columns):
    build(config("int4", "int4", head_size, columns))


@pytest.mark.parametrize("key", ["int4", "codebook3"])
@pytest.mark.parametrize("key_map, value_map, key_offset", [("HADAMARD", "HADAMARD", False), ("MATRIX", "MATRIX", True)])
def test_maps_stay_out_of_the_loop(key, key_map, value_map, key_offset, tmp_path):
    chosen = config(key, "int4", key_map=key_map, value_map=value_map, key_offset=key_offset)
    cubin = tmp_path / "decode.cubin"
    cubin.write_bytes(build(chosen))
    plain = tmp_path / "plain.cubin"
    plain.write_bytes(build(config(key, "int4")))
    assert step_instructions(cubin) <= step_instructions(plain) * (1.05 if key_offset else 1.02)


def test_the_order_of_a_matrix():
    """Each entry of a key map is once where the kernel's loads look for it, and each row of offsets in its group."""
    for key in ("int4", "int8", "codebook3"):
        matrix = torch.arange(128 * 128.0).view(1, 128, 128) % 2039  # exact in fp16
        made = hopper.Map.matrix(matrix, key)
        assert torch.equal((made.data * made.gain).flatten().sort().values.float(), matrix.flatten().sort().values)
        table = torch.arange(37.0).view(37, 1, 1).expand(37, 1, 128)
        rows = hopper.Offsets.of(table, key)
        assert rows.data.shape == (1, 4, 4, 2, 8, 4, 8) and rows.groups == 4
        read = (rows.data * rows.gain)[0].permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2).float()  # [64, D]
        assert torch.equal(read.amin(1), torch.arange(64.0).clamp_max(36))


def test_a_compiled_kernel_is_kept(monkeypatch):
    first = build(config("int4", "int4"))
    monkeypatch.setattr("cuda.core.Program", None)  # compiling again would fail
    assert build(config("int4", "int4")) == first
    with pytest.raises(TypeError):
        build(config("int8", "int8"))


def test_page_bytes():
    assert hopper.page_bytes("int4", "int4", 128, 16) == 2176
