"""Unfusing: decomposes fused ops of the input graph into plain ops, so that passes can fuse them with their neighbours.

Blocks that are lowered directly contain fused ops; after unfusing, they fuse with their surroundings like plain ops.
"""

from __future__ import annotations

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import FUSED
from rlx.ir.rewrite import Rewriter, map_bodies, rebuild


def unfuse(graph: Graph) -> Graph:
    """Replace fused ops by their decomposition, in loops too; ops on packed weights stay fused."""
    graph = map_bodies(graph, unfuse)
    if not any(_unfuses(node) for node in graph.nodes):
        return graph
    return rebuild(graph, _visit, made_by="unfuse")


def _unfuses(node: Node) -> bool:
    definition = node.definition
    return FUSED in definition.traits and definition.decompose is not None and node.attrs.get("layout") is None


def _visit(rewriter: Rewriter, node: Node) -> Value | tuple[Value, ...] | None:
    if not _unfuses(node):
        return None
    assert node.definition.decompose is not None
    with rewriter.graph.scope(node.origin):
        parts: Value | tuple[Value, ...] = node.definition.decompose(*rewriter.operands(node), **node.attrs)
    return parts
