"""Loop forms of grouped matmuls, where each row selects its matrix, and of sorting rows by group."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import BOOL, I32, I64
from rlx.ir.graph import Node
from rlx.lir.forms.index import in_range
from rlx.lir.forms.linear import Strided, multiply
from rlx.lir.kernels import OUT_OF_RANGE
from rlx.lir.loops import Assign, Check, Expr, For, Index, Let, Load, Reduce, Ref, Stmt, Store, Var, number
from rlx.lir.schedule import LoopBuilder, Scheduler, decode_unit, loop_form
from rlx.lir.views import View
from rlx.types import TensorType, product


@loop_form("grouped_matmul")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x, w, index = (s.view(o) for o in node.operands)
    out = s.result(node)
    multiply(s, x, [w], [], [out], index=index)
    return [out]


@loop_form("outer_of_runs")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """out[g] = x[:, a:b] @ y[a:b] with a = offsets[g], b = offsets[g + 1]: run lengths are data."""
    x, y, offsets = (s.view(o) for o in node.operands)
    out = s.result(node)
    t = Strided(s, "outer_of_runs")
    left, right, bounds, result = t.read(x), t.read(y), t.read(offsets), t.write(out)
    g, i, j, q = Ref("g", I64), Ref("i", I64), Index("j"), Ref("first", I64) + Index("q")
    kind = out.dtype.wide
    total, term = Ref("total", kind), t.load(left, i, q).cast(kind) * t.load(right, q, j).cast(kind)
    column: tuple[Stmt, ...] = (
        Var("total", number(0, kind)),
        For("q", Ref("count", I64), (Assign("total", total + term),)),
        t.store(result, total, g, i, j),
    )
    body: tuple[Stmt, ...] = (
        *decode_unit(t.builder, out.shape[:2], ["g", "i"]),
        Let("first", t.load(bounds, g).cast(I64)),
        Let("count", t.load(bounds, g + 1).cast(I64) - Ref("first", I64)),
        For("j", t.builder.arg("n", out.shape[2]), column, vector=True),
    )
    units = product(out.shape[:2])
    flops = product(out.shape[1:]) * x.shape[1] * 2
    t.builder.launch(s, For("u", t.builder.arg("units", units), body), units, flops=flops)
    return [out]


@loop_form("group_rows")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """A unit is one group: it counts the rows of earlier groups, then walks all rows and places its own in order.

    One extra unit computes the end. Rows of other groups are written to a spare slot per unit, after all rows.
    """
    index = s.contiguous(s.view(node.operands[0]))
    rows, units = index.shape[0], node.types[2].shape[0]
    both = [s.temporary(TensorType((rows + units,), I32)) for _ in range(2)]
    offsets = s.result(node, 2)
    builder = LoopBuilder("group_rows")
    builder.param(index)
    for view in (*both, offsets):
        builder.param(view, written=True)
    u, q, count, groups = Index("u"), Index("q"), builder.arg("rows", rows), builder.arg("groups", node.attrs["groups"])
    here = Load(0, ((q, 1),), index.dtype).cast(I64)
    spare = count + u
    own, at = Ref("own", BOOL), Ref("at", I64)

    def where(mine: Expr) -> Expr:
        return own.select(mine, spare)

    before = Reduce("sum", "q", count, (here < u).cast(I64))
    walk: tuple[Stmt, ...] = (
        Let("group", here),
        Check(in_range(Ref("group", I64), groups), OUT_OF_RANGE),
        Let("own", Ref("group", I64).eq(u)),
        Store(1, ((where(at), 1),), q.cast(I32)),
        Store(2, ((where(q), 1),), at.cast(I32)),
        Assign("at", at + own.cast(I64)),
    )
    body: tuple[Stmt, ...] = (
        Let("start", before),
        Store(3, ((u, 1),), Ref("start", I64).cast(I32)),
        Var("at", Ref("start", I64)),
        For("q", count, walk),
    )
    builder.launch(s, For("u", builder.arg("units", units), body), units, flops=rows * units * 4)
    order, place = (View(v.buffer, I32, (rows,), (1,)) for v in both)
    return [order, place, offsets]
