"""Nodes and their results. Nodes are immutable; a `Value` is one result, with its operators and ops."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rlx.dtypes import DType, DTypeLike, promote
from rlx.errors import GraphError, ShapeError
from rlx.fast_dataclass import dataclass
from rlx.ir import registry
from rlx.ir.numpy_functions import NumpyFunctions
from rlx.ir.op_methods import ValueOps
from rlx.ir.operators import Operators
from rlx.ir.provenance import Origin
from rlx.types import Dim, Size, TensorType

if TYPE_CHECKING:
    from rlx.ir.graph import Graph


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One application of an op. Nodes compare by identity; graphs compare by structure."""

    id: int
    op: str
    operands: tuple[Value | None, ...]
    attrs: Mapping[str, Any]  # read-only
    types: tuple[TensorType, ...]
    origin: Origin
    graph: Graph
    results: tuple[Value, ...]

    def __getitem__(self, index: int) -> Value:
        return self.results[index]

    def __rlx_value__(self) -> Value:
        """The operand that stands for the node: its result, or several results flattened and concatenated."""
        if len(self.results) == 1:
            return self.results[0]
        kind = functools.reduce(promote, (value.dtype for value in self.results))
        flat = [value.reshape(value.type.elements) for value in self.results]
        return self.graph.one("concatenate", *(v if v.dtype is kind else v.astype(kind) for v in flat), axis=0)

    @property
    def definition(self) -> registry.OpDef:
        return registry.get(self.op)

    def operand(self, name: str) -> Value | None:
        """An operand by its name; None where it is left out, or the op has none of that name."""
        return dict(zip(self.definition.schema.operands, self.operands, strict=False)).get(name)

    def __repr__(self) -> str:
        name = f" {self.attrs['name']!r}" if "name" in self.attrs else ""
        return f"<node %{self.id} {self.op}{name}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("nodes are pickled with their graph, as text")


class Value(ValueOps, NumpyFunctions, Operators):
    """One result of a node: a handle that `Graph.append` binds to its node. `==` is identity."""

    __slots__ = ("index", "node")
    index: int
    node: Node

    def __init__(self, index: int = 0) -> None:
        _set_index(self, index)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("index", "node"):
            raise AttributeError(f"{name} of a value cannot be set: it belongs to its node")
        super().__setattr__(name, value)

    # -- type -----------------------------------------------------------------------------------------------------
    @property
    def type(self) -> TensorType:
        """Shape and element type."""
        return self.node.types[self.index]

    @property
    def shape(self) -> tuple[Size, ...]:
        """The size of each axis: ints, or expressions over named dims."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.type.dtype

    @property
    def rank(self) -> int:
        """The number of axes."""
        return self.type.rank

    @property
    def ndim(self) -> int:
        """The same as `rank`, as NumPy calls it."""
        return self.type.rank

    @property
    def graph(self) -> Graph:
        """The graph that the value belongs to."""
        return self.node.graph

    def __repr__(self) -> str:
        suffix = f".{self.index}" if len(self.node.types) > 1 else ""
        return f"<value %{self.node.id}{suffix}: {self.type}>"

    # -- conversions --------------------------------------------------------------------------------------------------
    def __bool__(self) -> bool:
        self._no_number("bool")

    def __int__(self) -> int:
        self._no_number("int")

    def __float__(self) -> float:
        self._no_number("float")

    def __iter__(self) -> Iterator[Value]:
        raise GraphError(f"value {self!r}: cannot be iterated", hint="slice it, or use split along an axis")

    def _no_number(self, kind: str) -> NoReturn:
        hint = "it has a value only when the graph runs; rlx.where(...) chooses, rlx.equal(a, b) compares"
        raise GraphError(f"value {self!r}: has no {kind} while the graph is built", hint=hint)

    # -- ops ----------------------------------------------------------------------------------------------------------
    def operate(self, op: str, *operands: Any) -> Value:
        """Builds one node for a Python operator, in the value's graph."""
        return self.graph.one(op, *operands)

    def __getitem__(self, key: Any) -> Value:
        return _index(self, key)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        hint = "x = x.at[key].set(y), or .add(y)"
        raise GraphError(f"value {self!r}: cannot be changed in place", hint=hint)

    @property
    def mT(self) -> Value:
        """Swaps the last two axes."""
        if self.rank < 2:
            raise ShapeError(f"mT: needs two axes, found {self.type}")
        axes = (*range(self.rank - 2), self.rank - 1, self.rank - 2)
        return self.graph.one("transpose", self, axes=axes)

    def astype(self, like: DTypeLike) -> Value:
        """Casts to another element type."""
        return self.graph.one("cast", self, dtype=like)

    def cast(self, dtype: DTypeLike) -> Value:
        """The same as `astype`."""
        return self.astype(dtype)

    def reshape(self, *shape: Any) -> Value:
        """Changes the shape; one size may be -1."""
        return self.graph.reshape(self, shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)


def _index(value: Value, key: Any) -> Value:
    keys = list(key) if isinstance(key, tuple) else [key]
    gap = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    used = sum(k is not None for i, k in enumerate(keys) if i != gap)  # None is a new axis
    if used > value.rank:
        raise ShapeError(f"index: {used} indices for {value.type}")
    keys[gap : gap + 1] = [slice(None)] * (value.rank - used)
    sizes = iter(value.shape)
    first_indices: list[Size] = []
    stops: list[Size] = []
    steps: list[int] = []
    axes: list[int | None] = []  # of the result: an axis of `value`, or a new one
    for k in keys:
        if k is None:
            axes.append(None)
            continue
        size = next(sizes)
        if isinstance(k, slice):
            axes.append(len(steps))
            first_indices.append(0 if k.start is None else _bound(k.start, size))
            stops.append(size if k.stop is None else _bound(k.stop, size))
            steps.append(1 if k.step is None else operator.index(k.step))
        else:
            at = _position(k, size)
            first_indices.append(at)
            stops.append(at + 1)
            steps.append(1)
    result = value.graph.one("slice", value, start=tuple(first_indices), stop=tuple(stops), step=tuple(steps))
    if axes == list(range(value.rank)):
        return result
    return result.reshape(tuple(1 if a is None else result.shape[a] for a in axes))


def _from_end(k: Any, size: Size) -> Size:
    """Converts an index to one from the start of the axis; negative indices count from its end."""
    if isinstance(k, Dim):
        return k
    if isinstance(k, (bool, np.bool_)) or not hasattr(k, "__index__"):
        raise GraphError(f"index: {k!r} is not an integer or a slice", hint="use x.gather(indices, axis=...) for data")
    n = operator.index(k)
    return size + n if n < 0 else n


def _bound(k: Any, size: Size) -> Size:
    """A slice bound; as in NumPy, bounds before the start are clamped to it."""
    at = _from_end(k, size)
    return max(at, 0) if isinstance(at, int) else at


def _position(k: Any, size: Size) -> Size:
    """The position of a single index."""
    at = _from_end(k, size)
    if isinstance(at, int) and (at < 0 or (isinstance(size, int) and at >= size)):
        raise ShapeError(f"index: {k} lies outside an axis of size {size}")
    return at


# The slots are written through their descriptors and read as plain attributes: a property would slow down all readers.
_set_index = vars(Value)["index"].__set__
bind_value = vars(Value)["node"].__set__  # (value, node): for the graph that owns both
