"""The benchmark itself: what it refuses to time, what it counts, and what it writes."""

import gc
import importlib.util
import json
import lzma
import math
import sys
import weakref
import xml.etree.ElementTree as ElementTree
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quantkv.bench import contestants, cpu_rivals, plot, rivals, shapes, tables, timing, xqa
from quantkv.bench.contestants import Contestant, quantkv
from quantkv.bench.problem import Problem, Unavailable
from quantkv.bench.run import Result, Row, run
from quantkv.bench.shapes import Shape

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
SMALL = "xHQ4xHK2xD64"
DECODE, VERIFY, STEP, WRITE, PREFILL = (Shape.parse(s + SMALL) for s in ("B3xL100", "B2xL70xQ3", "B2xL70xN1", "N50", "L96xQ40"))


def is_right(shape, format_name):
    (row,) = run([shape], [quantkv("reference", format_name)], CPU).rows
    assert (row.status, row.timed, row.kind) == ("ok", "clock", shape.kind), row.reason
    assert row.us > 0 and row.error <= row.tolerance
    assert row.gbps == pytest.approx(row.nbytes / row.us / 1e3)


@pytest.mark.parametrize("shape", [DECODE, WRITE], ids=str)
def test_right_ones_are_timed(shape, format_name):
    is_right(shape, format_name)


@pytest.mark.parametrize("shape", [VERIFY, STEP, PREFILL, Shape.parse("L90xQ2xW40" + SMALL)], ids=str)
@pytest.mark.parametrize("name", ["int4", "fp8", "tq_k8v4", "levels5"])
def test_right_ones_of_every_shape_are_timed(shape, name):
    is_right(shape, name)


@pytest.mark.parametrize("shape", [DECODE, STEP, WRITE, PREFILL], ids=str)
def test_maps_of_a_layer_s_own(shape):
    """Offsets at their own positions, or the answer would be another: they are as large as the keys."""
    (row,) = run([shape], [quantkv("reference", "int4+maps")], CPU).rows
    assert row.status == "ok", row.reason
    (row,) = run([shape], [quantkv("reference", "int4+something")], CPU).rows
    assert row.status == "unavailable" and "'+maps'" in row.reason


def spoil(contestant, change):
    """The contestant with `change` done to what a call returns."""

    def prepare(problem):
        entry = contestant.prepare(problem)
        return entry._replace(call=lambda: change(problem, entry.call()))

    return replace(contestant, prepare=prepare)


def without(position):
    """Attention that does not look at one key of each sequence."""

    def prepare(problem):
        key = problem.key.view(-1, problem.length, *problem.key.shape[1:])
        key[:, position] = -30 * key[:, position]  # far below every other score
        entry = quantkv("reference", "bf16").prepare(problem)
        key[:, position] /= -30
        return entry._replace(rows=problem.plain_rows(torch.bfloat16))

    return Contestant("blind", "bf16", prepare)


@pytest.mark.parametrize("shape", [DECODE, VERIFY], ids=str)
@pytest.mark.parametrize(
    "wrong",
    [
        lambda p, out: out * 1.02,
        lambda p, out: out.roll(1, 1),
        lambda p, out: out.masked_fill(torch.arange(out.shape[0])[:, None, None] == len(out) - 1, math.nan),
        lambda p, out: out[:-1],
    ],
)
def test_wrong_ones_are_not(shape, wrong, monkeypatch):
    monkeypatch.setattr(timing, "measure", lambda *a, **k: pytest.fail("a wrong kernel was timed"))
    (row,) = run([shape], [spoil(quantkv("reference", "int8"), wrong)], CPU).rows
    assert row.status == "wrong" and row.us is None and row.gbps is None and row.vs_16bit is None
    assert "not timed" in row.reason


@pytest.mark.parametrize("position", [0, -1])
def test_one_lost_key_is_seen(position):
    """Of 4,096: its weight in a mean of random keys would be less than a rounding."""
    (row,) = run([Shape.parse("L4096" + SMALL)], [without(position)], CPU).rows
    assert row.status == "wrong" and row.error > 10 * row.tolerance


