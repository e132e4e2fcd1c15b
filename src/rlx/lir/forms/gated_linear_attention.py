"""Loop form of gated linear attention, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Node
from rlx.lir.forms.recurrent import results_of, walk_matrix
from rlx.lir.schedule import Scheduler, loop_form
from rlx.lir.views import View


@loop_form("gated_linear_attention_carry")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    outs, state = results_of(s, node)
    walk_matrix(s, node, outs[0], state=state, last=outs[1])
    return outs
