"""The Hopper kernels compile for every format without a GPU, and a warp's step stays within its instruction budget."""

import itertools
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("cuda.core")
from cuda.core import ProgramOptions

from quantkv import available_formats, get_format, under_way
from quantkv.implementations.hopper import prefill, write
from quantkv.implementations.hopper.decode import warps as hopper
from quantkv.implementations.hopper.host import nvrtc, operands
from quantkv.implementations.hopper.host.nvrtc import compile_cubin
from quantkv.implementations.hopper.host.records import page_bytes
from quantkv.implementations.hopper.host.sass import kernels, opcodes, step

FORMATS = [get_format(name) for name in available_formats()]
CODECS = {codec.name: codec for fmt in FORMATS for codec in (fmt.k, fmt.v)}
HALVES = {name: codec.hopper() for name, codec in CODECS.items() if codec.hopper is not None}
KEYS, VALUES = ([name for name, half in HALVES.items() if getattr(half, use)] for use in ("keys", "values"))

# Instructions for 16 tokens of one kv head, keys and values, head size 128, by format and packed query rows: 4, of one query, or 16, 24 and
# 32, of several. A few more than the compilers of CUDA 13.0 and 13.5 make.
BUDGET = {
    ("int8", "int8", 4): 204, ("fp8_token", "fp8_token", 4): 225, ("int8", "int4", 4): 177, ("int4", "int4", 4): 181,
    ("int2", "int2", 4): 200, ("int4", "int4", 8): 212, ("int2", "int2", 8): 218,
    ("tq8", "u4", 4): 208, ("tq4", "u4", 4): 263, ("tq3", "u4", 4): 302, ("tq3", "u3", 4): 328,
    ("int4", "int2", 4): 195, ("int2", "u4", 4): 190, ("int4", "int4", 16): 265, ("int4", "int4", 24): 350, ("int4", "int4", 32): 400,
    ("int2", "int2", 24): 330, ("int2", "int2", 32): 380, ("bf16", "bf16", 4): 196, ("bf16", "bf16", 16): 320, ("bf16", "bf16", 24): 410,
    ("levels2", "levels2", 4): 204, ("levels3", "levels3", 4): 368, ("levels4", "levels4", 4): 314, ("levels5", "levels5", 4): 457,
    ("levels6", "levels6", 4): 447, ("levels8", "levels8", 4): 376, ("levels4", "levels2", 4): 236, ("levels4", "levels4", 32): 475,
    ("trellis2", "trellis2", 4): 288, ("trellis2", "trellis2", 24): 420, ("int8", "trellis2", 4): 240, ("int2", "trellis2", 4): 260,
}  # fmt: skip


@pytest.fixture(autouse=True)
def kept(cubins):
    """What several tests look at is compiled once."""


@pytest.fixture
def empty_cache(cubins, tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path / "cache"))


def config(key, value, head_size=128, packed_rows=4, head_size_v=None, block_size=16, capacity=1 << 20, **maps):
    key, value, head_size_v = CODECS[key], CODECS[value], head_size_v or head_size
    size = page_bytes(key, value, head_size, head_size_v, block_size)
    shape = hopper.CallShape(key, value, head_size, head_size_v, 4, 8, block_size, size, True, packed_rows, False, **maps)
    return hopper.choose(shape, capacity)


def build(chosen):
    return chosen.cubin()


def test_another_process_compiles_the_same(tmp_path, monkeypatch):
    chosen, found = prefill.PrefillConfig(64, 64, 4, True, False, False, False), []
    here = build(chosen)
    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc.nvrtc_process, "compiled", lambda *program: pytest.fail("compiled in this process"))
    under_way.compile_apart(lambda: found.append(chosen.cubin()))
    assert found == [here]


@pytest.mark.parametrize("sizes", [(size, size) for size in prefill.SIZES] + [(192, 128), (64, 256)])
def test_prompts_compile(sizes, tmp_path):
    """For what every head size, window and softcap asks for: at one size every combination, at the others two. Products run on behind
    the program: were they waited for one by one, there would be more of what waits; a register or two may be spilled, but no tile."""
    cases = itertools.product(((False, False), (True, False), (True, True)), (False, True))
    for (left, narrow), softcap in cases if sizes == (128, 128) else [((False, False), False), ((True, True), True)]:
        chosen = prefill.PrefillConfig(*sizes, 4, True, left, narrow, softcap)
        assert chosen.shared_bytes <= prefill.SHARED_BYTES
        cubin = tmp_path / "cubin"
        cubin.write_bytes(chosen.cubin())
        found = opcodes(cubin)
        assert found.count("WARPGROUP") == 8 and found.count("STL") <= 8, chosen


