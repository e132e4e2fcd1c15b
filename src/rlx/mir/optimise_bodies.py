"""Optimises the bodies of loops and branches, each as a graph of its own, before the enclosing graph.

Loop-invariant work moves out of the loop: inside a body, a broadcast operand counts as a weight. So matrices are packed
once before the loop, or, if they are weights of the enclosing graph, once at bind time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import field

from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import CONTROL
from rlx.ir.rewrite import Rewriter, inline, rebuild
from rlx.mir.hoist_weights import Hoisted
from rlx.mir.weight_only_values import weight_nodes

Optimise = Callable[[Graph, bool], Hoisted]  # (body, whether it is certain to run)


def optimise_bodies(graph: Graph, optimise: Optimise) -> Graph:
    """Optimise each body with its loop-invariant inputs as params; hoisted nodes move in front of the loop."""
    if not any(CONTROL in node.definition.traits for node in graph.nodes):
        return graph
    weights = weight_nodes(graph)

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if CONTROL not in node.definition.traits:
            return None
        return _BodyRewrite(rewriter, node, weights).run(optimise)

    return rebuild(graph, visit, made_by="optimise_bodies")


@dataclass
class _Slots:
    """The roles of a loop's or branch's operands in its bodies, by input position."""

    leading: int  # operands not passed to bodies: the predicate of a branch
    certain: bool  # whether bodies run at least once
    before: list[int] = field(default_factory=list)  # carries, and operands that must not be read before the body runs
    invariant: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)  # xs


def _slots(node: Node, weights: set[Node]) -> _Slots:
    """Assign roles. If the body may not run at all, only its weights count as loop-invariant."""
    leading = 1 if node.op == "cond" else 0
    operands = node.operands[leading:]
    carries = node.attrs.get("carries", 0)
    shared = node.attrs.get("broadcasts", len(operands) - carries)
    certain = node.op == "scan" and isinstance(node.attrs["length"], int) and node.attrs["length"] > 0
    slots = _Slots(leading, certain, before=list(range(carries)), after=list(range(carries + shared, len(operands))))
    for i in range(carries, carries + shared):
        operand = operands[i]
        assert operand is not None
        (slots.invariant if certain or operand.node in weights else slots.before).append(i)
    return slots


class _BodyRewrite:
    """A loop or branch whose bodies are being replaced."""

    def __init__(self, rewriter: Rewriter, node: Node, weights: set[Node]) -> None:
        self.rewriter = rewriter
        self.node = node
        self.slots = _slots(node, weights)
        self.operands = [v for v in rewriter.operands(node)[self.slots.leading :] if v is not None]
        self.shared: list[Value] = []  # the new loop-invariant operands

    def run(self, optimise: Optimise) -> tuple[Value, ...]:
        bodies = {k: v for k, v in self.node.attrs.items() if isinstance(v, Graph)}
        optimised = {k: optimise(self._as_params(body), self.slots.certain) for k, body in bodies.items()}
        hoisted = {k: self._hoist(body, optimised[k]) for k, body in bodies.items()}
        attrs = dict(self.node.attrs) | {k: self._with_inputs(bodies[k], *parts) for k, parts in hoisted.items()}
        slots = self.slots
        if "broadcasts" in attrs:
            attrs["broadcasts"] = len(slots.before) - attrs["carries"] + len(self.shared)
        leading = self.rewriter.operands(self.node)[: slots.leading]
        before, after = ([self.operands[i] for i in part] for part in (slots.before, slots.after))
        operands = [*leading, *before, *self.shared, *after]
        return self.rewriter.graph.build(self.node.op, operands, attrs, self.node.origin).results

    def _as_params(self, body: Graph) -> Graph:
        """Return the body with its loop-invariant inputs as params."""
        invariant = {body.inputs[i] for i in self.slots.invariant}

        def visit(rewriter: Rewriter, node: Node) -> Value | None:
            if node not in invariant:
                return None
            return rewriter.graph.append("param", (), node.attrs, node.types, node.origin)[0]

        return rebuild(body, visit, made_by="optimise_bodies")

    def _hoist(self, body: Graph, parts: Hoisted) -> tuple[Graph, dict[str, int]]:
        """Inline hoisted nodes in front; returns the body, and for each of its params the shared operand's index."""
        outer = {body.inputs[i].attrs["name"]: self.operands[i] for i in self.slots.invariant}
        bound = [outer[n.attrs["name"]] for n in parts.bind.params]
        outer |= zip(parts.derived, inline(self.rewriter.graph, parts.bind, bound), strict=True)
        places = {}
        for node in parts.main.params:
            value = outer[node.attrs["name"]]
            if value not in self.shared:
                self.shared.append(value)
            places[node.attrs["name"]] = self.shared.index(value)
        return _tee_outputs(parts.main), places

    def _with_inputs(self, original: Graph, main: Graph, places: dict[str, int]) -> Graph:
        """Order the inputs of the body: before, shared, after. All bodies of a node get all shared operands."""
        body = Rewriter(main, "optimise_bodies")

        def declare(name: str, like: Node, index: int = 0) -> Value:
            return body.graph.append("input", (), {"name": name}, (like.types[index],), like.origin)[0]

        old_inputs = original.inputs
        inputs = {n.attrs["name"]: declare(n.attrs["name"], n) for n in (old_inputs[i] for i in self.slots.before)}
        names = (name for i in itertools.count() if not original.has(name := f"@{i}"))
        shared = [declare(next(names), value.node, value.index) for value in self.shared]
        inputs |= {n.attrs["name"]: declare(n.attrs["name"], n) for n in (old_inputs[i] for i in self.slots.after)}
        for node in main.nodes:
            if node.op == "param":
                body.values[node[0]] = shared[places[node.attrs["name"]]]
            elif node.op == "input":
                body.values[node[0]] = inputs[node.attrs["name"]]
            else:
                body.keep(node)
        return body.finish(main.outputs)


def _tee_outputs(body: Graph) -> Graph:
    """Give repeated outputs one result per use, such as a carry that is also a y.

    The kernel that computes the value then stores it to every destination, and nothing is copied.
    """
    repeated = {v: body.outputs.count(v) for v in body.outputs if _can_tee(v) and body.outputs.count(v) > 1}
    if not repeated:
        return body
    copies: dict[Value, list[Value]] = {}

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        count = repeated.get(node[0]) if node.types else None
        if count is None:
            return None
        inner = node.attrs["body"].copy()
        inner.outputs = inner.outputs * count
        attrs = {**node.attrs, "body": inner}
        results = rewriter.graph.build(node.op, rewriter.operands(node), attrs, node.origin).results
        copies[node[0]] = list(results)
        return results[0]

    graph = rebuild(body, visit, made_by="tee")
    remaining = {value: iter(results) for value, results in copies.items()}
    pairs = zip(body.outputs, graph.outputs, strict=True)
    graph.outputs = tuple(next(remaining[old]) if old in remaining else new for old, new in pairs)
    return graph


def _can_tee(value: Value) -> bool:
    return value.node.op in ("region", "fused_matmul") and len(value.node.types) == 1
