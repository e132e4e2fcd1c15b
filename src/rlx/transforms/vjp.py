"""Reverse mode: rebuilds a graph node by node with a tape of pullbacks, then runs the tape backwards.

`linearise` does this inside a graph under construction. `joint` builds one graph of outputs and gradients, and `split`
cuts that into a forward part that saves values and a backward part that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from rlx.errors import GraphError, LowerError, VerifyError
from rlx.fast_dataclass import dataclass
from rlx.ir.compose import has_segments
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import LEAF, NAMED, checked_results
from rlx.ir.rewrite import inline
from rlx.transforms import rule_tables
from rlx.transforms.build import cast_to, declare, sum_to, zeros
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Pull
from rlx.transforms.walk import copy_node, decomposition, leaves, rule_scope

Keep = Callable[[Node], bool]


# -- partial derivatives ----------------------------------------------------------------------------------------------
def pull_elementwise(at: NodeCtx, ct: Value | None) -> Cotangents:
    """Compute the VJP of an elementwise op: the partial derivatives times the cotangent, summed to operand shapes."""
    assert ct is not None
    cotangents: list[Value | None] = []
    for i, (operand, wanted) in enumerate(zip(at.operands, at.wanted, strict=True)):
        if operand is None or not wanted:
            cotangents.append(None)
        else:
            cotangents.append(sum_to(times_partial(at, i, ct), operand.type))
    return cotangents


def times_partial(at: NodeCtx, i: int, by: Value) -> Value:
    """Multiply `by` by the partial derivative for operand i, which is a number, a value or a function of `by`."""
    partial = rule_tables.partials[at.node.op](at, i)
    if callable(partial):
        return partial(by)  # type: ignore[no-any-return]
    return by if partial is None else by * partial


# -- one node ---------------------------------------------------------------------------------------------------------
def step(into: Graph, node: Node, operands: Cotangents, wanted: Sequence[bool]) -> tuple[Sequence[Value], Pull | None]:
    """Copy the node into the graph; returns its results and its pullback (None if no gradient flows)."""
    op = node.op
    if op in rule_tables.ZERO_GRADIENT or not any(t.dtype.is_float for t in node.types):
        return copy_node(into, node, operands), None
    if rule_tables.refused(node) is not None:
        return copy_node(into, node, operands), lambda cts: _raise_refusal(node)
    if op in rule_tables.linearise and not has_segments(node):
        return rule_tables.linearise[op](into, node, operands, wanted)
    if op in rule_tables.partials or op in rule_tables.vjp:
        at = NodeCtx(node, tuple(operands), copy_node(into, node, operands), tuple(wanted))
        rule = pull_elementwise if op in rule_tables.partials else rule_tables.vjp[op]
        return at.results, lambda cts: checked_results("VJP", op, rule(at, *cts), len(operands))
    return linearise_decomposition(into, node, operands, wanted)


def linearise_decomposition(
    into: Graph, node: Node, operands: Cotangents, wanted: Sequence[bool]
) -> tuple[Sequence[Value], Pull]:
    """Inline the node's decomposition; returns its results and its pullback."""
    body = decomposition(node)
    if body is None:
        raise no_rule(node)
    present, flags = zip(*((o, w) for o, w in zip(operands, wanted, strict=True) if o is not None), strict=True)
    inner = linearise(into, body, present, flags)

    def pull(cts: Cotangents) -> Cotangents:
        gradients = iter(inner.pull(cts))
        return [None if o is None else next(gradients) for o in operands]

    return inner.outputs, pull


def _raise_refusal(node: Node) -> Cotangents:
    raise refusal(node)


def refusal(node: Node) -> GraphError:
    """Return the error for an op that cannot be differentiated."""
    return GraphError(f"{node.op}: has no derivative, {rule_tables.refused(node)}", notes=[f"at: {node.origin}"])


def no_rule(node: Node) -> LowerError:
    """Return the error for an op without a derivative rule."""
    place = node.definition.place
    if node.definition.is_builtin:
        hint = f"add it in src/rlx/transforms/rules/{node.definition.group}.py"
    else:
        hint = f"give decompose= to rlx.op at {place}, or a rule, rlx.transforms.rule_tables.vjp({node.op!r})"
    return LowerError(f"op {node.op}: has no derivative rule", hint=hint, notes=[f"at: {node.origin}"])


