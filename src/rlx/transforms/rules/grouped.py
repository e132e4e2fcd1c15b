"""Products in which each row chooses its matrix: linear in rows and matrices, which have gradients group by group."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Graph, Value
from rlx.transforms.build import counter, declare, flat, in_type, one_of, rows_of
from rlx.transforms.tables import Given, Lanes, Site, batching, jvp, vjp


@vjp("grouped_matmul")
def _(at: Site, ct: Value) -> Given:
    x, w, index = (at.operand(i) for i in range(3))
    dx = in_type(at.graph.one("grouped_matmul", ct, w.mT, index), x.dtype) if at.wanted[0] else None
    return dx, _to_matrices(x, w, index, ct) if at.wanted[1] else None, None


def _to_matrices(x: Value, w: Value, index: Value, ct: Value) -> Value:
    """xᵀ ct over the rows of each group: one matrix at a time, so that no row is kept more than once."""
    body = Graph("group")
    rows, own, back = (declare(body, n, v.type) for n, v in (("x", x), ("index", index), ("ct", ct)))
    group = body.input("group", (), index.dtype)
    chosen = body.one("where", own.equal(group).reshape(own.shape[0], 1), rows, 0.0)
    body.set_outputs([in_type(chosen.mT @ back, w.dtype)])
    groups = counter(x.graph, w.shape[0], index.dtype)
    return x.graph.scan_general([], body, w.shape[0], broadcasts=[x, index, ct], xs=[groups])[1][0]


@jvp("grouped_matmul")
def _(at: Site, x: Value | None, w: Value | None, _: Value | None) -> Given:
    index, made = at.operand(2), []
    for rows, matrices in ((x, at.operand(1)), (at.operand(0), w)):
        if rows is not None and matrices is not None:
            made.append(in_type(at.graph.one("grouped_matmul", rows, matrices, index), at.result.dtype))
    return [one_of(made)]


@batching("grouped_matmul")
def _(lanes: Lanes) -> Sequence[Value]:
    x, w, index = lanes.full(0), lanes.operand(1), lanes.full(2)
    where = rows_of(index, w.shape[1]) if lanes.batched[1] else index
    made = lanes.graph.one("grouped_matmul", flat(x, 2), flat(w, 2) if lanes.batched[1] else w, flat(where, 2))
    return [made.reshape(lanes.size, *lanes.node.types[0].shape)]
