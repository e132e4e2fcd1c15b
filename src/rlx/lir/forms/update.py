"""Loop forms of optimiser steps: one pass over parameter, moments and gradient; parameter and moments in place."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.compose import expand_decomposition
from rlx.ir.graph import Node
from rlx.lir.aliasing import may_write
from rlx.lir.forms.elementwise import body_lets
from rlx.lir.loops import Expr, Stmt
from rlx.lir.program import INPUT
from rlx.lir.schedule import Elements, Scheduler, loop_form, map_elements
from rlx.lir.views import View


@loop_form("assign")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    return _update_in_place(s, node, [0])


@loop_form("adamw_update")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    return _update_in_place(s, node, [0, 1, 2])


@loop_form("sgd_update")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    return _update_in_place(s, node, [0] if node.operands[3] is None else [0, 3])


def _update_in_place(s: Scheduler, node: Node, written: Sequence[int]) -> list[View]:
    """Launch one kernel that computes the op's decomposition and updates the operands `written` in place."""
    operands = {i: s.view(o) for i, o in enumerate(node.operands) if o is not None}
    updated: dict[int, View] = {}
    for i in written:
        taken = any(view.buffer == operands[i].buffer for view in updated.values())
        own = operands[i].is_contiguous() and not taken and may_write(s, node, operands[i])
        updated[i] = operands[i] if own else s.copied(operands[i])
    buffers = {view.buffer for view in updated.values()}
    reads = {i: s.copied(v) if v.buffer in buffers else v for i, v in operands.items() if i not in updated}
    numbers = {i: n for n, i in enumerate((*reads, *updated))}  # of the kernel's parameters

    types = [None if o is None else o.type.with_shape() for o in node.operands]
    scalar_graph = expand_decomposition(node.definition, types, node.attrs)  # for one element

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        return body_lets(scalar_graph, [e.load(numbers[i]) for i in operands], s.target)

    shape = operands[written[0]].shape
    map_elements(s, node.op, shape, list(reads.values()), list(updated.values()), body, flops=2 * len(operands))
    return list(updated.values())


@loop_form("read_before_update")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x = s.view(node.operands[0])
    kind = s.program.buffers[x.buffer].kind
    is_state = kind == INPUT and s.graph.named(x.buffer).node.op == "state"
    return [s.copied(x) if is_state else x]


@loop_form("depends_on")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    return [s.view(node.operands[0])]
