"""Weights of 16 bits stay narrow while they are moved: what transposes, joins or cuts them comes before the cast.

MIR in, MIR out. Leaves matrices of matmuls as casts of narrow weights, which `hoist_weights` takes apart: kernels then
read two bytes per element.
"""

from __future__ import annotations

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter, rebuild
from rlx.mir.weights import stored, weight_nodes

MOVES = ("transpose", "reshape", "slice", "concatenate")  # not expand, which costs nothing as a view


def widen_late(graph: Graph) -> Graph:
    """transpose(cast(w)) -> cast(transpose(w)), where w is a weight, and so for reshape, slice and concatenate."""
    if not any(stored(node[0]) is not node[0] for node in graph.nodes if node.op == "cast"):
        return graph
    weights = weight_nodes(graph)

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        if node.op not in MOVES or node not in weights:
            return None
        wide = [o for o in rewriter.operands(node) if o is not None]
        narrow = [stored(o) for o in wide]
        if any(n is w or n.dtype is not narrow[0].dtype for n, w in zip(narrow, wide, strict=True)):
            return None
        return rewriter.one(node, "cast", rewriter.one(node, node.op, *narrow, **node.attrs), dtype=wide[0].dtype)

    return rebuild(graph, visit, made_by="widen_late")
