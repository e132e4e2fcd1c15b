"""Loop forms of normalisations: one unit per row. Gradients of scales are column sums."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import DType
from rlx.ir.graph import Node
from rlx.lir.forms.reduce import Rows, Terms, reduce_columns, rows_over
from rlx.lir.loops import Expr, For, Index, Let, Reduce, Ref, Stmt, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, loop_form
from rlx.lir.views import View
from rlx.types import TensorType, product


def normalise(
    rows: Rows, source: int, layer: bool, eps: float, gamma: int | None, beta: int | None
) -> tuple[list[Stmt], Expr]:
    """Normalise the row in parameter `source`: returns preparatory statements, and the expression of element q."""
    kind = rows.builder.params[source].dtype.wide
    count = rows.builder.arg("count", rows.reduced[0]).cast(kind)
    x = rows.load(source, Index("q"))
    stmts: list[Stmt] = []
    if layer:
        stmts.append(Let("mean", Reduce("sum", "q", rows.extent(), x) / count))
        x = x - Ref("mean", kind)
    variance = Reduce("sum", "q", rows.extent(), x * x) / count
    stmts.append(Let("scale", 1 / (variance + eps).sqrt()))
    value = x * Ref("scale", kind)
    if gamma is not None:
        value = value * vector(rows, gamma, kind)
    if beta is not None:
        value = value + vector(rows, beta, kind)
    return stmts, value


def store_row(rows: Rows, param: int, value: Expr) -> For:
    """The loop that stores `value` as element q of a parameter's row."""
    return For("q", rows.extent(), (Store(param, rows.place(param, Index("q")), value),), vector=True)


def add_rows(rows: Rows, a: int, b: int, total: int) -> For:
    """The loop that adds two rows; the sum is stored and read back while it is in cache."""
    q = Index("q")
    return store_row(rows, total, rows.load(a, q) + rows.load(b, q))


def vector(rows: Rows, param: int, kind: DType) -> Expr:
    """Element q of a scale vector."""
    return rows.builder.load(param, ((Index("q"), 1),)).cast(kind)


def scale_vectors(s: Scheduler, builder: LoopBuilder, node: Node, first: int) -> list[int | None]:
    """Add parameters for gamma and beta, which are operands `first` and `first + 1`."""
    params: list[int | None] = []
    for operand, name in zip(node.operands[first : first + 2], ("gamma", "beta"), strict=True):
        params.append(None if operand is None else builder.param(s.contiguous(s.view(operand)), name=name))
    return params


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
    stmts, value = normalise(rows, 0, node.op == "layer_norm", node.attrs["eps"], gamma, beta)
    rows.launch(s, [*stmts, store_row(rows, 1, value)], product(x.shape) * 8)
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
    stmts, value = normalise(rows, 2, node.attrs["kind"] == "layer", node.attrs["eps"], gamma, beta)
    rows.launch(s, [add_rows(rows, 0, 1, 2), *stmts, store_row(rows, 3, value)], product(x.shape) * 9)
    return [out, total]


@loop_form("norm_grad")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """By rows for x, saving the row statistics; then, if used, by columns for gamma and beta."""
    x, dy = (s.contiguous(s.view(o)) for o in node.operands[:2])
    results, kind = [s.result(node, i) for i in range(3)], x.dtype.wide
    per_row = TensorType(x.shape[:-1], kind)
    inverse, mean = s.temporary(per_row), s.temporary(per_row) if node.attrs["kind"] == "layer" else None
    statistics = [v for v in (inverse, mean) if v is not None]
    _gradients_of_rows(s, node, x, dy, results[0], statistics)
    used = {o for n in s.graph.nodes for o in n.operands} | set(s.graph.outputs)
    if node[1] in used or node[2] in used:
        _gradients_of_columns(s, node, x, dy, statistics, results[1:])
    return results


def _gradients_of_rows(s: Scheduler, node: Node, x: View, dy: View, dx: View, statistics: Sequence[View]) -> None:
    """dx and the statistics of each row: the reciprocal standard deviation, and the mean for layer norm."""
    kind, layer = x.dtype.wide, len(statistics) == 2
    builder = LoopBuilder(f"{node.attrs['kind']}_norm_grad")
    for view in (x, dy):
        builder.param(view)
    for view in (dx, *statistics):
        builder.param(view, written=True)
    rows = rows_over(builder, [x, dy, dx, *(_broadcast_rows(v, x) for v in statistics)], x.shape, (x.rank - 1,))
    rows.vector = False
    gamma = None if node.operands[2] is None else builder.param(s.contiguous(s.view(node.operands[2])), name="gamma")
    stmts, normal = normalise(rows, 0, layer, node.attrs["eps"], None, None)
    count = builder.arg("count", rows.reduced[0]).cast(kind)
    c = rows.load(1, Index("q"))
    c = c if gamma is None else c * vector(rows, gamma, kind)

    def mean(value: Expr) -> Expr:
        return Reduce("sum", "q", rows.extent(), value) / count

    stmts.append(Let("along", mean(c * normal)))
    inner = c - normal * Ref("along", kind)
    if layer:
        stmts.append(Let("level", mean(c)))
        inner = inner - Ref("level", kind)
    stmts.append(store_row(rows, 2, inner * Ref("scale", kind)))
    stmts += [Store(3 + i, rows.place(3 + i), Ref(n, kind)) for i, n in enumerate(("scale", "mean")[: len(statistics)])]
    rows.launch(s, stmts, product(x.shape) * 12)


def _gradients_of_columns(
    s: Scheduler, node: Node, x: View, dy: View, statistics: Sequence[View], results: Sequence[View]
) -> None:
    """Sum dy · normalised x, and dy, over rows."""
    size = x.shape[-1]
    shape = (product(x.shape[:-1]), size)
    views = [View(v.buffer, v.dtype, shape, (size, 1), v.offset) for v in (x, dy)]
    views += [View(v.buffer, v.dtype, shape, (1, 0), v.offset) for v in statistics]

    def sums(elements: Sequence[Expr]) -> Sequence[Expr]:
        normal, ct, inverse, *mean = elements
        normal = normal - mean[0] if mean else normal
        return ct * (normal * inverse), ct

    reduce_columns(s, f"{node.attrs['kind']}_scale_grad", "sum", Terms(views, sums, flops=5), results)


def _broadcast_rows(view: View, x: View) -> View:
    """One number per row of x, broadcast to the shape of x."""
    return View(view.buffer, view.dtype, x.shape, (*view.strides, 0), view.offset)
