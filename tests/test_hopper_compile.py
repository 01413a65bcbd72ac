"""The Hopper kernels compile for every format without a GPU, and a warp's step stays within its instruction budget."""

import pytest

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
    return hopper.choose(key, value, head_size, 4, 8, 16, size, True, columns, False)


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


def test_a_compiled_kernel_is_kept(monkeypatch):
    first = build(config("int4", "int4"))
    monkeypatch.setattr("cuda.core.Program", None)  # compiling again would fail
    assert build(config("int4", "int4")) == first
    with pytest.raises(TypeError):
        build(config("int8", "int8"))


def test_page_bytes():
    assert hopper.page_bytes("int4", "int4", 128, 16) == 2176
