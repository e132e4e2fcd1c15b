"""Forward mode: a graph is built again with a tangent beside each value that changes with the inputs asked for."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import VerifyError
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import LEAF, NAMED
from rlx.transforms import rule_tables
from rlx.transforms.build import in_type, one_of
from rlx.transforms.rule_tables import Cotangents, NodeCtx
from rlx.transforms.vjp import no_rule, pushed_by_vjp, refusal, scaled
from rlx.transforms.walk import copied, decomposition, leaves, stamped


def push(into: Graph, body: Graph, given: Cotangents, tangents: Cotangents) -> tuple[list[Value], list[Value | None]]:
    """`body` inside `into` with `given` for its leaves: its outputs and their tangents; None is zero."""
    values: dict[Value, Value | None] = {}
    active: dict[Value, Value] = {}
    for leaf, value, tangent in zip(leaves(body), given, tangents, strict=True):
        values[leaf[0]] = value
        if tangent is not None and leaf.types[0].dtype.is_float:
            active[leaf[0]] = tangent
    live = body.reachable(body.outputs)
    for node in body.nodes:
        if node.op in NAMED or node not in live:
            continue
        operands = [None if o is None else values[o] for o in node.operands]
        found = [None if o is None else active.get(o) for o in node.operands]
        if LEAF in node.definition.traits or all(t is None for t in found):
            results: Sequence[Value] = copied(into, node, operands)
        else:
            results, made = step(into, node, operands, found)
            for result, tangent in zip(node.results, made, strict=True):
                if tangent is not None:
                    if tangent.type != result.type:
                        raise VerifyError(f"{node.op}: its JVP gives {tangent.type} for {result.type}")
                    active[result] = tangent
        values.update(zip(node.results, results, strict=True))
    outputs = [v for o in body.outputs if (v := values[o]) is not None]
    return outputs, [active.get(o) for o in body.outputs]


def step(into: Graph, node: Node, operands: Cotangents, tangents: Cotangents) -> tuple[Sequence[Value], Cotangents]:
    """The node again, and the tangents of its results."""
    op = node.op
    if op in rule_tables.FLAT or not any(t.dtype.is_float for t in node.types):
        return copied(into, node, operands), [None] * len(node.results)
    if rule_tables.refused(node) is not None:
        raise refusal(node)
    if op in rule_tables.push:
        with stamped(into, node, "jvp"):
            return rule_tables.push[op](into, node, operands, tangents)
    if op in rule_tables.partials or op in rule_tables.vjp:
        results = copied(into, node, operands)
        at = NodeCtx(node, tuple(operands), results, tuple(t is not None for t in tangents))
        with stamped(into, node, "jvp"):
            if op in rule_tables.jvp:
                return results, rule_tables.jvp[op](at, *tangents)
            return results, push_elementwise(at, tangents) if op in rule_tables.partials else pushed_by_vjp(
                at, tangents
            )
    body = decomposition(node)
    if body is None:
        raise no_rule(node)
    there = [i for i, o in enumerate(operands) if o is not None]
    return push(into, body, [operands[i] for i in there], [tangents[i] for i in there])


def push_elementwise(at: NodeCtx, tangents: Cotangents) -> Cotangents:
    """The JVP of an elementwise op: partial derivatives times tangents."""
    type_ = at.result.type
    made = []
    for i, tangent in enumerate(tangents):
        if tangent is not None:
            wide = in_type(tangent, type_.dtype)
            if wide.shape != type_.shape:  # before the product: a partial may be a choice that does not broadcast
                wide = at.graph.one("expand", wide, shape=type_.shape)
            made.append(in_type(scaled(at, i, wide), type_.dtype))
    return [one_of(made)]
