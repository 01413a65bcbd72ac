"""Every kernel and codec compiles for every GPU family, with none of them here; and fits its shared memory."""

import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor

import pytest

from quantkv import available_formats, get_format

pytest.importorskip("triton")
ARCHES = ("sm80", "sm89", "sm90", "sm100", "gfx942")
SHARED_MEMORY = {"sm80": 163, "sm89": 99, "sm90": 227, "sm100": 227, "sm120": 99, "gfx942": 64, "gfx950": 160}  # KiB that a block may have


def codecs_of(formats):
    return {codec.name for fmt in formats for codec in (fmt.k, fmt.v)}


def a_format_for_each_codec():
    """Formats that have every codec of the registry, for keys or for values, and none that the others make needless."""
    formats = sorted(map(get_format, available_formats()), key=lambda fmt: fmt.k is not fmt.v)
    for fmt in formats[::-1]:
        others = [other for other in formats if other is not fmt]
        formats = others if codecs_of(others) == codecs_of(formats) else formats
    return [fmt.name for fmt in formats]


def in_pairs(names, swapped):
    """Formats of two codecs each, so that half as many have all of them: each once, for keys or for values, as `swapped` says."""
    same = [name for name in names if get_format(name).k is get_format(name).v and get_format(name).k.triton().encode is not None]
    pairs = [(a, b)[:: -1 if swapped else 1] for a, b in zip(same[::2], same[1::2])]
    return [f"{a}/{b}" for a, b in pairs] + [name for name in names if name not in same[: 2 * len(pairs)]]


def run(*task):
    from aot import compile_format

    try:
        return compile_format(*task)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return f"{type(error).__name__}: {str(error)[-500:]}"


def run_all(cases):
    return {case: run(*case) for case in cases}


EVERY = a_format_for_each_codec()
# Name, GPU, head size, queries; whether with every option, and with the steps around a dense kernel: those unpack as attention does, and
# are compiled where they serve. Two codecs at once, on sm80 and sm89, whose instructions are much the same, the one way and the other.
# Rows of 64 take less to compile: sm80 has them, whose shared memory is larger than sm89's.
CASES = []
for arch, swapped in (("sm80", False), ("sm89", True), ("sm90", True), ("sm100", False), ("gfx942", False)):
    size = 64 if arch == "sm80" else 128
    CASES += [(name, arch, size, (1,), False, arch in ("sm90", "gfx942")) for name in in_pairs(EVERY, swapped)]
CASES += [("five_bits", arch, 128, (1, 512)) for arch in ("sm90", "gfx942")]  # words of five bytes
CASES += [("int4", arch, 128, (512,), False, False) for arch in ARCHES]
CASES += [("bf16", arch, 128, (512,), False, False) for arch in ("sm90", "gfx942")]
CASES += [
    (name, arch, 128, (1, 64), False, name == "int4") for name in ("bf16", "int4") for arch in ("sm120", "gfx950")
]  # the newest of either kind
CASES += [(name, arch, 128, (4,), True, False) for name in ("int4", "fp8") for arch in ("sm80", "sm90", "gfx942")]
CASES += [("int4", "sm80", 64, (1,), True, False)]
CASES += [("int4", "sm90", 80, (1, 64)), ("int4", "sm90", 256, (1,)), ("bf16", "sm90", 256, (64,))]
CASES += [("int4", "sm90", 512, (1,)), ("bf16", "sm90", 512, (64,))]
CASES += [("levels4", "sm89", 512, (4, 64), False, False), ("bf16", "sm89", 512, (64,), False, False)]  # tiles of fewer rows, and stages


@pytest.fixture(scope="module")
def compilers(request):
    """Processes where Triton compiles: here it is interpreted."""
    with ProcessPoolExecutor(max_workers=2, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "0")
            pool.submit(os.getpid), pool.submit(os.getpid)  # both start
        yield pool


