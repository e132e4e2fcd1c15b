"""Loop forms of ops created by passes: fused elementwise regions, and prepacking, whose loops the layout defines."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Node
from rlx.lir.forms import linear as linear
from rlx.lir.forms import norm as norm
from rlx.lir.forms.elementwise import body_lets
from rlx.lir.loops import Expr, Stmt
from rlx.lir.schedule import Elements, Scheduler, loop_form, map_elements
from rlx.lir.views import View
from rlx.operand_layouts import Layout


@loop_form("region")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    body = node.attrs["body"]
    reads = [s.view(o) for o in node.operands]
    outs = [s.result(node, i) for i in range(len(node.types))]
    ops = [n.op for n in body.nodes if n.op not in ("input", "const")]

    def emit(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        return body_lets(body, [e.load(i) for i in range(len(reads))], s.target)

    map_elements(s, "_".join(ops)[:40], outs[0].shape, reads, outs, emit, flops=len(ops))
    return outs


@loop_form("prepack")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    layout: Layout = node.attrs["layout"]
    return layout.loops(s, node)
