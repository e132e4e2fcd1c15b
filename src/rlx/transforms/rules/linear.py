"""Matrix products: linear in each operand."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.build import cast_to, flat, sum_present, sum_to
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Vmapped, batching, jvp, vjp
from rlx.transforms.rules.elementwise import aligned


@vjp("matmul")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    a, b = at.operand(0), at.operand(1)
    da = sum_to(ct @ b.mT, a.type) if at.wanted[0] else None
    if not at.wanted[1]:
        return da, None
    if b.rank == 2 and a.rank > 2:  # a weight: one product over all rows instead of a sum over the batch
        a, ct = flat(a, a.rank - 1), flat(ct, ct.rank - 1)
    return da, sum_to(a.mT @ ct, b.type)


@jvp("matmul")
def _(at: NodeCtx, ta: Value | None, tb: Value | None) -> Cotangents:
    terms = [None if ta is None else ta @ at.operand(1), None if tb is None else at.operand(0) @ tb]
    return [sum_present([None if m is None else cast_to(m, at.result.dtype) for m in terms])]


@batching("matmul")
def _(vmapped: Vmapped) -> Sequence[Value]:
    a, b = aligned(vmapped, [vmapped.operand(0), vmapped.operand(1)], vmapped.batched)
    return [a @ b]
