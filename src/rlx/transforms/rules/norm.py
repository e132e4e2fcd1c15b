"""Norms over the last axis: their gradient is an op of its own, which reads the operand and keeps nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.build import in_type, insert_axes
from rlx.transforms.tables import Given, Lanes, Site, batching, vjp


@vjp("layer_norm", "rms_norm")
def _(at: Site, ct: Value) -> Given:
    x, gamma, beta = at.operands
    kind = at.node.op.removesuffix("_norm")
    dx, dgamma, dbeta = at.graph.apply("norm_grad", x, ct, gamma, kind=kind, eps=at.attrs["eps"])
    return [
        dx if at.wanted[0] else None,
        in_type(dgamma, gamma.dtype) if gamma is not None and at.wanted[1] else None,
        in_type(dbeta, beta.dtype) if beta is not None and at.wanted[2] else None,
    ]


@batching("layer_norm", "rms_norm")
def _(lanes: Lanes) -> Sequence[Value]:
    x, gamma, beta = lanes.operands
    if not (lanes.batched[1] or lanes.batched[2]):
        return [lanes.graph.one(lanes.node.op, x, gamma, beta, **lanes.attrs)]
    y = lanes.graph.one(lanes.node.op, lanes.full(0), **lanes.attrs)
    for i, op in ((1, "mul"), (2, "add")):
        vector = lanes.operands[i]
        if vector is not None:
            aligned = insert_axes(vector, 1, y.rank - 2) if lanes.batched[i] else vector
            y = in_type(lanes.graph.one(op, y, aligned), y.dtype)
    return [y]
