"""Factorisations and solutions of matrices: the last two axes are matrices, the others a batch.

Narrow floats are computed in f32. Where a factorisation does not exist, such as the Cholesky factor of an indefinite
matrix, the results are NaN or infinite: nothing is raised at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.dtypes import I32
from rlx.dtypes import dtype as dtype_of
from rlx.errors import DTypeError, ShapeError
from rlx.ir.graph import Value
from rlx.ir.independence import batched_matrices, never
from rlx.ir.registry import COMPOSED, FUSED, Spec, f32, op, sample
from rlx.types import Size, TensorType, require_equal

JACOBI_SIZE = 32  # up to this many columns, singular values are found without eigenvalues as a first guess


def positive_definite(*shape: int) -> Spec:
    """Random positive definite matrices."""
    return Spec(shape, "f32", definite=True)


def _matrices(where: str, x: TensorType) -> tuple[Size, Size]:
    if not x.dtype.is_float or x.dtype.is_packed:
        raise DTypeError(f"{where}: takes floats, found {x.dtype}", hint="cast with x.astype('f32')")
    if x.rank < 2:
        raise ShapeError(f"{where}: takes matrices, found {x}")
    return x.shape[-2], x.shape[-1]


def _square(where: str, x: TensorType) -> Size:
    rows, columns = _matrices(where, x)
    require_equal(rows, columns, f"{where}: takes square matrices, found {rows} rows and {columns} columns")
    return columns


def _in_wide_type(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reference: narrow floats are computed in f32, and results cast back."""

    def computed(*operands: Any, **attrs: Any) -> Any:
        kind = operands[0].dtype
        results = reference(*(x.astype(dtype_of(kind).wide.numpy) for x in operands), **attrs)
        arrays = results if isinstance(results, tuple) else (results,)
        cast = tuple(x if x.dtype.kind == "i" else x.astype(kind) for x in arrays)
        return cast if isinstance(results, tuple) else cast[0]

    return computed


# -- cholesky ---------------------------------------------------------------------------------------------------------
def _cholesky(x: Any) -> Any:
    lower = np.zeros_like(x)
    with np.errstate(all="ignore"):
        for j in range(x.shape[-1]):
            row = lower[..., j, :j]
            column = x[..., j:, j] - (lower[..., j:, :j] @ row[..., None])[..., 0]
            lower[..., j:, j] = column / np.sqrt(column[..., :1])
    return lower


@op(
    "cholesky", reference=_in_wide_type(_cholesky), independent=batched_matrices, tolerance=2e-5,
    samples=[
        sample(positive_definite(5, 5)), sample(positive_definite(2, 3, 17, 17)), sample(positive_definite(150, 150)),
        sample(positive_definite(2, 70, 70)),
    ],
)  # fmt: skip
def cholesky(x: TensorType) -> TensorType:
    """Lower triangular L with x = L Lᵀ, from the lower triangle of x; NaN where x is not positive definite."""
    _square("cholesky", x)
    return x


# -- triangular systems -----------------------------------------------------------------------------------------------
def triangle(a: Any, lower: bool, unit_diagonal: bool) -> Any:
    """The triangle of a NumPy matrix that a triangular solve reads."""
    part = np.tril(a) if lower else np.triu(a)
    if unit_diagonal:
        at = np.arange(a.shape[-1])
        part[..., at, at] = 1
    return part


def _triangular_solve(a: Any, b: Any, *, lower: bool, transpose: bool, unit_diagonal: bool) -> Any:
    part = triangle(a, lower, unit_diagonal)
    part, lower = (np.swapaxes(part, -1, -2), not lower) if transpose else (part, lower)
    x = np.zeros_like(b)
    size = a.shape[-1]
    with np.errstate(all="ignore"):
        for i in range(size) if lower else reversed(range(size)):
            rest = b[..., i, :] - (part[..., i, None, :] @ x)[..., 0, :]
            x[..., i, :] = rest / part[..., i, i, None]
    return x


