"""Small pieces of graphs that rules are written with: zeros, counters, moved axes, sums that undo broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.dtypes import I32, I64, DType
from rlx.ir.graph import Graph, Value
from rlx.types import Size, TensorType, product


def full(graph: Graph, value: float, type_: TensorType) -> Value:
    """One number in every place; it is a view of a scalar and takes no memory."""
    scalar = graph.constant(value, type_.dtype)
    return graph.one("expand", scalar, shape=type_.shape) if type_.rank else scalar


def zeros(graph: Graph, type_: TensorType) -> Value:
    """Zeros of a type."""
    return full(graph, 0, type_)


def zeros_like(value: Value) -> Value:
    """Zeros of the type of a value."""
    return zeros(value.graph, value.type)


def count(graph: Graph, size: Size, dtype: DType) -> Value | int:
    """A size as a number; one that only run time knows is counted there."""
    if isinstance(size, int):
        return size
    return graph.one("sum", full(graph, 1, TensorType((size,), dtype)))


def counter(graph: Graph, size: Size, dtype: DType = I32) -> Value:
    """0, 1, 2, ... `[size]`."""
    if isinstance(size, int):
        return graph.constant(np.arange(size, dtype=dtype.numpy))
    return graph.one("cumsum", full(graph, 1, TensorType((size,), dtype)), axis=0, exclusive=True)


def eye(graph: Graph, size: Size, dtype: DType) -> Value:
    """The unit matrix."""
    if isinstance(size, int):
        return graph.constant(np.eye(size, dtype=dtype.numpy))
    at = counter(graph, size, I64)
    return graph.one("equal", at.reshape(size, 1), at.reshape(1, size)).astype(dtype)


def one_of(values: Sequence[Value | None]) -> Value | None:
    """The sum of what is there, None for nothing."""
    total: Value | None = None
    for value in values:
        if value is not None:
            total = value if total is None else total + value
    return total


def sum_to(value: Value, like: TensorType) -> Value:
    """The gradient of an operand from that of its broadcast and promoted form: added up, and of the operand's type."""
    extra = value.rank - like.rank
    axes = tuple(range(extra))
    axes += tuple(extra + i for i, d in enumerate(like.shape) if d == 1 and value.shape[extra + i] != 1)
    if axes:
        value = value.graph.one("sum", value, axis=axes, keepdims=True)
    if value.shape != like.shape:
        value = value.reshape(like.shape)
    return in_type(value, like.dtype)


def in_type(value: Value, dtype: DType) -> Value:
    """The value in an element type; itself if it has it."""
    return value if value.dtype is dtype else value.astype(dtype)


def move_axis(value: Value, source: int, target: int) -> Value:
    """The value with one axis at another place."""
    if source == target:
        return value
    order = [a for a in range(value.rank) if a != source]
    order.insert(target, source)
    return value.graph.one("transpose", value, axes=tuple(order))


def insert_axes(value: Value, at: int, how_many: int) -> Value:
    """The value with axes of size 1 before axis `at`."""
    if how_many == 0:
        return value
    return value.reshape(*value.shape[:at], *(1,) * how_many, *value.shape[at:])


def keep_axes(value: Value, like: TensorType, axes: Sequence[int]) -> Value:
    """What a reduction of `like` over `axes` gave, with those axes as 1, so that it broadcasts against the operand."""
    return value.reshape(*(1 if i in axes else d for i, d in enumerate(like.shape)))


def flip(value: Value, axis: int) -> Value:
    """The axis from its end to its start."""
    size = value.shape[axis]
    graph = value.graph
    at: Any = np.arange(size, dtype=np.int32)[::-1] if isinstance(size, int) else None
    if at is None:
        last: Any = count(graph, size, I32)
        at = last - 1 - counter(graph, size)
    return graph.one("gather", value, at, axis=axis)


def rows_of(indices: Value, size: Size) -> Value:
    """Indices [rows, ...] into rows of `size` elements each, as indices into all elements laid end to end.

    One outside its row stays an error: it becomes -1, and not an element of another row.
    """
    graph, length = indices.graph, count(indices.graph, size, I64)
    rows, wide = indices.shape[0], in_type(indices, I64)
    start = (counter(graph, rows, I64) * length).reshape(rows, *(1,) * (indices.rank - 1))
    inside = graph.one("logical_and", graph.one("greater_equal", wide, 0), graph.one("less", wide, length))
    return graph.one("where", inside, wide + start, -1)


def flat(value: Value, axes: int) -> Value:
    """The first `axes` axes as one."""
    return value.reshape(product(value.shape[:axes]), *value.shape[axes:])


def taken(value: Value, axis: int, start: Size, stop: Size) -> Value:
    """Elements start to stop of an axis."""
    low = tuple(start if a == axis else 0 for a in range(value.rank))
    high = tuple(stop if a == axis else d for a, d in enumerate(value.shape))
    if low == (0,) * value.rank and high == value.shape:
        return value
    return value.graph.one("slice", value, start=low, stop=high, step=(1,) * value.rank)


def declare(graph: Graph, name: str, like: TensorType) -> Value:
    """An input of a type; its name is made unique."""
    return graph.input(unique(graph, name), like.shape, like.dtype)


def unique(graph: Graph, name: str) -> str:
    """The name, or the name with the first number that makes it new."""
    if not graph.has(name):
        return name
    number = 2
    while graph.has(f"{name}_{number}"):
        number += 1
    return f"{name}_{number}"
