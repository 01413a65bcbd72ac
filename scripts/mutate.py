"""Mutation testing: one-line faults are planted in a module one at a time, and the tests that know the module must fail.

    python scripts/mutate.py --sample 40 --seed 1            # of every module, a sample of its mutants; a score by module
    python scripts/mutate.py reads packing --sample 0        # all mutants of two modules
    python scripts/mutate.py implementations/cpu             # every module of a folder
    .vllm/bin/python scripts/mutate.py integrations/vllm     # modules that import vLLM: in the environment of scripts/vllm_cpu.sh

A mutant that no test fails for has survived: a fault that would go unseen. Those that compute the same as the original are in
`EQUIVALENT`, with the reason. A mutant that a test does not end for, within three times what the tests take, is killed too.

Libraries do this as well (mutmut, cosmic-ray); they start an interpreter for every mutant, and importing torch and Triton takes longer
here than the tests do. This script imports them once and forks.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import json
import math
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "quantkv"
LINE = 100  # characters of a line that are shown
ROWS, ATTENTION, FACTS = (f"tests/{name}" for name in ("test_fuzz.py::test_rows", "test_fuzz.py::test_attention", "test_specification.py"))
WHOLE = f"{ATTENTION} tests/test_reference.py tests/test_properties.py"
GOLDEN = f"tests/test_golden.py {FACTS} {ROWS}"
CPU = "tests/test_cpu.py --deselect tests/test_cpu.py::test_without_numba_auto_is_the_reference_and_an_explicit_choice_says_what_to_install"
EXACT = "tests/test_full_precision.py --deselect tests/test_full_precision.py::test_triton_reads_the_same"
MODELS = "tests/test_transformers_models.py"
HUGGING = (  # without those that take longest: whole models, compiled ones
    f"tests/test_transformers.py --deselect tests/test_transformers.py::test_a_real_model_generates_the_same_tokens {MODELS} "
    f"--deselect {MODELS}::test_a_compiled_model_answers_as_one_that_is_not "
    f"--deselect {MODELS}::test_compiling_layers_that_share_keys_is_refused tests/test_transformers_given.py"
)
LATENT_COPIES = "tests/test_full_precision_transformers.py tests/test_transformers_key_means.py"
STATIC = "tests/test_transformers_static.py"
VLLM = "tests/test_vllm_plugin.py tests/test_vllm_layers.py"
LATENTS = "tests/test_vllm_latents.py"

TESTS = {  # module: the tests that know it best, those that fail soonest first
    "implementations/reference/attend": f"{FACTS} {WHOLE}",
    "implementations/reference/plan": f"{FACTS} {WHOLE} tests/test_reads.py",
    "implementations/reference/write": f"{FACTS} {ROWS} {WHOLE}",
    "reads": f"tests/test_reads.py {FACTS} {ATTENTION}",
    "own": "tests/test_own_rows.py",
    "implementations/own": "tests/test_own_rows.py",
    "implementations/prefill/own": "tests/test_own_rows.py tests/test_prefill_rounds.py::test_own_rows",
    "implementations/batches": f"tests/test_batches.py {FACTS}",
    "packing": f"{FACTS} {ROWS} {ATTENTION}",
    "formats/int8/__init__": GOLDEN,
    "formats/int4/__init__": GOLDEN,
    "formats/int2/__init__": GOLDEN,
    "formats/fp8/__init__": GOLDEN,
    "formats/none/__init__": f"{FACTS} {ROWS}",
    "formats/mixed": f"{FACTS} {ROWS}",
    "formats/levels/__init__": f"{FACTS} {ROWS} tests/test_rounding.py",
    "formats/turboquant/__init__": f"tests/test_formats.py::test_turboquant_levels {GOLDEN}",
    "formats/trellis/__init__": f"{FACTS} {ROWS} tests/test_trellis.py",
    "formats/trellis/search": "tests/test_trellis.py",
    "rounding": f"tests/test_rounding.py {FACTS}",
    **{f"implementations/cpu/{name}": CPU for name in ("attend", "kernels", "rows", "sides", "threads", "write")},
    "prepared": f"tests/test_prepared.py tests/test_calls.py tests/test_cache.py {FACTS} {EXACT}",
    "policy": "tests/test_policy.py --deselect tests/test_policy.py::test_a_maps_file_in_which_any_bit_is_flipped_is_refused",
    "copies": EXACT,
    "page_table": "tests/test_page_table.py",
    "offload": "tests/test_offload.py tests/test_saved_store.py",
    **{f"engine/{name}": HUGGING for name in ("batch_layer", "cache_positions", "forward_metadata", "padded_metadata", "sequences")},
    **{f"engine/{name}": "tests/test_engine.py" for name in ("full_precision_group", "layer", "layer_config", "warm_up")},
    "engine/decode_metadata": STATIC,
    "engine/fake_quantized": "tests/test_teacher_forced.py",
    "integrations/transformers/attention": f"tests/test_weights.py tests/test_statistics.py {HUGGING} {STATIC}",
    "integrations/transformers/cache": HUGGING,
    "integrations/transformers/captured": STATIC,
    "integrations/transformers/compiled": STATIC,
    "integrations/transformers/first_use": "tests/test_statistics.py",
    "integrations/transformers/layers": f"{HUGGING} {STATIC}",
    "integrations/transformers/lazy_kv": HUGGING,
    "integrations/transformers/made_for": HUGGING,
    "integrations/transformers/recurrent_and_latent": f"{HUGGING} {LATENT_COPIES}",
    "integrations/transformers_model": f"tests/test_calibrate.py {HUGGING}",
    "model_analysis/calibrate": "tests/test_calibrate.py",
    "model_analysis/rotation": "tests/test_rotation.py tests/test_calibrate.py",
    "model_analysis/sensitivity": "tests/cli/test_cli_tune.py",
    "model_analysis/statistics": "tests/test_statistics.py",
    "model_analysis/teacher_forced": "tests/test_teacher_forced.py",
    **{
        f"integrations/vllm/{name}": VLLM
        for name in (
            "__init__",
            "around",
            "asked",
            "backend",
            "connectors",
            "implementation",
            "metadata",
            "mixed",
            "platform",
            "statistics",
        )
    },
    **{f"integrations/vllm/{name}": f"{LATENTS} {VLLM}" for name in ("mla", "mla_metadata")},
    "integrations/vllm/blocks": f"tests/test_vllm_blocks.py {VLLM} tests/vllm_cpu/test_pool.py",
    "integrations/vllm/contract": "tests/test_vllm_contract.py",
}
PACKAGES = ("torch", "numpy", "pytest", "hypothesis", "safetensors.torch", "triton")
MORE = {  # modules whose names begin so: what is imported as well, once, before a test runs
    "implementations/cpu/": ("numba",),
    **dict.fromkeys(
        ("integrations/transformers", "model_analysis/"),
        ("transformers.models.llama.modeling_llama", "transformers.generation", "torch._dynamo"),
    ),
    "integrations/vllm/": ("vllm.entrypoints.llm", "vllm.model_executor.models.utils", "vllm.v1.attention.selector"),
}
KERNELS = (
    "codec_in",
    "hopper_codec",
    "READS",
    "CODEBOOKS",
    "UNIFORM",
    "_numbers",
    "_levels",
    "words",
)  # a codec's halves for a GPU, not specified
TUNED = "a size that the speed depends on and nothing else"
REFERENCE, LEVELS = "implementations/reference", "formats/levels/__init__"
EQUIVALENT = {  # (module, how the line begins, what is changed): why it computes the same
    **{("offload", "CHUNK_BYTES = 1 <<", change): TUNED for change in ("1 -> 2", "26 -> 25", "26 -> 27", "LShift -> RShift")},
    **{("offload", "scratch_bytes = max", change): TUNED for change in ("Mult -> Div", "min -> max")},
    ("offload", "self._worker = ThreadPoolExecutor(1", "1 -> 2"): "on a GPU alone, and checksums may be taken in any order",
    ("offload", "host = torch.tensor(numbers", "True -> False"): "on a GPU alone, where what is not pinned is copied more slowly",
    **{
        ("implementations/cpu/attend", "SMALLEST_PART = 1 <<", change): TUNED
        for change in ("1 -> 2", "17 -> 16", "17 -> 18", "LShift -> RShift")
    },
    ("integrations/vllm/backend", "super().__init_subclass__", "statement removed"): "the classes above it do nothing there",
    **{
        (f"integrations/vllm/{module}", line, "1 -> 2"): "a page is of one head, however many there are"
        for module, line in (
            ("backend", "return token_bytes(fmt.cache_spec(1"),
            ("implementation", "return token_bytes(format_of(name, self.dtype).cache_spec(1"),
            ("mla", "return token_bytes(fmt.latents(dtype).cache_spec(1"),
            ("mla", "return token_bytes(cls.format.cache_spec(1"),
        )
    },
    **{("integrations/vllm/mla", "map_ = self.paged.allocate(1", change): "pages of which none is read" for change in ("0 -> 1", "1 -> 2")},
    ("integrations/vllm/mla", "step = FullPrecisionStep(self.full_precision", "0 -> 1"): "a step that writes no row",
    ("integrations/vllm/blocks", "rows = max(config.scheduler_config", "0 -> 1"): "a table has room for a sequence anyway",
    ("integrations/vllm/blocks", "step = math.lcm(STEP", "1 -> 2"): "sixteen is a multiple of either",
    ("integrations/vllm/blocks", "cache.block_size = found.groups[0]", "0 -> 1"): "blocks beside states have as many tokens in all groups",
    ("integrations/vllm/metadata", "scheduler, sizes = config.scheduler_config", "0 -> 1"): "a step has room for a sequence anyway",
    ("integrations/vllm/metadata", "def build(self, common_prefix_len", "False -> True"): "an argument of vLLM's that nothing reads",
    ("integrations/vllm/metadata", "starts = m.query_start_loc_cpu", "1 -> 2"): "a start more than there are lengths",
    **{
        ("integrations/vllm/connectors", "found = opened.read(1024)", change): "many more bytes than a type's name has"
        for change in ("1024 -> 1023", "1024 -> 1025")
    },
    ("integrations/vllm/mixed", "if found is not None and found.density", "Gt -> GtE"): "a number of many digits, which no model meets",
    ("integrations/vllm/mla", "rows = torch.empty(1, sum(self.sizes)", "1 -> 2"): "a row that nothing reads",
    ("integrations/vllm/mla", "def do_kv_cache_update", "False -> True"): "an argument of vLLM's that nothing reads",
    ("engine/layer_config", "map_ = map_.heads(start", "Gt -> GtE"): "the first of one head is that one",
    ("engine/layer", "given = attention.sinks is None", "Is -> IsNot"): "layers are of one kind by the same rule",
    ("engine/warm_up", "found = warmup.who_serves(layer.allocate", "1 -> 2"): "pages of which none is read",
    **{
        ("engine/warm_up", line, change): "on a GPU alone"
        for line, change in (
            ("sizes = (query.shape", "2 -> 1"),
            ("sizes = (query.shape", "2 -> 3"),
            ("torch.empty(nbytes", "statement removed"),
        )
    },
    **{("integrations/vllm/connectors", "DIGITS = 16", change): "as many as tell types apart" for change in ("16 -> 15", "16 -> 17")},
    ("implementations/cpu/write", "if others[0] is codec and", "0 -> 1"): "a codec that is encoded here has a map, of one size",
    **{
        ("integrations/transformers/lazy_kv", line, "Or -> And"): "torch takes None for no keywords"
        for line in ("return super().__torch_function__", 'if func.__name__ == "to"')
    },
    ("implementations/cpu/threads", "parts = min(torch.get_num_threads()", "1 -> 2"): TUNED,
    ("implementations/cpu/attend", "out = (out / call.options.output_scale)", "448 -> 447"): "447 is stored as 448",
    ("implementations/cpu/threads", "if parts < 2:", "2 -> 1"): "one part runs in this thread either way",
    ("implementations/cpu/kernels", "count = min(ROWS", "Sub -> Add"): "rows that no query sees are unpacked, and left",
    ("implementations/cpu/kernels", "F2, F3, I1, I2 = float32", "1 -> 2"): "a kernel for any strides",
    **{
        ("implementations/cpu/sides", "planes = planes_of(bits)", change): "no codec has 7 bits; one of 8 has one plane"
        for change in ("8 -> 7", "8 -> 9")
    },
    ("implementations/cpu/sides", "patterns = torch.arange(2 **", "2 -> 3"): "patterns that no code has",
    ("implementations/cpu/write", "half = len(given[0])", "0 -> 1"): "keys and values are as many",
    ("model_analysis/statistics", "VERSION = 2", "2 -> 3"): "any number that no version before had",
    **{("policy", "whole_file.write(path, (json.dumps", change): "how a file is indented" for change in ("2 -> 3", "2 -> 1")},
    **{("model_analysis/rotation", "AT_ONCE = 1 <<", change): TUNED for change in ("1 -> 2", "14 -> 13", "14 -> 15")},
    ("model_analysis/rotation", "if rows[0].shape[1] % 2", "2 -> 1"): "halves of an odd number are not of one size",
    ("model_analysis/rotation", "embedding = [t[0] for t in", "0 -> 1"): "axes that are equal",
    ("model_analysis/rotation", "if embedding[0].ndim == 4", "Gt -> GtE"): "of one axis, which equals itself",
    ("integrations/transformers/layers", "self.places = [t.view(-1)", "16 -> 17"): TUNED,
    **{
        ("offload", line, change): "on a GPU alone"
        for line, change in (
            ("self._lanes.synchronize", "statement removed"),
            ("rows.copy_(_like(", "True -> False"),
            ("_like(rows, scratch, end - begin).copy_(rows", "True -> False"),
            ("return host.to(self.device", "True -> False"),
            ('index = self._lanes.index("store"', "0 -> 1"),
            ('index = self._lanes.index("load"', "1 -> 2"),
        )
    },
    ("implementations/cpu/threads", "others = [_pool", "Sub -> Add"): "threads that are never used",
    ("implementations/cpu/sides", "kernels.BUCKET_BITS: (maps.KEY_MEAN_BUCKET", "1 -> 2"): "62 has as many bits as 63",
    ("implementations/cpu/sides", "patterns = torch.arange(2 **", "8 -> 9"): "patterns that no code has",
    ("implementations/cpu/sides", "return None if bits in (4, 8)", "4 -> 5"): "the numbers by a table; no codec of the package has 5 bits",
    **{
        (
            "implementations/cpu/rows",
            "SMALLEST_NORMAL = f32(2.0**-14)",
            change,
        ): "sums of fp16 numbers below 2**-14 have bits for either way"
        for change in ("2.0 -> 2.5", "Pow -> Mult", "14 -> 13", "14 -> 15")
    },
    (
        "implementations/cpu/rows",
        "if abs(mapped[n, d]) < SMALLEST_NORMAL",
        "Lt -> LtE",
    ): "the smallest normal number is stored by either way",
    ("implementations/cpu/rows", "mapped[n, d] = largest if x > largest", "Gt -> GtE"): "the largest number for itself",
    (
        f"{REFERENCE}/attend",
        "scratch, decode = Scratch()",
        "Eq -> NotEq",
    ): "says which calls keep their masks for the next one, which then are the same",
    (f"{REFERENCE}/attend", "scratch, decode = Scratch()", "0 -> 1"): "likewise",
    (f"{REFERENCE}/attend", "if decode and kept is None", "Is -> IsNot"): "what is not kept is worked out anew",
    (
        f"{REFERENCE}/plan",
        "if even and (e - s == 1",
        "Or -> And",
    ): "the rows of a rectangle are then found by their numbers, not by a slice",
    (f"{REFERENCE}/plan", "keys = max(0, *seen_until)", "0 -> 1"): "a tile of one key that no query sees gives what is there already",
    (f"{REFERENCE}/write", "return offset * (side.meta", "1 -> 2"): "signed codecs have one field of metadata",
    (
        "reads",
        "if begin < end and begin <= last",
        "LtE -> Lt",
    ): "the one key that is left out, the last query's own, is in the other interval",
    ("reads", "if begin < end and begin <= last", "Lt -> LtE"): "a range of one key that is a query's own, which sees it anyway",
    ("reads", "intervals.append((max(begin, back)", "1 -> 2"): "the key behind a range is past the last one, or its own query sees it",
    ("formats/trellis/search", "target = target[:, :, None].expand", "condition turned"): "one way alone is open before the first code",
    ("implementations/batches", "return next(name for name", "1 -> 2"): "more queries than memory holds",
    ("implementations/batches", "return next(name for name", "62 -> 63"): "more queries than memory holds",
    ("implementations/cpu/attend", "mapped = (q * scale).unflatten", "USub removed"): "of four dimensions the last two begin at 2",
    ("implementations/batches", "if call.batch.lengths is None or", "Is -> IsNot"): "on a CPU, where this runs, the device alone decides",
    ("implementations/batches", "return own.clone() if own.data_ptr()", "Mod -> FloorDiv"): "a copy more, of the same numbers",
    ("packing", "if count > 2:", "2 -> 1"): "of two planes none is between",
    ("packing", "if word_bytes > 1:", "Gt -> GtE"): "a word of one byte goes the long way",
    ("packing", "fields = codes.to", "4 -> 3"): "words of 3 bytes are then held in 64 bits",
    ("implementations/batches", "return next(name for name", "62 -> 61"): "more queries than memory holds",
    ("packing", "word, *others = values.to", "Lt -> LtE"): "no width has words of 4 bytes",
    ("packing", "if word_bytes > 1:", "1 -> 2"): "no width has words of 2 bytes",
    (
        "formats/int8/__init__",
        "return x / (torch.full_like",
        "condition turned",
    ): "on a CPU both divide; on a GPU one multiplies by the reciprocal",
    ("formats/int8/__init__", "return round_half_away(y", "127 -> 128"): "no quotient passes 127.5: the scale is of the largest number",
    ("formats/fp8/__init__", "def plain_fp8(", "False -> True"): "says what the Hopper kernel reads",
}


class Mutant(NamedTuple):
    """A module with one change: `source` in place of its own, in line `line`."""

    line: int
    text: str
    change: str
    source: str


COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
NAMES = {  # methods and functions for their opposites
    "amin": "amax",
    "amax": "amin",
    "argmin": "argmax",
    "argmax": "argmin",
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "clamp_min": "clamp_max",
    "clamp_max": "clamp_min",
    "addcmul_": "addcdiv_",
    "zeros_like": "ones_like",
    "cumsum": "cumprod",
    "abs": "neg",
    "sqrt": "abs",
    "square": "abs",
    "trunc": "ceil",
}


def _changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """What may be done to a node: in words, and a function that does it in place or returns another node."""

    def put(name: str, value: Any) -> Any:
        return lambda n: setattr(n, name, value)

    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            other = COMPARISONS[type(op)]
            yield f"{type(op).__name__} -> {other.__name__}", lambda n, i=i, other=other: n.ops.__setitem__(i, other())
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        other = OPERATORS[type(node.op)]
        yield f"{type(node.op).__name__} -> {other.__name__}", put("op", other())
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} -> {other.__name__}", put("op", other())
    elif isinstance(node, ast.UnaryOp):
        yield f"{type(node.op).__name__} removed", lambda n: n.operand
    elif isinstance(node, (ast.IfExp, ast.If)):
        yield "condition turned", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", put("value", not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield f"{node.value} -> {node.value + 1}", put("value", node.value + 1)
        if node.value > 1:
            yield f"{node.value} -> {node.value - 1}", put("value", node.value - 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield f"{node.value} -> {node.value * 1.25}", put("value", node.value * 1.25 if node.value else 1.0)
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield f"{node.attr} -> {NAMES[node.attr]}", put("attr", NAMES[node.attr])
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield f"{node.id} -> {NAMES[node.id]}", put("id", NAMES[node.id])
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "statement removed", lambda n: ast.Pass()
    elif isinstance(node, ast.Break):
        yield "break removed", lambda n: ast.Pass()


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """What runs: no docstrings, annotations, imports, decorators, or words of an error."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for part in (*node.decorator_list, getattr(node, "returns", None)):
                skipped |= {id(n) for n in ast.walk(part)} if part is not None else set()
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            skipped |= {id(n) for n in ast.walk(node.annotation)}
        if isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr)):
            skipped |= {id(n) for n in ast.walk(node)}
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped |= {id(node), id(node.value)}
        targets = [node.func] if isinstance(node, ast.Call) else node.targets if isinstance(node, ast.Assign) else []
        names = [getattr(target, "id", None) for target in targets] + [getattr(node, "name", None)]
        if any(name in KERNELS for name in names):
            skipped |= {id(n) for n in ast.walk(node)}
    return (node for node in ast.walk(tree) if id(node) not in skipped)


