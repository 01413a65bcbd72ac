"""Run by check_wheel.sh, which brings build and setuptools: builds sdist and wheel, compares what is in them with the repository, and tries
the wheel in environments that hold what its metadata asks for and nothing else.

    python scripts/check_wheel.py WORK [FOLDER]     # WORK/venv has build and setuptools; FOLDER: where both files are kept
"""

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

NAME, PACKAGE = "quantkv", "src/quantkv/"
BESIDE = {"LICENSE", "README.md", "pyproject.toml", "setup.py"}  # of the sdist
ATTENDS = """
import sys
import quantkv
assert not {"torch", "triton", "transformers"} & set(sys.modules), "import quantkv is not light"
import torch
from quantkv import PagedCache, get_format
torch.manual_seed(0)
for name, bound in (("none", 1e-5), ("int8", 2e-2), ("int4", 3e-1), ("levels4", 3e-1)):
    spec = get_format(name, torch.float32).cache_spec(num_kv_heads=2, head_size=64)
    cache, (key, value), query = PagedCache(spec, 4), torch.randn(2, 40, 2, 64), torch.randn(1, 4, 64)
    cache.write(key, value, torch.arange(40))
    out = cache.attend(query, block_table=torch.arange(4, dtype=torch.int32)[None], seq_lens=torch.tensor([40], dtype=torch.int32))
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), key.transpose(0, 1).repeat_interleave(2, 0), value.transpose(0, 1).repeat_interleave(2, 0)
    ).transpose(0, 1)
    error = float((out - exact).norm() / exact.norm())
    assert error < bound, (name, error)
print(quantkv.__version__, quantkv.__file__)
"""


def tracked(root: Path) -> list[str]:
    """What git knows of, or would if it were added, and what still exists."""
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
    )
    return [name for name in found.stdout.splitlines() if (root / name).is_file()]


def build(root: Path, work: Path) -> tuple[Path, Path]:
    """The sdist of a copy of the repository, which has nothing that was left behind, and the wheel made from the sdist."""
    copy, out = work / "copy", work / "dist"
    for name in tracked(root):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, copy / name)
    command = [work / "venv/bin/python", "-m", "build", "--no-isolation", "--outdir", out, copy]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"build failed\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def faults(names: list[str], sdist: Path, wheel: Path) -> list[str]:
    """What is missing from the two files, and what the wheel has beside."""
    package = {name.removeprefix("src/") for name in names if name.startswith(PACKAGE)}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        source = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    wanted = {f"src/{name}" for name in package} | BESIDE
    said = [f"{wheel.name} lacks {name}" for name in sorted(package - packed)]
    said += [f"{wheel.name} has {name}, which is not in the repository" for name in sorted(packed - package)]
    return said + [f"{sdist.name} lacks {name}" for name in sorted(wanted - source)]


def needed(wheel: Path, extra: str) -> set[str]:
    """Distributions that are installed here and that the wheel with this extra ("": none) asks for, those that they ask for included."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        asked = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or []
    found: set[str] = set()

    def take(requirements: list[str], extras: set[str]) -> None:
        for requirement in map(Requirement, requirements):
            if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": e}) for e in ("", *extras)):
                continue
            if requirement.name == NAME:
                take(asked, requirement.extras)
                continue
            key = requirement.name.lower().replace("_", "-")
            if key in found and not requirement.extras:
                continue
            found.add(key)
            take(importlib.metadata.distribution(key).requires or [], requirement.extras)

    take(asked, {extra})
    return found


def environment(folder: Path, wheel: Path, extra: str) -> Path:
    """An environment with the wheel, and links to what it needs -> its python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    for name in needed(wheel, extra):
        distribution = importlib.metadata.distribution(name)
        for top in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            source = Path(distribution.locate_file(top))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run([*pip, "--disable-pip-version-check"], check=True)
    return python


def run(cwd: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "HOME": str(cwd)})


def tries(wheel: Path, work: Path) -> list[str]:
    """What went wrong in an environment with the core, and in one with the command line."""
    wrong, version = [], wheel.name.split("-")[1]
    core = environment(work / "core", wheel, "")
    done = run(work, core, "-c", ATTENDS)
    if done.returncode or done.stdout.split()[:1] != [version] or str(work / "core") not in done.stdout:
        wrong.append(f"core: write and attend failed\n{done.stdout}{done.stderr}")
    done = run(work, core, "-m", NAME, "eval")
    if done.returncode != 2 or len(done.stderr.strip().splitlines()) != 1 or f"{NAME}[cli]" not in done.stderr:
        wrong.append(f"core: the command line does not say in one line that it needs {NAME}[cli]\n{done.stdout}{done.stderr}")
    cli = environment(work / "cli", wheel, "cli")
    for argument, said in (("--help", "generate"), ("eval --help", "--kv")):
        done = run(work, cli.parent / NAME, *argument.split())
        if done.returncode or said not in done.stdout:
            wrong.append(f"cli: {NAME} {argument} failed, or does not say {said!r}\n{done.stdout}{done.stderr}")
    return wrong


def main(work: Path, keep: Path | None = None) -> int:
    root = Path(__file__).parent.parent
    sdist, wheel = build(root, work)
    wrong = faults(tracked(root), sdist, wheel) or tries(wheel, work)
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        return 1
    with zipfile.ZipFile(wheel) as archive:
        print(f"{sdist.name}, {wheel.name}: {len(archive.namelist())} files, {wheel.stat().st_size:,} bytes; core and command line run")
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for file in (sdist, wheel):
            shutil.copy2(file, keep)
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