def test_a_write_that_skips_a_token_is_wrong():
    def prepare(problem):
        slots = problem.slots.clone()
        problem.slots[7] = -1
        entry = quantkv("reference", "int4").prepare(problem)
        entry.call()
        problem.slots.copy_(slots)
        return entry._replace(call=lambda: None)

    (row,) = run([WRITE], [Contestant("lazy", "int4", prepare)], CPU).rows
    assert row.status == "wrong" and row.us is None


@pytest.mark.parametrize("missing", ["the write", "half of it"])
def test_a_step_that_does_not_write_is_wrong(missing):
    def prepare(problem):
        spare = problem.slots[problem.new]
        if missing == "the write":
            spare = spare.fill_(-1)
        else:
            spare[0] = -1
        slots, problem.slots = problem.slots, problem.slots.clone()
        problem.slots[problem.new] = spare
        step = quantkv("reference", "int8").prepare
        entry = step(problem)
        problem.slots = slots
        return entry

    (row,) = run([STEP], [Contestant("forgetful", "int8", prepare)], CPU).rows
    assert row.status == "wrong" and row.us is None


def test_failures_and_refusals_do_not_end_the_run():
    def raises(error):
        def prepare(problem):
            raise error

        return prepare

    found = run(
        [DECODE],
        [
            Contestant("a", "bf16", raises(Unavailable("no such package"))),
            Contestant("b", "bf16", raises(RuntimeError("broken"))),
            Contestant("c", "bf16", raises(ValueError("head_size=64: no"))),
            quantkv("reference", "bf16"),
        ],
        CPU,
    ).rows
    assert [r.status for r in found] == ["unavailable", "failed", "unavailable", "ok"]
    assert [r.reason for r in found[:3]] == ["no such package", "RuntimeError: broken", "head_size=64: no"]


def test_ratio_to_the_best_16_bit_rival():
    def rival(name, stores):
        return replace(quantkv("reference", stores), name=name, ours=False)

    found = {
        r.name: r
        for r in run([DECODE], [quantkv("reference", "int4"), rival("x", "bf16"), rival("y", "bf16"), rival("z", "int8")], CPU).rows
    }
    best = min((found["x"], found["y"]), key=lambda r: r.us)
    assert best.vs_16bit == 1
    assert all(r.best_16bit == best.name and r.vs_16bit == best.us / r.us for r in found.values())


def test_bytes_and_arithmetic():
    """Against counts by hand: int4 takes 64 / 2 + 4 bytes a row; 4 heads of 64, 2 products of 2 operations."""

    def entry(shape):
        return quantkv("reference", "int4").prepare(Problem(shape, CPU))

    assert entry(DECODE).nbytes == 3 * 100 * 2 * 2 * 36
    assert entry(WRITE).nbytes == 50 * 2 * 2 * (36 + 128)
    assert entry(STEP).nbytes == 2 * 70 * 2 * 2 * 36 + 2 * 2 * 2 * (36 + 128)
    assert DECODE.flops == 4 * 4 * 64 * 300
    assert PREFILL.flops == 4 * 4 * 64 * sum(range(57, 97))
    window = Shape.parse("L90xQ2xW40" + SMALL)
    assert window.tokens_read == 41 and window.flops == 4 * 4 * 64 * 80


def test_shapes_read_as_they_are_written():
    for group in (shapes.DEFAULT, shapes.SMALL):
        for kind, some in group.items():
            assert all(s.kind == kind and Shape.parse(str(s)) == s for s in some)
    for text in ("", "B8", "L", "B8xl4", "B8xL4xL5", "L4xQ5", "L4xN4", "L8xHQ3xHK2", "B0xL4", "L4xN2"):
        with pytest.raises(ValueError, match="shape"):
            Shape.parse(text)


def test_pages_are_in_random_order():
    problem = Problem(Shape.parse("L512" + SMALL), CPU)
    table = problem.block_table[0].tolist()
    assert sorted(table) == list(range(32)) and table != sorted(table)


