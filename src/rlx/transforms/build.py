"""Graph-building helpers for the rules: zeros, iota, axis moves, sums that undo broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.dtypes import I32, I64, DType
from rlx.ir.graph import Graph, Value
from rlx.types import Size, TensorType, product


def full(graph: Graph, value: float, type_: TensorType) -> Value:
    """Fill a type with one number; a view of a scalar, which takes no memory."""
    scalar = graph.constant(value, type_.dtype)
    return graph.one("expand", scalar, shape=type_.shape) if type_.rank else scalar


def zeros(graph: Graph, type_: TensorType) -> Value:
    """Return zeros of a type."""
    return full(graph, 0, type_)


def zeros_like(value: Value) -> Value:
    """Return zeros of the type of a value."""
    return zeros(value.graph, value.type)


def count(graph: Graph, size: Size, dtype: DType) -> Value | int:
    """Return a size as a number; a symbolic size is computed at run time."""
    if isinstance(size, int):
        return size
    return graph.one("sum", full(graph, 1, TensorType((size,), dtype)))


def iota(graph: Graph, size: Size, dtype: DType = I32) -> Value:
    """Return 0, 1, 2, ... as `[size]`."""
    if isinstance(size, int):
        return graph.constant(np.arange(size, dtype=dtype.numpy))
    return graph.one("cumsum", full(graph, 1, TensorType((size,), dtype)), axis=0, exclusive=True)


def eye(graph: Graph, size: Size, dtype: DType) -> Value:
    """Return the identity matrix."""
    if isinstance(size, int):
        return graph.constant(np.eye(size, dtype=dtype.numpy))
    at = iota(graph, size, I64)
    return graph.one("equal", at.reshape(size, 1), at.reshape(1, size)).astype(dtype)


def sum_present(values: Sequence[Value | None]) -> Value | None:
    """Return the sum of the values that are not None; None if there is none."""
    total: Value | None = None
    for value in values:
        if value is not None:
            total = value if total is None else total + value
    return total


def sum_to(value: Value, like: TensorType) -> Value:
    """Undo broadcasting and promotion in a gradient: sum over broadcast axes and cast to the operand's dtype."""
    extra = value.rank - like.rank
    axes = tuple(range(extra))
    axes += tuple(extra + i for i, d in enumerate(like.shape) if d == 1 and value.shape[extra + i] != 1)
    if axes:
        value = value.graph.one("sum", value, axis=axes, keepdims=True)
    if value.shape != like.shape:
        value = value.reshape(like.shape)
    return cast_to(value, like.dtype)


def cast_to(value: Value, dtype: DType) -> Value:
    """Cast a value to a dtype, if it does not have it already."""
    return value if value.dtype is dtype else value.astype(dtype)


def move_axis(value: Value, source: int, target: int) -> Value:
    """Move one axis to another position."""
    if source == target:
        return value
    order = [a for a in range(value.rank) if a != source]
    order.insert(target, source)
    return value.graph.one("transpose", value, axes=tuple(order))


def insert_axes(value: Value, at: int, how_many: int) -> Value:
    """Insert axes of size 1 before axis `at`."""
    if how_many == 0:
        return value
    return value.reshape(*value.shape[:at], *(1,) * how_many, *value.shape[at:])


def keep_axes(value: Value, like: TensorType, axes: Sequence[int]) -> Value:
    """Reshape the result of a reduction of `like` over `axes` so that it broadcasts against the operand."""
    return value.reshape(*(1 if i in axes else d for i, d in enumerate(like.shape)))


def flip(value: Value, axis: int) -> Value:
    """Reverse the order along an axis."""
    size = value.shape[axis]
    graph = value.graph
    at: Any = np.arange(size, dtype=np.int32)[::-1] if isinstance(size, int) else None
    if at is None:
        last: Any = count(graph, size, I32)
        at = last - 1 - iota(graph, size)
    return graph.one("gather", value, at, axis=axis)


def flat_row_indices(indices: Value, size: Size) -> Value:
    """Convert indices [rows, ...] into rows of `size` elements each to indices into the flattened rows.

    An index outside its row stays an error: it becomes -1, not an element of another row.
    """
    graph, length = indices.graph, count(indices.graph, size, I64)
    rows, wide = indices.shape[0], cast_to(indices, I64)
    start = (iota(graph, rows, I64) * length).reshape(rows, *(1,) * (indices.rank - 1))
    inside = graph.one("logical_and", graph.one("greater_equal", wide, 0), graph.one("less", wide, length))
    return graph.one("where", inside, wide + start, -1)


def flat(value: Value, axes: int) -> Value:
    """Merge the first `axes` axes into one."""
    return value.reshape(product(value.shape[:axes]), *value.shape[axes:])


def slice_axis(value: Value, axis: int, start: Size, stop: Size) -> Value:
    """Slice one axis from start to stop."""
    low = tuple(start if a == axis else 0 for a in range(value.rank))
    high = tuple(stop if a == axis else d for a, d in enumerate(value.shape))
    if low == (0,) * value.rank and high == value.shape:
        return value
    return value.graph.one("slice", value, start=low, stop=high, step=(1,) * value.rank)


def declare(graph: Graph, name: str, like: TensorType) -> Value:
    """Declare an input of a type, with a unique name."""
    return graph.input(unique(graph, name), like.shape, like.dtype)


def unique(graph: Graph, name: str) -> str:
    """Return the name, with a number appended if the graph has it already."""
    if not graph.has(name):
        return name
    number = 2
    while graph.has(f"{name}_{number}"):
        number += 1
    return f"{name}_{number}"
