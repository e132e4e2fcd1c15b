"""Reductions, cumulative sums and softmax, under NumPy's names."""

from __future__ import annotations

from typing import Any

from rlx.functional.elementwise import (
    exp,
    greater,
    isfinite,
    log,
    logical_not,
    negative,
    sqrt,
    where,
)
from rlx.functional.operands import Axis, as_value, asarray, astype, axis_tuple, floats, traced
from rlx.functional.shapes import ravel, squeeze
from rlx.functional.tracers import type_of
from rlx.functional.tracing import apply, eager
from rlx.ir.graph import Graph
from rlx.transforms import build


def _reduced(op: str, x: Any, axis: Axis, keepdims: bool) -> Any:
    return apply(op, asarray(x), axis=None if axis is None else axis_tuple(axis), keepdims=keepdims)


@eager
def sum(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Sum."""
    return _reduced("sum", astype(x, "i32") if type_of(x).dtype.is_bool else x, axis, keepdims)


def prod(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Product."""
    return _reduced("prod", x, axis, keepdims)


@eager
def mean(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Mean."""
    return _reduced("mean", floats(asarray(x)), axis, keepdims)


def max(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Largest element."""
    return _reduced("max", x, axis, keepdims)


def min(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Smallest element."""
    return _reduced("min", x, axis, keepdims)


@eager
def var(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Variance."""
    centred = floats(asarray(x)) - mean(x, axis, True)
    return mean(centred * centred, axis, keepdims)


def std(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Standard deviation."""
    return sqrt(var(x, axis, keepdims))


@eager
def any(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Whether any element is true."""
    return greater(_reduced("sum", astype(astype(x, "bool"), "i32"), axis, keepdims), 0)


def all(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Whether all elements are true."""
    return logical_not(any(logical_not(astype(x, "bool")), axis, keepdims))


@eager
def argmax(x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """Index of the largest element; the first if there are several."""
    return argmax(ravel(x), 0) if axis is None else apply("argmax", x, axis=axis, keepdims=keepdims)


@eager
def argmin(x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """Index of the smallest element; the first if there are several."""
    return argmax(negative(x), axis, keepdims)


@eager
def cumsum(x: Any, axis: int | None = None) -> Any:
    """Cumulative sum."""
    return cumsum(ravel(x), 0) if axis is None else apply("cumsum", x, axis=axis)


def softmax(x: Any, axis: int = -1) -> Any:
    """Softmax along an axis: exp(x) / sum(exp(x))."""
    return apply("softmax", asarray(x), axis=axis)


@eager
def logsumexp(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """log(sum(exp(x))), without overflow."""
    top = max(x, axis, True)
    top = stop_gradient(where(isfinite(top), top, 0.0))
    total = log(sum(exp(x - top), axis, True)) + top
    return total if keepdims else squeeze(total, tuple(range(type_of(x).rank)) if axis is None else axis)


@eager
def log_softmax(x: Any, axis: int = -1) -> Any:
    """log(softmax(x)), without overflow."""
    return x - logsumexp(x, axis, True)


def cross_entropy(logits: Any, labels: Any, ignore_index: int = -100) -> Any:
    """Cross entropy per row of the last axis: logsumexp(logits) - logits[label]."""
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
