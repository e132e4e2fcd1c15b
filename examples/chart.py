"""Line charts as SVG, for the other examples."""

import math
from pathlib import Path

import numpy as np

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 380, 56, 700, 44, 340
COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777")


def chart(path, title, series, dots=()):
    """Write a chart of `series`: name to points `[n, 2]`. Those named in `dots` are drawn as dots, others as lines."""
    series = {name: np.asarray(points, np.float64) for name, points in series.items()}
    low, high = (f([f(points, axis=0) for points in series.values()], axis=0) for f in (np.min, np.max))
    ticks = [_ticks(*ends) for ends in zip(low, high, strict=True)]
    corner, size = np.array([LEFT, BOTTOM]), np.array([RIGHT - LEFT, TOP - BOTTOM])
    scale = size / np.where(high > low, high - low, 1.0)

    def place(points):
        return corner + (points - low) * scale

    def text(x, y, content, anchor="middle", colour="#555"):
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}">{content}</text>'

    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"']
    lines += ['  font-size="12">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    lines.append(text(LEFT, 22, title, "start", "#111"))
    for x in ticks[0]:
        lines.append(text(place([x, low[1]])[0], BOTTOM + 20, f"{x:g}"))
    for y in ticks[1]:
        at = place([low[0], y])[1]
        lines += [f'<path d="M{LEFT} {at:.1f}H{RIGHT}" stroke="#ddd"/>', text(LEFT - 8, at + 4, f"{y:g}", "end")]
    for i, (name, points) in enumerate(series.items()):
        colour, placed = COLOURS[i % len(COLOURS)], place(points)
        if name in dots:
            lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        else:
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            lines.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(text(RIGHT, 22 + 16 * i, name, "end", colour))
    Path(path).write_text("\n".join([*lines, "</svg>", ""]), "utf-8")


def _ticks(low, high):
    """About five round numbers between two."""
    unit = 10.0 ** math.floor(math.log10((high - low or 1.0) / 2))
    step = next(s * unit for s in (1, 2, 5, 10) if (high - low) / (s * unit) <= 6)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
