"""Losses: the gradient of cross entropy is an op of its own, which needs only the logits and labels."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Vmapped, batching, vjp


@vjp("cross_entropy")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    return [at.graph.one("cross_entropy_grad", at.operand(0), at.operand(1), ct, **at.attrs), None]


@batching("cross_entropy", "cross_entropy_grad")
def _(vmapped: Vmapped) -> Sequence[Value]:
    operands = [vmapped.full(i) for i in range(len(vmapped.operands))]
    return [vmapped.graph.one(vmapped.node.op, *operands, **vmapped.attrs)]
