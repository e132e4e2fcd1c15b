"""Rewriting: copies a graph while replacing nodes, and matches small patterns written as identities.

`rebuild` walks a graph in order and asks a visitor what replaces each node. `@identity` functions state that two
expressions are equal: `match` finds the first in a graph, and the second replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field, replace
from typing import Any

import numpy as np

from rlx.dtypes import dtype
from rlx.fast_dataclass import dataclass
from rlx.ir import registry
from rlx.ir.graph import Array, Graph, Node, Value
from rlx.ir.provenance import Origin
from rlx.ir.registry import CONTROL, NAMED
from rlx.types import TensorType

Visitor = Callable[["Rewriter", Node], "Sequence[Value] | Value | None"]


class Rewriter:
    """The graph under construction, and the new value of each old value."""

    def __init__(self, old: Graph, made_by: str) -> None:
        self.old = old
        self.graph = Graph(old.name, level=old.level)
        self.graph.limits, self.graph.fixed = dict(old.limits), set(old.fixed)
        self.made_by = made_by
        self.values: dict[Value, Value] = {}

    def __getitem__(self, value: Value) -> Value:
        return self.values[value]

    def operands(self, node: Node) -> tuple[Value | None, ...]:
        """The new values of a node's operands."""
        values = self.values
        return tuple([None if o is None else values[o] for o in node.operands])

    def copy(self, node: Node) -> tuple[Value, ...]:
        """Copies the node onto its new operands."""
        return self.graph.append(node.op, self.operands(node), node.attrs, node.types, node.origin).results

    def keep(self, node: Node) -> None:
        """Copy the node unchanged."""
        self.values.update(zip(node.results, self.copy(node), strict=True))

    def finish(self, outputs: Iterable[Value]) -> Graph:
        """Returns the new graph, whose outputs are the new values of these old ones."""
        self.graph.outputs = tuple([self.values[o] for o in outputs])
        return self.graph

    def make(self, like: Node | Sequence[Node], op: str, *operands: Value | None, **attrs: Any) -> tuple[Value, ...]:
        """Appends a node that replaces `like`: types are inferred, the origin is kept and marked with the pass.

        If it replaces several nodes, the first supplies the origin and the others are recorded in it.
        """
        return self.graph.build(op, operands, attrs, self._origin(like)).results

    def _origin(self, like: Node | Sequence[Node]) -> Origin:
        if isinstance(like, Node):
            return like.origin.by(self.made_by)
        first, *others = (n.origin for n in like)
        origin = first.by(self.made_by)
        merged = tuple(o for o in others if o.by(self.made_by) != origin)
        return replace(origin, merged=(*origin.merged, *merged))

    def one(self, like: Node | Sequence[Node], op: str, *operands: Value | None, **attrs: Any) -> Value:
        """`make` for an op with one result."""
        return self.make(like, op, *operands, **attrs)[0]

    def constant(self, like: Node, data: np.ndarray[Any, Any]) -> Value:
        """A constant that replaces a result of `like`."""
        type_ = TensorType(tuple(data.shape), dtype(data.dtype))
        return self.graph.append("const", (), {"value": Array(data)}, (type_,), like.origin.by(self.made_by))[0]


DROPPED: tuple[Value, ...] = ()  # returned by a visitor for a node that was merged into another


def rebuild(graph: Graph, visit: Visitor, *, made_by: str) -> Graph:
    """Returns the graph in which `visit` replaces each node (None: keep the node, DROPPED: remove it).

    It is the graph itself if all nodes are kept, which then needs no verification.
    """
    rewriter = Rewriter(graph, made_by)
    values, new, rewrites, changed = rewriter.values, rewriter.graph.nodes, 0, False
    for node in graph.nodes:
        start = len(new)
        replacement = visit(rewriter, node)
        if replacement is None:
            rewriter.keep(node)
            continue
        changed = True
        if replacement is DROPPED:
            rewrites += 1
            continue
        results = (replacement,) if isinstance(replacement, Value) else tuple(replacement)
        values.update(zip(node.results, results, strict=True))
        rewrites += not (len(new) == start + 1 and _is_copy(rewriter, node, new[start], results))
    _count(rewrites)
    return _with_stages(rewriter, graph) if changed else graph


