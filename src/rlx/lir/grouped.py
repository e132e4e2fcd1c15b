"""Loop form of products in which each row chooses its matrix."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import BOOL, I64
from rlx.ir.graph import Node
from rlx.lir.index import OUT_OF_RANGE, in_range
from rlx.lir.loops import Apply, Check, Const, Expr, For, Index, Let, Load, Reduce, Ref, Stmt, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, cast, loop_form
from rlx.lir.views import View
from rlx.types import product


@loop_form("grouped_matmul")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """A unit is one row of the result; lanes run over its columns, each with one chain of sums over k."""
    x, w, index = (s.view(o) for o in node.operands)
    out = s.result(node)
    builder = LoopBuilder("grouped_matmul")
    for view in (x, w, index):
        builder.param(view)
    builder.param(out, written=True)
    row, k, j, kind = Index("u"), Index("q"), Index("j"), out.dtype.compute
    ok, at = Ref("ok", BOOL), Ref("at", I64)
    picked = Load(2, ((row, builder.stride(2, "row", index.strides[0])),), index.dtype)
    lets: list[Stmt] = [
        Let("found", cast(picked, I64)),
        Let("ok", in_range(Ref("found", I64), builder.arg("groups", w.shape[0]))),
        Check(ok, OUT_OF_RANGE),
        Let("at", Apply("select", (ok, Ref("found", I64), Const(0, I64)), I64)),
    ]
    left_at = ((row, builder.stride(0, "row", x.strides[0])), (k, builder.stride(0, "k", x.strides[1])))
    right_at = (
        (at, builder.stride(1, "group", w.strides[0])),
        (k, builder.stride(1, "k", w.strides[1])),
        (j, builder.stride(1, "n", w.strides[2], unit=True)),
    )
    left: Expr = cast(Load(0, left_at, x.dtype), kind)
    right: Expr = cast(Load(1, right_at, w.dtype), kind)
    total = Reduce("sum", "q", builder.arg("k", x.shape[1]), Apply("mul", (left, right), kind))
    place = ((row, builder.stride(3, "row", out.strides[0])), (j, builder.stride(3, "n", out.strides[1], unit=True)))
    columns = For("j", builder.arg("n", out.shape[1]), (Store(3, place, total),), vector=True)
    root = For("u", builder.arg("rows", out.shape[0]), (*lets, columns))
    builder.launch(s, root, out.shape[0], flops=product(out.shape) * x.shape[1] * 2)
    return [out]
