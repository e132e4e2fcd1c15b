"""Activations quantised to int8 per block: straight-through, as if they were not rounded."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Vmapped, batching, straight_through, vjp

straight_through("round_blocks", why="rounding has no derivative of its own")


@vjp("round_blocks")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    return [ct]


@batching("round_blocks")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return [vmapped.graph.one("round_blocks", vmapped.operand(0), **vmapped.attrs)]
