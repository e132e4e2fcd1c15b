"""Rows of 8-bit integers with a scale and an offset per row: activations for matmuls with integer weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.dtypes import U8, cast_array
from rlx.errors import DTypeError, ShapeError
from rlx.ir.graph import Value
from rlx.ir.independence import by_rows
from rlx.ir.registry import FUSED, f32, op, sample
from rlx.ops.norm import check_scale, layer_norm_array, rms_norm_array
from rlx.ops.quant import MIN_SCALE
from rlx.types import TensorType

LEVELS = 255  # steps from the smallest number of a row to the largest


def _quantise_rows(x: Any) -> tuple[Any, Any, Any]:
    kind = x.dtype.type
    low, high = x.min(-1, keepdims=True, initial=np.inf), x.max(-1, keepdims=True, initial=-np.inf)
    scale = np.maximum((high - low) / kind(LEVELS), kind(MIN_SCALE))
    return cast_array(np.rint((x - low) * (kind(1) / scale)), U8), scale, low


@op(
    "quantise_rows", independent=by_rows, reference=_quantise_rows,
    samples=[sample(f32(4, 33)), sample(f32(2, 3, 130, low=-0.2, high=5.0)), sample(f32(64)), sample(f32(3, 1))],
)  # fmt: skip
def quantise_rows(x: TensorType) -> tuple[TensorType, TensorType, TensorType]:
    """x as u8, with a scale and an offset per row of the last axis: x ≈ u8 · scale + offset.

    The offset is the smallest number of the row, the scale (largest - smallest) / 255, at least 1e-12. (x - offset) ·
    (1 / scale) is rounded to the nearest integer, ties to even. The scale of a row with a NaN or an infinity is not
    finite either; its integers are 0.
    """
    if x.rank == 0:
        raise ShapeError("quantise_rows: needs an axis, found a scalar")
    if not x.dtype.is_float:
        raise DTypeError(f"quantise_rows: takes floats, found {x}")
    one = TensorType((*x.shape[:-1], 1), x.dtype.wide)
    return x.with_dtype(U8), one, one


def _quantised_norm(
    x: Any, residual: Any, gamma: Any, beta: Any, even: Any, *, kind: str, eps: float, keep: bool
) -> Any:
    total = x if residual is None else x + residual
    y = (layer_norm_array if kind == "layer" else rms_norm_array)(total, gamma, beta, eps=eps)
    rows = _quantise_rows(y if even is None else y * even)
    return *rows, *([y] if keep else []), *([] if residual is None else [total])


def _decompose_quantised_norm(
    x: Value, residual: Value | None, gamma: Value | None, beta: Value | None, even: Value | None, *, kind: str,
    eps: float, keep: bool,
) -> tuple[Value, ...]:  # fmt: skip
    total = x if residual is None else x + residual
    y = x.graph.one(f"{kind}_norm", total, gamma, beta, eps=eps)
    rows = x.graph.apply("quantise_rows", y if even is None else y * even)
    return *rows, *([y] if keep else []), *([] if residual is None else [total])


@op(
    "quantised_norm", independent=by_rows, reference=_quantised_norm, traits=[FUSED],
    decompose=_decompose_quantised_norm,
)  # fmt: skip
def quantised_norm(
    x: TensorType,
    residual: TensorType | None = None,
    gamma: TensorType | None = None,
    beta: TensorType | None = None,
    even: TensorType | None = None,
    *,
    kind: str,
    eps: float,
    keep: bool,
) -> tuple[TensorType, ...]:
    """The norm (`kind` is layer or rms) of x, or of x + residual, times `even`, as rows of u8 with scales and offsets.

    With `keep`, the norm itself is the next result, and the sum, if there is one, the last.
    """
    check_scale("quantised_norm", x, {"gamma": gamma, "beta": beta, "even": even})
    if residual is not None and x != residual:
        raise ShapeError(f"quantised_norm: types differ, {x} and {residual}")
    return *quantise_rows.rule(x), *([x] if keep else []), *([] if residual is None else [x])  # type: ignore[misc]
