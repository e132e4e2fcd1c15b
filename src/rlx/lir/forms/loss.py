"""Loop forms of losses: one unit per row of logits, read for its maximum and sum, then for the result."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import BOOL, I64, DType
from rlx.ir.graph import Node
from rlx.lir.aliasing import may_reuse
from rlx.lir.forms.index import in_range
from rlx.lir.forms.reduce import Rows, rows_over
from rlx.lir.kernels import OUT_OF_RANGE
from rlx.lir.loops import Check, Expr, For, Index, Let, Reduce, Ref, Stmt, Store, number
from rlx.lir.schedule import LoopBuilder, Scheduler, loop_form
from rlx.lir.views import View
from rlx.types import Size, product


def _rows(s: Scheduler, node: Node, x: View, out: View | None) -> tuple[Rows, list[Stmt], DType]:
    """Loops over rows with parameters logits, labels, then dy and the output; and the statements both kernels share.

    Without `out`, the result overwrites the logits.
    """
    views = [x, *(s.view(o) for o in node.operands[1:]), *([] if out is None else [out])]
    builder = LoopBuilder(node.op)
    for view in views:
        builder.param(view, written=view is out or (out is None and view is x))
    row_views = [v if v.rank == x.rank else View(v.buffer, v.dtype, x.shape, (*v.strides, 0), v.offset) for v in views]
    rows = rows_over(builder, row_views, x.shape, (x.rank - 1,))
    rows.vector = False
    kind, label, ignored = x.dtype.wide, Ref("label", I64), node.attrs["ignore_index"]
    counts, inside = Ref("counts", BOOL), Ref("inside", BOOL)
    power, within = _power(rows, kind), in_range(label, rows.extent())
    start: list[Stmt] = [
        Let("label", rows.load(1).cast(I64)),
        Let("counts", label.ne(ignored)),
        Let("inside", within),
        Check(inside | label.eq(ignored), OUT_OF_RANGE),
        Let("valid", counts & inside),
        Let("top", Reduce("max", "q", rows.extent(), rows.load(0, Index("q")))),
        Let("total", Reduce("sum", "q", rows.extent(), power)),
    ]
    return rows, start, kind


def _power(rows: Rows, kind: DType) -> Expr:
    """exp(logit q - the largest logit)."""
    return (rows.load(0, Index("q")) - Ref("top", kind)).exp()


def _logits(s: Scheduler, node: Node) -> View:
    x = s.view(node.operands[0])
    return x if x.strides[-1] == 1 else s.copied(x)


def _where_valid(value: Expr) -> Expr:
    return Ref("valid", BOOL).choose(value, 0)


@loop_form("cross_entropy")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    out = s.result(node)
    rows, start, kind = _rows(s, node, _logits(s, node), out)
    picked = rows.load(0, Ref("label", I64)) - Ref("top", kind)
    loss = Ref("total", kind).log() - picked
    rows.launch(s, [*start, Store(2, rows.place(2), _where_valid(loss))], _work(node))
    return [out]


@loop_form("cross_entropy_grad")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """In place of the logits if nothing reads them later: with many classes they are the largest tensor."""
    x = _logits(s, node)
    in_place = x.is_contiguous() and not s.is_output(node) and may_reuse(s, node, x)
    in_place = in_place and all(s.view(o).buffer != x.buffer for o in node.operands[1:])  # rows read these at any time
    out = None if in_place else s.result(node)
    rows, start, kind = _rows(s, node, x, out)
    q, target = Index("q"), 0 if out is None else 3
    share = _power(rows, kind) / Ref("total", kind)
    one = q.eq(Ref("label", I64)).select(number(1, kind), 0)
    value = (share - one) * Ref("dy", kind)
    write = For("q", rows.extent(), (Store(target, rows.place(target, q), value),), vector=True)
    rows.launch(s, [*start, Let("dy", _where_valid(rows.load(2).cast(kind))), write], _work(node))
    return [x if out is None else out]


def _work(node: Node) -> Size:
    logits = node.operands[0]
    assert logits is not None
    return product(logits.shape) * 8