@pytest.mark.parametrize("size, steps", [(64, 2), (128, 4)])
def test_prompts_with_8_bit_scores_compile(size, steps, tmp_path):
    """Nothing is spilled, sums of integers are never converted, and half of the products are of integers."""
    for left, narrow, softcap in ((False, False, False), (True, True, False), (True, False, True)):
        chosen = prefill.PrefillConfig(size, size, 4, True, left, narrow, softcap, True)
        assert chosen.shared_bytes <= prefill.PrefillConfig(size, size, 4, True, left, narrow, softcap).shared_bytes
        cubin = tmp_path / "cubin"
        cubin.write_bytes(chosen.cubin())
        found = opcodes(cubin)
        assert found.count("WARPGROUP") == 8 and not found.count("STL"), chosen
        assert found.count("IGMMA") == 2 * steps and found.count("HGMMA") == 2 * chosen.keys // 16
        assert found.count("I2F") <= 3  # of divisions that say which work is next


@pytest.mark.parametrize("key, value, packed_rows", BUDGET)
def test_step_fits_its_budget(key, value, packed_rows, tmp_path):
    """And keeps what it holds in registers: local memory in the loop costs more than it looks."""
    chosen = config(key, value, packed_rows=packed_rows)
    cubin = tmp_path / "decode.cubin"
    cubin.write_bytes(build(chosen))
    names = step(cubin)
    assert 150 < len(names) / chosen.tiles_per_step <= BUDGET[key, value, packed_rows]
    assert not [name for name in names if name.startswith(("LDL", "STL"))]


@pytest.mark.parametrize(
    "key, value, head_size", [("int4", "int4", 128), ("int2", "u4", 128), ("int8", "u4", 128), ("int4", "int4", 96), ("int4", "int8", 64)]
)
def test_more_warps_keep_what_they_hold_in_registers(key, value, head_size, tmp_path):
    usual = config(key, value, head_size)
    more = replace(usual.with_more_warps, unsplit=True)
    cubin = tmp_path / "decode.cubin"
    cubin.write_bytes(build(more))
    assert more.warps == 16 and more.stages == usual.stages
    assert not [name for name in step(cubin) if name.startswith(("LDL", "STL"))]


@pytest.mark.parametrize("key, packed_rows", [("int4", 4), ("levels4", 8)])
def test_lengths_that_are_looked_at_on_the_device_stay_out_of_the_loop(key, packed_rows, tmp_path):
    """And out of local memory, though the kernel has code for either way."""
    plain = config(key, key, packed_rows=packed_rows)
    steps = []
    for name, each in (("plain", plain), ("either", replace(plain, unsplit=True, either=True))):
        cubin = tmp_path / f"{name}.cubin"
        cubin.write_bytes(build(each))
        steps.append(len(step(cubin)))
        assert not {"LDL", "STL"} & set(opcodes(cubin)), name
    assert steps[1] <= steps[0] + 4 and each.stages == plain.stages


def test_more_warps_only_where_they_have_room():
    assert config("int4", "int4", 256).with_more_warps is None is config("int4", "int4", packed_rows=8).with_more_warps
    assert config("int8", "int8").with_more_warps is None  # of the ring


def test_two_bits_have_16_warps_where_there_is_work_for_them():
    for key, value in (("int2", "int2"), ("int2", "levels2"), ("levels2", "int2"), ("levels2", "levels2")):
        usual, small = config(key, value), config(key, value, 64)
        assert usual.warps == small.warps == 16 and (usual.stages, small.stages) == (4, 6)
        assert usual.with_more_warps is None and usual.with_fewer_warps == replace(usual, warps=12)
        assert config(key, value, capacity=1 << 14).warps == 8
        assert config(key, value, packed_rows=8).warps == 12  # not as integers
    assert config("int2", "u4").warps == config("int4", "int2").warps == 12


