"""Normalisations over the last axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.registry import f32, op, sample
from rlx.types import TensorType, require_equal


def check_scale(where: str, x: TensorType, vectors: dict[str, TensorType | None]) -> None:
    """The operands of a norm: floats, and vectors as long as the last axis."""
    if x.rank == 0:
        raise ShapeError(f"{where}: needs an axis, found a scalar")
    if not x.dtype.is_float:
        raise DTypeError(f"{where}: takes floats, found {x.dtype}")
    for name, vector in vectors.items():
        if vector is None:
            continue
        if not vector.dtype.is_float:
            raise DTypeError(f"{where}: {name} is {vector.dtype}, x is {x.dtype}; both are floats")
        if vector.rank != 1:
            raise ShapeError(f"{where}: {name} has {vector.rank} axes, expected 1")
        have, want = vector.shape[0], x.shape[-1]
        require_equal(have, want, f"{where}: {name} has {have} elements, x has {want}")


def _scaled(y: Any, gamma: Any, beta: Any) -> Any:
    y = y if gamma is None else y * gamma
    return y if beta is None else y + beta


def _mean(x: Any) -> Any:
    """Over the last axis; unlike np.mean it does not warn where that is empty."""
    return np.sum(x, axis=-1, keepdims=True) / x.dtype.type(x.shape[-1])


def layer_norm_array(x: Any, gamma: Any = None, beta: Any = None, *, eps: float) -> Any:
    centred = x - _mean(x)
    variance = _mean(centred * centred)
    return _scaled(centred / np.sqrt(variance + x.dtype.type(eps)), gamma, beta)


def rms_norm_array(x: Any, gamma: Any = None, beta: Any = None, *, eps: float) -> Any:
    square = _mean(x * x)
    return _scaled(x / np.sqrt(square + x.dtype.type(eps)), gamma, beta)


_SAMPLES = [sample(f32(4, 33), f32(33), f32(33)), sample(f32(2, 3, 130), f32(130)), sample(f32(5, 64)),
            sample(f32(2, 17), None, f32(17), eps=0.1)]  # fmt: skip


@op("layer_norm", reference=layer_norm_array, samples=_SAMPLES, tolerance=3e-6)
def layer_norm(
    x: TensorType, gamma: TensorType | None = None, beta: TensorType | None = None, *, eps: float = 1e-5
) -> TensorType:
    """(x - mean) / √(variance + eps) · gamma + beta over the last axis."""
    check_scale("layer_norm", x, {"gamma": gamma, "beta": beta})
    return x


@op("rms_norm", reference=rms_norm_array, samples=_SAMPLES, tolerance=3e-6)
def rms_norm(
    x: TensorType, gamma: TensorType | None = None, beta: TensorType | None = None, *, eps: float = 1e-6
) -> TensorType:
    """x / √(mean of squares + eps) · gamma + beta over the last axis."""
    check_scale("rms_norm", x, {"gamma": gamma, "beta": beta})
    return x
