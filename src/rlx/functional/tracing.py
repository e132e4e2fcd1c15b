"""Tracing: a Python function runs once on stand-ins for arrays, and what it does to them becomes a graph.

A `Trace` is a graph under construction; traces nest, as transforms of functions that contain transforms do. What a
function reads from around it is captured as a further input. Outside of any trace, functions run at once: they are
traced, compiled (equal graphs once) and run. On values of a graph that is built by hand they build in that graph.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NoReturn

import numpy as np

import rlx.hir.blocks  # noqa: F401  declares the ops
from rlx.dtypes import dtype
from rlx.errors import DTypeError, GraphError, nearest
from rlx.functional import tree
from rlx.ir.graph import Graph, Value
from rlx.ir.provenance import here
from rlx.ir.rewrite import inline
from rlx.runtime import finite
from rlx.runtime.session import Session
from rlx.transforms.build import declare
from rlx.transforms.walk import leaves as leaf_nodes
from rlx.types import Size, TensorType

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Print:
    """A line to print: a format, and the leaves of (values, named values) that go into it."""

    format: str
    shape: tree.Structure
    leaves: Sequence[Any]

    @property
    def traced(self) -> list[Traced]:
        return [x for x in self.leaves if isinstance(x, Traced)]

    def filled(self, values: Iterator[Any]) -> Print:
        """The line with values in place of its traced ones."""
        return replace(self, leaves=_filled(self.leaves, values))

    def batched(self) -> Print:
        """The line once its values have a batch axis before their others."""
        return self


@dataclass(frozen=True)
class Repeated:
    """What the body of a loop or a branch prints: all its lines at each step, in place of traced values their rows.

    `rows` has an array for each traced value of the lines, `steps` is how many of its rows count. Under `vmap` there
    are batch axes before that of the rows, and the longest loop of the batch counts.
    """

    lines: Sequence[Line]
    rows: Sequence[Any]
    steps: Any
    reverse: bool = False
    axis: int = 0

    @property
    def traced(self) -> list[Traced]:
        return [x for x in (*self.rows, self.steps) if isinstance(x, Traced)]

    def filled(self, values: Iterator[Any]) -> Repeated:
        """The lines with values in place of their traced ones."""
        *rows, steps = _filled([*self.rows, self.steps], values)
        return replace(self, rows=rows, steps=steps)

    def batched(self) -> Repeated:
        """The lines once their values have a batch axis before their others."""
        return replace(self, lines=[line.batched() for line in self.lines], axis=self.axis + 1)


Line = Print | Repeated


def _filled(leaves: Sequence[Any], values: Iterator[Any]) -> list[Any]:
    return [next(values) if isinstance(x, Traced) else x for x in leaves]


@dataclass(eq=False)
class Trace:
    """A graph under construction, what it has captured from around it, and what it wants to print.

    `prints` is None where nobody would print it, as in the rules of a function that has its own. A graph that is built
    by hand (`by_hand`) captures nothing: its inputs are declared by whoever builds it.
    """

    graph: Graph
    captured: dict[Traced, Value] = field(default_factory=dict)
    prints: list[Line] | None = None
    by_hand: bool = False

    def value(self, x: Any) -> Any:
        """What stands for an operand in this graph: a value, or an array or number, which becomes a constant."""
        if not isinstance(x, Traced):
            return x
        if x.trace is self or x.trace.graph is self.graph:
            return x.value
        if x.trace not in _stack.get():
            _leaked(x)
        if self.by_hand:
            hint = "build both in one graph, or trace a function of both"
            raise GraphError(f"{x!r}: is of a function that is traced, not of graph {self.graph.name!r}", hint=hint)
        if x not in self.captured:
            self.captured[x] = declare(self.graph, "captured", x.value.type)
        return self.captured[x]

    def constant(self, x: Any) -> Value:
        """`value`, with arrays and numbers as constants."""
        found = self.value(x)
        return found if isinstance(found, Value) else self.graph.constant(as_array(found))


_stack: ContextVar[tuple[Trace, ...]] = ContextVar("traces", default=())


def current() -> Trace | None:
    """The innermost trace; None outside of all."""
    found = _stack.get()
    return found[-1] if found else None


@contextmanager
def tracing(into: str | Graph) -> Iterator[Trace]:
    """A trace for what happens inside, into a new graph of this name or into one that is built by hand."""
    made = Trace(into, by_hand=True) if isinstance(into, Graph) else Trace(Graph(into))
    token = _stack.set((*_stack.get(), made))
    try:
        yield made
    finally:
        _stack.reset(token)


def _leaked(x: Traced) -> NoReturn:
    hint = "return it from the function, or pass it in as an argument"
    raise GraphError(f"{x!r}: is used outside of the function that was traced when it was made", hint=hint)


class Traced:
    """A stand-in for an array while a function is traced. It has no numbers, only a shape and an element type."""

    __array_priority__ = 1000
    __slots__ = ("__weakref__", "trace", "value")

    def __init__(self, trace: Trace, value: Value) -> None:
        self.trace = trace
        self.value = value

    # -- type ---------------------------------------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[Size, ...]:
        return self.value.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.value.dtype.numpy

    @property
    def ndim(self) -> int:
        return self.value.rank

    @property
    def size(self) -> Size:
        return self.value.type.elements

    def __len__(self) -> int:
        if not self.shape or not isinstance(self.shape[0], int):
            raise GraphError(f"{self!r}: has no length while it is traced", hint="shape[0] is its first size")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<traced {self.value.type}>"

    __hash__ = object.__hash__

    def __rlx_value__(self) -> Value:
        """What graphs read, when a traced array is handed to an op of a graph by hand."""
        trace = current()
        assert trace is not None
        return trace.constant(self)

    # -- what has no answer yet ---------------------------------------------------------------------------------------
    def _unknown(self, what: str, hint: str) -> NoReturn:
        raise GraphError(f"{self!r}: has no {what} while it is traced", hint=hint, notes=[f"at: {here()}"])

    def __bool__(self) -> bool:
        self._unknown("truth value", "use rlx.where to choose numbers, rlx.cond or rlx.while_loop to choose code")

    def __int__(self) -> int:
        self._unknown("int", "a number that code depends on is a static argument: rlx.jit(f, static_argnums=...)")

    def __index__(self) -> int:
        self._unknown("index", "rlx.take reads by data, and rlx.scan or rlx.fori_loop count")

    def __float__(self) -> float:
        self._unknown("float", "rlx functions and those of NumPy work on it as it is")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self._unknown("numbers", "this NumPy function has no traced form; look for one in rlx")

    def item(self) -> NoReturn:
        """A number; there is none yet."""
        self._unknown("number", "return it from the traced function")

    # -- operators ----------------------------------------------------------------------------------------------------
    def __add__(self, other: Any) -> Any:
        return _numpy("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return _numpy("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return _numpy("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return _numpy("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return _numpy("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return _numpy("mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return _numpy("divide", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _numpy("divide", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _numpy("floor_divide", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _numpy("floor_divide", other, self)

    def __mod__(self, other: Any) -> Any:
        return _numpy("mod", self, other)

    def __rmod__(self, other: Any) -> Any:
        return _numpy("mod", other, self)

    def __pow__(self, other: Any) -> Any:
        return _numpy("power", self, other)

    def __rpow__(self, other: Any) -> Any:
        return _numpy("power", other, self)

    def __matmul__(self, other: Any) -> Any:
        return _numpy("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _numpy("matmul", other, self)

    def __eq__(self, other: object) -> Any:
        return _numpy("equal", self, other)

    def __ne__(self, other: object) -> Any:
        return _numpy("not_equal", self, other)

    def __lt__(self, other: Any) -> Any:
        return _numpy("less", self, other)

    def __le__(self, other: Any) -> Any:
        return _numpy("less_equal", self, other)

    def __gt__(self, other: Any) -> Any:
        return _numpy("greater", self, other)

    def __ge__(self, other: Any) -> Any:
        return _numpy("greater_equal", self, other)

    def __and__(self, other: Any) -> Any:
        return _numpy("logical_and", self, other)

    def __or__(self, other: Any) -> Any:
        return _numpy("logical_or", self, other)

    __rand__, __ror__ = __and__, __or__  # of truth values, where order does not matter

    def __neg__(self) -> Any:
        return _numpy("negative", self)

    def __abs__(self) -> Any:
        return _numpy("abs", self)

    def __invert__(self) -> Any:
        return _numpy("logical_not", self)

    def __getitem__(self, key: Any) -> Any:
        return _numpy("index", self, key)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])

    def __getattr__(self, name: str) -> Any:
        from rlx.functional import arrays
        from rlx.functional.operands import function_of

        if name in arrays.PROPERTIES:
            return arrays.PROPERTIES[name](self)
        if name in arrays.METHODS:
            return functools.partial(getattr(arrays, arrays.METHODS[name]), self)
        found = None if name.startswith("_") else function_of(name)
        if found is not None:
            return functools.partial(found, self)
        raise AttributeError(f"a traced array has no {name!r}. {nearest(name, arrays.METHODS) or ''}".strip())

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        from rlx.functional import arrays

        found = arrays.UFUNCS.get(ufunc.__name__)
        if method != "__call__" or kwargs or found is None:
            raise GraphError(
                f"numpy.{ufunc.__name__}: has no form for traced arrays", hint=nearest(ufunc.__name__, arrays.UFUNCS)
            )
        return getattr(arrays, found)(*inputs)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        from rlx.functional import arrays

        name = function.__name__
        if name not in arrays.FUNCTIONS:
            raise GraphError(f"numpy.{name}: has no form for traced arrays", hint=nearest(name, arrays.FUNCTIONS))
        return getattr(arrays, arrays.FUNCTIONS[name])(*args, **kwargs)


def _numpy(name: str, *operands: Any) -> Any:
    from rlx.functional import arrays

    return getattr(arrays, name)(*operands)


# -- arrays -----------------------------------------------------------------------------------------------------------
def as_array(x: Any) -> Array:
    """Numbers as an array of a type that rlx has; Python's are f32, i32 and bool."""
    if isinstance(x, (np.ndarray, np.generic)):
        dtype(x.dtype)
        return np.asarray(x)
    if isinstance(x, (bool, int, float)):
        return np.asarray(x, dtype(type(x)).numpy)
    try:
        found = np.asarray(x)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"{type(x).__name__}: is not an array", hint="arrays, numbers and trees of them") from error
    if found.dtype.kind not in "biuf":
        raise DTypeError(f"{type(x).__name__}: is not an array", hint="arrays, numbers and trees of them")
    return found.astype({"b": np.bool_, "i": np.int32, "u": np.int32}.get(found.dtype.kind, np.float32))