# As BUDGET, at other head sizes of keys and values, pages and maps: what does not fit whole words and chunks costs little.
GEOMETRIES = {
    ("int4", "int4", 80, 80, 16, "MATRIX"): 197, ("int4", "int4", 192, 128, 8, "NO_MAP"): 265,
    ("int4", "int4", 512, 512, 16, "HADAMARD"): 600, ("int8", "int8", 512, 512, 16, "NO_MAP"): 830,
    ("tq3", "u3", 64, 64, 16, "NO_MAP"): 226,
}  # fmt: skip


@pytest.mark.parametrize("key, value, head_size, head_size_v, block_size, map_", GEOMETRIES)
def test_other_geometries_fit_their_budget(key, value, head_size, head_size_v, block_size, map_, tmp_path):
    chosen = config(key, value, head_size, head_size_v=head_size_v, block_size=block_size, key_map=map_, value_map=map_)
    cubin = tmp_path / "decode.cubin"
    cubin.write_bytes(build(chosen))
    names = step(cubin)
    assert 150 < len(names) / chosen.tiles_per_step <= GEOMETRIES[key, value, head_size, head_size_v, block_size, map_]
    assert not [name for name in names if name.startswith(("LDL", "STL"))]


@pytest.mark.parametrize("head_size, packed_rows", [(64, 4), (256, 4), (128, 16), (128, 32), (128, 1)])
def test_other_shapes_compile(head_size, packed_rows):
    build(config("int4", "int4", head_size, packed_rows))


# What maps, and maps with a key mean, add to the instructions of a step, at most, by NVRTC 13.0 and 13.5.
@pytest.mark.parametrize("key, with_maps, with_key_mean", [("int4", 0, 9), ("tq3", 2, 16), ("levels4", 0, 22)])
@pytest.mark.parametrize("key_map, value_map, key_mean", [("HADAMARD", "HADAMARD", False), ("MATRIX", "MATRIX", True)])
def test_maps_stay_out_of_the_loop(key, with_maps, with_key_mean, key_map, value_map, key_mean, tmp_path):
    chosen = config(key, "int4", packed_rows=8, key_map=key_map, value_map=value_map, key_mean=key_mean)  # more than integers serve
    cubin = tmp_path / "decode.cubin"
    cubin.write_bytes(build(chosen))
    plain = tmp_path / "plain.cubin"
    plain.write_bytes(build(config(key, "int4", packed_rows=8)))
    assert len(step(cubin)) <= len(step(plain)) + (with_key_mean if key_mean else with_maps)


@pytest.mark.parametrize(
    "key, value_map, packed_rows",
    [("int4", "HADAMARD", 8), ("int4", "HADAMARD", 4), ("int4", "MATRIX", 4), ("int2", "HADAMARD", 8), ("bf16", "NO_MAP", 4)],
)
def test_ranges_and_segments_stay_out_of_the_loop(key, value_map, packed_rows, tmp_path):
    """And out of local memory, in the combine kernels as well."""
    plain = config(key, key, packed_rows=packed_rows, key_map=value_map, value_map=value_map)
    chosen = replace(plain, ranges=True, several_decodes=True, segments=2, mapped_segments=2 if value_map == "NO_MAP" else 1)
    steps = []
    for name, each in (("plain", plain), ("chosen", chosen)):
        cubin = tmp_path / f"{name}.cubin"
        cubin.write_bytes(build(each))
        steps.append(len(step(cubin)))
        assert not {"LDL", "STL"} & set(opcodes(cubin)), name
    assert steps[1] <= steps[0] + (8 if plain.by_integers else 4)  # a few moves, as the compiler likes


@pytest.mark.parametrize(
    "key, head_size, value_map",
    [("int4", 128, "HADAMARD"), ("int4", 128, "MATRIX"), ("int2", 256, "HADAMARD"), ("int4", 64, "NO_MAP"), ("bf16", 128, "NO_MAP")],
)
def test_exact_rows_stay_out_of_local_memory(key, head_size, value_map, tmp_path):
    cubin = tmp_path / "decode.cubin"
    chosen = replace(config(key, key, head_size, key_map=value_map, value_map=value_map), ranges=True, exact=16)
    cubin.write_bytes(build(chosen))
    assert not {"LDL", "STL"} & set(opcodes(cubin))


