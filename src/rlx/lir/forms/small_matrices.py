"""Factorisations of many small matrices: each vector lane works on a matrix of its own.

The matrices are copied to scratch memory in which equal elements of neighbouring matrices are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import I32, I64, DType
from rlx.lir.forms.linear import Strided
from rlx.lir.forms.matrix_panels import each, reflector
from rlx.lir.loops import Arg, Assign, Const, Expr, For, Index, Let, Ref, Stmt, Var, fma
from rlx.lir.schedule import Scheduler
from rlx.lir.views import View
from rlx.types import Size, TensorType, product

LARGEST = 64  # rows and columns
LARGEST_SYSTEM = 16  # of a triangular solve, which does less work per element
FEWEST = 16  # matrices
LANES = 16  # matrices per unit

b, c, i, j, k = (Index(name) for name in "bcijk")
MATRIX = Ref("first", I64) + b  # the number of a lane's matrix


def are_small(x: View, largest: int = LARGEST) -> bool:
    """Whether there are many matrices, and all are small."""
    *lead, rows, columns = x.shape
    count = product(lead)
    many = not isinstance(count, int) or count >= FEWEST
    fits = isinstance(rows, int) and isinstance(columns, int) and max(rows, columns) <= largest
    return bool(lead) and many and fits and _flat(x) is not None


def _flat(x: View, inner: int = 2) -> View | None:
    """The view with one batch axis; None if that needs a copy."""
    split = x.rank - inner
    return x.reshape((product(x.shape[:split]), *x.shape[split:]))


class Lanes(Strided):
    """A kernel under construction whose lanes, `b`, are matrices."""

    def __init__(self, s: Scheduler, name: str, count: Size) -> None:
        super().__init__(s, name)
        self.scheduler, self.count = s, count
        self.units: Size = (count + (LANES - 1)) // LANES

    def source(self, view: View, inner: int = 2) -> int:
        flat = _flat(view, inner)
        return self.read(flat if flat is not None else self.scheduler.copied(view).reshape(
            (self.count, *view.shape[view.rank - inner :])))  # type: ignore[arg-type]  # fmt: skip

    def target(self, view: View, inner: int = 2) -> int:
        flat = _flat(view, inner)
        assert flat is not None, "results are contiguous"
        return self.write(flat)

    def scratch(self, kind: DType, *sizes: Size) -> int:
        return self.write(self.scheduler.temporary(TensorType((self.units, *sizes, LANES), kind)))

    def size(self, name: str, size: Size) -> Arg:
        return self.builder.arg(name, size)

    def own(self, param: int, *indices: Expr) -> Expr:
        """An element of scratch memory."""
        return self.load(param, Index("u"), *indices, b)

    def keep(self, param: int, value: Expr, *indices: Expr) -> Stmt:
        """Store an element of scratch memory."""
        return self.store(param, value, Index("u"), *indices, b)

    def copied(self, source: int, scratch: int, rows: Arg, columns: Arg) -> Stmt:
        return each("i", rows, each("c", columns, self.keep(scratch, self.load(source, MATRIX, i, c), i, c)))

    def run(self, *body: Stmt, flops: Size = 0) -> None:
        first = Ref("first", I64)
        lets = Let("first", Index("u") * LANES), Let("width", (self.size("count", self.count) - first).min(LANES))
        root = For("u", self.size("units", self.units), (*lets, For("b", Ref("width", I64), body, vector=True)))
        self.builder.launch(self.scheduler, root, self.units, split="batches", flops=flops)


def rank_one_update(t: Lanes, w: int, kind: DType) -> Stmt:
    """w[j + 1 + i, j + 1 + c] -= factor · w[j, j + 1 + c]."""
    row, column = j + 1 + i, j + 1 + c
    update = fma(-Ref("factor", kind), t.own(w, j, column), t.own(w, row, column))
    return each("c", Ref("later", I64), t.keep(w, update, row, column))


def cholesky(s: Scheduler, x: View, out: View) -> None:
    """Lower triangular factors, column by column."""
    kind, size = x.dtype, x.shape[-1]
    t = Lanes(s, "small_cholesky", product(x.shape[:-2]))
    source, result, w = t.source(x), t.target(out), t.scratch(kind, size, size)
    n = t.size("n", size)
    row, factor = Ref("row", I64), Ref("factor", kind)
    update = fma(-factor, t.own(w, j + 1 + c, j), t.own(w, row, j + 1 + c))
    t.run(
        t.copied(source, w, n, n),
        each(
            "j", n,
            Let("later", n - 1 - j), Let("root", t.own(w, j, j).sqrt()), t.keep(w, Ref("root", kind), j, j),
            Let("scale", 1.0 / Ref("root", kind)),
            each("i", Ref("later", I64), t.keep(w, t.own(w, j + 1 + i, j) * Ref("scale", kind), j + 1 + i, j)),
            each(
                "i", Ref("later", I64),
                Let("row", j + 1 + i), Let("count", i + 1), Let("factor", t.own(w, row, j)),
                each("c", Ref("count", I64), t.keep(w, update, row, j + 1 + c)),
            ),
        ),
        each("i", n, each("c", n, t.store(result, (c <= i).select(t.own(w, i, c), 0.0), MATRIX, i, c))),
        flops=product(x.shape) * size,
    )  # fmt: skip


def lu(s: Scheduler, x: View, out: View, pivots: View) -> None:
    """LU with row exchanges; each lane has its own pivot rows."""
    kind, size = x.dtype, x.shape[-1]
    t = Lanes(s, "small_lu", product(x.shape[:-2]))
    source, result, rows, w = t.source(x), t.target(out), t.target(pivots, 1), t.scratch(kind, size, size)
    n = t.size("n", size)
    at, best, later = Ref("at", I64), Ref("best", kind), Ref("later", I64)
    value, larger = Ref("value", kind), Ref("value", kind) > best
    pivot = Ref("pivot", kind)
    t.run(
        t.copied(source, w, n, n),
        each(
            "j", n,
            Let("later", n - 1 - j),
            Var("at", j + b * 0), Var("best", abs(t.own(w, j, j))),
            each(
                "i", later,
                Let("value", abs(t.own(w, j + 1 + i, j))),
                Assign("at", larger.select(j + 1 + i, at)), Assign("best", best.max(value)),
            ),
            t.store(rows, at.cast(I32), MATRIX, j),
            each(
                "c", n,
                Let("one", t.own(w, j, c)), Let("other", t.own(w, at, c)),
                t.keep(w, Ref("other", kind), j, c), t.keep(w, Ref("one", kind), at, c),
            ),
            Let("pivot", t.own(w, j, j)), Let("scale", pivot.eq(0.0).select(Const(0.0, kind), 1.0 / pivot)),
            each(
                "i", later,
                Let("factor", t.own(w, j + 1 + i, j) * Ref("scale", kind)),
                t.keep(w, Ref("factor", kind), j + 1 + i, j),
                rank_one_update(t, w, kind),
            ),
        ),
        each("i", n, each("c", n, t.store(result, t.own(w, i, c), MATRIX, i, c))),
        flops=product(x.shape) * size,
    )  # fmt: skip


def solve(s: Scheduler, a: View, x: View, out: View, *, lower: bool, unit_diagonal: bool) -> None:
    """Triangular systems."""
    kind, (size, columns) = x.dtype, x.shape[-2:]
    t = Lanes(s, "small_solve", product(x.shape[:-2]))
    matrix, source, result = t.source(a), t.source(x), t.target(out)
    w, v = t.scratch(kind, size, size), t.scratch(kind, size, columns)
    n, m = t.size("n", size), t.size("m", columns)
    row, known, factor = Ref("row", I64), Ref("known", I64), Ref("factor", kind)
    divided: list[Stmt] = []
    if not unit_diagonal:
        result_row = each("c", m, t.keep(v, t.own(v, row, c) / Ref("pivot", kind), row, c))
        divided = [Let("pivot", t.own(w, row, row)), result_row]
    t.run(
        t.copied(matrix, w, n, n),
        t.copied(source, v, n, m),
        each(
            "j", n,
            Let("row", j if lower else n - 1 - j), Let("count", j),
            each(
                "k", Ref("count", I64),
                Let("known", k if lower else n - 1 - k), Let("factor", -t.own(w, row, known)),
                each("c", m, t.keep(v, fma(factor, t.own(v, known, c), t.own(v, row, c)), row, c)),
            ),
            *divided,
        ),
        each("i", n, each("c", m, t.store(result, t.own(v, i, c), MATRIX, i, c))),
        flops=product(x.shape) * size,
    )  # fmt: skip


def qr(s: Scheduler, x: View, q: View, r: View) -> None:
    """Householder reflections, applied to the columns on their right, then to the identity."""
    kind, (height, width) = x.dtype, x.shape[-2:]
    assert isinstance(height, int) and isinstance(width, int)
    t = Lanes(s, "small_qr", product(x.shape[:-2]))
    source, out_q, out_r = t.source(x), t.target(q), t.target(r)
    count = min(height, width)
    w, z, taus = t.scratch(kind, height, width), t.scratch(kind, height, q.shape[-1]), t.scratch(kind, count)
    m, n, steps = t.size("m", height), t.size("n", width), t.size("steps", count)
    inner = t.size("inner", q.shape[-1])
    squares, tau, rest = Ref("squares", kind), Ref("tau", kind), Ref("rest", I64)
    own = Ref("own", I64)

    def reflected(param: int, at: Expr, column: Expr) -> Sequence[Stmt]:
        """Apply reflection `at`, whose vector is in column `at` of w, to a column."""
        total, part = Ref("total", kind), Ref("part", kind)
        below = at + 1 + i
        return (
            Var("total", t.own(param, at, column)),
            each("i", rest, Assign("total", fma(t.own(w, below, at), t.own(param, below, column), total))),
            Let("part", -(tau * total)),
            t.keep(param, t.own(param, at, column) + part, at, column),
            each("i", rest, t.keep(param, fma(part, t.own(w, below, at), t.own(param, below, column)), below, column)),
        )

    below = t.own(w, j + 1 + i, j)
    t.run(
        t.copied(source, w, m, n),
        each(
            "j", steps,
            Let("rest", m - 1 - j), Let("later", n - 1 - j),
            Var("squares", Const(0.0, kind)),
            each("i", rest, Assign("squares", fma(below, below, squares))),
            *reflector(kind, t.own(w, j, j)),
            t.keep(taus, tau, j), t.keep(w, Ref("beta", kind), j, j),
            each("i", rest, t.keep(w, below * Ref("scale", kind), j + 1 + i, j)),
            each("c", Ref("later", I64), Let("column", j + 1 + c), *reflected(w, j, Ref("column", I64))),
        ),
        each("i", m, each("c", inner, t.keep(z, c.eq(i).select(Const(1.0, kind), 0.0), i, c))),
        each(
            "j", steps,
            Let("own", steps - 1 - j), Let("rest", m - 1 - own), Let("tau", t.own(taus, own)),
            Let("later", inner - own),
            each("c", Ref("later", I64), Let("column", own + c), *reflected(z, own, Ref("column", I64))),
        ),
        each("i", m, each("c", inner, t.store(out_q, t.own(z, i, c), MATRIX, i, c))),
        each("i", inner, each("c", n, t.store(out_r, (i <= c).select(t.own(w, i, c), 0.0), MATRIX, i, c))),
        flops=product(x.shape) * width * 4,
    )  # fmt: skip
