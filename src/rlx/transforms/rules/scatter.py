"""Scatter: rows that were replaced have no gradient, and of updates only those that were not replaced themselves."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.build import counter, flat, full, move_axis, rows_of, zeros
from rlx.transforms.tables import Given, Lanes, Site, batching, jvp, vjp
from rlx.types import product


def _winners(at: Site) -> Value:
    """Which updates are in the result: those that no later one has replaced."""
    g, x, indices = at.graph, at.operand(0), at.operand(1)
    number = counter(g, product(indices.shape)).reshape(indices.shape)
    last = g.one("scatter", full(g, -1, number.type.with_shape(x.shape[0])), indices, number)
    return g.one("equal", g.one("gather", last, indices, axis=0), number)


@vjp("scatter")
def _(at: Site, ct: Value) -> Given:
    g, x, indices, updates = at.graph, at.operand(0), at.operand(1), at.operand(2)
    dx = g.one("scatter", ct, indices, zeros(g, updates.type)) if at.wanted[0] else None
    if not at.wanted[2]:
        return dx, None, None
    rows = g.one("gather", ct, indices, axis=0)
    kept = _winners(at).reshape(*indices.shape, *(1,) * (x.rank - 1))
    return dx, None, g.one("where", kept, rows, zeros(g, rows.type.with_shape()))


@jvp("scatter")
def _(at: Site, table: Value | None, _: Value | None, updates: Value | None) -> Given:
    g = at.graph
    base = zeros(g, at.result.type) if table is None else table
    rows = zeros(g, at.operand(2).type) if updates is None else updates
    return [g.one("scatter", base, at.operand(1), rows)]


@batching("scatter")
def _(lanes: Lanes) -> Sequence[Value]:
    g = lanes.graph
    table, indices, updates = lanes.full(0), lanes.operand(1), lanes.full(2)
    if not lanes.batched[1]:
        rows = move_axis(table, 0, 1)
        made = g.one("scatter", rows, indices, move_axis(updates, 0, indices.rank))
        return [move_axis(made, 1, 0)]
    made = g.one("scatter", flat(table, 2), rows_of(indices, table.shape[1]), updates)
    return [made.reshape(table.shape)]