@pytest.fixture(scope="module")
def results(request, compilers):
    """All cases that are to be tested, those of one GPU in one process: what they have in common is compiled once."""
    given = [item.callspec.params for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    chosen = [params["case"] for params in given if "case" in params]
    arches = {arch: [case for case in chosen if arch in case[1:3]] for arch in SHARED_MEMORY}
    futures = {arch: compilers.submit(run_all, cases) for arch, cases in arches.items()}
    return {case: futures[arch] for arch, cases in arches.items() for case in cases}


def test_every_codec_is_compiled_for_every_architecture():
    """And for sm80 and sm89 together, whose instructions are much the same, each for keys and for values if it can be either."""
    formats = [get_format(name) for name in available_formats()]
    compiled = {arch: [get_format(case[0]) for case in CASES if case[1] == arch and case[0] != "five_bits"] for arch in ARCHES}
    assert all(codecs_of(of_one) == codecs_of(formats) for of_one in compiled.values())
    for side in ("k", "v"):
        assert {getattr(fmt, side).name for fmt in compiled["sm80"] + compiled["sm89"]} == {getattr(fmt, side).name for fmt in formats}


# Instructions that decode issues for 16 keys of a kv head, at the most. An SM of an H200 has 518 issue slots for their bytes at int4
# and at the speed of its memory, 1,006 at int8 and 274 at int2, and used about half of them when 241 were issued at int4.
LOOPS = {("int4", "sm90"): 192, ("int4", "sm80"): 194, ("int8", "sm90"): 235, ("int2", "sm90"): 229, ("levels4", "sm90"): 396}


def loop(*task):
    from aot import decode_loop

    return decode_loop(*task)


@pytest.mark.xdist_group("aot")
def test_how_much_decode_issues(compilers):
    """Nothing is moved through shared memory, nothing is spilled, and codes are hardly converted."""
    found = dict(zip(LOOPS, compilers.map(loop, *zip(*LOOPS))))
    assert all(found[at][0] <= most for at, most in LOOPS.items()), found
    assert all(moved <= 4 for _, moved in found.values()), found  # the levels of a table, and a few registers


LATENTS = [
    ("latents", "int4", arch, heads, 1) for arch, heads in (("sm90", 16), ("sm90", 128), ("sm80", 128), ("sm89", 128), ("gfx942", 16))
]
LATENTS += [("latents", "int4", "sm90", 16, 2), ("latents", "none", "sm90", 128, 1), ("latents", "none", "sm80", 16, 1)]
LATENTS += [("latents", "levels4", "sm89", 16, 1)]
LATENTS += [("latents", "none", "sm90", heads, queries) for heads, queries in ((1, 2), (16, 2), (16, 4), (64, 2))]  # keys are masked
LATENTS += [("latents", "none", arch, heads, 4) for arch in ("sm80", "sm89") for heads in (2, 8, 32)]


@pytest.mark.xdist_group("aot")
@pytest.mark.parametrize("case", LATENTS, ids=lambda c: "-".join(str(x) for x in c))
def test_compiles_over_latents(results, case):
    compiled = results[case].result()[case]
    assert not isinstance(compiled, str), compiled
    mapped = set() if case[1] == "none" else {"map_rows_kernel"}
    assert {kernel for kernel, _ in compiled} == {"attend_latents_kernel", "combine_kernel", "gather_rows_kernel"} | mapped
    for kernel, shared in compiled:
        assert shared <= SHARED_MEMORY[case[2]] * 1024, (kernel, shared)


@pytest.mark.xdist_group("aot")
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x) for x in c))
def test_compiles(results, case):
    compiled = results[case].result()[case]
    assert not isinstance(compiled, str), compiled
    steps = {"gather_kernel", "patch_kernel", "fold_kernel"} if case[5:] != (False,) else set()
    written = set() if case[0] == "trellis2" else {"write_kernel"}  # rows that the reference searches
    own = {"own_rows_kernel"} if case[4:5] == (True,) else set()
    assert {kernel for kernel, _ in compiled} == {"attend_kernel", "combine_kernel"} | written | steps | own
    for kernel, shared in compiled:
        assert shared <= SHARED_MEMORY[case[1]] * 1024, (kernel, shared)


def calibrated(*task):
    from aot import compile_calibrated_write

    return compile_calibrated_write(*task)


# Every GPU; every number of bits; heads of each way in which rows are rounded
CALIBRATED = [("levels2/levels3", "sm80", 64), ("levels4", "sm80", 256), ("levels4", "sm89", 512), ("levels4", "sm90", 512)]
CALIBRATED += [("levels5/levels6", "sm100", 128), ("levels4/levels8", "gfx942", 128), ("levels4", "gfx942", 512)]


@pytest.mark.xdist_group("aot")
@pytest.mark.parametrize("name, arch, head_size", CALIBRATED)
def test_rows_that_are_rounded_by_a_hessian_are_written_on_every_gpu(compilers, name, arch, head_size):
    """What the presets write, with statistics."""
    assert 0 < compilers.submit(calibrated, name, arch, head_size).result() <= SHARED_MEMORY[arch] * 1024


def rounding(size):
    from aot import compile_rounding

    return compile_rounding(size)


@pytest.mark.xdist_group("aot")
def test_prompts_are_rounded_as_specified(compilers):
    """By steps that are divided to nearest, and products that are rounded before they are added to anything."""
    for size in (80, 128):
        found = compilers.submit(rounding, size).result()
        assert sorted(found) == ["round_keys_kernel", "round_queries_kernel", "sample_mean_kernel"]
        for name in ("round_keys_kernel", "round_queries_kernel"):
            assert "div.rn." in found[name] and not re.search(r"\b(div\.full|div\.approx|rcp|fma)\b", found[name])


def copied(arch, name):
    from aot import compile_copies

    return compile_copies(arch, name)


@pytest.mark.xdist_group("aot")
@pytest.mark.parametrize("arch, name", [("sm90", "levels4"), ("gfx942", "none")])
def test_which_pages_have_copies_compiles(compilers, arch, name):
    """With metadata beside the codes and without."""
    found = compilers.submit(copied, arch, name).result()
    assert sorted(found) == ["claim_kernel", "doubt_kernel", "lay_out_kernel", "note_kernel", "take_kernel"]
