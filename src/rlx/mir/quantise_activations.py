"""Quantises the left operands of matmuls by quantised weights to int8 with a scale per block. MIR in, MIR out."""

from __future__ import annotations

from typing import Any

from rlx.dtypes import F32
from rlx.ir.graph import Graph, Node
from rlx.ir.rewrite import Rewriter, map_bodies, rebuild
from rlx.mir.weight_only_values import packed_rows, weight_nodes
from rlx.ops.quantised_activations import INT8_DOT_TYPES


def quantise_activations(graph: Graph) -> Graph:
    """x @ w -> round_blocks(x) @ w if there is an integer kernel for the dtype of w; in loops too.

    In a loop this needs w to be dequantised inside the body: a weight dequantised outside is an ordinary f32 operand.
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
