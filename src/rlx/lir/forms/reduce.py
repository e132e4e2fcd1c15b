"""Loop forms of reductions, argmax, top-k and running sums.

If the reduced axis is contiguous, a row is one unit and the reduction itself is vectorised. If a kept axis is
contiguous, lanes run over that axis; plain reductions then walk blocks of complete rows in memory order.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlx.dtypes import BOOL, F32, F64, I32, I64
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Node
from rlx.lir.forms.merge_sort import launch_largest
from rlx.lir.forms.shape import require_at_most
from rlx.lir.loops import (
    Arg,
    Assign,
    Const,
    Expr,
    For,
    Index,
    Let,
    Load,
    Place,
    Reduce,
    Ref,
    Stmt,
    Store,
    Var,
    binary,
    number,
)
from rlx.lir.schedule import LoopBuilder, Scheduler, decode_unit, loop_form
from rlx.lir.views import View, collapse
from rlx.ops.reduce import normal_axes
from rlx.types import Size, TensorType, contiguous_strides, product

# Fixed blocking of column reductions; constant, so that results do not depend on the thread count.
BLOCK = 32  # long rows per unit
LONG = 1024  # elements per row for full memory bandwidth: 8 shorter streams at once reach half of it
STRIP = 4096  # maximum columns per unit, so that their partial sums stay in cache
SMALL_STRIP = 256  # the same if threads can split only columns
NARROW = 64  # batched matrices with fewer columns keep their partial sums in registers
TOGETHER = 8  # rows combined between a column's load and store


@dataclass
class Rows:
    """Loops over the kept axes of a reduction, and how each operand is addressed inside them.

    `place(param, *indices)` returns the address terms of a parameter, with one index per reduced axis it has.
    """

    builder: LoopBuilder
    reduced: list[Size]
    vector: bool  # lanes run over a kept axis
    kept_sizes: list[Size]
    kept_strides: list[list[Size]]
    reduced_strides: list[list[Size]]

    def extent(self, axis: int = 0) -> Arg:
        return self.builder.arg(f"r{axis}", self.reduced[axis])

    def place(self, param: int, *indices: Expr) -> Place:
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
        return self.builder.load(param, self.place(param, *indices))

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

    def _shares(self) -> dict[int, Size]:
        """The operands whose rows are contiguous with each other, and the lengths of their rows."""
        if self.vector:
            return {}
        contiguous = list(contiguous_strides(tuple(self.reduced)))
        rows: dict[int, Size] = {}
        for param, (outer, inner) in enumerate(zip(self.kept_strides, self.reduced_strides, strict=True)):
            row = product(self.reduced) if inner == contiguous else 1
            if outer[0] == row and (inner == contiguous or all(stride == 0 for stride in inner)):
                rows[param] = row
        return rows


def rows_over(builder: LoopBuilder, views: Sequence[View], shape: Sequence[Size], axes: Sequence[int]) -> Rows:
    """Plan the loops of a reduction of `views` (all of `shape`, stride 0 where one lacks an axis) over `axes`."""
    kept_axes = [a for a in range(len(shape)) if a not in axes]
    strides = [[v.strides[a] for a in kept_axes] for v in views]
    kept_sizes, kept_strides, _ = collapse([shape[a] for a in kept_axes], strides)
    strides = [[v.strides[a] for a in axes] for v in views]
    reduced_sizes, reduced_strides, _ = collapse([shape[a] for a in axes], strides)
    if not reduced_sizes:
        reduced_sizes, reduced_strides = [1], [[0] for _ in views]
    first = views[0]
    inner_kept = bool(kept_sizes) and kept_strides[0][-1] == 1 and reduced_strides[0][-1] != 1
    vector = inner_kept and not (first.is_contiguous() and reduced_strides[0][-1] == 1)
    return Rows(builder, reduced_sizes, vector, kept_sizes, kept_strides, reduced_strides)


def _aligned(view: View, shape: Sequence[Size], axes: Sequence[int], keepdims: bool) -> View:
    """A reduced result with the operand's axes: stride 0 on the reduced axes."""
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
    count = product(x.shape[a] for a in axes) if node.op == "mean" else None
    *batch, width = rows.kept_sizes or [1]
    narrow = batch and isinstance(width, int) and width < NARROW
    if rows.vector and len(rows.reduced) == 1 and not narrow:
        *outer, columns = rows.kept_strides[0]
        shape, strides = (*rows.kept_sizes[:-1], rows.reduced[0], rows.kept_sizes[-1]), rows.reduced_strides[0]
        matrix = View(x.buffer, x.dtype, shape, (*outer, strides[0], columns), x.offset)
        result = View(out.buffer, out.dtype, tuple(rows.kept_sizes), tuple(rows.kept_strides[1]), out.offset)
        reduce_columns(s, node.op, op, Terms([matrix]), [result], count)
    else:
        rows.launch(s, [Store(1, rows.place(1), _divide(rows.builder, _nested(rows, op), count))], product(x.shape))
    return [out]


