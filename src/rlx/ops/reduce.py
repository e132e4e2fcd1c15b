"""Reductions, cumulative sums, largest elements. Axes may be negative; `keepdims` leaves size-1 axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.dtypes import BOOL, I32
from rlx.errors import BindError, DTypeError, ShapeError
from rlx.ir.graph import Node
from rlx.ir.independence import batched_types, never
from rlx.ir.registry import CHECKS_SIZES, f32, i32, op, sample
from rlx.types import Size, TensorType, axis_index

Axes = int | tuple[int, ...] | None


def normal_axes(axis: Axes, rank: int, where: str) -> tuple[int, ...]:
    """Sorted, non-negative axes; None means all."""
    axes = tuple(range(rank)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    normal = sorted(axis_index(a, rank, where) for a in axes)
    if len(set(normal)) != len(normal):
        raise ShapeError(f"{where}: axis given twice in {axes}")
    return tuple(normal)


def _reduced_shape(x: TensorType, axis: Axes, keepdims: bool, where: str) -> tuple[Size, ...]:
    axes = normal_axes(axis, x.rank, where)
    return tuple(1 if i in axes else d for i, d in enumerate(x.shape) if keepdims or i not in axes)


_SAMPLES = [
    sample(f32(4, 5), axis=-1), sample(f32(4, 5, 33), axis=1), sample(f32(3, 65)), sample(f32(2, 3, 4, 5), axis=(0, 2)),
    sample(f32(4, 130), axis=1, keepdims=True), sample(i32(4, 5), axis=0), sample(f32(3, 5), axis=()),
    sample(f32()),
]  # fmt: skip
_FLOATS = [s for s in _SAMPLES if s.operands[0] is not None and s.operands[0].dtype == "f32"]


def _number(x: TensorType, where: str) -> None:
    if x.dtype.is_bool:
        raise DTypeError(f"{where}: takes numbers, found {x.dtype}", hint="cast with x.astype('i32')")


def _wide(x: Any) -> Any:
    return x.astype(np.float64) if x.dtype == np.float32 else x


def _sum(x: Any, *, axis: Axes, keepdims: bool) -> Any:
    return np.sum(_wide(x), axis=axis, keepdims=keepdims).astype(x.dtype)


def _reduces_others(node: Node, batched: Sequence[bool]) -> bool:
    (x,) = batched_types(node, batched)
    return 0 not in normal_axes(node.attrs["axis"], x.rank, node.op)


@op("sum", independent=_reduces_others, reference=_sum, samples=_SAMPLES)
def sum_(x: TensorType, *, axis: Axes = None, keepdims: bool = False) -> TensorType:
    """Sum over axes, in the element type of `x`."""
    _number(x, "sum")
    return x.with_shape(*_reduced_shape(x, axis, keepdims, "sum"))


def _prod(x: Any, *, axis: Axes, keepdims: bool) -> Any:
    return np.prod(_wide(x), axis=axis, keepdims=keepdims).astype(x.dtype)


@op("prod", independent=_reduces_others, reference=_prod, samples=_SAMPLES)
def prod(x: TensorType, *, axis: Axes = None, keepdims: bool = False) -> TensorType:
    """Product over axes."""
    _number(x, "prod")
    return x.with_shape(*_reduced_shape(x, axis, keepdims, "prod"))


def _mean(x: Any, *, axis: Axes, keepdims: bool) -> Any:
    total = np.sum(_wide(x), axis=axis, keepdims=keepdims)
    count = math.prod(x.shape[a] for a in normal_axes(axis, x.ndim, "mean"))
    return (total / np.float64(count)).astype(x.dtype)


@op("mean", independent=_reduces_others, reference=_mean, samples=_FLOATS)
def mean(x: TensorType, *, axis: Axes = None, keepdims: bool = False) -> TensorType:
    """Mean over axes, of floats; NaN over an empty axis."""
    if not x.dtype.is_float:
        raise DTypeError(f"mean: takes floats, found {x.dtype}", hint="cast with x.astype('f32')")
    return x.with_shape(*_reduced_shape(x, axis, keepdims, "mean"))


def _extreme(x: TensorType, axis: Axes, keepdims: bool, where: str) -> TensorType:
    _number(x, where)
    if any(x.shape[a] == 0 for a in normal_axes(axis, x.rank, where)):
        raise ShapeError(f"{where}: axis of size 0 in {x} has no {where}")
    return x.with_shape(*_reduced_shape(x, axis, keepdims, where))


def _smallest(dtype: np.dtype[Any]) -> Any:
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def _largest(dtype: np.dtype[Any]) -> Any:
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.inf


def _max(x: Any, *, axis: Axes, keepdims: bool) -> Any:
    return np.max(x, axis=axis, keepdims=keepdims, initial=_smallest(x.dtype))


def _min(x: Any, *, axis: Axes, keepdims: bool) -> Any:
    return np.min(x, axis=axis, keepdims=keepdims, initial=_largest(x.dtype))


@op("max", independent=_reduces_others, reference=_max, samples=_SAMPLES)
def max_(x: TensorType, *, axis: Axes = None, keepdims: bool = False) -> TensorType:
    """Largest element over axes; NaN if there is one.

    Over an axis that is empty at run time it is the smallest number of the type.
    """
    return _extreme(x, axis, keepdims, "max")


@op("min", independent=_reduces_others, reference=_min, samples=_SAMPLES)
def min_(x: TensorType, *, axis: Axes = None, keepdims: bool = False) -> TensorType:
    """Smallest element over axes; NaN if there is one.

    Over an axis that is empty at run time it is the largest number of the type.
    """
    return _extreme(x, axis, keepdims, "min")


def _argmax(x: Any, *, axis: int, keepdims: bool) -> Any:
    if x.shape[axis] == 0:
        return np.zeros_like(_sum(x, axis=axis, keepdims=keepdims), np.int32)
    return np.argmax(x, axis=axis, keepdims=keepdims).astype(np.int32)


@op(
    "argmax",
    independent=never,
    reference=_argmax,
    samples=[sample(f32(4, 65)), sample(f32(4, 5, 6), axis=1), sample(i32(4, 50), keepdims=True)],
)
def argmax(x: TensorType, *, axis: int = -1, keepdims: bool = False) -> TensorType:
    """Index of the largest element along an axis, as i32; the first of equals; a NaN counts as largest.

    Along an axis that is empty at run time it is 0.
    """
    if x.dtype is BOOL:
        raise DTypeError("argmax: takes numbers, found bool")
    return _extreme(x, axis, keepdims, "argmax").with_dtype(I32)


def _topk(x: Any, *, k: int) -> Any:
    if k > x.shape[-1]:
        raise BindError(f"topk: k is {k}, the last axis has {x.shape[-1]} elements")
    # A stable sort of the reversed order puts the first of ties first; NaN counts as largest.
    if x.dtype.kind in "iu":
        keys: tuple[Any, ...] = (~x.astype(np.int64),)  # unlike -x it cannot overflow
    else:
        keys = (np.where(np.isnan(x), 0, -x), ~np.isnan(x))
    order = np.lexsort(keys, axis=-1)[..., :k]
    return np.take_along_axis(x, order, -1), order.astype(np.int32)


@op(
    "topk",
    independent=never,
    reference=_topk,
    traits=[CHECKS_SIZES],
    samples=[sample(f32(3, 20), k=5), sample(f32(65), k=1), sample(i32(2, 3, 40), k=40)],
)
def topk(x: TensorType, *, k: int) -> tuple[TensorType, TensorType]:
    """The `k` largest along the last axis, largest first, and their indices as i32; the first of equals comes first."""
    if x.rank == 0:
        raise ShapeError("topk: needs an axis, found a scalar")
    last = x.shape[-1]
    if k < 1 or (isinstance(last, int) and k > last):
        raise ShapeError(f"topk: k is {k}, the last axis has {last} elements")
    _number(x, "topk")
    values = x.with_shape(*x.shape[:-1], k)
    return values, values.with_dtype(I32)


def _cumsum(x: Any, *, axis: int, exclusive: bool) -> Any:
    total = np.cumsum(x, axis=axis, dtype=x.dtype)
    if not exclusive:
        return total
    shifted = np.roll(total, 1, axis=axis)
    shifted[tuple(slice(0, 1) if i == axis % x.ndim else slice(None) for i in range(x.ndim))] = 0
    return shifted


@op(
    "cumsum",
    independent=never,
    reference=_cumsum,
    tolerance=5e-6,
    samples=[
        sample(f32(4, 65)),
        sample(f32(4, 5, 6), axis=1),
        sample(i32(7, 3), axis=0, exclusive=True),
        sample(f32(130)),
    ],
)
def cumsum(x: TensorType, *, axis: int = -1, exclusive: bool = False) -> TensorType:
    """Cumulative sum along an axis; `exclusive` leaves out the element itself. Summed in index order."""
    _number(x, "cumsum")
    axis_index(axis, x.rank, "cumsum")
    return x
