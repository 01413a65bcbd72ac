"""What this machine has, and who serves what on it. Works without torch, and with one that cannot be loaded."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

FRONTEND = "nvidia-cudnn-frontend"
PACKAGES = ("torch", "triton", "cuda-core", "cuda-bindings", "transformers", "vllm", "flash_attn_3", FRONTEND)
OK, SLOWER, UNSUPPORTED, CANNOT = "ok", "slower", "unsupported", "cannot run"
TORCH = "pip install 'torch>=2.8'"


@dataclass(frozen=True)
class Finding:
    """level: OK; SLOWER, UNSUPPORTED: it works, slower or not all of it; CANNOT: nothing does. mend: the command that helps, if any."""

    level: str
    what: str
    mend: str | None = None


def version_of(package: str) -> str | None:
    """Version of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def needed(package: str) -> str | None:
    """Which versions of a package quantkv's metadata asks for; None where it is not installed itself, or asks for none."""
    try:
        from packaging.requirements import Requirement

        asked = [Requirement(line) for line in importlib.metadata.requires("quantkv") or ()]
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return None
    return next((str(found.specifier) for found in asked if found.name == package), None)


def versions() -> dict[str, str | None]:
    """Versions of Python and of what matters here; None for what is not installed."""
    return {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}


def gpus_of_driver() -> list[dict[str, str]]:
    """What the NVIDIA driver's own tool lists; empty where there is none."""
    tool, fields = shutil.which("nvidia-smi"), ("name", "driver_version", "memory.total", "compute_cap")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(fields, (word.strip() for word in line.split(",")))) for line in lines if line.strip()]


def load(package: str) -> tuple[Any, str | None]:
    """A package, or why it cannot be loaded."""
    try:
        return importlib.import_module(package), None
    except ModuleNotFoundError as error:
        missing = (error.name or package).partition(".")[0] == package
        return None, f"{package} is not installed" if missing else f"{package} cannot be loaded: {error}"
    except Exception as error:  # of a damaged installation: a library that does not load, a symbol that is not there
        return None, f"{package} cannot be loaded: {' '.join(str(error).split())}"


def findings(torch: Any, reason: str | None, gpus: list[dict[str, str]]) -> list[Finding]:
    """What is wrong, or right, with the machine. torch: the module, None for `reason`."""
    if torch is None:
        return [Finding(CANNOT, f"{reason}; nothing but plan runs without it", TORCH)]
    found = [_version("torch", torch.__version__, CANNOT)]
    if torch.cuda.is_available():
        found += _of_gpus(torch)
    elif gpus and torch.version.cuda is None and not torch.version.hip:
        found.append(Finding(SLOWER, f"torch {torch.__version__} is built without CUDA: {gpus[0]['name']} is not used", TORCH))
    elif gpus:
        built = f"torch is built for CUDA {torch.version.cuda}, the driver is {gpus[0]['driver_version']}"
        found.append(Finding(SLOWER, f"{gpus[0]['name']} cannot be used: {built}", "update the driver, or take a torch for an older CUDA"))
    else:
        found.append(Finding(SLOWER, "no GPU: attention runs on the CPU"))
    transformers, vllm = version_of("transformers"), version_of("vllm")
    if transformers is not None:
        found.append(_version("transformers", transformers, UNSUPPORTED))
    if vllm is not None:
        from ..integrations.vllm import TESTED

        tested = " or ".join(version + "x" for version in TESTED)
        if vllm.startswith(TESTED):
            found.append(Finding(OK, f"vllm {vllm}: the plug-in was tested with it"))
        else:
            what = f"vllm {vllm}: the plug-in was tested with {tested}, and registers no types"
            found.append(Finding(UNSUPPORTED, what, "pip install 'quantkv[vllm]'"))
    return [finding for finding in found if finding is not None]


def _version(package: str, found: str, level: str) -> Finding:
    asked = needed(package)
    if asked is None:
        return Finding(OK, f"{package} {found}")
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(asked).contains(found.partition("+")[0], prereleases=True):
        return Finding(OK, f"{package} {found}")
    return Finding(level, f"{package} {found}: {asked} is needed", f"pip install '{package}{asked}'")


def _of_gpus(torch: Any) -> list[Finding]:
    capability = torch.cuda.get_device_capability(0)
    found = [Finding(OK, f"{torch.cuda.get_device_name(0)}, compute capability {capability[0]}.{capability[1]}")]
    _, reason = load("triton")
    if reason is not None:
        found.append(Finding(SLOWER, f"{reason}: the reference serves what Triton would", "pip install 'quantkv[triton]'"))
    if capability == (9, 0):
        found.append(_hopper())
    if capability >= (8, 0) and capability != (9, 0) and not torch.version.hip and version_of(FRONTEND) is None:
        what = "prompts are read by what torch brings; batches of several lengths are faster by cuDNN's frontend"
        found.append(Finding(OK, what, f"pip install {FRONTEND}"))
    return found


def _hopper() -> Finding:
    from ..implementations.hopper.host.launch import missing

    reason = missing()
    if reason is not None:
        return Finding(SLOWER, f"Hopper's kernels cannot be compiled: {reason}", "pip install 'quantkv[hopper]'")
    try:
        from cuda.bindings import nvrtc

        return Finding(OK, f"NVRTC {'.'.join(map(str, nvrtc.nvrtcVersion()[1:]))}: Hopper's kernels are compiled by it")
    except Exception as error:  # the library itself is missing, or does not load
        reason = " ".join(str(error).split())
        return Finding(SLOWER, f"Hopper's kernels cannot be compiled: NVRTC cannot be loaded: {reason}", "pip install nvidia-cuda-nvrtc")


def serves(torch: Any, name: str, num_heads: int, num_kv_heads: int, head_size: int, head_size_v: int) -> list[dict[str, Any]]:
    """Who serves decode, verification, writes and prompts, at both precisions, of a format here, and why not who goes before. ValueError
    for heads that the format cannot take."""
    from ..cache import PagedCache
    from ..format import get_format
    from ..warmup import who_serves

    device = "cuda" if torch.cuda.is_available() else "cpu"
    cache = PagedCache(get_format(name).cache_spec(num_kv_heads, head_size, head_size_v), 1, device)
    sizes = {"query_lens": (1, 4, 512), "batch_sizes": (1,), "write_sizes": (1, 512), "max_seq_len": 512}
    words = {"1 x 1": "decode", "1 x 4": "verification of 4 drafts", "1 x 512": "a prompt"}
    rows = []
    for what, (chosen, refusals) in who_serves(cache, num_heads, **sizes).items():
        word = next((w for key, w in words.items() if key in what), what.replace("1 tokens", "a token"))
        rows.append({"what": word, "by": chosen, "not": refusals})
    sizes |= {"query_lens": (512,), "write_sizes": ()}
    try:
        ((chosen, refusals),) = who_serves(cache, num_heads, **sizes, prompt_precision="8bit").values()
    except ValueError as error:
        chosen, refusals = "nobody", {"on a GPU": str(error)}
    return [*rows, {"what": "a prompt with 8-bit scores", "by": chosen, "not": refusals}]
