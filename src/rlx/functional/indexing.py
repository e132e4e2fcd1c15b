"""Indexing, indexed updates and sorting: x[key], x.at[key], take, sort, one_hot."""

from __future__ import annotations

import builtins
import operator
from typing import Any

import numpy as np

from rlx.dtypes import dtype
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.functional.creation import iota, zeros
from rlx.functional.elementwise import equal, less, negative, where
from rlx.functional.operands import as_value, asarray, astype, traced
from rlx.functional.shapes import broadcast_to, expand_dims, moveaxis, ravel, reshape, transpose
from rlx.functional.tracers import Traced, current, type_of
from rlx.functional.tracing import apply, eager
from rlx.transforms import build
from rlx.types import Dim, Size, axis_index, broadcast, product


@eager
def take(x: Any, indices: Any, axis: int | None = None) -> Any:
    """Take elements by index along an axis; negative indices count from the end."""
    if axis is None:
        return take(ravel(x), indices, 0)
    size = type_of(x).shape[axis]
    return apply("gather", x, _from_start(indices, size), axis=axis % type_of(x).rank)


def _from_start(indices: Any, size: Size) -> Any:
    if not isinstance(indices, Traced) and current() is not None:
        array = np.asarray(indices)
        if array.dtype.kind not in "iu":
            raise DTypeError(f"index: indices are integers, found {array.dtype}", hint="use rlx.where for masks")
        if not (array < 0).any():
            return array.astype(np.int32)
    indices = asarray(indices)
    if not type_of(indices).dtype.is_integer:
        raise DTypeError(f"index: indices are integers, found {type_of(indices)}", hint="use rlx.where for masks")
    trace = current()
    assert trace is not None
    count: Any = build.count(trace.graph, size, type_of(indices).dtype)
    return where(less(indices, 0), indices + (traced(count) if not isinstance(count, int) else count), indices)


@eager
def take_along_axis(x: Any, indices: Any, axis: int) -> Any:
    """Take elements along an axis, with separate indices for each row."""
    at = axis_index(axis, type_of(x).rank, "take_along_axis")
    rows, where_ = moveaxis(x, at, -1), moveaxis(asarray(indices), at, -1)
    flat = _rows(rows, where_)
    gathered = apply("gather", ravel(rows), ravel(flat), axis=0)
    return moveaxis(reshape(gathered, type_of(where_).shape), -1, at)


def _rows(rows: Any, where_: Any) -> Any:
    """Convert indices along the last axis to indices into the flattened array."""
    size, shape = type_of(rows).shape[-1], type_of(where_).shape
    index = as_value(_from_start(where_, size)).reshape(product(shape[:-1]), shape[-1])
    return traced(build.flat_row_indices(index, size))


@eager
def one_hot(indices: Any, classes: int, dtype: Any = "f32") -> Any:
    """1 at the index, 0 elsewhere, on a new last axis."""
    number = iota(classes, type_of(indices).dtype)
    return equal(expand_dims(indices, type_of(indices).rank), number).astype(dtype)


@eager
def sort(x: Any, axis: int = -1) -> Any:
    """Sort in ascending order."""
    return _sort_with_indices(x, axis)[0]


@eager
def argsort(x: Any, axis: int = -1) -> Any:
    """Indices that sort in ascending order; stable."""
    return _sort_with_indices(x, axis)[1]


def _sort_with_indices(x: Any, axis: int) -> tuple[Any, Any]:
    at, size = axis_index(axis, type_of(x).rank, "sort"), type_of(x).shape[axis]
    if not isinstance(size, int):
        raise ShapeError(f"sort: axis {axis} of {type_of(x)} has no static size")
    if size == 0:
        return asarray(x), astype(x, "i32")
    rows = negative(moveaxis(x, at, -1))
    values, order = apply("topk", rows, k=size)
    return moveaxis(negative(values), -1, at), moveaxis(order, -1, at)


def topk(x: Any, k: int) -> Any:
    """The k largest along the last axis, largest first, and their indices."""
    return apply("topk", asarray(x), k=k)


@eager
def index(x: Any, key: Any) -> Any:
    """x[key]: integers, slices with any step, None, Ellipsis, and arrays of integers."""
    keys = list(key) if isinstance(key, tuple) else [key]
    x = asarray(x)
    consuming = [k for k in keys if k is not None and k is not Ellipsis]
    if len(consuming) > type_of(x).rank:
        raise ShapeError(f"index: {len(consuming)} indices for {type_of(x)}")
    if not builtins.any(k is Ellipsis for k in keys):
        keys.append(Ellipsis)
    gap = next(i for i, k in enumerate(keys) if k is Ellipsis)
    keys[gap : gap + 1] = [slice(None)] * (type_of(x).rank - len(consuming))
    return _indexed(x, keys)


def _is_data(k: Any) -> bool:
    return isinstance(k, (Traced, list)) or (isinstance(k, np.ndarray) and k.ndim > 0)


def _indexed(x: Any, keys: list[Any]) -> Any:
    value = as_value(x)
    data: list[tuple[int, Any]] = []
    axis = 0
    if builtins.any(_is_data(k) for k in keys):  # next to arrays, an integer counts as an array
        keys = [k if k is None or isinstance(k, slice) or _is_data(k) else np.asarray(_integer(k)) for k in keys]
    for k in keys:
        if k is None:
            value = value.reshape(*value.shape[:axis], 1, *value.shape[axis:])
            axis += 1
        elif isinstance(k, slice):
            value = _sliced(value, axis, k)
            axis += 1
        elif isinstance(k, np.ndarray) or _is_data(k):
            data.append((axis, k))
            axis += 1
        else:
            size, at = value.shape[axis], _integer(k)
            if isinstance(at, int) and isinstance(size, int) and not -size <= at < size:
                raise ShapeError(f"index: {at} lies outside an axis of size {size}")
            start = size + at if isinstance(at, int) and at < 0 else at
            value = build.slice_axis(value, axis, start, start + 1)
            value = value.reshape(*value.shape[:axis], *value.shape[axis + 1 :])
    if not data:
        return traced(value)
    return _gathered(traced(value), data)


