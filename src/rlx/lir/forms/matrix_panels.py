"""Kernels that factor narrow panels of matrices: one unit per matrix of the batch, vectorised along rows.

Panels are copied to scratch memory with their columns contiguous, since the steps work column by column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.dtypes import BOOL, I32, I64, DType
from rlx.lir.forms.linear import Strided
from rlx.lir.loops import Arg, Assign, Const, Expr, For, Index, Let, Reduce, Ref, Stmt, Var, fma
from rlx.lir.schedule import Scheduler, decode_unit
from rlx.lir.views import View
from rlx.types import Size, product

COLUMNS = 64  # right-hand sides per unit of a triangular solve
SWAPPED_COLUMNS = 512  # per unit of a row exchange


class Panel(Strided):
    """A kernel under construction with one unit per matrix: operands are addressed by row and column."""

    def __init__(self, s: Scheduler, name: str, lead: Sequence[Size]) -> None:
        super().__init__(s, name)
        self.scheduler = s
        self.lead = tuple(lead)
        self.names = [f"batch{axis}" for axis in range(len(lead))]

    @property
    def batch(self) -> list[Expr]:
        return [Ref(name, I64) for name in self.names]

    def get(self, param: int, *indices: Expr) -> Expr:
        return self.load(param, *self.batch, *indices)

    def put(self, param: int, value: Expr, *indices: Expr) -> Stmt:
        return self.store(param, value, *self.batch, *indices)

    def size(self, name: str, size: Size) -> Arg:
        return self.builder.arg(name, size)

    def run(self, *body: Stmt, flops: Size = 0, chunks: Size = 1) -> None:
        """Launch the kernel; with `chunks`, each matrix is that many units, whose number is `chunk`."""
        sizes, names = ([*self.lead, chunks], [*self.names, "chunk"]) if chunks != 1 else (self.lead, self.names)
        lets: list[Stmt] = [*decode_unit(self.builder, sizes, names)] if sizes else []
        if chunks == 1:
            lets.append(Let("chunk", Const(0, I64)))
        units = product([*self.lead, chunks])
        root = For("u", self.size("units", units), (*lets, *body))
        self.builder.launch(self.scheduler, root, units, split="matrices", flops=flops)


def each(index: str, extent: Size | Arg | Ref, *body: Stmt, vector: bool = False) -> For:
    assert isinstance(extent, int | Arg | Ref)
    return For(index, extent, body, vector)


def vector_loop(index: str, extent: Arg | Ref, *body: Stmt) -> For:
    return For(index, extent, body, True)


i, j, k, c = Index("i"), Index("j"), Index("k"), Index("c")
REST = Ref("rest", I64)
CHAINS = 4  # partial sums of a product of a row and a column, so that one does not wait for the other


def chains(count: Expr) -> list[Stmt]:
    """Lets of how often all partial sums take a product, and how many products are left."""
    return [Let("rounds", count.quot(CHAINS)), Let("left", count - Ref("rounds", I64) * CHAINS)]


def less_products(kind: DType, start: Expr, factors: Callable[[Expr], tuple[Expr, Expr]]) -> tuple[list[Stmt], Expr]:
    """start - Σ a · b over the products counted by `chains`, as statements and the result; per lane."""
    names = [f"sum{n}" for n in range(CHAINS)]
    sums = [Ref(name, kind) for name in names]

    def add(n: int, term: Expr) -> Assign:
        a, b = factors(term)
        return Assign(names[n], fma(-a, b, sums[n]))

    last = Ref("rounds", I64) * CHAINS + Index("rest_term")
    stmts: list[Stmt] = [
        Var(names[0], start),
        *(Var(name, Const(0.0, kind)) for name in names[1:]),
        each("round", Ref("rounds", I64), *(add(n, Index("round") * CHAINS + n) for n in range(CHAINS))),
        each("rest_term", Ref("left", I64), add(0, last)),
    ]
    return stmts, (sums[0] + sums[1]) + (sums[2] + sums[3])


# -- cholesky ---------------------------------------------------------------------------------------------------------
def factor_definite(s: Scheduler, block: View, lower: View, upper: View, inverse: View | None) -> None:
    """Cholesky factor of a block into `lower`; `upper` is scratch, in which its transpose has contiguous rows.

    `inverse` gets the inverse of the factor.
    """
    *lead, size, _ = block.shape
    t = Panel(s, "cholesky", lead)
    x, out, u = t.read(block), t.write(lower), t.write(upper)
    n, kind = t.size("n", size), block.dtype
    scale = Ref("scale", kind)
    stmts, total = less_products(kind, t.get(x, j + c, j), lambda k: (t.get(u, k, j), t.get(u, k, j + c)))
    body: list[Stmt] = [
        each(
            "j", n,
            *chains(j), Let("rest", n - j),
            vector_loop("c", REST, *stmts, t.put(u, total, j, j + c)),
            Let("scale", 1.0 / t.get(u, j, j).sqrt()),
            vector_loop("c", REST, t.put(u, t.get(u, j, j + c) * scale, j, j + c)),
        ),
        each("i", n, vector_loop("c", n, t.put(out, (c <= i).choose(t.get(u, c, i), 0.0), i, c))),
    ]  # fmt: skip
    if inverse is not None:
        y = t.write(inverse)
        one = c.eq(i).select(Const(1.0, kind), 0.0)
        stmts, total = less_products(kind, one, lambda k: (t.get(u, k, i), t.get(y, k, c)))
        row = vector_loop("c", n, *stmts, t.put(y, total * scale, i, c))
        body.append(each("i", n, *chains(i), Let("scale", 1.0 / t.get(u, i, i)), row))
    t.run(*body, flops=product(block.shape) * size)


# -- triangular systems -----------------------------------------------------------------------------------------------
def solve_triangle(s: Scheduler, a: View, x: View, *, lower: bool, unit_diagonal: bool) -> None:
    """Solve with a triangle in place, row by row; a unit is a run of columns of x."""
    if x.shape[-1] == 1:
        _solve_vector(s, a, x.with_(x.shape[:-1], x.strides[:-1]), lower=lower, unit_diagonal=unit_diagonal)
        return
    *lead, size, columns = x.shape
    t = Panel(s, "solve_triangle", lead)
    matrix, out = t.read(a), t.write(x)
    n, kind = t.size("n", size), x.dtype
    row, first = Ref("row", I64), Ref("first", I64)

    def factors(term: Expr) -> tuple[Expr, Expr]:
        known = term if lower else n - 1 - term
        return t.get(matrix, row, known), t.get(out, known, first + c)

    stmts, total = less_products(kind, t.get(out, row, first + c), factors)
    result = total if unit_diagonal else total / Ref("pivot", kind)
    t.run(
        Let("first", Ref("chunk", I64) * COLUMNS),
        Let("width", (t.size("m", columns) - first).min(COLUMNS)),
        each(
            "i", n,
            Let("row", i if lower else n - 1 - i), *chains(i),
            *([] if unit_diagonal else [Let("pivot", t.get(matrix, row, row))]),
            vector_loop("c", Ref("width", I64), *stmts, t.put(out, result, row, first + c)),
        ),
        chunks=(columns + (COLUMNS - 1)) // COLUMNS, flops=product(x.shape) * size,
    )  # fmt: skip


def _solve_vector(s: Scheduler, a: View, x: View, *, lower: bool, unit_diagonal: bool) -> None:
    """The same for one right-hand side: each element is one sum along a row."""
    *lead, size = x.shape
    t = Panel(s, "solve_vector", lead)
    matrix, out = t.read(a), t.write(x)
    n, row = t.size("n", size), Ref("row", I64)
    known = k if lower else row + 1 + k
    total = t.get(out, row) - Reduce("sum", "k", Ref("count", I64), t.get(matrix, row, known) * t.get(out, known))
    result = total if unit_diagonal else total / t.get(matrix, row, row)
    t.run(
        each("i", n, Let("row", i if lower else n - 1 - i), Let("count", i), t.put(out, result, row)),
        flops=product(x.shape) * size,
    )


# -- lu ---------------------------------------------------------------------------------------------------------------
def factor_panel(s: Scheduler, strip: View, pivots: View, columns: View, first: Size) -> None:
    """LU with row exchanges of a tall strip, in place. `columns` is scratch, `first` the number of its first row."""
    *lead, height, width = strip.shape
    t = Panel(s, "lu_panel", lead)
    a, p, y = t.write(strip), t.write(columns), t.write(pivots)
    m, n, kind = t.size("m", height), t.size("n", width), strip.dtype
    largest, at, scale = Ref("largest", kind), Ref("at", I64), Ref("scale", kind)
    magnitude = abs(t.get(p, j, j + i))
    candidate = (magnitude >= largest).select(i, m)
    steps: list[Stmt] = [
        Let("below", m - j),
        Let("largest", Reduce("max", "i", Ref("below", I64), magnitude)),
        Let("place", Reduce("min", "i", Ref("below", I64), candidate)),
        Let("at", j + (Ref("place", I64) < Ref("below", I64)).select(Ref("place", I64), Const(0, I64))),
        t.put(y, (at + t.size("first", first)).cast(I32), j),
        each(
            "c", n,
            Let("upper", t.get(p, c, j)), Let("other", t.get(p, c, at)),
            t.put(p, Ref("other", kind), c, j), t.put(p, Ref("upper", kind), c, at),
        ),
        Let("pivot", t.get(p, j, j)),
        Let("scale", Ref("pivot", kind).eq(0.0).select(Const(0.0, kind), 1.0 / Ref("pivot", kind))),
        Let("rest", m - 1 - j),
        vector_loop("i", REST, t.put(p, t.get(p, j, j + 1 + i) * scale, j, j + 1 + i)),
        Let("later", n - 1 - j),
        each(
            "c", Ref("later", I64),
            Let("factor", -t.get(p, j + 1 + c, j)),
            vector_loop(
                "i", REST,
                t.put(p, fma(Ref("factor", kind), t.get(p, j, j + 1 + i), t.get(p, j + 1 + c, j + 1 + i)),
                      j + 1 + c, j + 1 + i),
            ),
        ),
    ]  # fmt: skip
    t.run(
        each("i", m, vector_loop("c", n, t.put(p, t.get(a, i, c), c, i))),
        each("j", n, *steps),
        each("i", m, vector_loop("c", n, t.put(a, t.get(p, c, i), i, c))),
        flops=product(strip.shape) * width,
    )


def swap_rows(s: Scheduler, x: View, pivots: View, first: Size) -> None:
    """Exchange rows in the order of the pivots, which are numbers of rows of x; the first one is of row `first`."""
    *lead, _, columns = x.shape
    t = Panel(s, "swap_rows", lead)
    source, a = t.read(pivots), t.write(x)
    start, kind = Ref("start", I64), x.dtype
    upper, at = t.size("first", first) + k, Ref("at", I64)
    t.run(
        Let("start", Ref("chunk", I64) * SWAPPED_COLUMNS),
        Let("width", (t.size("m", columns) - start).min(SWAPPED_COLUMNS)),
        each(
            "k", t.size("n", pivots.shape[-1]),
            Let("at", t.get(source, k).cast(I64)),
            vector_loop(
                "c", Ref("width", I64),
                Let("one", t.get(a, upper, start + c)), Let("other", t.get(a, at, start + c)),
                t.put(a, Ref("other", kind), upper, start + c), t.put(a, Ref("one", kind), at, start + c),
            ),
        ),
        chunks=(columns + (SWAPPED_COLUMNS - 1)) // SWAPPED_COLUMNS,
    )  # fmt: skip


def order_rows(s: Scheduler, pivots: View, order: View) -> None:
    """The order of the rows after all exchanges."""
    *lead, size = pivots.shape
    t = Panel(s, "order_rows", lead)
    source, out = t.read(pivots), t.write(order)
    n = t.size("n", size)
    t.run(
        vector_loop("c", n, t.put(out, c.cast(I32), c)),
        each(
            "k", n,
            Let("at", t.get(source, k).cast(I64)),
            Let("one", t.get(out, k)), Let("other", t.get(out, Ref("at", I64))),
            t.put(out, Ref("other", I32), k), t.put(out, Ref("one", I32), Ref("at", I64)),
        ),
    )  # fmt: skip


# -- qr ---------------------------------------------------------------------------------------------------------------
def reflector(kind: DType, alpha: Expr) -> list[Stmt]:
    """Householder's `beta`, `tau` and `scale`, from the first element and the `squares` of the others."""
    first, squares, norm, beta = (Ref(name, kind) for name in ("alpha", "squares", "norm", "beta"))
    is_trivial = Ref("trivial", BOOL)
    return [
        Let("alpha", alpha), Let("trivial", squares.eq(0.0)), Let("norm", fma(first, first, squares).sqrt()),
        Let("beta", is_trivial.select(first, (first >= 0.0).select(-norm, norm))),
        Let("tau", is_trivial.select(Const(0.0, kind), (beta - first) / beta)),
        Let("scale", is_trivial.select(Const(0.0, kind), 1.0 / (first - beta))),
    ]  # fmt: skip


