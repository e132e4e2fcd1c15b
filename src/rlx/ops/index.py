"""Ops that read or write at indices: gather rows of a table, add rows to one, write rows into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.dtypes import F32
from rlx.errors import DTypeError, KernelError, ShapeError
from rlx.ir.graph import Node
from rlx.ir.independence import never
from rlx.ir.registry import CHECKS_DATA, TAKES_PACKED, boolean, f32, i32, op, sample
from rlx.ops.quant import unpack_blocks
from rlx.types import TensorType, axis_index, require_equal


def _check_range(where: str, indices: Any, size: int) -> None:
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        raise KernelError(f"{where}: an index lies outside 0:{size}")


def _gather(table: Any, indices: Any, *, axis: int) -> Any:
    at = axis % table.ndim
    shape = (*table.shape[:at], *indices.shape, *table.shape[at + 1 :])
    if 0 in shape:  # nothing is looked up, whatever the indices
        empty = np.empty(shape, table.dtype)
        return unpack_blocks(empty) if table.dtype.names else empty
    _check_range("gather", indices, table.shape[axis])
    rows = np.take(table, indices, axis=axis)
    return unpack_blocks(rows) if table.dtype.names else rows


def _integers(where: str, indices: TensorType) -> None:
    if not indices.dtype.is_integer:
        raise DTypeError(f"{where}: indices are integers, found {indices.dtype}", hint="cast with x.astype('i32')")


def _rows_of_a_table(node: Node, batched: Sequence[bool]) -> bool:
    """Whether each entry reads a shared table."""
    return not batched[0] and node.attrs["axis"] == 0


@op(
    "gather", independent=_rows_of_a_table, reference=_gather,
    samples=[
        sample(f32(7, 5), i32(4, low=0, high=7)), sample(f32(7, 65), i32(2, 3, low=0, high=7)),
        sample(f32(3, 7, 5), i32(4, low=0, high=7), axis=1), sample(f32(3, 70), i32(2, 2, low=0, high=70), axis=-1),
        sample(i32(7, 3), i32(low=0, high=7)), sample(boolean(5, 33), i32(4, low=0, high=5)),
    ],
    traits=[TAKES_PACKED, CHECKS_DATA],
)  # fmt: skip
def gather(table: TensorType, indices: TensorType, *, axis: int = 0) -> TensorType:
    """Slices of `table` along an axis, one per index, like `np.take`. An index outside it is an error at run time.

    From a packed table only rows can be taken (axis 0 of two); they are returned as f32.
    """
    _integers("gather", indices)
    at = axis_index(axis, table.rank, "gather")
    if table.dtype.is_packed:
        if at != 0 or table.rank != 2:
            raise ShapeError(f"gather: takes rows of a packed matrix, found {table} and axis {axis}")
        return TensorType((*indices.shape, table.shape[1]), F32)
    return table.with_shape(*table.shape[:at], *indices.shape, *table.shape[at + 1 :])


def _scatter_add(x: Any, indices: Any, updates: Any) -> Any:
    if updates.size == 0:
        return x.copy()
    _check_range("scatter_add", indices, x.shape[0])
    result = x.copy()
    np.add.at(result, indices, updates.astype(x.dtype))
    return result


@op(
    "scatter_add", independent=never, reference=_scatter_add, tolerance=5e-6, traits=[CHECKS_DATA],
    samples=[
        sample(f32(7, 5), i32(4, low=0, high=7), f32(4, 5)), sample(f32(3, 65), i32(20, low=0, high=3), f32(20, 65)),
        sample(f32(6), i32(9, low=0, high=6), f32(9)), sample(i32(5, 3), i32(2, 4, low=0, high=5), i32(2, 4, 3)),
    ],
)  # fmt: skip
def scatter_add(x: TensorType, indices: TensorType, updates: TensorType) -> TensorType:
    """`x` with row `updates[i]` added to row `indices[i]` of its first axis; equal indices accumulate, in order.

    Takes numbers, as `add` does.
    """
    if x.dtype.is_bool:
        hint = "cast with x.astype('i32'), or write rows with scatter"
        raise DTypeError("scatter_add: takes numbers, found bool", hint=hint)
    return _scatter_type("scatter_add", x, indices, updates)


def _scatter(x: Any, indices: Any, updates: Any) -> Any:
    result = x.copy()
    if updates.size == 0:
        return result
    _check_range("scatter", indices, x.shape[0])
    rows = updates.reshape(indices.size, *x.shape[1:])
    for at, row in zip(indices.reshape(-1), rows, strict=True):  # in order: of equal indices the last wins
        result[at] = row
    return result


@op(
    "scatter", independent=never, reference=_scatter, traits=[CHECKS_DATA],
    samples=[
        sample(f32(7, 5), i32(4, low=0, high=7), f32(4, 5)), sample(f32(3, 65), i32(20, low=0, high=3), f32(20, 65)),
        sample(f32(6), i32(9, low=0, high=6), f32(9)), sample(i32(5, 3), i32(2, 4, low=0, high=5), i32(2, 4, 3)),
        sample(boolean(5, 3), i32(2, low=0, high=5), boolean(2, 3)),
    ],
)  # fmt: skip
def scatter(x: TensorType, indices: TensorType, updates: TensorType) -> TensorType:
    """`x` with row `indices[i]` of its first axis replaced by row `updates[i]`; of equal indices the last wins."""
    return _scatter_type("scatter", x, indices, updates)


def _scatter_type(where: str, x: TensorType, indices: TensorType, updates: TensorType) -> TensorType:
    _integers(where, indices)
    if x.rank == 0:
        raise ShapeError(f"{where}: the table needs an axis, found {x}")
    wanted = (*indices.shape, *x.shape[1:])
    message = f"{where}: updates {updates} should have shape [{', '.join(map(str, wanted))}]"
    if updates.rank != len(wanted):
        raise ShapeError(message)
    for have, want in zip(updates.shape, wanted, strict=True):
        require_equal(have, want, message)
    if updates.dtype is not x.dtype:
        raise DTypeError(f"{where}: updates are {updates.dtype}, the table is {x.dtype}")
    return x