def _divide(builder: LoopBuilder, value: Expr, count: Size | None) -> Expr:
    """The sum itself, or divided by `count` for a mean."""
    if count is None:
        return value
    return value / builder.arg("count", count).cast(value.dtype)


@dataclass(frozen=True)
class Terms:
    """Rows to reduce to one: views of [..., rows, columns], and a function of their elements at one position."""

    views: Sequence[View]
    values: Callable[[Sequence[Expr]], Sequence[Expr]] = lambda elements: elements  # one per result
    flops: int = 1  # per position

    @property
    def block(self) -> tuple[int, int]:
        """Rows per block, and how many contiguous rows are treated as one longer row."""
        columns = self.views[0].shape[-1]
        rows = -(-LONG // columns) if isinstance(columns, int) and columns > 0 else 1
        gapless = all(v.strides[-2] == columns and v.strides[-1] == 1 for v in self.views)
        return BLOCK * rows, rows if gapless else 1

    def cut(self, blocks: Size) -> tuple[Terms, Terms]:
        """Complete blocks, [blocks, rows, columns], and the remaining rows."""
        complete, rest = [], []
        block, as_one = self.block
        for v in self.views:
            (rows, columns), (step, unit) = v.shape, v.strides
            shape = (blocks, block // as_one, columns * as_one)
            complete.append(View(v.buffer, v.dtype, shape, (step * block, step * as_one, unit), v.offset))
            done = blocks * block
            rest.append(View(v.buffer, v.dtype, (rows - done, columns), v.strides, v.offset + step * done))
        return replace(self, views=complete), replace(self, views=rest)


def reduce_columns(
    s: Scheduler, name: str, op: str, terms: Terms, outs: Sequence[View], count: Size | None = None
) -> None:
    """Reduce rows to [..., columns] for each of `outs`; divided by `count`, if given.

    Each unit reduces a block of rows in memory order, for bandwidth; a second launch reduces the block results and the
    remaining rows. Few rows need only the second launch. So do batched matrices: each is reduced row by row, so that
    neutral padding rows at its end do not change a bit.
    """
    *outer, rows, columns = terms.views[0].shape
    block, as_one = terms.block
    blocks, parts = rows // block, [terms]
    if not outer and (not isinstance(blocks, int) or blocks > 1):
        reduced = [s.temporary(TensorType((blocks * as_one, columns), out.dtype.wide)) for out in outs]
        shape = (blocks, columns * as_one)
        complete, rest = terms.cut(blocks)
        into = [View(v.buffer, v.dtype, shape, contiguous_strides(shape)) for v in reduced]
        _reduce_rows(s, f"{name}_blocks", op, [complete], into, STRIP)
        parts = [Terms(reduced), rest]
    _reduce_rows(s, name, op, parts, outs, LONG if outer else SMALL_STRIP, count)


def _reduce_rows(
    s: Scheduler, name: str, op: str, parts: Sequence[Terms], outs: Sequence[View], widest: int,
    count: Size | None = None,
) -> None:  # fmt: skip
    """A unit reduces all rows of a strip of columns, several rows at a time; partial results are in memory."""
    builder = LoopBuilder(name)
    combine = functools.partial(binary, {"sum": "add", "prod": "mul"}.get(op, op))
    reads = [[builder.param(v) for v in part.views] for part in parts]
    wide = [v if v.dtype is v.dtype.wide else s.temporary(TensorType(v.shape, v.dtype.wide)) for v in outs]
    accumulators = [builder.param(v, written=True) for v in wide]
    results = [
        h if v is out else builder.param(out, written=True) for h, v, out in zip(accumulators, wide, outs, strict=True)
    ]
    lets, width, rows = _strips(builder, outs[0].shape, widest)

    def over_columns(values: Sequence[Expr], into: Sequence[int]) -> For:
        named = [Let(f"value{i}", value) for i, value in enumerate(values)]  # all loads precede the first store
        stores = [Store(p, rows.place(p), Ref(n.name, n.value.dtype)) for p, n in zip(into, named, strict=True)]
        return For("j", width, (*named, *stores), vector=True)

    partials: list[Expr] = [Load(p, rows.place(p), builder.params[p].dtype) for p in accumulators]
    initial: list[list[Expr]] = []
    loops: list[For] = []
    for which, (part, params) in enumerate(zip(parts, reads, strict=True)):

        def values(row: Expr, part: Terms = part, params: Sequence[int] = params) -> Sequence[Expr]:
            return part.values([rows.load(p, row) for p in params])

        extent = part.views[0].shape[-2]
        groups = max(extent - 1, 0) // TOGETHER if isinstance(extent, int) else extent // TOGETHER
        first = builder.arg(f"first{which}", extent - groups * TOGETHER)  # rows before the groups of TOGETHER
        q, totals = Index(f"q{which}"), partials
        initial.append([Reduce(op, q.name, first, value) for value in values(q)])
        for i in range(TOGETHER):
            totals = list(map(combine, totals, values(Index("g") * TOGETHER + i + first)))
        if groups != 0:
            loops.append(For("g", builder.arg(f"groups{which}", groups), (over_columns(totals, accumulators),)))
    body = [
        over_columns([functools.reduce(combine, of_parts) for of_parts in zip(*initial, strict=True)], accumulators),
        *loops,
    ]
    if count is not None or results != accumulators:
        body.append(over_columns([_divide(builder, value, count) for value in partials], results))
    units = product(rows.kept_sizes[:-1])
    flops = functools.reduce(operator.add, (product(part.views[0].shape) * part.flops for part in parts))
    builder.launch(s, For("u", builder.arg("units", units), (*lets, *body)), units, flops=flops)


def _strips(builder: LoopBuilder, axes: Sequence[Size], widest: int) -> tuple[list[Let], Ref, Rows]:
    """Loops over `axes`, the last in strips: returns the initial lets, the width of a strip, and the addressing."""
    *outer, columns = axes
    count, step = (columns + (widest - 1)) // widest, widest
    if isinstance(columns, int) and isinstance(count, int) and count > 0:
        step = 64 * -(-columns // (64 * count))  # of about equal width
    rows = Rows(builder, [], True, [*outer, count, step], [], [])
    for view in builder.views:
        strides = list(view.strides)
        rows.reduced_strides.append([strides.pop(-2)] if view.rank > len(axes) else [])
        rows.kept_strides.append([*strides[:-1], strides[-1] * step, strides[-1]])
    names = [f"k{i}" for i in range(len(axes))]
    stride, last = builder.arg("step", step), Ref(names[-1], I64)
    width = Let("width", (builder.arg("columns", columns) - last * stride).min(stride))
    return [*decode_unit(builder, rows.kept_sizes[:-1], names), width], Ref(width.name, I64), rows


@loop_form("cumsum")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x, out = s.view(node.operands[0]), s.result(node)
    builder = LoopBuilder("cumsum_before" if node.attrs["exclusive"] else "cumsum")
    builder.param(x)
    builder.param(out, written=True)
    rows = rows_over(builder, [x, out], x.shape, (node.attrs["axis"] % x.rank,))
    q, total = Index("q"), Ref("total", x.dtype.wide)
    add = Assign("total", total + rows.load(0, q))
    store = Store(1, rows.place(1, q), total)
    step = (store, add) if node.attrs["exclusive"] else (add, store)
    rows.launch(s, [Var("total", number(0, total.dtype)), For("q", rows.extent(), step)], product(x.shape))
    return [out]


def _key(value: Expr) -> Expr:
    """An integer that sorts like the value, NaN above everything."""
    if value.dtype in (F32, F64):
        return value.order().cast(I64)
    return value.cast(I64)


MIN_KEY = -(2**63)
MAX_SELECTED = 24  # a larger k sorts entire rows: about log2(n) passes of three times the cost


@loop_form("argmax")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x = s.view(node.operands[0])
    rows, out = _plan(s, node, (node.attrs["axis"] % x.rank,), "argmax")
    q, key, best, at, better = Index("q"), *(Ref(name, I64) for name in ("key", "best", "at")), Ref("better", BOOL)
    step: tuple[Stmt, ...] = (
        Let("key", _key(rows.load(0, q))),
        Let("better", key > best),
        Assign("at", better.select(q, at)),
        Assign("best", better.select(key, best)),
    )
    body: list[Stmt] = [
        Var("best", Const(MIN_KEY, I64)),
        Var("at", Const(0, I64)),
        For("q", rows.extent(), step),
        Store(1, rows.place(1), at.cast(I32)),
    ]
    rows.launch(s, body, product(x.shape))
    return [out]


@loop_form("topk")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """k passes over a row, each selecting the largest element after the previous one; or a sort, if k is large."""
    x = s.contiguous(s.view(node.operands[0]))
    require_at_most(s, node.attrs["k"], x.shape[-1])
    values, indices = s.result(node, 0), s.result(node, 1)
    if node.attrs["k"] > MAX_SELECTED:
        launch_largest(s, _key, x, values, indices)
        return [values, indices]
    builder = LoopBuilder("topk")
    for view, written in ((x, False), (values, True), (indices, True)):
        builder.param(view, written=written)
    n, k = builder.arg("n", x.shape[-1]), builder.arg("k", node.attrs["k"])
    row, j, t = Index("u"), Index("q"), Index("t")
    key, best, at, last, last_at = (Ref(name, I64) for name in ("key", "best", "at", "last", "last_at"))
    better = Ref("better", BOOL)
    behind = (key < last) | (key.eq(last) & (j > last_at))
    scan: tuple[Stmt, ...] = (
        Let("key", _key(builder.load(0, ((row, n), (j, 1))))),
        Let("better", ((last_at < 0) | behind) & ((key > best) | (at < 0))),
        Assign("at", better.select(j, at)),
        Assign("best", better.select(key, best)),
    )
    pass_: tuple[Stmt, ...] = (
        Var("best", Const(MIN_KEY, I64)),
        Var("at", Const(-1, I64)),
        For("q", n, scan),
        Assign("last", best),
        Assign("last_at", at),
        Store(1, ((row, k), (t, 1)), builder.load(0, ((row, n), (at, 1)))),
        Store(2, ((row, k), (t, 1)), at.cast(I32)),
    )
    body: tuple[Stmt, ...] = (Var("last", Const(MIN_KEY, I64)), Var("last_at", Const(-1, I64)), For("t", k, pass_))
    units = product(x.shape[:-1])
    builder.launch(s, For("u", builder.arg("units", units), body), units, flops=product(x.shape) * node.attrs["k"])
    return [values, indices]
