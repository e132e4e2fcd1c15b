"""Graphs: append-only lists of immutable nodes, shared by HIR and MIR.

`Graph` builds (`g.input`, `g.param`, `g.softmax(x)`), prints, parses, compares by structure and makes fingerprints.
A `Value` is one result of a node and carries the operators and one method an op.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from rlx.dtypes import BOOL, DType, DTypeLike, WeakScalar, dtype, promote
from rlx.errors import GraphError, RlxError, ShapeError, nearest
from rlx.ir import registry
from rlx.ir.provenance import Origin, here
from rlx.types import Dim, ShapeLike, Size, Symbol, TensorType, as_shape, symbols_of


class Array:
    """A constant's data: a read-only NumPy array that compares and hashes by content."""

    __slots__ = ("data", "digest")

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data = np.ascontiguousarray(data).reshape(np.shape(data))
        self.data.flags.writeable = False
        head = f"{self.data.dtype.name}{self.data.shape}".encode()
        self.digest = hashlib.blake2b(head + self.data.tobytes(), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Array) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Array, (self.data,))

    def __repr__(self) -> str:
        return f"@{self.digest[:12]}"


@dataclass(frozen=True, eq=False)
class Node:
    """One application of an op. Nodes compare by identity; graphs compare by structure."""

    id: int
    op: str
    operands: tuple[Value | None, ...]
    attrs: dict[str, Any]
    types: tuple[TensorType, ...]
    origin: Origin
    graph: Graph
    name: str = ""

    def __getitem__(self, index: int) -> Value:
        return Value(self, index)

    @property
    def results(self) -> tuple[Value, ...]:
        return tuple(Value(self, i) for i in range(len(self.types)))

    @property
    def definition(self) -> registry.OpDef:
        return registry.get(self.op)

    def __repr__(self) -> str:
        return f"<node %{self.id} {self.op}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("nodes are pickled with their graph, as text")


