"""1,000 calls of everything public with anything, the same ones in every run (`scripts/fuzz.py` makes others), and what they found."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fuzzing import attention, command, configurations, elsewhere, files, names, refusals, rows, tables
from fuzzing.announced import Refused, announced
from fuzzing.anything import Tensor
from quantkv import PagedCache, get_format, implementations
from quantkv.calls import AttendCall
from quantkv.implementations.reference import attend as reference
from quantkv.page_table import PageTable
from quantkv.policy import Policy


@pytest.fixture(autouse=True)
def writes_nothing_here():
    with elsewhere():
        yield


def times(count):
    return settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@times(250)
@given(attention.cases())
def test_attention(case):
    attention.check(case)


@times(120)
@given(rows.cases())
def test_rows(case):
    rows.check(case)


@times(350)
@given(refusals.cases())
def test_refusals(case):
    refusals.check(case)


@times(60)
@given(names.cases())
def test_vllm_names(case):
    names.check(case)


@times(120)
@given(tables.cases())
def test_page_table(case):
    tables.check(case)


@times(80)
@given(files.cases())
def test_files(case):
    files.check(case)


@times(200)
@given(configurations.cases())
def test_configurations(case):
    configurations.check(case)


@times(20)
@given(command.cases())
def test_command_line(case):
    command.check(case)


# ---- what was found, once each


@pytest.mark.parametrize(
    "entry, argument, value",
    [
        ("dequantize", "positions", Tensor((), "int64", 70)),  # was broadcast: the key means of another bucket
        ("dequantize", "positions", Tensor((4,), "int64", -70)),  # counted from the end of the table
        ("dequantize", "positions", Tensor((4,), "float32")),
        ("dequantize", "dtype", 4),
        ("copy_pages", "target", Tensor((2,), "int64", 3)),  # one of the two sources was lost
        ("copy_pages", "source", [0, 1]),
        ("attend", "sinks", False),  # passed for a flag
        ("attend", "qq_bias", True),
        ("attend", "q", [1.0]),
        ("attend", "lengths", 3),
        ("attend", "lengths", [(1,), (1,), (1,)]),
        ("attend", "lengths", [("a", "b")] * 3),
        ("prepare_attend", "q", None),
        ("prepare_write", "key", 4),
        ("prepare_write", "value", []),
        ("PagedCache", "spec", ()),
        ("PagedCache", "maps", 1),
        ("PagedCache", "device", "nowhere"),
        ("PagedCache", "device", -(2**63) - 1),
        ("wrap", "buffer", []),
        ("wrap", "spec", None),
        ("PageStore", "caches", 1),
        ("PageStore", "caches", [1]),
        ("get_format", "dtype", []),
        ("cache_spec", "num_kv_heads", True),
        ("cache_spec", "head_size_v", 1),
        ("RowLayout", "code_bits", "4"),
        ("RowLayout", "meta", ["float32"]),
        ("LinearMap", "forward", None),
        ("LinearMap", "inverse", Tensor((0, 1, 1), "float32", 1)),
        ("LinearMap", "key_mean", Tensor((1, 1, 2), "float32", 1)),
        ("LinearMap", "hessian", Tensor((1, 1, 2), "float32", 1)),
        ("LinearMap", "forward", Tensor((1, 1, 1), "float32", float("nan"))),
        ("LayerMaps", "k", 6),
        ("LayerMaps", "v", 6),
        ("Policy", "layers", ["int4"]),
        ("Policy", "layers", {"0": "int4"}),
        ("Policy", "maps", 1),
        ("Policy", "full_precision", [16, 24]),
        ("Policy.check", "num_layers", None),
        ("unified_attention", "seqused_k", Tensor((), "int32", 2)),
        ("unified_attention", "softmax_scale", "1"),
        ("unified_attention", "chunk_lookback", "1"),
        ("unified_attention", "window_size", "11"),
        ("unified_attention", "mm_prefix_clamp_sliding_window", ()),
        ("wrap", "buffer", Tensor((0, 0, 0, 1), "int8", 1)),  # named num_blocks, which its caller does not give
        ("dequantize", "slots", Tensor((0,), "int32")),
        ("PageTable.append", "counts", Tensor((3, 1), "int8")),  # three lists of a number were taken for three numbers
        ("unified_attention", "k_scale_cache", None),
        ("unified_attention", "q", Tensor((4, 4, 0), "float32")),
        ("unified_attention", "q", Tensor((4, 4, 2), "float32")),
        ("prepare_attend", "window", Tensor((0,), "int8", 1)),  # a RuntimeError, of a tensor that is neither true nor false
        ("prepare_attend", "window", Tensor((4, 4, 4, 2), "int32", 2)),
        ("attend", "window", 2**70),  # an OverflowError
        ("attend", "sinks", Tensor((4,), "float32", float("inf"))),  # NaN by one implementation, numbers by another
    ],
)
def test_what_is_not_legal_is_refused_by_name(entry, argument, value):
    assert not refusals.ENTRIES[entry].legal[argument](value)
    refusals.check(refusals.Case(entry, argument, value))


@pytest.mark.parametrize("name", ["int4", "int2", "levels3", "trellis2"])
def test_rows_too_large_for_sums_in_float32_are_stored_as_finite_numbers(name):
    """In the butterfly two sums beyond float32 became inf - inf; and a row at the limit, divided by a scale below 1, inf."""
    cache = PagedCache(get_format(name).cache_spec(1, 64), 1, k_scale=0.5, v_scale=0.5)
    signs = 1.0 - 2 * (torch.arange(64) % 3 == 0)
    rows = torch.stack([torch.full((1, 64), 3e38), 3e38 * signs[None], torch.randn(1, 64)])
    cache.write(rows, rows, torch.arange(3))
    for side in cache.dequantize(torch.arange(3), dtype=torch.float64):
        assert side.isfinite().all() and side[:2].abs().amax() > 0


def test_caches_of_one_map_share_it():
    """Each made a copy, so that a call of both as segments was refused: the map of V was not shared."""
    maps = refusals.key_mean_map()
    assert all(cache.maps.k is maps.k for cache in (refusals.cache_of(maps=maps), refusals.cache_of("int4", maps=maps)))


def test_tokens_are_not_settled_where_the_next_one_has_no_page():
    table = PageTable(16, 1)
    table.append([64])
    table.release([40])
    for length in (16, 31, 0):
        with pytest.raises(ValueError, match=rf"lengths=\[{length}\]: the page of token {length} was given back"):
            table.settle([length])
    table.settle([32])
    assert table.append([1]) == [] and table.rows == [[-1, -1, 2, 3]]


@pytest.mark.parametrize(
    "content, match",
    [
        ("[" * 100_000, "policy='.*kept.json'"),  # Python gives up on it with an error of its own
        ('{"policy_version": 1, "format": "int4", "layers": {"1-": "int8"}}', "policy.layers=1-: a number"),
        ('{"policy_version": 1, "format": "int4", "layers": {"0-999999999999": "int8"}}', "policy.layers=0-999999999999: .*5 digits"),
    ],
)
def test_policies_that_no_one_wrote(tmp_path, content, match):
    path = tmp_path / "kept.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=match):
        Policy.load(path)


def test_a_file_that_a_call_leaves_is_a_failure(tmp_path, monkeypatch):
    """Two were in the repository once, of the names "1" and " "."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match=r"paths that were made up: \[' '\]"), elsewhere():
        refusals.cache_of().save(" ")
    assert not list(tmp_path.iterdir()) and Path.cwd() == tmp_path


