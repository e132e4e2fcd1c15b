"""The loop form of a barrier: the identity, without a launch."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Node
from rlx.lir.schedule import Scheduler, loop_form
from rlx.lir.views import View


@loop_form("optimization_barrier")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    return [s.view(node.operands[0])]