def test_rivals_need_a_gpu(tmp_path):
    found = run([DECODE], rivals.rivals() + rivals.rivals(tmp_path) + rivals.xqa_ways(tmp_path), CPU).rows
    assert len(found) > 10 and {r.status for r in found} == {"unavailable"}


def test_on_a_cpu_its_kernels_take_part_where_they_can_be_compiled(monkeypatch):
    monkeypatch.setattr(contestants, "missing", lambda: "the package numba is missing")
    assert contestants.implementations(CPU) == ["reference"]
    monkeypatch.setattr(contestants, "missing", lambda: None)
    assert contestants.implementations(CPU) == ["reference", "cpu"]


@pytest.mark.parametrize("shape", [DECODE, VERIFY, STEP, WRITE, PREFILL], ids=str)
def test_on_a_cpu_every_kind_has_a_16_bit_rival(shape):
    """quantkv's kernels serve all but prompts, and are compared with PyTorch over 16-bit rows."""
    ours = [quantkv(name, "int8" if shape is STEP else "int4") for name in ("cpu", "reference")]  # the reference writes a step's int8
    rows = run([shape], ours + cpu_rivals.rivals(), CPU).rows
    assert {row.status for row in rows} == {"ok"}, [row.reason for row in rows]
    names = [row.name for row in rows]
    assert names[:-1] == (["quantkv reference"] if shape is PREFILL else ["quantkv cpu", "quantkv reference"])
    assert all(row.vs_16bit == pytest.approx(rows[-1].us / row.us) and row.best_16bit == names[-1] for row in rows)


def test_what_a_16_bit_rival_writes_is_checked():
    """A rival that leaves rows out is wrong, in a write and in a step."""
    for shape in (WRITE, STEP):
        problem = Problem(shape, CPU)
        (rival,) = [c for c in cpu_rivals.rivals() if shape.kind in c.kinds]
        problem.key[problem.new[-1]] = 0  # what it writes of the last token
        entry = rival.prepare(problem)
        (row,) = run([shape], [replace(rival, prepare=lambda _, entry=entry: entry)], CPU).rows
        assert row.status == "wrong", shape


def a_result():
    """As a GPU gives it."""
    found = run(
        [DECODE, WRITE, PREFILL], [quantkv("reference", "int4"), replace(quantkv("reference", "bf16"), name="rival", ours=False)], CPU
    )
    found.ceiling_gbps = 4400.0
    for row in found.rows:
        row.share = row.gbps / found.ceiling_gbps
        row.ceiling_gbps = 4400.0
    found.rows.append(Row("decode", str(DECODE), "broken", "bf16", False, "failed", reason="RuntimeError: x"))
    return found


def test_json_and_tables(tmp_path):
    found = a_result()
    again = Result.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False)))
    assert again == found
    with pytest.raises(ValueError, match="schema"):
        Result.from_dict({**found.to_dict(), "schema": 0})
    text = tables.markdown(again)
    assert "4,400 GB/s" in text and "rival" in text and "broken" not in text
    lines = [line for line in text.splitlines() if line.startswith("| quantkv reference")]
    assert len(lines) == 3 and all(line.count("|") == 8 for line in lines)
    brief = tables.summary(again).splitlines()
    assert len(brief) == 4 and brief[0].count("|") == 3 and brief[-1].startswith("| **quantkv reference int4**")


def test_an_older_run_is_kept():
    """Rows of shapes that were measured again are replaced, others stay with their own run's figures."""
    older, newer = a_result(), a_result()
    newer.rows = [row for row in newer.rows if row.kind == "decode"]
    newer.keep(older)
    assert len(newer.rows) == len(older.rows)
    assert all((row in older.rows) == (row.kind != "decode") for row in newer.rows if row.us)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot(tmp_path, ending):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"roofline.{ending}"
    plot.draw(path, a_result())
    if ending == "png":
        assert path.read_bytes()[:4] == b"\x89PNG"
    else:
        text = "".join(ElementTree.parse(path).getroot().itertext())
        assert "megabytes" in path.read_text() or "megabytes" in text
    nothing = a_result()
    nothing.rows = []
    with pytest.raises(ValueError, match="was timed"):
        plot.draw(path, nothing)


