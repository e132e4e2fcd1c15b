"""Matrix products in which each row chooses its matrix: the experts of a mixture."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from rlx.dtypes import I32, promote
from rlx.dtypes import dtype as dtype_of
from rlx.errors import DTypeError, KernelError, ShapeError
from rlx.ir.graph import Value
from rlx.ir.independence import never
from rlx.ir.registry import CHECKS_DATA, COMPOSED, FUSED, f32, i32, op, sample
from rlx.types import Size, TensorType, require_equal


def check_groups(where: str, index: Any, groups: int) -> None:
    """Raise if an index is not one of the groups."""
    if index.size and (index.min() < 0 or index.max() >= groups):
        raise KernelError(f"{where}: an index lies outside 0:{groups}")


def _check_index(where: str, rows: Size, index: TensorType) -> None:
    if not index.dtype.is_integer:
        raise DTypeError(f"{where}: indices are integers, found {index.dtype}", hint="cast with x.astype('i32')")
    require_equal(rows, index.shape[0], f"{where}: {rows} rows and {index.shape[0]} indices")


def _check_floats(where: str, a: TensorType, b: TensorType) -> None:
    if not (a.dtype.is_float and b.dtype.is_float):
        raise DTypeError(f"{where}: takes floats, found {a.dtype} and {b.dtype}")


def _wide(a: Any, b: Any) -> Any:
    return promote(dtype_of(a.dtype), dtype_of(b.dtype)).wide.numpy


def _grouped_matmul(x: Any, w: Any, index: Any) -> Any:
    common = _wide(x, w)
    check_groups("grouped_matmul", index, w.shape[0])
    result = np.zeros((x.shape[0], w.shape[2]), common)
    for group in np.unique(index):
        rows = index == group
        result[rows] = x[rows].astype(common) @ w[group].astype(common)
    return result


@op(
    "grouped_matmul", independent=never, reference=_grouped_matmul, tolerance=1e-5, traits=[CHECKS_DATA],
    samples=[
        sample(f32(5, 4), f32(3, 4, 6), i32(5, low=0, high=3)),
        sample(f32(9, 65), f32(4, 65, 130), i32(9, low=0, high=4)),
        sample(f32(1, 33), f32(1, 33, 7), i32(1, low=0, high=1)),
        sample(f32(3, 0), f32(2, 0, 5), i32(3, low=0, high=2)),
    ],
)  # fmt: skip
def grouped_matmul(x: TensorType, w: TensorType, index: TensorType) -> TensorType:
    """Row i of `x` times the matrix `w[index[i]]`; other matrices are not read.

    `x` is [rows, k], `w` is [groups, k, n], `index` is [rows]; an index outside the groups is an error at run time.
    Consecutive rows with the same index share one read of their matrix, so many rows are fastest in the order of
    `group_rows`.
    """
    if x.rank != 2 or w.rank != 3 or index.rank != 1:
        raise ShapeError(f"grouped_matmul: takes [rows, k], [groups, k, n] and [rows], found {x}, {w} and {index}")
    _check_floats("grouped_matmul", x, w)
    require_equal(x.shape[1], w.shape[1], f"grouped_matmul: inner sizes differ, {x.shape[1]} and {w.shape[1]}")
    _check_index("grouped_matmul", x.shape[0], index)
    return TensorType((x.shape[0], w.shape[2]), promote(x.dtype, w.dtype))


def _group_rows(index: Any, *, groups: int) -> Any:
    check_groups("group_rows", index, groups)
    order = np.argsort(index, kind="stable").astype(np.int32)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    offsets = np.searchsorted(index[order], np.arange(groups + 1))
    return order, place, offsets.astype(np.int32)


@op(
    "group_rows", independent=never, reference=_group_rows, traits=[CHECKS_DATA],
    samples=[
        sample(i32(9, low=0, high=4), groups=4), sample(i32(130, low=0, high=3), groups=7),
        sample(i32(1, low=0, high=1), groups=1), sample(i32(0, low=0, high=1), groups=2),
    ],
)  # fmt: skip
def group_rows(index: TensorType, *, groups: Size) -> tuple[TensorType, TensorType, TensorType]:
    """Sorts rows by group: the order of rows, its inverse, and the offset of each group.

    The first result says which row comes at each place, group by group, stable within a group. The second one is its
    inverse. Rows of group g are at places `offsets[g]` to `offsets[g + 1]`, the third result. An index outside the
    groups is an error at run time.
    """
    if index.rank != 1:
        raise ShapeError(f"group_rows: takes one index a row, found {index}")
    _check_index("group_rows", index.shape[0], index)
    rows = TensorType(index.shape, I32)
    return rows, rows, TensorType((groups + 1,), I32)


def _grouped_outer(x: Any, y: Any, index: Any, *, groups: int) -> Any:
    common = _wide(x, y)
    check_groups("grouped_outer", index, groups)
    result = np.zeros((groups, x.shape[1], y.shape[1]), common)
    for group in np.unique(index):
        rows = index == group
        result[group] = x[rows].astype(common).T @ y[rows].astype(common)
    return result


def _decompose_grouped_outer(x: Value, y: Value, index: Value, *, groups: Size) -> Value:
    order, _, offsets = index.group_rows(groups=groups)
    type_ = promote(x.dtype, y.dtype)
    left, right = (v.astype(type_.wide) if v.dtype is not type_.wide else v for v in (x, y))
    product = x.graph.one("outer_of_runs", left.gather(order).mT, right.gather(order), offsets)
    return product if type_ is type_.wide else product.astype(type_)


@op(
    "grouped_outer", independent=never,
    reference=_grouped_outer, decompose=_decompose_grouped_outer, traits=[COMPOSED], tolerance=1e-5,
    samples=[
        sample(f32(5, 4), f32(5, 6), i32(5, low=0, high=3), groups=3),
        sample(f32(19, 65), f32(19, 130), i32(19, low=0, high=4), groups=6),
        sample(f32(1, 33), f32(1, 7), i32(1, low=0, high=1), groups=1),
    ],
)  # fmt: skip
def grouped_outer(x: TensorType, y: TensorType, index: TensorType, *, groups: Size) -> TensorType:
    """Per group, the sum of the outer products of its rows, xᵀ y: the gradient of the matrices of `grouped_matmul`.

    `x` is [rows, k], `y` is [rows, n], `index` is [rows]; the result is [groups, k, n], zeros for a group without rows.
    Each row is multiplied once. An index outside the groups is an error at run time.
    """
    if x.rank != 2 or y.rank != 2 or index.rank != 1:
        raise ShapeError(f"grouped_outer: takes [rows, k], [rows, n] and [rows], found {x}, {y} and {index}")
    _check_floats("grouped_outer", x, y)
    require_equal(x.shape[0], y.shape[0], f"grouped_outer: {x.shape[0]} rows and {y.shape[0]} rows")
    _check_index("grouped_outer", x.shape[0], index)
    return TensorType((groups, x.shape[1], y.shape[1]), promote(x.dtype, y.dtype))


def _outer_of_runs(x: Any, y: Any, offsets: Any) -> Any:
    pieces = [x[:, a:b] @ y[a:b] for a, b in pairwise(offsets)]
    return np.stack(pieces) if pieces else np.zeros((0, x.shape[0], y.shape[1]), x.dtype)


@op("outer_of_runs", independent=never, reference=_outer_of_runs, traits=[FUSED])
def outer_of_runs(x: TensorType, y: TensorType, offsets: TensorType) -> TensorType:
    """x[:, s:e] @ y[s:e] from each offset to the next: [k, rows] and [rows, n] give [offsets - 1, k, n]."""
    return TensorType((offsets.shape[0] - 1, x.shape[0], y.shape[1]), x.dtype)
