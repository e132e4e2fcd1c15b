"""Loops and branches as ranges of launches: bodies are scheduled once, operand offsets change from step to step.

Carries are double-buffered: each step reads one row and writes the other, alternating. Only initial values that have
other readers are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlx.dtypes import BOOL
from rlx.ir.graph import Graph, Node
from rlx.lir.forms.shape import require_at_most
from rlx.lir.kernels import OUT_OF_STEPS, UNFIT_SIZES
from rlx.lir.loops import Check, Const, Expr, Let, Ref, Stmt, compare
from rlx.lir.program import ARENA, Assertion, Branch, Loop
from rlx.lir.schedule import Elements, Scheduler, loop_form, map_elements
from rlx.lir.views import View
from rlx.types import Size, TensorType, dim, dim_floordiv, product


class _Range:
    """A loop or branch under construction, whose index in the program precedes those inside it."""

    def __init__(self, s: Scheduler) -> None:
        self.s = s
        self.first = self.here
        self.number = len(s.program.controls)
        self.symbol, self.parity = s.loop_symbol("t"), s.loop_symbol("p")
        # Reserves the symbol names for the body.
        s.program.controls.append(Loop(self.first, self.first, self.first, 0, self.symbol, self.parity))

    @property
    def here(self) -> int:
        return len(self.s.program.launches)

    def close(self, kind: type[Loop] | type[Branch], **fields: Any) -> None:
        """Replace the placeholder; drop it if it has no launches."""
        if self.here == self.first:
            del self.s.program.controls[self.number :]
        else:
            self.s.program.controls[self.number] = kind(first=self.first, end=self.here, **fields)


def _body(s: Scheduler, graph: Graph, inputs: Sequence[View], places: Sequence[View | None]) -> None:
    """Schedule a body that runs depending on data. If its size assertions fail, it reports a fault and does not run."""
    first, inside = len(s.program.launches), len(s.program.controls)
    asserted: list[Assertion] = []
    s.body(graph, inputs, places, asserted=asserted)
    if not asserted:
        return
    fit = s.temporary(TensorType((), BOOL))
    _check_sizes(s, asserted, fit)
    launches, controls = s.program.launches, s.program.controls
    launches.insert(first, launches.pop())
    controls[inside:] = [control.renumbered(lambda i: i + 1) for control in controls[inside:]]
    controls.insert(inside, Branch(first + 1, len(launches), len(launches), fit))


def _check_sizes(s: Scheduler, asserted: Sequence[Assertion], fit: View) -> None:
    """Launch a kernel that stores whether all assertions hold, and reports a fault for each one that does not."""
    base = len(s.program.assertions)
    s.program.assertions += [replace(a, launched=True) for a in asserted]

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        stmts: list[Stmt] = []
        every: Expr = Const(True, BOOL)
        for i, a in enumerate(asserted):
            relation = "eq" if a.relation == "==" else "le"
            holds = compare(relation, e.arg(f"a{i}", a.a), e.arg(f"b{i}", a.b))
            for j, steps in enumerate(a.steps):
                holds = (e.arg(f"steps{i}_{j}", steps) <= 0) | holds
            stmts += [Let(f"holds{i}", holds), Check(Ref(f"holds{i}", BOOL), UNFIT_SIZES + base + i)]
            every = every & Ref(f"holds{i}", BOOL)
        return stmts, [every]

    map_elements(s, "check_sizes", (), [], [fit], body)


class _Carries:
    """The carries of a loop: where a step reads and writes each. Unchanged carries stay in their initial buffers."""

    def __init__(self, s: Scheduler, node: Node, body: Graph) -> None:
        self.inits = [s.view(o) for o in node.operands[: node.attrs["carries"]]]
        self.moves = [body.outputs[i].node is not body.inputs[i] for i in range(len(self.inits))]
        self.rows: list[View | None] = []
        for i, moves in enumerate(self.moves):
            self.rows.append(_two_rows(s, node, i, self.inits[i]) if moves else None)

    def now(self, parity: str) -> list[View]:
        """The views a step reads."""
        return [i if r is None else r.row(dim(parity)) for i, r in zip(self.inits, self.rows, strict=True)]

    def next(self, parity: str) -> list[View | None]:
        """The views a step writes; None for an unchanged carry."""
        return [None if rows is None else rows.row(1 - dim(parity)) for rows in self.rows]

    def after(self, steps: Size) -> list[View]:
        """The carries after this many steps."""
        row = steps - 2 * dim_floordiv(steps, 2)
        return [i if r is None else r.row(row) for i, r in zip(self.inits, self.rows, strict=True)]


def _two_rows(s: Scheduler, node: Node, position: int, init: View) -> View:
    """Two rows for a carry, with the initial value in row 0. Reuses its buffer if it has no other reader."""
    type_ = TensorType((2, *init.shape), init.dtype)
    buffer = s.program.buffers[init.buffer]
    fills = init.offset == 0 and init.is_contiguous() and buffer.type.elements == product(init.shape)
    if buffer.kind == ARENA and buffer.name not in s.borrowed and fills and not _is_read_again(s, node, position):
        s.program.buffers[buffer.name] = doubled = replace(buffer, type=type_)
        return doubled.view()
    rows = s.temporary(type_)
    s.copy_into(init, rows.row(0))
    return rows


def _is_read_again(s: Scheduler, node: Node, position: int) -> bool:
    """Whether the buffer of an operand has another reader: an operand of this node, a later node, or the caller."""
    own = s.view(node.operands[position]).buffer
    others = [*node.operands[:position], *node.operands[position + 1 :], *s.graph.outputs]
    others += [o for later in s.graph.nodes[node.id + 1 :] for o in later.operands]
    return any(o in s.views and s.views[o].buffer == own for o in others if o is not None)


@loop_form("scan")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    body, length = node.attrs["body"], node.attrs["length"]
    n, m = node.attrs["carries"], node.attrs["broadcasts"]
    broadcasts, xs = ([s.view(o) for o in part] for part in (node.operands[n : n + m], node.operands[n + m :]))
    ys = [s.result(node, i) for i in range(n, len(node.types))]
    if not isinstance(length, int):  # with no steps, the body checks nothing
        for size in (d for i in range(n, len(node.types)) for d in node.types[i].shape[1:]):
            require_at_most(s, 0, size)
    if length == 0:
        return [*(s.view(o) for o in node.operands[:n]), *ys]
    carries = _Carries(s, node, body)
    inside = _Range(s)
    t: Size = dim(inside.symbol)
    at = length - 1 - t if node.attrs["reverse"] else t
    inputs = [*carries.now(inside.parity), *broadcasts, *(x.row(at) for x in xs)]
    s.body(body, inputs, [*carries.next(inside.parity), *(y.row(at) for y in ys)], steps=length)
    inside.close(Loop, last=inside.here, length=length, symbol=inside.symbol, parity=inside.parity)
    return [*carries.after(length), *ys]


@loop_form("while_loop")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """The number of steps is not known in advance, so the carries are copied from the row they end in."""
    broadcasts = [s.view(o) for o in node.operands[node.attrs["carries"] :]]
    carries = _Carries(s, node, node.attrs["body"])
    inside = _Range(s)
    now = carries.now(inside.parity)
    (predicate,) = s.body(node.attrs["cond"], [*now, *broadcasts], [None])
    test = inside.here
    _body(s, node.attrs["body"], [*now, *broadcasts], carries.next(inside.parity))
    last = inside.here
    results = []
    for i, (view, moves) in enumerate(zip(now, carries.moves, strict=True)):
        results.append(s.result(node, i) if moves else view)
        if moves:
            s.copy_into(view, results[i])
    symbols = {"symbol": inside.symbol, "parity": inside.parity}
    inside.close(Loop, last=last, length=node.attrs["max_steps"], predicate=predicate, test=test, **symbols)
    return results


@loop_form("ended")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    out = s.result(node)

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        return [Check(~e.load(1), OUT_OF_STEPS)], [e.load(0)]

    map_elements(s, "while_loop", out.shape, [s.view(o).expand(out.shape) for o in node.operands], [out], body)
    return [out]


@loop_form("cond")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    predicate, *operands = (s.view(o) for o in node.operands)
    results = [s.result(node, i) for i in range(len(node.types))]
    inside = _Range(s)
    _body(s, node.attrs["then_body"], operands, results)
    middle = inside.here
    _body(s, node.attrs["else_body"], operands, results)
    inside.close(Branch, middle=middle, predicate=predicate)
    return results
