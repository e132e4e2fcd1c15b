"""Reductions, cumulative sums and softmax, under NumPy's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.errors import GraphError, ShapeError
from rlx.functional.creation import full
from rlx.functional.elementwise import (
    equal,
    exp,
    greater,
    isfinite,
    isnan,
    log,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    multiply,
    negative,
    sqrt,
    where,
)
from rlx.functional.operands import Axis, as_value, asarray, astype, axis_tuple, floats, traced
from rlx.functional.shapes import broadcast_to, concatenate, ravel, squeeze
from rlx.functional.tracers import type_of
from rlx.functional.tracing import apply, eager
from rlx.functional.ufuncs import isclose
from rlx.ir.graph import Graph
from rlx.transforms import build
from rlx.types import axis_index


def _reduced(op: str, x: Any, axis: Axis, keepdims: bool) -> Any:
    return apply(op, asarray(x), axis=None if axis is None else axis_tuple(axis), keepdims=keepdims)


def _counted(x: Any) -> Any:
    return astype(x, "i32") if type_of(x).dtype.is_bool else asarray(x)


def _masked(x: Any, where_: Any, fill: Any) -> Any:
    return x if where_ is None else where(where_, x, fill)


def _typed(x: Any, dtype: Any) -> Any:
    return asarray(x) if dtype is None else astype(x, dtype)


@eager
def sum(
    x: Any, axis: Axis = None, dtype: Any = None, keepdims: bool = False, initial: Any = None, where: Any = None
) -> Any:
    """Sum."""
    total = _reduced("sum", _counted(_masked(_typed(x, dtype), where, 0)), axis, keepdims)
    return total if initial is None else total + initial


@eager
def prod(
    x: Any, axis: Axis = None, dtype: Any = None, keepdims: bool = False, initial: Any = None, where: Any = None
) -> Any:
    """Product."""
    total = _reduced("prod", _counted(_masked(_typed(x, dtype), where, 1)), axis, keepdims)
    return total if initial is None else total * initial


@eager
def mean(x: Any, axis: Axis = None, dtype: Any = None, keepdims: bool = False, where: Any = None) -> Any:
    """Mean."""
    x = floats(_typed(x, dtype))
    if where is None:
        return _reduced("mean", x, axis, keepdims)
    return sum(x, axis, keepdims=keepdims, where=where) / _count(x, axis, keepdims, where)


def _count(x: Any, axis: Axis, keepdims: bool, where: Any) -> Any:
    chosen = broadcast_to(astype(where, "bool"), type_of(x).shape)
    return sum(astype(chosen, type_of(x).dtype), axis, keepdims=keepdims)


def _extreme(op: str, pick: Any, x: Any, axis: Axis, keepdims: bool, initial: Any, where: Any) -> Any:
    if where is not None:
        if initial is None:
            raise GraphError(f"{op}: where needs initial, the result of an empty selection")
        x = _masked(asarray(x), where, initial)
    result = _reduced(op, x, axis, keepdims)
    return result if initial is None else pick(result, initial)


@eager
def max(x: Any, axis: Axis = None, keepdims: bool = False, initial: Any = None, where: Any = None) -> Any:
    """Largest element."""
    return _extreme("max", maximum, x, axis, keepdims, initial, where)


@eager
def min(x: Any, axis: Axis = None, keepdims: bool = False, initial: Any = None, where: Any = None) -> Any:
    """Smallest element."""
    return _extreme("min", minimum, x, axis, keepdims, initial, where)


amax, amin = max, min


@eager
def ptp(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Largest minus smallest element."""
    return max(x, axis, keepdims) - min(x, axis, keepdims)


@eager
def var(
    x: Any, axis: Axis = None, dtype: Any = None, ddof: float = 0, keepdims: bool = False, where: Any = None,
    correction: float | None = None,
) -> Any:  # fmt: skip
    """Variance; `ddof` (or `correction`) is subtracted from the number of elements."""
    x = floats(_typed(x, dtype))
    centred = x - mean(x, axis, keepdims=True, where=where)
    less_by = ddof if correction is None else correction
    if not less_by:
        return mean(centred * centred, axis, keepdims=keepdims, where=where)
    total = sum(centred * centred, axis, keepdims=keepdims, where=where)
    count = _count(x, axis, keepdims, True if where is None else where)
    return total / maximum(count - less_by, 0.0)


def std(
    x: Any, axis: Axis = None, dtype: Any = None, ddof: float = 0, keepdims: bool = False, where: Any = None,
    correction: float | None = None,
) -> Any:  # fmt: skip
    """Standard deviation; `ddof` (or `correction`) is subtracted from the number of elements."""
    return sqrt(var(x, axis, dtype, ddof, keepdims, where, correction))


