"""Left sides of matmuls by packed weights become 8-bit numbers with a scale a block. MIR in, MIR out."""

from __future__ import annotations

from typing import Any

from rlx.dtypes import F32
from rlx.ir.graph import Graph, Node
from rlx.ir.rewrite import Rewriter, map_bodies, rebuild
from rlx.mir.weights import packed_rows, weight_nodes
from rlx.ops.quantised_activations import INT8_DOT_TYPES


def quantise_activations(graph: Graph) -> Graph:
    """x @ w -> round_blocks(x) @ w where kernels of whole numbers know the type of w; in loops too.

    In a loop that is so where its body unpacks w: what comes in unpacked is numbers like any others.
    """
    graph = map_bodies(graph, quantise_activations)
    weights = weight_nodes(graph)

    def visit(rewriter: Rewriter, node: Node) -> Any:
        if node.op not in ("matmul", "grouped_matmul"):
            return None
        x, w, *index = node.operands
        assert x is not None and w is not None
        rows = packed_rows(w)
        if rows is None or rows.dtype.name not in INT8_DOT_TYPES or x.dtype is not F32 or x.node in weights:
            return None
        rounded = rewriter.one(node, "round_blocks", rewriter[x], block=rows.dtype.block)
        return rewriter.one(node, node.op, rounded, rewriter[w], *(rewriter[o] for o in index if o is not None))

    return rebuild(graph, visit, made_by="quantise_activations")
