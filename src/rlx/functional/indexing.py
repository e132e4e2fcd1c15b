"""Indexing, indexed updates, dynamic slices and sorting: x[key], x.at[key], take, dynamic_slice, sort, one_hot."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.dtypes import dtype
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.functional.absent_keywords import without
from rlx.functional.creation import iota, zeros
from rlx.functional.elementwise import (
    equal,
    greater_equal,
    less,
    logical_and,
    logical_or,
    maximum,
    minimum,
    negative,
    not_equal,
    where,
)
from rlx.functional.operands import as_value, asarray, astype, traced
from rlx.functional.shapes import broadcast_to, expand_dims, flip, moveaxis, ravel, reshape, roll, transpose
from rlx.functional.tracers import Traced, current, traces, type_of
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


def _index_hint(is_mask: bool) -> str:
    return "use rlx.where for masks" if is_mask else "cast them: i.astype('i32')"


def _from_start(indices: Any, size: Size) -> Any:
    if not isinstance(indices, Traced) and current() is not None:
        array = np.asarray(indices)
        if array.dtype.kind not in "iu":
            raise DTypeError(
                f"index: indices are integers, found {array.dtype}", hint=_index_hint(array.dtype.kind == "b")
            )
        if not (array < 0).any():
            return array.astype(np.int32)
    indices = asarray(indices)
    if not type_of(indices).dtype.is_integer:
        hint = _index_hint(type_of(indices).dtype.is_bool)
        raise DTypeError(f"index: indices are integers, found {type_of(indices)}", hint=hint)
    trace = current()
    assert trace is not None
    count: Any = build.count(trace.graph, size, type_of(indices).dtype)
    shifted = indices + (traced(count) if not isinstance(count, int) else count)
    below = logical_and(less(indices, 0), greater_equal(shifted, 0))  # an index out of range is reported as it is
    return where(below, shifted, indices)


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
    # The largest first, from the end, and all of that reversed: the first of equals comes first, NaN last.
    values, order = apply("topk", flip(moveaxis(x, at, -1), -1), k=size)
    values, order = flip(values, -1), (size - 1) - flip(order, -1)
    return moveaxis(values, -1, at), moveaxis(order, -1, at)


def topk(x: Any, k: int) -> Any:
    """The k largest along the last axis, largest first, and their indices."""
    return apply("topk", asarray(x), k=k)


@eager
def index(x: Any, key: Any) -> Any:
    """x[key]: integers, slices with any step, None, Ellipsis, and arrays of integers.

    A slice may start at a traced index if its length is static, as in `x[i:i + 2]`; it must lie inside the array.
    """
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
        hint = f"x[{int(k)}]" if isinstance(k, (float, np.floating)) and k == int(k) else None
        raise GraphError(f"index: {k!r} is neither an integer, a slice nor an array", hint=hint) from None


def _sliced(value: Any, axis: int, k: slice) -> Any:
    size = value.shape[axis]
    if isinstance(k.start, Traced) or isinstance(k.stop, Traced):
        return _sliced_by_data(value, axis, k)
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


def _sliced_by_data(value: Any, axis: int, k: slice) -> Any:
    """Slice by a traced index: the distance of `stop` from `start` is static, as in `x[2 * i:2 * i + 2]`."""
    start = 0 if k.start is None else k.start
    stop = value.shape[axis] if k.stop is None else k.stop
    length = _static_distance(start, stop)
    named = ((k.start, "i"), (k.stop, "j" if length is None else f"i{length:+}"))
    shown = ":".join("" if b is None else name if isinstance(b, Traced) else str(b) for b, name in named)
    if length is None or k.step not in (None, 1):
        hint = "x[i:i + n] with a static n, or rlx.dynamic_slice(x, starts, sizes); rlx.where masks by data"
        raise ShapeError(f"index: the length of [{shown}] is not known while it is traced", hint=hint)
    if length < 0:
        raise ShapeError(f"index: [{shown}] ends {-length} before it starts")
    rows = asarray(start) + iota(length, type_of(start).dtype)
    return as_value(apply("gather", traced(value), rows, axis=axis))


def _static_distance(start: Any, stop: Any) -> int | None:
    """Return stop - start if it is the same for all values of the traced numbers in them."""
    if not isinstance(stop, (int, Traced)) or not isinstance(start, (int, Traced)):
        return None
    terms: dict[Any, int] = {}
    for bound, sign in ((stop, 1), (start, -1)):
        for term, factor in _linear_terms(bound.value if isinstance(bound, Traced) else bound).items():
            terms[term] = terms.get(term, 0) + sign * factor
    constant = terms.pop(None, 0)
    return None if builtins.any(terms.values()) else constant


def _linear_terms(value: Any) -> dict[Any, int]:
    """Return an integer as a sum: factors of values, and the constant under None."""
    if isinstance(value, int):
        return {None: value}
    node = value.node
    if node.op == "const" and value.dtype.is_integer and node.attrs["value"].data.size == 1:
        return {None: int(node.attrs["value"].data.item())}
    if node.op == "input":  # captured from an enclosing trace?
        outer = [t.value for trace in traces() for t, v in trace.captured.items() if v is value]
        return _linear_terms(outer[0]) if outer else {value: 1}
    parts = [_linear_terms(o) for o in node.operands] if node.op in ("add", "sub", "mul", "neg", "cast") else []
    match node.op:
        case "cast" if node.operands[0].dtype.is_integer:
            return parts[0]
        case "neg":
            return {t: -f for t, f in parts[0].items()}
        case "add" | "sub":
            sign = 1 if node.op == "add" else -1
            return {t: parts[0].get(t, 0) + sign * parts[1].get(t, 0) for t in (*parts[0], *parts[1])}
        case "mul" if builtins.any(set(p) <= {None} for p in parts):
            constant, other = parts if set(parts[0]) <= {None} else reversed(parts)
            return {t: constant.get(None, 0) * f for t, f in other.items()}
    return {value: 1}


def _start_per_axis(name: str, x: Any, offsets: Any, sizes: Sequence[Any]) -> list[Any]:
    """Return a start per axis, moved so that the slice lies inside x; negative ones count from the end."""
    rank = type_of(x).rank
    if not isinstance(offsets, (tuple, list)):
        is_number = type_of(offsets).rank == 0
        offsets = [offsets] if is_number else [offsets[i] for i in range(len(offsets))]
    if len(offsets) != rank or len(sizes) != rank:
        raise ShapeError(f"{name}: {len(offsets)} starts and {len(sizes)} sizes for {type_of(x)}", hint="one per axis")
    moved = []
    for start, size, have in zip(offsets, sizes, type_of(x).shape, strict=True):
        if not isinstance(have, int) or not isinstance(size, int):
            raise ShapeError(f"{name}: sizes of {type_of(x)} are not all static")
        if not 0 <= size <= have:
            raise ShapeError(f"{name}: size {size} does not fit an axis of size {have}")
        if not type_of(start).dtype.is_integer:
            raise DTypeError(f"{name}: starts are integers, found {type_of(start)}")
        start = asarray(start)
        moved.append(minimum(maximum(where(less(start, 0), start + have, start), 0), have - size))
    return moved


@eager
def dynamic_slice(x: Any, start_indices: Any, slice_sizes: Sequence[int]) -> Any:
    """x[start:start + size] on each axis, for starts that may be traced; a slice that sticks out is moved inside."""
    sizes = [slice_sizes] if isinstance(slice_sizes, int) else list(slice_sizes)
    x = asarray(x)
    for axis, (start, size) in enumerate(
        zip(_start_per_axis("dynamic_slice", x, start_indices, sizes), sizes, strict=True)
    ):
        if size != type_of(x).shape[axis]:
            x = apply("gather", x, start + iota(size, type_of(start).dtype), axis=axis)
    return x


@eager
def dynamic_update_slice(x: Any, update: Any, start_indices: Any) -> Any:
    """x with a block replaced by `update`, at starts that may be traced; a block that sticks out is moved inside."""
    sizes = type_of(update).shape
    offsets = _start_per_axis("dynamic_update_slice", x, start_indices, sizes)
    rank = len(sizes)
    keys = [
        reshape(start + iota(size, type_of(start).dtype), [size if a == axis else 1 for a in range(rank)])
        for axis, (start, size) in enumerate(zip(offsets, sizes, strict=True))
    ]
    return _at_set(x, tuple(keys), update) if rank else astype(update, type_of(x).dtype)


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


_NO_MODE = (
    "an index out of range is an error: np.clip(i, 0, n - 1) keeps it in range, rlx.where(mask, y, x) drops updates"
)
_update = without(
    mode=_NO_MODE, fill_value=_NO_MODE, unique_indices="leave it out: indices may repeat",
    indices_are_sorted="leave it out: indices need no order", wrap_negative_indices="leave it out: -1 is the last one",
)  # fmt: skip


class At:
    """Indexed updates: `x.at[key].set(y)`, `.add(y)`, `.max(y)` and others return an updated copy, `.get()` reads."""

    def __init__(self, x: Any, key: Any = None) -> None:
        self.x, self.key = x, key

    def __getitem__(self, key: Any) -> At:
        return At(self.x, key)

    def __repr__(self) -> str:
        return f"<updates of {type_of(self.x)}: .at[key].set(y), .add, .subtract, .multiply, .divide, .max, .min>"

    @_update
    def get(self) -> Any:
        """x[key]."""
        return index(self.x, self.key)

    @_update
    def set(self, y: Any) -> Any:
        """Return x with the selected elements replaced; for repeated indices the last one wins."""
        return _at_set(self.x, self.key, y)

    @_update
    def add(self, y: Any) -> Any:
        """Return x with y added to the selected elements; repeated indices accumulate, here and below."""
        return _at_add(self.x, self.key, y)

    @_update
    def subtract(self, y: Any) -> Any:
        """Return x with y subtracted from the selected elements."""
        return _at_add(self.x, self.key, negative(y))

    @_update
    def multiply(self, y: Any) -> Any:
        """Return x with the selected elements multiplied by y."""
        return _at_multiply(self.x, self.key, y)

    mul = multiply  # both are JAX's names

    @_update
    def divide(self, y: Any) -> Any:
        """Return x with the selected elements divided by y."""
        return _at_divide(self.x, self.key, y)

    @_update
    def max(self, y: Any) -> Any:
        """Return x with the selected elements replaced by their maximum with y."""
        return _at_extreme(self.x, self.key, y, True)

    @_update
    def min(self, y: Any) -> Any:
        """Return x with the selected elements replaced by their minimum with y."""
        return _at_extreme(self.x, self.key, y, False)

    @_update
    def power(self, y: Any) -> Any:
        """Return x with the selected elements raised to the power y; indices must not repeat."""
        return self.set(self.get() ** y)

    @_update
    def apply(self, function: Any) -> Any:
        """Return x with a function applied to the selected elements; indices must not repeat."""
        return self.set(function(self.get()))


def at(x: Any) -> At:
    """Indexed updates of an array: `rlx.at(x)[key].set(y)` returns an updated copy."""
    return At(x)


@eager
def _places(x: Any, key: Any) -> Any:
    """Return the flat indices (C order) of the elements of x[key]."""
    shape = type_of(x).shape
    return index(reshape(iota(product(shape), "i32"), shape), key)


def _scatter(op: str, x: Any, key: Any, y: Any) -> Any:
    flat, places, updates = _flat_updates(x, key, y)
    return reshape(apply(op, flat, places, updates), type_of(x).shape)


@eager
def _at_add(x: Any, key: Any, y: Any) -> Any:
    return _scatter("scatter_add", x, key, y)


@eager
def _at_set(x: Any, key: Any, y: Any) -> Any:
    return _scatter("scatter", x, key, y)


def _may_repeat(key: Any) -> bool:
    """Whether a key can select an element twice: only arrays of indices can."""
    keys = key if isinstance(key, tuple) else (key,)
    return builtins.any(_is_data(k) and not (isinstance(k, Traced) and k.ndim == 0) for k in keys)


def _flat_updates(x: Any, key: Any, y: Any) -> tuple[Any, Any, Any]:
    """Return x, the selected places and the updates as flat arrays."""
    places, y = _places(x, key), _of_dtype(x, y)
    shape = type_of(places).shape
    try:
        updates = broadcast_to(y, shape)
    except ShapeError:
        selected = type_of(x).with_shape(*shape)
        raise ShapeError(f"at[...]: an update of {type_of(y)} does not broadcast to the selected {selected}") from None
    return ravel(x), ravel(places), ravel(updates)


def _of_dtype(x: Any, y: Any) -> Any:
    """Return updates y with the dtype of x; raises if that would cut off fractions."""
    if type_of(y).dtype.is_float and not type_of(x).dtype.is_float:
        hint = "x.astype('f32') first, or integer updates"
        raise DTypeError(f"at[...]: an update of {type_of(y)} does not fit {type_of(x)}", hint=hint)
    return astype(asarray(y), type_of(x).dtype)


@eager
def _at_extreme(x: Any, key: Any, y: Any, largest: bool) -> Any:
    combine = maximum if largest else minimum
    if not _may_repeat(key):
        return _at_set(x, key, combine(index(x, key), _of_dtype(x, y)))
    flat, places, updates = _flat_updates(x, key, y)
    order = argsort(updates if largest else negative(updates))  # of equal places, scatter writes the last
    places, updates = take(places, order), take(updates, order)
    return reshape(apply("scatter", flat, places, combine(take(flat, places), updates)), type_of(x).shape)


@eager
def _at_multiply(x: Any, key: Any, y: Any) -> Any:
    if not _may_repeat(key):
        return _at_set(x, key, index(x, key) * _of_dtype(x, y))
    flat, places, product_ = _products(x, key, y)
    return reshape(apply("scatter", flat, places, take(flat, places) * product_), type_of(x).shape)


@eager
def _at_divide(x: Any, key: Any, y: Any) -> Any:
    if not type_of(x).dtype.is_float:
        raise DTypeError(f"at: divide takes floats, found {type_of(x)}", hint="cast with x.astype('f32')")
    if not _may_repeat(key):
        return _at_set(x, key, index(x, key) / _of_dtype(x, y))
    flat, places, product_ = _products(x, key, y)
    return reshape(apply("scatter", flat, places, take(flat, places) / product_), type_of(x).shape)


def _products(x: Any, key: Any, y: Any) -> tuple[Any, Any, Any]:
    """Return x, the selected places in order, and the product of the updates so far at each of them."""
    from rlx.functional.control import associative_scan  # control flow is built on arrays

    flat, places, updates = _flat_updates(x, key, y)
    order = argsort(places)
    places, updates = take(places, order), take(updates, order)
    first = not_equal(places, roll(places, 1, 0))

    def combine(a: Any, b: Any) -> Any:
        return where(b[1], b[0], a[0] * b[0]), logical_or(a[1], b[1])

    return flat, places, associative_scan(combine, (updates, first))[0]
