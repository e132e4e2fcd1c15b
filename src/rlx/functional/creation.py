"""Array creation, under NumPy's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.dtypes import dtype
from rlx.functional.graph_values import on_values
from rlx.functional.operands import asarray, astype, float_operands, is_traced, numpy_type, traced
from rlx.functional.tracers import current, type_of
from rlx.functional.tracing import apply, eager
from rlx.transforms import build
from rlx.types import Dim, as_shape


def _full(shape: Any, value: float, like: Any) -> Any:
    sizes = as_shape((shape,) if isinstance(shape, (int, Dim)) else shape)
    if current() is None:
        return np.full(sizes, value, numpy_type(like))
    trace = current()
    assert trace is not None
    return traced(build.full(trace.graph, value, type_of(np.zeros((), numpy_type(like))).with_shape(*sizes)))


def array(x: Any, dtype: Any = None) -> Any:
    """Convert to a new array; traced values in nested lists are stacked."""
    converted = asarray(x, dtype)
    return converted.copy() if isinstance(converted, np.ndarray) else converted


def copy(x: Any) -> Any:
    """Return a copy; a traced array is never changed in place, and returned as it is."""
    return array(x)


def zeros(shape: Any, dtype: Any = "f32") -> Any:
    """Array of zeros."""
    return _full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = "f32") -> Any:
    """Array of ones."""
    return _full(shape, 1, dtype)


def empty(shape: Any, dtype: Any = "f32") -> Any:
    """Array of zeros: rlx has no uninitialised arrays."""
    return _full(shape, 0, dtype)


def full(shape: Any, value: Any, dtype: Any = "f32") -> Any:
    """Array filled with `value`, which may be traced or broadcast."""
    if not isinstance(value, (bool, int, float, np.generic)):
        sizes = as_shape((shape,) if isinstance(shape, (int, Dim)) else shape)
        return apply("expand", asarray(value, dtype), shape=sizes)
    return _full(shape, value, dtype)  # type: ignore[arg-type]


@on_values
def full_like(x: Any, value: Any, dtype: Any = None, shape: Any = None) -> Any:
    """Array filled with `value`, with the shape and dtype of x."""
    return full(type_of(x).shape if shape is None else shape, value, dtype or type_of(x).dtype)


@on_values
def zeros_like(x: Any, dtype: Any = None, shape: Any = None) -> Any:
    """Zeros with the shape and dtype of x."""
    return full_like(x, 0, dtype, shape)


@on_values
def ones_like(x: Any, dtype: Any = None, shape: Any = None) -> Any:
    """Ones with the shape and dtype of x."""
    return full_like(x, 1, dtype, shape)


@on_values
def empty_like(x: Any, dtype: Any = None, shape: Any = None) -> Any:
    """Zeros with the shape and dtype of x: rlx has no uninitialised arrays."""
    return full_like(x, 0, dtype, shape)


@eager
def iota(size: Any, like: Any) -> Any:
    trace = current()
    assert trace is not None
    return traced(build.iota(trace.graph, size, dtype(like)))


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Any:
    """start, start + step, ... up to but excluding stop; a symbolic size may be the only argument."""
    if isinstance(start, Dim):
        return iota(start, dtype or "i32")
    values = np.arange(start, stop, step) if stop is not None else np.arange(0, start, step)
    return values.astype(numpy_type(dtype or ("i32" if values.dtype.kind in "iu" else "f32")))


def linspace(start: Any, stop: Any, num: int = 50, endpoint: bool = True, dtype: Any = None) -> Any:
    """`num` evenly spaced numbers from start to stop; traced bounds give a traced result."""
    steps = num - 1 if endpoint else num
    if is_traced(start) or is_traced(stop):
        start, stop = float_operands(start, stop)
        parts = np.arange(num).astype(numpy_type(type_of(start).dtype)) / np.maximum(steps, 1).astype(start.dtype)
        values = start + (stop - start) * parts
        return values if dtype is None else astype(values, dtype)
    return np.linspace(start, stop, num, endpoint).astype(numpy_type(dtype or "f32"))


def logspace(start: Any, stop: Any, num: int = 50, endpoint: bool = True, base: float = 10.0, dtype: Any = None) -> Any:
    """`num` numbers from base^start to base^stop, evenly spaced by their logarithms."""
    exponents = np.linspace(start, stop, num, endpoint)
    return (base**exponents).astype(numpy_type(dtype or "f32"))


def geomspace(start: Any, stop: Any, num: int = 50, endpoint: bool = True, dtype: Any = None) -> Any:
    """`num` numbers from start to stop with a constant ratio."""
    return np.geomspace(start, stop, num, endpoint).astype(numpy_type(dtype or "f32"))


def eye(n: int, m: int | None = None, k: int = 0, dtype: Any = "f32") -> Any:
    """Matrix with ones on the k-th diagonal."""
    return np.eye(n, m, k, dtype=numpy_type(dtype))


def identity(n: int, dtype: Any = "f32") -> Any:
    """Identity matrix."""
    return np.eye(n, dtype=numpy_type(dtype))


def tri(n: int, m: int | None = None, k: int = 0, dtype: Any = "f32") -> Any:
    """Matrix with ones on and below the k-th diagonal."""
    return np.tri(n, m, k, dtype=numpy_type(dtype))
