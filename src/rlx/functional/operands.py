"""Operands of array functions: arrays, Python numbers and traced arrays, and their values in the current trace."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.dtypes import F32, dtype, promote, weak
from rlx.functional.tracers import Traced, as_array, current, held_value, is_weak, type_of, weak_type
from rlx.functional.tracing import apply
from rlx.ir import registry
from rlx.ir.graph import Value

Axis = int | Sequence[int] | None


def axis_tuple(axis: int | Sequence[int]) -> tuple[int, ...]:
    """Return one axis or several as a tuple of Python ints."""
    return tuple(map(operator.index, axis)) if isinstance(axis, (tuple, list)) else (operator.index(axis),)  # type: ignore[arg-type]


def as_value(x: Any) -> Any:
    """Return the value of an operand in the current trace."""
    trace = current()
    assert trace is not None
    return trace.constant(x)


def traced(value: Any) -> Traced:
    trace = current()
    assert trace is not None
    return Traced(trace, value)


def is_float(x: Any) -> bool:
    return type_of(x).dtype.is_float


def asarray(x: Any, dtype: Any = None) -> Any:
    """Convert to an array; traced arrays and graph values pass through, and lists of those are stacked."""
    x = held_value(x)
    if isinstance(x, (list, tuple)) and has_traced(x):
        x = _stacked(x)
    if not is_traced(x):
        x = as_array(x)
        return x if dtype is None else x.astype(numpy_type(dtype))
    return x if dtype is None else apply("cast", x, dtype=dtype)


def _stacked(x: Any) -> Any:
    """Stack nested lists that have traced values; numbers among them take the dtype of the others."""
    from rlx.functional.shapes import stack

    rows = [_stacked(row) if isinstance(row, (list, tuple)) and has_traced(row) else row for row in x]
    strong = [type_of(row).dtype for row in rows if not isinstance(row, (list, tuple)) and not is_weak(row)]
    common = promote(*strong) if strong else None
    return stack([np.asarray(row, None if common is None else common.numpy) if isinstance(row, (list, tuple)) else row
                  for row in rows])  # fmt: skip


def is_traced(x: Any) -> bool:
    """Whether x is symbolic: a traced array, or a value of a graph built by hand or of a model flow."""
    return isinstance(x, (Traced, Value)) or hasattr(type(x), "__rlx_value__")


def has_traced(x: Any) -> bool:
    return is_traced(x) or (isinstance(x, (list, tuple)) and any(has_traced(v) for v in x))


def numpy_type(like: Any) -> np.dtype[Any]:
    return dtype(like).numpy


def floats(x: Any) -> Any:
    """Cast integers to f32; floats pass through."""
    if is_float(x):
        return x
    if weak(x) is not None:
        return float(x)
    cast = astype(x, "f32")
    return Traced(cast.trace, cast.value, is_weak(x)) if isinstance(cast, Traced) else cast


def float_operands(*xs: Any) -> list[Any]:
    """Convert operands to arrays of one float dtype: that of the floats among them, else f32."""
    dtypes = [type_of(x).dtype for x in xs if not is_weak(x) and is_float(x)]
    common = promote(*dtypes) if dtypes else F32
    return [astype(x, common) for x in xs]


def operand(x: Any) -> Any:
    """Convert to an array, except Python numbers, which take the dtype of the other operands."""
    return x if weak(x) is not None else asarray(x)


def same_dtype(xs: Sequence[Any]) -> list[Any]:
    """Convert parts of one array; Python numbers among them take the dtype of the others."""
    wanted = weak_type(xs)
    if wanted is None:
        return [asarray(x) for x in xs]
    trace = current()
    assert trace is not None
    constants = [x if weak(x) is None else traced(trace.graph.constant(x, wanted)) for x in xs]
    return [astype(x, wanted) if is_weak(x) else asarray(x) for x in constants]


def astype(x: Any, dtype: Any) -> Any:
    """Cast x to another dtype."""
    if weak(x) is not None:
        return np.asarray(x).astype(numpy_type(dtype))
    if not is_traced(x) and current() is None:
        return as_array(x).astype(numpy_type(dtype))
    return apply("cast", asarray(x), dtype=dtype)


def function_of(name: str) -> Callable[..., Any] | None:
    """Return an op of the registry as a function of arrays; None if there is no user-facing op of this name."""
    definition = registry.OPS.get(name)
    if definition is None or definition.level == registry.HIR:
        return None
    if definition.traits & {registry.LEAF, registry.FUSED, registry.CONTROL}:
        return None

    def function(*operands: Any, **attrs: Any) -> Any:
        return apply(name, *(None if x is None else operand(x) for x in operands), **attrs)

    function.__name__, function.__doc__ = name, definition.doc
    return function
