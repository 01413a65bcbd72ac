"""Loss against bytes: every format a labelled point."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .eval import FormatResult, Result

EXACT = 1e-7  # nats; a smaller KL is the rounding of the arithmetic, not of the cache
FRONT, BEHIND, GRID = "#0b6e99", "#9aa5b1", "#e4e7eb"
# Places for a label around its point, in points, nearest first.
PLACES = [
    (round(radius * dx), round(radius * dy))
    for radius in (8, 13, 20, 30, 42, 56)
    for dx, dy in ((1, 0), (1, 0.6), (1, -0.6), (0.6, 1), (0.6, -1), (-1, 0), (-1, 0.6), (-1, -0.6), (-0.6, 1), (-0.6, -1), (0, 1), (0, -1))
]
LEADER = 15  # points: from here on a line joins a label to its point


def front(formats: list[FormatResult]) -> list[FormatResult]:
    """The formats that no other beats in both bytes and KL, largest first."""
    best: list[FormatResult] = []
    for r in sorted(formats, key=lambda r: (r.bytes_per_token, r.comparison.kl)):
        if not best or r.comparison.kl < best[-1].comparison.kl:
            best.append(r)
    return best[::-1]


def draw(path: Path, result: Result, model: str, text: str) -> None:
    """Write KL (log) against bytes a token (log) to `path`, PNG or SVG by its ending.

    An exact format, whose KL is 0, sits hollow on the floor. One whose KL is not finite is left out.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    formats = [r for r in result.formats if math.isfinite(r.comparison.kl)]
    if not formats:
        raise ValueError(f"--plot {path}: no format has a finite KL")
    measurable = [r.comparison.kl for r in formats if r.comparison.kl > EXACT]
    floor = min(measurable, default=1e-4) / 4
    heights = {id(r): r.comparison.kl if r.comparison.kl > EXACT else floor for r in formats}
    best = front(formats)

    figure = Figure(figsize=(9, 6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: nothing global changes, and no display is needed
    axes = figure.add_subplot()
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bytes a token (K and V, all layers)",
        ylabel="KL to the exact cache (nats a token; lower is better)",
    )
    axes.set_title("What each KV-cache format costs\n", loc="left", fontweight="bold", fontsize=13)
    axes.text(
        0,
        1.02,
        f"{model}, {text}: {result.tokens:,} tokens in contexts of {result.context:,}; beside a name: change of perplexity",
        transform=axes.transAxes,
        color="#52606d",
        fontsize=9,
    )
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.plot(
        [r.bytes_per_token for r in best],
        [heights[id(r)] for r in best],
        color=FRONT,
        linewidth=1,
        alpha=0.35,
        label="best for their size",
        zorder=1,
    )
    for r in formats:
        exact = r.comparison.kl <= EXACT
        axes.scatter(
            r.bytes_per_token,
            heights[id(r)],
            s=38,
            zorder=3,
            linewidth=1.3,
            color="white" if exact else FRONT if r in best else BEHIND,
            edgecolor=FRONT if r in best else BEHIND,
        )
    sizes = sorted({r.bytes_per_token for r in formats})
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)
    axes.set_ylim(floor / 1.6, max([*measurable, floor * 10]) * 3)
    axes.set_xticks(_spread(sizes))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    if len(best) > 1:
        axes.legend(frameon=False, loc="upper right")
    _label(figure, axes, formats, heights, best)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _spread(sizes: list[float], ratio: float = 1.16) -> list[float]:
    """The sizes, without those too close to the one before for their tick labels."""
    ticks: list[float] = []
    for size in sizes:
        if not ticks or size / ticks[-1] > ratio:
            ticks.append(size)
    return ticks


def _label(figure: Any, axes: Any, formats: list[FormatResult], heights: dict[int, float], best: list[FormatResult]) -> None:
    """Put each name where it covers no point, no other name and no edge, and the front's line only if it must."""
    from matplotlib.path import Path as Line
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # fixes the layout, so that data and pixels correspond
    figure.set_layout_engine("none")
    scale = figure.dpi / 72
    centre = {id(r): axes.transData.transform((r.bytes_per_token, heights[id(r)])) for r in formats}
    taken = [Bbox.from_bounds(x - 4 * scale, y - 4 * scale, 8 * scale, 8 * scale) for x, y in centre.values()]
    if legend := axes.get_legend():
        taken.append(legend.get_window_extent())
    line = Line([centre[id(r)] for r in best])
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
            f"{r.format}  {_percent(r)}",
            (r.bytes_per_token, heights[id(r)]),
            PLACES[0],
            fontsize=9,
            textcoords="offset points",
            color="#1f2933" if r in best else "#616e7c",
            zorder=4,
        )
        for r in formats
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


def _percent(r: FormatResult) -> str:
    if r.comparison.kl <= EXACT:
        return "exact"
    return f"{round(r.comparison.perplexity_change, 1) + 0.0:+.1f} %"  # + 0.0: no "-0.0"
