"""Traced arrays, the traces they belong to, and the conversion of arrays and Python numbers.

A `Trace` is a graph under construction; traces nest, as transforms of functions that contain transforms do. Values that
a function reads from an enclosing trace are captured as extra inputs.
"""

from __future__ import annotations

import functools
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field, replace
from typing import Any, NoReturn

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import DeviceArray
from rlx.dtypes import DType, WeakScalar, dtype, promote, weak
from rlx.errors import DTypeError, GraphError, nearest
from rlx.fast_dataclass import dataclass
from rlx.functional import tree
from rlx.ir.graph import Graph, Value
from rlx.ir.numpy_functions import TORCH_METHODS
from rlx.ir.operators import Operators
from rlx.ir.provenance import here
from rlx.transforms.build import declare
from rlx.types import Size, TensorType


@dataclass(frozen=True)
class Print:
    """A line to print: a format, and the leaves of its (values, named values)."""

    format: str
    shape: tree.Structure
    leaves: Sequence[Any]

    @property
    def traced(self) -> list[Traced]:
        return [x for x in self.leaves if isinstance(x, Traced)]

    def filled(self, values: Iterator[Any]) -> Print:
        """Return the line with its traced leaves replaced by values."""
        return replace(self, leaves=_filled(self.leaves, values))

    def batched(self) -> Print:
        """Return the line for values with a leading batch axis."""
        return self


