"""Gather and scatter: adding rows is the transpose of gathering them.

Rows that scatter replaced have no gradient, and of updates only those that were not replaced themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.build import counter, flat, full, in_type, move_axis, one_of, rows_of, zeros, zeros_like
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Vmapped, batching, jvp, vjp
from rlx.types import product


@vjp("gather")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    table, indices = at.operand(0), at.operand(1)
    axis = at.attrs["axis"] % table.rank
    for i in range(indices.rank):  # the axes of the indices to the front
        ct = move_axis(ct, axis + i, i)
    rows = move_axis(zeros_like(table), axis, 0)
    return [move_axis(at.graph.one("scatter_add", rows, indices, ct), 0, axis), None]


@jvp("gather")
def _(at: NodeCtx, tangent: Value, _: Value | None) -> Cotangents:
    return [at.graph.one("gather", tangent, at.operand(1), axis=at.attrs["axis"])]


@vjp("scatter_add")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    return [ct, None, at.graph.one("gather", ct, at.operand(1), axis=0) if at.wanted[2] else None]


@jvp("scatter_add")
def _(at: NodeCtx, table: Value | None, _: Value | None, updates: Value | None) -> Cotangents:
    if updates is None:
        return [one_of([table])]
    base = zeros(at.graph, at.result.type) if table is None else table
    return [at.graph.one("scatter_add", base, at.operand(1), updates)]


def _winners(at: NodeCtx) -> Value:
    """Which updates are in the result: those that no later one has replaced."""
    g, x, indices = at.graph, at.operand(0), at.operand(1)
    number = counter(g, product(indices.shape)).reshape(indices.shape)
    last = g.one("scatter", full(g, -1, number.type.with_shape(x.shape[0])), indices, number)
    return g.one("equal", g.one("gather", last, indices, axis=0), number)


@vjp("scatter")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    g, x, indices, updates = at.graph, at.operand(0), at.operand(1), at.operand(2)
    dx = g.one("scatter", ct, indices, zeros(g, updates.type)) if at.wanted[0] else None
    if not at.wanted[2]:
        return dx, None, None
    rows = g.one("gather", ct, indices, axis=0)
    kept = _winners(at).reshape(*indices.shape, *(1,) * (x.rank - 1))
    return dx, None, g.one("where", kept, rows, zeros(g, rows.type.with_shape()))


@jvp("scatter")
def _(at: NodeCtx, table: Value | None, _: Value | None, updates: Value | None) -> Cotangents:
    g = at.graph
    base = zeros(g, at.result.type) if table is None else table
    rows = zeros(g, at.operand(2).type) if updates is None else updates
    return [g.one("scatter", base, at.operand(1), rows)]


@batching("gather")
def _(vmapped: Vmapped) -> Sequence[Value]:
    g, table, indices = vmapped.graph, vmapped.operand(0), vmapped.operand(1)
    axis = vmapped.attrs["axis"] % (table.rank - vmapped.batched[0])
    if not vmapped.batched[0]:
        return [move_axis(g.one("gather", table, indices, axis=axis), axis, 0)]
    if not vmapped.batched[1]:
        return [g.one("gather", table, indices, axis=axis + 1)]
    rows = move_axis(table, axis + 1, 1)  # [batch, n, ...]
    found = g.one("gather", flat(rows, 2), rows_of(indices, rows.shape[1]), axis=0)  # [batch, *indices, ...]
    for i in range(axis):  # the axes that stood before the one gathered from
        found = move_axis(found, indices.rank + i, 1 + i)
    return [found]


@batching("scatter_add")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return _scattered(vmapped, "scatter_add")


@batching("scatter")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return _scattered(vmapped, "scatter")


def _scattered(vmapped: Vmapped, op: str) -> Sequence[Value]:
    g = vmapped.graph
    table, indices, updates = vmapped.full(0), vmapped.operand(1), vmapped.full(2)
    if not vmapped.batched[1]:
        rows = move_axis(table, 0, 1)
        made = g.one(op, rows, indices, move_axis(updates, 0, indices.rank))
        return [move_axis(made, 1, 0)]
    made = g.one(op, flat(table, 2), rows_of(indices, table.shape[1]), in_type(updates, table.dtype))
    return [made.reshape(table.shape)]
