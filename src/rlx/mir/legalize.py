"""Legalisation: inserts casts so that kernels get operands of the types they support.

Operands of matmuls are cast to the dtype in which the target multiplies (`Target.multiplied`): f32 where 16-bit floats
are storage only, as on CPUs. Casts of weights are hoisted later. Operands of attention's gradient
are cast likewise, except masks, which are read unchanged. Norms and attention read scale vectors in the dtype of x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.dtypes import DType
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter, rebuild
from rlx.target import Target


def legalize(graph: Graph, *, target: Target | None = None) -> Graph:
    """Cast the operands of matmuls and of attention's gradient to one dtype that is native on the target.

    Includes grouped matmuls. The row sums that attention's gradient reads are wide (f32 or f64).
    Without a target, as on the reference device, 16-bit floats are widened for computation.
    """
    types = Types() if target is None else Types(target.multiplied, target.native)
    if not any(_is_illegal(node, types) for node in graph.nodes):
        return graph
    casts: dict[tuple[Value, DType], Value] = {}  # matmuls share the cast of a common operand, so they can merge

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if not _is_illegal(node, types):
            return None

        def in_type(value: Value, dtype: DType) -> Value:
            if value.dtype is dtype:
                return value
            if (value, dtype) not in casts:
                casts[value, dtype] = rewriter.one(node, "cast", value, dtype=dtype)
            return casts[value, dtype]

        pairs = zip(rewriter.operands(node), operand_types(node, types), strict=True)
        operands = [o if o is None or wanted is None else in_type(o, wanted) for o, wanted in pairs]
        results = rewriter.make(node, node.op, *operands, **node.attrs)
        return tuple(in_type(value, type_.dtype) for value, type_ in zip(results, node.types, strict=True))

    return rebuild(graph, visit, made_by="legalize")


def _wide(dtype: DType) -> DType:
    return dtype.wide


@dataclass(frozen=True, slots=True)
class Types:
    """The dtypes in which a target computes results: of matmuls, and of other ops."""

    multiplied: Callable[[DType], DType] = _wide
    native: Callable[[DType], DType] = _wide


def operand_types(node: Node, types: Types) -> Sequence[DType | None]:
    """Return the dtypes in which kernels read operands; None for those read unchanged."""
    if node.op == "attention_grad":  # q, k, v, dy; lse and delta (row sums); the mask
        computed = types.native(node.types[0].dtype)
        return [*[computed] * 4, computed.wide, computed.wide, None]
    if node.op in ("matmul", "grouped_matmul"):
        computed = types.multiplied(node.types[0].dtype)
        return [computed, computed, *[None] * (len(node.operands) - 2)]
    return [None] * len(node.operands)


def _is_illegal(node: Node, types: Types) -> bool:
    """Whether it has operands of dtypes that its kernel does not support."""
    pairs = zip(node.operands, operand_types(node, types), strict=True)
    return any(o is not None and wanted is not None and o.dtype is not wanted for o, wanted in pairs)
