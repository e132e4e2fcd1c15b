"""Bodies of loops and branches: each is optimised as a graph of its own, before the graph that it is in.

What every step of a loop would do again moves out of it: to its body, a broadcast is a weight. So matrices are packed
once, before the loop, or, where they are weights of the whole graph, once and for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import CONTROL
from rlx.ir.rewrite import Rewriter, inline, rebuild
from rlx.mir.hoist_weights import Hoisted
from rlx.mir.weights import weight_nodes

Optimise = Callable[[Graph, bool], Hoisted]  # of a body, and whether it is certain to run


def optimise_bodies(graph: Graph, optimise: Optimise) -> Graph:
    """Replace each body by what `optimise` makes of it, with steady inputs as params; what it hoists goes before."""
    if not any(CONTROL in node.definition.traits for node in graph.nodes):
        return graph
    weights = weight_nodes(graph)

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if CONTROL not in node.definition.traits:
            return None
        return _Opened(rewriter, node, weights).run(optimise)

    return rebuild(graph, visit, made_by="optimise_bodies")


@dataclass
class _Slots:
    """What the operands of a loop or branch are to its bodies, by position among their inputs."""

    leading: int  # operands that bodies do not see: the predicate of a branch
    certain: bool  # bodies run at least once
    before: list[int] = field(default_factory=list)  # carries, and operands that a body must not look at too early
    steady: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)  # xs


def _slots(node: Node, weights: set[Node]) -> _Slots:
    """What may not run at all has only its weights prepared in advance, as far as that cannot fail."""
    leading = 1 if node.op == "cond" else 0
    operands = node.operands[leading:]
    carries = node.attrs.get("carries", 0)
    shared = node.attrs.get("broadcasts", len(operands) - carries)
    certain = node.op == "scan" and isinstance(node.attrs["length"], int) and node.attrs["length"] > 0
    slots = _Slots(leading, certain, before=list(range(carries)), after=list(range(carries + shared, len(operands))))
    for i in range(carries, carries + shared):
        operand = operands[i]
        assert operand is not None
        (slots.steady if certain or operand.node in weights else slots.before).append(i)
    return slots


class _Opened:
    """A loop or branch whose bodies are being replaced."""

    def __init__(self, rewriter: Rewriter, node: Node, weights: set[Node]) -> None:
        self.rewriter = rewriter
        self.node = node
        self.slots = _slots(node, weights)
        self.operands = [v for v in rewriter.operands(node)[self.slots.leading :] if v is not None]
        self.shared: list[Value] = []  # the new steady operands

    def run(self, optimise: Optimise) -> tuple[Value, ...]:
        bodies = {k: v for k, v in self.node.attrs.items() if isinstance(v, Graph)}
        made = {k: optimise(self._as_params(body), self.slots.certain) for k, body in bodies.items()}
        opened = {k: self._hoist(body, made[k]) for k, body in bodies.items()}
        attrs = dict(self.node.attrs) | {k: self._closed(bodies[k], *parts) for k, parts in opened.items()}
        slots = self.slots
        if "broadcasts" in attrs:
            attrs["broadcasts"] = len(slots.before) - attrs["carries"] + len(self.shared)
        leading = self.rewriter.operands(self.node)[: slots.leading]
        before, after = ([self.operands[i] for i in part] for part in (slots.before, slots.after))
        operands = [*leading, *before, *self.shared, *after]
        return self.rewriter.graph.build(self.node.op, operands, attrs, self.node.origin).results

    def _as_params(self, body: Graph) -> Graph:
        """The body with its steady inputs as params."""
        steady = {body.inputs[i] for i in self.slots.steady}

        def visit(rewriter: Rewriter, node: Node) -> Value | None:
            if node not in steady:
                return None
            return rewriter.graph.append("param", (), node.attrs, node.types, node.origin)[0]

        return rebuild(body, visit, made_by="optimise_bodies")

    def _hoist(self, body: Graph, parts: Hoisted) -> tuple[Graph, dict[str, int]]:
        """Put what was hoisted in front; the body, and which shared operand each of its params is."""
        outer = {body.inputs[i].attrs["name"]: self.operands[i] for i in self.slots.steady}
        bound = [outer[n.attrs["name"]] for n in parts.bind.params]
        outer |= zip(parts.derived, inline(self.rewriter.graph, parts.bind, bound), strict=True)
        places = {}
        for node in parts.main.params:
            value = outer[node.attrs["name"]]
            if value not in self.shared:
                self.shared.append(value)
            places[node.attrs["name"]] = self.shared.index(value)
        return _teed(parts.main), places

    def _closed(self, original: Graph, main: Graph, places: dict[str, int]) -> Graph:
        """The body with its inputs in order: before, shared, after. All bodies of a node get all shared operands."""
        body = Rewriter(main, "optimise_bodies")

        def declare(name: str, like: Node, index: int = 0) -> Value:
            return body.graph.append("input", (), {"name": name}, (like.types[index],), like.origin)[0]

        given = original.inputs
        inputs = {n.attrs["name"]: declare(n.attrs["name"], n) for n in (given[i] for i in self.slots.before)}
        names = (name for i in itertools.count() if not original.has(name := f"@{i}"))
        shared = [declare(next(names), value.node, value.index) for value in self.shared]
        inputs |= {n.attrs["name"]: declare(n.attrs["name"], n) for n in (given[i] for i in self.slots.after)}
        for node in main.nodes:
            if node.op == "param":
                body.values[node[0]] = shared[places[node.attrs["name"]]]
            elif node.op == "input":
                body.values[node[0]] = inputs[node.attrs["name"]]
            else:
                body.keep(node)
        return body.finish(main.outputs)


def _teed(body: Graph) -> Graph:
    """The body with a result for each use of an output that it gives several times, such as a carry that is also a y.

    So the kernel that computes it stores it in every place, and nothing needs to be copied.
    """
    repeated = {v: body.outputs.count(v) for v in body.outputs if _can_tee(v) and body.outputs.count(v) > 1}
    if not repeated:
        return body
    made: dict[Value, list[Value]] = {}

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        count = repeated.get(node[0]) if node.types else None
        if count is None:
            return None
        inner = rebuild(node.attrs["body"], lambda rewriter, node: None, made_by="tee")
        inner.outputs = inner.outputs * count
        attrs = node.attrs | {"body": inner}
        results = rewriter.graph.build(node.op, rewriter.operands(node), attrs, node.origin).results
        made[node[0]] = list(results)
        return results[0]

    graph = rebuild(body, visit, made_by="tee")
    taken = {value: iter(results) for value, results in made.items()}
    kept = zip(body.outputs, graph.outputs, strict=True)
    graph.outputs = tuple(next(taken[old]) if old in taken else new for old, new in kept)
    return graph


def _can_tee(value: Value) -> bool:
    return value.node.op in ("region", "fused_matmul") and len(value.node.types) == 1
