"""The barrier is the identity; its cotangent needs no barrier, and a second gradient saves what the first one saves."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Vmapped, batching, jvp, vjp


@vjp("optimization_barrier")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    return [ct]


@jvp("optimization_barrier")
def _(at: NodeCtx, tangent: Value) -> Cotangents:
    return [at.graph.one("optimization_barrier", tangent)]


@batching("optimization_barrier")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return [vmapped.graph.one("optimization_barrier", vmapped.operand(0))]
