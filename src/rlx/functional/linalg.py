"""Linear algebra, under the names of `numpy.linalg`. The last two axes are matrices, the others a batch.

Nothing is raised at run time: a singular matrix gives infinities or NaN, as does one that is not positive definite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlx.errors import GraphError, ShapeError
from rlx.functional.custom import custom_jvp
from rlx.functional.elementwise import abs, equal, log, power, sign, sqrt, where
from rlx.functional.operands import Axis, as_value, asarray, astype, float_operands, floats, traced
from rlx.functional.products import cross, matmul, matrix_power, multi_dot, outer, tensordot, vecdot
from rlx.functional.reductions import count_nonzero, max, min, prod, sum
from rlx.functional.shapes import (
    axes_of,
    broadcast_to,
    concatenate,
    diagonal,
    expand_dims,
    matrix_transpose,
    moveaxis,
    ravel,
    reshape,
    squeeze,
    trace,
)
from rlx.functional.tracers import type_of
from rlx.functional.tracing import apply, eager
from rlx.transforms import build
from rlx.types import Size, broadcast, product


class QRResult(NamedTuple):
    """Q and R."""

    Q: Any
    R: Any


class EighResult(NamedTuple):
    """Eigenvalues, and eigenvectors as columns."""

    eigenvalues: Any
    eigenvectors: Any


class SVDResult(NamedTuple):
    """U, the singular values, and the transpose of V."""

    U: Any
    S: Any
    Vh: Any


class SlogdetResult(NamedTuple):
    """The sign of a determinant, and the logarithm of its magnitude."""

    sign: Any
    logabsdet: Any


def _matrices(where_: str, x: Any) -> Any:
    x = floats(asarray(x))
    if type_of(x).rank < 2:
        raise ShapeError(f"linalg.{where_}: takes matrices, found {type_of(x)}")
    return x if type_of(x).dtype.size >= 4 else astype(x, "f32")


def _square(where_: str, x: Any) -> Any:
    x = _matrices(where_, x)
    rows, columns = type_of(x).shape[-2:]
    if rows != columns:
        raise ShapeError(f"linalg.{where_}: takes square matrices, found {type_of(x)}")
    return x


def _symmetric(x: Any) -> Any:
    """Average a matrix and its transpose, so that gradients are symmetric."""
    return (x + matrix_transpose(x)) * 0.5


def _eye(size: Size, like: Any) -> Any:
    if not isinstance(size, int):
        raise ShapeError(f"linalg: the matrices of {type_of(like)} need a static size")
    return np.eye(size, dtype=type_of(like).dtype.numpy)


# -- systems ----------------------------------------------------------------------------------------------------------
@eager
def cholesky(a: Any, upper: bool = False) -> Any:
    """Lower triangular L with a = L Lᵀ, of positive definite matrices; with `upper`, its transpose."""
    factor = apply("cholesky", _symmetric(_square("cholesky", a)))
    return matrix_transpose(factor) if upper else factor


@eager
def solve(a: Any, b: Any) -> Any:
    """x with a x = b. A vector b is one right-hand side; more axes are a batch of matrices."""
    return _solution("solve", a, b, _factor_and_solve)


@eager
def solve_triangular(a: Any, b: Any, trans: Any = 0, lower: bool = False, unit_diagonal: bool = False) -> Any:
    """x with A x = b, where A is the upper or `lower` triangle of a, as `scipy.linalg` has it.

    `trans` 1 or "T" solves with the transpose of A; with `unit_diagonal`, its diagonal counts as ones.
    """
    if trans not in (0, 1, 2, "N", "T", "C"):
        raise GraphError(f"linalg.solve_triangular: trans is {trans!r}, expected 0 or 1", hint="1 is the transpose")
    settings = {"lower": bool(lower), "transpose": trans not in (0, "N"), "unit_diagonal": bool(unit_diagonal)}

    def solve_batch(a: Any, b: Any, batch: tuple[Size, ...]) -> Any:
        a = broadcast_to(a, (*batch, *type_of(a).shape[-2:]))
        return apply("triangular_solve", a, b, **settings)

    return _solution("solve_triangular", a, b, solve_batch)


def _solution(where_: str, a: Any, b: Any, solve_batch: Callable[[Any, Any, tuple[Size, ...]], Any]) -> Any:
    """Check a system, broadcast b to the batch of both, and solve it; a vector b gives a vector."""
    a, b = float_operands(_square(where_, a), b)
    vector, right_type = type_of(b).rank == 1, type_of(b)
    b = expand_dims(b, 1) if vector else b
    if type_of(a).shape[-1] != type_of(b).shape[-2]:
        raise ShapeError(
            f"linalg.{where_}: sizes differ, {type_of(a)} and {right_type}", hint="one row of b for each row of a"
        )
    batch = broadcast(type_of(a).shape[:-2], type_of(b).shape[:-2], where=f"linalg.{where_}")
    x = solve_batch(a, broadcast_to(b, (*batch, *type_of(b).shape[-2:])), batch)
    return squeeze(x, -1) if vector else x


def _factor_and_solve(a: Any, b: Any, batch: tuple[Size, ...]) -> Any:
    lu, _, order = apply("lu", a)
    lu, order = (broadcast_to(x, (*batch, *type_of(x).shape[n:])) for x, n in ((lu, -2), (order, -1)))
    return _solve_factored(lu, order, b)


def _solve_factored(lu: Any, order: Any, b: Any) -> Any:
    """x from the LU factors of a matrix and the order of its rows."""
    *batch, size, columns = type_of(b).shape
    if not batch:
        rows = apply("gather", b, order, axis=0)
    else:
        count = product(batch)
        flat = build.flat_row_indices(as_value(order).reshape(count, size), size)
        rows = apply("gather", reshape(b, count * size, columns), traced(flat), axis=0)
        rows = reshape(rows, (*batch, size, columns))
    half = apply("triangular_solve", lu, rows, lower=True, unit_diagonal=True)
    return apply("triangular_solve", lu, half, lower=False)


@eager
def inv(a: Any) -> Any:
    """Inverse."""
    a = _square("inv", a)
    return solve(a, broadcast_to(_eye(type_of(a).shape[-1], a), type_of(a).shape))


@eager
def slogdet(a: Any) -> SlogdetResult:
    """Sign of the determinant, and the logarithm of its magnitude."""
    lu, pivots, _ = apply("lu", _square("slogdet", a))
    entries = diagonal(lu, axis1=-2, axis2=-1)
    sign_ = _swap_sign(pivots, entries) * prod(sign(entries), -1)
    return SlogdetResult(sign_, sum(log(abs(entries)), -1))


@custom_jvp
def _det(a: Any) -> Any:
    lu, pivots, _ = apply("lu", a)
    entries = diagonal(lu, axis1=-2, axis2=-1)
    return _swap_sign(pivots, entries) * prod(entries, -1)


@_det.defjvp
def _(primals: Any, tangents: Any) -> Any:
    """The derivative is the sum of products with cofactors, which exist where the matrix is singular, too."""
    (a,), (change,) = primals, tangents
    u, values, vt = svd(a, full_matrices=False)
    sign_ = _det(u) * _det(vt)
    return _det(a), sum(_cofactors(u, values, vt, sign_) * change, (-2, -1))


def _cofactors(u: Any, values: Any, vt: Any, sign_: Any) -> Any:
    """sign · U diag(products of the other singular values) Vᵀ."""
    size = type_of(values).shape[-1]
    others = where(_eye(size, values) > 0, 1.0, expand_dims(values, -2))  # [..., i, j]: 1 where i is j
    products = prod(others, -1) * expand_dims(sign_, -1)
    return matmul(u * expand_dims(products, -2), vt)


@eager
def det(a: Any) -> Any:
    """Determinant."""
    return _det(_square("det", a))


def _swap_sign(pivots: Any, like: Any) -> Any:
    """1 or -1, for an even or odd number of row exchanges."""
    size = type_of(pivots).shape[-1]
    if not isinstance(size, int):
        raise ShapeError(f"linalg: the matrices of {type_of(like)} need a static size")
    swaps = count_nonzero(pivots - np.arange(size, dtype=np.int32), -1)
    return astype(1 - 2 * apply("mod", swaps, 2), type_of(like).dtype)


# -- orthogonal factorisations ----------------------------------------------------------------------------------------
@eager
def qr(a: Any, mode: str = "reduced") -> Any:
    """Q with orthonormal columns and upper triangular R, with a = Q R; mode is 'reduced', 'complete' or 'r'."""
    if mode not in ("reduced", "complete", "r"):
        raise GraphError(f"linalg.qr: mode is {mode!r}, expected 'reduced', 'complete' or 'r'")
    q, r = apply("qr", _matrices("qr", a), complete=mode == "complete")
    return r if mode == "r" else QRResult(q, r)


@eager
def eigh(a: Any, UPLO: str = "L") -> EighResult:
    """Eigenvalues, in ascending order, and eigenvectors (columns) of symmetric matrices."""
    return EighResult(*apply("eigh", _symmetric(_square("eigh", a))))


@eager
def eigvalsh(a: Any, UPLO: str = "L") -> Any:
    """Eigenvalues of symmetric matrices, in ascending order."""
    return eigh(a).eigenvalues


@eager
def svd(a: Any, full_matrices: bool = True, compute_uv: bool = True) -> Any:
    """U, the singular values in descending order, and Vᵀ, with a = U diag(values) Vᵀ."""
    a = _matrices("svd", a)
    rows, columns = type_of(a).shape[-2:]
    if not isinstance(rows, int) or not isinstance(columns, int):
        raise ShapeError(f"linalg.svd: the matrices of {type_of(a)} need static sizes")
    wide = rows < columns
    u, values, v = apply("svd", matrix_transpose(a) if wide else a)
    if not compute_uv:
        return values
    if full_matrices and rows != columns:
        rest, _ = apply("qr", u, complete=True)
        rest = rest[..., rows if wide else columns :]
        u = concatenate([u, rest], -1)
    return SVDResult(v, values, matrix_transpose(u)) if wide else SVDResult(u, values, matrix_transpose(v))


@eager
def svdvals(a: Any) -> Any:
    """Singular values, in descending order."""
    return svd(a, compute_uv=False)


def _cutoff(values: Any, shape: Sequence[Size], rcond: Any) -> Any:
    """The singular value below which others count as zero."""
    return max(values, -1, keepdims=True) * (_tolerance(values, shape) if rcond is None else rcond)


def _tolerance(like: Any, shape: Sequence[Size]) -> float:
    rows, columns = shape[-2:]
    if not isinstance(rows, int) or not isinstance(columns, int):
        raise ShapeError(f"linalg: the matrices of {type_of(like)} need static sizes")
    return float(np.maximum(rows, columns) * np.finfo(type_of(like).dtype.numpy).eps)


@eager
def matrix_rank(a: Any, tol: Any = None, rtol: Any = None) -> Any:
    """Number of singular values above `tol`, or above `rtol` times the largest one."""
    a = _matrices("matrix_rank", a)
    values = svd(a, compute_uv=False)
    limit = _cutoff(values, type_of(a).shape, rtol) if tol is None else tol
    return count_nonzero(values > limit, -1)


@eager
def pinv(a: Any, rcond: Any = None, *, rtol: Any = None) -> Any:
    """Pseudo-inverse; singular values up to `rcond` times the largest one count as zero."""
    a = _matrices("pinv", a)
    rcond = rtol if rcond is None else rcond
    rcond = _tolerance(a, type_of(a).shape) if rcond is None else rcond
    return _pinv(a, astype(rcond, type_of(a).dtype))


@custom_jvp
def _pinv(a: Any, rcond: Any) -> Any:
    u, values, vt = svd(a, full_matrices=False)
    large = values > max(values, -1, keepdims=True) * rcond
    inverse = where(large, 1.0 / where(large, values, 1.0), 0.0)
    return matmul(matrix_transpose(vt) * expand_dims(inverse, -2), matrix_transpose(u))


@_pinv.defjvp
def _(primals: Any, tangents: Any) -> Any:
    """Golub and Pereyra (1973): exact while the rank does not change."""
    (a, rcond), (change, _) = primals, tangents
    p = _pinv(a, rcond)
    pt, ct = matrix_transpose(p), matrix_transpose(change)
    outside = ct - matmul(matmul(ct, a), p)
    inside = ct - matmul(p, matmul(a, ct))
    moved = matmul(matmul(p, pt), outside) + matmul(inside, matmul(pt, p)) - matmul(p, matmul(change, p))
    return p, moved


@eager
def lstsq(a: Any, b: Any, rcond: Any = None) -> tuple[Any, Any, Any, Any]:
    """The smallest x that minimises |a x - b|; and the sums of squared residuals, the rank, the singular values.

    The residuals are zero where a is not of full column rank, or has no more rows than columns: NumPy returns none.
    """
    a, b = float_operands(_matrices("lstsq", a), b)
    vector = type_of(b).rank == 1
    columns = expand_dims(b, 1) if vector else b
    x = matmul(pinv(a, rcond), columns)
    rest = columns - matmul(a, x)
    residuals = sum(rest * rest, -2)
    values = svd(a, compute_uv=False)
    rank = count_nonzero(values > _cutoff(values, type_of(a).shape, rcond), -1)
    return squeeze(x, -1) if vector else x, residuals, rank, values


# -- norms ------------------------------------------------------------------------------------------------------------
def _length(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """√(sum of squares), whose derivative at zero is zero."""
    total = sum(x * x, axes, keepdims=keepdims)
    empty = equal(total, 0)
    return where(empty, 0.0, sqrt(where(empty, 1.0, total)))


@eager
def norm(x: Any, ord: Any = None, axis: Axis = None, keepdims: bool = False) -> Any:
    """Norm of vectors (one axis) or matrices (two axes); without an axis, of the whole array.

    `ord` is None (root of the sum of squares), a number, ±inf, 'fro' or 'nuc'.
    """
    x = floats(asarray(x))
    rank = type_of(x).rank
    if axis is None and ord is None:
        result = _length(ravel(x), (0,), False)
        return reshape(result, (1,) * rank) if keepdims else result
    axes = axes_of(axis, rank, "norm")
    if len(axes) == 1:
        return _vector_norm(x, ord, axes, keepdims)
    if len(axes) == 2:
        return _matrix_norm(x, ord, axes, keepdims)
    raise ShapeError(f"linalg.norm: takes one axis or two, found {len(axes)} of {type_of(x)}")


def _vector_norm(x: Any, ord: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    match ord:
        case None | 2:
            return _length(x, axes, keepdims)
        case math.inf:
            return max(abs(x), axes, keepdims)
        case _ if ord == -math.inf:
            return min(abs(x), axes, keepdims)
        case 0:
            return astype(count_nonzero(x, axes, keepdims), type_of(x).dtype)
        case 1:
            return sum(abs(x), axes, keepdims=keepdims)
        case int() | float():
            return power(sum(power(abs(x), float(ord)), axes, keepdims=keepdims), 1.0 / ord)
    raise GraphError(f"linalg.norm: ord is {ord!r}, which vectors do not have")


def _matrix_norm(x: Any, ord: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    if ord in (None, "fro", "f"):
        return _length(x, axes, keepdims)
    rows, columns = axes
    if ord in (1, -1, math.inf, -math.inf):
        inner, outer_ = (rows, columns) if ord in (1, -1) else (columns, rows)
        totals = sum(abs(x), (inner,), keepdims=True)
        result = (max if ord > 0 else min)(totals, (outer_,), True)
        return result if keepdims else squeeze(result, axes)
    if ord not in (2, -2, "nuc"):
        raise GraphError(f"linalg.norm: ord is {ord!r}, which matrices do not have")
    values = svd(moveaxis(x, axes, (-2, -1)), compute_uv=False)
    pick: Callable[..., Any] = sum if ord == "nuc" else max if ord == 2 else min
    result = pick(values, -1)
    shape = [1 if a in axes else d for a, d in enumerate(type_of(x).shape)]
    return reshape(result, shape) if keepdims else result


def vector_norm(x: Any, *, axis: Axis = None, keepdims: bool = False, ord: Any = 2) -> Any:
    """Norm of vectors; without an axis, of the flattened array."""
    if axis is None:
        result = norm(ravel(asarray(x)), ord, 0)
        return reshape(result, (1,) * type_of(x).rank) if keepdims else result
    return norm(x, ord, axis, keepdims)


def matrix_norm(x: Any, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    """Norm of the matrices of the last two axes."""
    return norm(x, ord, (-2, -1), keepdims)


@eager
def cond(a: Any, p: Any = None) -> Any:
    """Condition number: the product of the norms of a matrix and its inverse."""
    a = _matrices("cond", a)
    if p in (None, 2, -2):
        values = svd(a, compute_uv=False)
        largest, smallest = max(values, -1), min(values, -1)
        return smallest / largest if p == -2 else largest / smallest
    return norm(a, p, (-2, -1)) * norm(inv(a), p, (-2, -1))


_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    cholesky, cond, cross, det, diagonal, eigh, eigvalsh, inv, lstsq, matmul, matrix_norm, matrix_power, matrix_rank,
    matrix_transpose, multi_dot, norm, outer, pinv, qr, slogdet, solve, svd, svdvals, tensordot, trace, vecdot,
    vector_norm,
)  # fmt: skip
FUNCTIONS = {function.__name__: function for function in _FUNCTIONS}