def unlabelled(kernel):
    """Its instructions without the numbers of labels, which are counted through all kernels of a module."""
    return [(predicate, name, re.sub(r"\.L_x_\d+", "", operands)) for predicate, name, operands in kernel]


@pytest.mark.parametrize(
    "key, map_, segments", [("int4", "HADAMARD", 1), ("int4", "MATRIX", 1), ("int4", "HADAMARD", 2), ("bf16", "NO_MAP", 2)]
)
def test_both_kernels_round_what_they_combine_of_an_invariant_cut_alike(key, map_, segments, tmp_path, monkeypatch):
    """With no leave to make one operation of a product and a sum the compiler makes the same of either: there is none to make one of."""
    chosen = replace(config(key, key, key_map=map_, value_map=map_), invariant=True, ranges=segments > 1, segments=segments)
    combines = []
    for fused in (True, False):
        monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path / str(fused)))
        monkeypatch.setattr("cuda.core.ProgramOptions", partial(ProgramOptions, fma=fused))
        cubin = tmp_path / "decode.cubin"
        cubin.write_bytes(build(chosen))
        made = kernels(cubin)
        combines.append([unlabelled(made[name]) for name in ("combine_kernel", "combine_one_kernel")])
        assert all(any(name == "FFMA" for _, name, _ in kernel) for kernel in combines[-1])  # those that were asked for
    assert combines[0] == combines[1]


@pytest.mark.parametrize("key, map_", [("int4", "HADAMARD"), ("levels4", "MATRIX"), ("bf16", "NO_MAP")])
def test_an_invariant_cut_stays_out_of_the_loop(key, map_, tmp_path):
    """And out of local memory: what a worker keeps from partial to partial has registers."""
    plain = config(key, key, packed_rows=8, key_map=map_, value_map=map_)  # of four, integers serve plain calls
    steps = []
    for each in (plain, replace(plain, invariant=True)):
        cubin = tmp_path / "decode.cubin"
        cubin.write_bytes(build(each))
        steps.append(len(step(cubin)))
    assert steps[1] <= steps[0] * 1.02
    assert not {"LDL", "STL"} & set(opcodes(cubin))


def test_every_configuration_has_a_ring():
    """At least a tile on its way beyond those of a step, in the shared memory that there is."""
    shapes = itertools.product(KEYS, VALUES, (64, 128, 256), (4, 16, 32, 64), ("NO_MAP", "HADAMARD", "MATRIX"), (False, True))
    for key, value, head_size, packed_rows, key_map, key_mean in shapes:
        if head_size > 64 or not any(16 % CODECS[side].row.code_bits for side in (key, value)):
            chosen = config(key, value, head_size, packed_rows, key_map=key_map, key_mean=key_mean)
            assert chosen.stages >= chosen.tiles_per_step + 1, chosen
            assert chosen.blocks_per_sm * (chosen.shared_bytes + 1024) <= 228 * 1024, chosen


def test_the_order_of_a_matrix():
    """Each entry of a key map is once where the kernel's loads look for it, and each row of key means in its group."""
    for key in (HALVES[name] for name in ("int4", "int8", "tq3")):
        matrix = torch.arange(128 * 128.0).view(1, 128, 128) % 2039  # exact in fp16
        made = operands.KernelMap.matrix(matrix, key)
        assert torch.equal((made.data * made.gain).flatten().sort().values.float(), matrix.flatten().sort().values)
        table = torch.arange(37.0).view(37, 1, 1).expand(37, 1, 128)
        rows = operands.KernelKeyMeans.of(table, key)
        assert rows.data.shape == (1, 4, 4, 2, 8, 4, 8) and rows.groups == 4
        read = (rows.data * rows.gain)[0].permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2).float()  # [64, D]
        assert torch.equal(read.amin(1), torch.arange(64.0).clamp_max(36))


def test_a_compiled_kernel_is_kept(empty_cache, monkeypatch):
    first = build(config("int4", "int4"))
    monkeypatch.setattr("cuda.core.Program", None)  # compiling again would fail
    assert build(config("int4", "int4")) == first
    with pytest.raises(TypeError):
        build(config("int8", "int8"))


