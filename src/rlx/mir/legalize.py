"""Legalisation: what kernels do not do directly is written with what they do.

Matmuls of narrow or mixed floats compute in f32 (f64 if one operand is) on operands that are cast first; casts of
weights are hoisted later. Norms and attention read their scale vectors in the type of x.
"""

from __future__ import annotations

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter, rebuild


def legalize(graph: Graph) -> Graph:
    """Every matmul has operands of one type, f32, f64 or integer."""
    return rebuild(graph, _visit, made_by="legalize")


def _visit(rewriter: Rewriter, node: Node) -> Value | None:
    if node.op != "matmul":
        return None
    operands = [o for o in rewriter.operands(node) if o is not None]
    compute = node.types[0].dtype.compute
    if all(o.dtype is compute for o in operands):
        return None
    cast = [o if o.dtype is compute else rewriter.one(node, "cast", o, dtype=compute) for o in operands]
    product = rewriter.one(node, "matmul", *cast)
    return product if product.type == node.types[0] else rewriter.one(node, "cast", product, dtype=node.types[0].dtype)
