"""Graph helpers of both differentiation modes and vmap: leaves, origins, activity, decompositions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlx.errors import GraphError
from rlx.ir.compose import expand_decomposition, has_segments
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import LEAF, NAMED
from rlx.transforms import rule_tables
from rlx.types import TensorType


def leaves(graph: Graph) -> list[Node]:
    """Return inputs, states and params in declaration order."""
    return [n for n in graph.nodes if n.op in NAMED]


@contextmanager
def rule_scope(graph: Graph, node: Node, made_by: str) -> Iterator[None]:
    """Give nodes built inside the origin of `node`, marked as made by a transform."""
    try:
        with graph.scope(node.origin.by(made_by)):
            yield
    except GraphError as error:
        error.add_note(f"  in the {made_by} of {node!r}, {node.origin}")
        raise


def copy_node(into: Graph, node: Node, operands: Sequence[Value | None]) -> tuple[Value, ...]:
    """Copy a node into another graph."""
    return into.append(node.op, tuple(operands), node.attrs, node.types, node.origin).results


def decomposition(node: Node) -> Graph | None:
    """Return the decomposition of a node for differentiation; None if it has none."""
    types = [None if o is None else o.type for o in node.operands]
    if node.op in rule_tables.parts and not has_segments(node):
        return _build_parts(node, types)
    definition = node.definition
    return None if definition.decompose is None else expand_decomposition(definition, types, node.attrs)


def _build_parts(node: Node, types: Sequence[TensorType | None]) -> Graph:
    body = Graph(node.op)
    values = [None if t is None else body.input(f"x{i}", t.shape, t.dtype) for i, t in enumerate(types)]
    results = rule_tables.parts[node.op](*values, **node.attrs)
    return body.set_outputs(results)


# -- activity ---------------------------------------------------------------------------------------------------------
def active_outputs(body: Graph, active: Sequence[bool]) -> list[bool]:
    """Return which outputs of a graph depend on the active leaves."""
    values = {n[0] for n, flag in zip(leaves(body), active, strict=True) if flag and n.types[0].dtype.is_float}
    for node in body.nodes:
        if LEAF in node.definition.traits or node.op in rule_tables.ZERO_GRADIENT:
            continue
        flags = [o in values for o in node.operands]
        if any(flags):
            results = zip(node.results, _active_results(node, flags), strict=True)
            values.update(v for v, is_active in results if is_active and v.dtype.is_float)
    return [o in values for o in body.outputs]


def _active_results(node: Node, flags: list[bool]) -> list[bool]:
    match node.op:
        case "scan":
            return active_scan(node, flags)[1]
        case "while_loop":
            return active_carries(node.attrs["body"], flags, node.attrs["carries"])[: node.attrs["carries"]]
        case "cond":
            one, other = (active_outputs(node.attrs[k], flags[1:]) for k in ("then_body", "else_body"))
            return [a or b for a, b in zip(one, other, strict=True)]
    return [True] * len(node.results)


def active_carries(body: Graph, flags: Sequence[bool], carries: int) -> list[bool]:
    """Return activity flags of a loop's operands; carries may become active during the loop."""
    current = list(flags)
    while True:
        after = active_outputs(body, current)[:carries]
        grown = [a or b for a, b in zip(current[:carries], after, strict=True)]
        if grown == current[:carries]:
            return current
        current[:carries] = grown


def active_scan(node: Node, flags: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Return activity flags of a scan's operands and of its results."""
    carries = node.attrs["carries"]
    inputs = active_carries(node.attrs["body"], flags, carries)
    outputs = active_outputs(node.attrs["body"], inputs)
    return inputs, [*inputs[:carries], *outputs[carries:]]
