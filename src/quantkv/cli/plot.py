"""Loss against bytes: every format a labelled point."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .report import title

EXACT = 1e-7  # nats; a smaller KL is the rounding of the arithmetic, not of the cache
FRONT, BEHIND, GRID = "#0b6e99", "#9aa5b1", "#e4e7eb"
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
    figure = loss_figure(run, rows)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def loss_figure(run: dict[str, Any], rows: list[dict[str, Any]]) -> Any:
    """KL against bytes, standard errors as bars."""
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
        xlabel="bytes a token and kv head (K and V, exact tokens at their share)",
        ylabel="KL to the exact cache (nats a token; lower is better)",
    )
    axes.set_title("What each KV-cache format costs\n", loc="left", fontweight="bold", fontsize=13)
    axes.text(0, 1.02, f"{title(run)}; beside a name: change of perplexity", transform=axes.transAxes, color="#52606d", fontsize=9)
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.plot(
        [row["bytes_per_head"] for row in best],
        [heights[id(row)] for row in best],
        color=FRONT,
        linewidth=1,
        alpha=0.35,
        label="best for their size",
        zorder=1,
    )
    for row in rows:
        exact, color = row["kl"] <= EXACT, FRONT if row in best else BEHIND
        at = row["bytes_per_head"], heights[id(row)]
        error = row.get("kl_error")
        if error is not None and math.isfinite(error) and not exact:
            low = min(error, 0.9 * at[1])  # a logarithm has no place for 0
            axes.errorbar(*at, yerr=[[low], [error]], color=color, linewidth=1, alpha=0.6, zorder=2)
        axes.scatter(*at, s=38, zorder=3, linewidth=1.3, color="white" if exact else color, edgecolor=color)
    sizes = sorted({row["bytes_per_head"] for row in rows})
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)
    axes.set_ylim(floor / 1.6, max([*measurable, floor * 10]) * 3)
    axes.set_xticks(_spread(sizes))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    if len(best) > 1:
        axes.legend(frameon=False, loc="upper right")
    _label(figure, axes, rows, heights, best)
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
