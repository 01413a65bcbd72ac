"""What may import what, how long a file may be, and what `import quantkv` must not load."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "quantkv"
FILES = sorted(ROOT.rglob("*.py"))
# Each room and the rooms that it may import, lazily or not. A folder of `implementations` or `integrations` is a room of its own.
ALLOWED = {
    "spec": {"names"},
    "names": set(),
    "refusals": set(),
    "autocast": set(),
    "deprecated": set(),
    "exact": set(),  # old name
    "shadow": set(),  # old name
    "under_way": set(),
    "forked": set(),
    "assumed": set(),
    "format_table": {"names", "spec"},
    "known_models": set(),
    "layer_types": set(),
    "geometry": {"layer_types", "refusals"},
    "parameters": {"geometry", "refusals", "whole_file"},
    "measured": set(),
    "capacity": {"full_precision", "format_table", "geometry", "names", "spec"},
    "vllm_pages": {"capacity", "geometry", "spec"},
    "packing": set(),
    "rounding": set(),
    "format": {"names", "spec", "packing", "rounding"},  # its registry loads `formats` by name, as it would an entry point
    "formats": {"format", "spec", "packing", "rounding", "triton", "hopper", "cpu"},
    "maps": {"format", "rounding"},
    "checks": {"refusals"},
    "options": {"checks", "names"},
    "reads": {"options"},
    "own": {"checks"},
    "kept": set(),
    "calls": {"checks", "format", "maps", "options", "own", "reads"},
    "reference": {"autocast", "calls", "format", "kept", "maps", "options", "packing", "reads", "rounding"},
    "triton": {"assumed", "calls", "format", "maps", "options", "reads", "rounding", "under_way"},
    "prefill": {"assumed", "calls", "format", "maps", "options", "reads", "reference", "triton", "hopper", "under_way"},
    "hopper": {"assumed", "calls", "format", "maps", "reads", "rounding", "under_way", "whole_file"},
    "cpu": {"calls", "format", "kept", "maps", "packing", "reads", "reference", "rounding", "under_way"},
    "implementations": {"assumed", "calls", "format", "maps", "own", "reference", "triton", "prefill", "hopper", "cpu"},
    "flat": {"calls", "format", "maps"},
    "ops": {"autocast", "flat", "calls", "format", "maps", "implementations"},
    "full_precision": {"refusals"},
    "plain_json": set(),
    "tensor_file": {"whole_file"},
    "policy_file": {"full_precision", "names", "plain_json", "refusals", "whole_file"},
    "copied_rows": {"cache"},
    "copies": {
        "assumed",
        "calls",
        "cache",
        "checks",
        "copied_rows",
        "full_precision",
        "full_precision_step",
        "formats",
        "options",
        "own",
        "triton",
    },
    "full_precision_step": {"checks", "full_precision"},
    "prepared": {"autocast", "calls", "cache", "checks", "ops", "options", "own", "copies"},
    "page_table": set(),
    "whole_file": set(),
    "page_file": {"checks", "page_meaning", "whole_file"},
    "page_meaning": {"checks", "format", "maps", "names"},
    "page_views": {"cache", "calls", "checks", "format", "maps", "page_meaning", "spec"},
    "cache": {"calls", "format", "formats", "maps", "checks", "spec", "ops", "page_file", "reference"},
    "offload": {"cache", "checks", "page_file"},
    "warmup": {
        "cache",
        "calls",
        "checks",
        "copies",
        "forked",
        "full_precision",
        "implementations",
        "options",
        "prepared",
        "triton",
        "under_way",
    },
    "weights": {"checks"},
    "calibration": {"weights", "checks", "format", "geometry", "maps", "plain_json", "tensor_file", "whole_file"},
    "policy": {
        "policy_file",
        "calibration",
        "checks",
        "full_precision",
        "format",
        "formats",
        "maps",
        "page_meaning",
        "tensor_file",
        "whole_file",
    },
    "engine": {
        "assumed",
        "cache",
        "calibration",
        "calls",
        "checks",
        "forked",
        "full_precision",
        "format",
        "formats",
        "geometry",
        "implementations",
        "maps",
        "options",
        "page_table",
        "policy",
        "prepared",
        "reads",
        "reference",
        "copies",
        "full_precision_step",
        "spec",
        "warmup",
    },
    "vllm_api": {"calls", "checks", "format", "formats", "maps", "ops", "packing", "page_views"},
    "testing": {"calls", "format", "formats", "implementations", "maps", "cache", "spec", "reference", ""},
    "integrations": {"calibration", "checks", "engine", "format", "geometry", "names", "policy", "policy_file", "weights"},
    "model_analysis": {
        "calibration",
        "checks",
        "engine",
        "format",
        "full_precision",
        "geometry",
        "integrations",
        "maps",
        "options",
        "policy",
        "spec",
        "weights",
        "whole_file",
    },
    "transformers": {
        "cache",
        "calibration",
        "checks",
        "copies",
        "engine",
        "format",
        "formats",
        "integrations",
        "model_analysis",
        "policy",
        "spec",
        "weights",
    },
    "vllm": {
        "cache",
        "calibration",
        "calls",
        "capacity",
        "copies",
        "engine",
        "format",
        "full_precision",
        "geometry",
        "integrations",
        "names",
        "options",
        "page_meaning",
        "policy",
        "policy_file",
        "spec",
        "vllm_pages",
        "whole_file",
    },
    "sglang": {
        "cache",
        "calibration",
        "calls",
        "copies",
        "engine",
        "formats",
        "geometry",
        "integrations",
        "options",
        "policy",
        "vllm_pages",
    },
    "bench": {"calls", "cache", "prepared", "formats", "maps", "implementations", "reference", "prefill", "cpu", ""},
    "cli": {
        "assumed",
        "engine",
        "forked",
        "policy",
        "geometry",
        "whole_file",
        "known_models",
        "hopper",
        "implementations",
        "warmup",
        "capacity",
        "vllm_pages",
        "format_table",
        "measured",
        "parameters",
        "policy_file",
        "integrations",
        "model_analysis",
        "transformers",
        "vllm",
        "cache",
        "calibration",
        "checks",
        "full_precision",
        "format",
        "formats",
        "maps",
        "spec",
        "bench",
        "cpu",
        "under_way",
        "",
    },
    "__main__": {"cli"},
}


def room(path: Path) -> str:
    return _room(path.relative_to(ROOT).with_suffix("").parts)


def _room(parts: Sequence[str]) -> str:
    inner = len(parts) > 1 and parts[0] in ("implementations", "integrations") and (ROOT / parts[0] / parts[1]).is_dir()
    return parts[1] if inner else parts[0] if parts else ""


def imported_rooms(path: Path) -> set[str]:
    package = ["quantkv", *path.relative_to(ROOT).parts[:-1]]
    found = set()
    tree = ast.parse(path.read_text())
    for guard in [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]:
        guard.body = [ast.Pass()]  # which imports nothing
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = [*base, *(node.module or "").split(".")] if node.module else base
            targets = [full] if node.module else [[*full, a.name] for a in node.names]
        elif isinstance(node, ast.Import):
            targets = [a.name.split(".") for a in node.names]
        else:
            continue
        found |= {_room(t[1:]) if len(t) > 1 else "" for t in targets if t[0] == "quantkv"}
    return found - {room(path)}


@pytest.mark.parametrize("path", [p for p in FILES if room(p) != "__init__"], ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_downward(path):
    assert imported_rooms(path) <= ALLOWED[room(path)] | {"deprecated"}  # which imports nothing


def test_what_may_import_what_has_no_cycles():
    assert set().union(*ALLOWED.values()) - {""} <= set(ALLOWED)
    order = tuple(graphlib.TopologicalSorter({name: rooms - {""} for name, rooms in ALLOWED.items()}).static_order())
    assert order.index("spec") < order.index("cache") < order.index("cli")


SERVERS = [path for engine in ("vllm", "sglang") for path in sorted((ROOT / "integrations" / engine).glob("*.py"))]


@pytest.mark.parametrize("path", SERVERS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_an_adapter_knows_no_implementation(path):
    """Kernels, prepared calls and what compiles them are behind `engine`."""
    behind = {p.name for p in (ROOT / "implementations").iterdir()} | {"implementations", "prepared", "warmup", "maps"}
    assert imported_rooms(path).isdisjoint(behind)


def bound_names(path: Path) -> set[str] | None:
    """Names that a module has once it is loaded; None where it finds more when asked. Modules of a package count."""
    names = {inner.stem for inner in path.parent.iterdir() if not inner.name.startswith("_")} if path.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return None if "__getattr__" in names else names


def missing_imports(path: Path) -> list[str]:
    """What a file takes from this package and the package does not have."""
    missing = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.level or node.module.partition(".")[0] == "quantkv"):
            base = path.parents[node.level - 1] if node.level else ROOT.parent
            module = base.joinpath(*(node.module or "").split("."))
            file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            if not file.exists():
                missing.append(f"{'.' * node.level}{node.module or ''}")
            elif (bound := bound_names(file)) is not None:
                missing += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names if alias.name not in bound]
    return missing


OTHERS = [path for folder in ("tests", "scripts", "benchmarks", "examples") for path in sorted((ROOT.parents[1] / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", [*FILES, *OTHERS], ids=lambda p: str(p.relative_to(ROOT.parents[1])))
def test_what_is_imported_exists(path):
    """An adapter is not loaded where its engine is not installed: a name that moved would be found by a user."""
    assert missing_imports(path) == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= 400


def test_kernels_are_small():
    """The design's budget: a kernel is at most 120 lines and 20 arguments."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                arguments = node.args
                assert len(arguments.args) + len(arguments.kwonlyargs) <= 20, (path, node.name)
                assert node.end_lineno - node.lineno < 120, (path, node.name)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.cu")), ids=lambda p: p.name)
