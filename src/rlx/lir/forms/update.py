"""Loop forms of optimiser steps: one pass over parameter, moments and gradient, the first of them written in place."""

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
    return _changed(s, node, [0])


@loop_form("adamw_update")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    return _changed(s, node, [0, 1, 2])


@loop_form("sgd_update")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    return _changed(s, node, [0] if node.operands[3] is None else [0, 3])


def _changed(s: Scheduler, node: Node, written: Sequence[int]) -> list[View]:
    """One kernel that computes what the op is written with, with the operands `written` in their own memory."""
    given = {i: s.view(o) for i, o in enumerate(node.operands) if o is not None}
    mine: dict[int, View] = {}
    for i in written:
        taken = any(view.buffer == given[i].buffer for view in mine.values())
        own = given[i].is_contiguous() and not taken and may_write(s, node, given[i])
        mine[i] = given[i] if own else s.copied(given[i])
    buffers = {view.buffer for view in mine.values()}
    reads = {i: s.copied(v) if v.buffer in buffers else v for i, v in given.items() if i not in mine}
    numbers = {i: n for n, i in enumerate((*reads, *mine))}  # of the kernel's parameters

    types = [None if o is None else o.type.with_shape() for o in node.operands]
    made = expand_decomposition(node.definition, types, node.attrs)  # of one element

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        return body_lets(made, [e.load(numbers[i]) for i in given], s.target)

    shape = given[written[0]].shape
    map_elements(s, node.op, shape, list(reads.values()), list(mine.values()), body, flops=2 * len(given))
    return list(mine.values())


@loop_form("settled")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x = s.view(node.operands[0])
    kind = s.program.buffers[x.buffer].kind
    is_state = kind == INPUT and s.graph.named(x.buffer).node.op == "state"
    return [s.copied(x) if is_state else x]


@loop_form("after")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    return [s.view(node.operands[0])]
