"""Legalisation: what kernels do not do directly is written with what they do.

Operands of matmuls are cast to the type in which the target multiplies, the one that is native for the result: f32
where narrow floats are storage only, as on CPUs. Casts of weights are hoisted later. So are operands of gradients of
attention, but for masks, which are read as they are. Norms and attention read their scale vectors in the type of x.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.dtypes import DType
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter, rebuild
from rlx.target import Target


def legalize(graph: Graph, *, target: Target | None = None) -> Graph:
    """Matmuls, grouped ones too, and gradients of attention have operands of one type that is native on the target.

    Without a target, as on the reference device, narrow floats are wide while they are computed with.
    """
    native = _wide if target is None else target.native
    if not any(_is_illegal(node, native) for node in graph.nodes):
        return graph
    casts: dict[tuple[Value, DType], Value] = {}  # matmuls that share an operand share its cast, or none would merge

    def visit(rewriter: Rewriter, node: Node) -> Value | tuple[Value, ...] | None:
        if not _is_illegal(node, native):
            return None
        computed = native(node.types[0].dtype)
        if node.op == "attention_grad":
            return _native_gradient(rewriter, node, computed)
        given = [o for o in rewriter.operands(node) if o is not None]
        operands, index = given[:2], given[2:]
        for o in operands:
            if o.dtype is not computed and (o, computed) not in casts:
                casts[o, computed] = rewriter.one(node, "cast", o, dtype=computed)
        product = rewriter.one(node, node.op, *(casts.get((o, computed), o) for o in operands), *index)
        type_ = node.types[0]
        return product if product.type == type_ else rewriter.one(node, "cast", product, dtype=type_.dtype)

    return rebuild(graph, visit, made_by="legalize")


def _wide(dtype: DType) -> DType:
    return dtype.wide


def _is_illegal(node: Node, native: Callable[[DType], DType]) -> bool:
    """Whether it has operands that kernels do not take."""
    if node.op == "attention_grad":
        tensors = node.operands[:-1]
    elif node.op in ("matmul", "grouped_matmul"):
        tensors = node.operands[:2]
    else:
        return False
    computed = native(node.types[0].dtype)
    return any(o is not None and o.dtype is not computed for o in tensors)


def _native_gradient(rewriter: Rewriter, node: Node, computed: DType) -> tuple[Value, ...]:
    dtype = node.types[0].dtype
    *tensors, mask = rewriter.operands(node)
    native = [o if o is None else _in_type(rewriter, node, o, computed) for o in tensors]
    made = rewriter.make(node, node.op, *native, mask, **node.attrs)
    return tuple(_in_type(rewriter, node, m, dtype) for m in made)


def _in_type(rewriter: Rewriter, node: Node, value: Value, dtype: DType) -> Value:
    return value if value.dtype is dtype else rewriter.one(node, "cast", value, dtype=dtype)
