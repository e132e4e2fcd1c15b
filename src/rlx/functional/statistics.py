"""Statistics, and reductions that leave out NaN, under NumPy's names."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.errors import GraphError, ShapeError
from rlx.functional.creation import full
from rlx.functional.elementwise import clip, floor, isnan, logical_not, minimum, round, sqrt, where
from rlx.functional.indexing import sort, take_along_axis
from rlx.functional.operands import Axis, asarray, astype, floats, is_float, is_traced
from rlx.functional.products import matmul
from rlx.functional.reductions import any, argmax, argmin, cumprod, cumsum, max, mean, min, prod, sum, var
from rlx.functional.shapes import (
    atleast_2d,
    axes_of,
    broadcast_to,
    diagonal,
    expand_dims,
    moveaxis,
    reshape,
    transpose,
    vstack,
)
from rlx.functional.tracers import type_of
from rlx.functional.tracing import eager
from rlx.types import product

METHODS = ("linear", "lower", "higher", "nearest", "midpoint")


# -- order statistics -------------------------------------------------------------------------------------------------
@eager
def quantile(x: Any, q: Any, axis: Axis = None, method: str = "linear", keepdims: bool = False) -> Any:
    """The q-th quantile, with q in [0, 1]; several q give a leading axis. NaN if an element is NaN."""
    return _quantile(x, q, axis, method, keepdims, ignore_nan=False)


@eager
def nanquantile(x: Any, q: Any, axis: Axis = None, method: str = "linear", keepdims: bool = False) -> Any:
    """The q-th quantile of the elements that are not NaN."""
    return _quantile(x, q, axis, method, keepdims, ignore_nan=True)


def percentile(x: Any, q: Any, axis: Axis = None, method: str = "linear", keepdims: bool = False) -> Any:
    """The q-th percentile, with q in [0, 100]."""
    return quantile(x, _hundredth(q), axis, method, keepdims)


def nanpercentile(x: Any, q: Any, axis: Axis = None, method: str = "linear", keepdims: bool = False) -> Any:
    """The q-th percentile of the elements that are not NaN."""
    return nanquantile(x, _hundredth(q), axis, method, keepdims)


def median(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """The middle element of the sorted array, or the mean of the middle two."""
    return quantile(x, 0.5, axis, keepdims=keepdims)


def nanmedian(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """The median of the elements that are not NaN."""
    return nanquantile(x, 0.5, axis, keepdims=keepdims)


def _hundredth(q: Any) -> Any:
    return q / 100 if is_traced(q) else np.asarray(q, np.float64) / 100


def _quantile(x: Any, q: Any, axis: Axis, method: str, keepdims: bool, *, ignore_nan: bool) -> Any:
    if method not in METHODS:
        raise GraphError(f"quantile: method is {method!r}", hint=", ".join(METHODS))
    q = q if is_traced(q) else np.asarray(q, np.float64)
    if not is_traced(q) and not ((q >= 0) & (q <= 1)).all():
        raise GraphError(f"quantile: q is {q}, expected numbers from 0 to 1", hint="percentile takes 0 to 100")
    x = floats(asarray(x))
    axes = axes_of(axis, type_of(x).rank, "quantile")
    rest = [a for a in range(type_of(x).rank) if a not in axes]
    lead = [type_of(x).shape[a] for a in rest]
    rows = reshape(transpose(x, [*rest, *axes]), [*lead, product(type_of(x).shape[a] for a in axes)])
    count = type_of(rows).shape[-1]
    if not isinstance(count, int):
        raise ShapeError(f"quantile: the reduced axes of {type_of(x)} have no static size")
    missing = isnan(rows)
    ordered = sort(where(missing, math.inf, rows), -1)
    kind = type_of(x).dtype
    valid = sum(astype(logical_not(missing), kind), -1, keepdims=True) if ignore_nan else float(count)
    q = astype(q, kind)
    wanted = reshape(q, -1)  # [quantiles]
    at = broadcast_to(wanted * (valid - 1), [*lead, type_of(wanted).shape[0]])
    at = clip(at, 0.0, float(count - 1))
    low = floor(at)
    high = minimum(low + 1, valid - 1)
    part = at - low
    match method:
        case "lower":
            part = part * 0
        case "higher":
            part = where(part > 0, 1.0, part)
        case "nearest":
            part = round(at) - low
        case "midpoint":
            part = where(part > 0, 0.5, part)
    below, above = (take_along_axis(ordered, astype(clip(i, 0.0, float(count - 1)), "i32"), -1) for i in (low, high))
    values = where(part > 0, below + (above - below) * part, below)
    broken = valid < 1 if ignore_nan else any(missing, -1, keepdims=True)
    values = moveaxis(where(broken, math.nan, values), -1, 0)  # [quantiles, *lead]
    if keepdims:
        shape = [1 if a in axes else d for a, d in enumerate(type_of(x).shape)]
        values = reshape(values, [-1, *shape])
    return reshape(values, [*type_of(q).shape, *type_of(values).shape[1:]])


# -- averages ---------------------------------------------------------------------------------------------------------
@eager
def average(x: Any, axis: Axis = None, weights: Any = None, returned: bool = False, keepdims: bool = False) -> Any:
    """Weighted mean; with `returned`, also the sum of the weights."""
    x = floats(asarray(x))
    if weights is None:
        result = mean(x, axis, keepdims=keepdims)
        count = product(type_of(x).shape[a] for a in axes_of(axis, type_of(x).rank, "average"))
        return (result, full(type_of(result).shape, count, type_of(x).dtype)) if returned else result
    weights = floats(asarray(weights))
    if type_of(weights).rank == 1 and isinstance(axis, int) and type_of(x).rank > 1:
        at = axis % type_of(x).rank
        weights = reshape(weights, [-1 if a == at else 1 for a in range(type_of(x).rank)])
    weights = broadcast_to(weights, type_of(x).shape)
    total = sum(weights, axis, keepdims=keepdims)
    result = sum(x * weights, axis, keepdims=keepdims) / total
    return (result, total) if returned else result


@eager
def cov(m: Any, y: Any = None, rowvar: bool = True, bias: bool = False, ddof: int | None = None) -> Any:
    """Covariance matrix; each row is a variable, or each column where `rowvar` is False."""
    rows = _variables(m, rowvar)
    if y is not None:
        rows = vstack([rows, _variables(y, rowvar)])
    count = type_of(rows).shape[1]
    if not isinstance(count, int):
        raise ShapeError(f"cov: the number of observations in {type_of(rows)} has no static size")
    centred = rows - mean(rows, 1, keepdims=True)
    less_by = ddof if ddof is not None else 0 if bias else 1
    product_ = matmul(centred, transpose(centred)) / float(count - less_by)
    return reshape(product_, ()) if type_of(product_).shape == (1, 1) else product_


def _variables(m: Any, rowvar: bool) -> Any:
    rows = atleast_2d(floats(asarray(m)))
    return rows if rowvar or type_of(m).rank < 2 else transpose(rows)


@eager
def corrcoef(x: Any, y: Any = None, rowvar: bool = True) -> Any:
    """Correlation coefficients: the covariance of variables with unit variance."""
    matrix = cov(x, y, rowvar)
    if type_of(matrix).rank == 0:
        return matrix / matrix
    deviation = sqrt(diagonal(matrix))
    return clip(matrix / expand_dims(deviation, 1) / expand_dims(deviation, 0), -1.0, 1.0)


# -- without NaN ------------------------------------------------------------------------------------------------------
def _filled(x: Any, fill: float) -> Any:
    x = asarray(x)
    return where(isnan(x), fill, x) if is_float(x) else x


def _numbers(x: Any) -> Any:
    return logical_not(isnan(x))


@eager
def nansum(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Sum of the elements that are not NaN."""
    return sum(_filled(x, 0.0), axis, keepdims=keepdims)