@eager
def any(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Whether any element is true."""
    return greater(count_nonzero(x, axis, keepdims), 0)


def all(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Whether all elements are true."""
    return logical_not(any(logical_not(astype(x, "bool")), axis, keepdims))


def count_nonzero(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Number of elements that are true, or not zero."""
    return _reduced("sum", astype(astype(x, "bool"), "i32"), axis, keepdims)


@eager
def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """Whether all elements are close; see `isclose`."""
    return all(isclose(a, b, rtol, atol, equal_nan))


@eager
def array_equal(a: Any, b: Any, equal_nan: bool = False) -> Any:
    """Whether shapes and elements are equal."""
    if type_of(a).shape != type_of(b).shape:
        return np.asarray(False)
    same = equal(a, b)
    return all(logical_or(same, logical_and(isnan(a), isnan(b))) if equal_nan else same)


@eager
def argmax(x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """Index of the largest element; the first if there are several."""
    return argmax(ravel(x), 0) if axis is None else apply("argmax", _counted(x), axis=axis, keepdims=keepdims)


@eager
def argmin(x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """Index of the smallest element; the first if there are several."""
    return argmax(negative(_counted(x)), axis, keepdims)


# -- cumulative -------------------------------------------------------------------------------------------------------
@eager
def cumsum(x: Any, axis: int | None = None, dtype: Any = None) -> Any:
    """Cumulative sum."""
    x = _counted(_typed(x, dtype))
    return cumsum(ravel(x), 0) if axis is None else apply("cumsum", x, axis=axis)


@eager
def cumprod(x: Any, axis: int | None = None, dtype: Any = None) -> Any:
    """Cumulative product."""
    x = _counted(_typed(x, dtype))
    return accumulated(multiply, x, axis, 1)


def accumulated(combine: Callable[[Any, Any], Any], x: Any, axis: int | None, start: float | None) -> Any:
    """Combine each element with all before it, by an associative function with the identity `start`.

    Without one, the first elements stand in, for functions that are idempotent.

    Doubles the number of combined elements in each of log2(n) steps.
    """
    if axis is None:
        x, axis = ravel(x), 0
    at = axis_index(axis, type_of(x).rank, "accumulate")
    size = type_of(x).shape[at]
    if not isinstance(size, int):
        raise ShapeError(f"accumulate: axis {axis} of {type_of(x)} has no static size")
    reach = 1
    while reach < size:
        before = traced(build.slice_axis(as_value(x), at, 0, size - reach))
        first = traced(build.slice_axis(as_value(x), at, 0, reach))
        if start is not None:
            first = full(type_of(first).shape, start, type_of(x).dtype)
        x = combine(x, concatenate([first, before], at))
        reach *= 2
    return x


def cumulative_extreme(pick: Callable[[Any, Any], Any], x: Any, axis: int | None) -> Any:
    """Cumulative maximum or minimum: the first element stands in where there is none before."""
    return accumulated(pick, asarray(x), axis, None)


def softmax(x: Any, axis: int = -1) -> Any:
    """Softmax along an axis: exp(x) / sum(exp(x))."""
    return apply("softmax", asarray(x), axis=axis)


@eager
def logsumexp(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """log(sum(exp(x))), without overflow."""
    top = max(x, axis, True)
    top = stop_gradient(where(isfinite(top), top, 0.0))
    total = log(sum(exp(x - top), axis, keepdims=True)) + top
    return total if keepdims else squeeze(total, tuple(range(type_of(x).rank)) if axis is None else axis)


@eager
def log_softmax(x: Any, axis: int = -1) -> Any:
    """log(softmax(x)), without overflow."""
    return x - logsumexp(x, axis, True)


def cross_entropy(logits: Any, labels: Any, ignore_index: int = -100) -> Any:
    """Cross entropy per row of the last axis: logsumexp(logits) - logits[label], or 0 for the label `ignore_index`."""
    return apply("cross_entropy", asarray(logits), asarray(labels), ignore_index=ignore_index)


@eager
def stop_gradient(x: Any) -> Any:
    """Return x, treated as a constant by derivatives."""
    value = as_value(x)
    body = Graph("stop_gradient")
    inner = build.declare(body, "x", value.type)
    body.set_outputs([inner])
    back = Graph("nothing")
    operand = build.declare(back, "x", value.type)
    for name in ("primal_output", "d_output"):
        build.declare(back, name, value.type)
    back.set_outputs([build.zeros_like(operand)])
    return traced(value.graph.custom_fn([value], body, back))
