"""NumPy functions on graph values: those that are ops build them, others are those of traced arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import GraphError
from rlx.types import Size

if TYPE_CHECKING:
    from rlx.ir.graph import Graph

_SAME = "add floor_divide maximum minimum matmul exp log sqrt sin cos tan tanh less less_equal greater greater_equal"
# NumPy name -> op. `==` between an array and a value is a NumPy function too, and stays an error: values compare by
# identity.
UFUNCS = {name: name for name in f"{_SAME} logical_and logical_or logical_not".split()} | {
    "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "remainder": "mod", "power": "pow",
    "negative": "neg", "absolute": "abs", "arctan": "atan", "rint": "round",
}  # fmt: skip

_NO_DATA = "It has no data while the graph is built."
# Methods of torch's tensors -> what to write instead.
TORCH_METHODS = {
    "view": "Use reshape(...).", "permute": "Use transpose(0, 2, 1).", "unsqueeze": "Use rlx.expand_dims(x, axis).",
    "float": 'Use astype("f32").', "half": 'Use astype("f16").', "long": 'Use astype("i64").', "dim": "Use ndim.",
    "masked_fill": "Use rlx.where(mask, number, x).", "chunk": "Use rlx.split(x, parts, axis).",
    "contiguous": "Leave it out: layouts are chosen by the compiler.", "detach": "Use rlx.stop_gradient(x).",
    "numpy": _NO_DATA, "item": _NO_DATA, "tolist": _NO_DATA,
}  # fmt: skip


def array_method(name: str) -> Callable[..., Any] | None:
    """Return a method of traced arrays as a function that also takes graph values; None if there is none."""
    from rlx.functional.graph_values import method_on_values  # an upward import: few graphs call NumPy

    return method_on_values(name)


def array_property(name: str) -> Callable[[Any], Any] | None:
    """Return a property of traced arrays, such as `T`, as a function that also takes graph values, or None."""
    from rlx.functional.graph_values import property_on_values  # an upward import, as above

    return property_on_values(name)


def _alternative(name: str) -> str:
    return f"rlx.{name}(...), if rlx has it, takes graph values"


class NumpyFunctions:
    """Makes a value an operand of NumPy's functions."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def graph(self) -> Graph: ...

        @property
        def shape(self) -> tuple[Size, ...]: ...

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        name = ufunc.__name__
        if method != "__call__":
            raise GraphError(f"numpy.{name}.{method}: has no form for graph values", hint="x.sum(axis=...) is a sum")
        if kwargs:
            hint = f"rlx.{name}(...) gives a new value; x.astype(...) changes its type"
            raise GraphError(f"numpy.{name}: {', '.join(kwargs)} has no meaning for graph values", hint=hint)
        if name in UFUNCS:
            return self.graph.one(UFUNCS[name], *inputs)
        if name in ("equal", "not_equal"):
            raise GraphError(f"numpy.{name}: is no op of graphs", hint=_alternative(name))
        return self._as_traced(ufunc, inputs, kwargs)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.shape:
            return self.shape
        return self._as_traced(function, args, kwargs)

    def _as_traced(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a NumPy function as on a traced array; its nodes go to the graph of the value."""
        from rlx.functional.graph_values import on_values  # an upward import: few graphs call NumPy

        return on_values(function)(*args, **kwargs)
