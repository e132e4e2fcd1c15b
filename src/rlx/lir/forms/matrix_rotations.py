"""Kernels that diagonalise matrices by rotations: eigenvalues by tridiagonal QL steps, singular values by Jacobi's.

One unit per matrix of the batch. Eigenvectors and singular vectors are rows of scratch memory, so that rotations work
along contiguous elements.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import F64, I64, DType
from rlx.lir.forms.matrix_panels import Panel, each, reflector, vector_loop
from rlx.lir.loops import Arg, Assign, Const, Expr, Index, Let, Reduce, Ref, Stmt, Var, fma
from rlx.lir.schedule import Scheduler
from rlx.lir.views import View
from rlx.types import TensorType, product

QL_STEPS = 40  # per eigenvalue; two are usual
SWEEPS = 30  # of Jacobi rotations; six are usual

c, i, j, k = (Index(name) for name in "cijk")


def _epsilon(kind: DType) -> float:
    return 2.0 ** (-52 if kind is F64 else -23)


def _rank(t: Panel, keys: int, n: Arg, sign: int) -> Let:
    """The place of row i among all when they are sorted by their keys; NaN is last or first."""
    mine, other = t.get(keys, i).order(), t.get(keys, j).order()
    before = other < mine if sign > 0 else other > mine
    return Let("rank", Reduce("sum", "j", n, (before | (other.eq(mine) & (j < i))).cast(I64)))


# -- symmetric eigenvalues --------------------------------------------------------------------------------------------
def diagonalise(s: Scheduler, x: View, values: View, vectors: View) -> None:
    """Eigenvalues in ascending order, and eigenvectors as columns, of symmetric matrices."""
    *lead, size, _ = x.shape
    kind = x.dtype
    t = Panel(s, "eigh", lead)
    source, out_values, out_vectors = t.read(x), t.write(values), t.write(vectors)
    a, z = (t.write(s.temporary(TensorType((*lead, size, size), kind))) for _ in range(2))
    d, e, taus, p = (t.write(s.temporary(TensorType((*lead, size), kind))) for _ in range(4))
    n = t.size("n", size)
    unscale = Ref("unscale", kind)
    result = Ref("rank", I64)
    t.run(
        *_scaled(t, source, a, n, kind),
        Let("last", n - 1),
        each("k", Ref("last", I64), *_tridiagonal_step(t, a, d, e, taus, p, n, kind)),
        t.put(d, t.get(a, n - 1, n - 1), n - 1),
        t.put(e, Const(0.0, kind), n - 1),
        each("i", n, vector_loop("c", n, t.put(z, c.eq(i).select(Const(1.0, kind), 0.0), i, c))),
        each("k", Ref("last", I64), *_accumulated(t, a, z, taus, n, kind)),
        each("l", n, each("trial", QL_STEPS, *_ql_step(t, d, e, z, n, kind))),
        each(
            "i", n,
            _rank(t, d, n, 1),
            Let("total", Reduce("sum", "c", n, t.get(z, i, c))),
            Let("sign", (Ref("total", kind) < 0.0).select(Const(-1.0, kind), 1.0)),
            t.put(out_values, t.get(d, i) * unscale, result),
            vector_loop("c", n, t.put(out_vectors, t.get(z, i, c) * Ref("sign", kind), c, result)),
        ),
        flops=product(x.shape) * size * 9,
    )  # fmt: skip


def _scaled(t: Panel, source: int, a: int, n: Arg, kind: DType) -> list[Stmt]:
    """Copy the lower triangle to both, divided by the largest magnitude, so that squares do not overflow."""
    top = Ref("top", kind)
    usual = (top > 0.0) & (top < float("inf"))
    return [
        Var("top", Const(0.0, kind)),
        each(
            "i", n,
            vector_loop("c", n, t.put(a, (c <= i).choose(t.get(source, i, c), t.get(source, c, i)), i, c)),
            Let("of_row", Reduce("max", "c", n, abs(t.get(a, i, c)))),
            Assign("top", top.max(Ref("of_row", kind))),
        ),
        Let("unscale", usual.select(top, Const(1.0, kind))),
        Let("inverse", 1.0 / Ref("unscale", kind)),
        each("i", n, vector_loop("c", n, t.put(a, t.get(a, i, c) * Ref("inverse", kind), i, c))),
    ]  # fmt: skip


def _tridiagonal_step(t: Panel, a: int, d: int, e: int, taus: int, p: int, n: Arg, kind: DType) -> list[Stmt]:
    """Reflect row and column k so that only neighbours of the diagonal are left; row k then holds the reflector."""
    tau, scale, half = Ref("tau", kind), Ref("scale", kind), Ref("half", kind)
    rest, row = Ref("rest", I64), Ref("row", I64)
    v, w = Ref("v", kind), Ref("w", kind)
    first = k + 1
    product_ = t.get(a, row, first + j) * t.get(a, k, first + j)
    update = fma(-v, t.get(p, j), fma(-w, t.get(a, k, first + j), t.get(a, row, first + j)))
    return [
        Let("rest", n - first), Let("others", rest - 1),
        Let("squares", Reduce("sum", "j", Ref("others", I64), t.get(a, k, k + 2 + j) * t.get(a, k, k + 2 + j))),
        *reflector(kind, t.get(a, k, first)),
        t.put(d, t.get(a, k, k), k), t.put(e, Ref("beta", kind), k), t.put(taus, tau, k),
        vector_loop("j", Ref("others", I64), t.put(a, t.get(a, k, k + 2 + j) * scale, k, k + 2 + j)),
        t.put(a, Const(1.0, kind), k, first),
        each("i", rest, Let("row", first + i), t.put(p, tau * Reduce("sum", "j", rest, product_), i)),
        Let("half", tau * 0.5 * Reduce("sum", "j", rest, t.get(p, j) * t.get(a, k, first + j))),
        vector_loop("j", rest, t.put(p, fma(-half, t.get(a, k, first + j), t.get(p, j)), j)),
        each(
            "i", rest,
            Let("row", first + i), Let("v", t.get(a, k, first + i)), Let("w", t.get(p, i)),
            vector_loop("j", rest, t.put(a, update, row, first + j)),
        ),
    ]  # fmt: skip


def _accumulated(t: Panel, a: int, z: int, taus: int, n: Arg, kind: DType) -> list[Stmt]:
    """Apply a reflector, from the last to the first, to the eigenvectors of the tridiagonal matrix."""
    own, rest, row = Ref("own", I64), Ref("rest", I64), Ref("row", I64)
    dot = Reduce("sum", "j", rest, t.get(a, own, own + 1 + j) * t.get(z, row, own + 1 + j))
    update = fma(Ref("part", kind), t.get(a, own, own + 1 + j), t.get(z, row, own + 1 + j))
    return [
        Let("own", n - 2 - k), Let("rest", n - 1 - own), Let("tau", t.get(taus, own)),
        each(
            "i", rest,
            Let("row", own + 1 + i), Let("part", -(Ref("tau", kind) * dot)),
            vector_loop("j", rest, t.put(z, update, row, own + 1 + j)),
        ),
    ]  # fmt: skip


def _ql_step(t: Panel, d: int, e: int, z: int, n: Arg, kind: DType) -> list[Stmt]:
    """One implicit QL step on the block from row l to the next negligible off-diagonal element; none if it is there.

    Golub and Van Loan, Matrix Computations, section 8.3, from the other end.
    """
    at, epsilon = Index("l"), _epsilon(kind)
    span, steps, end = Ref("span", I64), Ref("steps", I64), Ref("end", I64)
    row, f, b, r = Ref("row", I64), Ref("f", kind), Ref("b", kind), Ref("r", kind)
    sine, cosine, shift, g = (Ref(name, kind) for name in ("sine", "cosine", "shift", "g"))
    new_sine, new_cosine, gap, root = (Ref(name, kind) for name in ("new_sine", "new_cosine", "gap", "root"))
    limit = (abs(t.get(d, at + i)) + abs(t.get(d, at + i + 1))) * epsilon + epsilon * epsilon
    negligible = (abs(t.get(e, at + i)) <= limit).select(i, n)
    ratio, length = Ref("ratio", kind), Ref("length", kind)
    wilkinson = t.get(d, end) - t.get(d, at) + t.get(e, at) / (ratio + (ratio >= 0.0).select(length, -length))
    upper, lower = Ref("upper", kind), Ref("lower", kind)
    return [
        Let("span", n - 1 - at),
        Let("steps", Reduce("min", "i", span, negligible).min(span)),
        Let("end", at + steps), Let("next", (at + 1).min(n - 1)),
        Let("ratio", (t.get(d, Ref("next", I64)) - t.get(d, at)) / (t.get(e, at) * 2.0)),
        Let("length", fma(ratio, ratio, Const(1.0, kind)).sqrt()),
        Var("sine", Const(1.0, kind)), Var("cosine", Const(1.0, kind)), Var("shift", Const(0.0, kind)),
        Var("g", wilkinson),
        each(
            "q", steps,
            Let("row", end - 1 - Index("q")),
            Let("f", sine * t.get(e, row)), Let("b", cosine * t.get(e, row)),
            Let("r", fma(f, f, g * g).sqrt()),
            t.put(e, r, row + 1),
            Let("new_sine", r.eq(0.0).select(Const(0.0, kind), f / r)),
            Let("new_cosine", r.eq(0.0).select(Const(1.0, kind), g / r)),
            Let("gap", t.get(d, row + 1) - shift),
            Let("root", fma(t.get(d, row) - gap, new_sine, new_cosine * b * 2.0)),
            Assign("sine", new_sine), Assign("cosine", new_cosine), Assign("shift", new_sine * root),
            t.put(d, gap + shift, row + 1),
            Assign("g", fma(new_cosine, root, -b)),
            vector_loop(
                "c", n,
                Let("upper", t.get(z, row + 1, c)), Let("lower", t.get(z, row, c)),
                t.put(z, fma(new_sine, lower, new_cosine * upper), row + 1, c),
                t.put(z, fma(new_cosine, lower, -(new_sine * upper)), row, c),
            ),
        ),
        Let("some", steps.min(1)),
        each(
            "once", Ref("some", I64),
            t.put(d, t.get(d, at) - shift, at), t.put(e, g, at), t.put(e, Const(0.0, kind), end),
        ),
    ]  # fmt: skip


# -- singular values --------------------------------------------------------------------------------------------------
def orthogonalise(s: Scheduler, rows: View, companions: View, results: Sequence[View]) -> None:
    """Rotate pairs of rows until all are orthogonal, and their companions alike; sorted by descending norm.

    Changes `rows` and `companions`.
    """
    *lead, size, width = rows.shape
    kind = rows.dtype
    t = Panel(s, "jacobi", lead)
    w, v = t.write(rows), t.write(companions)
    out_w, out_v, out_norms = (t.write(view) for view in results)
    norms = t.write(s.temporary(TensorType((*lead, size), kind)))
    n, m, length = t.size("n", size), t.size("m", width), t.size("length", companions.shape[-1])
    first, second = Index("p"), Ref("second", I64)
    alpha, beta, gamma, zeta, slope = (Ref(name, kind) for name in ("alpha", "beta", "gamma", "zeta", "slope"))
    cosine, sine, one, other = (Ref(name, kind) for name in ("cosine", "sine", "one", "other"))
    active, turns = Ref("active", I64), Ref("turns", I64)

    def dot(a: Expr, b: Expr) -> Reduce:
        return Reduce("sum", "i", m, t.get(w, a, i) * t.get(w, b, i))

    def rotated(param: int, extent: str) -> Stmt:
        return vector_loop(
            "i", Ref(extent, I64),
            Let("one", t.get(param, first, i)), Let("other", t.get(param, second, i)),
            t.put(param, fma(cosine, one, -(sine * other)), first, i),
            t.put(param, fma(sine, one, cosine * other), second, i),
        )  # fmt: skip

    limit = alpha.sqrt() * beta.sqrt() * (_epsilon(kind) * 8)
    pair = [
        Let("second", first + 1 + j),
        Let("alpha", dot(first, first)), Let("beta", dot(second, second)), Let("gamma", dot(first, second)),
        Let("turns", (abs(gamma) > limit).cast(I64)),
        Let("zeta", (beta - alpha) / (gamma * 2.0)),
        Let("size", abs(zeta) + fma(zeta, zeta, Const(1.0, kind)).sqrt()),
        Let("slope", (zeta >= 0.0).select(Const(1.0, kind), -1.0) / Ref("size", kind)),
        Let("cosine", 1.0 / fma(slope, slope, Const(1.0, kind)).sqrt()), Let("sine", cosine * slope),
        Let("span_w", turns * m), Let("span_v", turns * length),
        rotated(w, "span_w"), rotated(v, "span_v"),
        Assign("active", active + turns),
    ]  # fmt: skip
    rank = Ref("rank", I64)
    t.run(
        Var("active", Const(1, I64)),
        each(
            "sweep", SWEEPS,
            Let("pairs", active.min(1) * (n - 1)),
            Assign("active", Const(0, I64)),
            each("p", Ref("pairs", I64), Let("later", n - 1 - first), each("j", Ref("later", I64), *pair)),
        ),
        each("i", n, t.put(norms, Reduce("sum", "j", m, t.get(w, i, j) * t.get(w, i, j)).sqrt(), i)),
        each(
            "i", n,
            _rank(t, norms, n, -1),
            t.put(out_norms, t.get(norms, i), rank),
            vector_loop("c", m, t.put(out_w, t.get(w, i, c), rank, c)),
            vector_loop("c", length, t.put(out_v, t.get(v, i, c), rank, c)),
        ),
        flops=product(rows.shape) * size * 30,
    )  # fmt: skip