class _Replace(ast.NodeTransformer):
    """Does one change to the node at one place of the walk."""

    def __init__(self, target: ast.AST, change: Any) -> None:
        self.target, self.change = target, change

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self.target:
            return self.change(node) or node
        return self.generic_visit(node)


def mutants_of(path: Path) -> list[Mutant]:
    text = path.read_text()
    lines, tree = text.splitlines(), ast.parse(text)
    found = []
    for index, node in enumerate(_nodes(tree)):
        for which, (change, _) in enumerate(_changes(node)):
            other = copy.deepcopy(tree)
            target = list(_nodes(other))[index]
            changed = _Replace(target, list(_changes(target))[which][1]).visit(other)
            found.append(Mutant(node.lineno, lines[node.lineno - 1].strip(), change, ast.unparse(ast.fix_missing_locations(changed))))
    return found


class _Planted(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds one module with other source than its file's."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self.name, self.path, self.source = name, path, source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        places = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        spec = importlib.util.spec_from_loader(fullname, self, origin=str(self.path), is_package=places is not None)
        spec.has_location = True
        if places:
            spec.submodule_search_locations = places
        return spec

    def get_source(self, fullname: str) -> str:
        return self.source


def _run(tests: str, name: str, path: Path, source: str | None) -> int:
    """The tests' exit status, in a process that was forked for them."""
    if source is not None:
        sys.meta_path.insert(0, _Planted(name, path, source))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1), os.dup2(quiet, 2)
    import hypothesis
    import pytest

    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # a failure need not be made small
    hypothesis.settings.register_profile("mutants", database=None, phases=phases, deadline=None, derandomize=True)
    hypothesis.settings.load_profile("mutants")
    return int(pytest.main([*tests.split(), "-x", "-q", "-p", "no:cacheprovider"]))