@dataclass(frozen=True)
class Repeated:
    """The lines that the body of a loop or a branch prints at each step.

    `rows` holds one array per traced value of the lines, with one row per step; the first `steps` rows are valid. Under
    `vmap`, batch axes precede the row axis, and the longest loop of the batch determines `steps`.
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
        """Return the lines with their traced leaves replaced by values."""
        *rows, steps = _filled([*self.rows, self.steps], values)
        return replace(self, rows=rows, steps=steps)

    def batched(self) -> Repeated:
        """Return the lines for values with a leading batch axis."""
        return replace(self, lines=[line.batched() for line in self.lines], axis=self.axis + 1)


Line = Print | Repeated


def _filled(leaves: Sequence[Any], values: Iterator[Any]) -> list[Any]:
    return [next(values) if isinstance(x, Traced) else x for x in leaves]


@dataclass(eq=False)
class Trace:
    """A graph under construction, the values it captured from enclosing traces, and the lines it prints.

    `prints` is None where printing is not supported, as in custom derivative rules. A graph built by hand (`by_hand`)
    captures nothing: its inputs are declared by its author.
    """

    graph: Graph
    captured: dict[Traced, Value] = field(default_factory=dict)
    prints: list[Line] | None = None
    by_hand: bool = False

    def value(self, x: Any) -> Any:
        """Return an operand as a value of this graph; arrays and numbers pass through, and become constants later."""
        if not isinstance(x, Traced):
            return x
        if x.trace is self or x.trace.graph is self.graph:
            return x.value
        if x.trace not in _stack.get() and not isinstance(x, HeldArray):
            _leaked(x)
        if self.by_hand:
            hint = "build both in one graph, or trace a function of both"
            raise GraphError(f"{x!r}: belongs to a traced function, not to graph {self.graph.name!r}", hint=hint)
        if x not in self.captured:
            name = x.trace.graph.name if isinstance(x, HeldArray) else "captured"
            self.captured[x] = declare(self.graph, name, x.value.type)
        return self.captured[x]

    def constant(self, x: Any) -> Value:
        """Like `value`, but turns arrays and numbers into constants."""
        value = self.value(x)
        return value if isinstance(value, Value) else self.graph.constant(as_array(value))


_stack: ContextVar[tuple[Trace, ...]] = ContextVar("traces", default=())


def traces() -> tuple[Trace, ...]:
    """Return the active traces, outermost first."""
    return _stack.get()


def current() -> Trace | None:
    """Return the innermost trace; None if nothing is traced."""
    stack = _stack.get()
    return stack[-1] if stack else None


@contextmanager
def tracing(into: str | Graph) -> Iterator[Trace]:
    """Open a trace: into a new graph of this name, or into a graph built by hand."""
    trace = Trace(into, by_hand=True) if isinstance(into, Graph) else Trace(Graph(into))
    token = _stack.set((*_stack.get(), trace))
    try:
        yield trace
    finally:
        _stack.reset(token)


def _leaked(x: Traced) -> NoReturn:
    hint = "return it from the function, or pass it in as an argument"
    raise GraphError(f"{x!r}: is used outside of the traced function that created it", hint=hint)


_ARRAYS = "arrays, numbers and trees of them"
_NO_COMPLEX = "there are no complex numbers: compute with two real arrays, the real and the imaginary part"
_NEEDS_DATA = "It has no data while it is traced: return it from the function, or use rlx.debug.print."
_SETS = "instead of array[0] = x of a NumPy array: array = rlx.at(array)[0].set(x)"
_STATIC_SIZE = "a size is a Python number: pass it as a static argument, rlx.jit(f, static_argnums=...)"


class Traced(Operators):
    """A traced array (JAX: tracer): it has a shape and a dtype, but no data.

    A `weak` one stands for a Python number, or for the result of elementwise ops on numbers alone: next to arrays it
    takes their dtype.
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
            hint = "shape[0] is its first size" if self.shape else _STATIC_SIZE
            raise GraphError(f"{self!r}: has no length while it is traced", hint=hint, notes=[f"at: {here()}"])
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<traced {self.value.type}>"

    __hash__ = object.__hash__

    def __rlx_value__(self) -> Value:
        """Return the value in the current graph, for ops that are called on a graph directly."""
        trace = current()
        assert trace is not None
        return trace.constant(self)

    # -- operations that need data ------------------------------------------------------------------------------------
    def _unknown(self, quantity: str, hint: str) -> NoReturn:
        raise GraphError(f"{self!r}: has no {quantity} while it is traced", hint=hint, notes=[f"at: {here()}"])

    def __bool__(self) -> bool:
        choose = "use rlx.where to choose numbers, rlx.cond or rlx.while_loop to choose code"
        self._unknown("truth value", f"{choose}; a Python flag is a static argument: rlx.jit(f, static_argnames=...)")

    def __int__(self) -> int:
        self._unknown(
            "value for int()", "a number that code depends on is a static argument: rlx.jit(f, static_argnums=...)"
        )

    def __index__(self) -> int:
        loops = "range(n): rlx.fori_loop loops up to it; array[i] of a NumPy array: rlx.at(array)[i:i + 2].get()"
        hint = f"{loops}; functions[i]: rlx.switch chooses; {_STATIC_SIZE}"
        self._unknown("value for an index or a size", hint)

    def __float__(self) -> float:
        hint = "rlx and NumPy functions accept it as it is: np.exp(x) instead of math.exp(x)"
        self._unknown("value for float()", _SETS if _sets_an_element() else hint)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        hint = "np.stack([x, y]) and rlx.numpy.array([x, y]) accept it, np.array([x, y]) does not"
        hint = f"{hint}; rlx.numpy.asarray(x) is np.asarray(x); {_SETS}"
        asking = _hint_for_caller()
        if asking is not None:
            hint = asking
        elif self.value.dtype.is_integer:
            reads = "rlx.at(array)[i, 0].get() is array[i, 0], rlx.take(array, i) is np.take(array, i) of a NumPy array"
            hint = f"{reads}; {hint}"
        elif self.value.dtype.is_bool:
            hint = f"array[mask] has a size that depends on data: rlx.where(mask, array, 0.0) keeps the shape; {hint}"
        self._unknown("values for NumPy", hint)

    def __format__(self, spec: str) -> str:
        if spec:
            self._unknown(f"number to format as {spec!r}", "rlx.debug.print('{:.2f}', x) prints it once it is computed")
        return repr(self)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        hint = "x = x.at[key].set(y), or .add(y); rlx.at(x) does the same for arrays"
        raise GraphError(f"{self!r}: cannot be changed in place", hint=hint, notes=[f"at: {here()}"])

    def item(self) -> NoReturn:
        """Raise: a traced array has no data."""
        self._unknown("number", "return it from the traced function")

    # -- operators ----------------------------------------------------------------------------------------------------
    def operate(self, op: str, *operands: Any) -> Any:
        """Apply a Python operator, through the array function with NumPy's name for the op."""
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
        function = None if name.startswith("_") else function_of(name)
        if function is not None:
            return functools.partial(function, self)
        hint = _NEEDS_DATA if name in ("numpy", "tolist", "tobytes", "block_until_ready") else None
        hint = (
            hint
            or TORCH_METHODS.get(name)
            or nearest(name, [*arrays.METHODS, *arrays.PROPERTIES, "shape", "dtype", "ndim", "size"])
        )
        raise AttributeError(f"a traced array has no {name!r}. {hint or ''}".strip())

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        from rlx.functional.dispatch import call_ufunc

        return call_ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        from rlx.functional.dispatch import call_function

        return call_function(function, args, kwargs)