def test_cuda_kernels_are_small(path):
    kernels = re.findall(r'^extern "C" __global__.*?^}$', path.read_text(), re.MULTILINE | re.DOTALL)
    assert len(kernels) == path.read_text().count("\nextern "), "a kernel begins a line, and so does its end"
    for kernel in kernels:
        assert len(kernel.splitlines()) <= 120, kernel.partition("(const")[0]


def test_headers_have_names_of_their_own():
    """CUDA headers are included by name alone, from whatever folder they lie in; each codec's snippet is given by its path."""
    names = [path.name for path in ROOT.rglob("*.cuh") if path.name != "hopper.cuh"]
    assert len(names) == len(set(names)) and len(names) > 20


@pytest.mark.parametrize(
    "statement,absent",
    [
        ("import quantkv", ("torch", "triton", "transformers", "numba")),
        ("import quantkv.formats", ("triton", "transformers", "numba")),
        ("import quantkv; quantkv.PagedCache", ("triton", "transformers", "numba")),
    ],
)
def test_import_is_light(statement, absent):
    code = f"import sys; {statement}; print([m for m in {absent!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_spec_needs_nothing():
    code = (
        "import sys; from quantkv.spec import CacheSpec, RowLayout; r = RowLayout(4, ('float32',));"
        "print(CacheSpec('int4', r, r, 8, 128).page_bytes, 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["2176", "False"]


def test_unknown_name_is_an_attribute_error():
    import quantkv

    with pytest.raises(AttributeError, match="PagedCash"):
        _ = quantkv.PagedCash
