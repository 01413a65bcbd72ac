"""Bytes against time: how far each implementation stands above what this GPU's memory allows."""

from __future__ import annotations

from pathlib import Path

from .run import Result
from .shapes import Shape
from .tables import floor_us, subtitle

LINE, GRID, TEXT = "#d64545", "#e4e7eb", "#1f2933"
MARKERS = "osD^vPX*<>ph"
BOUND_BY_BYTES = ("decode", "verify", "step", "write")


def draw(path: Path, result: Result) -> None:
    """Write time (log) against bytes (log) to `path`, PNG or SVG by its ending: a marker for each shape, a colour for each
    format, filled for quantkv's, hollow for rivals'; the line is the floor, bytes over the measured read ceiling. Prefill is
    bound by arithmetic: left out.

    ValueError where nothing was timed."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "quantkv"  # the same figures, the same file
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    rows = [r for r in result.rows if r.us is not None and r.kind in BOUND_BY_BYTES]
    if not rows:
        raise ValueError(f"--plot {path}: no decode, verify, step or write was timed")
    figure, axes = plt.subplots(figsize=(10.5, 6.5), dpi=160, layout="constrained")
    axes.set(xscale="log", yscale="log", xlabel="megabytes that a call must move", ylabel="microseconds (lower is better)")
    axes.set_title("Time against the memory's floor\n", loc="left", fontweight="bold", fontsize=13)
    axes.text(0, 1.02, subtitle(result), transform=axes.transAxes, color="#52606d", fontsize=7)
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if result.ceiling_gbps:
        low, high = (f(r.nbytes for r in rows) / 1e6 for f in (min, max))
        edge = [low / 1.5, high * 1.5]
        axes.plot(
            edge,
            [mb * 1e3 / result.ceiling_gbps for mb in edge],
            color=LINE,
            linewidth=1.2,
            label=f"floor: {result.ceiling_gbps:,.0f} GB/s",
        )
    shapes = list(dict.fromkeys((r.kind, r.shape) for r in rows))
    marker = {shape: MARKERS[i % len(MARKERS)] for i, (_, shape) in enumerate(shapes)}
    formats = list(dict.fromkeys(r.stores for r in rows))
    colour = {name: plt.get_cmap("tab20")(i % 20) for i, name in enumerate(formats)}
    for r in sorted(rows, key=lambda r: r.ours):
        axes.scatter(
            r.nbytes / 1e6,
            r.us,
            s=34,
            marker=marker[r.shape],
            linewidth=1.1,
            edgecolor=colour[r.stores],
            color=colour[r.stores] if r.ours else "white",
            zorder=4 if r.ours else 3,
        )
    for kind, shape in shapes:
        axes.scatter([], [], s=34, marker=marker[shape], color=TEXT, label=f"{kind} {shape}")
    for name in formats:
        axes.scatter([], [], s=34, marker="s", color=colour[name], label=name)
    axes.scatter([], [], s=34, color=TEXT, label="quantkv")
    axes.scatter([], [], s=34, color="white", edgecolor=TEXT, label="rivals")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
        axis.set_minor_locator(NullLocator())
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    plt.close(figure)


def draw_growth(path: Path, result: Result) -> None:
    """Write decode time (log) against context, one sequence, and against batch size (log) to `path`; a dotted line is the floor
    of the implementation of its colour. ValueError where nothing was timed."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "quantkv"  # the same figures, the same file
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    rows = [(Shape.parse(r.shape), r) for r in result.rows if r.us is not None and r.kind == "decode"]
    if not rows:
        raise ValueError(f"{path}: no decode was timed")
    batch_length = max((s.L for s, _ in rows if s.B > 1), default=0)
    of_batch = [(s, r) for s, r in rows if s.L == batch_length]  # noqa: SIM300 (L is no constant)
    panels = (
        ("tokens of context, one sequence", "L", [(s, r) for s, r in rows if s.B == 1]),
        (f"sequences of {batch_length:,} tokens", "B", of_batch),
    )
    figure, both = plt.subplots(1, 2, figsize=(12, 5.5), dpi=160, layout="constrained", sharey=True)
    names = list(dict.fromkeys((r.name, r.stores) for _, r in rows))
    colours = {name: plt.get_cmap("tab10")(i % 10) for i, name in enumerate(names)}
    for axes, (label, letter, points) in zip(both, panels):
        axes.set(xscale="log", yscale="log", xlabel=label)
        axes.grid(True, which="major", color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        for name in names:
            line = sorted(((getattr(s, letter), r) for s, r in points if (r.name, r.stores) == name), key=lambda x: x[0])
            at = [x for x, _ in line]
            axes.plot(
                at,
                [r.us for _, r in line],
                color=colours[name],
                marker="o",
                markersize=3,
                linewidth=1.2,
                label=" ".join(name),
                linestyle="-" if any(r.ours for _, r in line) else "--",
            )
            if line and line[0][1].ceiling_gbps:
                axes.plot(at, [floor_us(r) for _, r in line], color=colours[name], linewidth=0.8, linestyle=":")
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
