"""Stand-ins for arrays while a function is traced, the traces they belong to, and what counts as an array or a number.

A `Trace` is a graph under construction; traces nest, as transforms of functions that contain transforms do. What a
function reads from around it is captured as a further input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import DeviceArray
from rlx.dtypes import DType, WeakScalar, dtype, promote, weak
from rlx.errors import DTypeError, GraphError, nearest
from rlx.functional import tree
from rlx.ir.graph import Graph, Value
from rlx.ir.operators import Operators
from rlx.ir.provenance import here
from rlx.transforms.build import declare
from rlx.types import Size, TensorType


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


def traces() -> tuple[Trace, ...]:
    """The traces that nest here, the outermost first."""
    return _stack.get()


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


class Traced(Operators):
    """A stand-in for an array while a function is traced. It has no numbers, only a shape and an element type.

    A `weak` one stands for a number, or for what elementwise ops make of numbers alone: beside arrays it takes theirs.
    """

    __array_priority__ = 1000
    __slots__ = ("__weakref__", "trace", "value", "weak")

    def __init__(self, trace: Trace, value: Value, weak: bool = False) -> None:
        self.trace = trace
        self.value = value
        self.weak = weak

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
        self._unknown(
            "numbers", "np.stack([x, y]) takes it where np.array([x, y]) does not, and so does rlx.asarray(x)"
        )

    def __format__(self, spec: str) -> str:
        if spec:
            self._unknown(f"number to format as {spec!r}", "rlx.debug.print('{:.2f}', x) prints it when it is there")
        return repr(self)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        hint = "x = x.at[key].set(y), or .add(y); rlx.at(x) does the same for arrays"
        raise GraphError(f"{self!r}: cannot be changed in place", hint=hint, notes=[f"at: {here()}"])

    def item(self) -> NoReturn:
        """A number; there is none yet."""
        self._unknown("number", "return it from the traced function")

    # -- operators ----------------------------------------------------------------------------------------------------
    def operate(self, op: str, *operands: Any) -> Any:
        """What an operator of Python gives: the function of arrays that has NumPy's name for the op."""
        return _numpy(_NUMPY_NAMES.get(op, op), *operands)

    def __eq__(self, other: object) -> Any:
        return _numpy("equal", self, other)

    def __ne__(self, other: object) -> Any:
        return _numpy("not_equal", self, other)

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
        if method != "__call__":
            hint = arrays.UFUNC_METHODS.get(f"{ufunc.__name__}.{method}")
            _formless(f"{ufunc.__name__}.{method}", hint)
        if found is None:
            _formless(ufunc.__name__, nearest(ufunc.__name__, arrays.UFUNCS))
        if kwargs:
            _formless(f"{ufunc.__name__} with {', '.join(f'{k}=' for k in kwargs)}", "assign what it gives to a name")
        return getattr(arrays, found)(*inputs)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        from rlx.functional import arrays

        name, module = function.__name__, function.__module__.removeprefix("numpy").lstrip(".")
        if module or name not in arrays.FUNCTIONS:  # numpy.linalg has names of its own
            _formless(f"{module}.{name}" if module else name, None if module else nearest(name, arrays.FUNCTIONS))
        return getattr(arrays, arrays.FUNCTIONS[name])(*args, **kwargs)


def _formless(name: str, hint: str | None) -> NoReturn:
    hint = hint or "write it with functions that have one; dir(rlx) lists them"
    raise GraphError(f"numpy.{name}: has no form for traced arrays", hint=hint, notes=[f"at: {here()}"])


_NUMPY_NAMES = {"div": "divide", "pow": "power", "neg": "negative"}


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
        try:
            return np.asarray(x, dtype(type(x)).numpy)
        except OverflowError:
            raise DTypeError(f"{x}: does not fit i32, which Python's ints are", hint=f"np.int64({x})") from None
    try:
        found = np.asarray(x)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"{type(x).__name__}: is not an array", hint="arrays, numbers and trees of them") from error
    if found.dtype.kind not in "biuf":
        raise DTypeError(f"{type(x).__name__}: is not an array", hint="arrays, numbers and trees of them")
    return found.astype({"b": np.bool_, "i": np.int32, "u": np.int32}.get(found.dtype.kind, np.float32))


def held_value(x: Any) -> Any:
    """A value where something only holds one, such as what flows through a model."""
    return x.__rlx_value__() if not isinstance(x, Traced) and hasattr(type(x), "__rlx_value__") else x


def weak_kind(x: Any) -> WeakScalar | None:
    """What a number, or a stand-in for one, counts as beside arrays; None for arrays."""
    if isinstance(x, Traced):
        return x.value.dtype.weak if x.weak else None
    return weak(x)


def is_weak(x: Any) -> bool:
    """Whether x is a number, or stands for one: it takes the element type of arrays beside it."""
    return weak_kind(x) is not None


def weak_type(operands: Sequence[Any]) -> DType | None:
    """The type that numbers take beside the other operands; None where all are numbers, or none is."""
    strong = [type_of(x).dtype for x in operands if not is_weak(x)]
    numbers = [kind for x in operands if (kind := weak_kind(x)) is not None]
    return promote(*strong, *numbers) if strong and numbers else None


def type_of(x: Any) -> TensorType:
    """The type of an array, a number, a stand-in or a value of a graph."""
    x = held_value(x)
    if isinstance(x, (Traced, Value)):
        return x.value.type if isinstance(x, Traced) else x.type
    found = x if isinstance(x, DeviceArray) else as_array(x)
    return TensorType(found.shape, dtype(found.dtype))