class Value:
    """One result of a node."""

    __slots__ = ("index", "node")
    __array_ufunc__ = None  # NumPy hands `array + value` to us instead of looping over elements

    def __init__(self, node: Node, index: int = 0) -> None:
        self.node = node
        self.index = index

    # -- type -----------------------------------------------------------------------------------------------------
    @property
    def type(self) -> TensorType:
        return self.node.types[self.index]

    @property
    def shape(self) -> tuple[Size, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def rank(self) -> int:
        return self.type.rank

    @property
    def graph(self) -> Graph:
        return self.node.graph

    def __repr__(self) -> str:
        suffix = f".{self.index}" if len(self.node.types) > 1 else ""
        return f"<value %{self.node.id}{suffix}: {self.type}>"

    # -- identity ---------------------------------------------------------------------------------------------------
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self.node is other.node and self.index == other.index

    def __hash__(self) -> int:
        return hash((id(self.node), self.index))

    def __bool__(self) -> bool:
        self._no_number("bool")

    def __int__(self) -> int:
        self._no_number("int")

    def __float__(self) -> float:
        self._no_number("float")

    def __iter__(self) -> Iterator[Value]:
        raise GraphError(f"value {self!r}: cannot be iterated", hint="slice it, or use split along an axis")

    def _no_number(self, what: str) -> NoReturn:
        hint = "it has a value only when the graph runs; use g.where(...) to choose, g.equal(a, b) to compare"
        raise GraphError(f"value {self!r}: has no {what} while the graph is built", hint=hint)

    # -- operators ----------------------------------------------------------------------------------------------------
    def _binary(self, name: str, other: Any, swapped: bool = False) -> Value:
        a, b = (other, self) if swapped else (self, other)
        return self.graph.apply(name, a, b)

    def __add__(self, other: Any) -> Value:
        return self._binary("add", other)

    def __radd__(self, other: Any) -> Value:
        return self._binary("add", other, True)

    def __sub__(self, other: Any) -> Value:
        return self._binary("sub", other)

    def __rsub__(self, other: Any) -> Value:
        return self._binary("sub", other, True)

    def __mul__(self, other: Any) -> Value:
        return self._binary("mul", other)

    def __rmul__(self, other: Any) -> Value:
        return self._binary("mul", other, True)

    def __truediv__(self, other: Any) -> Value:
        return self._binary("div", other)

    def __rtruediv__(self, other: Any) -> Value:
        return self._binary("div", other, True)

    def __floordiv__(self, other: Any) -> Value:
        return self._binary("floor_divide", other)

    def __rfloordiv__(self, other: Any) -> Value:
        return self._binary("floor_divide", other, True)

    def __mod__(self, other: Any) -> Value:
        return self._binary("mod", other)

    def __rmod__(self, other: Any) -> Value:
        return self._binary("mod", other, True)

    def __pow__(self, other: Any) -> Value:
        return self._binary("pow", other)

    def __rpow__(self, other: Any) -> Value:
        return self._binary("pow", other, True)

    def __matmul__(self, other: Any) -> Value:
        return self._binary("matmul", other)

    def __rmatmul__(self, other: Any) -> Value:
        return self._binary("matmul", other, True)

    def __lt__(self, other: Any) -> Value:
        return self._binary("less", other)

    def __le__(self, other: Any) -> Value:
        return self._binary("less_equal", other)

    def __gt__(self, other: Any) -> Value:
        return self._binary("greater", other)

    def __ge__(self, other: Any) -> Value:
        return self._binary("greater_equal", other)

    def __neg__(self) -> Value:
        return self.graph.apply("neg", self)

    def __abs__(self) -> Value:
        return self.graph.apply("abs", self)

    def __invert__(self) -> Value:
        return self.graph.apply("logical_not", self)

    def __getitem__(self, key: Any) -> Value:
        return _index(self, key)

    @property
    def mT(self) -> Value:
        """The last two axes swapped."""
        if self.rank < 2:
            raise ShapeError(f"mT: needs two axes, found {self.type}")
        axes = (*range(self.rank - 2), self.rank - 1, self.rank - 2)
        return self.graph.apply("transpose", self, axes=axes)

    def astype(self, like: DTypeLike) -> Value:
        """The value cast to another element type."""
        return self.graph.apply("cast", self, dtype=dtype(like))

    def reshape(self, *shape: Any) -> Value:
        """The value with another shape; one size may be -1."""
        return self.graph.reshape(self, shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in registry.OPS and registry.LEAF not in registry.OPS[name].traits:
            return functools.partial(self.graph.apply, name, self)
        raise AttributeError(f"Value has no op {name!r}. {nearest(name, registry.OPS) or ''}".strip())


def _index(value: Value, key: Any) -> Value:
    keys = key if isinstance(key, tuple) else (key,)
    if any(k is Ellipsis for k in keys):
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        keys = keys[:at] + (slice(None),) * (value.rank - len(keys) + 1) + keys[at + 1 :]
    if len(keys) > value.rank:
        raise ShapeError(f"index: {len(keys)} indices for {value.type}")
    starts, stops, steps, dropped = [], [], [], []
    for axis, size in enumerate(value.shape):
        k = keys[axis] if axis < len(keys) else slice(None)
        if isinstance(k, slice):
            starts.append(0 if k.start is None else _from_end(k.start, size))
            stops.append(size if k.stop is None else _from_end(k.stop, size))
            steps.append(1 if k.step is None else k.step)
        else:
            at = _from_end(k, size)
            starts.append(at)
            stops.append(at + 1)
            steps.append(1)
            dropped.append(axis)
    result = value.graph.apply("slice", value, start=tuple(starts), stop=tuple(stops), step=tuple(steps))
    if dropped:
        result = result.reshape(tuple(d for i, d in enumerate(result.shape) if i not in dropped))
    return result


def _from_end(k: Any, size: Size) -> Size:
    if isinstance(k, Dim):
        return k
    if not hasattr(k, "__index__"):
        raise GraphError(f"index: {k!r} is not an integer or a slice", hint="use x.gather(indices, axis=...) for data")
    n = int(k)
    at = size + n if n < 0 else n
    return at if isinstance(at, Dim) or not isinstance(size, int) else min(max(at, 0), size) if n < 0 else at


class Graph:
    """A graph under construction or finished. Append-only; `level` is hir or mir."""

    def __init__(self, name: str = "graph", *, level: str = registry.MIR) -> None:
        self.name = name
        self.level = level
        self.nodes: list[Node] = []
        self.outputs: tuple[Value, ...] = ()
        self._named: dict[str, Node] = {}
        self.limits: dict[str, int] = {}  # symbol -> largest size allowed at run time

    # -- leaves -----------------------------------------------------------------------------------------------------
    def input(self, name: str, shape: ShapeLike, dtype: DTypeLike = "f32") -> Value:
        """A tensor given at each run."""
        return self._leaf("input", name, shape, dtype)

    def param(self, name: str, shape: ShapeLike, dtype: DTypeLike = "f32") -> Value:
        """A weight: given once, kept for all runs."""
        return self._leaf("param", name, shape, dtype)

    def _leaf(self, op: str, name: str, shape: ShapeLike, like: DTypeLike) -> Value:
        if not name or name in self._named:
            problem = "has no name" if not name else f"{name!r} exists already"
            raise GraphError(f"{op}: {problem} in graph {self.name!r}", hint="names of inputs and params are unique")
        type_ = TensorType(as_shape(shape), dtype(like))
        for size in type_.shape:
            for symbol in symbols_of(size):
                self._limit(symbol)
        node = self.append(op, (), {"name": name}, (type_,))
        self._named[name] = node
        return node[0]

    def _limit(self, symbol: Symbol) -> None:
        if symbol.max is not None:
            self.limits[symbol.name] = min(symbol.max, self.limits.get(symbol.name, symbol.max))

    def constant(self, data: Any, dtype_: DTypeLike | None = None) -> Value:
        """Numbers that are part of the graph. Python floats are f32, Python ints i32."""
        array = np.asarray(data)
        if dtype_ is not None:
            array = array.astype(dtype(dtype_).numpy)
        elif not isinstance(data, (np.ndarray, np.generic)):
            array = array.astype(promote(_weak(data if not isinstance(data, (list, tuple)) else array.flat[0].item())).numpy)
        return self._constant(Array(array))

    def _constant(self, array: Array) -> Value:
        type_ = TensorType(tuple(array.data.shape), dtype(array.data.dtype))
        return self.append("const", (), {"value": array}, (type_,))[0]

    # -- building -----------------------------------------------------------------------------------------------------
    def apply(self, op: str, *operands: Any, **attrs: Any) -> Any:
        """Append one op. Python numbers and arrays among the operands become constants; the result type is inferred."""
        definition = registry.get(op)
        schema = definition.schema
        values = self._operands(definition, operands, attrs)
        unknown = [k for k in attrs if k not in schema.attrs]
        if unknown:
            raise GraphError(f"{op}: has no attribute {unknown[0]!r}", hint=nearest(unknown[0], schema.attrs))
        full: dict[str, Any] = {}
        for key, default in schema.attrs.items():
            given = attrs.get(key, default)
            if given is registry.REQUIRED:
                raise GraphError(f"{op}: attribute {key!r} is missing", hint=f"{op}(..., {key}=...)")
            full[key] = _canonical(given)
        try:
            inferred = definition.rule(*(None if v is None else v.type for v in values), **full)
        except RlxError as error:
            shown = ", ".join("none" if v is None else str(v.type) for v in values)
            error.add_note(f"  operands: {shown}")
            error.add_note(f"  built at: {here()}")
            raise
        types = inferred if isinstance(inferred, tuple) else (inferred,)
        node = self.append(op, tuple(values), full, types)
        return node.results if isinstance(inferred, tuple) else node[0]

    def _operands(self, definition: registry.OpDef, given: Sequence[Any], attrs: dict[str, Any]) -> list[Value | None]:
        schema, name = definition.schema, definition.name
        operands = list(given)
        for position, key in enumerate(schema.operands):
            if key in attrs and not schema.variadic:
                if position < len(operands):
                    raise GraphError(f"{name}: operand {key!r} is given twice")
                operands += [None] * (position - len(operands))
                operands.append(attrs.pop(key))
        if schema.variadic:
            if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
                operands = list(operands[0])
        else:
            least, most = len(schema.operands) - schema.optional, len(schema.operands)
            if not least <= len(operands) <= most:
                wanted = str(most) if least == most else f"{least} to {most}"
                raise GraphError(f"{name}: takes {wanted} operands ({', '.join(schema.operands)}), got {len(operands)}")
            operands += [None] * (most - len(operands))
        promoted = _scalar_type(operands) if registry.ELEMENTWISE in definition.traits else None
        return [None if v is None else self._value(name, v, promoted) for v in operands]

    def _value(self, where: str, operand: Any, scalar_type: DType | None) -> Value:
        if isinstance(operand, Value):
            if operand.graph is not self:
                raise GraphError(
                    f"{where}: {operand!r} belongs to graph {operand.graph.name!r}, not to {self.name!r}",
                    hint="build both in one graph",
                )
            return operand
        if isinstance(operand, (bool, int, float)) and scalar_type is not None:
            return self.constant(np.asarray(operand).astype(scalar_type.numpy))
        if isinstance(operand, (bool, int, float, np.ndarray, np.generic, list, tuple)):
            return self.constant(operand)
        raise GraphError(f"{where}: {type(operand).__name__} is not an operand", hint="use values, numbers or arrays")

    def append(
        self, op: str, operands: tuple[Value | None, ...], attrs: dict[str, Any], types: tuple[TensorType, ...],
        origin: Origin | None = None,
    ) -> Node:
        """Append a node whose types are known: for passes and parsers. Users call the ops."""
        node = Node(len(self.nodes), op, operands, attrs, types, origin or here(), self)
        self.nodes.append(node)
        if op in ("input", "param"):
            self._named[attrs["name"]] = node
        return node

    def set_outputs(self, outputs: Iterable[Value] | Value) -> Graph:
        """Say what the graph gives; returns the graph."""
        values = (outputs,) if isinstance(outputs, Value) else tuple(outputs)
        for value in values:
            if not isinstance(value, Value) or value.graph is not self:
                raise GraphError(f"set_outputs: {value!r} is not a value of graph {self.name!r}")
        self.outputs = values
        return self

    def reshape(self, x: Value, shape: ShapeLike) -> Value:
        """`x` with another shape of as many elements; one size may be -1."""
        return self.apply("reshape", x, shape=_reshape_target(x, shape))  # type: ignore[no-any-return]

    def cast(self, x: Value, dtype: DTypeLike) -> Value:
        """`x` with another element type."""
        return x.astype(dtype)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in registry.OPS and registry.LEAF not in registry.OPS[name].traits:
            return functools.partial(self.apply, name)
        raise AttributeError(f"Graph has no op {name!r}. {nearest(name, registry.OPS) or ''}".strip())

    # -- reading ------------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def inputs(self) -> list[Node]:
        return [n for n in self.nodes if n.op == "input"]

    @property
    def params(self) -> list[Node]:
        return [n for n in self.nodes if n.op == "param"]

    def named(self, name: str) -> Value:
        """The input or param called `name`."""
        if name not in self._named:
            raise GraphError(f"graph {self.name!r}: nothing is called {name!r}", hint=nearest(name, self._named))
        return self._named[name][0]

    def users(self) -> dict[Value, list[Node]]:
        """For each value the nodes that read it, once per use."""
        found: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for operand in node.operands:
                if operand is not None:
                    found.setdefault(operand, []).append(node)
        return found

    def reachable(self, values: Iterable[Value]) -> set[Node]:
        """All nodes that `values` depend on."""
        found: set[Node] = set()
        stack = [v.node for v in values]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += [o.node for o in node.operands if o is not None]
        return found

    def symbols(self) -> list[str]:
        """Names of all symbols in the types of inputs and params, sorted."""
        leaves = [n for n in self.nodes if n.op in ("input", "param")]
        return sorted({s.name for n in leaves for d in n.types[0].shape for s in symbols_of(d)})

    # -- comparing ------------------------------------------------------------------------------------------------------
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and (self is other or self.fingerprint() == other.fingerprint())

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def fingerprint(self) -> str:
        """A digest of the structure: level, ops, attributes, types, edges, outputs, leaf names. The same in every process."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self.level}|{sorted(self.limits.items())}".encode())
        for node in self.nodes:
            edges = ",".join("-" if o is None else f"{o.node.id}.{o.index}" for o in node.operands)
            attrs = ",".join(f"{k}={attr_key(v)}" for k, v in sorted(node.attrs.items()))
            digest.update(f"\n{node.op}({edges}){{{attrs}}}:{';'.join(map(str, node.types))}".encode())
        digest.update(("\n" + ",".join(f"{o.node.id}.{o.index}" for o in self.outputs)).encode())
        return digest.hexdigest()

    # -- text -------------------------------------------------------------------------------------------------------------
    def text(self, *, full: bool = False, origins: bool = False) -> str:
        """The graph as text that `Graph.parse` reads back; `full` writes large constants out."""
        from rlx.ir.text import graph_text

        return graph_text(self, full=full, origins=origins)

    @staticmethod
    def parse(text: str) -> Graph:
        """The graph that text says."""
        from rlx.ir.text import parse_graph

        return parse_graph(text)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<graph {self.name!r} {self.level}: {len(self.nodes)} nodes, {len(self.outputs)} outputs>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Graph.parse, (self.text(full=True),))

    def verify(self) -> Graph:
        """Raise VerifyError if anything is inconsistent; returns the graph."""
        from rlx.ir.verify import verify

        verify(self)
        return self


def _weak(number: Any) -> WeakScalar:
    return WeakScalar("bool" if isinstance(number, bool) else "int" if isinstance(number, int) else "float")


def _scalar_type(operands: Sequence[Any]) -> DType | None:
    """The type that Python numbers among elementwise operands take."""
    strong = [o.dtype for o in operands if isinstance(o, Value)]
    strong += [dtype(o.dtype) for o in operands if isinstance(o, (np.ndarray, np.generic))]
    if operands and isinstance(operands[0], Value) and operands[0].dtype is BOOL and len(operands) == 3:
        strong = [d for d in strong[1:]]  # where(condition, a, b): the condition does not take part
    weak = [_weak(o) for o in operands if isinstance(o, (bool, int, float)) and not isinstance(o, np.generic)]
    return promote(*strong, *weak) if weak else None


def _reshape_target(x: Value, shape: ShapeLike) -> tuple[Size, ...]:
    sizes = [d if isinstance(d, int) and not isinstance(d, bool) and d == -1 else as_shape((d,))[0] for d in shape]
    holes = [i for i, d in enumerate(sizes) if isinstance(d, int) and d == -1]
    if len(holes) > 1:
        raise ShapeError(f"reshape: only one size may be -1, found {len(holes)}")
    if holes:
        rest: Size = 1
        for i, d in enumerate(sizes):
            rest = rest * d if i not in holes else rest
        if rest == 0:
            raise ShapeError("reshape: -1 cannot be inferred next to a size of 0")
        total = x.type.elements
        quotient = total // rest
        if quotient * rest != total:
            raise ShapeError(f"reshape: {x.type} cannot be cut into rows of {rest}")
        sizes[holes[0]] = quotient
    return tuple(sizes)


def _canonical(value: Any) -> Any:
    """An attribute in the form that nodes keep: hashable, and the same for equal meanings."""
    if isinstance(value, (list, tuple)):
        return tuple(_canonical(v) for v in value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return Array(value)
    return value


def attr_key(value: Any) -> str:
    """Text that tells attribute values apart, for fingerprints."""
    if isinstance(value, Graph):
        return value.fingerprint()
    if isinstance(value, Array):
        return value.digest
    if isinstance(value, tuple):
        return "(" + ",".join(attr_key(v) for v in value) + ")"
    if isinstance(value, float):
        return value.hex()
    return str(value)
