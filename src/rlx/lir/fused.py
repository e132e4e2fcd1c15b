"""Loop forms of ops that passes make: elementwise regions and packed weights."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import BOOL, I64
from rlx.ir.graph import Node
from rlx.lir.elementwise import body_lets
from rlx.lir.loops import Apply, Choose, Const, Expr, For, Index, Load, Ref, Stmt, Store
from rlx.lir.schedule import Elements, LoopBuilder, Scheduler, decode_unit, loop_form, map_elements
from rlx.lir.views import View
from rlx.types import product


@loop_form("region")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    body = node.attrs["body"]
    reads = [s.view(o) for o in node.operands]
    outs = [s.result(node, i) for i in range(len(node.types))]
    ops = [n.op for n in body.nodes if n.op not in ("input", "const")]

    def emit(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        return body_lets(body, [e.load(i) for i in range(len(reads))])

    map_elements(s, "_".join(ops)[:40], outs[0].shape, reads, outs, emit, flops=len(ops))
    return outs


@loop_form("interleave_blocks")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """Panels of the transpose: a row of a panel is one 16-bit unit of each column, moved as it is."""
    out = s.result(node)
    _panels(s, node, [s.view(o).transpose((1, 0)) for o in node.operands], out)
    return [out]


@loop_form("pack_panels")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    matrices, out = [s.view(o) for o in node.operands], s.result(node)
    _panels(s, node, matrices, out)
    return [out]


def _panels(s: Scheduler, node: Node, matrices: Sequence[View], out: View) -> None:
    """A unit is one row of one panel: an equal part of each matrix [k, n], zeros beyond the last column."""
    builder = LoopBuilder(node.op)
    width = node.attrs["width"]
    part = width // len(matrices)
    for view in matrices:
        builder.param(view)
    target = builder.param(out, written=True)
    k, n = matrices[0].shape
    lets = decode_unit(builder, [out.shape[0], k], ["p", "k"])
    columns, depth = builder.arg("columns", n), builder.arg("depth", k)
    j = Index("j")
    body: list[Stmt] = []
    for i, view in enumerate(matrices):
        row = builder.stride(i, "k", view.strides[0])
        column = builder.stride(i, "n", view.strides[1], unit=True)
        at: Expr = Apply("add", (Apply("mul", (Ref("p", I64), Const(part, I64)), I64), j), I64)
        inside = Apply("lt", (at, columns), BOOL)
        zero = Const(view.dtype.numpy.type(0).item(), view.dtype)
        value = Choose(inside, Load(i, ((Ref("k", I64), row), (at, column)), view.dtype), zero)
        panel: Expr = Apply("mul", (Ref("p", I64), depth), I64)
        place = ((panel, width), (Ref("k", I64), width), (j, 1), (Const(part * i, I64), 1))
        body.append(For("j", part, (Store(target, place, value),), vector=True))
    units = out.shape[0] * k
    builder.launch(s, For("u", builder.arg("units", units), (*lets, *body)), units, flops=product(out.shape))
