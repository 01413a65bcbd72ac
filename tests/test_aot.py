"""Every kernel and codec compiles for every GPU family, with none of them here; and fits its shared memory."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from quantkv import available_formats, get_format

pytest.importorskip("triton")
ARCHES = ("sm80", "sm89", "sm90", "sm100", "gfx942")
SHARED_MEMORY = {"sm80": 163, "sm89": 99, "sm90": 227, "sm100": 227, "sm120": 99, "gfx942": 64, "gfx950": 160}  # KiB that a block may have


def one_format_for_each_codec():
    seen, chosen = set(), []
    for name in available_formats():
        fmt = get_format(name)
        if not {fmt.k.name, fmt.v.name} <= seen:
            seen |= {fmt.k.name, fmt.v.name}
            chosen.append(name)
    return chosen


def run(*task):
    from aot import compile_format

    try:
        return compile_format(*task)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return f"{type(error).__name__}: {str(error)[-500:]}"


CASES = [(name, arch, 128, (1,)) for name in one_format_for_each_codec() for arch in ARCHES]
CASES += [("five_bits", arch, 128, (1, 512)) for arch in ("sm80", "sm90", "gfx942")]  # words of five bytes
CASES += [(name, arch, 128, (512,)) for name in ("bf16", "int4") for arch in ARCHES]
CASES += [(name, arch, 128, (1, 64)) for name in ("bf16", "int4") for arch in ("sm120", "gfx950")]  # the newest of either kind
CASES += [(name, arch, 128, (4,), True) for name in ("int4", "fp8") for arch in ("sm80", "sm90", "gfx942")]
CASES += [(name, "sm90", size, (1, 64)) for name in ("int4", "bf16") for size in (80, 256, 512)]


@pytest.fixture(scope="module")
def results(request):
    """All cases that are to be tested, in a few processes: Triton here is interpreted, there it compiles."""
    chosen = [item.callspec.params["case"] for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    with ProcessPoolExecutor(max_workers=2, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "0")
            futures = {case: pool.submit(run, *case) for case in chosen}
        yield futures


@pytest.mark.xdist_group("aot")
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x) for x in c))
def test_compiles(results, case):
    compiled = results[case].result()
    assert not isinstance(compiled, str), compiled
    steps = set() if len(case) > 4 else {"gather_kernel", "fold_kernel"}
    written = set() if case[0] == "trellis2" else {"write_kernel"}  # rows that the reference searches
    assert {kernel for kernel, _ in compiled} == {"attend_kernel", "combine_kernel"} | written | steps
    for kernel, shared in compiled:
        assert shared <= SHARED_MEMORY[case[1]] * 1024, (kernel, shared)
