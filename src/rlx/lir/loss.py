"""Loop forms of losses: a row of logits is one unit, read once for its sum and once for what is made of it."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import BOOL, I64, DType
from rlx.ir.graph import Node
from rlx.lir.index import in_range
from rlx.lir.kernels import OUT_OF_RANGE
from rlx.lir.loops import Apply, Check, Choose, Const, Expr, For, Index, Let, Reduce, Ref, Stmt, Store
from rlx.lir.reduce import Rows, rows_over
from rlx.lir.schedule import LoopBuilder, Scheduler, cast, loop_form
from rlx.lir.views import View
from rlx.types import Size, product


def _rows(s: Scheduler, node: Node) -> tuple[Rows, View, list[Stmt], DType]:
    """Loops over rows: logits, labels, then dy and what is written; and what both kernels begin with."""
    x, *others = (s.view(o) for o in node.operands)
    if x.strides[-1] != 1:
        x = s.copied(x)
    out = s.result(node)
    views = [x, *others, out]
    builder = LoopBuilder(node.op)
    for view in views:
        builder.param(view, written=view is out)
    whole = [v if v.rank == x.rank else View(v.buffer, v.dtype, x.shape, (*v.strides, 0), v.offset) for v in views]
    rows = rows_over(builder, whole, x.shape, (x.rank - 1,))
    rows.vector = False
    kind, q = x.dtype.compute, Index("q")
    label, none = Ref("label", I64), Const(node.attrs["ignore_index"], I64)
    power = Apply("exp", (Apply("sub", (rows.load(0, q), Ref("top", kind)), kind),), kind)
    inside = in_range(label, rows.extent())
    start: list[Stmt] = [
        Let("label", cast(rows.load(1), I64)),
        Let("counts", Apply("ne", (label, none), BOOL)),
        Let("inside", inside),
        Check(Apply("or", (Ref("inside", BOOL), Apply("eq", (label, none), BOOL)), BOOL), OUT_OF_RANGE),
        Let("valid", Apply("and", (Ref("counts", BOOL), Ref("inside", BOOL)), BOOL)),
        Let("top", Reduce("max", "q", rows.extent(), rows.load(0, q))),
        Let("total", Reduce("sum", "q", rows.extent(), power)),
    ]
    return rows, out, start, kind


def _where_valid(value: Expr) -> Expr:
    return Choose(Ref("valid", BOOL), value, Const(0.0, value.dtype))


@loop_form("cross_entropy")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    rows, out, start, kind = _rows(s, node)
    picked = Apply("sub", (rows.load(0, Ref("label", I64)), Ref("top", kind)), kind)
    loss = Apply("sub", (Apply("log", (Ref("total", kind),), kind), picked), kind)
    rows.launch(s, [*start, Store(2, rows.place(2), _where_valid(loss))], _work(node))
    return [out]


@loop_form("cross_entropy_grad")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    rows, out, start, kind = _rows(s, node)
    q = Index("q")
    power = Apply("exp", (Apply("sub", (rows.load(0, q), Ref("top", kind)), kind),), kind)
    share = Apply("div", (power, Ref("total", kind)), kind)
    one = Apply("select", (Apply("eq", (q, Ref("label", I64)), BOOL), Const(1.0, kind), Const(0.0, kind)), kind)
    value = Apply("mul", (Apply("sub", (share, one), kind), Ref("dy", kind)), kind)
    write = For("q", rows.extent(), (Store(3, rows.place(3, q), value),), vector=True)
    rows.launch(s, [*start, Let("dy", _where_valid(cast(rows.load(2), kind))), write], _work(node))
    return [out]


def _work(node: Node) -> Size:
    logits = node.operands[0]
    assert logits is not None
    return product(logits.shape) * 8