def reflect_panel(s: Scheduler, strip: View, vectors: View, factor: View) -> None:
    """Householder QR of a tall strip: its upper triangle becomes R.

    `vectors` gets the reflectors as rows V, and `factor` the upper triangular T with Q = i - Vᵀ T V.
    """
    *lead, height, width = strip.shape
    t = Panel(s, "qr_panel", lead)
    a, v, f = t.write(strip), t.write(vectors), t.write(factor)
    m, n, kind = t.size("m", height), t.size("n", width), strip.dtype
    zero = Const(0.0, kind)
    beta, tau, scale = (Ref(name, kind) for name in ("beta", "tau", "scale"))
    at = Ref("at", I64)

    def dot(row: Expr) -> Reduce:
        return Reduce("sum", "i", Ref("span", I64), t.get(v, j, j + i) * t.get(v, row, j + i))

    steps: list[Stmt] = [
        Let("at", j), Let("rest", m - 1 - j), Let("span", m - j), Let("later", n - 1 - j),
        Let("squares", Reduce("sum", "i", REST, t.get(v, j, j + 1 + i) * t.get(v, j, j + 1 + i))),
        *reflector(kind, t.get(v, j, j)),
        vector_loop("i", REST, t.put(v, t.get(v, j, j + 1 + i) * scale, j, j + 1 + i)),
        vector_loop("i", at, t.put(a, t.get(v, j, i), i, j)),
        t.put(a, beta, j, j),
        vector_loop("i", at, t.put(v, zero, j, i)),
        t.put(v, Const(1.0, kind), j, j),
        each(
            "c", Ref("later", I64),
            Let("row", j + 1 + c),
            Let("part", -(tau * dot(Ref("row", I64)))),
            vector_loop(
                "i", Ref("span", I64),
                t.put(v, fma(Ref("part", kind), t.get(v, j, j + i), t.get(v, Ref("row", I64), j + i)),
                      Ref("row", I64), j + i),
            ),
        ),
        each("c", at, t.put(f, -(tau * dot(c)), c, j)),
        each(
            "c", at,
            Let("above", at - c),
            t.put(f, Reduce("sum", "i", Ref("above", I64), t.get(f, c, c + i) * t.get(f, c + i, j)), c, j),
        ),
        t.put(f, tau, j, j),
    ]  # fmt: skip
    t.run(
        each("i", m, vector_loop("c", n, t.put(v, t.get(a, i, c), c, i))),
        each("i", n, vector_loop("c", n, t.put(f, zero, i, c))),
        each("j", n, *steps),
        flops=product(strip.shape) * (2 * width),
    )