def _integer(k: Any) -> Any:
    if isinstance(k, Dim):
        return k
    if isinstance(k, (bool, np.bool_)):
        raise GraphError("index: a boolean is not an index", hint="use rlx.where for masks")
    try:
        return operator.index(k)
    except TypeError:
        raise GraphError(f"index: {k!r} is neither an integer, a slice nor an array") from None


def _sliced(value: Any, axis: int, k: slice) -> Any:
    size = value.shape[axis]
    step = 1 if k.step is None else operator.index(k.step)
    if isinstance(size, int) and not isinstance(k.start, Dim) and not isinstance(k.stop, Dim):
        picked = range(size)[k]
        if step < 0:
            if not len(picked):
                return build.slice_axis(value, axis, 0, 0)
            value = build.slice_axis(value, axis, picked[-1], picked[0] + 1)
            return _strided(build.flip(value, axis), axis, 0, value.shape[axis], -step)
        stop = picked[-1] + 1 if len(picked) else picked.start
        return _strided(value, axis, picked.start if len(picked) else 0, stop if len(picked) else 0, step)
    if step < 0:
        if k.start is not None or k.stop is not None:
            raise ShapeError(f"index: {k} goes backwards on an axis of size {size}, known only at run time")
        return _strided(build.flip(value, axis), axis, 0, size, -step)
    bounds = (0 if k.start is None else k.start, size if k.stop is None else k.stop)
    start, stop = (size + b if isinstance(b, int) and b < 0 else b for b in bounds)
    return _strided(value, axis, start, stop, step)


def _strided(value: Any, axis: int, start: Size, stop: Size, step: int) -> Any:
    if step == 1:
        return build.slice_axis(value, axis, start, stop)
    low = tuple(start if a == axis else 0 for a in range(value.rank))
    high = tuple(stop if a == axis else d for a, d in enumerate(value.shape))
    return value.graph.one(
        "slice", value, start=low, stop=high, step=tuple(step if a == axis else 1 for a in range(value.rank))
    )


def _gathered(x: Any, data: list[tuple[int, Any]]) -> Any:
    """Gather by integer arrays on some axes: they broadcast, and the new axes go where the first was (or in front)."""
    axes = [a for a, _ in data]
    shapes = type_of(x).shape
    arrays = [asarray(_from_start(k if isinstance(k, Traced) else np.asarray(k), shapes[a])) for a, k in data]
    if len(data) == 1:
        return apply("gather", x, arrays[0], axis=axes[0])
    together = axes == list(range(axes[0], axes[0] + len(axes)))
    order = [*axes, *(a for a in range(len(shapes)) if a not in axes)]
    rows = transpose(x, order)
    shape = broadcast(*(type_of(k).shape for k in arrays), where="index")
    flat: Any = zeros((), "i64")
    for a, k in zip(axes, arrays, strict=True):
        flat = flat * _size(shapes[a]) + astype(k, "i64")
    rest = [shapes[a] for a in order[len(axes) :]]
    table = reshape(rows, [product(shapes[a] for a in axes), *rest])
    result = apply("gather", table, broadcast_to(flat, shape), axis=0)
    if not together:
        return result
    for i in range(axes[0]):
        result = moveaxis(result, len(shape) + i, i)
    return result


def _size(size: Size) -> Any:
    if isinstance(size, int):
        return size
    trace = current()
    assert trace is not None
    return traced(build.count(trace.graph, size, dtype("i64")))


class At:
    """Indexed updates: `x.at[key].set(y)`, `.add(y)` and `.multiply(y)` return an updated copy, `.get()` reads."""

    def __init__(self, x: Any, key: Any = None) -> None:
        self.x, self.key = x, key

    def __getitem__(self, key: Any) -> At:
        return At(self.x, key)

    def get(self) -> Any:
        """x[key]."""
        return index(self.x, self.key)

    def add(self, y: Any) -> Any:
        """Return x with y added to the selected elements; repeated indices accumulate."""
        return _at_add(self.x, self.key, y)

    def set(self, y: Any) -> Any:
        """Return x with the selected elements replaced; for repeated indices the last one wins."""
        return _at_set(self.x, self.key, y)

    def multiply(self, y: Any) -> Any:
        """Return x with the selected elements multiplied by y; indices must not repeat."""
        return self.set(self.get() * y)


def at(x: Any) -> At:
    """Indexed updates of an array: `rlx.at(x)[key].set(y)` returns an updated copy."""
    return At(x)


@eager
def _places(x: Any, key: Any) -> Any:
    """Return the flat indices (C order) of the elements of x[key]."""
    shape = type_of(x).shape
    return index(reshape(iota(product(shape), "i32"), shape), key)


def _scatter(op: str, x: Any, key: Any, y: Any) -> Any:
    places = _places(x, key)
    rows = astype(broadcast_to(asarray(y), type_of(places).shape), type_of(x).dtype)
    return reshape(apply(op, ravel(x), ravel(places), ravel(rows)), type_of(x).shape)


@eager
def _at_add(x: Any, key: Any, y: Any) -> Any:
    return _scatter("scatter_add", x, key, y)


@eager
def _at_set(x: Any, key: Any, y: Any) -> Any:
    return _scatter("scatter", x, key, y)
