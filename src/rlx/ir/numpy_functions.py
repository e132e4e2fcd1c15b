"""NumPy functions on graph values: those that are ops build them, others raise an error that says what to use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import GraphError
from rlx.types import Size

if TYPE_CHECKING:
    from rlx.ir.graph import Graph, Value

_SAME = "add floor_divide maximum minimum matmul exp log sqrt sin cos tan tanh less less_equal greater greater_equal"
# NumPy name -> op. `==` between an array and a value is a NumPy function too, and stays an error: values compare by
# identity.
UFUNCS = {name: name for name in f"{_SAME} logical_and logical_or logical_not".split()} | {
    "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "remainder": "mod", "power": "pow",
    "negative": "neg", "absolute": "abs", "arctan": "atan", "rint": "round",
}  # fmt: skip


def _alternative(name: str) -> str:
    return f"rlx.{name}(...), if rlx has it, takes graph values"


class NumpyFunctions:
    """Makes a value an operand of NumPy's elementwise functions and of matmul, and of nothing else."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def graph(self) -> Graph: ...

        @property
        def shape(self) -> tuple[Size, ...]: ...

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Value:
        name = ufunc.__name__
        if method != "__call__":
            raise GraphError(f"numpy.{name}.{method}: has no form for graph values", hint="x.sum(axis=...) is a sum")
        if kwargs:
            hint = f"rlx.{name}(...) gives a new value; x.astype(...) changes its type"
            raise GraphError(f"numpy.{name}: {', '.join(kwargs)} has no meaning for graph values", hint=hint)
        if name not in UFUNCS:
            raise GraphError(f"numpy.{name}: is no op of graphs", hint=_alternative(name))
        return self.graph.one(UFUNCS[name], *inputs)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.shape:
            return self.shape
        name = function.__name__
        raise GraphError(f"numpy.{name}: takes numbers, and a graph value has none yet", hint=_alternative(name))
