"""Aliasing: whether a node may write its result over the memory of an operand."""

from __future__ import annotations

from rlx.errors import LowerError
from rlx.ir.graph import Node
from rlx.lir.program import ARENA, INPUT
from rlx.lir.schedule import Scheduler
from rlx.lir.views import View


def may_write(s: Scheduler, node: Node, view: View) -> bool:
    """Whether `node` may update an operand in place: the caller's state, or arena memory that nothing reads later."""
    if view.buffer in s.borrowed:
        return False
    later = [o for n in s.graph.nodes if n.id > node.id for o in n.operands if o is not None]
    used = any(o in s.views and s.views[o].buffer == view.buffer for o in (*later, *s.graph.outputs))
    kind = s.program.buffers[view.buffer].kind
    if kind != INPUT or s.graph.named(view.buffer).node.op != "state":
        return kind == ARENA and not used
    if used:
        # Updating a copy instead would leave the caller's state unchanged.
        problem = f"{node.op}: the old value of state {view.buffer!r} is read later"
        raise LowerError(problem, hint="read the result instead")
    return True


def may_reuse(s: Scheduler, node: Node, view: View) -> bool:
    """Whether a result of `node` may overwrite an operand: arena memory that nothing reads later.

    Never a state: only ops declared to update states write to them.
    """
    return s.program.buffers[view.buffer].kind == ARENA and may_write(s, node, view)
