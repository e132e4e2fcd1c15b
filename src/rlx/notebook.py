"""HTML of results in notebooks: tables, preformatted text and folds, with every text escaped.

Styles are inline and take text and background colours from the page, so a result reads well in light and dark themes.
Nothing here runs a script or loads anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlx.fast_dataclass import dataclass

MAX_ROWS = 200  # of a table or text; the rest is only counted
MAX_CHARS = 400  # per line

_MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px;line-height:1.45"
_PRE = f"{_MONO};margin:0;padding:0;white-space:pre;background:transparent;color:inherit;border:0"
_BOX = "border:1px solid rgba(128,128,128,.35);border-radius:6px;padding:8px 12px;margin:4px 0;overflow-x:auto"
_CELL = "padding:1px 10px 1px 0;border:0;background:transparent;color:inherit;vertical-align:top"
_FAINT = "opacity:.65"
_MARKS = {"+": "background:rgba(46,160,67,.22)", "-": "background:rgba(248,81,73,.22)"}


@dataclass(frozen=True, slots=True)
class Bar:
    """A cell with a bar behind its text that fills a fraction (0 to 1) of its width."""

    text: str
    share: float


Cell = str | int | float | Bar


def escape(text: str) -> str:
    """The text as HTML. `html` is imported here: its tables are large, and most programs show nothing."""
    import html

    return html.escape(text)


def box(title: str, *parts: str) -> str:
    """Frames a result: a title (text) and parts (HTML)."""
    return f'<div style="{_BOX}"><div style="{_MONO};font-weight:600">{escape(title)}</div>{"".join(parts)}</div>'


def note(text: str) -> str:
    """A faint line."""
    return f'<div style="{_MONO};{_FAINT}">{escape(text)}</div>'


def prose(text: str) -> str:
    """Text for people, wrapped, with its own line breaks."""
    return f'<div style="white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0">{escape(text)}</div>'


def preformatted(lines: Iterable[str]) -> str:
    """Monospaced lines; lines beyond MAX_ROWS are only counted."""
    return _pre([escape(_cut(line)) for line in lines])


def marked(lines: Iterable[tuple[str, str]]) -> str:
    """Monospaced lines with a mark per line: `+` is green, `-` is red."""
    shown = []
    for mark, line in lines:
        text = escape(_cut(f"{mark} {line}"))
        shown.append(f'<span style="{_MARKS[mark]}">{text}</span>' if mark in _MARKS else text)
    return _pre(shown)


def fold(title: str, inside: str, *, is_open: bool = False) -> str:
    """A collapsible section: a title (text) and its HTML."""
    state = " open" if is_open else ""
    summary = f'<summary style="{_MONO};cursor:pointer">{escape(title)}</summary>'
    return f'<details{state}>{summary}<div style="padding-left:16px">{inside}</div></details>'


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table; numeric columns are right-aligned."""
    right = [bool(rows) and not any(isinstance(row[i], str) for row in rows) for i in range(len(columns))]
    align = ["right" if number else "left" for number in right]
    head = "".join(
        f'<th style="{_CELL};text-align:{side};font-weight:400;{_FAINT}">{escape(name)}</th>'
        for name, side in zip(columns, align, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(_cell(cell, side) for cell, side in zip(row, align, strict=True)) + "</tr>"
        for row in rows[:MAX_ROWS]
    )
    style = f"{_MONO};border-collapse:collapse;border:0;margin:4px 0;background:transparent;color:inherit"
    html = f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return html + (note(f"… and {len(rows) - MAX_ROWS:,} more rows") if len(rows) > MAX_ROWS else "")


def _cell(cell: Cell, side: str) -> str:
    style = f"{_CELL};text-align:{side};white-space:pre"
    if isinstance(cell, Bar):
        percent = 100 * min(max(cell.share, 0.0), 1.0)
        gradient = f"rgba(64,132,246,.3) {percent:.1f}%,transparent {percent:.1f}%"
        style += f";min-width:60px;background:linear-gradient(to right,{gradient})"
        cell = cell.text
    text = f"{cell:,}" if isinstance(cell, int) else f"{cell:,.1f}" if isinstance(cell, float) else _cut(cell)
    return f'<td style="{style}">{escape(text)}</td>'


def _pre(lines: Sequence[str]) -> str:
    more = [f"… and {len(lines) - MAX_ROWS:,} more lines; print it to see all"] if len(lines) > MAX_ROWS else []
    return f'<pre style="{_PRE}">' + "\n".join([*lines[:MAX_ROWS], *more]) + "</pre>"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "…"
