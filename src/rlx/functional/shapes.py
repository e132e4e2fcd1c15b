"""Functions that rearrange elements, under NumPy's names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rlx.errors import GraphError, ShapeError
from rlx.functional.elementwise import (
    iota,
    where,
    zeros,
)
from rlx.functional.operands import Axis, as_value, asarray, axis_tuple, same_dtype, traced
from rlx.functional.tracers import type_of
from rlx.functional.tracing import apply, eager
from rlx.transforms import build
from rlx.types import as_shape, axis_index


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
def transpose(x: Any, axes: Sequence[int] | None = None) -> Any:
    """Permute axes; the default reverses them."""
    rank = type_of(x).rank
    order = tuple(reversed(range(rank))) if axes is None else tuple(a % rank for a in axes)
    return apply("transpose", x, axes=order)


def swapaxes(x: Any, a: int, b: int) -> Any:
    """Swap two axes."""
    order = list(range(type_of(x).rank))
    order[a], order[b] = order[b], order[a]
    return transpose(x, order)


def moveaxis(x: Any, source: int, destination: int) -> Any:
    """Move one axis to another position."""
    rank = type_of(x).rank
    order = [a for a in range(rank) if a != source % rank]
    order.insert(destination % rank, source % rank)
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
    at, size = axis_index(axis, type_of(x).rank, "split"), type_of(x).shape[axis]
    if isinstance(parts, int):
        if not isinstance(size, int) or size % parts:
            raise ShapeError(f"split: {size} elements are not {parts} equal parts")
        parts = [size // parts * i for i in range(1, parts)]
    bounds: list[Any] = [0, *parts, size]
    return [traced(build.slice_axis(as_value(x), at, a, b)) for a, b in pairwise(bounds)]


@eager
def pad(x: Any, pad_width: Any, mode: str = "constant", constant_values: float = 0.0) -> Any:
    """Pad with a constant: one width for all sides, one (before, after) pair for all axes, or one pair per axis."""
    if mode != "constant":
        raise GraphError(f"pad: mode is {mode!r}, rlx has 'constant'")
    rank = type_of(x).rank
    widths = [(pad_width, pad_width)] * rank if isinstance(pad_width, int) else list(pad_width)
    if widths and isinstance(widths[0], int):
        widths = [tuple(widths)] * rank
    if len(widths) == 1:
        widths = widths * rank
    low, high = zip(*widths, strict=True) if rank else ((), ())
    return apply("pad", x, low=low, high=high, value=constant_values)


@eager
def flip(x: Any, axis: Axis = None) -> Any:
    """Reverse the order along axes."""
    value = as_value(x)
    for a in axes_of(axis, value.rank, "flip"):
        value = build.flip(value, a)
    return traced(value)


@eager
def roll(x: Any, shift: int, axis: int) -> Any:
    """Shift elements along an axis, wrapping around."""
    at, size = axis_index(axis, type_of(x).rank, "roll"), type_of(x).shape[axis]
    if not isinstance(size, int):
        raise ShapeError(f"roll: axis {axis} of {type_of(x)} has no static size")
    if size == 0 or shift % size == 0:
        return asarray(x)
    cut = size - shift % size
    value = as_value(x)
    parts = (build.slice_axis(value, at, cut, size), build.slice_axis(value, at, 0, cut))
    return concatenate([traced(part) for part in parts], axis=at)


@eager
def repeat(x: Any, repeats: int, axis: int) -> Any:
    """Repeat each element along an axis."""
    at, shape = axis_index(axis, type_of(x).rank, "repeat"), list(type_of(x).shape)
    wide = expand_dims(x, at + 1)
    return reshape(broadcast_to(wide, [*shape[: at + 1], repeats, *shape[at + 1 :]]), [
        d * repeats if i == at else d for i, d in enumerate(shape)])  # fmt: skip


@eager
def tile(x: Any, reps: Sequence[int]) -> Any:
    """Repeat the array along each axis."""
    for axis, count in enumerate(reps):
        x = concatenate([x] * count, axis=axis)
    return asarray(x)


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