@op(
    "triangular_solve", reference=_in_wide_type(_triangular_solve), independent=batched_matrices, tolerance=2e-5,
    samples=[
        sample(positive_definite(5, 5), f32(5, 3)), sample(positive_definite(2, 9, 9), f32(2, 9, 1), lower=False),
        sample(positive_definite(80, 80), f32(80, 70), transpose=True),
        sample(positive_definite(3, 7, 7), f32(3, 7, 20), lower=False, unit_diagonal=True),
        sample(positive_definite(2, 12, 12), f32(2, 12, 5), lower=False),
    ],
)  # fmt: skip
def triangular_solve(
    a: TensorType, b: TensorType, *, lower: bool = True, transpose: bool = False, unit_diagonal: bool = False
) -> TensorType:
    """x with A x = b, where A is a triangle of `a`, transposed if `transpose`; its diagonal may count as ones."""
    size = _square("triangular_solve", a)
    _matrices("triangular_solve", b)
    if a.dtype is not b.dtype:
        raise DTypeError(f"triangular_solve: operands have one type, found {a.dtype} and {b.dtype}")
    require_equal(size, b.shape[-2], f"triangular_solve: sizes differ, {size} and {b.shape[-2]}")
    if a.shape[:-2] != b.shape[:-2]:
        raise ShapeError(f"triangular_solve: batches differ, {a} and {b}")
    return b


# -- lu ---------------------------------------------------------------------------------------------------------------
def _lu(x: Any) -> Any:
    lu, size = x.copy(), x.shape[-1]
    pivots = np.zeros(x.shape[:-1], np.int32)
    order = np.broadcast_to(np.arange(size, dtype=np.int32), x.shape[:-1]).copy()
    with np.errstate(all="ignore"):
        for at in np.ndindex(*x.shape[:-2]):
            a = lu[at]
            for j in range(size):
                largest = j + int(np.argmax(np.abs(a[j:, j])))
                pivots[(*at, j)] = largest
                a[[j, largest]], order[at][[j, largest]] = a[[largest, j]], order[at][[largest, j]]
                a[j + 1 :, j] *= 0 if a[j, j] == 0 else 1 / a[j, j]
                a[j + 1 :, j + 1 :] -= np.outer(a[j + 1 :, j], a[j, j + 1 :])
    return lu, pivots, order


@op(
    "lu", reference=_in_wide_type(_lu), independent=batched_matrices, tolerance=1e-4,
    samples=[sample(f32(6, 6)), sample(f32(2, 3, 17, 17)), sample(f32(90, 90)), sample(f32(1, 1))],
)  # fmt: skip
def lu(x: TensorType) -> tuple[TensorType, TensorType, TensorType]:
    """L and U in one matrix, with x[order] = L U: L has a unit diagonal, which is left out.

    The second result says which row each row was swapped with, in turn; the third is `order`, the rows of x after all
    swaps. Both are i32.
    """
    _square("lu", x)
    rows = TensorType(x.shape[:-1], I32)
    return x, rows, rows


# -- qr ---------------------------------------------------------------------------------------------------------------
def _qr(x: Any, *, complete: bool) -> Any:
    return tuple(np.linalg.qr(x, "complete" if complete else "reduced"))


@op(
    "qr", reference=_in_wide_type(_qr), independent=batched_matrices, tolerance=2e-4,
    samples=[
        sample(f32(5, 5)), sample(f32(2, 7, 4)), sample(f32(3, 4, 6)), sample(f32(70, 50)), sample(f32(2, 90, 90)),
        sample(f32(6, 2), complete=True),
    ],
)  # fmt: skip
def qr(x: TensorType, *, complete: bool = False) -> tuple[TensorType, TensorType]:
    """Q with orthonormal columns and upper triangular R, with x = Q R, by Householder reflections.

    Q has as many columns as the smaller size of x; with `complete`, as many as x has rows.
    """
    rows, columns = _matrices("qr", x)
    if not isinstance(rows, int) or not isinstance(columns, int):
        raise ShapeError(f"qr: the matrices of {x} need static sizes")
    inner = rows if complete else min(rows, columns)
    return x.with_shape(*x.shape[:-2], rows, inner), x.with_shape(*x.shape[:-2], inner, columns)


# -- eigenvalues and singular values ----------------------------------------------------------------------------------
def _signs(vectors: Any) -> Any:
    """1 or -1 per column, so that the sum of the column times it is not negative."""
    return np.where(vectors.sum(-2, keepdims=True) < 0, -1, 1).astype(vectors.dtype)


def _eigh(x: Any) -> Any:
    values, vectors = np.linalg.eigh(x)
    return values, vectors * _signs(vectors)


