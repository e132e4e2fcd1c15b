"""Moves weight nodes to the front of a graph, so that values computed from several weights can be used anywhere."""

from __future__ import annotations

from rlx.ir.graph import Graph
from rlx.ir.rewrite import copy_nodes
from rlx.mir.weight_only_values import weight_nodes


def weights_to_front(graph: Graph) -> Graph:
    """Move nodes that depend on weights alone before all others."""
    weights = weight_nodes(graph)
    if weights.issuperset(graph.nodes[: len(weights)]):
        return graph
    return copy_nodes(graph, sorted(graph.nodes, key=lambda node: node not in weights), made_by="weights_to_front")