# ---- the script


@pytest.fixture
def script():
    path = Path(__file__).resolve().parents[1] / "scripts" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("fuzz", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attention_by(script, name, cases=20):
    return script.main(["--only", "attention", "--cases", str(cases), "--implementation", name])


SIMPLE = attention.Case(1, (9, 3), (2, 1), (attention.Part("int4"),))


def test_what_an_implementation_announces_is_counted_and_no_failure(script, capsys):
    """On a CPU Hopper refuses every write, so every case."""
    assert attention_by(script, "hopper") == 0
    out = capsys.readouterr().out
    assert "attention: 20 cases, 20 refused" in out and "20 cases with seed 1: 0 distinct failures, 20 refused" in out
    with pytest.raises(Refused, match="implementation='hopper': tensors are on cpu: a Hopper GPU is needed"):
        attention.check(SIMPLE, "hopper")


def test_reads_are_tried_where_an_implementation_does_not_write():
    with pytest.raises(Refused, match="implementation='prefill': 3 queries, fewer than"):
        attention.check(SIMPLE, "prefill")


def refuses(call):
    raise ValueError("implementation='reference': no such call")


def wrong(call):
    call.out.fill_(1)


@pytest.mark.parametrize("fault, found", [(refuses, "ValueError at test_fuzz.py"), (wrong, "AssertionError at attention.py")])
def test_a_planted_fault_of_an_implementation_is_found(script, capsys, monkeypatch, fault, found):
    """A refusal that `refusal` does not announce is one, in whatever words."""
    monkeypatch.setattr(reference, "run", fault)
    monkeypatch.setattr(reference, "prepare", lambda call: fault)
    assert attention_by(script, "reference", 40) == 1
    out = capsys.readouterr().out
    assert found in out and ", 0 refused" in out and "0 distinct failures" not in out


def test_auto_refuses_nothing(script, capsys, monkeypatch):
    asked = implementations.refusal
    monkeypatch.setattr(implementations, "refusal", lambda name, call: "planted" if isinstance(call, AttendCall) else asked(name, call))
    assert attention_by(script, "auto") == 1
    out = capsys.readouterr().out
    assert "implementation='auto': planted; planted" in out and "1 distinct failures, 0 refused" in out


def test_other_refusals_pass_and_nothing_stays_patched():
    asked = implementations.refusal
    for message in ("q=1: a tensor is needed", "implementation='hopper': planted"):
        with pytest.raises(ValueError, match=message), announced("hopper"):
            raise ValueError(message)
    assert implementations.refusal is asked


def test_a_bias_has_a_row_for_each_query_of_the_bound_where_it_is_not_checked_on_the_host():
    """On a GPU the bound is all that is known, and the call was refused by name."""
    for seed in range(20):
        case = replace(SIMPLE, seed=seed, bounds=("max_query_len",), options={"qq_bias": (2, 2)})
        made = attention.Made(case)
        made.device = "cuda"
        assert made.bounds() == {"max_query_len": 2}


def test_a_run_says_how_far_it_came(script, capsys, monkeypatch):
    lines = []

    class Target:
        cases, SHARE = attention.cases, 1

        @staticmethod
        def check(case, **how):
            while not lines:  # a line that is written before the first case begins counts none
                lines.extend(line for line in capsys.readouterr().err.splitlines() if "(rows" in line)

    monkeypatch.setattr(script, "EVERY", 0.01)
    monkeypatch.setitem(script.TARGETS, "rows", Target)
    assert script.main(["--only", "rows", "--cases", "3", "--seed", "7"]) == 0
    assert re.fullmatch(r"\d+ s: .*of 3 cases with seed 7 \(rows 1\), 0 refused", lines[0])
