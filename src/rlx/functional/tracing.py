"""Tracing: runs a Python function once on traced arrays and records its operations as a graph.

Outside of any trace, functions are eager: they are traced, compiled (equal graphs once) and run. On values of a graph
built by hand they add nodes to that graph.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

import rlx.hir.blocks  # noqa: F401  declares the ops
from rlx.arrays import Array
from rlx.backends.base import DeviceArray
from rlx.errors import DTypeError, GraphError
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import Lock
from rlx.functional import tree
from rlx.functional.cache_keys import ALL_NUMBERS, FLOATS, NO_NUMBERS, Reader, Unkeyable
from rlx.functional.graph_values import on_values
from rlx.functional.tracers import Line, Traced, as_array, current, is_weak, tracing, type_of, weak_type
from rlx.ir import registry
from rlx.ir.graph import Graph, Value
from rlx.ir.rewrite import inline
from rlx.module import GraphModule
from rlx.runtime import nan_switch
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import Session
from rlx.transforms.build import declare
from rlx.transforms.walk import leaves as leaf_nodes
from rlx.types import TensorType

RESULT = "its result"


# -- functions --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Function:
    """A traced function: its graph (inputs: the leaves of its arguments, then captured values) and result structure."""

    graph: Graph
    captured: list[Traced]
    structure: tree.Structure
    weak: Sequence[bool]  # which outputs are Python numbers
    prints: Sequence[Line] = ()
    printed: Graph | None = None  # the same graph with the printed values as extra outputs

    @property
    def full_graph(self) -> Graph:
        """`printed` if the function prints anything, else `graph`."""
        return self.printed or self.graph

    def outputs(self, values: Sequence[Any]) -> Any:
        """Build the function's result from output values."""
        return self.structure.unflatten(values)


def need_function(where: str, function: Any) -> Any:
    """Return the function; raises if it is not callable, with a hint if it is a graph."""
    if callable(function):
        return function
    graph = isinstance(function, (Graph, GraphModule))
    graph_api = "rlx.compile" if where in ("jit", "trace") else f"rlx.transforms.{where}"
    description = f"graph {function.name!r}" if graph else f"{type(function).__name__}"
    hint = f"{graph_api} takes graphs" if graph else None
    if hasattr(function, "as_function"):
        hint = f"{where}(flow.as_function(params)) is of a flow"
    raise GraphError(f"{where}: takes a function, found {description}", hint=hint)


def label_of(function: Any) -> str:
    """Return the name of a function for messages."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def names_of(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """Return a name for each leaf of the arguments, from the function's parameters."""
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
    """Return the types of argument leaves; raises if one is neither an array nor a number, and names it."""
    return [leaf_type(where, x, name) for x, name in zip(leaves, names, strict=True)]


def leaf_type(where: str, leaf: Any, name: str) -> TensorType:
    """Return the type of one leaf, as `leaf_types` does."""
    try:
        return type_of(leaf)
    except DTypeError as error:
        if isinstance(leaf, (int, float, np.ndarray, np.generic)):
            raise DTypeError(f"{where}: {name}: {error}", hint=error.hint) from None
        if where == "jit":
            static = f"{name!r}" if name.isidentifier() else "..., as an argument of its own"
            hint = f"Python values are static arguments: static_argnames={static}, or static_argnums by position"
        elif name.startswith(RESULT):
            hint = "a traced function returns arrays, numbers and trees of them"
        else:
            hint = "bind Python values first, with functools.partial or a lambda"
        kind = type(leaf)
        if isinstance(leaf, (str, bytes)) and "." in name and not name.startswith(RESULT):
            hint = f'a field of a dataclass is static with field(metadata={{"static": True}}); {hint}'
        elif kind.__module__ not in ("builtins", "types", "functools", "enum") and not callable(leaf):
            hint = f"rlx.tree.register({kind.__name__}), or make it a dataclass, for the arrays in it; {hint}"
        if name == "self":
            hint = "rlx.tree.register its class, or make it a dataclass; static_argnames='self' if it never changes"
        subject = "self is an object of class" if name == "self" else f"{name} is a"
        description = f"{subject} {kind.__name__}"
        raise DTypeError(f"{where}: {description}, expected an array, a number or a tree of them", hint=hint) from None


def static_leaves(args: Sequence[Any], kwargs: dict[str, Any], live: Sequence[int]) -> dict[int, Any]:
    """Return the leaves that a transformed function gets as they are, by their index among all leaves.

    These are Python integers, bools, strings and other objects that are not arrays, in arguments whose positions are
    not in `live`; `live` arguments are differentiated or batched. Arguments by name have the positions after the
    others, in alphabetical order. Python floats are traced.
    """
    static: dict[int, Any] = {}
    at = 0
    for position, argument in enumerate((*args, *[kwargs[k] for k in sorted(kwargs)])):
        leaves = tree.leaves(argument)
        if position not in live:
            static |= {at + i: x for i, x in enumerate(leaves) if is_static(x)}
        at += len(leaves)
    return static


