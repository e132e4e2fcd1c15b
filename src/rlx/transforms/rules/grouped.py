"""Products in which each row chooses its matrix: linear in rows and matrices, which have gradients group by group."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import I32
from rlx.ir.graph import Value
from rlx.transforms.build import count, counter, flat, in_type, one_of, rows_of
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Vmapped, batching, jvp, vjp, zero_gradient

zero_gradient("group_rows", why="it gives indices")


@vjp("grouped_matmul")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    x, w, index = (at.operand(i) for i in range(3))
    dx = in_type(at.graph.one("grouped_matmul", ct, w.mT, index), x.dtype) if at.wanted[0] else None
    if not at.wanted[1]:
        return dx, None, None
    return dx, in_type(at.graph.one("grouped_outer", x, ct, index, groups=w.shape[0]), w.dtype), None


@jvp("grouped_matmul")
def _(at: NodeCtx, x: Value | None, w: Value | None, _: Value | None) -> Cotangents:
    index, made = at.operand(2), []
    for rows, matrices in ((x, at.operand(1)), (at.operand(0), w)):
        if rows is not None and matrices is not None:
            made.append(in_type(at.graph.one("grouped_matmul", rows, matrices, index), at.result.dtype))
    return [one_of(made)]


@batching("grouped_matmul")
def _(vmapped: Vmapped) -> Sequence[Value]:
    x, w, index = vmapped.full(0), vmapped.operand(1), vmapped.full(2)
    where = rows_of(index, w.shape[1]) if vmapped.batched[1] else index
    made = vmapped.graph.one("grouped_matmul", flat(x, 2), flat(w, 2) if vmapped.batched[1] else w, flat(where, 2))
    return [made.reshape(vmapped.size, *vmapped.node.types[0].shape)]


@vjp("grouped_outer")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    x, y, index = (at.operand(i) for i in range(3))
    dx = in_type(at.graph.one("grouped_matmul", y, ct.mT, index), x.dtype) if at.wanted[0] else None
    dy = in_type(at.graph.one("grouped_matmul", x, ct, index), y.dtype) if at.wanted[1] else None
    return dx, dy, None


@jvp("grouped_outer")
def _(at: NodeCtx, x: Value | None, y: Value | None, _: Value | None) -> Cotangents:
    index, made = at.operand(2), []
    for left, right in ((x, at.operand(1)), (at.operand(0), y)):
        if left is not None and right is not None:
            outer = at.graph.one("grouped_outer", left, right, index, groups=at.result.shape[0])
            made.append(in_type(outer, at.result.dtype))
    return [one_of(made)]


@batching("grouped_outer")
def _(vmapped: Vmapped) -> Sequence[Value]:
    x, y, index = (vmapped.full(i) for i in range(3))
    shape = vmapped.node.types[0].shape
    where = rows_of(index, shape[0])
    made = vmapped.graph.one("grouped_outer", flat(x, 2), flat(y, 2), flat(where, 2), groups=vmapped.size * shape[0])
    return [made.reshape(vmapped.size, *shape)]


@batching("group_rows")
def _(vmapped: Vmapped) -> Sequence[Value]:
    """Entries of the batch follow each other as groups do: in each, places are counted from its own start."""
    index, groups = vmapped.full(0), vmapped.node.attrs["groups"]
    graph, rows = vmapped.graph, vmapped.node.types[0].shape[0]
    entry = counter(graph, vmapped.size).reshape(vmapped.size, 1)
    all_groups = vmapped.size * groups
    order, place, starts = flat(rows_of(index, groups), 2).group_rows(groups=all_groups)
    which = counter(graph, groups + 1).reshape(1, groups + 1) + entry * count(graph, groups, I32)
    before = entry * count(graph, rows, I32)
    return [*(v.reshape(vmapped.size, rows) - before for v in (order, place)), starts.gather(which) - before]
