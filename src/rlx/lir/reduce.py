"""Loop forms of reductions, softmax, argmax, top-k and running sums.

Where the reduced axis is contiguous, a row is one unit and the reduction itself is vectorised; where a kept axis is
contiguous, lanes run over that axis and each reduces serially, many of them side by side where they can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlx.dtypes import BOOL, F32, F64, I32, I64, DType
from rlx.ir.graph import Node
from rlx.lir.loops import (
    Apply,
    Arg,
    Assign,
    Const,
    Expr,
    For,
    Index,
    Let,
    Load,
    Reduce,
    Ref,
    Stmt,
    Store,
    Var,
)
from rlx.lir.schedule import LoopBuilder, Scheduler, cast, decode_unit, loop_form, widened
from rlx.lir.shape import require_at_most
from rlx.lir.views import View, collapse
from rlx.ops.reduce import normal_axes
from rlx.types import Size, contiguous_strides, product

STRIPS = (512, 384, 256, 192, 128, 64)  # columns that are reduced side by side: what they have so far stays in L1
TOGETHER = 8  # rows between a column's store and its next load


@dataclass
class Rows:
    """Loops over the kept axes of a reduction, and how each operand is addressed inside them.

    `place(param, *indices)` gives the address terms of a parameter, with one index for each reduced axis it has.
    """

    builder: LoopBuilder
    reduced: list[Size]
    vector: bool  # lanes run over a kept axis
    kept_sizes: list[Size]
    kept_strides: list[list[Size]]
    reduced_strides: list[list[Size]]

    def extent(self, axis: int = 0) -> Arg:
        return self.builder.arg(f"r{axis}", self.reduced[axis])

    def place(self, param: int, *indices: Expr) -> tuple[tuple[Expr, int | Arg], ...]:
        terms: list[tuple[Expr, int | Arg]] = []
        last = len(self.kept_sizes) - 1
        for axis, stride in enumerate(self.kept_strides[param]):
            inner = self.vector and axis == last
            factor = self.builder.stride(param, f"k{axis}", stride, unit=inner)
            if factor != 0:
                terms.append((Index("j") if inner else Ref(f"k{axis}", I64), factor))
        for axis, index in enumerate(indices):
            unit = not self.vector and axis == len(indices) - 1
            factor = self.builder.stride(param, f"r{axis}", self.reduced_strides[param][axis], unit=unit)
            if factor != 0:
                terms.append((index, factor))
        return tuple(terms)

    def load(self, param: int, *indices: Expr) -> Expr:
        return widened(Load(param, self.place(param, *indices), self.builder.params[param].dtype))

    def launch(self, s: Scheduler, body: Sequence[Stmt], flops: Size) -> None:
        builder = self.builder
        outer = self.kept_sizes[:-1] if self.vector else self.kept_sizes
        names = [f"k{i}" for i in range(len(outer))]
        units = product(outer)
        if self.vector:
            inner = For("j", builder.arg("n", self.kept_sizes[-1]), tuple(body), vector=True)
            if not outer:
                chunk = 256
                count = (self.kept_sizes[-1] + (chunk - 1)) // chunk
                builder.launch(s, inner, count, chunk=chunk, split="columns", flops=flops)
                return
            body = [inner]
        lets = decode_unit(builder, outer, names) if outer else []
        root = For("u", builder.arg("units", units), (*lets, *body))
        builder.launch(s, root, units, flops=flops, shares=self._shares() if len(outer) == 1 else None)

    def in_strips(self) -> Rows | None:
        """The same with the lanes' axis cut into strips, where its size allows it."""
        columns = self.kept_sizes[-1] if self.vector and len(self.reduced) == 1 else 0
        width = next((w for w in STRIPS if isinstance(columns, int) and columns % w == 0 and columns > w), None)
        if width is None:
            return None
        strides = [[*kept[:-1], kept[-1] * width, kept[-1]] for kept in self.kept_strides]
        return replace(self, kept_sizes=[*self.kept_sizes[:-1], columns // width, width], kept_strides=strides)

    def _shares(self) -> dict[int, Size]:
        """The operands whose rows follow each other without gaps, and how long rows are."""
        if self.vector:
            return {}
        whole = list(contiguous_strides(tuple(self.reduced)))
        rows: dict[int, Size] = {}
        for param, (kept, inner) in enumerate(zip(self.kept_strides, self.reduced_strides, strict=True)):
            row = product(self.reduced) if inner == whole else 1
            if kept[0] == row and (inner == whole or not any(inner)):
                rows[param] = row
        return rows


def rows_over(builder: LoopBuilder, views: Sequence[View], shape: Sequence[Size], axes: Sequence[int]) -> Rows:
    """Plan the loops of a reduction of `views` (all of `shape`, stride 0 where one lacks an axis) over `axes`."""
    kept = [a for a in range(len(shape)) if a not in axes]
    strides = [[v.strides[a] for a in kept] for v in views]
    kept_sizes, kept_strides, _ = collapse([shape[a] for a in kept], strides)
    strides = [[v.strides[a] for a in axes] for v in views]
    reduced_sizes, reduced_strides, _ = collapse([shape[a] for a in axes], strides)
    if not reduced_sizes:
        reduced_sizes, reduced_strides = [1], [[0] for _ in views]
    first = views[0]
    inner_kept = bool(kept_sizes) and kept_strides[0][-1] == 1 and reduced_strides[0][-1] != 1
    vector = inner_kept and not (first.is_contiguous() and reduced_strides[0][-1] == 1)
    return Rows(builder, reduced_sizes, vector, kept_sizes, kept_strides, reduced_strides)


def _aligned(view: View, shape: Sequence[Size], axes: Sequence[int], keepdims: bool) -> View:
    """A reduced result seen with the operand's axes: stride 0 on the reduced ones."""
    strides: list[Size] = []
    remaining = iter(s for i, s in enumerate(view.strides) if not (keepdims and i in axes))
    for axis in range(len(shape)):
        strides.append(0 if axis in axes else next(remaining))
    return View(view.buffer, view.dtype, tuple(shape), tuple(strides), view.offset)


def _plan(s: Scheduler, node: Node, axes: Sequence[int], name: str) -> tuple[Rows, View]:
    x, out = s.view(node.operands[0]), s.result(node)
    builder = LoopBuilder(name)
    builder.param(x)
    builder.param(out, written=True)
    keepdims = node.attrs.get("keepdims", False)
    return rows_over(builder, [x, _aligned(out, x.shape, axes, keepdims)], x.shape, axes), out


def _nested(rows: Rows, op: str) -> Expr:
    """The reduction over all reduced axes, the last one innermost."""
    indices = [Index(f"q{a}") for a in range(len(rows.reduced))]
    value = rows.load(0, *indices)
    for axis in range(len(rows.reduced) - 1, -1, -1):
        value = Reduce(op, f"q{axis}", rows.extent(axis), value)
    return value


@loop_form("sum", "prod", "max", "min", "mean")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x = s.view(node.operands[0])
    axes = normal_axes(node.attrs["axis"], x.rank, node.op)
    rows, out = _plan(s, node, axes, node.op)
    op = "sum" if node.op == "mean" else node.op

    def whole(value: Expr) -> Expr:
        if node.op != "mean":
            return value
        count = rows.builder.arg("count", product(x.shape[a] for a in axes))
        return Apply("div", (value, cast(count, value.dtype)), value.dtype)

    strips = rows.in_strips() if out.dtype is x.dtype.compute else None  # else what columns have would be rounded
    if strips is None:
        rows.launch(s, [Store(1, rows.place(1), whole(_nested(rows, op)))], product(x.shape))
    else:
        _reduce_strips(s, strips, op, whole if node.op == "mean" else None, product(x.shape))
    return [out]


def _reduce_strips(s: Scheduler, rows: Rows, op: str, finish: Callable[[Expr], Expr] | None, flops: Size) -> None:
    """A unit is a strip of columns, reduced row by row, so that memory is read in long runs.

    The result holds what columns have so far. Each is reduced in the order of rows, as without strips.
    """
    builder, apply = rows.builder, {"sum": "add", "prod": "mul"}.get(op, op)
    groups = rows.reduced[0] // TOGETHER
    first = builder.arg("first", rows.reduced[0] - groups * TOGETHER)  # rows that are no whole group
    at = rows.place(1)
    so_far: Expr = Load(1, at, builder.params[1].dtype)
    value = so_far
    start = Apply("add", (Apply("mul", (Index("g"), Const(TOGETHER, I64)), I64), first), I64)
    for i in range(TOGETHER):
        row = rows.load(0, Apply("add", (start, Const(i, I64)), I64))
        value = Apply(apply, (value, row), value.dtype)

    def columns(value: Expr) -> For:
        return For("j", rows.kept_sizes[-1], (Store(1, at, value),), vector=True)  # type: ignore[arg-type]

    body = [columns(Reduce(op, "q", first, rows.load(0, Index("q"))))]
    body.append(For("g", builder.arg("groups", groups), (columns(value),)))
    if finish is not None:
        body.append(columns(finish(so_far)))
    outer = rows.kept_sizes[:-1]
    lets, units = decode_unit(builder, outer, [f"k{i}" for i in range(len(outer))]), product(outer)
    builder.launch(s, For("u", builder.arg("units", units), (*lets, *body)), units, flops=flops)


@loop_form("softmax")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x, out = s.view(node.operands[0]), s.result(node)
    builder = LoopBuilder("softmax")
    builder.param(x)
    builder.param(out, written=True)
    rows = rows_over(builder, [x, out], x.shape, (node.attrs["axis"] % x.rank,))
    k = Index("q")
    kind = x.dtype.compute
    top = Let("top", Reduce("max", "q", rows.extent(), rows.load(0, k)))
    shifted = Apply("sub", (rows.load(0, k), Ref("top", kind)), kind)
    power = Apply("exp", (shifted,), kind)
    total = Let("total", Reduce("sum", "q", rows.extent(), power))
    value = Apply("div", (power, Ref("total", kind)), kind)
    store = For("q", rows.extent(), (Store(1, rows.place(1, k), value),), vector=not rows.vector)
    rows.launch(s, [top, total, store], product(x.shape) * 8)
    return [out]


@loop_form("cumsum")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x, out = s.view(node.operands[0]), s.result(node)
    builder = LoopBuilder("cumsum_before" if node.attrs["exclusive"] else "cumsum")
    builder.param(x)
    builder.param(out, written=True)
    rows = rows_over(builder, [x, out], x.shape, (node.attrs["axis"] % x.rank,))
    k, kind = Index("q"), x.dtype.compute
    add = Assign("total", Apply("add", (Ref("total", kind), rows.load(0, k)), kind))
    store = Store(1, rows.place(1, k), Ref("total", kind))
    step = (store, add) if node.attrs["exclusive"] else (add, store)
    rows.launch(s, [Var("total", Const(0, kind)), For("q", rows.extent(), step)], product(x.shape))
    return [out]


def _key(value: Expr) -> Expr:
    """An integer that orders as the value does, NaN above everything."""
    if value.dtype in (F32, F64):
        return cast(Apply("order", (value,), I32 if value.dtype is F32 else I64), I64)
    return cast(value, I64)


LEAST = -(2**63)


@loop_form("argmax")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x = s.view(node.operands[0])
    rows, out = _plan(s, node, (node.attrs["axis"] % x.rank,), "argmax")
    k = Index("q")
    better = Apply("gt", (Ref("key", I64), Ref("best", I64)), BOOL)
    step: tuple[Stmt, ...] = (
        Let("key", _key(rows.load(0, k))),
        Let("better", better),
        Assign("at", Apply("select", (Ref("better", BOOL), k, Ref("at", I64)), I64)),
        Assign("best", Apply("select", (Ref("better", BOOL), Ref("key", I64), Ref("best", I64)), I64)),
    )
    body: list[Stmt] = [
        Var("best", Const(LEAST, I64)),
        Var("at", Const(0, I64)),
        For("q", rows.extent(), step),
        Store(1, rows.place(1), cast(Ref("at", I64), I32)),
    ]
    rows.launch(s, body, product(x.shape))
    return [out]


@loop_form("topk")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """k passes over a row, each finding the best element behind the one found before."""
    x = s.contiguous(s.view(node.operands[0]))
    require_at_most(s, node.attrs["k"], x.shape[-1])
    values, indices = s.result(node, 0), s.result(node, 1)
    builder = LoopBuilder("topk")
    for view, written in ((x, False), (values, True), (indices, True)):
        builder.param(view, written=written)
    n, k = builder.arg("n", x.shape[-1]), builder.arg("k", node.attrs["k"])
    row, j, t = Index("u"), Index("q"), Index("t")
    element = Load(0, ((row, n), (j, 1)), x.dtype)

    def both(op: str, a: Expr, b: Expr) -> Expr:
        return Apply(op, (a, b), BOOL)

    def ref(name: str, kind: DType = I64) -> Ref:
        return Ref(name, kind)

    behind = both(
        "or", both("lt", ref("key"), ref("last")),
        both("and", both("eq", ref("key"), ref("last")), both("gt", j, ref("last_at"))),
    )  # fmt: skip
    first = both("lt", ref("last_at"), Const(0, I64))
    ahead = both("or", both("gt", ref("key"), ref("best")), both("lt", ref("at"), Const(0, I64)))
    better = both("and", both("or", first, behind), ahead)
    scan: tuple[Stmt, ...] = (
        Let("key", _key(widened(element))),
        Let("better", better),
        Assign("at", Apply("select", (ref("better", BOOL), j, ref("at")), I64)),
        Assign("best", Apply("select", (ref("better", BOOL), ref("key"), ref("best")), I64)),
    )
    pass_: tuple[Stmt, ...] = (
        Var("best", Const(LEAST, I64)),
        Var("at", Const(-1, I64)),
        For("q", n, scan),
        Assign("last", ref("best")),
        Assign("last_at", ref("at")),
        Store(1, ((row, k), (t, 1)), widened(Load(0, ((row, n), (ref("at"), 1)), x.dtype))),
        Store(2, ((row, k), (t, 1)), cast(ref("at"), I32)),
    )
    body: tuple[Stmt, ...] = (Var("last", Const(LEAST, I64)), Var("last_at", Const(-1, I64)), For("t", k, pass_))
    units = product(x.shape[:-1])
    builder.launch(s, For("u", builder.arg("units", units), body), units, flops=product(x.shape) * node.attrs["k"])
    return [values, indices]
