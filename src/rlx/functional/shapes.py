"""Functions that rearrange elements, under NumPy's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rlx.errors import GraphError, ShapeError
from rlx.functional.creation import iota, zeros
from rlx.functional.elementwise import equal, power, where
from rlx.functional.operands import Axis, as_value, asarray, axis_tuple, same_dtype, traced
from rlx.functional.tracers import type_of
from rlx.functional.tracing import apply, eager
from rlx.transforms import build
from rlx.types import Size, as_shape, axis_index, broadcast, product


def reshape(x: Any, *shape: Any) -> Any:
    """Reshape; one size may be -1."""
    return _reshape(x, shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)


@eager
def _reshape(x: Any, shape: Sequence[Any]) -> Any:
    return traced(as_value(x).reshape(tuple(shape)))


def ravel(x: Any) -> Any:
    """Flatten to one axis."""
    return reshape(x, -1)


@eager
def transpose(x: Any, axes: Sequence[int] | int | None = None, *more: int) -> Any:
    """Permute axes, given as a sequence or, as for NumPy's method, one by one; the default reverses them."""
    rank = type_of(x).rank
    order = (axes, *more) if isinstance(axes, int) else axes
    order = tuple(reversed(range(rank))) if order is None else axes_of(tuple(order), rank, "transpose")
    return apply("transpose", x, axes=order)


def swapaxes(x: Any, a: int, b: int) -> Any:
    """Swap two axes."""
    order = list(range(type_of(x).rank))
    order[a], order[b] = order[b], order[a]
    return transpose(x, order)


def moveaxis(x: Any, source: int | Sequence[int], destination: int | Sequence[int]) -> Any:
    """Move axes to other positions."""
    rank = type_of(x).rank
    sources, targets = (axes_of(axis, rank, "moveaxis") for axis in (source, destination))
    if len(sources) != len(targets):
        raise ShapeError(f"moveaxis: {len(sources)} axes go to {len(targets)} positions")
    order = [a for a in range(rank) if a not in sources]
    for target, axis in sorted(zip(targets, sources, strict=True)):
        order.insert(target, axis)
    return transpose(x, order)


def expand_dims(x: Any, axis: int | Sequence[int]) -> Any:
    """Insert axes of size 1."""
    shape = list(type_of(x).shape)
    axes = axis_tuple(axis)
    for a in sorted(a % (len(shape) + len(axes)) for a in axes):
        shape.insert(a, 1)
    return reshape(x, shape)


def squeeze(x: Any, axis: Axis = None) -> Any:
    """Remove axes of size 1."""
    shape = type_of(x).shape
    axes = [i for i, d in enumerate(shape) if d == 1] if axis is None else axes_of(axis, len(shape), "squeeze")
    for a in axes:
        if shape[a] != 1:
            raise ShapeError(f"squeeze: axis {a} of {type_of(x)} has {shape[a]} elements")
    return reshape(x, tuple(d for i, d in enumerate(shape) if i not in axes))


def axes_of(axis: Axis, rank: int, where: str) -> tuple[int, ...]:
    axes = tuple(range(rank)) if axis is None else axis_tuple(axis)
    return tuple(axis_index(a, rank, where) for a in axes)


def broadcast_to(x: Any, shape: Sequence[Any]) -> Any:
    """Broadcast to a shape."""
    return apply("expand", asarray(x), shape=as_shape(shape))


@eager
def concatenate(arrays: Sequence[Any], axis: int = 0) -> Any:
    """Concatenate along an existing axis."""
    return apply("concatenate", *same_dtype(arrays), axis=axis)


@eager
def stack(arrays: Sequence[Any], axis: int = 0) -> Any:
    """Stack along a new axis."""
    rank = type_of(arrays[0]).rank + 1
    at = axis_index(axis, rank, "stack")
    return concatenate([expand_dims(x, at) for x in same_dtype(arrays)], axis=at)


@eager
def split(x: Any, parts: int | Sequence[int], axis: int = 0) -> Any:
    """Split into a list of equal parts, or at indices."""
    size = type_of(x).shape[axis_index(axis, type_of(x).rank, "split")]
    if isinstance(parts, int) and (not isinstance(size, int) or size % parts):
        raise ShapeError(f"split: {size} elements are not {parts} equal parts", hint="array_split allows unequal parts")
    return array_split(x, parts, axis)