def type_of(x: Any) -> TensorType:
    """The type of an array, a number, a stand-in or a value of a graph."""
    x = held_value(x)
    if isinstance(x, (Traced, Value)):
        return x.value.type if isinstance(x, Traced) else x.type
    found = as_array(x)
    return TensorType(found.shape, dtype(found.dtype))


# -- functions --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Function:
    """A traced function: a graph of its leaves and of what it captured, and the structure of what it gives."""

    graph: Graph
    captured: list[Traced]
    given: tree.Structure
    prints: Sequence[Line] = ()
    printed: Graph | None = None  # the same graph, which also gives what is printed, after its other outputs

    @property
    def whole(self) -> Graph:
        """The graph that gives all there is: `printed`, where something is."""
        return self.printed or self.graph

    def outputs(self, values: Sequence[Any]) -> Any:
        return self.given.unflatten(values)


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


def trace_leaves(
    function: Callable[..., Any], shape: tree.Structure, types: Sequence[TensorType],
    names: Sequence[str] | None = None, *, prints: bool = False,
) -> Function:  # fmt: skip
    """The graph of a function of (args, kwargs), whose leaves have these types. `prints`: the caller prints for it."""
    label = getattr(function, "__name__", type(function).__name__)
    with tracing("".join(c if c.isalnum() else "_" for c in label) or "function") as trace:
        trace.prints = [] if prints else None
        names = names or [f"x{i}" for i in range(len(types))]
        given = [Traced(trace, declare(trace.graph, n, t)) for n, t in zip(names, types, strict=True)]
        args, kwargs = shape.unflatten(given)
        made = function(*args, **kwargs)
        found, structure = tree.flatten(made)
        for leaf in found:
            if not isinstance(leaf, Traced):
                _check_output(label, leaf)
        results = [trace.constant(leaf) for leaf in found]
        lines = trace.prints or []
        shown = [trace.constant(x) for line in lines for x in line.traced]
        printed = trace.graph.set_outputs([*results, *shown]).copy() if lines else None
        trace.graph.set_outputs(results)
    return Function(trace.graph, list(trace.captured), structure, lines, printed)


