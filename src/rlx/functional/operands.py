"""What functions of arrays take: arrays, numbers and stand-ins, and how each becomes a value of the current trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.dtypes import dtype
from rlx.functional.tracing import Traced, apply, as_array, current, held_value, type_of
from rlx.ir import registry
from rlx.ir.graph import Value

Axis = int | Sequence[int] | None


def held(x: Any) -> Any:
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

        x = stack([asarray(v) for v in x])
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
    return x if is_float(x) else astype(x, "f32")


def operand(x: Any) -> Any:
    """Numbers stay numbers, which have no type of their own."""
    return x if isinstance(x, (bool, int, float)) else asarray(x)


def astype(x: Any, dtype: Any) -> Any:
    """x in another element type."""
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
