"""Lets functions of arrays accept values of a graph built by hand: they then add nodes to that graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.errors import GraphError
from rlx.functional import tree
from rlx.functional.tracers import Traced, current, held_value, traces, tracing
from rlx.ir.graph import Graph, Value


def on_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of arrays: called with values of a graph, it adds nodes to that graph and returns its values."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not any([_has_value(x) for x in args]) and not any([_has_value(x) for x in kwargs.values()]):
            return function(*args, **kwargs)
        leaves, shape = tree.flatten((_held([*args]), _held(kwargs)))
        graph = next(x.graph for x in leaves if isinstance(x, Value))
        enclosing = next((trace for trace in traces() if trace.graph is graph), None)
        if enclosing is not None and enclosing is not current():  # a body reads a value of an enclosing trace
            args_, kwargs_ = shape.unflatten([Traced(enclosing, x) if isinstance(x, Value) else x for x in leaves])
            return function(*args_, **kwargs_)
        with tracing(graph) as trace:
            traced_leaves = [Traced(trace, _check_graph(graph, x)) if isinstance(x, Value) else x for x in leaves]
            args_, kwargs_ = shape.unflatten(traced_leaves)
            results, structure = tree.flatten(function(*args_, **kwargs_))
            return structure.unflatten([trace.constant(x) if isinstance(x, Traced) else x for x in results])

    return wrapped


def method_on_values(name: str) -> Callable[..., Any] | None:
    """Return a method of traced arrays as a function that takes graph values too; None if there is none."""
    from rlx.functional import arrays  # imports this module

    return on_values(getattr(arrays, arrays.METHODS[name])) if name in arrays.METHODS else None


def property_on_values(name: str) -> Callable[[Any], Any] | None:
    """Return a property of traced arrays as a function that takes graph values too; None if there is none."""
    from rlx.functional import arrays  # imports this module

    if name == "at":  # holds the value: its updates are functions of arrays themselves
        return arrays.At
    return on_values(arrays.PROPERTIES[name]) if name in arrays.PROPERTIES else None


def _has_value(x: Any) -> bool:
    """Whether x is a value of a graph, wraps one, or is a tree with one among its leaves."""
    if isinstance(x, (np.ndarray, np.generic, Traced)):
        return False
    if isinstance(x, (list, tuple)):
        return any([_has_value(v) for v in x])
    if isinstance(x, dict):
        return any([_has_value(v) for v in x.values()])
    if isinstance(x, Value) or hasattr(type(x), "__rlx_value__"):
        return True
    parts = None if isinstance(x, (str, int, float)) else tree.node(x)
    return parts is not None and any([_has_value(v) for v in parts.children])


def _held(x: Any) -> Any:
    """Unwrap objects that hold graph values, such as those of a model flow, also inside lists, tuples and dicts."""
    if type(x) in (list, tuple):
        return type(x)(_held(v) for v in x)
    if type(x) is dict:
        return {key: _held(v) for key, v in x.items()}
    return held_value(x)


def _check_graph(graph: Graph, x: Value) -> Value:
    if x.graph is not graph:
        message = f"{x!r}: belongs to graph {x.graph.name!r}, not to {graph.name!r}"
        raise GraphError(message, hint="build both in one graph")
    return x
