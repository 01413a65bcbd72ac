"""vLLM 0.33's own tests of its quantized cache kernels, run against `quantkv.vllm_api`.

    python scripts/vllm_kernel_tests.py TESTS [--vllm FOLDER] [--device cpu|cuda] [--shard I/N] [pytest's arguments]

TESTS: the folder `tests` of vLLM's source release, which no wheel has: the .tar.gz among release 0.33.0's files on the package index. Its
tests import vLLM: the one installed here, or the package `vllm` in FOLDER. In vLLM's modules the functions and classes that `POINTED`
names are replaced, before a test is collected, by those of `quantkv.vllm_api`, which count their calls; everything else that the tests
use stays vLLM's. What is left out is listed at the end, with why. Exit code: pytest's; 3 where no replaced function was called.

--device cpu: what the tests skip without a GPU runs on the CPU, through the reference; the largest shapes are left out.
--shard I/N: of the tests that are left, every N-th from number I on, for N runs side by side: on a GPU most of the time compiles kernels.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

OPS, TURBOQUANT = "vllm.v1.attention.ops.", "vllm.model_executor.layers.quantization.turboquant."
POINTED = {  # vLLM's module -> the names in it that are replaced
    OPS + "triton_unified_attention": ("unified_attention",),
    OPS + "triton_unified_attention_diffkv": ("unified_attention_diffkv",),
    OPS + "triton_reshape_and_cache_flash": (
        "triton_reshape_and_cache_flash",
        "triton_reshape_and_cache_flash_diffkv",
        "triton_reshape_and_cache_flash_per_token_head_quant",
    ),
    OPS + "int4_per_token_head": (
        "fast_hadamard_transform",
        "pack_int4_nibbles",
        "reshape_and_cache_int4",
        "single_rht",
        "unified_attention_int4",
        "unpack_int4_nibbles",
    ),
    OPS + "triton_turboquant_store": ("triton_turboquant_store",),
    OPS + "triton_turboquant_decode": ("triton_turboquant_decode_attention",),
    TURBOQUANT + "centroids": ("get_centroids",),
    TURBOQUANT + "config": ("TurboQuantConfig",),
}
UNIFIED, MIXED = "test_triton_unified_attention.py", "test_mixed_causal_attn.py"
FILES = (
    "kernels/attention/" + UNIFIED,
    "kernels/attention/test_triton_unified_attention_diffkv.py",
    "kernels/attention/" + MIXED,
    "kernels/attention/test_cache.py",
    "quantization/test_per_token_kv_cache.py",
    "quantization/test_turboquant.py",
)
# Test -> why it says nothing about this API.
OWN_KERNELS = "a kernel of vLLM's alone, launched without its entry point"
LAUNCHES = "asserts which of vLLM's kernels its entry point launches"
LEFT_OUT = {
    "test_splitk_admission_preserves_decode_and_bounds_verification": LAUNCHES,
    "test_spec_verify_block_m_grouping_and_launch_kwargs": LAUNCHES,
    "test_reduce_segments_ignores_empty_softmax_states": OWN_KERNELS,
    "test_reduce_segments_leaves_graph_padding_untouched": OWN_KERNELS,
    "test_splitk_softmax_recovers_after_fully_masked_tile": OWN_KERNELS,
    "test_clamped_mm_prefix_prunes_sliding_window_tiles": OWN_KERNELS,
    "test_clamped_mm_prefix_preserves_noncausal_right_window": OWN_KERNELS,
    "test_softcap_does_not_overflow_on_large_scores": OWN_KERNELS,
    "test_flash_attn4_mixed_causal": "FlashAttention",
}
TOO_LARGE = {  # parts of a test's name -> what a CPU would be asked for
    "test_triton_unified_attn[": ("32768",),
    "test_triton_unified_attn_use_td[": ("32768",),
    "test_triton_unified_attn_bf16_query_fp8_kv[": ("32768",),
    "test_triton_unified_attn_fp16_input_fp8_output[": ("32768", "seq_lens3"),
    "test_reshape_and_cache_flash[": ("10000",),
}


def points_elsewhere(item: pytest.Item) -> str | None:
    """Why a test does not go through this API, or None."""
    name, file = getattr(item, "originalname", None) or item.name, item.path.name
    if file == "test_cache.py" and not (name == "test_reshape_and_cache_flash" and "triton" in item.callspec.params.values()):
        return "vLLM's CUDA kernels"
    return LEFT_OUT.get(name)


def stand_in_for_a_gpu() -> None:
    """What the tests ask of a GPU beside the kernels: the bound that vLLM has for Hopper, where int4's test of attention compares rotated
    rows with rows that are not, which is noise; and a device to be set."""
    platform = importlib.import_module("vllm.platforms").current_platform
    platform.is_device_capability_family = lambda family, device_id=0: family == 90
    torch.accelerator.set_device_index = lambda device: None


class Pointed:
    """A pytest plug-in: points vLLM's names at `quantkv.vllm_api`, counts calls, and says what was left out."""

    def __init__(self, device: str, shard: slice) -> None:
        self.device, self.shard, self.calls, self.left_out = device, shard, Counter(), Counter()
        if device == "cpu":
            stand_in_for_a_gpu()
        operators = importlib.import_module("vllm._custom_ops")
        if not hasattr(torch.ops._C_cache_ops, "convert_fp8"):  # vLLM's compiled part is not here; the tests begin with random rows by it
            operators.convert_fp8 = lambda out, rows, scale=1.0, kv_dtype="fp8": out.view(torch.float8_e4m3fn).copy_(rows / scale)
        api = importlib.import_module("quantkv.vllm_api")
        for module, names in POINTED.items():
            theirs = importlib.import_module(module)
            for name in names:
                if not hasattr(theirs, name):
                    raise SystemExit(f"{module} has no {name}: this is not vLLM 0.33")
                ours = getattr(api, name)
                setattr(theirs, name, ours if isinstance(ours, type) else self.counted(name, ours))

    def counted(self, name: str, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            self.calls[name] += 1
            return function(*args, **kwargs)

        return call

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept, dropped = [], []
        for item in items:
            why = points_elsewhere(item)
            if why is None and self.device == "cpu":
                large = [parts for start, parts in TOO_LARGE.items() if item.name.startswith(start)]
                why = "too large for a CPU" if any(part in item.name for parts in large for part in parts) else None
                for node in item.listchain():  # "needs a GPU": here the reference serves the CPU's tensors
                    node.own_markers = [mark for mark in node.own_markers if mark.name != "skipif"]
                parameters = item.callspec.params if hasattr(item, "callspec") else {}
                parameters.update({name: "cpu" for name, value in parameters.items() if name == "device"})
            if why is not None:
                self.left_out[why] += 1
            (kept if why is None else dropped).append(item)
        items[:] = kept[self.shard]
        config.hook.pytest_deselected(items=dropped)
        for module in {item.module for item in kept if item.path.name == UNIFIED}:
            module._spy_reduce_segments = lambda monkeypatch: [None]  # the tests that spy on a launch also compare numbers

    @pytest.fixture(autouse=True)
    def default_device(self):
        """Tests set it, and leave it so."""
        yield
        torch.set_default_device(None)

    @pytest.fixture
    def kv_cache_factory_flashinfer(self):
        from vllm.utils.torch_utils import create_kv_caches_with_random_flash

        return create_kv_caches_with_random_flash

    def pytest_terminal_summary(self, terminalreporter) -> None:
        write = terminalreporter.write_line
        for title, counter in (("calls", self.calls), ("left out", self.left_out)):
            write(f"{title}: " + ("; ".join(f"{count} {name}" for name, count in counter.most_common()) or "none"))


def every_nth(text: str) -> slice:
    first, count = map(int, text.split("/"))
    return slice(first, None, count)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, help="the folder tests of vLLM's source release")
    parser.add_argument("--vllm", type=Path, help="folder that holds the package vllm; the installed one without it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shard", type=every_nth, default=slice(None), metavar="I/N")
    options, further = parser.parse_known_args(arguments)
    tests = options.tests.resolve()
    missing = [name for name in FILES if not (tests / name).is_file()]
    if missing or tests.name != "tests":
        raise SystemExit(
            f"{tests}: the folder tests of vLLM 0.33's source release is needed; not there: {', '.join(missing) or 'its name'}"
        )
    os.environ.setdefault("VLLM_TARGET_DEVICE", options.device)
    for folder in (tests.parent, options.vllm, Path(__file__).parent.parent / "src"):
        if folder is not None:
            sys.path.insert(0, str(folder))
    plugin = Pointed(options.device, options.shard)
    files = [str(tests / name) for name in FILES]
    isolated = ["--noconftest", "--rootdir", str(tests.parent), "-c", os.devnull, "-p", "no:cacheprovider"]
    code = pytest.main([*isolated, "-W", "ignore", "-q", "--no-header", *files, *further], plugins=[plugin])
    if code == 0 and not plugin.calls:
        print("no function of quantkv.vllm_api was called: nothing was tested")
        return 3
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main())
