"""Write the figures and badges of README.md, docs/how-it-works.md and docs/four-bits.md: `python scripts/figures.py`, into docs/figures/.

Plain SVG, wide as a column of text, on a ground of their own, so that they are legible in the site's dark scheme and on a telephone. What
they show of measurements comes from benchmarks/results; a test holds the files to what this writes.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from site_tables import ENGINES, SEQUENCES, front_engines, read, speed, through_cache  # noqa: E402

FOLDER = ROOT / "docs" / "figures"
WIDTH, MARGIN = 600, 24
INK, PALE, OURS, OTHERS, WARM = "#1f2933", "#e4e9ee", "#0b6e99", "#9aa5b1", "#c2571a"


# ---- SVG


def text(x: float, y: float, said: str, size: int = 15, color: str = INK, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}>{escape(said)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str = PALE, line: str = "none") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{line}"/>'


def line(x: float, y: float, to_x: float, to_y: float, color: str = INK, width: float = 1.5, dashes: str = "", arrow: bool = False) -> str:
    more = (f' stroke-dasharray="{dashes}"' if dashes else "") + (' marker-end="url(#arrow)"' if arrow else "")
    return f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{color}" stroke-width="{width:g}"{more}/>'


def dot(x: float, y: float, color: str, radius: float = 4) -> str:
    return f'<circle cx="{x:.4g}" cy="{y:.4g}" r="{radius:g}" fill="{color}"/>'


def picture(title: str, height: int, *shapes: str) -> str:
    """An SVG with a title that a screen reader says. Where a page does not say its size, it is WIDTH pixels wide."""
    tip = f'<path d="M0 0L8 4L0 8z" fill="{INK}"/>'
    arrow = f'<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">{tip}</marker>'
    size = f'width="{WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {size} font-family="system-ui, sans-serif" role="img">'
    ground = f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<defs>{arrow}</defs>", ground, *shapes, "</svg>", ""])


# ---- docs/how-it-works.md


def page() -> str:
    """A page of one kv head, its sections, and its size beside 16 bits."""
    tokens, head_size = 16, 128
    codes, meta = tokens * head_size // 2, tokens * 4
    total, exact = 2 * (codes + meta), 2 * tokens * head_size * 2
    shapes = [text(MARGIN, 34, "The block table of a sequence names its pages", bold=True)]
    for i, number in enumerate((7, 3, 12)):
        at = MARGIN + 58 * i
        shapes += [
            box(at, 48, 50, 34, OURS if i == 1 else PALE),
            text(at + 25, 71, str(number), 16, "#ffffff" if i == 1 else INK, "middle"),
        ]
    shapes += [
        line(MARGIN + 83, 86, MARGIN + 83, 112, arrow=True),
        text(MARGIN + 96, 106, f"page 3: {tokens} tokens of one kv head, in int4"),
    ]
    x, full = MARGIN, WIDTH - 2 * MARGIN
    for name, size, width, fill in (
        ("K codes", codes, 0.34, OURS),
        ("V codes", codes, 0.34, "#3d8fb3"),
        ("K meta", meta, 0.16, WARM),
        ("V meta", meta, 0.16, "#d8854f"),
    ):
        wide = width * full
        shapes += [box(x, 118, wide - 3, 58, fill), text(x + wide / 2, 142, name, 15, "#ffffff", "middle")]
        shapes.append(text(x + wide / 2, 163, f"{size:,} B", 14, "#ffffff", "middle"))
        x += wide
    shapes += [
        text(MARGIN, 200, "codes: 4 bits a number. meta: the scale and zero point of each row", 14),
        text(MARGIN, 240, "To scale: the same tokens", bold=True),
        box(MARGIN, 252, full, 26, OTHERS),
        text(MARGIN + 10, 271, f"16 bits: {exact:,} bytes", 15, "#ffffff"),
        box(MARGIN, 286, full * total / exact, 26, OURS),
        text(MARGIN + full * total / exact + 10, 305, f"int4: {total:,} bytes, compression {exact / total:.2f}x"),
    ]
    return picture("A page holds the codes and the scales of 16 tokens", 330, *shapes)


ROW = (0.4, -0.7, 0.2, 0.6, -0.3, 7.0, 0.1, -0.5, 0.8, -0.2, 0.5, -0.9, 0.3, 0.7, -0.6, -0.1)
SIGNS = (1, -1, 1, 1, -1, 1, -1, -1, 1, 1, -1, 1, -1, -1, -1, 1)


def rotated(row: Sequence[float]) -> list[float]:
    """The row with signs and under a Hadamard matrix of length one, by butterflies."""
    values, step = [x * sign for x, sign in zip(row, SIGNS)], 1
    while step < len(values):
        for i in range(len(values)):
            if not i & step:
                values[i], values[i + step] = values[i] + values[i + step], values[i] - values[i + step]
        step *= 2
    return [x / math.sqrt(len(values)) for x in values]


def four_bits(row: Sequence[float]) -> tuple[list[float], float]:
    """What the row reads back as from 4 bits with one scale and zero point, and the scale: as the format int4 says."""
    scale = (max(row) - min(row)) / 15
    zero = min(15, max(0, math.floor(-min(row) / scale + 0.5)))
    return [(min(15, max(0, math.floor(x / scale + zero + 0.5))) - zero) * scale for x in row], scale


def error(row: Sequence[float]) -> float:
    """The length of the error of `four_bits`, of the row's."""
    back, _ = four_bits(row)
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(row, back)) / sum(x * x for x in row))