def copy_graph(graph: Graph) -> Graph:
    """An independent copy of a graph; its nodes have the same numbers."""
    rewriter = Rewriter(graph, "copy")
    for node in graph.nodes:
        rewriter.keep(node)
    return _with_stages(rewriter, graph)


def _with_stages(rewriter: Rewriter, graph: Graph) -> Graph:
    """The rewritten graph, with the outputs and the stages that are left of the old one."""
    values = rewriter.values
    rewriter.graph.stages = {path: values[value] for path, value in graph.stages.items() if value in values}
    return rewriter.finish(graph.outputs)


def _is_copy(rewriter: Rewriter, old: Node, new: Node, results: tuple[Value, ...]) -> bool:
    """Whether the results belong to an unchanged copy of the node."""
    if results != new.results or (new.op, new.types, len(new.operands)) != (old.op, old.types, len(old.operands)):
        return False
    reads = [None if o is None else rewriter.values.get(o) for o in old.operands]  # some may have been dropped
    if reads != list(new.operands):
        return False
    return new.attrs is old.attrs or all(
        value is new.attrs[key] or (not isinstance(value, Graph) and value == new.attrs[key])
        for key, value in old.attrs.items()
    )


def copy_nodes(graph: Graph, nodes: Iterable[Node], *, made_by: str) -> Graph:
    """The graph of these nodes, which must be in topological order."""
    rewriter = Rewriter(graph, made_by)
    for node in nodes:
        rewriter.keep(node)
    return rewriter.finish(graph.outputs)


def live_copy(
    graph: Graph, outputs: Sequence[Value] | None = None, *, keep: Sequence[str] = NAMED,
    cut: Mapping[Value, str] | None = None, leaves_first: bool = False, made_by: str = "live_copy",
) -> Graph:  # fmt: skip
    """The part of a graph that its outputs, or other values, depend on; the graph itself if that is all of it.

    Inputs, states and params always stay, or those of the kinds in `keep`. Values in `cut` become inputs with these
    names, and nodes that only they depend on are dropped. `leaves_first` moves all named leaves before other nodes.
    """
    wanted = graph.outputs if outputs is None else tuple(outputs)
    inputs, read, live = cut or {}, set[Value](), set[Node]()
    stack = list(wanted)
    while stack:
        value = stack.pop()
        if value in inputs:
            read.add(value)
        elif value.node not in live:
            live.add(value.node)
            stack += [o for o in value.node.operands if o is not None]
    live.update(node for node in graph.nodes if node.op in keep)
    _count(len(graph) - len(live))
    if len(live) == len(graph) and wanted == graph.outputs and not leaves_first and not read:
        return graph
    rewriter = Rewriter(graph, made_by)
    for node in sorted(graph.nodes, key=lambda node: node.op not in NAMED) if leaves_first else graph.nodes:
        if node in live:
            rewriter.keep(node)
        for value in node.results if read else ():
            if value in read:
                rewriter.values[value] = rewriter.graph.input(inputs[value], value.shape, value.dtype)
    return rewriter.finish(wanted)


# -- counting ---------------------------------------------------------------------------------------------------------
@dataclass
class Tally:
    """Number of nodes replaced or dropped so far."""

    rewrites: int = 0


_tally: ContextVar[Tally | None] = ContextVar("tally", default=None)


@contextmanager
def count_rewrites() -> Iterator[Tally]:
    """Counts the nodes replaced or dropped inside."""
    tally = Tally()
    token = _tally.set(tally)
    try:
        yield tally
    finally:
        _tally.reset(token)


def _count(rewrites: int) -> None:
    tally = _tally.get()
    if tally is not None:
        tally.rewrites += rewrites


