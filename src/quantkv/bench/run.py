"""Check, then time, every contestant at every shape."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import json
import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import quantkv

from . import timing
from .contestants import TOLERANCE, Contestant, rightly_written
from .problem import Entry, Problem, Unavailable
from .shapes import Shape

SCHEMA = 1
PREFILL_ROUNDS = 3  # it is tensor work


@dataclass
class Row:
    """One contestant at one shape.

    status: "ok"; "wrong": its error is above the tolerance, so it was not timed; "unavailable": it cannot run here or refuses
    the shape; "failed": it raised. reason: of any but "ok".
    error: relative, against float64; tolerance: the largest that is right. us: median microseconds of a call; timed: how
    ("graph", "events", "clock"). nbytes: what a call must move; gbps: nbytes over time; share: gbps over the read ceiling;
    tflops: attention's arithmetic over time. vs_16bit: how many times faster than the fastest 16-bit rival that was right.
    ceiling_gbps: of the run that the row is from.
    """

    kind: str
    shape: str
    name: str
    stores: str
    ours: bool
    status: str
    reason: str = ""
    note: str = ""
    error: float | None = None
    tolerance: float | None = None
    us: float | None = None
    timed: str = ""
    nbytes: int | None = None
    gbps: float | None = None
    share: float | None = None
    tflops: float | None = None
    vs_16bit: float | None = None
    best_16bit: str = ""
    ceiling_gbps: float | None = None


@dataclass
class Result:
    """All rows of one run. ceiling_gbps: of reads, measured in this run; None on a CPU."""

    device: str
    ceiling_gbps: float | None
    l2_bytes: int | None
    date: str
    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` writes, under the number of its schema."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        """ValueError for another version of the file."""
        values = dict(values)
        if values.pop("schema", None) != SCHEMA:
            raise ValueError(f"schema: a file of `quantkv bench` has {SCHEMA}")
        rows = [Row(**row) for row in values.pop("rows")]
        return cls(**values, rows=rows)

    def keep(self, older: Result) -> None:
        """Take over what an older run measured at other shapes; each row keeps its run's ceiling, and its ratios."""
        measured = {row.shape for row in self.rows}
        self.rows = [row for row in older.rows if row.shape not in measured] + self.rows


def empty(device: torch.device) -> Result:
    """A result without rows, with what stays the same for all of them."""
    return Result(
        device=device_name(device),
        ceiling_gbps=timing.read_ceiling_gbps(device) if device.type == "cuda" else None,
        l2_bytes=torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else None,
        date=datetime.date.today().isoformat(),
        versions=versions(),
    )


def run(
    shapes: Iterable[Shape],
    contestants: Iterable[Contestant],
    device: torch.device,
    on_row: Callable[[Row], None] = lambda row: None,
    takes_part: Callable[[Shape, Contestant], bool] = lambda shape, contestant: True,
    result: Result | None = None,
) -> Result:
    """Every contestant that serves a shape's kind and takes part there, on the same inputs. on_row: called with each row as soon
    as it is there. result: takes the rows, those of an interrupted run too; `empty(device)` if None."""
    contestants = list(contestants)
    result = result or empty(device)
    for shape in shapes:
        problem = Problem(shape, device)
        rows = []
        try:
            for contestant in contestants:
                if shape.kind in contestant.kinds and takes_part(shape, contestant):
                    row = _measure(problem, contestant, result.ceiling_gbps)
                    rows.append(row)
                    on_row(row)
        finally:
            _compare(rows)
            result.rows += rows
        del problem
        _free(device)  # once a shape: it takes longer than many a measurement
    return result


def _measure(problem: Problem, contestant: Contestant, ceiling_gbps: float | None) -> Row:
    shape = problem.shape
    row = Row(shape.kind, str(shape), contestant.name, contestant.stores, contestant.ours, "ok", ceiling_gbps=ceiling_gbps)
    try:
        entry = contestant.prepare(problem)
        row.note, row.nbytes = entry.note, entry.nbytes
        error, row.tolerance = check(problem, contestant, entry)
        row.error = error if math.isfinite(error) else None  # JSON has no infinity
        if not error <= row.tolerance:
            row.status, row.reason = "wrong", f"error {error:.3g} above {row.tolerance:g}: not timed"
            return row
        rounds = PREFILL_ROUNDS if shape.kind == "prefill" else 1
        row.us, row.timed = timing.measure(entry.call, problem.device, entry.graph, rounds)
    except Exception as error:  # a rival's failure, whatever it is, must not end the run
        refused = isinstance(error, (Unavailable, ValueError, NotImplementedError))
        row.status = "unavailable" if refused else "failed"
        row.reason = " ".join(f"{'' if refused else type(error).__name__ + ': '}{error}".split())[:300]
        if not refused:
            error.__traceback__ = entry = None  # what it allocated
            _free(problem.device)
        return row
    row.gbps = row.nbytes / row.us / 1e3
    row.share = row.gbps / ceiling_gbps if ceiling_gbps else None
    row.tflops = shape.flops / row.us / 1e6 if shape.L else None
    return row


def check(problem: Problem, contestant: Contestant, entry: Entry) -> tuple[float, float]:
    """Relative error of one call, and the largest that is right: of a step's two the one that is nearer to it."""
    out, kind, found = entry.call(), problem.shape.kind, []
    if kind in ("write", "step"):
        found.append((problem.write_error(entry, rightly_written(problem, contestant.stores)), TOLERANCE["write"]))
    if kind != "write":
        found.append((problem.attention_error(entry, out), TOLERANCE[contestant.arithmetic]))
    return max(found, key=lambda pair: pair[0] / pair[1])


def _compare(rows: list[Row]) -> None:
    """Set each row's ratio to the fastest right 16-bit rival of the shape."""
    rivals = [r for r in rows if r.us and not r.ours and r.stores in ("bf16", "fp16")]
    if rivals:
        best = min(rivals, key=lambda r: r.us)
        for row in rows:
            row.best_16bit = best.name
            row.vs_16bit = best.us / row.us if row.us else None


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    """The GPU's name as its driver has it, or "CPU" and its kind."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.processor() or platform.machine()})"


def versions() -> dict[str, str]:
    """Versions of what was measured, and of what it ran on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    found["quantkv"] = quantkv.__version__
    for name in ("triton", "flash-attn", "flash-attn-3", "flash-attn-4", "flashinfer-python"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def save_rows(path: Path, device: torch.device, rows: Sequence[Mapping[str, Any]], **about: Any) -> None:
    """Write what a script of `benchmarks/` measured as JSON: the device, the versions, what else is said, and the rows."""
    figures = {"device": device_name(device), "versions": versions(), **about, "rows": rows}
    path.write_text(json.dumps(figures, indent=1) + "\n")
