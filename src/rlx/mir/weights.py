"""Which values depend on weights alone: what the bind program can compute once."""

from __future__ import annotations

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter


def weight_nodes(graph: Graph) -> set[Node]:
    """Params, constants and every node that depends on nothing else."""
    found: set[Node] = set()
    for node in graph.nodes:
        leaf = node.op in ("param", "const")
        if leaf or (node.operands and all(o is None or o.node in found for o in node.operands)):
            found.add(node)
    return found


def weights_first(graph: Graph) -> Graph:
    """The same graph with weight nodes in front, so that merged weights can be used anywhere."""
    weights = weight_nodes(graph)
    rewriter = Rewriter(graph, "weights_first")
    for wanted in (True, False):
        for node in graph.nodes:
            if (node in weights) == wanted:
                rewriter.values.update(zip(node.results, rewriter.copy(node), strict=True))
    rewriter.graph.outputs = tuple(rewriter.values[o] for o in graph.outputs)
    return rewriter.graph


def is_matrix(value: Value, weights: set[Node]) -> bool:
    """A two-dimensional weight."""
    return value.node in weights and value.rank == 2
