"""Numbers rounded to 8 bits by blocks: straight-through, as if they were not rounded."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.tables import Given, Lanes, Site, batching, straight_through, vjp

straight_through("round_blocks", why="rounding has no derivative of its own")


@vjp("round_blocks")
def _(at: Site, ct: Value) -> Given:
    return [ct]


@batching("round_blocks")
def _(lanes: Lanes) -> Sequence[Value]:
    return [lanes.graph.one("round_blocks", lanes.operand(0), **lanes.attrs)]
