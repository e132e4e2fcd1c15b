"""Loop forms of int8 row quantisation: one unit per row, which computes its range, then writes it."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import U8
from rlx.ir.graph import Node
from rlx.lir.forms.norm import add_rows, normalise, scale_vectors, store_row, vector
from rlx.lir.forms.reduce import Rows, rows_over
from rlx.lir.loops import Expr, Index, Let, Reduce, Ref, Stmt, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, loop_form
from rlx.lir.views import View
from rlx.ops.int8 import LEVELS
from rlx.ops.quant import MIN_SCALE
from rlx.types import product


def _nearest(x: Expr) -> Expr:
    """The nearest integer, ties to even, of a value within the levels; 0 for NaN."""
    return (x > 0).select(x, 0).nearest()


def _quantise(rows: Rows, value: Expr, first: int) -> list[Stmt]:
    """Statements that compute the range of the row whose element q is `value`, and store its codes, scale and offset in
    parameters `first` to `first + 2`."""
    low, high, step, inverse = (Ref(name, value.dtype) for name in ("low", "high", "step", "inverse"))
    return [
        Let("low", Reduce("min", "q", rows.extent(), value)),
        Let("high", Reduce("max", "q", rows.extent(), value)),
        Let("step", ((high - low) / LEVELS).max(MIN_SCALE)),
        Let("inverse", 1 / step),
        Store(first + 1, rows.place(first + 1), step),
        Store(first + 2, rows.place(first + 2), low),
        store_row(rows, first, _nearest((value - low) * inverse).cast(U8)),
    ]


@loop_form("quantise_rows")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x = s.view(node.operands[0])
    if x.strides[-1] != 1:
        x = s.copied(x)
    outs = [s.result(node, i) for i in range(3)]
    builder = LoopBuilder("quantise_rows")
    builder.param(x)
    for out in outs:
        builder.param(out, written=True)
    rows = rows_over(builder, [x, *outs], x.shape, (x.rank - 1,))
    rows.vector = False
    rows.launch(s, _quantise(rows, rows.load(0, Index("q")), 1), product(x.shape) * 5)
    return outs


@loop_form("quantised_norm")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    attrs = node.attrs
    x, residual = (None if o is None else s.view(o) for o in node.operands[:2])
    assert x is not None
    if x.strides[-1] != 1:
        x = s.copied(x)
    outs = [s.result(node, i) for i in range(len(node.types))]
    views = [x, *([] if residual is None else [residual]), *outs]
    builder = LoopBuilder(f"quantised_{'' if residual is None else 'residual_'}{attrs['kind']}_norm")
    for i, view in enumerate(views):
        builder.param(view, written=i >= len(views) - len(outs))
    rows = rows_over(builder, views, x.shape, (x.rank - 1,))
    rows.vector = False
    gamma, beta = scale_vectors(s, builder, node, 2)
    first, kind = len(views) - len(outs), x.dtype.wide
    total = 0 if residual is None else len(views) - 1
    stmts, value = normalise(rows, total, attrs["kind"] == "layer", attrs["eps"], gamma, beta)
    if attrs["keep"]:  # stored first and read back while in cache, like the sum
        stmts.append(store_row(rows, first + 3, value))
        value = rows.load(first + 3, Index("q"))
    if node.operands[4] is not None:
        factor = vector(rows, builder.param(s.contiguous(s.view(node.operands[4])), name="even"), kind)
        value = value * factor
    stmts = [*stmts, *_quantise(rows, value, first)]
    if residual is not None:
        stmts = [add_rows(rows, 0, 1, total), *stmts]
    rows.launch(s, stmts, product(x.shape) * 14)
    return outs