@eager
def array_split(x: Any, parts: int | Sequence[int], axis: int = 0) -> Any:
    """Split into a list of parts whose sizes differ by at most one, or at indices."""
    at = axis_index(axis, type_of(x).rank, "array_split")
    size = type_of(x).shape[at]
    if isinstance(parts, int):
        if not isinstance(size, int):
            raise ShapeError(f"array_split: axis {axis} of {type_of(x)} has no static size")
        parts = [size // parts * i + min(i, size % parts) for i in range(1, parts)]
    bounds: list[Any] = [0, *parts, size]
    return [traced(build.slice_axis(as_value(x), at, a, b)) for a, b in pairwise(bounds)]


def hsplit(x: Any, parts: int | Sequence[int]) -> Any:
    """Split along the second axis; a vector along its only one."""
    return split(x, parts, 0 if type_of(x).rank == 1 else 1)


def vsplit(x: Any, parts: int | Sequence[int]) -> Any:
    """Split along the first axis."""
    return split(x, parts, 0)


def dsplit(x: Any, parts: int | Sequence[int]) -> Any:
    """Split along the third axis."""
    return split(x, parts, 2)


@eager
def unstack(x: Any, axis: int = 0) -> Any:
    """Split into a tuple of the slices along an axis, without that axis."""
    at = axis_index(axis, type_of(x).rank, "unstack")
    size = type_of(x).shape[at]
    if not isinstance(size, int):
        raise ShapeError(f"unstack: axis {axis} of {type_of(x)} has no static size")
    return tuple(squeeze(part, at) for part in array_split(x, size, at))


@eager
def pad(x: Any, pad_width: Any, mode: str = "constant", constant_values: float = 0.0) -> Any:
    """Pad each axis: one width for all sides, one (before, after) pair for all axes, or one pair per axis.

    Modes are 'constant', and 'edge', 'reflect', 'symmetric' and 'wrap', which repeat elements.
    """
    rank = type_of(x).rank
    widths = [(pad_width, pad_width)] * rank if isinstance(pad_width, int) else list(pad_width)
    if widths and isinstance(widths[0], int):
        widths = [tuple(widths) if len(widths) == 2 else (widths[0], widths[0])] * rank
    if len(widths) == 1:
        widths = widths * rank
    if mode == "constant":
        low, high = zip(*widths, strict=True) if rank else ((), ())
        return apply("pad", x, low=low, high=high, value=constant_values)
    if mode not in ("edge", "reflect", "symmetric", "wrap"):
        raise GraphError(f"pad: mode is {mode!r}", hint="constant, edge, reflect, symmetric or wrap")
    for axis, width in enumerate(widths):
        size = type_of(x).shape[axis]
        if not isinstance(size, int):
            raise ShapeError(f"pad: axis {axis} of {type_of(x)} has no static size, which {mode!r} needs")
        places = np.pad(np.arange(size, dtype=np.int32), tuple(width), mode)  # type: ignore[call-overload]
        x = apply("gather", x, places, axis=axis) if any(width) else x
    return asarray(x)


@eager
def flip(x: Any, axis: Axis = None) -> Any:
    """Reverse the order along axes."""
    value = as_value(x)
    for a in axes_of(axis, value.rank, "flip"):
        value = build.flip(value, a)
    return traced(value)


@eager
def roll(x: Any, shift: int | Sequence[int], axis: Axis = None) -> Any:
    """Shift elements along axes, wrapping around; without an axis, in the flattened array."""
    if axis is None:
        return reshape(roll(ravel(x), shift, 0), type_of(x).shape)
    axes = axes_of(axis, type_of(x).rank, "roll")
    shifts = (shift,) * len(axes) if isinstance(shift, int) else tuple(shift)
    for at, by in zip(axes, shifts, strict=True):
        x = _rolled(x, by, at)
    return asarray(x)


def _rolled(x: Any, shift: int, at: int) -> Any:
    size = type_of(x).shape[at]
    if not isinstance(size, int):
        raise ShapeError(f"roll: axis {at} of {type_of(x)} has no static size")
    if size == 0 or shift % size == 0:
        return x
    cut = size - shift % size
    value = as_value(x)
    parts = (build.slice_axis(value, at, cut, size), build.slice_axis(value, at, 0, cut))
    return concatenate([traced(part) for part in parts], axis=at)


@eager
def repeat(x: Any, repeats: int, axis: int | None = None) -> Any:
    """Repeat each element along an axis; without an axis, of the flattened array."""
    if axis is None:
        return repeat(ravel(x), repeats, 0)
    at, shape = axis_index(axis, type_of(x).rank, "repeat"), list(type_of(x).shape)
    wide = expand_dims(x, at + 1)
    return reshape(broadcast_to(wide, [*shape[: at + 1], repeats, *shape[at + 1 :]]), [
        d * repeats if i == at else d for i, d in enumerate(shape)])  # fmt: skip


@eager
def tile(x: Any, reps: int | Sequence[int]) -> Any:
    """Repeat the array along each axis; missing axes are added in front."""
    counts = [reps] if isinstance(reps, int) else list(reps)
    rank = type_of(x).rank
    counts = [1] * (rank - len(counts)) + counts
    x = reshape(asarray(x), (*(1,) * (len(counts) - rank), *type_of(x).shape))
    for axis, count in enumerate(counts):
        x = concatenate([x] * count, axis=axis) if count != 1 else x
    return x


# -- joining ----------------------------------------------------------------------------------------------------------
def atleast_1d(*xs: Any) -> Any:
    """Add an axis to scalars."""
    return _at_least(xs, lambda shape: shape or (1,))


def atleast_2d(*xs: Any) -> Any:
    """Add axes in front, up to two."""
    return _at_least(xs, lambda shape: (*(1,) * (2 - len(shape)), *shape))


def atleast_3d(*xs: Any) -> Any:
    """Add axes up to three: a vector becomes [1, n, 1], a matrix [m, n, 1]."""

    def padded(shape: tuple[Size, ...]) -> tuple[Size, ...]:
        return {0: (1, 1, 1), 1: (1, *shape, 1), 2: (*shape, 1)}.get(len(shape), shape)

    return _at_least(xs, padded)


def _at_least(xs: Sequence[Any], padded: Callable[[tuple[Size, ...]], tuple[Size, ...]]) -> Any:
    arrays = [reshape(asarray(x), padded(type_of(x).shape)) for x in xs]
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


@eager
def vstack(arrays: Sequence[Any]) -> Any:
    """Concatenate along the first axis; vectors are rows."""
    return concatenate([atleast_2d(x) for x in same_dtype(arrays)], 0)


@eager
def hstack(arrays: Sequence[Any]) -> Any:
    """Concatenate along the second axis; vectors along their only one."""
    parts = [atleast_1d(x) for x in same_dtype(arrays)]
    return concatenate(parts, 0 if type_of(parts[0]).rank == 1 else 1)


@eager
def dstack(arrays: Sequence[Any]) -> Any:
    """Concatenate along the third axis."""
    return concatenate([atleast_3d(x) for x in same_dtype(arrays)], 2)


@eager
def column_stack(arrays: Sequence[Any]) -> Any:
    """Concatenate along the second axis; vectors are columns."""
    return concatenate([reshape(x, -1, 1) if type_of(x).rank < 2 else x for x in same_dtype(arrays)], 1)


@eager
def append(x: Any, values: Any, axis: int | None = None) -> Any:
    """Concatenate two arrays; without an axis, flattened."""
    if axis is None:
        x, values, axis = ravel(asarray(x)), ravel(asarray(values)), 0
    return concatenate([x, values], axis)


@eager
def block(arrays: Any) -> Any:
    """Assemble an array from nested lists of blocks: the innermost lists are concatenated along the last axis."""

    def depth(x: Any) -> int:
        return 1 + depth(x[0]) if isinstance(x, list) else 0

    def joined(x: Any, level: int) -> Any:
        if not isinstance(x, list):
            return reshape(asarray(x), (*(1,) * (rank - type_of(x).rank), *type_of(x).shape))
        return concatenate([joined(part, level - 1) for part in x], -level)

    def ranks(x: Any) -> int:
        return max(ranks(part) for part in x) if isinstance(x, list) else type_of(x).rank

    levels = depth(arrays)
    rank = max(ranks(arrays), levels)
    return joined(arrays, levels)


def broadcast_arrays(*xs: Any) -> Any:
    """Broadcast arrays to their common shape."""
    shape = broadcast(*(type_of(x).shape for x in xs), where="broadcast_arrays")
    return tuple(broadcast_to(x, shape) for x in xs)


@eager
def meshgrid(*xs: Any, indexing: str = "xy") -> Any:
    """Coordinates of a grid, one array per vector; 'xy' swaps the first two axes."""
    if indexing not in ("xy", "ij"):
        raise GraphError(f"meshgrid: indexing is {indexing!r}, expected 'xy' or 'ij'")
    vectors = [reshape(asarray(x), -1) for x in xs]
    axes = list(range(len(vectors)))
    if indexing == "xy" and len(axes) > 1:
        axes[:2] = [1, 0]
    shape: list[Any] = [1] * len(axes)
    for vector, axis in zip(vectors, axes, strict=True):
        shape[axis] = type_of(vector).shape[0]
    return [
        broadcast_to(reshape(v, [-1 if a == axis else 1 for a in range(len(axes))]), shape)
        for v, axis in zip(vectors, axes, strict=True)
    ]


def matrix_transpose(x: Any) -> Any:
    """Swap the last two axes."""
    return swapaxes(x, -1, -2)


def rollaxis(x: Any, axis: int, start: int = 0) -> Any:
    """Move an axis in front of another one."""
    rank = type_of(x).rank
    at, start = axis_index(axis, rank, "rollaxis"), start + rank if start < 0 else start
    return moveaxis(x, at, start - 1 if at < start else start)


def fliplr(x: Any) -> Any:
    """Reverse the second axis."""
    return flip(x, 1)


def flipud(x: Any) -> Any:
    """Reverse the first axis."""
    return flip(x, 0)


def rot90(x: Any, k: int = 1, axes: Sequence[int] = (0, 1)) -> Any:
    """Rotate by 90° k times, from the first axis towards the second."""
    a, b = axes_of(axes, type_of(x).rank, "rot90")
    match k % 4:
        case 0:
            return asarray(x)
        case 1:
            return swapaxes(flip(x, b), a, b)
        case 2:
            return flip(x, (a, b))
        case _:
            return flip(swapaxes(x, a, b), b)


def shape(x: Any) -> tuple[Any, ...]:
    """Sizes of the axes."""
    return type_of(x).shape


def ndim(x: Any) -> int:
    """Number of axes."""
    return type_of(x).rank


def size(x: Any, axis: Axis = None) -> Any:
    """Number of elements, or the size of an axis."""
    return product(type_of(x).shape[a] for a in axes_of(axis, type_of(x).rank, "size"))


# -- diagonals --------------------------------------------------------------------------------------------------------
@eager
def _triangle(x: Any, k: int, lower: bool) -> Any:
    rows, columns = type_of(x).shape[-2:]
    row, column = expand_dims(iota(rows, "i32"), 1) + k, expand_dims(iota(columns, "i32"), 0)
    keep = column <= row if lower else column >= row
    return where(keep, x, zeros((), type_of(x).dtype))


def tril(x: Any, k: int = 0) -> Any:
    """Lower triangle: zeros above the k-th diagonal."""
    return _triangle(x, k, True)


def triu(x: Any, k: int = 0) -> Any:
    """Upper triangle: zeros below the k-th diagonal."""
    return _triangle(x, k, False)


@eager
def diagonal(x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """The elements with equal indices on two axes, along a new last axis; `offset` shifts the second index."""
    rank = type_of(x).rank
    a, b = axes_of((axis1, axis2), rank, "diagonal")
    x = transpose(asarray(x), [*(i for i in range(rank) if i not in (a, b)), a, b])
    *lead, rows, columns = type_of(x).shape
    if not isinstance(rows, int) or not isinstance(columns, int):
        raise ShapeError(f"diagonal: axes {axis1} and {axis2} of {type_of(x)} have no static size")
    count = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    first = max(offset, 0) + max(-offset, 0) * columns
    places = (first + np.arange(count) * (columns + 1)).astype(np.int32)
    return apply("gather", reshape(x, *lead, rows * columns), places, axis=len(lead))


@eager
def diag(x: Any, k: int = 0) -> Any:
    """The k-th diagonal of a matrix, or the matrix with a vector on its k-th diagonal and zeros elsewhere."""
    x = asarray(x)
    rank = type_of(x).rank
    if rank == 2:
        return diagonal(x, k)
    if rank != 1:
        raise ShapeError(f"diag: takes a vector or a matrix, found {type_of(x)}")
    wide = pad(x, [(max(-k, 0), max(k, 0))])  # [i] is the element of row i where k < 0, else of row i as well
    size = type_of(wide).shape[0]
    row, column = expand_dims(iota(size, "i32"), 1), expand_dims(iota(size, "i32"), 0)
    return where(equal(column, row + k), expand_dims(wide, 1), zeros((), type_of(x).dtype))


def diagflat(x: Any, k: int = 0) -> Any:
    """The matrix with the flattened array on its k-th diagonal."""
    return diag(ravel(asarray(x)), k)


def trace(x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """Sum of a diagonal."""
    return apply("sum", diagonal(x, offset, axis1, axis2), axis=(-1,), keepdims=False)


@eager
def vander(x: Any, n: int | None = None, increasing: bool = False) -> Any:
    """Powers of a vector as columns."""
    x = asarray(x)
    count = type_of(x).shape[0] if n is None else n
    if not isinstance(count, int):
        raise ShapeError(f"vander: {type_of(x)} has no static size", hint="pass n=, the number of columns")
    columns = [power(x, i) for i in range(count)]
    return stack(columns if increasing else columns[::-1], -1)
