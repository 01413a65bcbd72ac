"""Run by check_resolution.sh, which brings uv and tomli.

Resolves what setup.sh installs, with the pins of constraints.txt; then, as a user's pip would, without them: quantkv alone, and with each
of its extras, for every Python; then the extra for vLLM, whose own pins need a Linux that is not as old.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomli

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
LINUX = "x86_64-manylinux_2_28"
TARGETS = [*((LINUX, python) for python in PYTHONS), ("aarch64-manylinux_2_28", "3.12"), ("aarch64-apple-darwin", "3.12")]
VLLM = [
    *(("x86_64-manylinux_2_31", python) for python in PYTHONS[1:]),
    ("aarch64-manylinux_2_34", "3.12"),
]  # the oldest Linux  # the oldest that it resolves for
VLLM_OVERRIDE = "certifi"  # vLLM 0.33 asks for a release of it that is younger than the newest on the index
SHOWN = ("torch", "triton", "transformers", "vllm")


def resolve(platform: str, python: str, *arguments: str, requirements: str = "") -> list[dict[str, Any]]:
    """The chosen packages, as pylock.toml lists them. Only wheels: nothing may need a compiler. RuntimeError with uv's reasons."""
    command = ["uv", "pip", "compile", "--quiet", "--format", "pylock.toml", "--only-binary", ":all:", "--no-header"]
    command += ["--python-platform", platform, "--python-version", python, *arguments]
    environment = {"MACOSX_DEPLOYMENT_TARGET": "14.0", **os.environ}  # the oldest that torch's wheels are for
    found = subprocess.run(command, capture_output=True, text=True, input=requirements, env=environment)
    if found.returncode:
        raise RuntimeError(found.stderr.strip())
    return tomli.loads(found.stdout).get("packages", [])


def main() -> int:
    setup = Path("scripts/setup.sh").read_text(encoding="utf-8")
    said = float(re.search(r'^download="([0-9.]+) GB"', setup, re.MULTILINE)[1])
    data = shlex.split(re.search(r"^install --no-deps (.*)$", setup, re.MULTILINE)[1], comments=True)
    failed = False
    for platform, python in TARGETS:
        target = f"{platform} Python {python}"
        try:
            packages = resolve(platform, python, "--extra", "dev", "--constraint", "constraints.txt", "pyproject.toml")
            packages += resolve(platform, python, "--no-deps", "-", requirements="\n".join(data))
        except RuntimeError as error:
            print(f"{target}: FAILED\n{error}", flush=True)
            failed = True
            continue
        shown, size = described(packages)
        print(f"{target}: {shown}", flush=True)
        if platform == LINUX and abs(size - said) > 0.1 * said:
            print(f"FAILED: scripts/setup.sh announces {said} GB")
            failed = True
    return int(not each_extra() or not vllm() or failed)


def extras() -> list[str]:
    """Those that are resolved alone, "" for quantkv without one: all but dev, which setup.sh installs, and vllm."""
    given = tomli.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return ["", *sorted(given.keys() - {"dev", "vllm"})]


def each_extra() -> bool:
    """Resolves quantkv alone and with each extra, for every Python."""
    failed = False
    for extra in extras():
        said = []
        for python in PYTHONS:
            try:
                packages = resolve(LINUX, python, *(["--extra", extra] if extra else []), "pyproject.toml")
                said.append(f"{python}: {len(packages)}")
            except RuntimeError as error:
                said.append(f"{python}: FAILED\n{error}\n")
                failed = True
        print(f"quantkv{f'[{extra}]' * bool(extra)}, {LINUX}, packages for Python " + ", ".join(said), flush=True)
    return not failed


def described(packages: list[dict[str, Any]]) -> tuple[str, float]:
    """The versions that are shown, number and size; GB."""
    versions = {package["name"]: package["version"] for package in packages}
    size = sum(max((wheel["size"] for wheel in package.get("wheels", ())), default=0) for package in packages) / 1e9
    chosen = ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
    return f"{chosen}; {len(packages)} packages, {size:.1f} GB", size


def vllm() -> bool:
    """Resolves the extra for vLLM, which pins its own torch, without constraints.txt."""
    failed = False
    for platform, python in VLLM:
        with tempfile.NamedTemporaryFile("w") as override:
            override.write(VLLM_OVERRIDE)
            override.flush()
            try:
                said = described(resolve(platform, python, "--extra", "vllm", "--override", override.name, "pyproject.toml"))[0]
            except RuntimeError as error:
                said, failed = f"FAILED\n{error}", True
        print(f"vllm, {platform} Python {python}: {said}", flush=True)
    return not failed


if __name__ == "__main__":
    sys.exit(main())
