"""Reverse mode: a graph is built again, node by node, with a tape of pullbacks that then runs from its end.

`linearise` does it inside a graph under construction. `joint` makes one graph of outputs and gradients of it, and
`split` cuts that into a forward part that keeps values and a backward part that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.errors import GraphError, LowerError, VerifyError
from rlx.ir.compose import has_segments
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import LEAF, NAMED
from rlx.transforms import rule_tables
from rlx.transforms.build import declare, in_type, sum_to, zeros
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Pull
from rlx.transforms.walk import copied, decomposition, leaves, stamped

Keep = Callable[[Node], bool]


# -- partial derivatives ----------------------------------------------------------------------------------------------
def pull_elementwise(at: NodeCtx, ct: Value | None) -> Cotangents:
    """The VJP of an elementwise op: each operand's partial derivative times the cotangent, added up."""
    assert ct is not None
    made: list[Value | None] = []
    for i, (operand, wanted) in enumerate(zip(at.operands, at.wanted, strict=True)):
        if operand is None or not wanted:
            made.append(None)
        else:
            made.append(sum_to(scaled(at, i, ct), operand.type))
    return made


def scaled(at: NodeCtx, i: int, by: Value) -> Value:
    """`by` times the partial derivative with respect to operand i: a number, a value or a function of `by`."""
    partial = rule_tables.partials[at.node.op](at, i)
    if callable(partial):
        return partial(by)  # type: ignore[no-any-return]
    return by if partial is None else by * partial


# -- one node ---------------------------------------------------------------------------------------------------------
def step(into: Graph, node: Node, operands: Cotangents, wanted: Sequence[bool]) -> tuple[Sequence[Value], Pull | None]:
    """The node again, and its pullback; None where nothing flows back."""
    op = node.op
    if op in rule_tables.FLAT or not any(t.dtype.is_float for t in node.types):
        return copied(into, node, operands), None
    if rule_tables.refused(node) is not None:
        return copied(into, node, operands), lambda cts: _refused(node)
    if op in rule_tables.linearise and not has_segments(node):
        return rule_tables.linearise[op](into, node, operands, wanted)
    if op in rule_tables.partials or op in rule_tables.vjp:
        at = NodeCtx(node, tuple(operands), copied(into, node, operands), tuple(wanted))
        rule = pull_elementwise if op in rule_tables.partials else rule_tables.vjp[op]
        return at.results, lambda cts: rule(at, *cts)
    return through_parts(into, node, operands, wanted)


def through_parts(
    into: Graph, node: Node, operands: Cotangents, wanted: Sequence[bool]
) -> tuple[Sequence[Value], Pull]:
    """What the node is written with, and its pullback."""
    body = decomposition(node)
    if body is None:
        raise no_rule(node)
    given, flags = zip(*((o, w) for o, w in zip(operands, wanted, strict=True) if o is not None), strict=True)
    inner = linearise(into, body, given, flags)

    def pull(cts: Cotangents) -> Cotangents:
        found = iter(inner.pull(cts))
        return [None if o is None else next(found) for o in operands]

    return inner.outputs, pull


def _refused(node: Node) -> Cotangents:
    raise refusal(node)


def refusal(node: Node) -> GraphError:
    """The error of an op that cannot be differentiated."""
    return GraphError(f"{node.op}: has no derivative, {rule_tables.refused(node)}", notes=[f"at: {node.origin}"])


def no_rule(node: Node) -> LowerError:
    """The error of an op that nobody has said how to differentiate."""
    place = node.definition.place
    if node.definition.is_builtin:
        hint = f"add it in src/rlx/transforms/rules/{node.definition.group}.py"
    else:
        hint = f"give decompose= to rlx.op at {place}, or use g.custom_fn with rules of its own"
    return LowerError(f"op {node.op}: has no derivative rule", hint=hint, notes=[f"at: {node.origin}"])


# -- a graph ----------------------------------------------------------------------------------------------------------
@dataclass
class Linear:
    """A graph built again inside another: its outputs, and what takes cotangents back to its leaves."""

    into: Graph
    body: Graph
    outputs: tuple[Value, ...]
    active: set[Value]  # values of the body that change with the leaves asked for
    tape: list[tuple[Node, Sequence[bool], Pull]] = field(default_factory=list)

    def pull(self, cts: Cotangents) -> list[Value | None]:
        """Cotangents of the leaves from those of the outputs; None is zero."""
        found: dict[Value, Value] = {}
        for output, ct in zip(self.body.outputs, cts, strict=True):
            if ct is not None and output in self.active:
                self._add(found, output, ct)
        for node, wanted, pull in reversed(self.tape):
            given = [found.pop(r, None) for r in node.results]
            if all(ct is None for ct in given):
                continue
            with stamped(self.into, node, "vjp"):
                made = pull(given)
                for i, (operand, flag, ct) in enumerate(zip(node.operands, wanted, made, strict=True)):
                    if operand is not None and flag and ct is not None:
                        if ct.type != operand.type:
                            raise VerifyError(f"{node.op}: its VJP gives {ct.type} for operand {i}, {operand.type}")
                        self._add(found, operand, ct)
        return [found.get(n[0]) for n in leaves(self.body)]

    def _add(self, found: dict[Value, Value], of: Value, ct: Value) -> None:
        found[of] = _together(found[of], ct) if of in found else ct


