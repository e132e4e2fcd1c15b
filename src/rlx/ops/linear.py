"""Matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.dtypes import I8, I32, U8, promote
from rlx.dtypes import dtype as dtype_of
from rlx.errors import DTypeError, ShapeError
from rlx.ir.independence import matrices
from rlx.ir.registry import FUSED, f32, i32, op, sample
from rlx.types import TensorType, broadcast, require_equal


def _matmul(a: Any, b: Any) -> Any:
    common = promote(dtype_of(a.dtype), dtype_of(b.dtype)).wide.numpy
    return np.matmul(a.astype(common), b.astype(common))


@op(
    "matmul", independent=matrices, reference=_matmul, tolerance=1e-5,
    samples=[
        sample(f32(3, 4), f32(4, 5)), sample(f32(7, 65), f32(65, 130)), sample(f32(2, 3, 4), f32(4, 5)),
        sample(f32(2, 1, 3, 17), f32(5, 17, 6)), sample(f32(1, 64), f32(64, 64)), sample(i32(3, 4), i32(4, 5)),
        sample(f32(13, 0), f32(0, 5)), sample(i32(2, 3, 5), f32(5, 4)),
    ],
)  # fmt: skip
def matmul(a: TensorType, b: TensorType) -> TensorType:
    """Matrix product over the last axis of `a` and the second-to-last of `b`; leading axes broadcast."""
    if a.rank < 2 or b.rank < 2:
        raise ShapeError(f"matmul: operands need two axes each, found {a} and {b}", hint="reshape a vector to one row")
    require_equal(
        a.shape[-1],
        b.shape[-2],
        f"matmul: inner sizes differ, {a.shape[-1]} and {b.shape[-2]}",
        hint="transpose one operand? matmul takes weights as [in, out], files and flows store [out, in]",
    )
    common = promote(a.dtype, b.dtype)
    if common.is_bool:
        raise DTypeError("matmul: takes numbers, found bool")
    leading = broadcast(a.shape[:-2], b.shape[:-2], where="matmul")
    return TensorType((*leading, a.shape[-2], b.shape[-1]), common)


def _integer_matmul(a: Any, b: Any) -> Any:
    """In float64, which is exact here and far faster than NumPy's integer products."""
    return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int32)


@op("integer_matmul", independent=matrices, reference=_integer_matmul, traits=[FUSED])
def integer_matmul(a: TensorType, b: TensorType) -> TensorType:
    """Matrix product of 8-bit integers, u8 by i8, accumulated in i32."""
    if a.dtype is not U8 or b.dtype is not I8:
        raise DTypeError(f"integer_matmul: takes u8 and i8, found {a} and {b}")
    product = matmul.rule(a, b)
    assert isinstance(product, TensorType)
    return product.with_dtype(I32)
