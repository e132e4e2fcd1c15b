"""Matmuls in which each row selects its matrix, as launches of the matmul kernel."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Node
from rlx.lir.forms.matmul_launch import launch_matmul
from rlx.lir.schedule import Scheduler
from rlx.lir.views import View


def grouped_matmul(s: Scheduler, node: Node) -> Sequence[View]:
    x, w, index = (s.view(o) for o in node.operands)
    out = s.result(node)
    launch_matmul(s, x, [w], [], [out], None, weights=1, layout=None, columns=out.shape[1], index=index)
    return [out]


def outer_of_runs(s: Scheduler, node: Node) -> Sequence[View]:
    x, y, run_offsets = (s.view(o) for o in node.operands)
    out = s.result(node)
    columns = out.shape[2]
    launch_matmul(s, x, [y], [], [out], None, weights=1, layout=None, columns=columns, index=run_offsets, depth=True)
    return [out]
