"""The meaning of every scalar operation of the loop language, as functions over NumPy arrays.

Emitters implement the same operations for their devices; the toy backend calls these. Integers wrap, `max` and `min`
propagate NaN, integer division rounds down.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlx.dtypes import BOOL, DType


def _erf(x: Any) -> Any:
    return np.asarray(_ERF(x), np.float64).astype(np.asarray(x).dtype)


def _gelu(x: Any) -> Any:
    """x · erfc(-x / √2) / 2, which does not cancel for very negative x."""
    wide = np.asarray(x, np.float64)
    return (0.5 * wide * np.asarray(_ERFC(-wide / math.sqrt(2)), np.float64)).astype(np.asarray(x).dtype)


_ERF, _ERFC = (np.frompyfunc(function, 1, 1) for function in (math.erf, math.erfc))


def _order(x: Any) -> Any:
    plain = np.asarray(x) + np.asarray(x).dtype.type(0)  # -0.0 becomes 0.0
    bits = plain.view(np.int64 if plain.itemsize == 8 else np.int32)
    largest = bits.dtype.type(np.iinfo(bits.dtype).max)
    return np.where(np.isnan(plain), largest, np.where(bits < 0, bits ^ largest, bits))


def _bits(x: Any) -> Any:
    x = np.asarray(x)
    return x.view(np.int32 if x.dtype == np.float32 else np.float32)


def _nearest(x: Any) -> Any:
    return np.rint(x).astype(np.int64 if np.asarray(x).itemsize == 8 else np.int32)


def _dot_bytes(total: Any, x: Any, y: Any) -> Any:
    for byte in range(4):
        total = total + ((x >> 8 * byte) & 255) * (y << 24 - 8 * byte >> 24)
    return total


# By the names of `SCALAR_OPS`; `cast` depends on the result type and is `dtypes.cast_array`.
MEANINGS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "neg": operator.neg,
    "fma": lambda a, b, c: a * b + c, "abs": np.abs, "max": np.maximum, "min": np.minimum, "pow": np.power,
    "floordiv": np.floor_divide, "mod": np.mod, "quot": operator.floordiv, "rem": operator.mod,
    "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos, "tan": np.tan, "atan": np.arctan,
    "tanh": np.tanh, "erf": _erf, "gelu": _gelu,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": np.logical_not,
    "shl": operator.lshift, "shr": operator.rshift, "select": np.where,
    "order": _order, "bits": _bits, "nearest": _nearest,
    "dot_u8": _dot_bytes, "dot_u7": _dot_bytes,
}  # fmt: skip
COMBINE: Mapping[str, Callable[..., Any]] = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def identity(op: str, dtype: DType) -> Any:
    """The identity element of a reduction."""
    if op in ("sum", "prod"):
        return dtype.numpy.type(op == "prod")
    if dtype.is_float:
        return dtype.numpy.type(-np.inf if op == "max" else np.inf)
    if dtype is BOOL:
        return np.bool_(op == "min")
    limits = np.iinfo(dtype.numpy)
    return dtype.numpy.type(limits.min if op == "max" else limits.max)