def is_static(leaf: Any) -> bool:
    """Return whether a leaf is a Python value other than a float: one that Python code may depend on."""
    if isinstance(leaf, (int, str)):
        return True
    if isinstance(leaf, (float, complex, np.ndarray, np.generic)):
        return False
    try:
        type_of(leaf)
    except DTypeError:
        return True
    return False


def trace_leaves(
    function: Callable[..., Any], shape: tree.Structure, types: Sequence[TensorType],
    names: Sequence[str] | None = None, *, weak: Sequence[bool] | None = None, prints: bool = False,
    static: Mapping[int, Any] | None = None,
) -> Function:  # fmt: skip
    """Trace a function of (args, kwargs) whose leaves have these types.

    `weak` says which leaves are Python numbers; with `prints`, the caller emits the printed lines. `static` are leaves
    that the function gets as they are, by index among all leaves; types, names and `weak` are those of the others.
    """
    label = label_of(function)
    with tracing("".join(c if c.isalnum() else "_" for c in label) or "function") as trace:
        trace.prints = [] if prints else None
        names = names or [f"x{i}" for i in range(len(types))]
        weak = weak or [False] * len(types)
        inputs = [Traced(trace, declare(trace.graph, n, t), w) for n, t, w in zip(names, types, weak, strict=True)]
        arguments: list[Any] = list(inputs)
        for i in sorted(static or ()):
            arguments.insert(i, (static or {})[i])
        args, kwargs = shape.unflatten(arguments)
        leaves, structure = tree.flatten(function(*args, **kwargs))
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Traced):
                leaf_type(label, leaf, structure.paths(RESULT)[i])
        results = [trace.constant(leaf) for leaf in leaves]
        lines = trace.prints or []
        shown = [trace.constant(x) for line in lines for x in line.traced]
        printed = trace.graph.set_outputs([*results, *shown]).copy() if lines else None
        trace.graph.set_outputs(results)
    return Function(trace.graph, list(trace.captured), structure, [is_weak(x) for x in leaves], lines, printed)


def trace(function: Callable[..., Any], *args: Any) -> Callable[..., Graph]:
    """Return the graph of a function: `trace(f)(*args)`; arguments are arrays or `TensorType`s."""
    need_function("trace", function)
    if args:
        raise GraphError(f"trace: takes a function, found {len(args)} more arguments", hint="rlx.trace(f)(*args)")

    def wrapped(*args: Any, **kwargs: Any) -> Graph:
        leaves, shape = tree.flatten((args, kwargs))
        names = names_of(function, args, kwargs)
        named = zip(leaves, names, strict=True)
        types = [x if isinstance(x, TensorType) else leaf_type("trace", x, name) for x, name in named]
        weak = [not isinstance(x, TensorType) and is_weak(x) for x in leaves]
        return trace_leaves(function, shape, types, names, weak=weak, prints=True).graph

    return wrapped


