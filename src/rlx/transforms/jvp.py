"""Forward mode: rebuilds a graph with a tangent for each value that depends on the selected inputs."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import VerifyError
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import LEAF, NAMED
from rlx.transforms import rule_tables
from rlx.transforms.build import cast_to, sum_present
from rlx.transforms.rule_tables import Cotangents, NodeCtx
from rlx.transforms.vjp import jvp_from_vjp, no_rule, refusal, times_partial
from rlx.transforms.walk import copy_node, decomposition, leaves, rule_scope


def push(
    into: Graph, body: Graph, leaf_values: Cotangents, tangents: Cotangents
) -> tuple[list[Value], list[Value | None]]:
    """Inline `body` into `into` with values for its leaves; returns its outputs and their tangents (None is zero)."""
    values: dict[Value, Value | None] = {}
    active: dict[Value, Value] = {}
    for leaf, value, tangent in zip(leaves(body), leaf_values, tangents, strict=True):
        values[leaf[0]] = value
        if tangent is not None and leaf.types[0].dtype.is_float:
            active[leaf[0]] = tangent
    live = body.reachable(body.outputs)
    for node in body.nodes:
        if node.op in NAMED or node not in live:
            continue
        operands = [None if o is None else values[o] for o in node.operands]
        operand_tangents = [None if o is None else active.get(o) for o in node.operands]
        if LEAF in node.definition.traits or all(t is None for t in operand_tangents):
            results: Sequence[Value] = copy_node(into, node, operands)
        else:
            results, result_tangents = step(into, node, operands, operand_tangents)
            for result, tangent in zip(node.results, result_tangents, strict=True):
                if tangent is not None:
                    if tangent.type != result.type:
                        raise VerifyError(f"{node.op}: its JVP returns {tangent.type} for {result.type}")
                    active[result] = tangent
        values.update(zip(node.results, results, strict=True))
    outputs = [v for o in body.outputs if (v := values[o]) is not None]
    return outputs, [active.get(o) for o in body.outputs]


def step(into: Graph, node: Node, operands: Cotangents, tangents: Cotangents) -> tuple[Sequence[Value], Cotangents]:
    """Copy the node into the graph; returns its results and their tangents."""
    op = node.op
    if op in rule_tables.ZERO_GRADIENT or not any(t.dtype.is_float for t in node.types):
        return copy_node(into, node, operands), [None] * len(node.results)
    if rule_tables.refused(node) is not None:
        raise refusal(node)
    if op in rule_tables.push:
        with rule_scope(into, node, "jvp"):
            return rule_tables.push[op](into, node, operands, tangents)
    if op in rule_tables.partials or op in rule_tables.vjp:
        results = copy_node(into, node, operands)
        at = NodeCtx(node, tuple(operands), results, tuple(t is not None for t in tangents))
        with rule_scope(into, node, "jvp"):
            if op in rule_tables.jvp:
                return results, rule_tables.jvp[op](at, *tangents)
            return results, push_elementwise(at, tangents) if op in rule_tables.partials else jvp_from_vjp(at, tangents)
    body = decomposition(node)
    if body is None:
        raise no_rule(node)
    present = [i for i, o in enumerate(operands) if o is not None]
    return push(into, body, [operands[i] for i in present], [tangents[i] for i in present])


def push_elementwise(at: NodeCtx, tangents: Cotangents) -> Cotangents:
    """Compute the JVP of an elementwise op: partial derivatives times tangents."""
    type_ = at.result.type
    terms = []
    for i, tangent in enumerate(tangents):
        if tangent is not None:
            wide = cast_to(tangent, type_.dtype)
            if wide.shape != type_.shape:  # before the product: a partial may be a where that does not broadcast
                wide = at.graph.one("expand", wide, shape=type_.shape)
            terms.append(cast_to(times_partial(at, i, wide), type_.dtype))
    return [sum_present(terms)]
