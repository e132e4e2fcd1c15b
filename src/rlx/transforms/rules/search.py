"""Vector search: a batch of queries for the same rows adds queries, batched rows add matrices."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.build import flat
from rlx.transforms.rule_tables import Vmapped, batching, no_derivative

no_derivative("nearest_rows", why="it picks rows; for training, gather them and differentiate the dot products")


@batching("nearest_rows")
def _(vmapped: Vmapped) -> Sequence[Value]:
    queries, among = vmapped.operands[0], vmapped.operands[4]
    shared = not any(vmapped.batched[1:4]) and vmapped.operand(1).rank == 2
    operands: list[Value | None]
    if not shared:
        operands = [None if o is None else vmapped.full(i) for i, o in enumerate(vmapped.operands)]
        return vmapped.graph.build("nearest_rows", operands, dict(vmapped.attrs)).results
    queries = vmapped.full(0)
    operands = [flat(queries, 2), *vmapped.operands[1:4], None if among is None else flat(vmapped.full(4), 2)]
    results = vmapped.graph.build("nearest_rows", operands, dict(vmapped.attrs)).results
    return [r.reshape((*queries.shape[:2], r.shape[-1])) for r in results]
