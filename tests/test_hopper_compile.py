"""The Hopper kernels compile for every format without a GPU, and a warp's step stays within its instruction budget."""

import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.core")
from quantkv import available_formats, get_format
from quantkv.implementations.hopper import decode as hopper
from quantkv.implementations.hopper import write
from quantkv.implementations.hopper.calls import WRITTEN
from quantkv.implementations.hopper.nvrtc import compile_cubin
from quantkv.implementations.hopper.records import ROWS, page_bytes
from quantkv.implementations.hopper.sass import opcodes, step

# Instructions for 16 tokens of one kv head, keys and values, head size 128, by format and query columns: 4, of one query, or 16 and
# 32, of several. A few more than the compilers of CUDA 13.0 and 13.5 make.
BUDGET = {
    ("int8", "int8", 4): 250, ("fp8", "fp8", 4): 235, ("int8", "int4", 4): 222, ("int4", "int4", 4): 212, ("int2", "int2", 4): 218,
    ("e4m3", "affine4", 4): 220, ("codebook4", "affine4", 4): 275, ("codebook3", "affine4", 4): 315, ("codebook3", "affine3", 4): 340,
    ("int4", "int2", 4): 224, ("int2", "affine4", 4): 213, ("int4", "int4", 16): 285, ("int4", "int4", 32): 400, ("int2", "int2", 32): 380,
}  # fmt: skip


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path / "cache"))


def config(key, value, head_size=128, columns=4, **kwargs):
    size = page_bytes(key, value, head_size, 16)
    return hopper.choose(key, value, head_size, 4, 8, 16, size, True, columns, False, **kwargs)


def build(chosen):
    return compile_cubin("decode.cu", chosen.macros())


@pytest.mark.parametrize("key, value, columns", BUDGET)
def test_step_fits_its_budget(key, value, columns, tmp_path):
    """And keeps what it holds in registers: local memory in the loop costs more than it looks."""
    chosen = config(key, value, columns=columns)
    cubin = tmp_path / "decode.cubin"
    cubin.write_bytes(build(chosen))
    names = step(cubin)
    assert 150 < len(names) / chosen.tiles_per_step <= BUDGET[key, value, columns]
    assert not [name for name in names if name.startswith(("LDL", "STL"))]


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
    assert len(step(cubin)) <= len(step(plain)) * (1.05 if key_offset else 1.02)


def test_every_configuration_has_a_ring():
    """At least a tile on its way beyond those of a step, in the shared memory that there is."""
    shapes = itertools.product(hopper.KEYS, hopper.VALUES, (64, 128, 256), (4, 16, 32, 64), ("NO_MAP", "HADAMARD", "MATRIX"), (False, True))
    for key, value, head_size, columns, key_map, key_offset in shapes:
        if head_size > 64 or 3 not in (ROWS[key].bits, ROWS[value].bits):
            chosen = config(key, value, head_size, columns, key_map=key_map, key_offset=key_offset)
            assert chosen.stages >= chosen.tiles_per_step + 1, chosen
            assert chosen.blocks_per_sm * (chosen.shared_bytes + 1024) <= 228 * 1024, chosen


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
    """Those of the cache, for every format that a kernel takes."""
    taken = [f for f in map(get_format, available_formats()) if {f.k.name, f.v.name} <= WRITTEN.keys()]
    assert len(taken) >= 14
    for fmt in taken:
        assert page_bytes(WRITTEN[fmt.k.name], WRITTEN[fmt.v.name], 128, 16) == fmt.cache_spec(8, 128, block_size=16).page_bytes


# instructions that a warp issues to write 8 rows of 128 dimensions: both sides where they differ, what is rarely taken included
WRITE_BUDGET = {
    ("bf16", "bf16"): 170, ("e4m3", "e4m3"): 200, ("e5m2", "e5m2"): 200, ("fp8", "fp8"): 260,
    ("int8", "int8"): 370, ("int4", "int4"): 530, ("int2", "int2"): 580, ("int8", "int4"): 830, ("e4m3", "affine4"): 590,
    ("codebook4", "affine4"): 1340, ("codebook3", "affine4"): 1130, ("codebook3", "affine3"): 1140,
}  # fmt: skip
MAPPED = {"int4": 1.0, "int2": 1.0, "codebook4": 128**-0.5, "codebook3": 128**-0.5}


def write_config(key, value, head_size=128, bf16=True, wide_slots=True):
    midpoints = tuple(0.02 * i + 0.01 for i in range(7 if key == "codebook4" else 3 if key == "codebook3" else 0))
    return write.Config(key, value, head_size, 16, bf16, wide_slots, MAPPED.get(key, 0.0), MAPPED.get(value, 0.0), midpoints=midpoints)


@pytest.mark.parametrize("key, value", WRITE_BUDGET)
def test_a_write_fits_its_budget_and_its_registers(key, value, tmp_path):
    cubin = tmp_path / "write.cubin"
    cubin.write_bytes(compile_cubin("write.cu", write_config(key, value).macros()))
    names = opcodes(cubin)
    assert not {"LDL", "STL"} & set(names), "registers are spilled"
    assert 100 < len(names) <= WRITE_BUDGET[key, value]


@pytest.mark.parametrize("head_size", [64, 256])
@pytest.mark.parametrize("key, value", [("int4", "int4"), ("codebook3", "affine3"), ("int2", "fp8")])
def test_writes_of_other_head_sizes_compile(key, value, head_size):
    compile_cubin("write.cu", write_config(key, value, head_size, bf16=False, wide_slots=False).macros())


def test_a_write_with_offsets_and_scales_compiles():
    compile_cubin("write.cu", replace(write_config("int4", "e4m3"), key_shifted=True, value_scaled=True).macros())


def test_an_edit_of_one_kernel_leaves_the_others_cubin(tmp_path, monkeypatch):
    """A cubin is kept by the text of what its source includes, and by nothing else."""
    from quantkv.implementations.hopper import nvrtc

    for path in nvrtc.SOURCE.glob("*.cu*"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(nvrtc, "SOURCE", tmp_path)
    of_write, of_decode = write_config("bf16", "bf16").macros(), config("int8", "int8").macros()
    compile_cubin("write.cu", of_write), compile_cubin("decode.cu", of_decode)
    (tmp_path / "encode.cuh").write_text((tmp_path / "encode.cuh").read_text() + "// edited")
    monkeypatch.setattr("cuda.core.Program", None)  # compiling again would fail
    compile_cubin("decode.cu", of_decode)
    with pytest.raises(TypeError):
        compile_cubin("write.cu", of_write)
