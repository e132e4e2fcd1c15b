"""A barrier changes nothing; its cotangent needs none, a second gradient keeps what the first one keeps."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Vmapped, batching, jvp, vjp


@vjp("barrier")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    return [ct]


@jvp("barrier")
def _(at: NodeCtx, tangent: Value) -> Cotangents:
    return [at.graph.one("barrier", tangent)]


@batching("barrier")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return [vmapped.graph.one("barrier", vmapped.operand(0))]
