"""Legalisation: what kernels do not do directly is written with what they do.

Matmuls of narrow or mixed floats compute in f32 (f64 if one operand is) on operands that are cast first; casts of
weights are hoisted later. So do gradients of attention, but for masks, which are read as they are. Norms and attention
read their scale vectors in the type of x.
"""

from __future__ import annotations

from rlx.dtypes import DType
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter, rebuild


def legalize(graph: Graph) -> Graph:
    """Matmuls, grouped ones too, have operands of one type, f32, f64 or integer; gradients of attention, f32 or f64."""
    if not any(map(_is_illegal, graph.nodes)):
        return graph
    casts: dict[tuple[Value, DType], Value] = {}  # matmuls that share an operand share its cast, or none would merge

    def visit(rewriter: Rewriter, node: Node) -> Value | tuple[Value, ...] | None:
        if not _is_illegal(node):
            return None
        if node.op == "attention_grad":
            return _wide_gradient(rewriter, node)
        compute = node.types[0].dtype.compute
        given = [o for o in rewriter.operands(node) if o is not None]
        operands, index = given[:2], given[2:]
        for o in operands:
            if o.dtype is not compute and (o, compute) not in casts:
                casts[o, compute] = rewriter.one(node, "cast", o, dtype=compute)
        product = rewriter.one(node, node.op, *(casts.get((o, compute), o) for o in operands), *index)
        type_ = node.types[0]
        return product if product.type == type_ else rewriter.one(node, "cast", product, dtype=type_.dtype)

    return rebuild(graph, visit, made_by="legalize")


def _is_illegal(node: Node) -> bool:
    """Whether it has operands that kernels do not take."""
    if node.op == "attention_grad":
        tensors = node.operands[:-1]
    elif node.op in ("matmul", "grouped_matmul"):
        tensors = node.operands[:2]
    else:
        return False
    compute = node.types[0].dtype.compute
    return any(o is not None and o.dtype is not compute for o in tensors)


def _wide_gradient(rewriter: Rewriter, node: Node) -> tuple[Value, ...]:
    dtype = node.types[0].dtype
    *tensors, mask = rewriter.operands(node)
    wide = [o if o is None else _in_type(rewriter, node, o, dtype.compute) for o in tensors]
    made = rewriter.make(node, node.op, *wide, mask, **node.attrs)
    return tuple(_in_type(rewriter, node, m, dtype) for m in made)


def _in_type(rewriter: Rewriter, node: Node, value: Value, dtype: DType) -> Value:
    return value if value.dtype is dtype else rewriter.one(node, "cast", value, dtype=dtype)
