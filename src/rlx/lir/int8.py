"""Loop forms of rows of 8-bit integers: one row is one unit, its range is found before it is written."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import U8
from rlx.ir.graph import Node
from rlx.lir.loops import Apply, Const, Expr, For, Index, Let, Reduce, Ref, Stmt, Store
from rlx.lir.norm import normalised, scale_vectors, summed, vector
from rlx.lir.reduce import Rows, rows_over
from rlx.lir.schedule import LoopBuilder, Scheduler, cast, loop_form
from rlx.lir.views import View
from rlx.ops.int8 import LEVELS
from rlx.ops.quant import LEAST_SCALE
from rlx.types import product


def _whole(x: Expr) -> Expr:
    """The nearest integer, ties to even, of what is far below 2^22: next to that (2^51 in f64) numbers are whole."""
    big = Const(1.5 * 2.0 ** (52 if x.dtype.size == 8 else 23), x.dtype)
    return Apply("sub", (Apply("add", (x, big), x.dtype), big), x.dtype)


def _quantised(rows: Rows, value: Expr, inside: Expr, first: int) -> tuple[list[Stmt], Stmt]:
    """Statements that find the range of the row whose element q is `value` and write its scale and offset, and one that
    writes an element, which is called `inside` there. Parameters are integers, scale and offset, from `first` on."""
    kind = value.dtype

    def binary(op: str, a: Expr, b: Expr) -> Expr:
        return Apply(op, (a, b), kind)

    low, step = Ref("low", kind), Ref("step", kind)
    spread = binary("sub", Reduce("max", "q", rows.extent(), value), low)
    number = _whole(binary("mul", binary("sub", inside, low), Ref("inverse", kind)))
    prepare: list[Stmt] = [
        Let("low", Reduce("min", "q", rows.extent(), value)),
        Let("step", binary("max", binary("div", spread, Const(float(LEVELS), kind)), Const(LEAST_SCALE, kind))),
        Let("inverse", binary("div", Const(1.0, kind), step)),
        Store(first + 1, rows.place(first + 1), step),
        Store(first + 2, rows.place(first + 2), low),
    ]
    return prepare, Store(first, rows.place(first, Index("q")), cast(number, U8))


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
    value = rows.load(0, Index("q"))
    stmts, write = _quantised(rows, value, value, 1)
    rows.launch(s, [*stmts, For("q", rows.extent(), (write,), vector=True)], product(x.shape) * 5)
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
    first, kind = len(views) - len(outs), x.dtype.compute
    total = 0 if residual is None else len(views) - 1
    stmts, value = normalised(rows, total, attrs["kind"] == "layer", attrs["eps"], gamma, beta)
    element: Expr = Ref("element", kind)
    even, inside = value, element
    if node.operands[4] is not None:
        factor = vector(rows, builder.param(s.contiguous(s.view(node.operands[4])), name="even"), kind)
        even, inside = (Apply("mul", (e, factor), kind) for e in (value, element))
    more, write = _quantised(rows, even, inside, first)
    writes: list[Stmt] = [Let("element", value), write]
    if attrs["keep"]:
        writes.append(Store(first + 3, rows.place(first + 3, Index("q")), element))
    stmts = [*stmts, *more, For("q", rows.extent(), tuple(writes), vector=True)]
    if residual is not None:
        stmts = [summed(rows, 0, 1, total), *stmts]
    rows.launch(s, stmts, product(x.shape) * 14)
    return outs
