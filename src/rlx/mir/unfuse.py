"""Unfusing: fused ops that a graph arrives with become plain ops again, so that passes see them with their neighbours.

Blocks lowered directly bring fused ops; fused anew, they join what surrounds them as if they had been plain.
"""

from __future__ import annotations

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import FUSED
from rlx.ir.rewrite import Rewriter, map_bodies, rebuild


def unfuse(graph: Graph) -> Graph:
    """Every fused op as the ops it is made of, in loops too; what works on packed weights stays."""
    graph = map_bodies(graph, unfuse)
    if not any(_comes_apart(node) for node in graph.nodes):
        return graph
    return rebuild(graph, _visit, made_by="unfuse")


def _comes_apart(node: Node) -> bool:
    definition = node.definition
    return FUSED in definition.traits and definition.decompose is not None and node.attrs.get("layout") is None


def _visit(rewriter: Rewriter, node: Node) -> Value | tuple[Value, ...] | None:
    if not _comes_apart(node):
        return None
    assert node.definition.decompose is not None
    with rewriter.graph.scope(node.origin):
        parts: Value | tuple[Value, ...] = node.definition.decompose(*rewriter.operands(node), **node.attrs)
    return parts
