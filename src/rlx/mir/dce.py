"""Dead-code elimination: drop nodes that no output needs; inputs and params stay, they are the graph's interface."""

from __future__ import annotations

from rlx.ir.graph import Graph
from rlx.ir.rewrite import Rewriter


def dce(graph: Graph) -> Graph:
    """Keep what the outputs depend on, and every input and param."""
    live = graph.reachable(graph.outputs)
    kept = [node for node in graph.nodes if node in live or node.op in ("input", "state", "param")]
    if len(kept) == len(graph):
        return graph
    rewriter = Rewriter(graph, "dce")
    for node in kept:
        rewriter.values.update(zip(node.results, rewriter.copy(node), strict=True))
    rewriter.graph.outputs = tuple(rewriter.values[o] for o in graph.outputs)
    return rewriter.graph
