"""Graphs: append-only lists of immutable nodes, shared by HIR and MIR.

`Graph` builds (`g.input`, `g.param`, `g.softmax(x)`), prints, parses, compares by structure and computes fingerprints.
Nodes and values are in `ir/value.py`.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.dtypes import BOOL, DType, DTypeLike, dtype, promote, weak
from rlx.errors import GraphError, RlxError, ShapeError, nearest
from rlx.ir import registry
from rlx.ir.constants import Array as Array
from rlx.ir.constants import constant_data
from rlx.ir.control import ControlBuilders
from rlx.ir.custom import CustomBuilders
from rlx.ir.op_methods import GraphOps
from rlx.ir.provenance import Origin, here
from rlx.ir.quant import QuantBuilders
from rlx.ir.value import Node as Node
from rlx.ir.value import Value as Value
from rlx.ir.value import bind_value
from rlx.operand_layouts import Layout
from rlx.types import Dim, ShapeLike, Size, Symbol, TensorType, as_shape, as_size, symbols_of, tensor

if TYPE_CHECKING:
    from rlx.module import GraphModule


_TORCH_ATTRIBUTES = {"dim": "axis", "keepdim": "keepdims"}


class Graph(GraphOps, ControlBuilders, CustomBuilders, QuantBuilders):
    """A graph, possibly under construction. Append-only; `level` is hir or mir."""

    def __init__(self, name: str = "graph", *, level: str = registry.MIR) -> None:
        if not isinstance(name, str):
            hint = "module.into_graph() is the graph of a module" if hasattr(name, "into_graph") else None
            raise GraphError(f"Graph: its name is a {type(name).__name__}, expected a string", hint=hint)
        self.name = name
        self.level = level
        self.nodes: list[Node] = []
        self.outputs: tuple[Value, ...] = ()
        self._named: dict[str, Node] = {}
        self._scope: Origin | None = None  # overrides nodes' origins while set
        self.limits: dict[str, int] = {}  # symbol -> maximum size at run time
        self.fixed: set[str] = set()  # params that training does not update unless named explicitly
        self.stages: dict[str, Value] = {}  # outputs of flow stages by path; not part of the text

    # -- modules ----------------------------------------------------------------------------------------------------
    @staticmethod
    def define(name: str, build: Callable[[GraphModule], Any]) -> GraphModule:
        """Builds an HIR module with a function that takes it and returns its output, or a tuple of outputs."""
        from rlx.module import GraphModule  # one of two upward imports: modules are made of graphs

        return GraphModule.define(name, build)

    @staticmethod
    def hir(name: str) -> GraphModule:
        """An empty HIR module."""
        from rlx.module import GraphModule

        return GraphModule.hir(name)

    # -- leaves -----------------------------------------------------------------------------------------------------
    def input(self, name: str, shape: ShapeLike | TensorType, dtype: DTypeLike = "f32") -> Value:
        """A tensor passed to each run; a type in place of the shape sets both."""
        return self.leaf("input", name, shape, dtype)

    def state(self, name: str, shape: ShapeLike | TensorType, dtype: DTypeLike = "f32") -> Value:
        """Memory passed to each run and updated in place, such as a KV cache."""
        return self.leaf("state", name, shape, dtype)

    def param(self, name: str, shape: ShapeLike | TensorType, dtype: DTypeLike = "f32") -> Value:
        """A weight: set once and kept for all runs."""
        return self.leaf("param", name, shape, dtype)

    def leaf(self, op: str, name: str, shape: ShapeLike | TensorType, like: DTypeLike) -> Value:
        """An input, state or param, by `op`."""
        if not name or name in self._named:
            problem = "has no name" if not name else f"{name!r} exists already"
            raise GraphError(f"{op}: {problem} in graph {self.name!r}", hint="names of inputs and params are unique")
        type_ = tensor(shape, like)
        for size in type_.shape:
            for symbol in symbols_of(size):
                self._limit(symbol)
        node = self.append(op, (), {"name": name}, (type_,))
        self._named[name] = node
        return node[0]

    def _limit(self, symbol: Symbol) -> None:
        if symbol.max is not None:
            self.limits[symbol.name] = min(symbol.max, self.limits.get(symbol.name, symbol.max))

    def constant(self, data: Any, dtype: DTypeLike | None = None) -> Value:
        """Numbers embedded in the graph. Python floats are f32 and Python ints i32, unless `dtype` says otherwise."""
        return self._constant(Array(constant_data(data, dtype)))

    def _constant(self, array: Array) -> Value:
        type_ = TensorType(tuple(array.data.shape), dtype(array.data.dtype))
        return self.append("const", (), {"value": array}, (type_,))[0]

    # -- building -----------------------------------------------------------------------------------------------------
    def apply(self, op: str, *operands: Any, **attrs: Any) -> Any:
        """Append one op. Numbers and arrays among the operands become constants; result types are inferred."""
        node = self.build(op, operands, attrs)
        return node.results if len(node.types) != 1 else node.results[0]

    def one(self, op: str, *operands: Any, **attrs: Any) -> Value:
        """`apply` for an op with one result."""
        return self.build(op, operands, attrs).results[0]

    def build(self, op: str, operands: Sequence[Any], attrs: dict[str, Any], origin: Origin | None = None) -> Node:
        """The node that `apply` appends; passes supply the origin."""
        definition = registry.get(op)
        op, schema = definition.name, definition.schema
        expected = attrs.pop("out_shape", None)  # accepted by every op: checked against the inferred shape, not stored
        values = self._operands(definition, operands, attrs)
        unknown = [k for k in attrs if k not in schema.attrs]
        if unknown:
            name = _TORCH_ATTRIBUTES.get(unknown[0], unknown[0])
            hint = f"did you mean {name!r}?" if name in schema.attrs else nearest(name, schema.attrs)
            if name == "where" and op in ("sum", "mean"):
                hint = f"np.{op}(value, where=mask) takes graph values"
            raise GraphError(f"{op}: has no attribute {unknown[0]!r}", hint=hint)
        full: dict[str, Any] = {}
        for key, default in schema.attrs.items():
            value = attrs.get(key, default)
            if value is registry.REQUIRED:
                raise GraphError(f"{op}: attribute {key!r} is missing", hint=f"{op}(..., {key}=...)")
            full[key] = canonical_attr(op, key, value)
        try:
            types = registry.result_types(definition, [None if v is None else v.type for v in values], full)
            if expected is not None:
                check_out_shape(op, types, expected)
        except RlxError as error:
            shown = ", ".join("none" if v is None else str(v.type) for v in values)
            error.add_note(f"  operands: {shown}")
            error.add_note(f"  built at: {origin or here()}")
            raise
        if origin is None:  # a caller may still change its bodies; passes supply their own
            full = {k: v.copy() if isinstance(v, Graph) else v for k, v in full.items()}
        return self.append(op, tuple(values), full, types, origin)

    def _operands(self, definition: registry.OpDef, args: Sequence[Any], attrs: dict[str, Any]) -> list[Value | None]:
        schema, name = definition.schema, definition.name
        operands = list(args)
        if schema.variadic:
            if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
                operands = list(operands[0])
        else:
            for position, key in enumerate(schema.operands):
                if key in attrs:
                    if position < len(operands):
                        raise GraphError(f"{name}: operand {key!r} is given twice")
                    operands += [None] * (position - len(operands))
                    operands.append(attrs.pop(key))
            minimum, maximum = len(schema.operands) - schema.optional, len(schema.operands)
            if not minimum <= len(operands) <= maximum:
                wanted = str(maximum) if minimum == maximum else f"{minimum} to {maximum}"
                takes = f"takes {wanted} operand{'s' * (wanted != '1')} ({', '.join(schema.operands)})"
                given_attrs = len(operands) > maximum and not isinstance(operands[maximum], Value) and schema.attrs
                hint = f"attributes are given by name: {next(iter(schema.attrs))}=..." if given_attrs else None
                raise GraphError(f"{name}: {takes}, got {len(operands)}", hint=hint)
            operands += [None] * (maximum - len(operands))
            for key, operand in zip(schema.operands[:minimum], operands, strict=False):
                if operand is None:
                    raise GraphError(f"{name}: operand {key!r} is missing")
        operands = [_unwrap(operand) for operand in operands]
        promoted = _scalar_type(operands) if registry.ELEMENTWISE in definition.traits else None
        return [v if v is None else self._value(name, v, promoted) for v in operands]

    def _value(self, where: str, operand: Any, scalar_type: DType | None) -> Value:
        if isinstance(operand, Value):
            if operand.graph is not self:
                raise GraphError(
                    f"{where}: {operand!r} belongs to graph {operand.graph.name!r}, not to {self.name!r}",
                    hint="build both in one graph",
                )
            return operand
        if scalar_type is not None and weak(operand) is not None:
            return self.constant(operand, scalar_type)
        if isinstance(operand, (bool, int, float, np.ndarray, np.generic, list, tuple)):
            return self.constant(operand)
        raise GraphError(f"{where}: {type(operand).__name__} is not an operand", hint="use values, numbers or arrays")

    def append(
        self,
        op: str,
        operands: tuple[Value | None, ...],
        attrs: Mapping[str, Any],
        types: tuple[TensorType, ...],
        origin: Origin | None = None,
    ) -> Node:
        """Append a node whose types are known, for passes and parsers. Users call the ops."""
        results = tuple([Value(i) for i in range(len(types))])
        attrs = attrs if type(attrs) is MappingProxyType else MappingProxyType(attrs)
        node = Node(len(self.nodes), op, operands, attrs, types, self._scope or origin or here(), self, results)
        for value in results:
            bind_value(value, node)
        self.nodes.append(node)
        if op in registry.NAMED:
            self._named[attrs["name"]] = node
        return node

    @contextmanager
    def scope(self, origin: Origin) -> Iterator[None]:
        """Nodes appended inside come from `origin`, overriding their own; the outermost scope wins."""
        outer = self._scope
        self._scope = outer or origin
        try:
            yield
        finally:
            self._scope = outer

    def redeclare(self, leaf: Value, type_: TensorType) -> None:
        """Change the type of an input or param that nothing reads yet; the value stays the same handle."""
        old = leaf.node
        for node in self.nodes:
            if leaf in node.operands:
                name = old.attrs["name"]
                raise GraphError(f"{name!r} is {leaf.type} to %{node.id} {node.op}, it cannot be {type_}")
        new = self.nodes[old.id] = self._named[old.attrs["name"]] = replace(old, types=(type_,))
        bind_value(leaf, new)

    def set_outputs(self, outputs: Iterable[Value] | Value) -> Graph:
        """Set the graph's outputs; returns the graph."""
        held = _unwrap(outputs)
        values = (held,) if isinstance(held, Value) else tuple(map(_unwrap, outputs))
        for value in values:
            if not isinstance(value, Value) or value.graph is not self:
                raise GraphError(f"set_outputs: {value!r} is not a value of graph {self.name!r}")
        self.outputs = values
        return self

    def copy(self) -> Graph:
        """An independent copy of the graph."""
        from rlx.ir.rewrite import copy_graph

        return copy_graph(self)

    def reshape(self, x: Value, shape: ShapeLike) -> Value:
        """`x` with another shape of the same number of elements; one size may be -1."""
        return self.one("reshape", x, shape=_reshape_target(x, shape))

    def cast(self, x: Value, dtype: DTypeLike) -> Value:
        """`x` with another element type."""
        return x.astype(dtype)

    # -- reading ------------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def inputs(self) -> list[Node]:
        """The inputs and states, in declaration order."""
        return [n for n in self.nodes if n.op in ("input", "state")]

    @property
    def params(self) -> list[Node]:
        """The weights, in declaration order."""
        return [n for n in self.nodes if n.op == "param"]

    def has(self, name: str) -> bool:
        """Whether an input or param has this name."""
        return name in self._named

    def named(self, name: str) -> Value:
        """The input or param with this name."""
        if name not in self._named:
            raise GraphError(f"graph {self.name!r}: nothing is called {name!r}", hint=nearest(name, self._named))
        return self._named[name][0]

    def users(self) -> dict[Value, list[Node]]:
        """For each value, the nodes that read it, once per use."""
        readers: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for operand in node.operands:
                if operand is not None:
                    readers.setdefault(operand, []).append(node)
        return readers

    def reachable(self, values: Iterable[Value]) -> set[Node]:
        """All nodes that `values` depend on."""
        nodes: set[Node] = set()
        stack = [v.node for v in values]
        while stack:
            node = stack.pop()
            if node not in nodes:
                nodes.add(node)
                stack += [o.node for o in node.operands if o is not None]
        return nodes

    def symbols(self) -> list[str]:
        """Names of all symbols in the types of inputs and params, sorted."""
        leaves = [n for n in self.nodes if n.op in registry.NAMED]
        return sorted({s.name for n in leaves for d in n.types[0].shape for s in symbols_of(d)})

    # -- comparing ----------------------------------------------------------------------------------------------------
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and (self is other or self.fingerprint() == other.fingerprint())

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def fingerprint(self) -> str:
        """A digest of level, ops, attributes, types, edges, outputs and leaf names, stable across processes."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self.level}|{sorted(self.limits.items())}".encode())
        for node in self.nodes:
            edges = ",".join("-" if o is None else f"{o.node.id}.{o.index}" for o in node.operands)
            attrs = ",".join(f"{k}={attr_key(v)}" for k, v in sorted(node.attrs.items()))
            digest.update(f"\n{node.op}({edges}){{{attrs}}}:{';'.join(map(str, node.types))}".encode())
        digest.update(("\n" + ",".join(f"{o.node.id}.{o.index}" for o in self.outputs)).encode())
        return digest.hexdigest()

    # -- text ---------------------------------------------------------------------------------------------------------
    def text(self, *, full: bool = False, origins: bool = False) -> str:
        """Formats the graph as text that `Graph.parse` reads back; `full` writes out large constants."""
        from rlx.ir.text import graph_text

        return graph_text(self, full=full, origins=origins)

    @staticmethod
    def parse(text: str) -> Graph:
        """Parses a graph."""
        from rlx.ir.text import parse_graph

        return parse_graph(text)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        nodes, outputs = len(self.nodes), len(self.outputs)
        counts = f"{nodes} node{'s' * (nodes != 1)}, {outputs} output{'s' * (outputs != 1)}"
        return f"<graph {self.name!r} {self.level}: {counts}>"

    def _repr_html_(self) -> str:
        from rlx.inspect.notebook import graph_html  # the other upward import: notebook output

        return graph_html(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_unpickle, (self.text(full=True),))

    def verify(self) -> Graph:
        """Raise VerifyError if anything is inconsistent; returns the graph."""
        from rlx.ir.verify import verify

        verify(self)
        return self


def _unpickle(text: str) -> Graph:
    import rlx.hir  # noqa: F401  declares all ops and blocks, which a fresh process may lack

    return Graph.parse(text)


def check_out_shape(where: str, types: Sequence[TensorType], expected: Any) -> None:
    """Raise unless the results have the expected shapes: one shape for the first result, or one per result."""
    several = bool(expected) and all(isinstance(shape, (tuple, list)) for shape in expected)
    shapes = [as_shape(shape) for shape in expected] if several else [as_shape(expected)]
    if several and len(shapes) != len(types):
        raise ShapeError(f"{where}: has {len(types)} results, out_shape has {len(shapes)} shapes")
    for type_, shape in zip(types, shapes, strict=False):
        if type_.shape != shape:
            raise ShapeError(f"{where}: the result is {type_}, out_shape is [{', '.join(map(str, shape))}]")


def _unwrap(operand: Any) -> Any:
    """Unwraps an operand that holds a value, such as the one that flows through a model."""
    return operand.__rlx_value__() if hasattr(type(operand), "__rlx_value__") else operand


def _scalar_type(operands: Sequence[Any]) -> DType | None:
    """The type that numbers among elementwise operands take; None if there are only numbers."""
    numbers = [kind for o in operands if (kind := weak(o)) is not None]
    if not numbers or len(numbers) == len(operands):
        return None
    strong = [o.dtype for o in operands if isinstance(o, Value)]
    strong += [dtype(o.dtype) for o in operands if isinstance(o, np.ndarray)]
    if operands and isinstance(operands[0], Value) and operands[0].dtype is BOOL and len(operands) == 3:
        strong = strong[1:]  # where(condition, a, b): the condition does not count
    return promote(*strong, *numbers)


def _reshape_target(x: Value, shape: ShapeLike) -> tuple[Size, ...]:
    sizes: list[Size] = [-1 if not isinstance(d, Dim) and d == -1 else as_size(d) for d in shape]
    holes = [i for i, d in enumerate(sizes) if d == -1]
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


def canonical_attr(op: str, key: str, value: Any) -> Any:
    """Normalises an attribute for storage: it has a text form, and equal meanings have equal forms."""
    if key == "dtype":
        return dtype(value)
    if value is None or isinstance(value, (bool, int, float, str, Dim, DType, Array, Graph, Layout)):
        return value.item() if isinstance(value, np.generic) else value  # np.float64 is a float
    if isinstance(value, (list, tuple)):  # words in a tuple are sizes: shape=("batch", 4)
        return tuple([as_size(v) if isinstance(v, str) else canonical_attr(op, key, v) for v in value])
    if isinstance(value, enum.Enum):
        return canonical_attr(op, key, value.value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return Array(value)
    hint = "rlx.trace(f)(*args) is the graph of a function" if callable(value) else None
    raise GraphError(f"{op}: attribute {key!r} cannot be a {type(value).__name__}", hint=hint)


def attr_key(value: Any) -> str:
    """Text that distinguishes attribute values, for fingerprints."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value)
        case float():
            return value.hex()
        case tuple():
            return "(" + ",".join([attr_key(v) for v in value]) + ")"
        case Graph():
            return value.fingerprint()
        case Array():
            return value.digest
        case _:
            return str(value)
