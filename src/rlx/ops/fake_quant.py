"""Quantisation-aware training: fake quantisation, running and learned scales, straight-through gradients.

Scales are those of `quantise`, symmetric, per tensor or per index of an axis.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import DTypeError, GraphError
from rlx.ir.graph import Value
from rlx.ir.independence import never
from rlx.ir.registry import COMPOSED, f32, op, sample
from rlx.ops.quant import MIN_SCALE, broadcast_scales, check_scales, require_shape, scale_axes
from rlx.types import TensorType, axis_index


def _top(bits: int) -> int:
    return 2 ** (bits - 1) - 1  # type: ignore[no-any-return]


def _steps(x: Any, scale: Any, bits: int, axis: int | None) -> Any:
    """Step sizes, broadcast to x."""
    smallest = x.dtype.type(MIN_SCALE)
    if scale is not None:
        return np.maximum(broadcast_scales(scale.astype(x.dtype), x.ndim, axis, None), smallest)
    size = np.abs(x).max(scale_axes(x.ndim, axis, None), keepdims=True, initial=0)
    return np.maximum(size / x.dtype.type(_top(bits)), smallest)


def _decompose_steps(x: Value, scale: Value | None, bits: int, axis: int | None) -> Value:
    if scale is None:
        largest = x.graph.one("max", abs(x), axis=scale_axes(x.rank, axis, None), keepdims=True)
        step = largest / _top(bits)
    else:
        step = scale.astype(x.dtype)
        if axis is not None:
            step = step.reshape(*(x.shape[a] if a == axis % x.rank else 1 for a in range(x.rank)))
    return step.maximum(MIN_SCALE)


def _check_training(where: str, x: TensorType, scale: TensorType | None, bits: int, axis: int | None) -> None:
    if not x.dtype.is_float:
        raise DTypeError(f"{where}: takes floats, found {x}")
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 16:
        raise GraphError(f"{where}: bits is {bits!r}, expected 2 to 16")
    if axis is not None:
        axis_index(axis, x.rank, where)
    if scale is not None:
        check_scales(where, x.shape, scale, None, axis, None)


def _fake_quantise(x: Any, scale: Any = None, *, bits: int = 8, axis: int | None = None) -> Any:
    top, step = x.dtype.type(_top(bits)), _steps(x, scale, bits, axis)
    return np.clip(np.rint(x / step), -top, top) * step


def _decompose_fake_quantise(x: Value, scale: Value | None = None, *, bits: int, axis: int | None) -> Value:
    if 0 in x.shape:
        return x.astype(x.dtype.wide).astype(x.dtype)
    top, wide = _top(bits), x.astype(x.dtype.wide)
    step = _decompose_steps(wide, scale, bits, axis)
    rounded: Value = (wide / step).round().maximum(-top).minimum(top) * step
    return rounded.astype(x.dtype)


@op(
    "fake_quantise", independent=never,
    reference=_fake_quantise, decompose=_decompose_fake_quantise, traits=[COMPOSED], tolerance=1e-6,
    samples=[
        sample(f32(5, 7)), sample(f32(4, 5, 3), axis=1, bits=4), sample(f32(3, 33), axis=-1, bits=2),
        sample(f32(5, 7), f32(low=0.1, high=0.2), bits=4),
        sample(f32(4, 5, 3), f32(5, low=0.1, high=0.2), axis=1, bits=5),
    ],
)  # fmt: skip
def fake_quantise(
    x: TensorType, scale: TensorType | None = None, *, bits: int = 8, axis: int | None = None
) -> TensorType:
    """Quantises x to integers of `bits` bits and back, with a symmetric scale per tensor or per index of `axis`.

    Rounds to nearest, ties to even; integers are clipped to ±(2^(bits - 1) - 1). An explicit scale is fixed, learned
    (`fake_quantise_scale_grad`) or follows the numbers (`running_scale`); without one it is computed from x: the
    largest magnitude / (2^(bits - 1) - 1). Scales are at least 1e-12.
    """
    _check_training("fake_quantise", x, scale, bits, axis)
    return x


def _running_scale(x: Any, state: Any, *, bits: int = 8, axis: int | None = None, decay: float = 0.99) -> Any:
    now = _steps(x, None, bits, axis).astype(state.dtype).reshape(state.shape)
    weight = state.dtype.type(decay)
    return np.where(state > 0, weight * state + (1 - weight) * now, now)


def _decompose_running_scale(x: Value, state: Value, *, bits: int, axis: int | None, decay: float) -> Value:
    wide = x.astype(x.dtype.wide)
    if 0 in x.shape:
        now = x.graph.one("expand", x.graph.constant(MIN_SCALE, state.dtype), shape=state.shape)
    else:
        now = _decompose_steps(wide, None, bits, axis).reshape(*state.shape).astype(state.dtype)
    rest = 1 - np.dtype(state.dtype.wide.numpy).type(decay)  # in the type of the factor that is multiplied
    return (state > 0).where(state * decay + now * float(rest), now)


@op(
    "running_scale", independent=never,
    reference=_running_scale, decompose=_decompose_running_scale, traits=[COMPOSED], tolerance=1e-6,
    samples=[
        sample(f32(5, 7), f32(low=0.1, high=0.2)), sample(f32(5, 7), f32(low=-2, high=-1)),
        sample(f32(4, 5, 3), f32(5, low=-0.1, high=0.2), axis=1, bits=4, decay=0.5),
    ],
)  # fmt: skip
def running_scale(
    x: TensorType, state: TensorType, *, bits: int = 8, axis: int | None = None, decay: float = 0.99
) -> TensorType:
    """The next state of a scale that follows x: decay · state + (1 - decay) · the scale of x alone.

    A state that is not positive is uninitialised and becomes the scale of x. Scales are those of `fake_quantise`.
    """
    _check_training("running_scale", x, state, bits, axis)
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
        raise GraphError(f"running_scale: decay is {decay!r}, expected 0 to 1")
    return state


ESTIMATORS = ("identity", "clipped", "tanh", "hard_tanh")


def _fake_quantise_grad(
    x: Any, dy: Any, scale: Any = None, *, bits: int = 8, axis: int | None = None, ste: str = "identity"
) -> Any:
    top, step = x.dtype.type(_top(bits)), _steps(x, scale, bits, axis)
    match ste:
        case "clipped" if scale is not None:
            return dy * (np.abs(x) <= top * step)
        case "tanh":
            return dy * (1 - np.tanh(x / step) ** 2)
        case "hard_tanh":
            return dy * np.maximum(1 - np.abs(x / (top * step)), 0)
        case _:  # the identity; a scale computed from x clips nothing
            return dy.copy()


def _decompose_fake_quantise_grad(
    x: Value, dy: Value, scale: Value | None, *, bits: int, axis: int | None, ste: str
) -> Value:
    stored, dy = dy.dtype, dy.astype(dy.dtype.wide)
    if ste == "identity" or (ste == "clipped" and scale is None) or 0 in x.shape:
        return dy.astype(stored)
    top, wide = _top(bits), x.astype(x.dtype.wide)
    step = _decompose_steps(wide, scale, bits, axis)
    if ste == "clipped":
        inside = (abs(wide) <= step * top).where(dy, 0.0)
    elif ste == "tanh":
        inside = dy * (1.0 - (wide / step).tanh() * (wide / step).tanh())
    else:
        inside = dy * (1.0 - abs(wide / (step * top))).maximum(0.0)
    return inside.astype(stored)


@op(
    "fake_quantise_grad", independent=never,
    reference=_fake_quantise_grad, decompose=_decompose_fake_quantise_grad, traits=[COMPOSED],
    tolerance=1e-5,
    samples=[
        sample(f32(5, 7), f32(5, 7)), sample(f32(5, 7), f32(5, 7), f32(low=0.1, high=0.2), bits=4, ste="clipped"),
        sample(f32(5, 7), f32(5, 7), ste="clipped"), sample(f32(4, 5, 3), f32(4, 5, 3), axis=1, bits=2, ste="tanh"),
        sample(f32(4, 5, 3), f32(4, 5, 3), f32(5, low=0.1, high=0.4), axis=1, bits=4, ste="hard_tanh"),
    ],
)  # fmt: skip
def fake_quantise_grad(
    x: TensorType, dy: TensorType, scale: TensorType | None = None, *, bits: int = 8, axis: int | None = None,
    ste: str = "identity",
) -> TensorType:  # fmt: skip
    """The gradient of `fake_quantise` for x by a straight-through estimator, since rounding itself has none.

    `identity` is dy; `clipped` is dy where x was not clipped, else 0; with z = x / scale, `tanh` is dy · (1 - tanh(z)²)
    and `hard_tanh` is dy · max(0, 1 - |z| / (2^(bits - 1) - 1)).
    """
    _check_training("fake_quantise_grad", x, scale, bits, axis)
    require_shape("fake_quantise_grad", "dy", dy, x.shape)
    if dy.dtype is not x.dtype:
        raise DTypeError(f"fake_quantise_grad: dy is {dy}, expected the type of x, {x}")
    if ste not in ESTIMATORS:
        raise GraphError(f"fake_quantise_grad: ste is {ste!r}, expected {', '.join(ESTIMATORS)}")
    return dy


def _fake_quantise_scale_grad(x: Any, scale: Any, dy: Any, *, bits: int = 8, axis: int | None = None) -> Any:
    top = x.dtype.type(_top(bits))
    z = x / _steps(x, scale, bits, axis)
    slope = np.where(np.abs(z) <= top, np.rint(z) - z, np.sign(z) * top)
    return (slope * dy).sum(scale_axes(x.ndim, axis, None), dtype=x.dtype).astype(scale.dtype)


def _decompose_fake_quantise_scale_grad(x: Value, scale: Value, dy: Value, *, bits: int, axis: int | None) -> Value:
    top, wide = _top(bits), x.astype(x.dtype.wide)
    z = wide / _decompose_steps(wide, scale, bits, axis)
    slope = (abs(z) <= top).where(z.round() - z, (z > 0).where(wide * 0 + top, -float(top)))
    others = scale_axes(x.rank, axis, None)
    return x.graph.one("sum", slope * dy.astype(wide.dtype), axis=others).astype(scale.dtype)


@op(
    "fake_quantise_scale_grad", independent=never,
    reference=_fake_quantise_scale_grad, decompose=_decompose_fake_quantise_scale_grad,
    traits=[COMPOSED], tolerance=1e-5,
    samples=[
        sample(f32(5, 7), f32(low=0.1, high=0.2), f32(5, 7), bits=4),
        sample(f32(4, 5, 3), f32(5, low=0.1, high=0.4), f32(4, 5, 3), axis=1, bits=4),
    ],
)  # fmt: skip
def fake_quantise_scale_grad(
    x: TensorType, scale: TensorType, dy: TensorType, *, bits: int = 8, axis: int | None = None
) -> TensorType:
    """The gradient of `fake_quantise` for a learned scale (LSQ, Esser et al. 2020, equation 3).

    The sum of dy · (round(z) - z), where z = x / scale; where z is clipped, of dy · ±(2^(bits - 1) - 1).
    """
    _check_training("fake_quantise_scale_grad", x, scale, bits, axis)
    require_shape("fake_quantise_scale_grad", "dy", dy, x.shape)
    if dy.dtype is not x.dtype:
        raise DTypeError(f"fake_quantise_scale_grad: dy is {dy}, expected the type of x, {x}")
    return scale