def _check_output(label: str, leaf: Any) -> None:
    try:
        as_array(leaf)
    except DTypeError as error:
        error.add_note(f"  what {label} returns has it")
        raise


def trace(function: Callable[..., Any]) -> Callable[..., Graph]:
    """`trace(f)(*args)` is the graph of f for arguments of these shapes and types; arrays or `TensorType`s."""

    def wrapped(*args: Any, **kwargs: Any) -> Graph:
        found, shape = tree.flatten((args, kwargs))
        types = [x if isinstance(x, TensorType) else type_of(x) for x in found]
        return trace_leaves(function, shape, types, names_of(function, args, kwargs), prints=True).graph

    return wrapped


# -- running ----------------------------------------------------------------------------------------------------------
_compiled: OrderedDict[str, Any] = OrderedDict()
_KEPT = 512  # compiled graphs
_session: Session | None = None


def session() -> Session:
    """What runs functions outside of a trace: the CPU."""
    global _session
    if _session is None:
        _session = Session("cpu")
    return _session


def run(graph: Graph, arrays: Sequence[Any]) -> list[Array]:
    """The outputs of a graph of inputs, compiled once for all graphs that are equal."""
    if not graph.outputs:
        return []
    key = graph.fingerprint()
    compiled = None if finite.watching else _compiled.get(key)  # an equal graph may be of another line of the program
    if compiled is None:
        compiled = _compiled[key] = session().compile(graph)
        if len(_compiled) > _KEPT:
            _compiled.popitem(last=False)
    _compiled.move_to_end(key)
    names = [n.attrs["name"] for n in leaf_nodes(graph)]
    return list(compiled.run({n: np.asarray(as_array(a), order="C") for n, a in zip(names, arrays, strict=True)}))


