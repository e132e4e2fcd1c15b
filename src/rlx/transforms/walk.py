"""What both modes of differentiation and vmap need of graphs: leaves, origins, activity, decompositions."""

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
    """Inputs, states and params in the order of their declaration."""
    return [n for n in graph.nodes if n.op in NAMED]


@contextmanager
def stamped(graph: Graph, node: Node, made_by: str) -> Iterator[None]:
    """What is built inside comes from where `node` does, made by a transform."""
    try:
        with graph.scope(node.origin.by(made_by)):
            yield
    except GraphError as error:
        error.add_note(f"  in the {made_by} of {node!r}, {node.origin}")
        raise


def copied(into: Graph, node: Node, operands: Sequence[Value | None]) -> tuple[Value, ...]:
    """The node again, in another graph."""
    return into.append(node.op, tuple(operands), node.attrs, node.types, node.origin).results


def decomposition(node: Node) -> Graph | None:
    """The graph that a node is written with, for differentiation; None where it is not."""
    types = [None if o is None else o.type for o in node.operands]
    if node.op in rule_tables.parts and not has_segments(node):
        return _built(node, types)
    definition = node.definition
    return None if definition.decompose is None else expand_decomposition(definition, types, node.attrs)


def _built(node: Node, types: Sequence[TensorType | None]) -> Graph:
    body = Graph(node.op)
    values = [None if t is None else body.input(f"x{i}", t.shape, t.dtype) for i, t in enumerate(types)]
    made = rule_tables.parts[node.op](*values, **node.attrs)
    return body.set_outputs(made)


# -- activity ---------------------------------------------------------------------------------------------------------
def moving_outputs(body: Graph, active: Sequence[bool]) -> list[bool]:
    """Which outputs of a graph may change with the leaves that do."""
    found = {n[0] for n, flag in zip(leaves(body), active, strict=True) if flag and n.types[0].dtype.is_float}
    for node in body.nodes:
        if LEAF in node.definition.traits or node.op in rule_tables.FLAT:
            continue
        flags = [o in found for o in node.operands]
        if any(flags):
            found.update(v for v, m in zip(node.results, _moves(node, flags), strict=True) if m and v.dtype.is_float)
    return [o in found for o in body.outputs]


def _moves(node: Node, flags: list[bool]) -> list[bool]:
    match node.op:
        case "scan":
            return moving_scan(node, flags)[1]
        case "while_loop":
            return moving_carries(node.attrs["body"], flags, node.attrs["carries"])[: node.attrs["carries"]]
        case "cond":
            one, other = (moving_outputs(node.attrs[k], flags[1:]) for k in ("then_body", "else_body"))
            return [a or b for a, b in zip(one, other, strict=True)]
    return [True] * len(node.results)


def moving_carries(body: Graph, flags: Sequence[bool], carries: int) -> list[bool]:
    """The flags of a loop's operands, with those of carries that come to change on the way."""
    found = list(flags)
    while True:
        after = moving_outputs(body, found)[:carries]
        grown = [a or b for a, b in zip(found[:carries], after, strict=True)]
        if grown == found[:carries]:
            return found
        found[:carries] = grown


def moving_scan(node: Node, flags: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """The flags of a scan's operands and of its results."""
    carries = node.attrs["carries"]
    inputs = moving_carries(node.attrs["body"], flags, carries)
    outputs = moving_outputs(node.attrs["body"], inputs)
    return inputs, [*inputs[:carries], *outputs[carries:]]
