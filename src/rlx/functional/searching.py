"""Searching, counting and sets, under NumPy's names.

Results whose size depends on data need a static size under a trace: `size=` or `length=`, as in JAX.
"""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np

from rlx.errors import GraphError, ShapeError
from rlx.functional.creation import full, iota
from rlx.functional.elementwise import (
    equal,
    isnan,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    not_equal,
    where,
)
from rlx.functional.indexing import argsort, sort, take
from rlx.functional.operands import as_value, asarray, astype, float_operands, is_float, is_traced, traced
from rlx.functional.reductions import cumsum, max, min, sum
from rlx.functional.shapes import broadcast_to, concatenate, ravel, reshape
from rlx.functional.tracers import current, type_of
from rlx.functional.tracing import apply, eager
from rlx.transforms import build
from rlx.types import product


def _static_size(where_: str, x: Any) -> int:
    size = product(type_of(x).shape)
    if not isinstance(size, int):
        raise ShapeError(f"{where_}: {type_of(x)} has no static size")
    return size


@eager
def searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> Any:
    """Positions in the sorted vector `a` at which the elements of `v` keep it sorted, by binary search."""
    if side not in ("left", "right"):
        raise GraphError(f"searchsorted: side is {side!r}, expected 'left' or 'right'")
    a = take(a, sorter) if sorter is not None else asarray(a)
    size = _static_size("searchsorted", a)
    v = asarray(v)
    low = full(type_of(v).shape, 0, "i32")
    high = full(type_of(v).shape, size, "i32")
    for _ in range(size.bit_length()):
        middle = apply("floor_divide", low + high, 2)
        element = take(a, minimum(middle, size - 1))
        before = element < v if side == "left" else element <= v
        if is_float(v):  # NaN is sorted after all numbers
            before = logical_or(before, logical_and(isnan(v), logical_not(isnan(element)) if side == "left" else True))
        before = logical_and(before, low < high)
        low, high = where(before, middle + 1, low), where(before, high, minimum(high, middle))
    return low


@eager
def digitize(x: Any, bins: Any, right: bool = False) -> Any:
    """Number of the bin of each element; bins increase."""
    return searchsorted(bins, x, "left" if right else "right")


@eager
def interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None) -> Any:
    """Piecewise linear interpolation through the points (xp, fp), with increasing xp."""
    x, xp, fp = float_operands(x, xp, fp)
    size = _static_size("interp", xp)
    if size == 1:
        inside = broadcast_to(fp, type_of(x).shape)
    else:
        upper = minimum(maximum(searchsorted(xp, x, "right"), 1), size - 1)
        x0, x1, y0, y1 = (take(points, upper - back) for points, back in ((xp, 1), (xp, 0), (fp, 1), (fp, 0)))
        width = x1 - x0
        part = (x - x0) / where(equal(width, 0), 1.0, width)
        inside = y0 + (y1 - y0) * where(equal(width, 0), 0.0, part)
    first, last = take(xp, 0), take(xp, -1)
    below, above = (take(fp, i) if bound is None else bound for i, bound in ((0, left), (-1, right)))
    return where(x < first, below, where(x > last, above, inside))


# -- counting ---------------------------------------------------------------------------------------------------------
def bincount(x: Any, weights: Any = None, minlength: int = 0, length: int | None = None) -> Any:
    """How often each number occurs, or the sum of its weights.

    Under a trace the result has `length` (or `minlength`) elements, and larger numbers are an error at run time.
    """
    if length is None and not is_traced(x) and current() is None:
        numbers = np.asarray(x)
        length = builtins.max(minlength, int(numbers.max(initial=-1)) + 1)
    length = minlength if length is None else length
    if not length:
        raise GraphError(
            "bincount: the number of bins depends on data", hint="rlx.numpy.bincount(x, length=8), the number of bins"
        )
    return _bincount(x, weights, length)


@eager
def _bincount(x: Any, weights: Any, length: int) -> Any:
    places = ravel(asarray(x))
    if not type_of(places).dtype.is_integer:
        raise GraphError(f"bincount: takes integers, found {type_of(places)}")
    counts = full(type_of(places).shape, 1, "i32") if weights is None else ravel(asarray(weights))
    return apply("scatter_add", full((length,), 0, type_of(counts).dtype), places, counts)


@eager
def histogram_bin_edges(x: Any, bins: Any = 10, range: Any = None) -> Any:
    """Edges of equal bins from the smallest to the largest element, or over `range`; an array is returned as it is."""
    if not isinstance(bins, int):
        return asarray(bins)
    (x,) = float_operands(x)
    low, high = (min(x), max(x)) if range is None else float_operands(*range)
    same = equal(low, high)
    low, high = where(same, low - 0.5, low), where(same, high + 0.5, high)
    kind = type_of(x).dtype
    steps = np.arange(bins + 1).astype(kind.numpy)
    return astype(low + (high - low) * (steps / kind.numpy.type(bins)), kind)