def test_page_bytes():
    """Those of the cache, for every format that a kernel takes."""
    taken = [fmt for fmt in FORMATS if {fmt.k.name, fmt.v.name} <= HALVES.keys()]
    assert len(taken) >= 14
    for fmt in taken:
        for sizes in ((128, 128, 16), (64, 256, 8)):
            assert page_bytes(fmt.k, fmt.v, *sizes) == fmt.cache_spec(8, *sizes).page_bytes


# instructions that a warp issues to write 8 rows of 128 dimensions: both sides where they differ, what is rarely taken included
WRITE_BUDGET = {
    ("bf16", "bf16"): 170, ("fp8_e4m3", "fp8_e4m3"): 200, ("fp8_e5m2", "fp8_e5m2"): 200, ("fp8_token", "fp8_token"): 260,
    ("int8", "int8"): 370, ("int4", "int4"): 530, ("int2", "int2"): 580, ("int8", "int4"): 830, ("tq8", "u4"): 590,
    ("tq4", "u4"): 1340, ("tq3", "u4"): 1130, ("tq3", "u3"): 1140,
    ("levels2", "levels2"): 900, ("levels3", "levels3"): 1050, ("levels4", "levels4"): 1290, ("levels5", "levels5"): 1880,
    ("levels6", "levels6"): 1880, ("levels8", "levels8"): 1820, ("levels4", "levels2"): 2100,
}  # fmt: skip
MAPPED = {"int4": 1.0, "int2": 1.0, "tq4": 128**-0.5, "tq3": 128**-0.5, **{name: 1.0 for name in CODECS if name.startswith("levels")}}


def write_config(key, value, head_size=128, bf16=True, wide_slots=True, head_size_v=None, **kwargs):
    mapped = MAPPED.get(key, 0.0), MAPPED.get(value, 0.0)
    sizes = (head_size, head_size_v or head_size, 16)
    return write.WriteConfig(CODECS[key], CODECS[value], *sizes, bf16, wide_slots, *mapped, **kwargs)


@pytest.mark.parametrize("key, value", WRITE_BUDGET)
def test_a_write_fits_its_budget_and_its_registers(key, value, tmp_path):
    cubin = tmp_path / "write.cubin"
    cubin.write_bytes(write_config(key, value).cubin())
    names = opcodes(cubin)
    assert not {"LDL", "STL"} & set(names), "registers are spilled"
    assert 100 < len(names) <= WRITE_BUDGET[key, value]


@pytest.mark.parametrize("head_size", [64, 256])
@pytest.mark.parametrize("key, value", [("int4", "int4"), ("tq3", "u3"), ("int2", "fp8_token")])
def test_writes_of_other_head_sizes_compile(key, value, head_size):
    write_config(key, value, head_size, bf16=False, wide_slots=False).cubin()


@pytest.mark.parametrize("head_size, head_size_v, sides", [(80, 80, write.BOTH), (192, 128, write.VALUES), (512, 512, write.BOTH)])
def test_writes_of_other_geometries_keep_their_registers(head_size, head_size_v, sides, tmp_path):
    cubin = tmp_path / "write.cubin"
    cubin.write_bytes(write_config("int4", "int4", head_size, head_size_v=head_size_v, sides=sides).cubin())
    assert not {"LDL", "STL"} & set(opcodes(cubin))


@pytest.mark.parametrize("name", ["levels2", "levels4", "levels8"])
def test_a_write_of_keys_that_may_go_without_their_offset_keeps_its_registers(name, tmp_path):
    cubin = tmp_path / "write.cubin"
    cubin.write_bytes(replace(write_config(name, name), key_shifted=True).cubin())
    assert not {"LDL", "STL"} & set(opcodes(cubin))


def test_a_write_with_key_means_and_scales_compiles():
    replace(write_config("int4", "fp8_e4m3"), key_shifted=True, value_scaled=True).cubin()


def test_an_edit_of_one_kernel_leaves_the_others_cubin(tmp_path, monkeypatch):
    """A cubin is kept by the text of what its source includes, and by nothing else."""
    for path in (path for folder in nvrtc.FOLDERS for path in folder.glob("*.cuh")):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(nvrtc, "FOLDERS", (tmp_path,))
    monkeypatch.setattr(nvrtc, "find", lambda header, *beside: tmp_path / header)
    of_write, of_decode = write_config("bf16", "bf16"), config("int8", "int8")
    of_write.cubin(), of_decode.cubin()
    (tmp_path / "rows.cuh").write_text((tmp_path / "rows.cuh").read_text() + "// edited")
    monkeypatch.setattr("cuda.core.Program", None)  # compiling again would fail
    of_decode.cubin()
    with pytest.raises(TypeError):
        of_write.cubin()


