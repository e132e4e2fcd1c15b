"""Loop forms of normalisations: one row is one unit."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import DType
from rlx.ir.graph import Node
from rlx.lir.loops import Apply, Const, Expr, For, Index, Let, Load, Reduce, Ref, Stmt, Store
from rlx.lir.reduce import Rows, rows_over
from rlx.lir.schedule import LoopBuilder, Scheduler, cast, loop_form, widened
from rlx.lir.views import View
from rlx.types import product


def _binary(op: str, a: Expr, b: Expr) -> Expr:
    return Apply(op, (a, b), a.dtype)


def normalise(
    rows: Rows, source: int, out: int, kind: DType, layer: bool, eps: float, gamma: int | None, beta: int | None
) -> list[Stmt]:
    """Statements that write the norm of the row in parameter `source` to parameter `out`."""
    k = Index("q")
    count = cast(rows.builder.arg("count", rows.reduced[0]), kind)
    x = rows.load(source, k)
    stmts: list[Stmt] = []
    if layer:
        stmts.append(Let("mean", _binary("div", Reduce("sum", "q", rows.extent(), x), count)))
        x = _binary("sub", x, Ref("mean", kind))
    square = Reduce("sum", "q", rows.extent(), _binary("mul", x, x))
    variance = _binary("add", _binary("div", square, count), Const(eps, kind))
    stmts.append(Let("scale", _binary("div", Const(1.0, kind), Apply("sqrt", (variance,), kind))))
    value = _binary("mul", x, Ref("scale", kind))
    if gamma is not None:
        value = _binary("mul", value, _vector(rows, gamma, kind))
    if beta is not None:
        value = _binary("add", value, _vector(rows, beta, kind))
    stmts.append(For("q", rows.extent(), (Store(out, rows.place(out, k), value),), vector=True))
    return stmts


def _vector(rows: Rows, param: int, kind: DType) -> Expr:
    """Element q of a scale vector."""
    return cast(widened(Load(param, ((Index("q"), 1),), rows.builder.params[param].dtype)), kind)


def _scales(s: Scheduler, builder: LoopBuilder, node: Node, first: int) -> list[int | None]:
    found: list[int | None] = []
    for operand, name in zip(node.operands[first:], ("gamma", "beta"), strict=True):
        found.append(None if operand is None else builder.param(s.contiguous(s.view(operand)), name=name))
    return found


@loop_form("layer_norm", "rms_norm")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x, out = s.view(node.operands[0]), s.result(node)
    if x.strides[-1] != 1:
        x = s.copied(x)
    builder = LoopBuilder(node.op)
    builder.param(x)
    builder.param(out, written=True)
    rows = rows_over(builder, [x, out], x.shape, (x.rank - 1,))
    rows.vector = False
    gamma, beta = _scales(s, builder, node, 1)
    stmts = normalise(rows, 0, 1, x.dtype.compute, node.op == "layer_norm", node.attrs["eps"], gamma, beta)
    rows.launch(s, stmts, product(x.shape) * 8)
    return [out]


@loop_form("residual_norm")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """The sum is written first and read back while it is in cache."""
    x, residual = (s.view(o) for o in node.operands[:2])
    out, total = s.result(node, 0), s.result(node, 1)
    if x.strides[-1] != 1:
        x = s.copied(x)
    builder = LoopBuilder(f"residual_{node.attrs['kind']}_norm")
    builder.param(x)
    builder.param(residual)
    builder.param(total, written=True)
    builder.param(out, written=True)
    rows = rows_over(builder, [x, residual, total, out], x.shape, (x.rank - 1,))
    rows.vector = False
    gamma, beta = _scales(s, builder, node, 2)
    k, kind = Index("q"), x.dtype.compute
    add = _binary("add", rows.load(0, k), rows.load(1, k))
    first = For("q", rows.extent(), (Store(2, rows.place(2, k), add),), vector=True)
    layer = node.attrs["kind"] == "layer"
    rows.launch(s, [first, *normalise(rows, 2, 3, kind, layer, node.attrs["eps"], gamma, beta)], product(x.shape) * 9)
    return [out, total]
