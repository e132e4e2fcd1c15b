"""The verifier: builds each node's type again from its rule and compares. A failure is a defect of a pass."""

from __future__ import annotations

from rlx.errors import RlxError, VerifyError
from rlx.ir import registry
from rlx.ir.graph import Graph, Node
from rlx.ir.text import node_text


def verify(graph: Graph) -> None:
    """Raise VerifyError at the first node that is inconsistent."""
    seen: set[int] = set()
    for position, node in enumerate(graph.nodes):
        if node.id != position or node.graph is not graph:
            _fail(graph, node, f"has number {node.id} at position {position}, or belongs to another graph")
        for operand in node.operands:
            if operand is not None and (operand.node.graph is not graph or id(operand.node) not in seen):
                _fail(graph, node, f"reads {operand!r}, which is not defined before it")
        definition = registry.OPS.get(node.op)
        if definition is None:
            _fail(graph, node, "uses an op that is not registered")
            return
        if graph.level == registry.MIR and definition.level == registry.HIR:
            _fail(graph, node, "is an HIR op in an MIR graph")
        if registry.LEAF not in definition.traits:
            _check_types(graph, node, definition)
        seen.add(id(node))
    for output in graph.outputs:
        if id(output.node) not in seen:
            raise VerifyError(f"graph {graph.name!r}: output {output!r} is not one of its values")


def _check_types(graph: Graph, node: Node, definition: registry.OpDef) -> None:
    try:
        inferred = definition.rule(*(None if o is None else o.type for o in node.operands), **node.attrs)
    except (RlxError, TypeError) as error:
        _fail(graph, node, f"cannot be typed: {error}")
        return
    types = inferred if isinstance(inferred, tuple) else (inferred,)
    if types != node.types:
        _fail(graph, node, f"has type {'; '.join(map(str, node.types))}, its rule gives {'; '.join(map(str, types))}")


def _fail(graph: Graph, node: Node, problem: str) -> None:
    low = max(0, node.id - 5)
    around = [("> " if n is node else "  ") + node_text(n) for n in graph.nodes[low : low + 10]]
    raise VerifyError(f"%{node.id} {node.op}: {problem}", notes=[f"made {node.origin}", *around])