class HeldArray(Traced):
    """An array that traced functions read as an input, where any other array becomes a constant of their graph.

    Weights of models are held: they are large, and graphs do not depend on their values.
    """

    __slots__ = ("array",)

    def __init__(self, name: str, array: Array, type_: TensorType) -> None:
        trace = Trace(Graph(name))
        super().__init__(trace, declare(trace.graph, name, type_))
        self.array = array


_NUMPY_NAMES = {"div": "divide", "pow": "power", "neg": "negative"}


def _numpy(name: str, *operands: Any) -> Any:
    from rlx.functional import arrays

    return getattr(arrays, name)(*operands)


# -- arrays -----------------------------------------------------------------------------------------------------------
_ASKING = {  # a name in the line that asks NumPy for the values of a traced array -> what to write instead
    "vectorize": "rlx.vmap(f)(x) maps a function over an axis",
    "searchsorted": "np.searchsorted(array, x) accepts it, array.searchsorted(x) does not",
    "asarray": "rlx.numpy.asarray(x) accepts it; a traced array is an array already",
}
_INDEXED = re.compile(r"\b(?:asarray|arange)\(.*\)\s*\[")  # an array that is indexed in the line that makes it
_REDUCTIONS = {"sum", "mean", "prod", "max", "min", "amax", "amin", "std", "var", "median", "any", "all"}


def _sets_an_element() -> bool:
    """Whether the caller of a conversion is an assignment to an element: `array[0] = x`."""
    import dis  # only errors need it

    frame = sys._getframe(2)
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "STORE_SUBSCR"


def _hint_for_caller() -> str | None:
    """Return a hint for the line that calls NumPy, if it contains one of the usual mistakes."""
    frame = sys._getframe(2)
    in_numpy: set[str] = set()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "numpy":
        in_numpy.add(frame.f_code.co_name)
        frame = frame.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if _INDEXED.search(line):
        return f"rlx.at(table)[i].get() is table[i] of a NumPy array, such as rlx.asarray returns; {_ASKING['asarray']}"
    for name, hint in _ASKING.items():
        if f"{name}(" in line:
            return hint
    reductions = sorted(_REDUCTIONS & in_numpy)
    if reductions:
        name = reductions[0]
        return f"np.{name}(np.stack([x, y])) accepts traced arrays, np.{name}([x, y]) does not"
    return None


def as_array(x: Any) -> Array:
    """Convert to an array of a dtype that rlx supports; Python numbers become f32, i32 or bool."""
    if isinstance(x, (np.ndarray, np.generic)):
        dtype(x.dtype)
        return np.asarray(x)
    if isinstance(x, HeldArray):
        return x.array
    if isinstance(x, (bool, int, float)):
        try:
            return np.asarray(x, dtype(type(x)).numpy)
        except OverflowError:
            raise DTypeError(f"{x}: does not fit i32, the dtype of Python ints", hint=f"np.int64({x})") from None
    try:
        array = np.asarray(x)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"{type(x).__name__}: is not an array", hint=_ARRAYS) from error
    if array.dtype.kind not in "biuf":
        raise DTypeError(
            f"{type(x).__name__}: is not an array", hint=_NO_COMPLEX if array.dtype.kind == "c" else _ARRAYS
        )
    return array.astype({"b": np.bool_, "i": np.int32, "u": np.int32}.get(array.dtype.kind, np.float32))


def held_value(x: Any) -> Any:
    """Unwrap an object that holds a graph value, such as a value of a model flow."""
    return x.__rlx_value__() if not isinstance(x, Traced) and hasattr(type(x), "__rlx_value__") else x


def weak_kind(x: Any) -> WeakScalar | None:
    """Return the weak scalar kind of a Python number or of a traced one; None for arrays."""
    if isinstance(x, Traced):
        return x.value.dtype.weak if x.weak else None
    return weak(x)


def is_weak(x: Any) -> bool:
    """Whether x is a Python number, or traced from one: it takes the dtype of the arrays it is combined with."""
    return weak_kind(x) is not None


def weak_type(operands: Sequence[Any]) -> DType | None:
    """Return the dtype that Python numbers take next to the other operands; None if all or none are numbers."""
    strong = [type_of(x).dtype for x in operands if not is_weak(x)]
    numbers = [kind for x in operands if (kind := weak_kind(x)) is not None]
    return promote(*strong, *numbers) if strong and numbers else None


def type_of(x: Any) -> TensorType:
    """Return the type of an array, a number, a traced array or a graph value."""
    x = held_value(x)
    if isinstance(x, (Traced, Value)):
        return x.value.type if isinstance(x, Traced) else x.type
    array = x if isinstance(x, DeviceArray) else as_array(x)
    return TensorType(array.shape, dtype(array.dtype))