def scale() -> str:
    """One row at 4 bits, as it is and rotated: the grid, the numbers, what they read back as."""
    shapes, half = [], (WIDTH - 3 * MARGIN) / 2
    for i, (title, row) in enumerate((("The row as it is", ROW), ("The row rotated", rotated(ROW)))):
        left, middle, unit = MARGIN + i * (half + MARGIN), 208, 19
        back, step = four_bits(row)
        shapes.append(text(left, 34, title, bold=True))
        zero = round(-min(row) / step)
        for code in range(16):
            y = middle - (code - zero) * step * unit
            shapes.append(line(left, y, left + half, y, PALE if code != zero else OTHERS, 1.5))
        for j, (x, y) in enumerate(zip(row, back)):
            at = left + (j + 0.5) * half / len(row)
            shapes += [line(at - 6, middle - y * unit, at + 6, middle - y * unit, WARM, 3), dot(at, middle - x * unit, OURS, 3)]
        shapes += [
            text(left, 300, f"step of the grid: {step:.2f}"),
            text(left, 322, f"error: {100 * error(row):.0f} % of the row's length"),
        ]
    shapes.append(text(MARGIN, 356, "Blue: the 16 numbers. Orange: what they read back as, at one of 16 levels.", 14))
    return picture("One large number makes the grid of a row coarse; rotation spreads it", 374, *shapes)


def window() -> str:
    """Which tokens of a sequence are read at 16 bits."""
    full, top = WIDTH - 2 * MARGIN, 118
    cells, first, latest = 36, 4, 6
    wide = full / cells
    shapes = [text(MARGIN, 34, "What attention reads of one sequence", bold=True)]
    for i in range(cells):
        exact = i < first or i >= cells - latest
        weight = 44 * (0.85 * math.exp(-i / 1.4) + math.exp(-(cells - 1 - i) / 3.2)) + 2 + 2 * (i * 7 % 5 == 0)
        at = MARGIN + i * wide
        shapes += [box(at + 2, top - 8 - weight, wide - 4, weight, OTHERS), box(at, top, wide - 2, 40, OURS if exact else PALE)]
    shapes += [
        text(WIDTH / 2, 76, "attention weight (schematic)", 14, INK, "middle"),
        text(MARGIN, top + 62, "first 16 tokens", 14, OURS, bold=True),
        text(MARGIN, top + 80, "16 bits", 14, OURS),
        text(WIDTH / 2, top + 62, "all others: 2 to 8 bits,", 14, INK, "middle"),
        text(WIDTH / 2, top + 80, "in their pages", 14, INK, "middle"),
        text(WIDTH - MARGIN, top + 62, "latest 24 to 39 tokens", 14, OURS, "end", bold=True),
        text(WIDTH - MARGIN, top + 80, "16 bits", 14, OURS, "end"),
    ]
    return picture("The first and the latest tokens are read at 16 bits", 218, *shapes)


