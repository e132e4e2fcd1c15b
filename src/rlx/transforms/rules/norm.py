"""Norms over the last axis: their gradient is an op of its own, which needs only the operands."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.build import cast_to, insert_axes
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Vmapped, batching, vjp


@vjp("layer_norm", "rms_norm")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    x, gamma, beta = at.operands
    kind = at.node.op.removesuffix("_norm")
    dx, dgamma, dbeta = at.graph.apply("norm_grad", x, ct, gamma, kind=kind, eps=at.attrs["eps"])
    return [
        dx if at.wanted[0] else None,
        cast_to(dgamma, gamma.dtype) if gamma is not None and at.wanted[1] else None,
        cast_to(dbeta, beta.dtype) if beta is not None and at.wanted[2] else None,
    ]


@batching("layer_norm", "rms_norm")
def _(vmapped: Vmapped) -> Sequence[Value]:
    x, gamma, beta = vmapped.operands
    if not (vmapped.batched[1] or vmapped.batched[2]):
        return [vmapped.graph.one(vmapped.node.op, x, gamma, beta, **vmapped.attrs)]
    y = vmapped.graph.one(vmapped.node.op, vmapped.full(0), **vmapped.attrs)
    for i, op in ((1, "mul"), (2, "add")):
        vector = vmapped.operands[i]
        if vector is not None:
            aligned = insert_axes(vector, 1, y.rank - 2) if vmapped.batched[i] else vector
            y = cast_to(vmapped.graph.one(op, y, aligned), y.dtype)
    return [y]