# -- values of graphs built by hand -----------------------------------------------------------------------------------
def on_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays that, given values of a graph, builds in that graph and gives values of it."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not any([_has_value(x) for x in args]) and not any([_has_value(x) for x in kwargs.values()]):
            return function(*args, **kwargs)
        held = [held_value(x) for x in args], {k: held_value(x) for k, x in kwargs.items()}
        found, shape = tree.flatten(held)
        graph = next(x.graph for x in found if isinstance(x, Value))
        around = next((trace for trace in _stack.get() if trace.graph is graph), None)
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


def held_value(x: Any) -> Any:
    """A value where something only holds one, such as what flows through a model."""
    return x.__rlx_value__() if not isinstance(x, Traced) and hasattr(type(x), "__rlx_value__") else x


def _of(graph: Graph, x: Value) -> Value:
    if x.graph is not graph:
        message = f"{x!r}: belongs to graph {x.graph.name!r}, not to {graph.name!r}"
        raise GraphError(message, hint="build both in one graph")
    return x


@on_values
def call(graph: Graph, operands: Sequence[Any]) -> list[Any]:
    """A graph applied to what stands for its leaves: part of the current trace, or run at once."""
    trace = current()
    if trace is None:
        return run(graph, operands)
    given = [trace.constant(x) for x in operands]
    return [Traced(trace, v) for v in inline(trace.graph, graph, given)]


def call_function(function: Function, leaves: Sequence[Any]) -> Any:
    """A traced function applied to leaves."""
    return function.outputs(call(function.graph, [*leaves, *function.captured]))


def at_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays that builds graphs: inside a trace it does, outside it is traced and run at once.

    On values of a graph it builds in that graph.
    """

    @on_values
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if current() is not None:
            return function(*args, **kwargs)
        found, shape = tree.flatten((args, kwargs))
        moving = [i for i, x in enumerate(found) if isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind in "biuf"]
        slots = set(moving)

        def only(*arrays: Any) -> Any:
            given = iter(arrays)
            args_, kwargs_ = shape.unflatten([next(given) if i in slots else x for i, x in enumerate(found)])
            return function(*args_, **kwargs_)

        only.__name__ = function.__name__
        _, flat = tree.flatten((tuple(found[i] for i in moving), {}))
        made = trace_leaves(only, flat, [type_of(found[i]) for i in moving], prints=True)
        outputs = call(made.whole, [*(found[i] for i in moving), *made.captured])
        if made.prints:
            from rlx.functional.printing import say_all

            say_all(made, outputs)
        return made.outputs(outputs[: len(made.graph.outputs)])

    return wrapped


@at_once
def apply(op: str, *operands: Any, **attrs: Any) -> Any:
    """An op of the registry on arrays, numbers, stand-ins and values of a graph."""
    trace = current()
    assert trace is not None
    given = [None if x is None else trace.value(x) for x in operands]
    results = trace.graph.build(op, given, {k: trace.value(v) for k, v in attrs.items()}).results
    made = tuple(Traced(trace, r) for r in results)
    return made[0] if len(made) == 1 else made
