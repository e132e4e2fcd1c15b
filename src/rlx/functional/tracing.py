"""Tracing: a Python function runs once on stand-ins for arrays, and what it does to them becomes a graph.

Outside of any trace, functions run at once: they are traced, compiled (equal graphs once) and run. On values of a graph
that is built by hand they build in that graph.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import rlx.hir.blocks  # noqa: F401  declares the ops
from rlx.arrays import Array
from rlx.errors import DTypeError, GraphError
from rlx.functional import tree
from rlx.functional.graph_values import on_values
from rlx.functional.tracers import Line, Traced, as_array, current, is_weak, tracing, type_of, weak_type
from rlx.ir import registry
from rlx.ir.graph import Graph, Value
from rlx.ir.rewrite import inline
from rlx.module import GraphModule
from rlx.runtime import nan_switch
from rlx.runtime.session import Session
from rlx.transforms.build import declare
from rlx.transforms.walk import leaves as leaf_nodes
from rlx.types import TensorType

RESULT = "its result"


# -- functions --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Function:
    """A traced function: a graph of its leaves and of what it captured, and the structure of what it gives."""

    graph: Graph
    captured: list[Traced]
    given: tree.Structure
    weak: Sequence[bool]  # which of the outputs are numbers
    prints: Sequence[Line] = ()
    printed: Graph | None = None  # the same graph, which also gives what is printed, after its other outputs

    @property
    def whole(self) -> Graph:
        """The graph that gives all there is: `printed`, where something is."""
        return self.printed or self.graph

    def outputs(self, values: Sequence[Any]) -> Any:
        return self.given.unflatten(values)


def need_function(where: str, function: Any) -> Any:
    """The function; an error that says what takes graphs where it is one."""
    if callable(function):
        return function
    graph = isinstance(function, (Graph, GraphModule))
    takes = "rlx.compile" if where in ("jit", "trace") else f"rlx.transforms.{where}"
    found = f"graph {function.name!r}" if graph else f"{type(function).__name__}"
    raise GraphError(f"{where}: takes a function, found {found}", hint=f"{takes} takes graphs" if graph else None)


def names_of(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """A name for each leaf of the arguments, by the parameters of the function."""
    try:
        bound = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        bound = []
    names = []
    for i, argument in enumerate(args):
        stem = bound[i] if i < len(bound) else f"x{i}"
        names += tree.structure(argument).paths(stem)
    for key in sorted(kwargs):
        names += tree.structure(kwargs[key]).paths(key)
    return names


def leaf_types(where: str, leaves: Sequence[Any], names: Sequence[str]) -> list[TensorType]:
    """The types of the leaves of arguments; an error that names the one that is neither an array nor a number."""
    return [leaf_type(where, x, name) for x, name in zip(leaves, names, strict=True)]


def leaf_type(where: str, leaf: Any, name: str) -> TensorType:
    """`leaf_types` of one."""
    try:
        return type_of(leaf)
    except DTypeError as error:
        if isinstance(leaf, (int, float, np.ndarray, np.generic)):
            raise DTypeError(f"{where}: {name}: {error}", hint=error.hint) from None
        if where == "jit":
            static = f"{name!r}" if name.isidentifier() else "..., with an argument of its own for it"
            hint = f"Python values are static arguments: static_argnames={static}"
        elif name.startswith(RESULT):
            hint = "a traced function returns arrays, numbers and trees of them"
        else:
            hint = "bind Python values first, with functools.partial or a lambda"
        found = f"{name} is a {type(leaf).__name__}"
        raise DTypeError(f"{where}: {found}, wanted an array, a number or a tree of them", hint=hint) from None


def trace_leaves(
    function: Callable[..., Any], shape: tree.Structure, types: Sequence[TensorType],
    names: Sequence[str] | None = None, *, weak: Sequence[bool] | None = None, prints: bool = False,
) -> Function:  # fmt: skip
    """The graph of a function of (args, kwargs), whose leaves have these types. `prints`: the caller prints for it.

    `weak` says which leaves are numbers.
    """
    label = getattr(function, "__name__", type(function).__name__)
    with tracing("".join(c if c.isalnum() else "_" for c in label) or "function") as trace:
        trace.prints = [] if prints else None
        names = names or [f"x{i}" for i in range(len(types))]
        weak = weak or [False] * len(types)
        given = [Traced(trace, declare(trace.graph, n, t), w) for n, t, w in zip(names, types, weak, strict=True)]
        args, kwargs = shape.unflatten(given)
        made = function(*args, **kwargs)
        found, structure = tree.flatten(made)
        for i, leaf in enumerate(found):
            if not isinstance(leaf, Traced):
                leaf_type(label, leaf, structure.paths(RESULT)[i])
        results = [trace.constant(leaf) for leaf in found]
        lines = trace.prints or []
        shown = [trace.constant(x) for line in lines for x in line.traced]
        printed = trace.graph.set_outputs([*results, *shown]).copy() if lines else None
        trace.graph.set_outputs(results)
    return Function(trace.graph, list(trace.captured), structure, [is_weak(x) for x in found], lines, printed)


def trace(function: Callable[..., Any], *args: Any) -> Callable[..., Graph]:
    """`trace(f)(*args)` is the graph of f for arguments of these shapes and types; arrays or `TensorType`s."""
    need_function("trace", function)
    if args:
        raise GraphError(f"trace: takes a function, found {len(args)} arguments more", hint="rlx.trace(f)(*args)")

    def wrapped(*args: Any, **kwargs: Any) -> Graph:
        found, shape = tree.flatten((args, kwargs))
        names = names_of(function, args, kwargs)
        leaves = zip(found, names, strict=True)
        types = [x if isinstance(x, TensorType) else leaf_type("trace", x, name) for x, name in leaves]
        weak = [not isinstance(x, TensorType) and is_weak(x) for x in found]
        return trace_leaves(function, shape, types, names, weak=weak, prints=True).graph

    return wrapped


# -- running ----------------------------------------------------------------------------------------------------------
_compiled: OrderedDict[str, Any] = OrderedDict()
_KEPT = 512  # compiled graphs


@functools.cache
def session(device: str = "cpu") -> Session:
    """What runs functions outside of a trace."""
    return Session(device)


def run(graph: Graph, arrays: Sequence[Any]) -> list[Array]:
    """The outputs of a graph of inputs, compiled once for all graphs that are equal."""
    if not graph.outputs:
        return []
    key = graph.fingerprint()
    compiled = (
        None if nan_switch.watching else _compiled.get(key)
    )  # an equal graph may be of another line of the program
    if compiled is None:
        compiled = _compiled[key] = session().compile(graph)
        if len(_compiled) > _KEPT:
            _compiled.popitem(last=False)
    _compiled.move_to_end(key)
    names = [n.attrs["name"] for n in leaf_nodes(graph)]
    return list(compiled.run({n: np.asarray(as_array(a), order="C") for n, a in zip(names, arrays, strict=True)}))


@on_values
def call(graph: Graph, operands: Sequence[Any]) -> list[Any]:
    """A graph applied to what stands for its leaves: part of the current trace, or run at once."""
    trace = current()
    if trace is None:
        return run(graph, operands)
    given = [trace.constant(x) for x in operands]
    return [Traced(trace, v) for v in inline(trace.graph, graph, given)]


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays that builds graphs: inside a trace it does, outside it is traced and run at once.

    On values of a graph it builds in that graph.
    """
    static = _static(function)

    @on_values
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if current() is not None:
            return function(*args, **kwargs)
        args = tuple(plain(x) if i in static else x for i, x in enumerate(args))
        kwargs = {k: plain(x) if k in static else x for k, x in kwargs.items()}
        found, shape = tree.flatten((args, kwargs))
        moving = [i for i, x in enumerate(found) if isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind in "biuf"]
        slots = set(moving)

        def only(*arrays: Any) -> Any:
            given = iter(arrays)
            args_, kwargs_ = shape.unflatten([next(given) if i in slots else x for i, x in enumerate(found)])
            return function(*args_, **kwargs_)

        only.__name__ = function.__name__
        _, flat = tree.flatten((tuple(found[i] for i in moving), {}))
        types, weak = [type_of(found[i]) for i in moving], [is_weak(found[i]) for i in moving]
        made = trace_leaves(only, flat, types, weak=weak, prints=True)
        outputs = call(made.whole, [*(found[i] for i in moving), *made.captured])
        if made.prints:
            from rlx.functional.printing import say_all

            say_all(made, outputs)
        return made.outputs(outputs[: len(made.graph.outputs)])

    return wrapped