@op(
    "eigh", reference=_in_wide_type(_eigh), independent=batched_matrices, tolerance=1e-3,
    samples=[sample(f32(1, 1)), sample(f32(5, 5)), sample(f32(2, 3, 8, 8)), sample(f32(2, 2)), sample(f32(33, 33))],
)  # fmt: skip
def eigh(x: TensorType) -> tuple[TensorType, TensorType]:
    """Eigenvalues, in ascending order, and eigenvectors (columns) of symmetric matrices, from their lower triangle.

    The components of each eigenvector add up to a number that is not negative.
    """
    _square("eigh", x)
    return x.with_shape(*x.shape[:-1]), x


def _orthogonalise(w: Any, v: Any) -> Any:
    u, values, vt = np.linalg.svd(np.swapaxes(w, -1, -2), full_matrices=False)
    return np.swapaxes(u * values[..., None, :], -1, -2), vt @ v, values


@op("orthogonalise", reference=_in_wide_type(_orthogonalise), independent=never, traits=[FUSED])
def orthogonalise(w: TensorType, v: TensorType) -> tuple[TensorType, TensorType, TensorType]:
    """Rotates the rows of `w`, and those of `v` alike, until those of `w` are orthogonal; and their norms.

    The norms are in descending order. One-sided Jacobi rotations.
    """
    _matrices("orthogonalise", w)
    return w, v, w.with_shape(*w.shape[:-1])


def _svd(x: Any) -> Any:
    u, values, vt = np.linalg.svd(x, full_matrices=False)
    signs = _signs(np.swapaxes(vt, -1, -2))
    return u * signs, values, np.swapaxes(vt, -1, -2) * signs


def _decompose_svd(x: Value) -> tuple[Value, ...]:
    """Rotate the columns until they are orthogonal, from the eigenvectors of xᵀ x on; QR makes them orthonormal.

    That keeps the columns of U orthonormal where singular values are zero.
    """
    g, columns, kind = x.graph, x.shape[-1], x.dtype
    x = x.astype(kind.wide)
    assert isinstance(columns, int), "sizes are static"
    if columns == 0:
        raise ShapeError(f"svd: the matrices of {x.type} are empty")
    scale = abs(x).max(axis=(-2, -1), keepdims=True)
    scale = g.one("where", (scale > 0).logical_and(scale < np.inf), scale, 1.0).astype(x.dtype)
    x = x / scale
    basis = g.one("expand", g.constant(np.eye(columns, dtype=x.dtype.numpy)), shape=(*x.shape[:-2], columns, columns))
    if columns > JACOBI_SIZE:
        _, basis = g.build("eigh", [x.mT @ x], {}).results
    w, v, values = g.build("orthogonalise", [(x @ basis).mT, basis.mT], {}).results
    q, r = g.build("qr", [w.mT], {"complete": False}).results
    diagonal = (
        (r * g.constant(np.eye(columns, dtype=x.dtype.numpy))).sum(axis=-1).reshape(*values.shape[:-1], 1, columns)
    )
    negative = diagonal < 0
    u = g.one("where", negative, -q, q)
    flip = v.sum(axis=-1, keepdims=True) < 0  # the sign of each row of v
    u = g.one("where", flip.mT, -u, u)
    v = g.one("where", flip, -v, v)
    values = values * scale.reshape(*values.shape[:-1], 1)
    return u.astype(kind), values.astype(kind), v.mT.astype(kind)


@op(
    "svd", reference=_in_wide_type(_svd), decompose=_decompose_svd, independent=batched_matrices, traits=[COMPOSED],
    tolerance=1e-3,
    samples=[sample(f32(5, 5)), sample(f32(2, 3, 8, 4)), sample(f32(40, 34))],
)  # fmt: skip
def svd(x: TensorType) -> tuple[TensorType, TensorType, TensorType]:
    """U, the singular values in descending order, and V, with x = U diag(values) Vᵀ, of matrices with rows >= columns.

    The components of each column of V add up to a number that is not negative.
    """
    rows, columns = _matrices("svd", x)
    if not isinstance(rows, int) or not isinstance(columns, int):
        raise ShapeError(f"svd: the matrices of {x} need static sizes")
    if rows < columns:
        raise ShapeError(f"svd: takes at least as many rows as columns, found {rows} and {columns}", hint="transpose x")
    batch = x.shape[:-2]
    return x, x.with_shape(*batch, columns), x.with_shape(*batch, columns, columns)
