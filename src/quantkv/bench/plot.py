"""Bytes against time: how far each implementation stands above what this GPU's memory allows."""

from __future__ import annotations

from pathlib import Path

from .run import Result, Row
from .shapes import Shape
from .tables import floor_us, subtitle

OURS, RIVAL, LINE, GRID, TEXT = "#0b6e99", "#9aa5b1", "#d64545", "#e4e7eb", "#1f2933"
MARKERS = "osD^vPX*<>ph"
BOUND_BY_BYTES = ("decode", "verify", "write")


def draw(path: Path, result: Result) -> None:
    """Write time (log) against bytes (log) to `path`, PNG or SVG by its ending: a marker for each shape, filled for quantkv's,
    hollow for rivals'; the line is the floor, bytes over the measured read ceiling. Prefill is bound by arithmetic: left out.

    ValueError where nothing was timed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    rows = [r for r in result.rows if r.us is not None and r.kind in BOUND_BY_BYTES]
    if not rows:
        raise ValueError(f"--plot {path}: no decode, verify or write was timed")
    figure, axes = plt.subplots(figsize=(10.5, 6), dpi=160, layout="constrained")
    axes.set(xscale="log", yscale="log", xlabel="megabytes that a call must move", ylabel="microseconds (lower is better)")
    axes.set_title("Time against the memory's floor\n", loc="left", fontweight="bold", fontsize=13)
    axes.text(0, 1.02, subtitle(result), transform=axes.transAxes, color="#52606d", fontsize=7)
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    low, high = (f(r.nbytes for r in rows) for f in (min, max))
    if result.ceiling_gbps:
        edge = [low / 1.5 / 1e6, high * 1.5 / 1e6]
        axes.plot(edge, [mb * 1e3 / result.ceiling_gbps for mb in edge], color=LINE, linewidth=1.2)
        axes.annotate(f"floor: {result.ceiling_gbps:,.0f} GB/s", (edge[1], edge[1] * 1e3 / result.ceiling_gbps), (-4, -12),
                      textcoords="offset points", ha="right", color=LINE, fontsize=9)
    shapes = list(dict.fromkeys(r.shape for r in rows))
    for i, shape in enumerate(shapes):
        marker = MARKERS[i % len(MARKERS)]
        for ours in (False, True):
            points = [r for r in rows if r.shape == shape and r.ours is ours]
            axes.scatter([r.nbytes / 1e6 for r in points], [r.us for r in points], s=34, marker=marker, linewidth=1.1,
                         color=OURS if ours else "white", edgecolor=OURS if ours else RIVAL, zorder=4 if ours else 3)
        axes.scatter([], [], s=34, marker=marker, color=TEXT, label=f"{_first(rows, shape).kind} {shape}")
    axes.scatter([], [], s=34, color=OURS, label="quantkv")
    axes.scatter([], [], s=34, color="white", edgecolor=RIVAL, label="rivals")
    for row in _labelled(rows, shapes):
        axes.annotate(row.stores if row.ours else f"{row.name} {row.stores}", (row.nbytes / 1e6, row.us), (6, -3),
                      textcoords="offset points", fontsize=7, color=OURS if row.ours else "#616e7c", zorder=5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
        axis.set_minor_locator(NullLocator())
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    plt.close(figure)


def _first(rows: list[Row], shape: str) -> Row:
    return next(r for r in rows if r.shape == shape)


def _labelled(rows: list[Row], shapes: list[str]) -> list[Row]:
    """Of the shape that moves most: the fastest of each format of ours, and the fastest rival of each."""
    largest = max(shapes, key=lambda shape: max(r.nbytes for r in rows if r.shape == shape))
    best: dict[tuple[bool, str], Row] = {}
    for row in sorted((r for r in rows if r.shape == largest), key=lambda r: r.us):
        best.setdefault((row.ours, row.stores), row)
    return list(best.values())


def draw_growth(path: Path, result: Result) -> None:
    """Write decode time (log) against context, one sequence, and against batch size (log) to `path`; a dotted line is the floor
    of the implementation of its colour. ValueError where nothing was timed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    rows = [(Shape.parse(r.shape), r) for r in result.rows if r.us is not None and r.kind == "decode"]
    if not rows:
        raise ValueError(f"{path}: no decode was timed")
    batch_length = max((s.L for s, _ in rows if s.B > 1), default=0)
    of_batch = [(s, r) for s, r in rows if s.L == batch_length]  # noqa: SIM300 (L is no constant)
    panels = (("tokens of context, one sequence", "L", [(s, r) for s, r in rows if s.B == 1]),
              (f"sequences of {batch_length:,} tokens", "B", of_batch))
    figure, both = plt.subplots(1, 2, figsize=(12, 5.5), dpi=160, layout="constrained", sharey=True)
    names = list(dict.fromkeys((r.name, r.stores) for _, r in rows))
    colours = {name: plt.get_cmap("tab20")(i % 20) for i, name in enumerate(names)}
    for axes, (label, letter, points) in zip(both, panels):
        axes.set(xscale="log", yscale="log", xlabel=label)
        axes.grid(True, which="major", color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        for name in names:
            line = sorted(((getattr(s, letter), r) for s, r in points if (r.name, r.stores) == name), key=lambda x: x[0])
            at = [x for x, _ in line]
            axes.plot(at, [r.us for _, r in line], color=colours[name], marker="o", markersize=3, linewidth=1.2,
                      label=" ".join(name), linestyle="-" if any(r.ours for _, r in line) else "--")
            if result.ceiling_gbps and line and line[0][1].ours:
                axes.plot(at, [floor_us(result, r) for _, r in line], color=colours[name], linewidth=0.8, linestyle=":")
        ticks = sorted({getattr(s, letter) for s, _ in points})
        axes.set_xticks(ticks)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    both[0].set_ylabel("microseconds of a decode (dotted: the floor)")
    both[1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(subtitle(result), fontsize=8, color="#52606d", x=0.01, ha="left")
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    plt.close(figure)
