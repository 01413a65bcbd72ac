"""What a run shows: rows of cells, for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from .run import Result, Row
from .shapes import KINDS, Shape

HEADERS = ("implementation", "stores", "us", "GB/s", "of ceiling", "x 16-bit", "error")
TITLES = {
    "decode": "Decode: one query a sequence",
    "verify": "Verify: a few queries a sequence",
    "step": "Step: the new token written, then decode",
    "write": "Write",
    "prefill": "Prefill: many queries over a cache",
}


def grouped(result: Result) -> list[tuple[str, list[Row]]]:
    """Rows of each shape, fastest first, what was not timed last; kinds in their order."""
    by_shape: dict[str, list[Row]] = {}
    for row in result.rows:
        by_shape.setdefault(row.shape, []).append(row)
    groups = sorted(by_shape.items(), key=lambda group: KINDS.index(group[1][0].kind))
    return [(shape, sorted(rows, key=lambda r: (r.us is None, r.us or 0))) for shape, rows in groups]


def headers(kind: str) -> tuple[str, ...]:
    """A prefill is bound by arithmetic: its third number is TFLOP/s."""
    return tuple("TFLOP/s" if kind == "prefill" and h == "GB/s" else h for h in HEADERS)


def cells(row: Row) -> tuple[str, ...]:
    """One row as text; what was not timed says why in place of its time."""
    name = f"{row.name} ({row.note})" if row.note else row.name
    error = "" if row.error is None else f"{row.error:.1e}"
    if row.us is None:
        return name, row.stores, f"{row.status}: {row.reason}", "", "", "", error
    rate = number(row.tflops if row.kind == "prefill" else row.gbps)
    share = "" if row.share is None or row.kind == "prefill" else f"{row.share:.0%}"
    ratio = "" if row.vs_16bit is None else f"{row.vs_16bit:.2f}"
    return name, row.stores, microseconds(row.us), rate, share, ratio, error


def microseconds(us: float) -> str:
    """A time as a table shows it, with one decimal below 100."""
    return f"{us:,.1f}" if us < 100 else f"{us:,.0f}"


def number(x: float) -> str:
    """A figure as a table shows it, to three digits below 100."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def subtitle(result: Result) -> str:
    """What a run was made on: device, its read ceiling, versions, date."""
    ceiling = f", reads at most {result.ceiling_gbps:,.0f} GB/s" if result.ceiling_gbps else ", small shapes"
    return f"{result.device}{ceiling}; " + ", ".join(f"{k} {v}" for k, v in result.versions.items()) + f"; {result.date}"


def floor_us(row: Row) -> float | None:
    """Microseconds in which this GPU reads the row's bytes."""
    return row.nbytes / row.ceiling_gbps / 1e3 if row.ceiling_gbps and row.nbytes else None


def markdown(result: Result) -> str:
    """Every row that was timed, a table for each shape."""
    lines = [subtitle(result), ""]
    for shape, rows in grouped(result):
        head = headers(rows[0].kind)
        lines += [f"**{TITLES[rows[0].kind]}, {shape}**", "", _line(head), _line(["---", "---", *["--:"] * (len(head) - 2)])]
        lines += [_line(cells(r)) for r in rows if r.us is not None]
        lines.append("")
    return "\n".join(lines)


def summary(result: Result, shapes: Iterable[str] | None = None) -> str:
    """Microseconds, a line for each implementation and a column for each shape (decode and verify if None); in brackets the
    share of the read ceiling."""
    read = [shape for shape, rows in grouped(result) if rows[0].kind in ("decode", "verify")]
    chosen = read if shapes is None else [str(Shape.parse(s)) for s in shapes]
    at = {(r.name, r.stores, r.shape): r for r in result.rows if r.us is not None and r.shape in chosen}
    names = list(dict.fromkeys((r.name, r.stores, r.ours) for r in at.values()))
    lines = [_line(["", *chosen]), _line(["---", *["--:"] * len(chosen)])]
    for name, stores, ours in sorted(names, key=lambda n: n[2]):
        found = [at.get((name, stores, shape)) for shape in chosen]
        label = f"**{name} {stores}**" if ours else f"{name} {stores}"
        lines.append(_line([label, *("" if r is None else _brief(r) for r in found)]))
    return "\n".join(lines)


def _brief(row: Row) -> str:
    return microseconds(row.us) + (f" ({row.share:.0%})" if row.share else "")


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"
