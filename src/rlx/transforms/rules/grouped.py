"""Grouped matmuls, in which each row selects its matrix: linear in rows and matrices, with gradients per group."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import I32
from rlx.ir.graph import Value
from rlx.transforms.build import cast_to, count, flat, flat_row_indices, iota, sum_present
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Vmapped, batching, jvp, vjp, zero_gradient

zero_gradient("group_rows", why="it returns indices")


@vjp("grouped_matmul")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    x, w, index = (at.operand(i) for i in range(3))
    dx = cast_to(at.graph.one("grouped_matmul", ct, w.mT, index), x.dtype) if at.wanted[0] else None
    if not at.wanted[1]:
        return dx, None, None
    return dx, cast_to(at.graph.one("grouped_outer", x, ct, index, groups=w.shape[0]), w.dtype), None


@jvp("grouped_matmul")
def _(at: NodeCtx, x: Value | None, w: Value | None, _: Value | None) -> Cotangents:
    index, terms = at.operand(2), []
    for rows, matrices in ((x, at.operand(1)), (at.operand(0), w)):
        if rows is not None and matrices is not None:
            terms.append(cast_to(at.graph.one("grouped_matmul", rows, matrices, index), at.result.dtype))
    return [sum_present(terms)]


@batching("grouped_matmul")
def _(vmapped: Vmapped) -> Sequence[Value]:
    x, w, index = vmapped.full(0), vmapped.operand(1), vmapped.full(2)
    where = flat_row_indices(index, w.shape[1]) if vmapped.batched[1] else index
    product = vmapped.graph.one("grouped_matmul", flat(x, 2), flat(w, 2) if vmapped.batched[1] else w, flat(where, 2))
    return [product.reshape(vmapped.size, *vmapped.node.types[0].shape)]


@vjp("grouped_outer")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    x, y, index = (at.operand(i) for i in range(3))
    dx = cast_to(at.graph.one("grouped_matmul", y, ct.mT, index), x.dtype) if at.wanted[0] else None
    dy = cast_to(at.graph.one("grouped_matmul", x, ct, index), y.dtype) if at.wanted[1] else None
    return dx, dy, None


@jvp("grouped_outer")
def _(at: NodeCtx, x: Value | None, y: Value | None, _: Value | None) -> Cotangents:
    index, terms = at.operand(2), []
    for left, right in ((x, at.operand(1)), (at.operand(0), y)):
        if left is not None and right is not None:
            outer = at.graph.one("grouped_outer", left, right, index, groups=at.result.shape[0])
            terms.append(cast_to(outer, at.result.dtype))
    return [sum_present(terms)]


@batching("grouped_outer")
def _(vmapped: Vmapped) -> Sequence[Value]:
    x, y, index = (vmapped.full(i) for i in range(3))
    shape = vmapped.node.types[0].shape
    where = flat_row_indices(index, shape[0])
    product = vmapped.graph.one("grouped_outer", flat(x, 2), flat(y, 2), flat(where, 2), groups=vmapped.size * shape[0])
    return [product.reshape(vmapped.size, *shape)]


@batching("group_rows")
def _(vmapped: Vmapped) -> Sequence[Value]:
    """Treat entries of the batch as consecutive groups; positions count from the start of each entry."""
    index, groups = vmapped.full(0), vmapped.node.attrs["groups"]
    graph, rows = vmapped.graph, vmapped.node.types[0].shape[0]
    entry = iota(graph, vmapped.size).reshape(vmapped.size, 1)
    all_groups = vmapped.size * groups
    order, place, offsets = flat(flat_row_indices(index, groups), 2).group_rows(groups=all_groups)
    which = iota(graph, groups + 1).reshape(1, groups + 1) + entry * count(graph, groups, I32)
    before = entry * count(graph, rows, I32)
    return [*(v.reshape(vmapped.size, rows) - before for v in (order, place)), offsets.gather(which) - before]
