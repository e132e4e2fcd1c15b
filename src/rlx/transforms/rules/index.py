"""Gather and scatter: adding rows is the transpose of gathering them.

Rows that scatter overwrote have no gradient, nor do updates that a later update overwrote.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.build import cast_to, flat, flat_row_indices, full, iota, move_axis, sum_present, zeros, zeros_like
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Vmapped, batching, jvp, vjp
from rlx.types import product


@vjp("gather")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    table, indices = at.operand(0), at.operand(1)
    axis = at.attrs["axis"] % table.rank
    for i in range(indices.rank):  # move the axes of the indices to the front
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
        return [sum_present([table])]
    base = zeros(at.graph, at.result.type) if table is None else table
    return [at.graph.one("scatter_add", base, at.operand(1), updates)]


def _winners(at: NodeCtx) -> Value:
    """Return which updates are in the result: those that no later one overwrote."""
    g, x, indices = at.graph, at.operand(0), at.operand(1)
    number = iota(g, product(indices.shape)).reshape(indices.shape)
    last = g.one("scatter", full(g, -1, number.type.with_shape(x.shape[0])), indices, number)
    return g.one("equal", g.one("gather", last, indices, axis=0), number)


@vjp("scatter")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    g, x, indices, updates = at.graph, at.operand(0), at.operand(1), at.operand(2)
    dx = g.one("scatter", ct, indices, zeros(g, updates.type)) if at.wanted[0] else None
    if not at.wanted[2]:
        return dx, None, None
    rows = g.one("gather", ct, indices, axis=0)
    wins = _winners(at).reshape(*indices.shape, *(1,) * (x.rank - 1))
    return dx, None, g.one("where", wins, rows, zeros(g, rows.type.with_shape()))


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
    flat_indices = flat_row_indices(indices, rows.shape[1])
    gathered = g.one("gather", flat(rows, 2), flat_indices, axis=0)  # [batch, *indices, ...]
    for i in range(axis):  # restore the axes before the gathered one
        gathered = move_axis(gathered, indices.rank + i, 1 + i)
    return [gathered]


@batching("scatter_add")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return _batch_scatter(vmapped, "scatter_add")


@batching("scatter")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return _batch_scatter(vmapped, "scatter")


def _batch_scatter(vmapped: Vmapped, op: str) -> Sequence[Value]:
    g = vmapped.graph
    table, indices, updates = vmapped.full(0), vmapped.operand(1), vmapped.full(2)
    if not vmapped.batched[1]:
        rows = move_axis(table, 0, 1)
        scattered = g.one(op, rows, indices, move_axis(updates, 0, indices.rank))
        return [move_axis(scattered, 1, 0)]
    scattered = g.one(op, flat(table, 2), flat_row_indices(indices, table.shape[1]), cast_to(updates, table.dtype))
    return [scattered.reshape(table.shape)]