def _together(a: Value, b: Value) -> Value:
    """The sum of two gradients. Rows that a gather sends back go to where the other one lies, not to zeros first."""
    for table, rows in ((a, b), (b, a)):
        if rows.node.op == "scatter_add" and _is_zero(rows.node.operands[0]):
            return a.graph.one("scatter_add", table, *rows.node.operands[1:])
    return a + b


def _is_zero(value: Value | None) -> bool:
    """Whether a value is the constant 0 everywhere, as `zeros` makes it."""
    if value is None or value.node.op != "expand" or value.node.operands[0] is None:
        return False
    scalar = value.node.operands[0].node
    return scalar.op == "const" and not np.any(scalar.attrs["value"].data)


def linearise(into: Graph, body: Graph, given: Cotangents, wanted: Sequence[bool]) -> Linear:
    """`body` inside `into`, with `given` for its leaves; `wanted` says of which leaves cotangents are asked for."""
    values: dict[Value, Value | None] = {}
    made = Linear(into, body, (), set())
    for leaf, value, flag in zip(leaves(body), given, wanted, strict=True):
        values[leaf[0]] = value
        if flag and leaf.types[0].dtype.is_float:
            made.active.add(leaf[0])
    live = body.reachable(body.outputs)
    for node in body.nodes:
        if node.op in NAMED or node not in live:
            continue
        operands = [None if o is None else values[o] for o in node.operands]
        flags = [o in made.active for o in node.operands]
        if LEAF in node.definition.traits or not any(flags):
            results: Sequence[Value] = copied(into, node, operands)
        else:
            results, pull = step(into, node, operands, flags)
            if pull is not None:
                made.tape.append((node, flags, pull))
                made.active.update(r for r in node.results if r.dtype.is_float)
        values.update(zip(node.results, results, strict=True))
    found = [values[o] for o in body.outputs]
    made.outputs = tuple(v for v in found if v is not None)
    return made


# -- outputs and gradients in one graph -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Joint:
    """Inputs are those of the body, then cotangents; outputs are those of the body, then gradients."""

    body: Graph
    graph: Graph
    inputs: int
    outputs: int
    start: int  # the number of the first node of the way back
    cotangents: list[int]  # outputs of the body that have a cotangent
    gradients: list[int]  # inputs of the body that have a gradient


def joint(body: Graph, wanted: Sequence[bool], seeded: Sequence[bool]) -> Joint:
    """The body with the gradients of the leaves `wanted`, given cotangents of the outputs `seeded`."""
    graph = Graph(f"{body.name}_vjp")
    graph.limits = dict(body.limits)
    given = [declare(graph, n.attrs["name"], n.types[0]) for n in leaves(body)]
    which = [i for i, s in enumerate(seeded) if s]
    cts = {i: declare(graph, f"d_{i}", body.outputs[i].type) for i in which}
    made = linearise(graph, body, given, wanted)
    start = len(graph.nodes)
    grads = made.pull([cts.get(i) for i in range(len(body.outputs))])
    kept = [i for i, g in enumerate(grads) if g is not None and wanted[i]]
    graph.set_outputs([*made.outputs, *(g for i in kept if (g := grads[i]) is not None)])
    return Joint(body, graph, len(given), len(body.outputs), start, which, kept)


@dataclass(frozen=True)
class Split:
    """A joint graph in two: `forward` gives the outputs and what is saved, `backward` takes `needs` and cotangents."""

    forward: Graph
    backward: Graph
    needs: list[Value]  # values of the joint graph that the backward part reads: inputs, or saved ones
    saved: list[Value]


GROWS = ("reshape", "transpose", "expand", "assume_equal")  # views that are no smaller than what they show


def split(made: Joint, keep: Keep | None = None, constant: Iterable[int] = ()) -> Split:
    """Cut where the way back starts. What it needs is saved if `keep` says so, else computed again.

    Views and what depends on `steady` inputs alone are always computed again.
    """
    graph = made.graph
    inputs = graph.inputs[: made.inputs]
    late = set(graph.nodes[made.start :])
    varied = _reached(graph, [n for i, n in enumerate(inputs) if i not in set(constant)])
    grads = graph.outputs[made.outputs :]
    again: set[Node] = set()
    needed: set[Value] = set()
    stack = list(grads)
    while stack:
        value = stack.pop()
        node = value.node
        if node in again:
            continue
        if node.op in NAMED:
            needed.add(value)
        elif node in late or node not in varied or _is_view_of_input(node) or not _kept(node, keep):
            again.add(node)
            stack += [o for o in node.operands if o is not None]
        else:
            needed.add(value)
    needed -= {n[0] for n in graph.inputs[made.inputs :]}
    needs = sorted(needed, key=lambda v: (v.node.id, v.index))
    saved = [v for v in needs if v.node.op not in NAMED]
    forward = made.body.copy()  # as it was, where nothing inside of it is asked for
    if saved:
        forward = _part(graph, inputs, (), graph.nodes, [*graph.outputs[: made.outputs], *saved])
    cts = graph.inputs[made.inputs :]
    backward = _part(graph, (), [*needs, *(n[0] for n in cts)], _when_needed(graph, again, late), grads)
    return Split(forward, backward, needs, saved)


