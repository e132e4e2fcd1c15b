"""Differences, integrals, polynomials and convolutions of sampled functions, under NumPy's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import GraphError, ShapeError
from rlx.functional.creation import zeros
from rlx.functional.elementwise import divide, not_equal
from rlx.functional.operands import Axis, as_value, asarray, float_operands, floats, traced
from rlx.functional.reductions import sum
from rlx.functional.shapes import axes_of, concatenate, flip, moveaxis, ravel, reshape, unstack
from rlx.functional.tracers import type_of
from rlx.functional.tracing import apply, eager
from rlx.transforms import build
from rlx.types import axis_index


def _part(x: Any, axis: int, start: int, stop: int) -> Any:
    """x[start:stop] along an axis; a stop of 0 or less counts from the end."""
    size = type_of(x).shape[axis]
    return traced(build.slice_axis(as_value(x), axis, start, stop if stop > 0 else size + stop))


@eager
def diff(x: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Differences of neighbours along an axis, n times."""
    x = asarray(x)
    at = axis_index(axis, type_of(x).rank, "diff")

    def edge(value: Any) -> Any:
        value = asarray(value)
        if type_of(value).rank:
            return value
        shape = [1 if a == at else d for a, d in enumerate(type_of(x).shape)]
        return apply("expand", value, shape=tuple(shape))

    before = [edge(prepend)] if prepend is not None else []
    after = [edge(append)] if append is not None else []
    x = concatenate([*before, x, *after], at) if before or after else x
    for _ in range(n):
        later, earlier = _part(x, at, 1, 0), _part(x, at, 0, -1)
        x = not_equal(later, earlier) if type_of(x).dtype.is_bool else later - earlier
    return x


@eager
def ediff1d(x: Any) -> Any:
    """Differences of neighbours of the flattened array."""
    return diff(ravel(x))


@eager
def trapezoid(y: Any, x: Any = None, dx: Any = 1.0, axis: int = -1) -> Any:
    """Integral by the trapezoidal rule, over coordinates `x` or steps `dx`."""
    y = moveaxis(floats(asarray(y)), axis, -1)
    last = type_of(y).rank - 1
    if x is not None:
        x = asarray(x)
        dx = diff(moveaxis(x, axis, -1) if type_of(x).rank > 1 else x)
    return sum((_part(y, last, 1, 0) + _part(y, last, 0, -1)) * dx, -1) * 0.5


@eager
def gradient(f: Any, *spacing: Any, axis: Axis = None) -> Any:
    """Central differences inside and one-sided ones at the ends; a list if there are several axes.

    `spacing` is one step for all axes, or a step or a vector of coordinates per axis.
    """
    f = floats(asarray(f))
    axes = axes_of(axis, type_of(f).rank, "gradient")
    steps = list(spacing) * len(axes) if len(spacing) == 1 else list(spacing) or [1.0] * len(axes)
    if len(steps) != len(axes):
        raise GraphError(f"gradient: {len(steps)} spacings for {len(axes)} axes")
    results = [_gradient(f, step, at) for step, at in zip(steps, axes, strict=True)]
    return results[0] if len(results) == 1 else results


def _gradient(f: Any, step: Any, at: int) -> Any:
    size, rank = type_of(f).shape[at], type_of(f).rank
    if not isinstance(size, int) or size < 2:
        raise ShapeError(f"gradient: axis {at} of {type_of(f)} needs a static size of two or more")
    edges = diff(f, axis=at)
    if type_of(step).rank == 0:
        first, last = _part(edges, at, 0, 1) / step, _part(edges, at, size - 2, size - 1) / step
        inner = (_part(f, at, 2, 0) - _part(f, at, 0, -2)) / (2.0 * step)
        return concatenate([first, inner, last], at)
    width = reshape(diff(asarray(step)), [-1 if a == at else 1 for a in range(rank)])
    slopes = edges / width
    left, right = _part(width, at, 0, -1), _part(width, at, 1, 0)
    inner = (left * _part(slopes, at, 1, 0) + right * _part(slopes, at, 0, -1)) / (left + right)
    return concatenate([_part(slopes, at, 0, 1), inner, _part(slopes, at, size - 2, size - 1)], at)


# -- polynomials ------------------------------------------------------------------------------------------------------
@eager
def polyval(p: Any, x: Any) -> Any:
    """Value at x of the polynomial with coefficients p, the highest power first."""
    p, x = asarray(p), asarray(x)
    total: Any = zeros((), type_of(p).dtype)
    for coefficient in unstack(p):
        total = total * x + coefficient
    return total


@eager
def polyder(p: Any, m: int = 1) -> Any:
    """Coefficients of the m-th derivative of a polynomial."""
    p = asarray(p)
    for _ in range(m):
        size = _known(p, "polyder")
        p = _part(p, 0, 0, size - 1) * _powers(size - 1, p)
    return p


@eager
def polyint(p: Any, m: int = 1) -> Any:
    """Coefficients of the m-th integral of a polynomial, with constants 0."""
    p = floats(asarray(p))
    for _ in range(m):
        size = _known(p, "polyint")
        p = concatenate([divide(p, _powers(size, p)), zeros((1,), type_of(p).dtype)], 0)
    return p


def _known(p: Any, where: str) -> int:
    size = type_of(p).shape[0]
    if not isinstance(size, int):
        raise ShapeError(f"{where}: {type_of(p)} has no static size")
    return size


def _powers(count: int, like: Any) -> Any:
    return np.arange(count, 0, -1).astype(type_of(like).dtype.numpy)


# -- convolutions -----------------------------------------------------------------------------------------------------
@eager
def convolve(a: Any, v: Any, mode: str = "full") -> Any:
    """Sum over k of a[k] · v[n - k]; mode is 'full', 'same' or 'valid'."""
    a, v = asarray(a), asarray(v)
    if _known(a, "convolve") < _known(v, "convolve"):
        a, v = v, a
    return _correlated(a, flip(v, 0), mode, "convolve")


@eager
def correlate(a: Any, v: Any, mode: str = "valid") -> Any:
    """Sum over k of a[n + k] · v[k]; mode is 'full', 'same' or 'valid'."""
    a, v = asarray(a), asarray(v)
    if _known(a, "correlate") < _known(v, "correlate"):
        return flip(_correlated(v, a, mode, "correlate"), 0)
    return _correlated(a, v, mode, "correlate")


def _correlated(a: Any, v: Any, mode: str, where: str) -> Any:
    """Slide the shorter `v` along `a`."""
    a, v = float_operands(a, v)
    taps = _known(v, where)
    if mode not in ("full", "same", "valid"):
        raise GraphError(f"{where}: mode is {mode!r}, expected 'full', 'same' or 'valid'")
    padding = {"full": taps - 1, "same": taps - 1, "valid": 0}[mode]
    y = reshape(apply("conv1d", reshape(a, 1, 1, -1), reshape(v, 1, 1, -1), padding=padding), -1)
    if mode != "same":
        return y
    start = (taps - 1) // 2
    return _part(y, 0, start, start + _known(a, where))
