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


def normalised(
    rows: Rows, source: int, layer: bool, eps: float, gamma: int | None, beta: int | None
) -> tuple[list[Stmt], Expr]:
    """The norm of the row in parameter `source`: statements that prepare it, and its element q."""
    k, kind = Index("q"), rows.builder.params[source].dtype.compute
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
        value = _binary("mul", value, vector(rows, gamma, kind))
    if beta is not None:
        value = _binary("add", value, vector(rows, beta, kind))
    return stmts, value


def written(rows: Rows, param: int, value: Expr) -> For:
    """The loop that writes the row of a parameter, whose element q is `value`."""
    return For("q", rows.extent(), (Store(param, rows.place(param, Index("q")), value),), vector=True)


def summed(rows: Rows, a: int, b: int, total: int) -> For:
    """The loop that adds two rows; the sum is written first and read back while it is in cache."""
    k = Index("q")
    return written(rows, total, _binary("add", rows.load(a, k), rows.load(b, k)))


def vector(rows: Rows, param: int, kind: DType) -> Expr:
    """Element q of a scale vector."""
    return cast(widened(Load(param, ((Index("q"), 1),), rows.builder.params[param].dtype)), kind)


def scale_vectors(s: Scheduler, builder: LoopBuilder, node: Node, first: int) -> list[int | None]:
    """The parameters of gamma and beta, operands `first` and the next one."""
    found: list[int | None] = []
    for operand, name in zip(node.operands[first : first + 2], ("gamma", "beta"), strict=True):
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
    gamma, beta = scale_vectors(s, builder, node, 1)
    stmts, value = normalised(rows, 0, node.op == "layer_norm", node.attrs["eps"], gamma, beta)
    rows.launch(s, [*stmts, written(rows, 1, value)], product(x.shape) * 8)
    return [out]


@loop_form("residual_norm")
def _(s: Scheduler, node: Node) -> Sequence[View]:
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
    gamma, beta = scale_vectors(s, builder, node, 2)
    stmts, value = normalised(rows, 2, node.attrs["kind"] == "layer", node.attrs["eps"], gamma, beta)
    rows.launch(s, [summed(rows, 0, 1, 2), *stmts, written(rows, 3, value)], product(x.shape) * 9)
    return [out, total]