def test_growth(tmp_path):
    pytest.importorskip("matplotlib")
    small = [Shape.parse(s + "xHQ2xHK1xD64") for s in ("L16", "L64", "B2xL64", "B4xL64")]
    found = run(small, [quantkv("reference", "int8")], CPU)
    found.ceiling_gbps = 4400.0
    plot.draw_growth(tmp_path / "growth.png", found)
    assert (tmp_path / "growth.png").read_bytes()[:4] == b"\x89PNG"
    found.rows = []
    with pytest.raises(ValueError, match="was timed"):
        plot.draw_growth(tmp_path / "growth.png", found)


def test_tolerances_are_named():
    assert {c.arithmetic for c in rivals.rivals()} <= set(contestants.TOLERANCE)


def script_of(name):
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / "benchmarks" / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    return script


def test_lengths_are_told_or_not(monkeypatch, capsys):
    """Each way answers as the reference, over even lengths and over others of the same pages; a wrong answer is said."""
    script, wrong = script_of("captured_decode"), []
    monkeypatch.setattr(script, "BATCHES", {"even": ("B4xL64xHQ4xHK1", ()), "ragged": ("B4xL64xHQ4xHK1", (160, 32, 32, 32))})
    given, choose = SimpleNamespace(format="int4", peers=None, rounds=1), script.unsplit.choose
    for name in script.BATCHES:
        row = script.of_batch(name, CPU, given, wrong, "reference")
        assert list(row["us"]) == ["told", "not told", "always split"] and min(row["us"].values()) > 0
    assert script.unsplit.choose is choose  # as it was
    assert not wrong and capsys.readouterr().out.count("always split") == 2
    problem = script.Problem(script.Shape.parse("B4xL64xHQ4xHK1"), CPU)
    lens, table = script.cut(problem, (160, 32, 32, 32))
    assert lens.tolist() == [160, 32, 32, 32] and table.shape == (4, 10)
    used = [page for row, n in zip(table.tolist(), lens.tolist()) for page in row[: n // 16]]
    assert sorted(used) == list(range(problem.num_blocks))
    monkeypatch.setattr(script, "relative_error", lambda out, expected: 0.5)
    script.of_batch("even", CPU, given, wrong, "reference")
    assert len(wrong) == 3 and "differs from the reference" in wrong[0]


def test_geometries_show_the_fastest_way_of_xqa():
    """A time for 16 and one for 8 bits, of the fastest way each; no column where there is no XQA. quantkv's ratio stays that to
    FlashAttention-3. The document's table has seven columns."""
    names, shape, other = ["Llama-3 8B", "one sequence of 4096"], "B8xL32768", "L4096"
    figures = {"gbps": 3500.0, "share": 0.8, "vs_16bit": 0.5}
    of = lambda shape, name, stores, us: Row("decode", shape, name, stores, name.startswith("quantkv"), "ok", us=us, **figures)
    result = Result("GPU", 4400.0, None, "2026-01-01", {}, [of(s, "quantkv hopper", "int4", 10.0) for s in (shape, other)])
    result.rows += [of(s, "FlashAttention-3", "bf16", 35.0) for s in (shape, other)]
    script, writer = script_of("geometries"), script_of("tables")
    for text in (script.table(names, result), writer.geometries(result)):
        assert "XQA" not in text
    result.rows += [of(shape, "XQA", "fp8", 20.0), of(shape, "XQA page 64", "fp8", 19.0), of(shape, "XQA", "bf16", 31.0)]
    result.rows += [of(shape, "XQA Hopper", "bf16", 30.0), of(shape, "XQA Hopper page 64", "bf16", None)]
    for text, head, row, other_row in (
        (
            script.table(names, result),
            "bf16, us | XQA bf16, us | XQA fp8, us |",
            "| Llama-3 8B | B8xL32768 | 35.0 | 30.0 | 19.0 | hopper int4 | 10.0 | 80% | 3.50 |  |",
            "| one sequence of 4096 | L4096 | 35.0 |  |  |",
        ),
        (
            writer.geometries(result),
            "bf16, us | XQA bf16 / fp8, us |",
            "| Llama-3 8B | B8xL32768 | 35.0 | 30.0 / 19.0 | `int4` | 10.0 (80%) | 3.50x |",
            "| one sequence of 4096 | L4096 | 35.0 |  | `int4` |",
        ),
    ):
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert head in lines[0] and len({line.count("|") for line in lines}) == 1
        assert row in lines and other_row in text
    assert lines[0].count("|") == 8
    aimed = "| one sequence of 4096 | `int4` | times FlashAttention-3 bf16's speed | 1.90x | 2.30x | 3.50x | aim |"
    assert writer.geometry_targets(result).splitlines()[2:] == [aimed]


@pytest.mark.parametrize(
    ("shape", "dtype", "hopper", "name"),
    [
        ("B8xL32768", torch.bfloat16, False, "generic-bf16-d128-g4-p64.xz"),
        ("B8xL32768", torch.bfloat16, True, "hopper-bf16-d128-g4-p64.xz"),
        ("B8xL32768xHK2xW9", torch.float8_e4m3fn, False, "hopper-fp8-d128-g16-p64-w.xz"),
        ("B8xL32768xD512", torch.float8_e4m3fn, False, "generic-fp8-d512-g4-p64.xz"),
    ],
)
def test_xqa_of_a_shape_that_was_not_compiled(tmp_path, shape, dtype, hopper, name):
    with pytest.raises(Unavailable, match=f"{name}: no such file"):
        xqa.load(tmp_path, Shape.parse(shape), dtype, 64, hopper)
    (tmp_path / name).write_bytes(lzma.compress(b"no library"))
    with pytest.raises(Unavailable, match=name):
        xqa.load(tmp_path, Shape.parse(shape), dtype, 64, hopper)


def test_documents_are_filled_from_the_figures():
    script = script_of("tables")
    found = a_result()
    target = script.Target(str(DECODE), ("int4", "int2"), "faster", 0.5, 1e9)
    ours = next(r for r in found.rows if r.stores == "int4" and r.kind == "decode")
    rival = next(r for r in found.rows if r.name == "rival" and r.kind == "decode")
    rival.name = script.FLASH3[0]
    ours.us, rival.us = 10.0, 8.0
    script.TARGETS = (target, script.Target(str(WRITE), ("int4",), "us", 1e-9, 1e-10))
    document = "a\n<!-- bench:targets -->\nold\n<!-- /bench -->\nb\n"
    filled = script.blocks(found.to_dict())
    text = script.update(document, filled)
    assert text.startswith("a\n") and text.endswith("b\n") and "old" not in text
    assert "| 0.80x | must |" in text and "| not measured |  |" in text and "**missed**" in text
    assert script.update(text, filled) == text
    other = "<!-- bench:end_to_end -->\nas it was\n<!-- /bench -->"
    assert script.update(other, filled) == other
    with pytest.raises(ValueError, match="bench:nothing"):
        script.update("<!-- bench:nothing -->\n<!-- /bench -->", filled)


class FakeCuda:
    """As much of torch.cuda as a capture asks for, without a GPU."""

    class Stream:
        def wait_stream(self, other):
            pass

    class CUDAGraph:
        replays = 0

        def replay(self):
            self.replays += 1

    stream = staticmethod(lambda stream: nullcontext())
    graph = staticmethod(lambda graph, stream: nullcontext())
    current_stream, synchronize = Stream, staticmethod(lambda: None)


def test_a_captured_call_lives_as_long_as_its_graph(monkeypatch):
    """A graph reads the tensors of what it captured and holds none of them: in `benchmarks/offload.py` the call's own were freed."""
    monkeypatch.setattr(torch, "cuda", FakeCuda)

    def captured():
        tensor = torch.zeros(3)
        return weakref.ref(tensor), timing.capture(lambda: tensor.add_(1), 2)

    tensor, graph = captured()
    replay = graph.replay
    graph.replay()
    assert graph.graph.replays == 1
    del graph
    gc.collect()
    assert tensor() is not None and tensor().tolist() == [3.0] * 3  # once before the capture, twice in it
    del replay
    gc.collect()
    assert tensor() is None