# -- a graph ----------------------------------------------------------------------------------------------------------
@dataclass
class Linear:
    """A graph inlined into another: its outputs, and the tape that takes cotangents back to its leaves."""

    into: Graph
    body: Graph
    outputs: tuple[Value, ...]
    active: set[Value]  # values of the body that depend on the selected leaves
    tape: list[tuple[Node, Sequence[bool], Pull]] = field(default_factory=list)

    def pull(self, cts: Cotangents) -> list[Value | None]:
        """Return cotangents of the leaves for cotangents of the outputs; None is zero."""
        cotangents: dict[Value, Value] = {}
        for output, ct in zip(self.body.outputs, cts, strict=True):
            if ct is not None and output in self.active:
                self._add(cotangents, output, ct)
        for node, wanted, pull in reversed(self.tape):
            result_cts = [cotangents.pop(r, None) for r in node.results]
            if all(ct is None for ct in result_cts):
                continue
            with rule_scope(self.into, node, "vjp"):
                operand_cts = pull(result_cts)
                for i, (operand, flag, ct) in enumerate(zip(node.operands, wanted, operand_cts, strict=True)):
                    if operand is not None and flag and ct is not None:
                        if ct.type != operand.type:
                            raise VerifyError(f"{node.op}: its VJP returns {ct.type} for operand {i}, {operand.type}")
                        self._add(cotangents, operand, ct)
        return [cotangents.get(n[0]) for n in leaves(self.body)]

    def _add(self, cotangents: dict[Value, Value], of: Value, ct: Value) -> None:
        cotangents[of] = _add_gradients(cotangents[of], ct) if of in cotangents else ct


def _add_gradients(a: Value, b: Value) -> Value:
    """Add two gradients. Rows from a gather are scattered into the other gradient directly, not into zeros first."""
    for table, rows in ((a, b), (b, a)):
        if rows.node.op == "scatter_add" and _is_zero(rows.node.operands[0]):
            return a.graph.one("scatter_add", table, *rows.node.operands[1:])
    return a + b


def _is_zero(value: Value | None) -> bool:
    """Whether a value is all zeros, as built by `zeros`."""
    if value is None or value.node.op != "expand" or value.node.operands[0] is None:
        return False
    scalar = value.node.operands[0].node
    return scalar.op == "const" and not np.any(scalar.attrs["value"].data)


def linearise(into: Graph, body: Graph, leaf_values: Cotangents, wanted: Sequence[bool]) -> Linear:
    """Inline `body` into `into` with values for its leaves; `wanted` flags the leaves that need cotangents."""
    values: dict[Value, Value | None] = {}
    linear = Linear(into, body, (), set())
    for leaf, value, flag in zip(leaves(body), leaf_values, wanted, strict=True):
        values[leaf[0]] = value
        if flag and leaf.types[0].dtype.is_float:
            linear.active.add(leaf[0])
    live = body.reachable(body.outputs)
    for node in body.nodes:
        if node.op in NAMED or node not in live:
            continue
        operands = [None if o is None else values[o] for o in node.operands]
        flags = [o in linear.active for o in node.operands]
        if LEAF in node.definition.traits or not any(flags):
            results: Sequence[Value] = copy_node(into, node, operands)
        else:
            results, pull = step(into, node, operands, flags)
            if pull is not None:
                linear.tape.append((node, flags, pull))
                linear.active.update(r for r in node.results if r.dtype.is_float)
        values.update(zip(node.results, results, strict=True))
    outputs = [values[o] for o in body.outputs]
    linear.outputs = tuple(v for v in outputs if v is not None)
    return linear


# -- outputs and gradients in one graph -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Joint:
    """A graph with inputs: those of the body, then cotangents; and outputs: those of the body, then gradients."""

    body: Graph
    graph: Graph
    inputs: int
    outputs: int
    start: int  # the index of the first node of the backward pass
    cotangents: list[int]  # outputs of the body that have a cotangent
    gradients: list[int]  # inputs of the body that have a gradient


