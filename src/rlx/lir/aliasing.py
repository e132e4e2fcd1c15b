"""Aliasing: whether the result of a node may lie where an operand does."""

from __future__ import annotations

from rlx.errors import LowerError
from rlx.ir.graph import Node
from rlx.lir.program import ARENA, INPUT
from rlx.lir.schedule import Scheduler
from rlx.lir.views import View


def may_write(s: Scheduler, node: Node, view: View) -> bool:
    """Whether `node` may change an operand in place: the caller's state, or arena memory that nothing reads again."""
    if view.buffer in s.borrowed:
        return False
    later = [o for n in s.graph.nodes if n.id > node.id for o in n.operands if o is not None]
    used = any(o in s.views and s.views[o].buffer == view.buffer for o in (*later, *s.graph.outputs))
    kind = s.program.buffers[view.buffer].kind
    if kind != INPUT or s.graph.named(view.buffer).node.op != "state":
        return kind == ARENA and not used
    if used:
        # A copy would keep the value, but lose what the caller wants to find in the state afterwards.
        raise LowerError(f"{node.op}: state {view.buffer!r} is read again as it was", hint="read the result instead")
    return True


def may_reuse(s: Scheduler, node: Node, view: View) -> bool:
    """Whether a result of `node` may lie where an operand does: memory of the program that nothing reads again.

    Never a state: only ops that say so change what the caller finds there.
    """
    return s.program.buffers[view.buffer].kind == ARENA and may_write(s, node, view)
