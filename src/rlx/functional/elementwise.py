"""Elementwise functions, under NumPy's names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.dtypes import weak
from rlx.errors import GraphError
from rlx.functional.creation import ones_like
from rlx.functional.operands import as_value, asarray, floats, is_float, operand, traced
from rlx.functional.tracers import type_of
from rlx.functional.tracing import apply, eager
from rlx.transforms import build


def _unary(op: str, doc: str) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        return apply(op, floats(asarray(x)))

    function.__name__, function.__doc__ = op, doc
    return function


exp, log, sqrt = _unary("exp", "e to the power x."), _unary("log", "Natural logarithm."), _unary("sqrt", "Square root.")
rsqrt, sin, cos = _unary("rsqrt", "1 / √x."), _unary("sin", "Sine."), _unary("cos", "Cosine.")
tan, arctan, tanh = _unary("tan", "Tangent."), _unary("atan", "Inverse tangent."), _unary("tanh", "Hyperbolic tangent.")
erf, sigmoid = _unary("erf", "Error function."), _unary("sigmoid", "1 / (1 + e^-x).")
relu, silu = _unary("relu", "x where positive, else 0."), _unary("silu", "x · sigmoid(x).")


def gelu(x: Any, approximate: bool = False) -> Any:
    """Gaussian error linear unit; `approximate` is its tanh form."""
    return apply("gelu_tanh" if approximate else "gelu", floats(asarray(x)))


def abs(x: Any) -> Any:
    """Absolute value."""
    return apply("abs", asarray(x))


def negative(x: Any) -> Any:
    """-x."""
    return apply("neg", asarray(x))


@eager
def round(x: Any, decimals: int = 0) -> Any:
    """Round to the nearest integer, halves to even."""
    if decimals:
        return round(x * 10.0**decimals) / 10.0**decimals
    return apply("round", x) if is_float(x) else asarray(x)


def _binary(op: str, doc: str) -> Callable[[Any, Any], Any]:
    def function(a: Any, b: Any) -> Any:
        alone = weak(a) is not None and weak(b) is not None  # both are Python numbers, with default dtypes
        return apply(op, asarray(a), asarray(b)) if alone else apply(op, operand(a), operand(b))

    function.__name__, function.__doc__ = op, doc
    return function


add, sub, mul = _binary("add", "a + b."), _binary("sub", "a - b."), _binary("mul", "a · b.")
subtract, multiply = sub, mul
maximum, minimum = _binary("maximum", "Elementwise maximum."), _binary("minimum", "Elementwise minimum.")
equal, not_equal = _binary("equal", "a == b."), _binary("not_equal", "a != b.")
less, less_equal = _binary("less", "a < b."), _binary("less_equal", "a <= b.")
greater, greater_equal = _binary("greater", "a > b."), _binary("greater_equal", "a >= b.")
logical_and, logical_or = _binary("logical_and", "Logical and."), _binary("logical_or", "Logical or.")


def logical_not(x: Any) -> Any:
    """Logical not."""
    return apply("logical_not", asarray(x))


@eager
def divide(a: Any, b: Any) -> Any:
    """a / b as a float."""
    both = (a, b) if is_float(a) or is_float(b) else (floats(a), floats(b))
    return apply("div", *(operand(x) for x in both))


@eager
def floor_divide(a: Any, b: Any) -> Any:
    """Quotient, rounded down."""
    return floor(divide(a, b)) if is_float(a) or is_float(b) else apply("floor_divide", operand(a), operand(b))


@eager
def mod(a: Any, b: Any) -> Any:
    """Remainder, with the sign of the divisor."""
    return a - floor_divide(a, b) * b if is_float(a) or is_float(b) else apply("mod", operand(a), operand(b))


@eager
def power(a: Any, b: Any) -> Any:
    """a to the power b; small integer powers are products, which are exact and differentiable to any order."""
    if isinstance(b, (int, np.integer)) and not isinstance(b, bool) and 0 <= b <= 8:
        a = asarray(a)
        if b == 0:
            return ones_like(a)
        half = power(a, b // 2) if b > 1 else None
        return a if half is None else half * half * a if b % 2 else half * half
    if weak(a) is not None and weak(b) is not None:
        a, b = asarray(a), asarray(b)
    return apply("pow", floats(asarray(a)) if weak(a) is None else float(a), operand(b))


def where(condition: Any, a: Any = None, b: Any = None) -> Any:
    """`a` where the condition holds, else `b`."""
    if a is None or b is None:
        hint = "rlx.numpy.nonzero(condition, size=...) gives indices, up to a static number of them"
        raise GraphError("where: takes a condition and two choices", hint=hint)
    return apply("where", asarray(condition), operand(a), operand(b))


@eager
def clip(x: Any, min: Any = None, max: Any = None, *, a_min: Any = None, a_max: Any = None) -> Any:
    """Clamp x to [min, max]."""
    min, max = a_min if min is None else min, a_max if max is None else max
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


@eager
def sign(x: Any) -> Any:
    """Sign of x: 1, 0 or -1."""
    return traced(build.zeros_like(as_value(x))) + where(x > 0, 1, where(x < 0, -1, 0)).astype(type_of(x).dtype)


def square(x: Any) -> Any:
    """x²."""
    return power(x, 2)


def reciprocal(x: Any) -> Any:
    """1 / x."""
    return divide(1.0, x)


@eager
def floor(x: Any) -> Any:
    """Round down to an integer."""
    near = round(x)
    return where(near > x, near - 1, near)


@eager
def ceil(x: Any) -> Any:
    """Round up to an integer."""
    near = round(x)
    return where(near < x, near + 1, near)


@eager
def log1p(x: Any) -> Any:
    """log(1 + x), accurate for small x."""
    x = floats(asarray(x))
    total = 1 + x
    rest = total - 1
    return where(equal(rest, 0), x, log(where(equal(rest, 0), 2.0, total)) * (x / where(equal(rest, 0), 1.0, rest)))


@eager
def expm1(x: Any) -> Any:
    """e^x - 1, accurate for small x."""
    x = floats(asarray(x))
    half = tanh(clip(x, -1.0, 1.0) * 0.5)
    return where(abs(x) < 1, 2 * half / (1 - half), exp(x) - 1)


@eager
def logaddexp(a: Any, b: Any) -> Any:
    """log(e^a + e^b)."""
    top = maximum(a, b)
    return top + log1p(exp(-abs(a - b)))


def softplus(x: Any) -> Any:
    """log(1 + e^x)."""
    return logaddexp(x, 0.0)


def isnan(x: Any) -> Any:
    """Whether x is NaN."""
    return not_equal(x, x)


def isinf(x: Any) -> Any:
    """Whether x is infinite."""
    return equal(abs(x), math.inf)


def isfinite(x: Any) -> Any:
    """Whether x is neither infinite nor NaN."""
    return less(abs(x), math.inf)