@eager
def nanprod(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Product of the elements that are not NaN."""
    return prod(_filled(x, 1.0), axis, keepdims=keepdims)


@eager
def nancumsum(x: Any, axis: int | None = None) -> Any:
    """Cumulative sum, in which NaN counts as 0."""
    return cumsum(_filled(x, 0.0), axis)


@eager
def nancumprod(x: Any, axis: int | None = None) -> Any:
    """Cumulative product, in which NaN counts as 1."""
    return cumprod(_filled(x, 1.0), axis)


@eager
def nanmean(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Mean of the elements that are not NaN; NaN if there are none."""
    return mean(_filled(floats(asarray(x)), 0.0), axis, keepdims=keepdims, where=_numbers(x))


@eager
def nanvar(x: Any, axis: Axis = None, ddof: float = 0, keepdims: bool = False) -> Any:
    """Variance of the elements that are not NaN."""
    return var(_filled(floats(asarray(x)), 0.0), axis, ddof=ddof, keepdims=keepdims, where=_numbers(x))


def nanstd(x: Any, axis: Axis = None, ddof: float = 0, keepdims: bool = False) -> Any:
    """Standard deviation of the elements that are not NaN."""
    return sqrt(nanvar(x, axis, ddof, keepdims))


@eager
def nanmax(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Largest element that is not NaN; NaN if there is none."""
    largest = max(_filled(x, -math.inf), axis, keepdims)
    return where(any(_numbers(x), axis, keepdims), largest, math.nan) if is_float(x) else largest


@eager
def nanmin(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Smallest element that is not NaN; NaN if there is none."""
    smallest = min(_filled(x, math.inf), axis, keepdims)
    return where(any(_numbers(x), axis, keepdims), smallest, math.nan) if is_float(x) else smallest


@eager
def nanargmax(x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """Index of the largest element that is not NaN."""
    return argmax(_filled(x, -math.inf), axis, keepdims)


@eager
def nanargmin(x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """Index of the smallest element that is not NaN."""
    return argmin(_filled(x, math.inf), axis, keepdims)
