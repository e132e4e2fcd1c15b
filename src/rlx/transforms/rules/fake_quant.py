"""Quantisation in training: `fake_quantise` is straight-through, with the derivative of x where x is not cut off.

Rounding has no derivative of its own.
"""

from __future__ import annotations

from rlx.ir.graph import Value
from rlx.transforms.rule_tables import Cotangents, NodeCtx, straight_through, vjp

straight_through("fake_quantise", why="rounding has no derivative of its own")


@vjp("fake_quantise")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    x, scale = at.operand(0), at.operands[1]
    dx = at.graph.one("fake_quantise_grad", x, ct, scale, ste="clipped", **at.attrs) if at.wanted[0] else None
    if scale is None or not at.wanted[1]:
        return dx, None
    return dx, at.graph.one("fake_quantise_scale_grad", x, scale, ct, **at.attrs)