def joint(body: Graph, wanted: Sequence[bool], seeded: Sequence[bool]) -> Joint:
    """Build the body together with gradients of the leaves `wanted`, for cotangents of the outputs `seeded`."""
    graph = Graph(f"{body.name}_vjp")
    graph.limits = dict(body.limits)
    leaf_values = [declare(graph, n.attrs["name"], n.types[0]) for n in leaves(body)]
    which = [i for i, s in enumerate(seeded) if s]
    cts = {i: declare(graph, f"d_{i}", body.outputs[i].type) for i in which}
    linear = linearise(graph, body, leaf_values, wanted)
    start = len(graph.nodes)
    grads = linear.pull([cts.get(i) for i in range(len(body.outputs))])
    with_gradient = [i for i, g in enumerate(grads) if g is not None and wanted[i]]
    graph.set_outputs([*linear.outputs, *(g for i in with_gradient if (g := grads[i]) is not None)])
    return Joint(body, graph, len(leaf_values), len(body.outputs), start, which, with_gradient)


def joint_of_jvp(body: Graph, pushed: Graph) -> Joint:
    """Order a JVP graph of `body` for `split`: first what needs no tangent, then what tangents pass through."""
    inputs, outputs = len(leaves(body)), len(body.outputs)
    tangents = leaves(pushed)[inputs:]
    linear = _dependents(pushed, tangents)
    graph = Graph(pushed.name)
    graph.limits = dict(pushed.limits)
    values: dict[Value, Value] = {n[0]: declare(graph, n.attrs["name"], n.types[0]) for n in leaves(pushed)}
    primals = [values[n[0]] for n in leaves(pushed)[:inputs]]
    is_late = any(o.node in linear for o in pushed.outputs[:outputs])  # a loop computes values and tangents together
    results = inline(graph, body, primals) if is_late else ()
    start = 0
    for nodes in ([n for n in pushed.nodes if n not in linear], [n for n in pushed.nodes if n in linear]):
        start = len(graph.nodes)
        for node in nodes:
            if node.op not in NAMED:
                operands = [None if o is None else values[o] for o in node.operands]
                values.update(zip(node.results, copy_node(graph, node, operands), strict=True))
    graph.set_outputs(
        [*(results or [values[o] for o in pushed.outputs[:outputs]]), *(values[o] for o in pushed.outputs[outputs:])]
    )
    return Joint(body, graph, inputs, outputs, start, list(range(len(tangents))), list(range(outputs)))


@dataclass(frozen=True)
class Split:
    """A joint graph in two: `forward` returns outputs and saved values, `backward` takes `needs` and cotangents."""

    forward: Graph
    backward: Graph
    needs: list[Value]  # values of the joint graph that the backward part reads: inputs or saved values
    saved: list[Value]


FREE_VIEWS = ("reshape", "transpose", "expand", "assume_equal")  # views that are no smaller than their operand


def split(joint_graph: Joint, keep: Keep | None = None, constant: Iterable[int] = ()) -> Split:
    """Split a joint graph where the backward pass begins. Values it needs are saved if `keep` says so, else recomputed.

    Views, and values that depend on `constant` inputs alone, are always recomputed.
    """
    graph = joint_graph.graph
    inputs = graph.inputs[: joint_graph.inputs]
    late = set(graph.nodes[joint_graph.start :])
    varying = _dependents(graph, [n for i, n in enumerate(inputs) if i not in set(constant)])
    grads = graph.outputs[joint_graph.outputs :]
    recomputed: set[Node] = set()
    needed: set[Value] = set()
    stack = list(grads)
    while stack:
        value = stack.pop()
        node = value.node
        if node in recomputed:
            continue
        if node.op in NAMED:
            needed.add(value)
        elif node in late or node not in varying or _is_view_of_input(node) or not _is_saved(node, keep):
            recomputed.add(node)
            stack += [o for o in node.operands if o is not None]
        else:
            needed.add(value)
    needed -= {n[0] for n in graph.inputs[joint_graph.inputs :]}
    needs = sorted(needed, key=lambda v: (v.node.id, v.index))
    saved = [v for v in needs if v.node.op not in NAMED]
    forward = joint_graph.body.copy()  # unchanged if no intermediate is saved
    if saved:
        forward = _part(graph, inputs, (), graph.nodes, [*graph.outputs[: joint_graph.outputs], *saved])
    cts = graph.inputs[joint_graph.inputs :]
    backward = _part(graph, (), [*needs, *(n[0] for n in cts)], _when_needed(graph, recomputed, late), grads)
    return Split(forward, backward, needs, saved)