@eager
def histogram(x: Any, bins: Any = 10, range: Any = None, density: bool = False, weights: Any = None) -> tuple[Any, Any]:
    """Number of elements per bin (the last one includes its right edge), and the edges of the bins."""
    edges = histogram_bin_edges(x, bins, range)
    count = _static_size("histogram", edges) - 1
    values = ravel(astype(x, type_of(edges).dtype))
    bin_ = searchsorted(edges, values, "right") - 1
    bin_ = where(equal(values, take(edges, -1)), count - 1, bin_)
    inside = logical_and(bin_ >= 0, bin_ < count)
    bin_ = where(inside, bin_, count)  # one more bin for elements outside
    counts = take(_bincount(bin_, weights, count + 1), np.arange(count))
    if not density:
        return counts, edges
    widths = take(edges, np.arange(1, count + 1)) - take(edges, np.arange(count))
    counts = astype(counts, type_of(edges).dtype)
    return counts / sum(counts) / widths, edges


# -- sets -------------------------------------------------------------------------------------------------------------
def unique(
    x: Any, return_index: bool = False, return_inverse: bool = False, return_counts: bool = False, *,
    size: int | None = None, fill_value: Any = None,
) -> Any:  # fmt: skip
    """Sorted elements without repetitions.

    Under a trace the result has `size` elements: further ones are left out, missing ones are `fill_value` (by default
    the smallest element).
    """
    if size is None:
        if is_traced(x) or current() is not None:
            raise GraphError(
                "unique: the number of elements depends on data", hint="rlx.numpy.unique(x, size=8), an upper bound"
            )
        return np.unique(x, return_index, return_inverse, return_counts)  # type: ignore[call-overload]
    return _unique(x, return_index, return_inverse, return_counts, size, fill_value)


@eager
def _unique(x: Any, return_index: bool, return_inverse: bool, return_counts: bool, size: int, fill_value: Any) -> Any:
    flat = ravel(asarray(x))
    count = _static_size("unique", flat)
    order = argsort(flat)
    ordered = take(flat, order)
    before = traced(build.slice_axis(as_value(ordered), 0, 0, count - 1))
    after = traced(build.slice_axis(as_value(ordered), 0, 1, count))
    is_new = concatenate([np.ones(1, np.bool_), not_equal(after, before)], 0)
    number = cumsum(astype(is_new, "i32"), 0) - 1  # which unique element each sorted one is
    place = minimum(number, size)  # one more place for elements that are left out
    firsts = where(is_new, place, size)
    positions = apply("scatter", full((size + 1,), 0, "i32"), firsts, iota(count, "i32"))
    positions = take(positions, np.arange(size))
    exists = iota(size, "i32") <= take(number, -1)
    fill = take(ordered, 0) if fill_value is None else fill_value
    results = [where(exists, take(ordered, positions), fill)]
    if return_index:
        results.append(where(exists, take(order, positions), take(order, 0)))
    if return_inverse:
        inverse = apply("scatter", full((count,), 0, "i32"), order, number)
        results.append(reshape(inverse, type_of(x).shape))
    if return_counts:
        results.append(take(_bincount(place, None, size + 1), np.arange(size)))
    return results[0] if len(results) == 1 else tuple(results)


def nonzero(x: Any, *, size: int | None = None, fill_value: int = 0) -> Any:
    """Indices of the elements that are not zero, one vector per axis; under a trace each has `size` elements."""
    return _nonzero("nonzero", x, size, fill_value)


def _nonzero(name: str, x: Any, size: int | None, fill_value: int) -> Any:
    if size is None:
        if is_traced(x) or current() is not None:
            hint = f"rlx.numpy.{name}(x, size=8), an upper bound; rlx.where keeps the shape"
            raise GraphError(f"{name}: the number of elements depends on data", hint=hint)
        return np.nonzero(x)
    flat = _flatnonzero(x, size, -1)
    indices = []
    for extent in reversed(type_of(x).shape):
        indices.append(where(flat < 0, fill_value, apply("mod", flat, extent)))
        flat = where(flat < 0, -1, apply("floor_divide", flat, extent))
    return tuple(reversed(indices))


def flatnonzero(x: Any, *, size: int | None = None, fill_value: int = 0) -> Any:
    """Indices into the flattened array of the elements that are not zero."""
    return _nonzero("flatnonzero", ravel(asarray(x)), size, fill_value)[0]


def argwhere(x: Any, *, size: int | None = None, fill_value: int = 0) -> Any:
    """Indices of the elements that are not zero, one row each."""
    from rlx.functional.shapes import stack

    indices = _nonzero("argwhere", x, size, fill_value)
    return np.stack(indices, -1) if size is None else stack(indices, -1)


@eager
def _flatnonzero(x: Any, size: int, fill_value: int) -> Any:
    chosen = ravel(astype(x, "bool"))
    count = _static_size("nonzero", chosen)
    place = where(chosen, minimum(cumsum(astype(chosen, "i32"), 0) - 1, size), size)
    target = full((size + 1,), fill_value, "i32")
    return take(apply("scatter", target, place, iota(count, "i32")), np.arange(size))


@eager
def isin(x: Any, values: Any, invert: bool = False) -> Any:
    """Whether each element is among `values`."""
    values = sort(ravel(asarray(values)))
    size = _static_size("isin", values)
    x = asarray(x)
    if not size:
        inside = full(type_of(x).shape, False, "bool")
    else:
        inside = equal(take(values, minimum(searchsorted(values, x), size - 1)), x)
    return logical_not(inside) if invert else inside