def inline(into: Graph, body: Graph, operands: Sequence[Value], origin: Origin | None = None) -> tuple[Value, ...]:
    """Copies `body` into `into`; returns its outputs. `operands` replace its inputs and params in declaration order."""
    arguments = iter(operands)
    inside: dict[Value, Value] = {}
    for node in body.nodes:
        if node.op in ("input", "param"):
            inside[node[0]] = next(arguments)
            continue
        read = tuple([None if o is None else inside[o] for o in node.operands])
        copied = into.append(node.op, read, node.attrs, node.types, origin or node.origin)
        inside.update(zip(node.results, copied.results, strict=True))
    assert next(arguments, None) is None, "as many operands as inputs"
    return tuple(inside[o] for o in body.outputs)


def with_origins(graph: Graph, origins: Iterable[Origin]) -> Graph:
    """The graph with new origins, one per node, such as those read from text."""
    new = iter(origins)

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...]:
        return rewriter.graph.append(node.op, rewriter.operands(node), node.attrs, node.types, next(new)).results

    return rebuild(graph, visit, made_by="with_origins")


def map_bodies(graph: Graph, change: Callable[[Graph], Graph]) -> Graph:
    """Applies `change` to the bodies of the graph's loops and branches; returns the graph itself if it has none."""
    if not any(CONTROL in registry.get(n.op).traits for n in graph.nodes):
        return graph

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if CONTROL not in registry.get(node.op).traits:
            return None
        attrs = {k: change(v) if isinstance(v, Graph) else v for k, v in node.attrs.items()}
        return rewriter.graph.append(node.op, rewriter.operands(node), attrs, node.types, node.origin).results

    return rebuild(graph, visit, made_by="map_bodies")


# -- identities -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Identity:
    """Two equal expressions over placeholders, and the types they hold for."""

    name: str
    build: Callable[..., tuple[Any, Any]]
    dtypes: tuple[str, ...]
    left: Value
    right: Value
    places: tuple[Value, ...]
    doc: str = field(default="", compare=False)


IDENTITIES: list[Identity] = []


def identity(*dtypes: str) -> Callable[[Callable[..., tuple[Any, Any]]], Identity]:
    """Declare `left == right` for operands of these types; the rewriter replaces left by right."""

    def declare(build: Callable[..., tuple[Any, Any]]) -> Identity:
        graph = Graph(build.__name__)
        count = build.__code__.co_argcount
        places = tuple(graph.input(f"p{i}", (2, 3), dtypes[0]) for i in range(count))
        left, right = build(*places)
        declared = Identity(build.__name__, build, dtypes, left, right, places, build.__doc__ or "")
        IDENTITIES.append(declared)
        return declared

    return declare


def match(pattern: Value, value: Value, places: Sequence[Value], bindings: dict[Value, Value]) -> bool:
    """Whether `value` matches `pattern`; `bindings` collects the values of placeholders."""
    if pattern in places:
        return bindings.setdefault(pattern, value) == value
    a, b = pattern.node, value.node
    if a.op == "const":
        return b.op == "const" and _same_number(a.attrs["value"], b.attrs["value"])
    if a.op != b.op or pattern.index != value.index or a.attrs != b.attrs or len(a.operands) != len(b.operands):
        return False
    return all(
        p is not None and v is not None and match(p, v, places, bindings)
        for p, v in zip(a.operands, b.operands, strict=True)
    )


def _same_number(a: Array, b: Array) -> bool:
    """Compares a scalar of the pattern with a one-element constant, including the sign of zero."""
    if b.data.size != 1:
        return False
    wanted, have = a.data.astype(np.float64).item(), b.data.astype(np.float64).item()
    return wanted == have and math.copysign(1, wanted) == math.copysign(1, have)


def substitute(rewriter: Rewriter, like: Node, pattern: Value, bindings: dict[Value, Value]) -> Value:
    """Builds the right side of an identity in the new graph; `bindings` maps placeholders to its values."""
    if pattern in bindings:
        return bindings[pattern]
    node = pattern.node
    if node.op == "const":
        return rewriter.constant(like, node.attrs["value"].data.astype(like.types[0].dtype.numpy))
    operands = [None if o is None else substitute(rewriter, like, o, bindings) for o in node.operands]
    return rewriter.make(like, node.op, *operands, **node.attrs)[pattern.index]