def eval_shape(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the types of a function's results, as a tree of `TensorType`, without computing anything.

    Arguments are arrays, numbers or `TensorType`s.
    """
    need_function("eval_shape", function)
    leaves, shape = tree.flatten((args, kwargs))
    names = names_of(function, args, kwargs)
    named = zip(leaves, names, strict=True)
    types = [x if isinstance(x, TensorType) else leaf_type("eval_shape", x, name) for x, name in named]
    weak = [not isinstance(x, TensorType) and is_weak(x) for x in leaves]
    traced = trace_leaves(function, shape, types, names, weak=weak, prints=True)
    return traced.outputs([o.type for o in traced.graph.outputs])


# -- running ----------------------------------------------------------------------------------------------------------
_compiled: OrderedDict[str, Any] = OrderedDict()
_MAX_COMPILED = 512  # cached compiled graphs


@functools.cache
def session(device: str = "cpu") -> Session:
    """Return the session that runs eager functions."""
    return Session(device)


def compiled_graph(graph: Graph) -> CompiledGraph:
    """Compile a graph; equal graphs are compiled once."""
    key = graph.fingerprint()
    # The NaN check names source lines, which equal graphs need not share.
    compiled = None if nan_switch.watching else _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = session().compile(graph)
        if len(_compiled) > _MAX_COMPILED:
            _compiled.popitem(last=False)
    _compiled.move_to_end(key)
    return compiled


def run(graph: Graph, arrays: Sequence[Any]) -> list[Array]:
    """Run a graph on arrays; equal graphs are compiled once."""
    return Program(graph).run(arrays)


class Program:
    """A graph and its compiled form, which run on arrays in the order of its leaves."""

    def __init__(self, graph: Graph, compile_graph: Callable[[Graph], CompiledGraph] = compiled_graph) -> None:
        self.names = [n.attrs["name"] for n in leaf_nodes(graph)]
        self.compiled = compile_graph(graph) if graph.outputs else None

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Run the program; returns its outputs."""
        return [] if self.compiled is None else list(self.compiled.run(self.inputs(arrays)))

    def inputs(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Return the arrays by the names of the leaves."""
        return {n: contiguous(a) for n, a in zip(self.names, arrays, strict=True)}


def contiguous(x: Any) -> Any:
    """Return an array that programs take as it is: C-contiguous, or on a device."""
    if (type(x) is np.ndarray and x.flags.c_contiguous) or isinstance(x, DeviceArray):
        return x
    return np.asarray(as_array(x), order="C")


class CachedCall(Program):
    """A traced function and its program: what one cache entry of a call holds."""

    def __init__(self, function: Function, compile_graph: Callable[[Graph], CompiledGraph] = compiled_graph) -> None:
        super().__init__(function.full_graph, compile_graph)
        self.function = function
        self._held = list(function.captured)
        self._results = len(function.graph.outputs)

    def inputs(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Return the arrays, and those that the function holds itself, by the names of the leaves."""
        return super().inputs([*arrays, *self._held] if self._held else arrays)

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """Run the program, print its lines, and build the function's result."""
        outputs = self.run(arrays)
        if self.function.prints:
            from rlx.functional.printing import emit_all

            emit_all(self.function, outputs)
            outputs = outputs[: self._results]
        return self.function.outputs(outputs)


_MAX_CALLS = 256  # cached calls
_MAX_KEY_BYTES = 64 << 20  # of arrays in their keys


class CallCache:
    """Programs of calls by key; the oldest are dropped."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, CachedCall] = {}
        self._sizes: dict[Hashable, int] = {}  # bytes of arrays in keys
        self._lock = Lock()

    def get(self, key: Hashable) -> CachedCall | None:
        return self._calls.get(key)

    def put(self, key: Hashable, call: CachedCall, reader: Reader) -> None:
        """Store a call; `reader` built the key, whose arrays are copied."""
        reader.own()
        with self._lock:
            while self._calls and (len(self._calls) >= _MAX_CALLS or sum(self._sizes.values()) > _MAX_KEY_BYTES):
                oldest = next(iter(self._calls))
                del self._calls[oldest], self._sizes[oldest]
            self._calls[key], self._sizes[key] = call, reader.bytes


_calls = CallCache()


def function_key(function: Any) -> tuple[Hashable, Reader] | None:
    """Return the key of a function and of all that it reads, and its reader; None if it has none."""
    reader = Reader()
    try:
        return (registry.version, reader.value(function)), reader
    except (Unkeyable, RecursionError):
        return None


def cached_call(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], trace_call: Callable[[], Function],
    *, live: Sequence[int] | None,
) -> tuple[CachedCall, list[Any]] | None:  # fmt: skip
    """Return the program of a call outside of a trace and the arrays it takes; None if the call has no cache key.

    `trace_call` traces it when the key is new. `live` are the positions of arguments whose Python numbers are inputs of
    the program, as floats are in every argument (see `static_leaves`); if it is None, no Python number is one.
    """
    if nan_switch.watching:  # it names source lines
        return None
    reader = Reader()
    try:
        if live is None:
            arguments: Any = (
                reader.arguments(args, NO_NUMBERS),
                reader.arguments(kwargs, NO_NUMBERS) if kwargs else None,
            )
        else:
            by_position = [reader.arguments(x, ALL_NUMBERS if i in live else FLOATS) for i, x in enumerate(args)]
            numbers = ALL_NUMBERS if len(args) in live else FLOATS
            arguments = tuple(by_position), reader.arguments(kwargs, numbers) if kwargs else None
        key = (registry.version, reader.value(function)), arguments
    except (Unkeyable, RecursionError):
        return None
    call = _calls.get(key)
    if call is None:
        call = CachedCall(trace_call())
        # Tracing runs the function. If that changed anything it reads, the next call may differ.
        after = function_key(function)
        if after is not None and after[0] == key[0]:
            _calls.put(key, call, reader)
    return call, reader.data


@on_values
def apply_graph(graph: Graph, operands: Sequence[Any]) -> list[Any]:
    """Apply a graph to operands for its leaves: inlined into the current trace, or run eagerly."""
    trace = current()
    if trace is None:
        return run(graph, operands)
    values = [trace.constant(x) for x in operands]
    return [Traced(trace, v) for v in inline(trace.graph, graph, values)]


def reusable(graph: Graph) -> Callable[[Sequence[Any]], list[Any]]:
    """Return `apply_graph` for one graph that is applied many times: its program is looked up once."""
    programs: list[Program] = []

    def apply_again(operands: Sequence[Any]) -> list[Any]:
        if current() is not None or nan_switch.watching or any([isinstance(x, Value) for x in operands]):
            return list(apply_graph(graph, operands))
        if not programs:
            programs.append(Program(graph))
        return programs[0].run(operands)

    return apply_again


_transformed: OrderedDict[Hashable, Program] = OrderedDict()


def apply_transformed(
    source: Graph, options: Hashable, transform: Callable[[], Graph], operands: Sequence[Any]
) -> list[Any]:
    """Apply a transformed graph to operands. Outside of a trace, equal sources are transformed once."""
    is_symbolic = current() is not None or any([isinstance(x, Value) for x in operands])
    if is_symbolic or nan_switch.watching:
        return list(apply_graph(transform(), operands))
    key = (registry.version, source.fingerprint(), options)
    program = _transformed.get(key)
    if program is None:
        program = _transformed[key] = Program(transform())
        if len(_transformed) > _MAX_COMPILED:
            _transformed.popitem(last=False)
    return program.run(operands)


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a graph-building function of arrays: outside of a trace it is traced, compiled and run.

    On values of a graph it adds nodes to that graph.
    """
    static = _static(function)

    def trace_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Function, list[Any]]:
        """Trace the function of the arrays among its arguments; other values are constants."""
        leaves, shape = tree.flatten((args, kwargs))
        data = [i for i, x in enumerate(leaves) if isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind in "biuf"]
        slots = set(data)

        def of_arrays(*arrays: Any) -> Any:
            values = iter(arrays)
            args_, kwargs_ = shape.unflatten([next(values) if i in slots else x for i, x in enumerate(leaves)])
            return function(*args_, **kwargs_)

        of_arrays.__name__ = function.__name__
        arrays = [leaves[i] for i in data]
        _, flat = tree.flatten((tuple(arrays), {}))
        types, weak = [type_of(x) for x in arrays], [is_weak(x) for x in arrays]
        return trace_leaves(of_arrays, flat, types, weak=weak, prints=True), arrays

    @on_values
    def slow(*args: Any, **kwargs: Any) -> Any:
        if current() is not None:
            return function(*args, **kwargs)
        traced, arrays = trace_call(args, kwargs)
        outputs = apply_graph(traced.full_graph, [*arrays, *traced.captured])
        if traced.prints:
            from rlx.functional.printing import emit_all

            emit_all(traced, outputs)
        return traced.outputs(outputs[: len(traced.graph.outputs)])

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if current() is None:
            if static:
                args = tuple([to_python(x) if i in static else x for i, x in enumerate(args)])
                kwargs = {k: to_python(x) if k in static else x for k, x in kwargs.items()}
            call = cached_call(function, args, kwargs, lambda: trace_call(args, kwargs)[0], live=None)
            if call is not None:
                return call[0](call[1])
        return slow(*args, **kwargs)

    return wrapped


def _static(function: Callable[..., Any]) -> set[int | str]:
    """Return positions and names of static parameters, such as `axis: int`; data is annotated `Any` or float."""
    static: set[int | str] = set()
    for i, p in enumerate(inspect.signature(function).parameters.values()):
        if p.annotation not in ("Any", "float", p.empty):
            static |= {i, p.name}
    return static


def to_python(x: Any) -> Any:
    """Convert NumPy scalars to Python numbers, also inside tuples and lists; used for axes and sizes."""
    if isinstance(x, (tuple, list)):
        return type(x)(map(to_python, x)) if type(x) in (tuple, list) else x
    return x.item() if isinstance(x, np.generic) else x


def apply(op: str, *operands: Any, **attrs: Any) -> Any:
    """Apply an op of the registry to arrays, numbers, traced arrays or graph values."""
    return _eager_apply(op, *operands, **{k: to_python(v) for k, v in attrs.items()})


def _apply(op: Any, *operands: Any, **attrs: Any) -> Any:
    trace = current()
    assert trace is not None
    values = [None if x is None else trace.value(x) for x in operands]
    weak = False
    if registry.ELEMENTWISE in registry.get(op).traits:
        start = 1 if op == "where" else 0  # the condition does not take part in promotion
        numbers = [is_weak(x) for x in operands[start:]]
        weak = all(numbers) and op != "cast"
        if any(numbers) and not weak and op != "cast":
            wanted = weak_type(operands[start:])
            values[start:] = [
                v.astype(wanted) if w and isinstance(v, Value) and v.dtype is not wanted else v
                for v, w in zip(values[start:], numbers, strict=True)
            ]
    results = trace.graph.build(op, values, {k: trace.value(v) for k, v in attrs.items()}).results
    traced = tuple(Traced(trace, r, weak) for r in results)
    return traced[0] if len(traced) == 1 else traced


_eager_apply = eager(_apply)