def split() -> str:
    """Sequences cut evenly among warps, partials, and the combine."""
    lengths, warps, tile = (9, 4, 7), 4, 20
    colors = (OURS, "#3d8fb3", WARM, "#d8854f")
    share, done = sum(lengths) / warps, 0
    shapes = [text(MARGIN, 34, "Tiles of the keys of three sequences, cut evenly among four warps", bold=True)]
    partials: list[list[int]] = []
    for s, length in enumerate(lengths):
        y, of = 52 + 34 * s, []
        shapes.append(text(MARGIN, y + 17, f"sequence {s + 1}", 14))
        for i in range(length):
            warp = int(done // share)
            shapes.append(box(MARGIN + 96 + tile * i, y, tile - 2, 24, colors[warp]))
            of += [] if warp in of else [warp]
            done += 1
        partials.append(of)
    for warp in range(warps):
        at = MARGIN + 96 + 210 + (warp % 2) * 100, 62 + 34 * (warp // 2)
        shapes += [box(at[0], at[1], 18, 18, colors[warp]), text(at[0] + 25, at[1] + 14, f"warp {warp + 1}", 14)]
    y = 188
    shapes += [line(MARGIN + 150, 154, MARGIN + 150, y - 6, arrow=True), text(MARGIN + 164, 176, "online softmax in each warp", 14)]
    for s, of in enumerate(partials):
        at = MARGIN + 186 * s
        for j, warp in enumerate(of):
            shapes += [box(at + 82 * j, y, 78, 40, colors[warp]), text(at + 82 * j + 39, y + 25, "out, lse", 14, "#ffffff", "middle")]
        shapes += [line(at + 41 * len(of), y + 44, at + 41 * len(of), y + 72, arrow=True)]
        shapes += [box(at, y + 76, 82 * len(of) - 4, 34, PALE), text(at + 41 * len(of) - 2, y + 98, f"output {s + 1}", 14, INK, "middle")]
    shapes.append(text(MARGIN, y + 138, "Combine: partials of a sequence are weighted by their log-sum-exps (lse).", 14))
    return picture("Split-KV decode: warps compute partial outputs, which are combined", 346, *shapes)


# ---- docs/four-bits.md


def kept_at_16_bits() -> dict:
    """The evaluation of configurations with a calibration and full-precision tokens: SmolLM2 on news."""
    (run,) = [run for run in read("quality.json")["runs"] if (run["part"], run["model"], run["text"]) == ("kl", "smollm2", "news")]
    return run


def times() -> str:
    """Microseconds of one attention by format, with the floor of its bytes: results/h200-geometries.json."""
    result, shape = read("h200-geometries.json"), "B8xL32768"
    shapes = [text(MARGIN, 34, "One attention at decode, microseconds (lower is better)", bold=True)]
    rows = [row for row in result["rows"] if row["shape"] == shape and row["us"] is not None]
    of = lambda name, stores: next(row for row in rows if row["name"].startswith(name) and row["stores"] == stores)
    found = [
        ("FlashAttention-3, 16 bits", of("FlashAttention-3", "bf16"), OTHERS),
        ("quantkv, 16 bits", of("quantkv hopper", "none"), OTHERS),
        ("quantkv, int4", of("quantkv hopper", "int4"), OURS),
        ("quantkv, int2", of("quantkv hopper", "int2"), OURS),
    ]
    left, slowest, room = 208, found[0][1]["us"], WIDTH - 208 - 118
    for i, (name, row, color) in enumerate(found):
        y, wide = 52 + 40 * i, room * row["us"] / slowest
        floor = room * row["nbytes"] / result["ceiling_gbps"] / 1e3 / slowest
        shapes += [text(left - 10, y + 20, name, 14, INK, "end"), box(left, y, wide, 28, color)]
        shapes.append(line(left + floor, y - 3, left + floor, y + 31, WARM, 3))
        faster = "" if i == 0 else f" ({slowest / row['us']:.2f}x)"
        shapes.append(text(left + max(wide, floor) + 8, y + 20, f"{row['us']:.1f}{faster}", 14))
    shapes += [
        text(MARGIN, 236, "Orange: the time in which this GPU can read the bytes.", 14),
        text(MARGIN, 256, "8 sequences of 32,768 tokens, 32 query and 8 kv heads of 128, one H200.", 14),
    ]
    return picture("Time of attention by format, beside the floor of its bytes", 274, *shapes)


def losses() -> str:
    """KL against bytes, formats as they are and with a calibration and full-precision tokens: SmolLM2 on news."""
    plain = {row["format"]: row for row in read("eval-smollm2-135m.json")["runs"][0]["formats"]}
    kept = {row["format"]: row for row in kept_at_16_bits()["formats"]}
    left, right, top, bottom = 92, WIDTH - MARGIN, 56, 330
    x = lambda size: left + (right - left) * (size - 30) / (145 - 30)
    y = lambda kl: top + (bottom - top) * (math.log10(2) - math.log10(kl)) / (math.log10(2) - math.log10(5e-4))
    shapes = [text(MARGIN, 34, "What is lost (KL, nats a token, lower is better)", bold=True)]
    for tick in (1, 0.1, 0.01, 0.001):
        shapes += [line(left, y(tick), right, y(tick), PALE), text(left - 8, y(tick) + 5, f"{tick:g}", 14, INK, "end")]
    for size in (40, 60, 80, 100, 120, 140):
        shapes.append(text(x(size), bottom + 20, str(size), 14, INK, "middle"))
    shapes.append(text((left + right) / 2, bottom + 42, "bytes of a token and kv head (16 bits: 256)", 14, INK, "middle"))
    for name, anchor, aside, down in (
        ("int8", "middle", 0, -14),
        ("int4", "start", 9, 7),
        ("levels4", "end", -9, 7),
        ("int2", "start", 9, 0),
        ("trellis2", "start", 9, 14),
    ):
        row = plain[name]
        at = x(row["bytes_per_head"]), y(row["kl"])
        shapes += [dot(*at, OTHERS, 6), text(at[0] + aside, at[1] + down, name, 14, INK, anchor)]
    for name, said in (
        ("levels4 +16,24", "levels4, calibrated, 16 + 24"),
        ("trellis2 +16,24", "trellis2, calibrated, 16 + 24"),
        ("trellis2 +16,0", "trellis2, calibrated, first 16 alone"),
    ):
        at = x(kept[name]["bytes_per_head"]), y(kept[name]["kl"])
        shapes += [dot(*at, OURS, 6), text(at[0] + 10, at[1] + 5, said, 14, OURS)]
    shapes.append(text(MARGIN, bottom + 70, "Grey: formats as they are. Blue: with a calibration and tokens at 16 bits.", 14))
    shapes.append(text(MARGIN, bottom + 90, "SmolLM2-135M on 4,096 tokens of news, contexts of 1,024.", 14))
    return picture("Loss against bytes", bottom + 108, *shapes)


# ---- README.md

# Each of `ENGINES` by its type in vLLM: label, its anchor and where it stands beside the point.
POINTS = {
    "auto": ("16 bits", "end", -11, -9),
    "fp8": ("vLLM's fp8", "end", -11, 5),
    "int8_per_token_head": ("vLLM's int8", "start", -6, -12),
    "int4_per_token_head": ("vLLM's int4", "start", -4, 24),
    "turboquant_4bit_nc": ("vLLM's TurboQuant", "start", -6, -14),
    "quantkv_int4": ("int4", "start", 10, 5),
    "quantkv_8bit": ("8bit", "end", -11, 5),
    "quantkv_4bit": ("4bit", "start", 10, 5),
    "quantkv_3bit": ("3bit", "start", 10, 5),
    "quantkv_2bit": ("2bit", "start", 10, 5),
}


def point(kind: str) -> tuple[float, int, float]:
    """Tokens a second, tokens that fit, and KL of a configuration. KeyError where it was not recorded."""
    engine, cache = front_engines()[kind], ENGINES[kind]
    kl = 0.0 if cache is None else through_cache()[cache]["kl"]
    return speed(engine, "decode", SEQUENCES), engine["kv_tokens"], kl


def front() -> str:
    """Loss against tokens a second in vLLM: a point is one configuration."""
    left, right, top, bottom, zero = 84, WIDTH - MARGIN, 78, 358, 388
    x = lambda rate: left + (right - left) * (rate - 500) / (6000 - 500)
    y = lambda kl: zero if kl == 0 else top + (bottom - top) * (math.log10(0.2) - math.log10(kl)) / (math.log10(0.2) - math.log10(1e-5))
    shapes = [
        text(MARGIN, 34, "Loss against speed in vLLM: one configuration a point", bold=True),
        text(MARGIN, 58, "KL, nats a token (lower is better)", 14),
        text(right, 58, "better: down and to the right", 14, WARM, "end"),
    ]
    for tick in ("0.1", "0.01", "0.001", "0.0001", "0"):
        at = y(float(tick))
        shapes += [line(left, at, right, at, PALE), text(left - 8, at + 5, tick, 14, INK, "end")]
    for rate in range(1000, 6000, 1000):
        shapes.append(text(x(rate), zero + 24, f"{rate:,}", 14, INK, "middle"))
    timed = f"tokens a second, {SEQUENCES} sequences of 8,192, one H100 (higher is better)"
    shapes.append(text((left + right) / 2, zero + 46, timed, 14, INK, "middle"))
    _, base, _ = point("auto")
    for kind, (said, anchor, aside, down) in POINTS.items():
        rate, tokens, kl = point(kind)
        color = OURS if kind.startswith("quantkv") else OTHERS
        more = "" if kind == "auto" else f": {tokens / base:.1f}x tokens"
        shapes += [dot(x(rate), y(kl), color, 6), text(x(rate) + aside, y(kl) + down, said + more, anchor=anchor)]
    shapes += [
        dot(MARGIN + 6, zero + 73, OURS, 6),
        text(MARGIN + 20, zero + 78, "quantkv"),
        dot(MARGIN + 116, zero + 73, OTHERS, 6),
        text(MARGIN + 130, zero + 78, "vLLM's own. 3.8x tokens: as many fit, beside 16 bits"),
    ]
    return picture("Loss against tokens a second", zero + 96, *shapes)


def overview() -> str:
    """What is stored of a sequence, what a page holds, and how attention reads it."""
    full, wide = WIDTH - 2 * MARGIN, (WIDTH - 2 * MARGIN) / 12
    shapes = [text(MARGIN, 32, "1  Every token is quantized into a page of 16 tokens", bold=True)]
    for i in range(12):
        shapes.append(box(MARGIN + i * wide, 64, wide - 3, 26, "#3d8fb3" if i == 9 else PALE))
    shapes += [
        box(MARGIN, 46, wide - 3, 14, WARM),
        box(MARGIN + 10 * wide, 46, 2 * wide - 3, 14, WARM),
        text(MARGIN + wide + 4, 58, "first 16", 13, WARM),
        text(MARGIN + 10 * wide - 8, 58, "latest 24 to 39: 16-bit copies, too", 13, WARM, "end"),
        line(MARGIN + 9.5 * wide - 2, 92, MARGIN + 9.5 * wide - 2, 128, arrow=True),
        text(MARGIN, 120, "2  A page holds all that belongs to its tokens", bold=True),
    ]
    at = MARGIN
    for said, share, fill in (
        ("K codes, 2 to 8 bits", 0.36, OURS),
        ("V codes", 0.36, "#3d8fb3"),
        ("K scales", 0.14, WARM),
        ("V scales", 0.14, "#d8854f"),
    ):
        shapes += [box(at, 132, share * full - 3, 34, fill), text(at + share * full / 2, 154, said, 14, "#ffffff", "middle")]
        at += share * full
    shapes.append(text(MARGIN, 200, "3  Attention reads pages as they lie, and 16-bit copies as they are", bold=True))
    for i, (said, fill) in enumerate((("pages", OURS), ("pages", OURS), ("pages", OURS), ("copies", WARM))):
        left = MARGIN + i * (full / 4)
        shapes += [
            box(left, 212, full / 4 - 12, 30, fill),
            text(left + full / 8 - 6, 232, said, 14, "#ffffff", "middle"),
            line(left + full / 8 - 6, 244, left + full / 8 - 6, 262, arrow=True),
            text(left + full / 8 - 6, 280, "partial output", 13, INK, "middle"),
            line(left + full / 8 - 6, 286, WIDTH / 2 + (i - 1.5) * 40, 310, OTHERS),
        ]
    shapes += [box(WIDTH / 2 - 150, 310, 300, 32, PALE), text(WIDTH / 2, 331, "combine by log-sum-exp: the output", 14, INK, "middle")]
    return picture("Pages, scales, 16-bit copies, and attention over them", 358, *shapes)


def badge(name: str, value: str) -> str:
    """A name and a value side by side, as front pages have them; nothing is fetched."""
    widths = [round(6.6 * len(said)) + 12 for said in (name, value)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{sum(widths)}" height="20" font-family="system-ui, sans-serif" role="img">'
    ground = f'<rect width="{sum(widths)}" height="20" rx="3" fill="{OURS}"/><rect width="{widths[0]}" height="20" rx="3" fill="{INK}"/>'
    said = text(widths[0] / 2, 14, name, 11, "#ffffff", "middle"), text(widths[0] + widths[1] / 2, 14, value, 11, "#ffffff", "middle")
    return "\n".join([head, f"<title>{escape(name)}: {escape(value)}</title>", ground, *said, "</svg>", ""])


def declared(pattern: str, file: str = "pyproject.toml") -> str:
    """What a file of the project says of itself."""
    return re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)[1]


FIGURES: dict[str, Callable[[], str]] = {
    "front.svg": front,
    "overview.svg": overview,
    "badge-ci.svg": lambda: badge("CI", "lint, tests, wheel, vLLM on a CPU"),
    "badge-python.svg": lambda: badge("Python", declared(r'^requires-python = ">=([^"]+)"') + " or later"),
    "badge-licence.svg": lambda: badge("licence", declared(r'^license = "([^"]+)"')),
    "badge-version.svg": lambda: badge("version", declared(r'^__version__ = "([^"]+)"', "src/quantkv/__init__.py")),
    "page.svg": page,
    "scale.svg": scale,
    "window.svg": window,
    "split-kv.svg": split,
    "times.svg": times,
    "losses.svg": losses,
}


def main() -> None:
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / name).write_text(draw())


if __name__ == "__main__":
    main()
