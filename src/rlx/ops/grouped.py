"""Products in which each row chooses its matrix: the experts of a mixture."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.dtypes import dtype as dtype_of
from rlx.dtypes import promote
from rlx.errors import DTypeError, KernelError, ShapeError
from rlx.ir.registry import f32, i32, op, sample
from rlx.types import TensorType, require_equal


def _grouped_matmul(x: Any, w: Any, index: Any) -> Any:
    common = promote(dtype_of(x.dtype), dtype_of(w.dtype)).compute.numpy
    if index.size and (index.min() < 0 or index.max() >= w.shape[0]):
        raise KernelError(f"grouped_matmul: an index lies outside 0:{w.shape[0]}")
    result = np.zeros((x.shape[0], w.shape[2]), common)
    for group in np.unique(index):
        rows = index == group
        result[rows] = x[rows].astype(common) @ w[group].astype(common)
    return result


@op(
    "grouped_matmul", reference=_grouped_matmul, tolerance=1e-5,
    samples=[
        sample(f32(5, 4), f32(3, 4, 6), i32(5, low=0, high=3)),
        sample(f32(9, 65), f32(4, 65, 130), i32(9, low=0, high=4)),
        sample(f32(1, 33), f32(1, 33, 7), i32(1, low=0, high=1)),
        sample(f32(3, 0), f32(2, 0, 5), i32(3, low=0, high=2)),
    ],
)  # fmt: skip
def grouped_matmul(x: TensorType, w: TensorType, index: TensorType) -> TensorType:
    """Row i of `x` times the matrix `w[index[i]]`; no other matrix is looked at.

    `x` is [rows, k], `w` is [groups, k, n], `index` is [rows]; an index outside the groups is an error at run time.
    """
    if x.rank != 2 or w.rank != 3 or index.rank != 1:
        raise ShapeError(f"grouped_matmul: takes [rows, k], [groups, k, n] and [rows], found {x}, {w} and {index}")
    if not index.dtype.is_integer:
        raise DTypeError(f"grouped_matmul: indices are integers, found {index.dtype}", hint="cast with x.astype('i32')")
    if not (x.dtype.is_float and w.dtype.is_float):
        raise DTypeError(f"grouped_matmul: takes floats, found {x.dtype} and {w.dtype}")
    require_equal(x.shape[1], w.shape[1], f"grouped_matmul: inner sizes differ, {x.shape[1]} and {w.shape[1]}")
    require_equal(x.shape[0], index.shape[0], f"grouped_matmul: {x.shape[0]} rows and {index.shape[0]} indices")
    return TensorType((x.shape[0], w.shape[2]), promote(x.dtype, w.dtype))
