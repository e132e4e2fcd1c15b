"""Vector search: the best rows of a matrix for each query, without a matrix of all scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import F32, I8, I32
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.ir.independence import never
from rlx.ir.registry import Spec, f32, i32, op, sample
from rlx.types import TensorType, require_equal

METRICS = ("dot", "l2")
NO_ROW = -1  # the index of a place for which there is no row
QUERY_STEPS = 64  # of a query against rows of i8: two neighbouring products of -64..64 and 0..255 fit into 16 bits
MAX_K = 16384
MAX_INT8 = 65536  # elements of an i8 row whose dot product fits into i32


def quantise_query(query: Array) -> tuple[Array, np.float32]:
    """A query as integers from -64 to 64, and what one of them is worth; NaN if a number is not finite."""
    peak = np.abs(query).max(initial=np.float32(0))
    if not peak < np.inf:
        return np.zeros(query.shape, np.int32), np.float32(np.nan)
    inverse = np.float32(QUERY_STEPS) / peak if peak > 0 else np.float32(0)
    return np.rint(query * inverse).astype(np.int32), peak / np.float32(QUERY_STEPS)


def _score(query: Array, rows: Array, metric: str) -> Array:
    """Scores of rows before scales and offsets."""
    if rows.dtype == np.int8:
        integers, unit = quantise_query(query)
        return (rows.astype(np.int32) @ integers).astype(np.float32) * unit
    rows = rows.astype(np.float32)
    result: Array = rows @ query if metric == "dot" else -np.square(rows - query).sum(-1)
    return result


def _nearest_rows(queries: Any, rows: Any, scales: Any, offsets: Any, among: Any, *, k: int, metric: str) -> Any:
    scores = np.full((*queries.shape[:-1], k), -np.inf, np.float32)
    indices = np.full(scores.shape, NO_ROW, np.int32)
    for place in np.ndindex(queries.shape[:-1]):
        matrix = place[:-1]
        candidates = np.arange(rows.shape[-2]) if among is None else np.sort(among[place].astype(np.int64))
        candidates = candidates[(candidates >= 0) & (candidates < rows.shape[-2])]
        with np.errstate(over="ignore", invalid="ignore"):
            score = _score(queries[place].astype(np.float32), rows[matrix][candidates], metric)
            if scales is not None:
                score = score * scales[matrix][candidates].astype(np.float32)
            if offsets is not None:
                score = score + offsets[matrix][candidates].astype(np.float32)
        valid = score > -np.inf  # NaN is not
        score, candidates = score[valid], candidates[valid]
        best = np.argsort(-score, kind="stable")[:k]
        scores[place][: len(best)], indices[place][: len(best)] = score[best], candidates[best]
    return scores, indices


def _bytes(*shape: int) -> Spec:
    return Spec(shape, "i8", -127, 128)


@op(
    "nearest_rows", independent=never, reference=_nearest_rows, tolerance=2e-6,
    samples=[
        sample(f32(3, 20), f32(50, 20), k=5),
        sample(f32(2, 33), f32(7, 33), f32(7), f32(7), k=9),
        sample(f32(2, 5, 8), f32(2, 31, 8), None, f32(2, 31), k=4, metric="l2"),
        sample(f32(6, 64), _bytes(40, 64), f32(40, low=0.5, high=2), k=3),
        sample(f32(2, 19), _bytes(40, 19), f32(40, low=0.5, high=2), f32(40), k=3),
        sample(f32(3, 20), f32(50, 20), None, None, i32(3, 9, low=-1, high=50, distinct=True), k=5, metric="l2"),
    ],
)  # fmt: skip
def nearest_rows(
    queries: TensorType,
    rows: TensorType,
    scales: TensorType | None = None,
    offsets: TensorType | None = None,
    among: TensorType | None = None,
    *,
    k: int,
    metric: str = "dot",
) -> tuple[TensorType, TensorType]:
    """The `k` rows of a matrix with the highest scores for each query: scores (f32), highest first, and indices (i32).

    `queries` is [..., q, d], `rows` [..., n, d]. The score of a row is its dot product with the query, or minus their
    squared distance (`metric="l2"`), times the row's scale, plus its offset; both are [..., n]. Sums are f32. Of equal
    scores the lower row comes first. Rows with a score of -inf or NaN are left out; places without a row have the score
    -inf and the index -1. With `among`, [..., q, m], only these rows are scored; those that do not exist are left out.
    Rows of i8 take the dot product with the query rounded to integers from -64 to 64, which is exact in integers.
    """
    if queries.rank < 2 or rows.rank != queries.rank:
        raise ShapeError(f"nearest_rows: queries [..., q, d] and rows [..., n, d], found {queries} and {rows}")
    for name, operand in (("queries", queries), ("scales", scales), ("offsets", offsets)):
        if operand is not None and not operand.dtype.is_float:
            raise DTypeError(f"nearest_rows: {name} are floats, found {operand}")
    if not rows.dtype.is_float and rows.dtype is not I8:
        raise DTypeError(f"nearest_rows: rows are floats or i8, found {rows}")
    if metric not in METRICS:
        raise GraphError(f"nearest_rows: metric {metric!r}, expected one of {', '.join(METRICS)}")
    if rows.dtype is I8:
        if metric != "dot":
            raise GraphError(
                f"nearest_rows: metric {metric!r} of rows of i8",
                hint="pass minus half of each row's squared norm as offsets of dot",
            )
        if isinstance(rows.shape[-1], int) and rows.shape[-1] > MAX_INT8:
            raise ShapeError(f"nearest_rows: i8 rows of {rows.shape[-1]} elements, at most {MAX_INT8}")
    if not 1 <= k <= MAX_K:
        raise ShapeError(f"nearest_rows: k is {k}, expected 1 to {MAX_K}")
    for have, want in zip((*queries.shape[:-2], queries.shape[-1]), (*rows.shape[:-2], rows.shape[-1]), strict=True):
        require_equal(have, want, f"nearest_rows: queries {queries} do not fit rows {rows}")
    _check("scales", scales, rows.shape[:-1])
    _check("offsets", offsets, rows.shape[:-1])
    if among is not None:
        if not among.dtype.is_integer:
            raise DTypeError(f"nearest_rows: among is integers, found {among}")
        _check("among", among, (*queries.shape[:-1], among.shape[-1] if among.rank else 0))
    scores = TensorType((*queries.shape[:-1], k), F32)
    return scores, scores.with_dtype(I32)


def _check(name: str, operand: TensorType | None, shape: tuple[Any, ...]) -> None:
    if operand is None:
        return
    message = f"nearest_rows: {name} {operand} should have shape [{', '.join(map(str, shape))}]"
    if operand.rank != len(shape):
        raise ShapeError(message)
    for have, want in zip(operand.shape, shape, strict=True):
        require_equal(have, want, message)