def _when_needed(graph: Graph, nodes: set[Node], late: set[Node]) -> list[Node]:
    """Order the nodes; recomputed values come right before their first use, to keep memory low."""
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
    order.update(dict.fromkeys(n for n in graph.nodes if n in nodes))  # gradients that depend on no cotangent
    return list(order)


def _dependents(graph: Graph, start: Sequence[Node]) -> set[Node]:
    """Return all nodes that depend on those in `start`."""
    reached = set(start)
    for node in graph.nodes:
        if any(o is not None and o.node in reached for o in node.operands):
            reached.add(node)
    return reached


def _is_saved(node: Node, keep: Keep | None) -> bool:
    return node.op not in FREE_VIEWS if keep is None else keep(node)


def _is_view_of_input(node: Node) -> bool:
    while node.op in (*FREE_VIEWS, "slice"):
        operand = node.operands[0]
        assert operand is not None
        node = operand.node
    return LEAF in node.definition.traits


def _part(
    graph: Graph, inputs: Sequence[Node], needs: Sequence[Value], nodes: Sequence[Node], outputs: Sequence[Value]
) -> Graph:
    """Return some nodes of a graph, in order, as a graph with `inputs` and one more input for each of `needs`."""
    part = Graph(graph.name)
    part.limits = dict(graph.limits)
    inside = {n[0]: declare(part, n.attrs["name"], n.types[0]) for n in inputs}
    inside |= {v: declare(part, f"r{i}", v.type) for i, v in enumerate(needs)}
    wanted = _needed_nodes(outputs, inside)
    for node in nodes:
        if node in wanted and node.op not in NAMED:
            operands = [None if o is None else inside[o] for o in node.operands]
            for old, new in zip(node.results, copy_node(part, node, operands), strict=True):
                inside.setdefault(old, new)
    return part.set_outputs([inside[o] for o in outputs])


def _needed_nodes(outputs: Sequence[Value], known: dict[Value, Value]) -> set[Node]:
    """Return the nodes that the outputs need, stopping at known values."""
    nodes: set[Node] = set()
    stack = [o for o in outputs if o not in known]
    while stack:
        node = stack.pop().node
        if node not in nodes:
            nodes.add(node)
            stack += [o for o in node.operands if o is not None and o not in known]
    return nodes


# -- transposition ----------------------------------------------------------------------------------------------------
def transpose_linear(
    into: Graph, linear: Graph, leaf_values: Cotangents, which: Sequence[bool], cts: Cotangents
) -> list[Value | None]:
    """Transpose a graph that is linear in the leaves `which`: cotangents of its outputs -> cotangents of those leaves.

    The values of those leaves do not matter; `leaf_values` has None there.
    """
    pairs = zip(leaves(linear), leaf_values, strict=True)
    filled = [zeros(into, n.types[0]) if v is None else v for n, v in pairs]
    cotangents = linearise(into, linear, filled, which).pull(cts)
    return [f for f, w in zip(cotangents, which, strict=True) if w]


def jvp_from_vjp(at: NodeCtx, tangents: Cotangents) -> Cotangents:
    """Compute the JVP of a node by transposing its VJP, which is linear in the cotangents."""
    inner = Graph("pullback")
    operands = [None if o is None else declare(inner, f"x{i}", o.type) for i, o in enumerate(at.operands)]
    results = [declare(inner, f"y{i}", r.type) for i, r in enumerate(at.results)]
    cts = [declare(inner, f"d{i}", r.type) if r.dtype.is_float else None for i, r in enumerate(at.results)]
    wanted = tuple(t is not None for t in tangents)
    rule: Any = pull_elementwise if at.node.op in rule_tables.partials else rule_tables.vjp[at.node.op]
    pulled = rule(NodeCtx(at.node, tuple(operands), tuple(results), wanted), *cts)
    pairs = [(p, t) for p, t in zip(pulled, tangents, strict=True) if p is not None and t is not None]
    inner.set_outputs([p for p, _ in pairs])
    leaf_values = [*(o for o in at.operands if o is not None), *at.results]
    which = [False] * len(leaf_values) + [True] * sum(c is not None for c in cts)
    leaf_values += [None] * (len(which) - len(leaf_values))  # type: ignore[list-item]
    seeds = [cast_to(t, p.dtype) for p, t in pairs]
    result_tangents = iter(transpose_linear(at.graph, inner, leaf_values, which, seeds))
    return [None if c is None else next(result_tangents) for c in cts]
