"""Normalisation over the last axis, and its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.ir.graph import Value
from rlx.ir.independence import by_rows, never
from rlx.ir.registry import f32, op, sample
from rlx.types import TensorType, require_equal


def check_scale(where: str, x: TensorType, vectors: dict[str, TensorType | None]) -> None:
    """Check the operands of a norm: floats, and vectors as long as the last axis."""
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


def _scale_and_shift(y: Any, gamma: Any, beta: Any) -> Any:
    y = y if gamma is None else y * gamma
    return y if beta is None else y + beta


def _mean(x: Any) -> Any:
    """Mean over the last axis; unlike np.mean it does not warn if that is empty."""
    return np.sum(x, axis=-1, keepdims=True) / x.dtype.type(x.shape[-1])


def layer_norm_array(x: Any, gamma: Any = None, beta: Any = None, *, eps: float) -> Any:
    centred = x - _mean(x)
    variance = _mean(centred * centred)
    return _scale_and_shift(centred / np.sqrt(variance + x.dtype.type(eps)), gamma, beta)


def rms_norm_array(x: Any, gamma: Any = None, beta: Any = None, *, eps: float) -> Any:
    square = _mean(x * x)
    return _scale_and_shift(x / np.sqrt(square + x.dtype.type(eps)), gamma, beta)


_SAMPLES = [sample(f32(4, 33), f32(33), f32(33)), sample(f32(2, 3, 130), f32(130)), sample(f32(5, 64)),
            sample(f32(2, 17), None, f32(17), eps=0.1)]  # fmt: skip


@op("layer_norm", independent=by_rows, reference=layer_norm_array, samples=_SAMPLES, tolerance=3e-6)
def layer_norm(
    x: TensorType, gamma: TensorType | None = None, beta: TensorType | None = None, *, eps: float = 1e-5
) -> TensorType:
    """(x - mean) / √(variance + eps) · gamma + beta over the last axis."""
    check_scale("layer_norm", x, {"gamma": gamma, "beta": beta})
    return x


@op("rms_norm", independent=by_rows, reference=rms_norm_array, samples=_SAMPLES, tolerance=3e-6)
def rms_norm(
    x: TensorType, gamma: TensorType | None = None, beta: TensorType | None = None, *, eps: float = 1e-6
) -> TensorType:
    """x / √(mean of squares + eps) · gamma + beta over the last axis."""
    check_scale("rms_norm", x, {"gamma": gamma, "beta": beta})
    return x


def _norm_grad(x: Any, dy: Any, gamma: Any = None, *, kind: str, eps: float) -> tuple[Any, Any, Any]:
    centred = x - _mean(x) if kind == "layer" else x
    inverse = 1 / np.sqrt(_mean(centred * centred) + x.dtype.type(eps))
    normal, c = centred * inverse, dy if gamma is None else dy * gamma
    inner = c - normal * _mean(c * normal)
    inner = inner - _mean(c) if kind == "layer" else inner
    rows = tuple(range(x.ndim - 1))
    return inner * inverse, (dy * normal).sum(axis=rows), dy.sum(axis=rows)


def _decompose_norm_grad(
    x: Value, dy: Value, gamma: Value | None = None, *, kind: str, eps: float
) -> tuple[Value, Value, Value]:
    """With x̂ the normalised operand and c = dy · gamma: (c - mean(c x̂) x̂ [- mean(c)]) / deviation."""
    g, wide = x.graph, x.dtype.wide

    def mean(value: Value) -> Value:
        return g.one("mean", value, axis=-1, keepdims=True)

    operand, dy = x.astype(wide), dy.astype(wide)
    centred = operand - mean(operand) if kind == "layer" else operand
    inverse = g.one("rsqrt", mean(centred * centred) + eps)
    normal, c = centred * inverse, dy if gamma is None else dy * gamma.astype(wide)
    inner = c - normal * mean(c * normal)
    inner = inner - mean(c) if kind == "layer" else inner
    rows = tuple(range(x.rank - 1))
    dgamma, dbeta = (g.one("sum", v, axis=rows) if rows else v for v in (dy * normal, dy))
    return (inner * inverse).astype(x.dtype), dgamma, dbeta


@op(
    "norm_grad", independent=never, reference=_norm_grad, decompose=_decompose_norm_grad, tolerance=1e-5,
    samples=[
        sample(f32(4, 33), f32(4, 33), f32(33), kind="layer", eps=1e-5),
        sample(f32(2, 3, 130), f32(2, 3, 130), f32(130), kind="rms", eps=1e-6),
        sample(f32(5, 64), f32(5, 64), kind="rms", eps=0.1), sample(f32(2, 17), f32(2, 17), kind="layer", eps=0.1),
        sample(f32(9), f32(9), f32(9), kind="layer", eps=0.1),
    ],
)  # fmt: skip
def norm_grad(
    x: TensorType, dy: TensorType, gamma: TensorType | None = None, *, kind: str, eps: float
) -> tuple[TensorType, TensorType, TensorType]:
    """Gradients of x, gamma and beta from `dy`, the gradient of the result of `layer_norm` or `rms_norm` (by `kind`).

    Reads x and dy once for the gradient of x, and once for the others. With narrow floats, those of gamma and beta are
    f32.
    """
    check_scale("norm_grad", x, {"gamma": gamma})
    if kind not in ("layer", "rms"):
        raise GraphError(f"norm_grad: kind {kind!r} is not known", hint="layer or rms")
    if dy.rank != x.rank or dy.dtype is not x.dtype:
        raise ShapeError(f"norm_grad: dy is {dy}, x is {x}")
    for have, want in zip(dy.shape, x.shape, strict=True):
        require_equal(have, want, f"norm_grad: dy is {dy}, x is {x}")
    vector = TensorType(x.shape[-1:], x.dtype.wide)
    return x, vector, vector
