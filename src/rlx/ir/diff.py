"""Differences between two graphs, node by node, as text.

Nodes are matched by what they compute, not by number or order: first nodes that are equal with all their dependencies,
then leaves by name, then ops whose operands are matched, then from the outputs down, because output i of one graph
corresponds to output i of the other. Unmatched nodes were added or removed. All lines use the numbers of the old graph;
new nodes are numbered after its last.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlx.errors import GraphError
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph, Node, Value, attr_key
from rlx.ir.registry import HIR
from rlx.ir.text import attr_text
from rlx.notebook import box, marked

SAME, GONE, NEW = " ", "-", "+"


@dataclass(frozen=True)
class Entry:
    """A node before and after, or one of the two; the marked lines of its text."""

    before: Node | None
    after: Node | None
    lines: tuple[tuple[str, str], ...]

    @property
    def is_same(self) -> bool:
        return all(mark == SAME for mark, _ in self.lines)


@dataclass(frozen=True)
class GraphDiff:
    """All nodes of two graphs, matched. False if only names and order differ."""

    before: Graph
    after: Graph
    entries: tuple[Entry, ...]
    frame: tuple[tuple[str, str], ...]  # lines that are not nodes: level, limits, outputs

    def __bool__(self) -> bool:
        return not all(e.is_same for e in self.entries) or any(mark != SAME for mark, _ in self.frame)

    @property
    def added(self) -> list[Node]:
        return [e.after for e in self.entries if e.before is None and e.after is not None]

    @property
    def removed(self) -> list[Node]:
        return [e.before for e in self.entries if e.after is None and e.before is not None]

    @property
    def changed(self) -> list[tuple[Node, Node]]:
        both = [(e.before, e.after) for e in self.entries if not e.is_same]
        return [(a, b) for a, b in both if a is not None and b is not None]

    @property
    def ops(self) -> dict[str, int]:
        """Change in the number of nodes per op."""
        change = Counter(n.op for n in self.after.nodes)
        change.subtract(n.op for n in self.before.nodes)
        return {op: n for op, n in sorted(change.items()) if n}

    @property
    def blocks(self) -> dict[str, int]:
        """Number of added, removed or changed nodes per HIR block: blocks themselves, or ops that they became."""
        nodes = [*self.added, *self.removed, *(after for _, after in self.changed)]
        return dict(sorted(Counter(block for node in nodes for block in _blocks(node)).items()))

    def summary(self) -> str:
        """The change in one line."""
        counts = {"changed": len(self.changed), "added": len(self.added), "removed": len(self.removed)}
        said = ", ".join(f"{n} {word}" for word, n in counts.items() if n) or "nothing changed"
        ops = ", ".join(f"{op} {n:+}" for op, n in self.ops.items())
        blocks = ", ".join(f"{block} {n}" for block, n in self.blocks.items())
        line = f"{len(self.before)} -> {len(self.after)} nodes: {said}" + (f" ({ops})" if ops else "")
        return line + (f"; in blocks: {blocks}" if blocks else "")

    def lines(self, context: int | None = 3) -> Iterator[tuple[str, str]]:
        """Marked lines; of unchanged nodes, only `context` around changed ones (None: all)."""
        shown = self._near(context)
        hidden = 0
        for entry, wanted in zip(self.entries, shown, strict=True):
            if not wanted:
                hidden += 1
                continue
            yield from _fold(hidden)
            hidden = 0
            yield from entry.lines
        yield from _fold(hidden)
        yield from self.frame

    def _near(self, context: int | None) -> list[bool]:
        if context is None:
            return [True] * len(self.entries)
        shown = [False] * len(self.entries)
        for i, entry in enumerate(self.entries):
            if not entry.is_same:
                low, high = max(0, i - context), min(len(shown), i + context + 1)
                shown[low:high] = [True] * (high - low)
        return shown

    def text(self, context: int | None = 3) -> str:
        """The summary, then the lines."""
        body = (f"{mark} {line}".rstrip() for mark, line in self.lines(context))
        return "\n".join([self.summary(), *body])

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<diff of {self.before.name!r} and {self.after.name!r}: {self.summary()}>"

    def _repr_html_(self) -> str:
        return box(self.summary(), marked(self.lines()))


def _blocks(node: Node) -> tuple[str, ...]:
    return (node.op,) if node.definition.level == HIR else node.origin.blocks


def _fold(count: int) -> Iterator[tuple[str, str]]:
    if count:
        yield SAME, f"... {count} node{'s' if count > 1 else ''} as before"


def diff(before: Any, after: Any) -> GraphDiff:
    """Compares two graphs or modules; HIR modules are compared block by block."""
    inputs = before, after
    before, after = map(_graph, inputs)
    if before.level != after.level and not all(isinstance(one, Graph) for one in inputs):
        levels = f"found {before.level.upper()} and {after.level.upper()}"
        raise GraphError(f"diff: takes modules of one level, {levels}", hint="lower a module at HIR first")
    partner = _match_nodes(before, after)
    old = {node: f"%{node.id}" for node in before.nodes}
    fresh = (f"%{i}" for i in range(len(before), len(before) + len(after)))
    new = {node: old[partner[node]] if node in partner else next(fresh) for node in after.nodes}
    entries = tuple(_entries(before, after, partner, old, new))
    heads = [_head(before)], [_head(after)]
    ends = [_end(before, old)], [_end(after, new)]
    head = _mark_lines(*heads) if heads[0] != heads[1] else []
    return GraphDiff(before, after, entries, tuple([*head, *_mark_lines(*ends)]))


def _graph(source: Any) -> Graph:
    """Returns a graph, or the graph of a module."""
    graph = source
    if hasattr(source, "as_graph"):
        lowered = source.as_graph()
        graph = source.as_hir() if lowered is None else lowered
    if not isinstance(graph, Graph):
        raise GraphError(f"diff: takes two graphs, found {type(source).__name__}")
    return graph


# -- matching ---------------------------------------------------------------------------------------------------------
def _match_nodes(before: Graph, after: Graph) -> dict[Node, Node]:
    """Maps nodes of the new graph to the old nodes they correspond to."""
    matching = _Matching()
    numbers: dict[str, int] = {}
    matching.by(_keys(before, numbers), _keys(after, numbers))
    matching.by(_names(before), _names(after))
    matching.forward(before, after)
    matching.downward(zip(before.outputs, after.outputs, strict=False))
    return matching.partner


class _Matching:
    """Pairs of nodes; each node is in at most one pair."""

    def __init__(self) -> None:
        self.partner: dict[Node, Node] = {}  # after -> before
        self.taken: set[Node] = set()

    def pair(self, a: Node, b: Node) -> None:
        self.partner[b] = a
        self.taken.add(a)

    def by(self, before: Iterable[tuple[Node, str]], after: Iterable[tuple[Node, str]]) -> None:
        """Pair nodes with equal keys, in order."""
        waiting: dict[str, list[Node]] = {}
        for a, key in before:
            if a not in self.taken:
                waiting.setdefault(key, []).append(a)
        for b, key in after:
            if b not in self.partner and waiting.get(key):
                self.pair(waiting[key].pop(0), b)

    def forward(self, before: Graph, after: Graph) -> None:
        """Pair nodes with the same op whose operands are already paired, in topological order."""
        waiting: dict[tuple[object, ...], list[Node]] = {}
        for a in before.nodes:
            if a not in self.taken and a.operands:
                waiting.setdefault((a.op, *map(_edge, a.operands)), []).append(a)
        for b in after.nodes:
            if b in self.partner or not b.operands:
                continue
            edges = [None if o is None else (self.partner.get(o.node), o.index) for o in b.operands]
            candidates = waiting.get((b.op, *edges))
            if candidates:
                self.pair(candidates.pop(0), b)

    def downward(self, outputs: Iterable[tuple[Value, Value]]) -> None:
        """Pair values with the same use: the outputs, then the operands of pairs.

        An op may have been replaced by another one of the same type; the operands of such a pair must have the same op.
        """
        stack = [(a, b, False) for a, b in outputs]
        while stack:
            a, b, strict = stack.pop()
            same_op = a.node.op == b.node.op
            alike = same_op or (not strict and a.node.types == b.node.types)
            if a.node in self.taken or b.node in self.partner or a.index != b.index or not alike:
                continue
            self.pair(a.node, b.node)
            both = zip(a.node.operands, b.node.operands, strict=False)
            stack += [(x, y, not same_op) for x, y in both if x is not None and y is not None]


def _edge(value: Value | None) -> tuple[Node | None, int] | None:
    return None if value is None else (value.node, value.index)


def _keys(graph: Graph, numbers: dict[str, int]) -> Iterator[tuple[Node, str]]:
    """Yields each node with a text of all its dependencies; `numbers` interns the texts of operands."""
    known: dict[Node, int] = {}
    for node in graph.nodes:
        edges = ",".join("-" if o is None else f"{known[o.node]}.{o.index}" for o in node.operands)
        attrs = ",".join(f"{k}={attr_key(v)}" for k, v in sorted(node.attrs.items()))
        key = f"{node.op}({edges}){{{attrs}}}:{';'.join(map(str, node.types))}"
        known[node] = numbers.setdefault(key, len(numbers))
        yield node, key


def _names(graph: Graph) -> Iterator[tuple[Node, str]]:
    """Yields the named leaves."""
    for node in graph.nodes:
        if not node.operands and "name" in node.attrs:
            yield node, f"{node.op} {node.attrs['name']}"


# -- text -------------------------------------------------------------------------------------------------------------
def _entries(
    before: Graph, after: Graph, partner: Mapping[Node, Node], old: Mapping[Node, str], new: Mapping[Node, str]
) -> Iterator[Entry]:
    """Entries in the order of the new graph; removed nodes precede what followed them."""
    survivors = set(partner.values())
    gone = [a for a in before.nodes if a not in survivors]
    for b in after.nodes:
        a = partner.get(b)
        while a is not None and gone and gone[0].id < a.id:
            yield _entry(gone.pop(0), None, old, new)
        yield _entry(a, b, old, new)
    for a in gone:
        yield _entry(a, None, old, new)


def _entry(a: Node | None, b: Node | None, old: Mapping[Node, str], new: Mapping[Node, str]) -> Entry:
    return Entry(a, b, tuple(_mark_lines(_node_lines(a, old), _node_lines(b, new))))


def _mark_lines(before: list[str], after: list[str]) -> list[tuple[str, str]]:
    """Merges two texts, marking each line."""
    lines: list[tuple[str, str]] = []
    for tag, low, high, first, last in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "equal":
            lines += [(SAME, line) for line in before[low:high]]
        else:
            lines += [(GONE, line) for line in before[low:high]]
            lines += [(NEW, line) for line in after[first:last]]
    return lines


def _node_lines(node: Node | None, names: Mapping[Node, str]) -> list[str]:
    if node is None:
        return []
    parts = [_value_text(o, names) for o in node.operands]
    parts += [f"{k}={attr_text(v)}" for k, v in node.attrs.items()]
    types = "; ".join(map(str, node.types))
    return f"{names[node]} = {node.op}({', '.join(parts)}) : {types}".splitlines()


def _value_text(value: Value | None, names: Mapping[Node, str]) -> str:
    if value is None:
        return "none"
    return names[value.node] + (f".{value.index}" if len(value.node.types) > 1 else "")


def _head(graph: Graph) -> str:
    limits = ", ".join(f"{k}={v}" for k, v in sorted(graph.limits.items()))
    return f"graph {graph.level}" + (f" max({limits})" if limits else "")


def _end(graph: Graph, names: Mapping[Node, str]) -> str:
    return "return " + ", ".join(_value_text(v, names) for v in graph.outputs)