def is_known(module: str, mutant: Mutant) -> bool:
    """Whether it computes the same, for a reason that is written down."""
    return any(module == m and mutant.text.startswith(line) and mutant.change == change for m, line, change in EQUIVALENT)


def survives(tests: str, module: str, source: str | None, limit_s: float) -> bool:
    """limit_s: of processor time, so that a busy machine kills no mutant; a process that sleeps is given ten times as long."""
    path = SOURCE / f"{module}.py"
    name = ".".join(["quantkv", *module.removesuffix("/__init__").split("/")])
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s),) * 2)
        code = 70
        try:
            code = _run(tests, name, path, source)
        finally:
            os._exit(code)
    end = time.monotonic() + 10 * limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="such as reads, or a folder such as formats; all if none is named")
    parser.add_argument("--sample", type=int, default=30, help="mutants of each module; 0: all")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--json", metavar="FILE", help="write what survived, and the scores, there")
    given = parser.parse_args()
    modules = [] if given.modules else list(TESTS)
    for asked in given.modules:
        named = [module for module in TESTS if module == asked or module.startswith(f"{asked.rstrip('/')}/")]
        if not named:
            parser.error(f"{asked}: one of {', '.join(TESTS)}, or a folder of them")
        modules += named
    os.chdir(ROOT)
    os.environ |= {"TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "QUANTKV_VLLM_SUITE": "1"}
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    for package in PACKAGES:
        importlib.import_module(package)
    for begins, packages in MORE.items():
        asked = [module for module in modules if module.startswith(begins)]
        if asked and not importlib.util.find_spec(packages[0].split(".")[0]):
            print(f"{begins}: left out, {packages[0].split('.')[0]} is not in this environment", file=sys.stderr)
            modules = [module for module in modules if module not in asked]
        elif asked:
            for package in packages:
                importlib.import_module(package)
    rows, survivors = [], []
    for module in modules:
        began = time.monotonic()
        if not survives(TESTS[module], module, None, 600):
            print(f"{module}: its tests fail without a mutant: {TESTS[module]}", file=sys.stderr)
            return 1
        limit = 3 * (time.monotonic() - began) + 20
        every = mutants_of(SOURCE / f"{module}.py")
        known = [m for m in every if not is_known(module, m)]
        chosen = known if not given.sample else random.Random(given.seed).sample(known, min(given.sample, len(known)))
        killed = 0
        for mutant in sorted(chosen):
            if survives(TESTS[module], module, mutant.source, limit):
                survivors.append((module, *mutant[:3]))
                print(f"survived: {module}.py:{mutant.line}: {mutant.change}: {mutant.text[:LINE]}", flush=True)
            else:
                killed += 1
        rows.append((module, len(every), len(every) - len(known), len(chosen), killed, time.monotonic() - began))
        print(f"{module}: {killed} of {len(chosen)} died, of {len(every)} that there are ({rows[-1][-1]:.0f} s)", flush=True)
    tried, died = (sum(row[i] for row in rows) for i in (3, 4))
    print("\n| module | mutants | equivalent | tried | died | score |\n|---|--:|--:|--:|--:|--:|")
    for module, every, equivalent, chosen, killed, _ in rows:
        print(f"| `{module}` | {every} | {equivalent} | {chosen} | {killed} | {100 * killed / max(chosen, 1):.0f} % |")
    print(f"| all | {sum(r[1] for r in rows)} | {sum(r[2] for r in rows)} | {tried} | {died} | {100 * died / max(tried, 1):.1f} % |")
    if given.json:
        Path(given.json).write_text(json.dumps({"rows": rows, "survivors": survivors}, indent=1))
    return 0 if died >= 0.95 * tried else 1


if __name__ == "__main__":
    sys.exit(main())
