"""benchmarks/vllm_engine/profiled.py: times of a step by what kernels do."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def profiled():
    spec = importlib.util.spec_from_file_location("profiled_script", ROOT / "benchmarks" / "vllm_engine" / "profiled.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_moments_that_kernels_share_count_once(profiled):
    found = profiled.summary([("write_kernel", 0, 4), ("combine_kernel", 2, 14), ("nvjet_x", 10, 20), ("decode_kernel", 0, 8)], 2)
    assert found["busy_ms"] == 0.010
    assert found["of_kinds_ms"] == {"writes": 0.002, "attention": 0.007, "products": 0.005}
    assert found["longest"] == [
        (*of, 0.5) for of in (("combine_kernel", 0.006), ("nvjet_x", 0.005), ("decode_kernel", 0.004), ("write_kernel", 0.002))
    ]
    assert profiled.covered([(5, 6), (0, 2), (1, 2)]) == 3


def test_every_kernel_of_ours_has_a_kind(profiled):
    texts = [path.read_text() for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
    kernel = re.compile(r"^def (\w+_kernel)\(|(\w+_kernel)\(const __grid_constant__|^COMBINE\((\w+_kernel),", re.M)
    names = {name for text in texts for found in kernel.findall(text) for name in found if name}
    assert {"decode_wgmma_kernel", "combine_one_kernel", "round_kernel", "attend_latents_kernel", "gather_rows_kernel"} <= names
    assert {name for name in names if profiled.kind(name) == profiled.REST} == set()
    assert profiled.kind("void vllm::reshape_and_cache_flash_kernel<bf16>") == "writes"
    assert profiled.kind("cutlass::device_kernel<flash::FlashAttnFwdSm90<") == "attention"
    assert profiled.kind("_gumbel_sample_kernel") == profiled.REST
