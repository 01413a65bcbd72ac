"""Loss against bytes, every format a labelled point; what is found by depth; what each layer loses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .report import number, title

EXACT = 1e-7  # nats; a smaller KL is the rounding of the arithmetic, not of the cache
LINES = ("#b42318", "#c77700", "#0b6e99", "#1b7f4b", "#6b4fa0", "#52606d")
BEST, BEHIND, GRID = "#0b6e99", "#9aa5b1", "#e4e7eb"
# Places for a label around its point, in points, nearest first.
PLACES = [
    (round(radius * dx), round(radius * dy))
    for radius in (8, 13, 20, 30, 42, 56)
    for dx, dy in ((1, 0), (1, 0.6), (1, -0.6), (0.6, 1), (0.6, -1), (-1, 0), (-1, 0.6), (-1, -0.6), (-0.6, 1), (-0.6, -1), (0, 1), (0, -1))
]
LEADER = 15  # points: from here on a line joins a label to its point


def front(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that no other beats in both bytes and KL, largest first."""
    best: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row["bytes_per_head"], row["kl"])):
        if not best or row["kl"] < best[-1]["kl"]:
            best.append(row)
    return best[::-1]


def draw(path: Path, run: dict[str, Any]) -> None:
    """Write KL (log) against bytes (log) to `path`, PNG or SVG by its ending: of a run as `report.table` takes it.

    An exact format, whose KL is 0, sits hollow on the floor. One whose KL is not finite is left out.
    """
    rows = [row for row in run["formats"] if row.get("kl") is not None and math.isfinite(row["kl"])]
    if not rows:
        raise ValueError(f"--plot {path}: no format has a finite KL")
    figure = loss_figure(run, rows, titled=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def loss_figure(run: dict[str, Any], rows: list[dict[str, Any]], titled: bool = False) -> Any:
    """KL against bytes, standard errors as bars. titled: it stands alone, and says what it shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    measurable = [row["kl"] for row in rows if row["kl"] > EXACT]
    floor = min(measurable, default=1e-4) / 4
    heights = {id(row): row["kl"] if row["kl"] > EXACT else floor for row in rows}
    best = front(rows)

    figure = Figure(figsize=(9, 6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: nothing global changes, and no display is needed
    axes = figure.add_subplot()
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bytes a token and kv head (K and V, full-precision tokens at their share)",
        ylabel="KL to the exact cache (nats a token; lower is better)",
    )
    if titled:
        axes.set_title("What each KV-cache format costs\n", loc="left", fontweight="bold", fontsize=13)
        axes.text(0, 1.02, f"{title(run)}; beside a name: change of perplexity", transform=axes.transAxes, color="#52606d", fontsize=9)
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.plot(
        [row["bytes_per_head"] for row in best],
        [heights[id(row)] for row in best],
        color=BEST,
        linewidth=1,
        alpha=0.35,
        label="best for their size",
        zorder=1,
    )
    for row in rows:
        exact, color = row["kl"] <= EXACT, BEST if row in best else BEHIND
        at = row["bytes_per_head"], heights[id(row)]
        error = row.get("kl_error")
        if error is not None and math.isfinite(error) and not exact:
            low = min(error, 0.9 * at[1])  # a logarithm has no place for 0
            axes.errorbar(*at, yerr=[[low], [error]], color=color, linewidth=1, alpha=0.6, zorder=2)
        axes.scatter(*at, s=38, zorder=3, linewidth=1.3, color="white" if exact else color, edgecolor=color)
    sizes = sorted({row["bytes_per_head"] for row in rows})
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)
    axes.set_ylim(min(heights.values()) / 1.8, max([*measurable, floor * 10]) * 3)
    axes.set_xticks(_spread(sizes))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    if len(best) > 1:
        axes.legend(frameon=False, loc="upper right")
    _label(figure, axes, rows, heights, best)
    return figure


def depth_figure(run: dict[str, Any]) -> Any:
    """How much of a copied passage is found: a row for each policy, a column for each depth, a panel for each length of a context."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [{"format": "exact", **run["reference"]}, *run["formats"]]
    rows = [row for row in rows if "copy" in row]
    shares = [{(c["length"], c["depth"]): c["share"] for c in row["copy"]["cells"]} for row in rows]
    lengths = sorted({length for cells in shares for length, _ in cells})
    depths = sorted({depth for cells in shares for _, depth in cells})
    found = [share for cells in shares for share in cells.values() if share is not None and math.isfinite(share)]
    least = min(80, 10 * int(min(found, default=0) // 10))  # where the colours begin: the bar says so
    width = 2.2 + len(lengths) * max(0.75 * len(depths), 2.2)
    figure = Figure(figsize=(width, 1.5 + 0.34 * len(rows)), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(lengths), squeeze=False, sharey=True)[0]
    for axes, length in zip(panels, lengths):
        values = [[number(cells.get((length, depth))) for depth in depths] for cells in shares]
        image = axes.imshow(values, vmin=least, vmax=100, cmap="YlGnBu", aspect="auto")
        axes.set_title(f"contexts of {length:,}", fontsize=10)
        axes.set_xticks(range(len(depths)), [f"{100 * depth:.0f}" for depth in depths], fontsize=9)
        axes.set_xlabel("depth, % (0: first)", fontsize=9)
        axes.set_yticks(range(len(rows)), [row["format"] for row in rows], fontsize=9)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                if math.isfinite(value):
                    axes.text(
                        x,
                        y,
                        f"{value:.0f}",
                        ha="center",
                        va="center",
                        fontsize=9,
                        color="white" if value > 0.55 * (100 - least) + least else "#1f2933",
                    )
    bar = figure.colorbar(image, ax=panels, shrink=0.9, pad=0.02, format="%.0f", ticks=range(least, 101, 5 if least >= 60 else 20))
    bar.set_label("found, %", fontsize=9)
    bar.outline.set_visible(False)
    return figure


def sensitivity_figure(tuned: dict[str, Any]) -> Any:
    """KL (log) by layer of keys alone and of values alone, a line for each format; filled marks are what was chosen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    layers = tuned["layers"]
    for axes, side, what in zip(figure.subplots(2, 1, sharex=True, sharey=True), ("k", "v"), ("keys", "values")):
        for color, (name, losses) in zip(LINES * len(tuned["kl"][side]), tuned["kl"][side].items()):
            axes.plot(layers, losses, color=color, linewidth=1.2, marker="o", markersize=4.5, markerfacecolor="white", label=name, zorder=2)
            chosen = [(layer, loss) for layer, loss, kept in zip(layers, losses, tuned["chosen"][side]) if kept == name]
            axes.scatter(*zip(*chosen), s=26, color=color, zorder=3) if chosen else None
        axes.set(yscale="log", ylabel="KL, nats a token")
        axes.set_title(f"{what} of one layer alone", loc="left", fontsize=10)
        axes.grid(True, which="major", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("layer (filled: chosen)")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.32), ncols=len(tuned["kl"]["k"]))
    return figure


def _spread(sizes: list[float], ratio: float = 1.16) -> list[float]:
    """The sizes, without those too close to the one before for their tick labels."""
    ticks: list[float] = []
    for size in sizes:
        if not ticks or size / ticks[-1] > ratio:
            ticks.append(size)
    return ticks


def _label(figure: Any, axes: Any, rows: list[dict[str, Any]], heights: dict[int, float], best: list[dict[str, Any]]) -> None:
    """Put each name where it covers no point, no other name and no edge, and the front's line only if it must."""
    from matplotlib.path import Path as Line
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # fixes the layout, so that data and pixels correspond
    figure.set_layout_engine("none")
    scale = figure.dpi / 72
    centre = {id(row): axes.transData.transform((row["bytes_per_head"], heights[id(row)])) for row in rows}
    taken = [Bbox.from_bounds(x - 4 * scale, y - 4 * scale, 8 * scale, 8 * scale) for x, y in centre.values()]
    if legend := axes.get_legend():
        taken.append(legend.get_window_extent())
    line = Line([centre[id(row)] for row in best])
    inside = axes.get_window_extent()

    def at(label: Any, place: tuple[int, int]) -> Any:
        dx, dy = place
        label.set_position(place)
        label.set(ha="left" if dx > 0 else "right" if dx < 0 else "center", va="bottom" if dy > 0 else "top" if dy < 0 else "center")
        return label.get_window_extent().padded(1.5 * scale)

    def cost(label: Any, place: tuple[int, int], others: list[Any]) -> float:
        box = at(label, place)
        outside = not (inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1))
        return math.hypot(*place) + 1000 * (box.count_overlaps(others) + outside) + 25 * line.intersects_bbox(box, False)

    labels = [
        axes.annotate(
            f"{row['format']}  {_percent(row)}",
            (row["bytes_per_head"], heights[id(row)]),
            PLACES[0],
            fontsize=9,
            textcoords="offset points",
            color="#1f2933" if row in best else "#616e7c",
            zorder=4,
        )
        for row in rows
    ]
    boxes: dict[int, Any] = {}
    for _ in range(2):  # the second round moves labels back to places that others have left
        for i, label in enumerate(labels):
            others = taken + [box for j, box in boxes.items() if j != i]
            boxes[i] = at(label, min(PLACES, key=lambda place: cost(label, place, others)))
    for label in labels:
        if math.hypot(*label.get_position()) > LEADER:
            axes.annotate(
                "",
                label.xy,
                label.get_position(),
                textcoords="offset points",
                zorder=2,
                arrowprops={"arrowstyle": "-", "color": BEHIND, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3},
            )


def _percent(row: dict[str, Any]) -> str:
    if row["kl"] <= EXACT:
        return "exact"
    return f"{round(row['perplexity_change'], 1) + 0.0:+.1f} %"  # + 0.0: no "-0.0"
