"""Left sides of matmuls by packed weights become 8-bit numbers with a scale a block. MIR in, MIR out."""

from __future__ import annotations

from typing import Any

from rlx.dtypes import F32
from rlx.ir.graph import Graph, Node
from rlx.ir.rewrite import Rewriter, rebuild
from rlx.mir.weights import packed_rows, weight_nodes
from rlx.ops.activations import WHOLE


def round_activations(graph: Graph) -> Graph:
    """x @ w -> round_blocks(x) @ w where kernels of whole numbers know the type of w."""
    weights = weight_nodes(graph)

    def visit(rewriter: Rewriter, node: Node) -> Any:
        if node.op != "matmul":
            return None
        x, w = node.operands
        assert x is not None and w is not None
        rows = packed_rows(w)
        if rows is None or rows.dtype.name not in WHOLE or x.dtype is not F32 or x.node in weights:
            return None
        rounded = rewriter.one(node, "round_blocks", rewriter[x], block=rows.dtype.block)
        return rewriter.one(node, "matmul", rounded, rewriter[w])

    return rebuild(graph, visit, made_by="round_activations")
