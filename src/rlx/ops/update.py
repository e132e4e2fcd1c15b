"""Optimiser steps, and the ops that a compiled training step uses to update memory in place, in order.

The first operands of these ops are consumed: on the CPU, the result for a state is the state itself, written in place,
and its old contents must not be read again. An input, a weight or a constant is copied instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.ir.graph import Value
from rlx.ir.independence import never
from rlx.ir.registry import FUSED, Spec, f32, i32, op, sample
from rlx.types import TensorType, require_equal


def _check_tensors(where: str, p: TensorType, **others: TensorType | None) -> None:
    """Check parameter, moments and gradient: floats of one type and shape."""
    if not p.dtype.is_float:
        raise DTypeError(f"{where}: takes floats, found {p}")
    for name, tensor in others.items():
        if tensor is not None:
            _check_like(where, name, tensor, "the parameter", p)


def _check_like(where: str, name: str, tensor: TensorType, other: str, wanted: TensorType) -> None:
    message = f"{where}: {name} is {tensor}, {other} {wanted}"
    if tensor.rank != wanted.rank:
        raise ShapeError(message)
    for have, want in zip(tensor.shape, wanted.shape, strict=True):
        require_equal(have, want, message)
    if tensor.dtype is not wanted.dtype:
        raise DTypeError(message, hint="cast with x.astype(...)")


def _check_numbers(where: str, **numbers: TensorType | None) -> None:
    for name, number in numbers.items():
        if number is not None and (number.rank or not number.dtype.is_float):
            raise ShapeError(f"{where}: {name} is {number}, expected one float")


def _check_share(where: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise GraphError(f"{where}: {name} is {value!r}, expected 0 <= {name} < 1")


def _check_size(where: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise GraphError(f"{where}: {name} is {value!r}, expected a number from 0")


# -- assign -----------------------------------------------------------------------------------------------------------
@op(
    "assign", independent=never, reference=lambda x, value: value, decompose=lambda x, value: value,
    samples=[sample(f32(5, 7), f32(5, 7)), sample(f32(), f32()), sample(i32(9), i32(9))],
)  # fmt: skip
def assign(x: TensorType, value: TensorType) -> TensorType:
    """`value`, in the memory of `x`: sets the next contents of a state."""
    _check_like("assign", "the value", value, "the state", x)
    return x


# -- AdamW ------------------------------------------------------------------------------------------------------------
def _adamw(
    p: Any, m: Any, v: Any, grad: Any, rate: Any, decay: Any, root: Any, scale: Any = None, *, beta1: float,
    beta2: float, eps: float,
) -> tuple[Any, Any, Any]:  # fmt: skip
    g = grad if scale is None else grad * scale
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    return p * decay - rate * (m / (np.sqrt(v) / root + eps)), m, v


def _decompose_adamw(
    p: Value, m: Value, v: Value, grad: Value, rate: Value, decay: Value, root: Value, scale: Value | None, *,
    beta1: float, beta2: float, eps: float,
) -> tuple[Value, ...]:  # fmt: skip
    kind, wide = p.dtype, p.dtype.wide
    p, m, v, grad, rate, decay, root = (x.astype(wide) for x in (p, m, v, grad, rate, decay, root))
    g = grad if scale is None else grad * scale.astype(wide)
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    p = p * decay - rate * (m / (v.sqrt() / root + eps))
    return tuple(x.astype(kind) for x in (p, m, v))


_POSITIVE = f32(low=0.5, high=1.0)


def _adamw_operands(*shape: int) -> tuple[Spec, ...]:
    """The second moment is a mean of squares; one near zero would amplify any difference."""
    return f32(*shape), f32(*shape), f32(*shape, low=0.5, high=3.0), f32(*shape), _POSITIVE, _POSITIVE, _POSITIVE


@op(
    "adamw_update", independent=never, reference=_adamw, decompose=_decompose_adamw, tolerance=2e-6,
    samples=[
        sample(*_adamw_operands(3, 70), beta1=0.9, beta2=0.999, eps=1e-8),
        sample(*_adamw_operands(5), f32(low=0.1, high=1.0), beta1=0.5, beta2=0.75, eps=0.1),
        sample(*_adamw_operands(), beta1=0.9, beta2=0.95),
    ],
)  # fmt: skip
def adamw_update(
    p: TensorType, m: TensorType, v: TensorType, grad: TensorType, rate: TensorType, decay: TensorType,
    root: TensorType, scale: TensorType | None = None, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8,
) -> tuple[TensorType, TensorType, TensorType]:  # fmt: skip
    """One step of AdamW: the new parameter, first moment and second moment, each written in place.

    m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g², with g = scale · grad; then
    p = decay · p - rate · m / (sqrt(v) / root + eps). For step t of a learning rate lr, the numbers are
    rate = lr / (1 - beta1^t), root = sqrt(1 - beta2^t), and decay = 1 - lr · weight_decay.
    """
    where = "adamw_update"
    _check_tensors(where, p, m=m, v=v, grad=grad)
    _check_numbers(where, rate=rate, decay=decay, root=root, scale=scale)
    _check_share(where, "beta1", beta1)
    _check_share(where, "beta2", beta2)
    _check_size(where, "eps", eps)
    return p, m, v


# -- SGD --------------------------------------------------------------------------------------------------------------
def _sgd(
    p: Any, grad: Any, rate: Any, velocity: Any = None, scale: Any = None, *, momentum: float, nesterov: bool,
    weight_decay: float,
) -> Any:  # fmt: skip
    g = grad if scale is None else grad * scale
    g = g + p * weight_decay
    if velocity is None:
        return p - rate * g
    velocity = velocity * momentum + g
    return p - rate * (g + velocity * momentum if nesterov else velocity), velocity


def _decompose_sgd(
    p: Value, grad: Value, rate: Value, velocity: Value | None, scale: Value | None, *, momentum: float,
    nesterov: bool, weight_decay: float,
) -> tuple[Value, ...]:  # fmt: skip
    kind, wide = p.dtype, p.dtype.wide
    p, grad, rate = (x.astype(wide) for x in (p, grad, rate))
    g = grad if scale is None else grad * scale.astype(wide)
    g = g + p * weight_decay
    if velocity is None:
        return ((p - rate * g).astype(kind),)
    next_ = velocity.astype(wide) * momentum + g
    return (p - rate * (g + next_ * momentum if nesterov else next_)).astype(kind), next_.astype(kind)


@op(
    "sgd_update", independent=never, reference=_sgd, decompose=_decompose_sgd, tolerance=2e-6,
    samples=[
        sample(f32(3, 70), f32(3, 70), _POSITIVE, weight_decay=0.1),
        sample(f32(3, 70), f32(3, 70), _POSITIVE, f32(3, 70), momentum=0.9),
        sample(f32(65), f32(65), _POSITIVE, f32(65), f32(low=0.1, high=1.0), momentum=0.5, nesterov=True),
    ],
)  # fmt: skip
def sgd_update(
    p: TensorType, grad: TensorType, rate: TensorType, velocity: TensorType | None = None,
    scale: TensorType | None = None, *, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0,
) -> tuple[TensorType, ...]:  # fmt: skip
    """One step of gradient descent: the new parameter, and the new velocity if there is one, written in place.

    g = scale · grad + weight_decay · p, then p = p - rate · g. With a velocity, u = momentum · u + g replaces g in the
    last step, or g + momentum · u if `nesterov`.
    """
    where = "sgd_update"
    _check_tensors(where, p, grad=grad, velocity=velocity)
    _check_numbers(where, rate=rate, scale=scale)
    _check_share(where, "momentum", momentum)
    _check_size(where, "weight_decay", weight_decay)
    if velocity is None and (momentum or nesterov):
        raise GraphError(f"{where}: momentum is {momentum}, and there is no velocity", hint="give velocity=")
    return (p,) if velocity is None else (p, velocity)


# -- order ------------------------------------------------------------------------------------------------------------
@op("read_before_update", independent=never, reference=lambda x: x, traits=[FUSED])
def read_before_update(x: TensorType) -> TensorType:
    """A copy of `x` outside states, so that a value computed before a state's update can be read after it."""
    return x


@op("depends_on", independent=never, reference=lambda x, *done: x, traits=[FUSED])
def depends_on(x: TensorType, *done: TensorType) -> TensorType:
    """`x`, computed after all of `done`: keeps state updates alive whose results nobody reads."""
    return x
