"""What functions of arrays take: arrays, numbers and stand-ins, and how each becomes a value of the current trace."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.dtypes import dtype, weak
from rlx.functional.tracers import Traced, as_array, current, held_value, is_weak, type_of, weak_type
from rlx.functional.tracing import apply
from rlx.ir import registry
from rlx.ir.graph import Value

Axis = int | Sequence[int] | None


def axis_tuple(axis: int | Sequence[int]) -> tuple[int, ...]:
    """One axis or several, as a tuple of Python's ints."""
    return tuple(map(operator.index, axis)) if isinstance(axis, (tuple, list)) else (operator.index(axis),)  # type: ignore[arg-type]


def as_value(x: Any) -> Any:
    """The value of an operand in the current trace."""
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
    """An array, or a stand-in or value of a graph as it is; lists of those are stacked."""
    x = held_value(x)
    if isinstance(x, (list, tuple)) and has_traced(x):
        from rlx.functional.shapes import stack

        x = stack(x)
    if not is_traced(x):
        x = as_array(x)
        return x if dtype is None else x.astype(numpy_type(dtype))
    return x if dtype is None else apply("cast", x, dtype=dtype)


def is_traced(x: Any) -> bool:
    """Whether it has no numbers yet: a stand-in, or a value of a graph that is built by hand."""
    return isinstance(x, (Traced, Value))


def has_traced(x: Any) -> bool:
    return is_traced(x) or (isinstance(x, (list, tuple)) and any(has_traced(v) for v in x))


def numpy_type(like: Any) -> np.dtype[Any]:
    return dtype(like).numpy


def floats(x: Any) -> Any:
    """Integers as f32: what functions of floats do with them."""
    if is_float(x):
        return x
    if weak(x) is not None:
        return float(x)
    made = astype(x, "f32")
    return Traced(made.trace, made.value, is_weak(x)) if isinstance(made, Traced) else made


def operand(x: Any) -> Any:
    """Numbers stay numbers, which beside arrays have no type of their own."""
    return x if weak(x) is not None else asarray(x)


def together(xs: Sequence[Any]) -> list[Any]:
    """Arrays that lie in one array: numbers among them take the type of the others."""
    wanted = weak_type(xs)
    if wanted is None:
        return [asarray(x) for x in xs]
    trace = current()
    assert trace is not None
    constants = [x if weak(x) is None else traced(trace.graph.constant(x, wanted)) for x in xs]
    return [astype(x, wanted) if is_weak(x) else asarray(x) for x in constants]


def astype(x: Any, dtype: Any) -> Any:
    """x in another element type."""
    if weak(x) is not None:
        return np.asarray(x).astype(numpy_type(dtype))
    if not is_traced(x) and current() is None:
        return as_array(x).astype(numpy_type(dtype))
    return apply("cast", asarray(x), dtype=dtype)


def function_of(name: str) -> Callable[..., Any] | None:
    """An op of the registry as a function of arrays; None where no user op is called that."""
    definition = registry.OPS.get(name)
    if definition is None or definition.level == registry.HIR:
        return None
    if definition.traits & {registry.LEAF, registry.FUSED, registry.CONTROL}:
        return None

    def function(*operands: Any, **attrs: Any) -> Any:
        return apply(name, *(None if x is None else operand(x) for x in operands), **attrs)

    function.__name__, function.__doc__ = name, definition.doc
    return function
