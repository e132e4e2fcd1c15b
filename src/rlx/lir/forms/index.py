"""Loop forms of ops that index by data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.dtypes import BOOL, I64
from rlx.ir.graph import Node
from rlx.lir.aliasing import may_reuse
from rlx.lir.forms.quant import element, packed_reads
from rlx.lir.kernels import OUT_OF_RANGE
from rlx.lir.loops import Check, Expr, For, Index, Let, Load, Place, Ref, Stmt, Store
from rlx.lir.schedule import Elements, LoopBuilder, Scheduler, loop_form, map_elements
from rlx.lir.views import View
from rlx.types import Size, TensorType, contiguous_strides, dim_min, product


def in_range(index: Expr, size: Expr) -> Expr:
    """0 <= index < size."""
    return (index >= 0) & (index < size)


@loop_form("gather")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    table, indices, out = s.view(node.operands[0]), s.view(node.operands[1]), s.result(node)
    axis = node.attrs["axis"] % table.rank
    count = indices.rank
    assert node.operands[0] is not None
    storage = node.operands[0].dtype
    none: tuple[Size, ...] = (0,) * count
    table_strides = (*table.strides[:axis], *none, *table.strides[axis + 1 :])
    rows = View(table.buffer, table.dtype, out.shape, table_strides, table.offset)
    before, after = (0,) * axis, (0,) * (table.rank - axis - 1)
    which = View(indices.buffer, indices.dtype, out.shape, (*before, *indices.strides, *after), indices.offset)

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        size = e.arg("size", table.shape[axis])
        step = e.arg("step", table.strides[axis])
        stmts: list[Stmt] = [
            Let("at", e.load(1).cast(I64)),
            Let("ok", in_range(Ref("at", I64), size)),
            Check(Ref("ok", BOOL), OUT_OF_RANGE),
        ]
        row = (Ref("at", I64), step)
        if storage.is_packed:
            value = element(e, storage, e.index(count), (row,), halves=2)
        else:
            value = e.load(0, row)
        return stmts, [Ref("ok", BOOL).choose(value, 0)]

    if storage.is_packed:
        units, halves = packed_reads(table, out.shape, table_strides)
        map_elements(s, f"gather_{storage}", out.shape, [units, which, halves], [out], body, keep=(count,))
    else:
        map_elements(s, "gather", out.shape, [rows, which], [out], body)
    return [out]


@loop_form("scatter_add")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """Narrow floats accumulate in a wide copy, so that they are rounded once and not with each update."""
    out = _result_table(s, node)
    kind = out.dtype.wide
    total = out if out.dtype is kind else s.temporary(TensorType(out.shape, kind))
    _scatter(s, node, total, lambda old, update: old + update.cast(kind))
    if total is not out:
        s.copy_into(total, out)
    return [out]


@loop_form("scatter")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    out = _result_table(s, node)
    _scatter(s, node, out, lambda old, update: update)
    return [out]


def _result_table(s: Scheduler, node: Node) -> View:
    """The result buffer: the table itself if nothing reads it later and its type is wide enough, else a new one."""
    x, indices, updates = (s.view(o) for o in node.operands)
    wide = node.op == "scatter" or x.dtype is x.dtype.wide
    free = x.is_contiguous() and not s.is_output(node) and may_reuse(s, node, x)
    return x if wide and free and x.buffer not in (indices.buffer, updates.buffer) else s.result(node)


def _scatter(s: Scheduler, node: Node, out: View, changed: Callable[[Expr, Expr], Expr]) -> None:
    """Apply the updates, in order, to each column of the table or a copy of it: threads split columns, never rows."""
    x, indices, updates = (s.view(o) for o in node.operands)
    rows, count = x.shape[0], product(indices.shape)
    may_be_empty = not (isinstance(rows, int) and rows > 0)
    if out != x:
        s.copy_into(x, out)
    indices, updates = s.contiguous(indices), s.contiguous(updates)
    columns = product(x.shape[1:])
    builder = LoopBuilder(node.op)
    builder.param(indices)
    builder.param(updates)
    builder.param(out, written=True)
    n = builder.arg("n", columns)
    size = builder.arg("size", rows)
    stride = builder.arg("stride", contiguous_strides(x.shape)[0])
    u, j = Index("q"), Index("j")
    place: Place = ((Ref("at", I64), stride), (j, 1))
    old = builder.load(2, place)
    new = changed(old, builder.load(1, ((u, n), (j, 1))))
    ok, row = Ref("ok", BOOL), Ref("found", I64)
    body: tuple[Stmt, ...] = (
        Let("found", Load(0, ((u, 1),), indices.dtype).cast(I64)),
        Let("ok", in_range(row, size)),
        Check(ok, OUT_OF_RANGE),
        Let("at", ok.select(row, 0)),
        Store(2, place, ok.select(new, old)),
    )
    # Updates out of range rewrite row 0 unchanged; an empty table has no row 0, so there the walk has no steps.
    walk = For("q", builder.arg("updates", count * dim_min(rows, 1) if may_be_empty else count), body)
    columns_body: tuple[Stmt, ...] = (walk,)
    if may_be_empty:
        has_rows = builder.arg("needed", dim_min(count, 1)) < builder.arg("beyond", rows + 1)
        columns_body = (Check(has_rows, OUT_OF_RANGE), walk)
    chunk = 256
    units = (columns + (chunk - 1)) // chunk
    root = For("j", n, columns_body, vector=True)
    builder.launch(s, root, units, chunk=chunk, split="columns", flops=product(updates.shape))
