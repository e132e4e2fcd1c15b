"""A graph in a notebook: its text by stages, layers that are alike shown once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlx.inspect.fold_layers import Item, Line, fold_lines
from rlx.inspect.levels import graph_lines, head, tail
from rlx.ir.graph import Graph
from rlx.notebook import MAX_ROWS, box, fold, note, preformatted

OPEN_LINES = 60  # a stage of more lines is closed at first


def graph_html(graph: Graph) -> str:
    """A graph as HTML; what is beyond MAX_ROWS lines is counted."""
    counts = f"{graph.level} graph {graph.name!r}: {_many(len(graph.nodes), 'node')}, "
    counts += f"{_many(len(graph.inputs), 'input')}, {_many(len(graph.params), 'param')}"
    parts = [preformatted([head(graph)]), *_items(fold_lines(graph_lines(graph)), _Room(MAX_ROWS))]
    return box(counts, *parts, preformatted([tail(graph), "}"]))


class _Room:
    """How many lines may still be shown."""

    def __init__(self, lines: int) -> None:
        self.lines = lines

    def take(self, lines: list[str]) -> list[str]:
        taken = lines[: self.lines]
        self.lines -= len(taken)
        return taken


def _items(items: Sequence[Item], room: _Room) -> Iterator[str]:
    texts: list[str] = []
    hidden = 0
    for item in items:
        if isinstance(item, Line):
            texts += item.text.split("\n")
            continue
        yield from _lines(texts, room)
        texts = []
        count = sum(1 for _ in item.lines())
        if not room.lines:
            hidden += count
        elif item.is_fold:  # copies of what stands before it
            yield note(f"  # {item.title}")
        else:
            yield fold(item.title, "".join(_items(item.items, room)), is_open=count <= OPEN_LINES)
    yield from _lines(texts, room, hidden)


def _lines(texts: list[str], room: _Room, hidden: int = 0) -> Iterator[str]:
    shown = room.take(texts)
    if shown:
        yield preformatted(shown)
    hidden += len(texts) - len(shown)
    if hidden:
        yield note(f"  … {_many(hidden, 'more line')}; print the graph to see all")


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