def test_an_edit_of_a_snippet_compiles_anew(tmp_path, monkeypatch):
    """Wherever the snippet lies; one that moves as it is does not."""
    half = HALVES["int8"]
    moved = replace(half, source=tmp_path / "elsewhere.cuh")
    shutil.copy(half.source, moved.source)
    codec = replace(CODECS["int8"], hopper=lambda: moved)
    chosen = replace(config("int8", "int8"), key=codec, value=codec)
    first = chosen.cubin()
    monkeypatch.setattr("cuda.core.Program", None)  # compiling again would fail
    assert config("int8", "int8").cubin() == first
    moved.source.write_text(moved.source.read_text() + "// edited")
    with pytest.raises(TypeError):
        chosen.cubin()


DECODE_NUMBERS = ["KEY_BITS", "KEY_META_BYTES", "VALUE_BITS", "VALUE_META_BYTES", "KEY_HALF", "KEY_ODD_UNIT", "KEY_TABLE_BYTES", "TILE"]
DECODE_NUMBERS += [
    "TABLES_BYTES",
    "WORKER_BYTES",
    "PARTIAL_BYTES",
    "PARTIALS_AT_ONCE",
    "BARRIER_BYTES",
    "ARGUMENT_BYTES",
    "KEY_DIMENSIONS",
    "KEY_SIZE",
]


@pytest.mark.parametrize("name", DECODE_NUMBERS)
def test_a_number_that_differs_between_host_and_device_does_not_compile(name):
    """Of those that both count with; any other is a macro that the device takes from the host."""
    chosen = config("int4", "int2")
    macros = chosen.macros()
    assert name in macros
    with pytest.raises(Exception, match=r"static assertion failed|static_assert"):
        compile_cubin(chosen.source, macros | {name: 2 * macros[name] + 2}, (HALVES[n].source for n in ("int4", "int2")))


@pytest.mark.parametrize("name", ["KEY_BITS", "KEY_META_BYTES", "VALUE_BITS", "VALUE_META_BYTES", "CHUNK", "ARGUMENT_BYTES"])
def test_a_number_of_a_write_that_differs_does_not_compile(name):
    macros = write_config("int4", "int2").macros()
    with pytest.raises(Exception, match=r"static assertion failed|static_assert"):
        compile_cubin(write.SOURCE, macros | {name: 2 * macros[name]}, (HALVES[n].source for n in ("int4", "int2")))


def test_several_threads_compile_at_once(empty_cache):
    """What a server does before its first request."""
    configs = [config("int8", "int8"), config("int4", "int4"), write_config("int8", "int8"), write_config("int4", "int4")]
    with ThreadPoolExecutor(4) as pool:
        cubins = list(pool.map(lambda c: c.cubin(), configs))
    assert len(set(cubins)) == 4


@pytest.mark.parametrize("codec", ["u4", "u3"])
def test_values_with_a_bias_are_keys_too(codec):
    config(codec, codec).cubin()
    config(codec, codec, key_map="MATRIX", key_mean=True).cubin()


@pytest.mark.parametrize("head_size, other", [(128, None), (128, "int4"), (128, "tq3"), (256, "tq3")])
def test_a_format_outside_the_package_compiles(head_size, other, five, tmp_path):
    """For reads, as keys and as values, and for writes; nothing is held in local memory."""
    key, value = five.k, five.v if other is None else CODECS["u3" if other == "tq3" else other]
    for pair in {(key, value), (value, key)}:
        size = page_bytes(*pair, head_size, head_size, 16)
        cubin = tmp_path / "decode.cubin"
        cubin.write_bytes(hopper.choose(hopper.CallShape(*pair, head_size, head_size, 4, 8, 16, size, True, 4)).cubin())
        assert not [name for name in step(cubin) if name.startswith(("LDL", "STL"))]
        cubin.write_bytes(write.WriteConfig(*pair, head_size, head_size, 16, True, True).cubin())
        assert not {"LDL", "STL"} & set(opcodes(cubin))
