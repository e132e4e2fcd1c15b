"""Moves casts of 16-bit weights to f32 after transposes, reshapes, slices and concatenations.

MIR in, MIR out. Leaves the weights of matmuls as casts of 16-bit weights, which `hoist_weights` strips: kernels then
read two bytes per element.
"""

from __future__ import annotations

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter, rebuild
from rlx.mir.weight_only_values import stored, weight_nodes

MOVES = ("transpose", "reshape", "slice", "concatenate")  # not expand, which is a free view


def widen_late(graph: Graph) -> Graph:
    """transpose(cast(w)) -> cast(transpose(w)) for weights w; likewise reshape, slice and concatenate."""
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
