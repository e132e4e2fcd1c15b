"""The loop form of scatter: the table is copied, then each column walks all updates in order."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import BOOL, I64
from rlx.ir.graph import Node
from rlx.lir.index import in_range
from rlx.lir.kernels import OUT_OF_RANGE
from rlx.lir.loops import Apply, Arg, Check, Const, Expr, For, Index, Let, Load, Ref, Stmt, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, cast, loop_form, widened
from rlx.lir.views import View
from rlx.types import contiguous_strides, product


@loop_form("scatter")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x, indices, updates = (s.view(o) for o in node.operands)
    out = s.result(node)
    s.copy_into(x, out)
    indices, updates = s.contiguous(indices), s.contiguous(updates)
    columns = product(x.shape[1:])
    builder = LoopBuilder("scatter")
    builder.param(indices)
    builder.param(updates)
    builder.param(out, written=True)
    n = builder.arg("n", columns)
    size = builder.arg("size", x.shape[0])
    stride = builder.arg("stride", contiguous_strides(x.shape)[0])
    u, j = Index("q"), Index("j")
    place: tuple[tuple[Expr, int | Arg], ...] = ((Ref("at", I64), stride), (j, 1))
    old = widened(Load(2, place, out.dtype))
    new = widened(Load(1, ((u, n), (j, 1)), updates.dtype))
    body: tuple[Stmt, ...] = (
        Let("found", cast(Load(0, ((u, 1),), indices.dtype), I64)),
        Let("ok", in_range(Ref("found", I64), size)),
        Check(Ref("ok", BOOL), OUT_OF_RANGE),
        Let("at", Apply("select", (Ref("ok", BOOL), Ref("found", I64), Const(0, I64)), I64)),
        Store(2, place, Apply("select", (Ref("ok", BOOL), new, old), new.dtype)),
    )
    walk = For("q", builder.arg("updates", product(indices.shape)), body)
    chunk = 256
    units = (columns + (chunk - 1)) // chunk
    builder.launch(
        s, For("j", n, (walk,), vector=True), units, chunk=chunk, split="columns", flops=product(updates.shape)
    )
    return [out]