def _when_needed(graph: Graph, nodes: set[Node], late: set[Node]) -> list[Node]:
    """The nodes in order; what is computed again comes right before its first use and does not wait in memory."""
    order: dict[Node, None] = {}
    for last in (n for n in graph.nodes if n in nodes and n in late):
        stack = [last]
        while stack:
            waiting = [
                o.node for o in stack[-1].operands
                if o is not None and o.node in nodes and o.node not in late and o.node not in order
            ]  # fmt: skip
            if waiting:
                stack.append(waiting[0])
            else:
                order.setdefault(stack.pop())
    order.update(dict.fromkeys(n for n in graph.nodes if n in nodes))  # gradients that no cotangent has a part in
    return list(order)


def _reached(graph: Graph, start: Sequence[Node]) -> set[Node]:
    """All nodes that depend on some."""
    found = set(start)
    for node in graph.nodes:
        if any(o is not None and o.node in found for o in node.operands):
            found.add(node)
    return found


def _kept(node: Node, keep: Keep | None) -> bool:
    return node.op not in GROWS if keep is None else keep(node)


def _is_view_of_input(node: Node) -> bool:
    while node.op in (*GROWS, "slice"):
        operand = node.operands[0]
        assert operand is not None
        node = operand.node
    return LEAF in node.definition.traits


def _part(
    graph: Graph, inputs: Sequence[Node], needs: Sequence[Value], nodes: Sequence[Node], outputs: Sequence[Value]
) -> Graph:
    """Some nodes of a graph, in order, as a graph: leaves are `inputs` again and an input for each of `needs`."""
    part = Graph(graph.name)
    part.limits = dict(graph.limits)
    inside = {n[0]: declare(part, n.attrs["name"], n.types[0]) for n in inputs}
    inside |= {v: declare(part, f"r{i}", v.type) for i, v in enumerate(needs)}
    wanted = _before(outputs, inside)
    for node in nodes:
        if node in wanted and node.op not in NAMED:
            operands = [None if o is None else inside[o] for o in node.operands]
            for old, new in zip(node.results, copied(part, node, operands), strict=True):
                inside.setdefault(old, new)
    return part.set_outputs([inside[o] for o in outputs])


def _before(outputs: Sequence[Value], given: dict[Value, Value]) -> set[Node]:
    """Nodes that the outputs need, up to the values that are given."""
    found: set[Node] = set()
    stack = [o for o in outputs if o not in given]
    while stack:
        node = stack.pop().node
        if node not in found:
            found.add(node)
            stack += [o for o in node.operands if o is not None and o not in given]
    return found


# -- transposition ----------------------------------------------------------------------------------------------------
def transposed(
    into: Graph, linear: Graph, given: Cotangents, which: Sequence[bool], cts: Cotangents
) -> list[Value | None]:
    """The transpose of a graph that is linear in the leaves `which`: cotangents of its outputs -> of those leaves.

    What stands for those leaves themselves does not matter; `given` has None there.
    """
    pairs = zip(leaves(linear), given, strict=True)
    filled = [zeros(into, n.types[0]) if v is None else v for n, v in pairs]
    found = linearise(into, linear, filled, which).pull(cts)
    return [f for f, w in zip(found, which, strict=True) if w]


def pushed_by_vjp(at: NodeCtx, tangents: Cotangents) -> Cotangents:
    """The JVP of a node from its VJP, which is linear in the cotangents: the transpose of its transpose."""
    inner = Graph("pullback")
    operands = [None if o is None else declare(inner, f"x{i}", o.type) for i, o in enumerate(at.operands)]
    results = [declare(inner, f"y{i}", r.type) for i, r in enumerate(at.results)]
    cts = [declare(inner, f"d{i}", r.type) if r.dtype.is_float else None for i, r in enumerate(at.results)]
    wanted = tuple(t is not None for t in tangents)
    rule: Any = pull_elementwise if at.node.op in rule_tables.partials else rule_tables.vjp[at.node.op]
    pulled = rule(NodeCtx(at.node, tuple(operands), tuple(results), wanted), *cts)
    pairs = [(p, t) for p, t in zip(pulled, tangents, strict=True) if p is not None and t is not None]
    inner.set_outputs([p for p, _ in pairs])
    given = [*(o for o in at.operands if o is not None), *at.results]
    which = [False] * len(given) + [True] * sum(c is not None for c in cts)
    given += [None] * (len(which) - len(given))  # type: ignore[list-item]
    found = iter(transposed(at.graph, inner, given, which, [in_type(t, p.dtype) for p, t in pairs]))
    return [None if c is None else next(found) for c in cts]
