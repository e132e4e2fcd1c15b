"""Functions of arrays on values of graphs that are built by hand: they build in the graph of those values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from rlx.errors import GraphError
from rlx.functional import tree
from rlx.functional.tracers import Traced, current, held_value, traces, tracing
from rlx.ir.graph import Graph, Value


def on_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays that, given values of a graph, builds in that graph and gives values of it."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not any([_has_value(x) for x in args]) and not any([_has_value(x) for x in kwargs.values()]):
            return function(*args, **kwargs)
        as_value = [held_value(x) for x in args], {k: held_value(x) for k, x in kwargs.items()}
        found, shape = tree.flatten(as_value)
        graph = next(x.graph for x in found if isinstance(x, Value))
        around = next((trace for trace in traces() if trace.graph is graph), None)
        if around is not None and around is not current():  # a body reads what is around it
            args_, kwargs_ = shape.unflatten([Traced(around, x) if isinstance(x, Value) else x for x in found])
            return function(*args_, **kwargs_)
        with tracing(graph) as trace:
            given = [Traced(trace, _of(graph, x)) if isinstance(x, Value) else x for x in found]
            args_, kwargs_ = shape.unflatten(given)
            made, structure = tree.flatten(function(*args_, **kwargs_))
            return structure.unflatten([trace.constant(x) if isinstance(x, Traced) else x for x in made])

    return wrapped


def _has_value(x: Any) -> bool:
    """Whether it is a value of a graph, holds one, or is a tree with one among its leaves."""
    if isinstance(x, (np.ndarray, np.generic, Traced)):
        return False
    if isinstance(x, (list, tuple)):
        return any([_has_value(v) for v in x])
    if isinstance(x, dict):
        return any([_has_value(v) for v in x.values()])
    if isinstance(x, Value) or hasattr(type(x), "__rlx_value__"):
        return True
    return is_dataclass(x) and not isinstance(x, type) and any([_has_value(getattr(x, f.name)) for f in fields(x)])


def _of(graph: Graph, x: Value) -> Value:
    if x.graph is not graph:
        message = f"{x!r}: belongs to graph {x.graph.name!r}, not to {graph.name!r}"
        raise GraphError(message, hint="build both in one graph")
    return x