def _static(function: Callable[..., Any]) -> set[int | str]:
    """Numbers and names of the parameters that say what to do, such as `axis: int`; data is `Any`, or a float."""
    found: set[int | str] = set()
    for i, p in enumerate(inspect.signature(function).parameters.values()):
        if p.annotation not in ("Any", "float", p.empty):
            found |= {i, p.name}
    return found


def plain(x: Any) -> Any:
    """NumPy scalars as Python's numbers, also inside tuples and lists: what says an axis or a size is no data."""
    if isinstance(x, (tuple, list)):
        return type(x)(map(plain, x)) if type(x) in (tuple, list) else x
    return x.item() if isinstance(x, np.generic) else x


def apply(op: str, *operands: Any, **attrs: Any) -> Any:
    """An op of the registry on arrays, numbers, stand-ins and values of a graph."""
    return _apply_at_once(op, *operands, **{k: plain(v) for k, v in attrs.items()})


def _apply(op: Any, *operands: Any, **attrs: Any) -> Any:
    trace = current()
    assert trace is not None
    given = [None if x is None else trace.value(x) for x in operands]
    weak = False
    if registry.ELEMENTWISE in registry.get(op).traits:
        start = 1 if op == "where" else 0  # the condition does not take part
        numbers = [is_weak(x) for x in operands[start:]]
        weak = all(numbers) and op != "cast"
        if any(numbers) and not weak and op != "cast":
            wanted = weak_type(operands[start:])
            given[start:] = [
                v.astype(wanted) if w and isinstance(v, Value) and v.dtype is not wanted else v
                for v, w in zip(given[start:], numbers, strict=True)
            ]
    results = trace.graph.build(op, given, {k: trace.value(v) for k, v in attrs.items()}).results
    made = tuple(Traced(trace, r, weak) for r in results)
    return made[0] if len(made) == 1 else made


_apply_at_once = eager(_apply)
