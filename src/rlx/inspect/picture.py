"""A small graph as an SVG picture: its levels in columns, with ribbons from each line to its results on the next level.

The SVG has no external resources, and colours for light and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from rlx.fast_dataclass import dataclass
from rlx.inspect.code import assembly_lines, busiest, easiest
from rlx.inspect.fold_layers import Line
from rlx.inspect.levels import (
    graph_lines,
    interface_lines,
    kernel_lines,
    kernel_sources,
    marked_launch_lines,
    marked_lines,
    with_frame,
)
from rlx.inspect.lineage import Lineage
from rlx.target import Target

CHARACTER, ROW = 6.6, 16.0  # pixels of a character and of a line, at 11 pixels
MAX_WIDTH = 58  # characters of a column
GAP, MARGIN, TOP = 56.0, 20.0, 78.0
GOLDEN = 137.508  # the golden angle, in degrees: neighbouring hues differ clearly
NO_BREAK = "\N{NO-BREAK SPACE}"  # SVG collapses spaces


@dataclass(frozen=True, slots=True)
class Column:
    """A level: its title, a description, its lines."""

    title: str
    about: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    """Adjacent lines with the same sources, and their position."""

    text: str  # first line
    sources: frozenset[int]
    left: float
    right: float
    top: float
    bottom: float


def picture(line: Lineage, target: Target, title: str, *, lines: int = 16) -> str:
    """Draw the levels of a graph in columns, with `lines` lines of assembly."""
    built = with_frame(line.graph, graph_lines(line.graph))
    graph = with_frame(line.main, marked_lines(line, line.main))
    launches = marked_launch_lines(line, line.main, line.plan.main)
    program = (*interface_lines(line, line.main, line.plan.main), *launches)
    kernels = [each for kernel in _kernels(line) for each in (Line(""), *kernel)]
    columns = [
        Column(f"{line.graph.level.upper()}, as built", "what is computed", _single(built)),
        Column("MIR, optimised", "after all passes", _single(graph)),
        Column("LIR", "buffers, launches, loops", (*program, *kernels)),
        _excerpt(line, target, lines),
    ]
    parts: list[str] = []
    blocks: list[list[_Block]] = []
    x = MARGIN
    for column in map(_shorten, columns):
        longest = max((len(row.text) for row in column.lines), default=0)
        width = max(longest, len(column.title) + len(column.about) + 2) * CHARACTER
        parts += _column(column, x, width)
        blocks.append(list(_blocks(column.lines, x, width)))
        x += width + GAP
    height = TOP + max(len(c.lines) for c in columns) * ROW + MARGIN
    launched = (
        TOP + len(program) * ROW
    )  # above it launches, which come from the graph; below it loops, which become code
    targets = [b for b in blocks[2] if b.bottom <= launched and not b.text.startswith(("buffer", "output"))]
    loops = [b for b in blocks[2] if b.top > launched]
    pairs = [(blocks[0], blocks[1]), (blocks[1], targets), (loops, blocks[3])]
    ribbons = [_ribbon(a, b) for left, right in pairs for a in left for b in right if a.sources & b.sources]
    head = f'<text class="title" x="{MARGIN}" y="32">{escape(title)}</text>'
    return _svg(x - GAP + MARGIN, height, [head, *ribbons, *parts])


def _single(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Split lines of nodes with bodies into one line per row."""
    return tuple(Line(text, row.sources) for row in lines for text in row.text.splitlines())


def _kernels(line: Lineage) -> list[list[Line]]:
    rows = kernel_lines(line.main, line.plan.main)
    return [list(group) for _, group in groupby(rows, key=lambda row: row.kernel)]


def _excerpt(line: Lineage, target: Target, count: int) -> Column:
    """The busiest lines of one kernel's assembly."""
    kernel = easiest(line.plan.main)
    if kernel is None:
        return Column("Assembly", "there is nothing to compute", ())
    sources = kernel_sources(line.main, line.plan.main)[kernel.symbol]
    lines = busiest(assembly_lines(kernel, target), count)
    return Column("Assembly", kernel.symbol, tuple(Line(text, sources) for text in lines))


def _shorten(column: Column) -> Column:
    def short(text: str) -> str:
        return text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 1].rstrip() + "…"

    return Column(column.title, column.about, tuple(Line(short(row.text), row.sources) for row in column.lines))


def _blocks(lines: Sequence[Line], x: float, width: float) -> Iterator[_Block]:
    for sources, rows in groupby(enumerate(lines), key=lambda pair: pair[1].sources):
        numbers = [i for i, _ in rows]
        if sources:
            top, bottom = TOP + numbers[0] * ROW, TOP + (numbers[-1] + 1) * ROW
            yield _Block(lines[numbers[0]].text.strip(), sources, x - 8, x + width + 8, top + 1, bottom - 1)


def _hue(sources: frozenset[int]) -> int:
    return round(max(sources) * GOLDEN % 360)


def _column(column: Column, x: float, width: float) -> Iterator[str]:
    yield f'<text class="level" x="{x}" y="{TOP - 14}">{escape(column.title)}</text>'
    at = x + (len(column.title) + 2) * CHARACTER
    yield f'<text class="about" x="{at:.1f}" y="{TOP - 14}">{escape(column.about)}</text>'
    for block in _blocks(column.lines, x, width):
        yield (
            f'<rect x="{block.left:.1f}" y="{block.top:.1f}" width="{block.right - block.left:.1f}" '
            f'height="{block.bottom - block.top:.1f}" rx="3" style="--hue:{_hue(block.sources)}"/>'
        )
    for i, row in enumerate(column.lines):
        text = row.text.lstrip()
        if text:
            indent = (len(row.text) - len(text)) * CHARACTER
            length = len(text) * CHARACTER  # keeps the column width with any font
            yield (
                f'<text x="{x + indent:.1f}" y="{TOP + i * ROW + 11.5:.1f}" textLength="{length:.1f}" '
                f'lengthAdjust="spacingAndGlyphs">{escape(text).replace(" ", NO_BREAK)}</text>'
            )


def _ribbon(a: _Block, b: _Block) -> str:
    x0, x1 = a.right, b.left
    middle = (x0 + x1) / 2
    path = (
        f"M{x0:.1f},{a.top:.1f}C{middle:.1f},{a.top:.1f} {middle:.1f},{b.top:.1f} {x1:.1f},{b.top:.1f}"
        f"V{b.bottom:.1f}C{middle:.1f},{b.bottom:.1f} {middle:.1f},{a.bottom:.1f} {x0:.1f},{a.bottom:.1f}Z"
    )
    return f'<path d="{path}" style="--hue:{_hue(a.sources & b.sources)}"/>'


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n<rect class="paper"/>'
    return f"{head}\n{body}\n</svg>\n"


STYLE = """
text { font: 11px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1d2329; }
.title { font-size: 17px; font-weight: bold; } .level { font-weight: bold; } .about { fill: #69737d; }
.paper { width: 100%; height: 100%; fill: #fff; }
rect { fill: hsl(var(--hue) 75% 92%); } path { fill: hsl(var(--hue) 65% 60%); opacity: .28; }
@media (prefers-color-scheme: dark) {
  text { fill: #dde3ea; } .about { fill: #8b949e; } .paper { fill: #0f1419; }
  rect { fill: hsl(var(--hue) 45% 20%); } path { opacity: .35; }
}
"""
