"""Elementwise functions that are composed of others, under NumPy's names.

Each is accurate over its whole domain and has a derivative wherever the function has one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import GraphError
from rlx.functional.elementwise import (
    abs,
    arctan,
    ceil,
    clip,
    divide,
    equal,
    exp,
    expm1,
    floor,
    floor_divide,
    isfinite,
    isinf,
    isnan,
    less,
    log,
    log1p,
    logaddexp,
    logical_and,
    logical_or,
    maximum,
    minimum,
    mod,
    multiply,
    not_equal,
    power,
    round,
    sign,
    sin,
    sqrt,
    where,
)
from rlx.functional.operands import asarray, astype, float_operands, floats, is_float
from rlx.functional.tracers import type_of
from rlx.functional.tracing import eager


# -- angles and logarithms --------------------------------------------------------------------------------------------
@eager
def arcsin(x: Any) -> Any:
    """Inverse sine, within ±π/2; NaN outside [-1, 1]."""
    x = floats(asarray(x))
    return 2 * arctan(x / (1 + sqrt((1 - x) * (1 + x))))


@eager
def arccos(x: Any) -> Any:
    """Inverse cosine, within [0, π]; NaN outside [-1, 1]."""
    x = floats(asarray(x))
    return 2 * arctan(sqrt((1 - x) / (1 + x)))


@eager
def arctan2(y: Any, x: Any) -> Any:
    """Angle of the point (x, y), within ±π; the signs of zeros choose the side."""
    y, x = float_operands(y, x)
    both_infinite = logical_and(isinf(y), isinf(x))
    rise, run = where(both_infinite, copysign(1.0, y), y), where(both_infinite, copysign(1.0, x), x)
    steep = abs(rise) > abs(run)
    short, long = where(steep, run, rise), where(steep, rise, run)
    angle = arctan(short / where(equal(long, 0), 1.0, long))
    flat = where(signbit(x), angle + copysign(math.pi, y), angle)
    flat = where(logical_and(equal(y, 0), equal(x, 0)), where(signbit(x), copysign(math.pi, y), y), flat)
    return where(steep, copysign(math.pi / 2, y) - angle, flat)


@eager
def sinh(x: Any) -> Any:
    """Hyperbolic sine."""
    x = floats(asarray(x))
    small = expm1(clip(x, -1.0, 1.0))
    root = exp(abs(x) * 0.5)  # its square may overflow, as sinh does; e^x would before it
    large = copysign(0.5 * root * root - 0.5 / (root * root), x)
    return where(abs(x) < 1, 0.5 * (small + small / (small + 1)), large)


@eager
def cosh(x: Any) -> Any:
    """Hyperbolic cosine."""
    root = exp(floats(asarray(x)) * 0.5)
    return 0.5 * root * root + 0.5 / root / root


@eager
def arcsinh(x: Any) -> Any:
    """Inverse hyperbolic sine."""
    x = floats(asarray(x))
    near = clip(x, -1.0, 1.0)
    far = where(abs(x) < 1, 1.0, abs(x))
    logarithm = log(far) + log1p(sqrt(1 + 1 / far / far))  # log(far + √(far² + 1)) without the square
    return where(abs(x) < 1, 2 * arctanh(near / (1 + sqrt(1 + near * near))), copysign(logarithm, x))


@eager
def arccosh(x: Any) -> Any:
    """Inverse hyperbolic cosine; NaN below 1."""
    x = floats(asarray(x))
    return log1p(x - 1 + sqrt(x - 1) * sqrt(x + 1))


@eager
def arctanh(x: Any) -> Any:
    """Inverse hyperbolic tangent; NaN outside [-1, 1]."""
    x = floats(asarray(x))
    return 0.5 * (log1p(x) - log1p(-x))


def log2(x: Any) -> Any:
    """Logarithm to base 2."""
    return divide(log(x), math.log(2))


def log10(x: Any) -> Any:
    """Logarithm to base 10."""
    return divide(log(x), math.log(10))


def exp2(x: Any) -> Any:
    """2 to the power x."""
    return power(2.0, floats(asarray(x)))


@eager
def logaddexp2(a: Any, b: Any) -> Any:
    """log2(2^a + 2^b)."""
    a, b = float_operands(a, b)
    return divide(logaddexp(a * math.log(2), b * math.log(2)), math.log(2))


@eager
def cbrt(x: Any) -> Any:
    """Cube root."""
    x = floats(asarray(x))
    size = where(equal(x, 0), 1.0, abs(x))
    near = power(size, 1 / 3)
    root = near - (near - size / near / near) / 3  # a Newton step: the power has the rounding error of 1/3
    return where(logical_or(equal(x, 0), isinf(x)), x, copysign(root, x))


@eager
def hypot(a: Any, b: Any) -> Any:
    """√(a² + b²), without overflow of the squares."""
    a, b = (abs(x) for x in float_operands(a, b))
    long, short = maximum(a, b), minimum(a, b)
    regular = logical_and(long > 0, long < math.inf)
    ratio = short / where(regular, long, 1.0)
    length = where(regular, long * sqrt(1 + ratio * ratio), long)
    return where(logical_or(isinf(a), isinf(b)), math.inf, length)  # even if the other one is NaN


def deg2rad(x: Any) -> Any:
    """Radians of an angle in degrees."""
    return multiply(floats(asarray(x)), math.pi / 180)


def rad2deg(x: Any) -> Any:
    """Degrees of an angle in radians."""
    return multiply(floats(asarray(x)), 180 / math.pi)


radians, degrees = deg2rad, rad2deg


@eager
def sinc(x: Any) -> Any:
    """sin(πx) / (πx), and 1 at 0."""
    x = floats(asarray(x))
    angle = where(equal(x, 0), 1.0, x) * math.pi
    return where(equal(x, 0), 1.0, sin(angle) / angle)


# -- signs, rounding, remainders --------------------------------------------------------------------------------------
def positive(x: Any) -> Any:
    """+x."""
    return asarray(x)


def fabs(x: Any) -> Any:
    """Absolute value as a float."""
    return abs(floats(asarray(x)))


@eager
def signbit(x: Any) -> Any:
    """Whether x is negative, or -0.0."""
    x = asarray(x)
    return less(where(equal(x, 0), divide(1.0, floats(x)), floats(x)), 0)


@eager
def copysign(a: Any, b: Any) -> Any:
    """The magnitude of a with the sign of b."""
    a, b = float_operands(a, b)
    return where(equal(signbit(a), signbit(b)), a, -a)


@eager
def heaviside(x: Any, at_zero: Any) -> Any:
    """0 below zero, 1 above it, and `at_zero` at zero."""
    x, at_zero = float_operands(x, at_zero)
    return where(equal(x, 0), at_zero, where(x < 0, 0.0, where(isnan(x), x, 1.0)))


@eager
def trunc(x: Any) -> Any:
    """Round towards zero to an integer."""
    x = asarray(x)
    return where(x < 0, ceil(x), floor(x)) if is_float(x) else x


fix = trunc


def rint(x: Any) -> Any:
    """Round to the nearest integer, halves to even, as a float."""
    return round(floats(asarray(x)))


@eager
def fmod(a: Any, b: Any) -> Any:
    """Remainder, with the sign of the dividend."""
    if is_float(a) or is_float(b):
        return a - trunc(divide(a, b)) * b
    return sign(a) * mod(abs(a), abs(b))


def divmod(a: Any, b: Any) -> tuple[Any, Any]:
    """floor_divide(a, b) and mod(a, b)."""
    return floor_divide(a, b), mod(a, b)


@eager
def modf(x: Any) -> tuple[Any, Any]:
    """Fraction and integer part of x, both with its sign."""
    x = floats(asarray(x))
    return where(isinf(x), copysign(0.0, x), x - trunc(x)), trunc(x)


@eager
def ldexp(x: Any, exponent: Any) -> Any:
    """x · 2^exponent."""
    return floats(asarray(x)) * exp2(floats(asarray(exponent)))


def float_power(a: Any, b: Any) -> Any:
    """a to the power b, as a float."""
    return power(floats(asarray(a)), b)


# -- comparisons and logic --------------------------------------------------------------------------------------------
@eager
def fmax(a: Any, b: Any) -> Any:
    """Elementwise maximum; a NaN gives way to a number."""
    return where(isnan(a), b, where(isnan(b), a, maximum(a, b)))


@eager
def fmin(a: Any, b: Any) -> Any:
    """Elementwise minimum; a NaN gives way to a number."""
    return where(isnan(a), b, where(isnan(b), a, minimum(a, b)))


def logical_xor(a: Any, b: Any) -> Any:
    """Whether exactly one is true."""
    return not_equal(astype(a, "bool"), astype(b, "bool"))


def isposinf(x: Any) -> Any:
    """Whether x is +∞."""
    return equal(x, math.inf)


def isneginf(x: Any) -> Any:
    """Whether x is -∞."""
    return equal(x, -math.inf)


@eager
def isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """Whether |a - b| <= atol + rtol · |b|; infinities are close to themselves."""
    a, b = float_operands(a, b)
    gap_fits = logical_and(abs(a - b) <= atol + rtol * abs(b), isfinite(b))
    close = logical_or(equal(a, b), gap_fits)
    return logical_or(close, logical_and(isnan(a), isnan(b))) if equal_nan else close


@eager
def nan_to_num(
    x: Any, copy: bool = True, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Any:
    """Replace NaN by a number, and infinities by the largest numbers of the dtype or by `posinf` and `neginf`."""
    x = asarray(x)
    if not is_float(x):
        return x
    limits = np.finfo(type_of(x).dtype.wide.numpy)
    top, bottom = (float(limits.max) if posinf is None else posinf), (float(limits.min) if neginf is None else neginf)
    return where(isnan(x), nan, where(isposinf(x), top, where(isneginf(x), bottom, x)))


@eager
def select(conditions: Sequence[Any], choices: Sequence[Any], default: Any = 0) -> Any:
    """The choice of the first condition that holds, else `default`."""
    if len(conditions) != len(choices):
        raise GraphError(f"select: {len(conditions)} conditions for {len(choices)} choices")
    result = default
    for condition, choice in zip(reversed(conditions), reversed(choices), strict=True):
        result = where(condition, choice, result)
    return result


@eager
def piecewise(x: Any, conditions: Sequence[Any], functions: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """The value at x of the function whose condition holds last; one more function is for the rest, which is else 0.

    A function may be a number. All of them are computed everywhere.
    """
    x = asarray(x)
    conditions = list(conditions) if isinstance(conditions, (list, tuple)) else [conditions]
    if len(functions) - len(conditions) not in (0, 1):
        raise GraphError(f"piecewise: {len(functions)} functions for {len(conditions)} conditions")

    def value(function: Any) -> Any:
        return function(x, *args, **kwargs) if callable(function) else function

    result = value(functions[-1]) if len(functions) > len(conditions) else 0.0
    for condition, function in zip(conditions, functions, strict=False):
        result = where(condition, value(function), result)
    return astype(result, type_of(x).dtype)
