"""The verifier: recomputes each node's type from its rule and compares. A failure is a bug in a pass."""

from __future__ import annotations

from typing import NoReturn

from rlx.dtypes import dtype
from rlx.errors import GraphError, RlxError, VerifyError
from rlx.ir import registry
from rlx.ir.graph import Array, Graph, Node, Value
from rlx.ir.text import node_text

# Nodes already verified, by op, attributes and types. Holds the objects themselves, since keys are identities. Passes
# reuse most nodes unchanged.
Typed = dict[tuple[object, ...], tuple[object, ...]]


def verify(graph: Graph, typed: Typed | None = None) -> None:
    """Raise VerifyError at the first inconsistent node; `typed` caches the results of earlier calls."""
    typed = {} if typed is None else typed
    if graph.level not in (registry.HIR, registry.MIR):
        raise VerifyError(f"graph {graph.name!r}: level {graph.level!r} is not hir or mir")
    names: set[str] = set()
    for position, node in enumerate(graph.nodes):
        if node.id != position or node.graph is not graph:
            _fail(graph, position, f"has number {node.id} at position {position}, or belongs to another graph")
        for operand in node.operands:
            if operand is not None and not _is_defined(graph, operand, position):
                _fail(graph, position, f"reads {_value_name(operand)}, which is not defined before it")
        definition = registry.OPS.get(node.op)
        if definition is None:
            _fail(graph, position, "uses an op that is not registered")
        if graph.level == registry.MIR and definition.level == registry.HIR:
            _fail(graph, position, "is an HIR op in an MIR graph")
        if registry.LEAF in definition.traits:
            _check_leaf(graph, node, names)
            continue
        _check_types(graph, node, definition, typed)
        if registry.CONTROL in definition.traits:
            _check_bodies(graph, node)
    for output in graph.outputs:
        if not _is_defined(graph, output, len(graph.nodes)):
            raise VerifyError(f"graph {graph.name!r}: output {_value_name(output)} is not one of its values")


def _is_defined(graph: Graph, value: Value, before: int) -> bool:
    """Whether the value is a result of a node before this position in the graph."""
    node = value.node
    return 0 <= node.id < before and graph.nodes[node.id] is node and 0 <= value.index < len(node.types)


def _value_name(value: Value) -> str:
    return f"%{value.node.id}.{value.index} of graph {value.graph.name!r}"


def _check_leaf(graph: Graph, node: Node, names: set[str]) -> None:
    if node.operands or len(node.types) != 1:
        _fail(graph, node.id, "is a leaf and takes no operands, gives one value")
    (type_,) = node.types
    if node.op == "const":
        value = node.attrs.get("value")
        if not isinstance(value, Array) or (value.data.shape, dtype(value.data.dtype)) != (type_.shape, type_.dtype):
            _fail(graph, node.id, f"has type {type_}, its data are something else")
        return
    name = node.attrs.get("name")
    if not isinstance(name, str) or not name or name in names:
        _fail(graph, node.id, f"has the name {name!r}, which is taken or no name")
    names.add(name)


def _check_types(graph: Graph, node: Node, definition: registry.OpDef, typed: Typed) -> None:
    operands = [None if o is None else o.type for o in node.operands]
    key = (node.op, id(node.attrs), id(node.types), *map(id, operands))
    if key in typed:
        return
    try:
        types = registry.result_types(definition, operands, node.attrs)
    except RlxError as error:
        _fail(graph, node.id, f"cannot be typed: {error}")
    if types != node.types:
        have, want = ("; ".join(map(str, t)) for t in (node.types, types))
        _fail(graph, node.id, f"has type {have}, its rule gives {want}")
    typed[key] = (node.attrs, node.types, operands)


def _check_bodies(graph: Graph, node: Node) -> None:
    for name, body in node.attrs.items():
        if isinstance(body, Graph):
            if graph.level == registry.MIR and body.level == registry.HIR:
                _fail(graph, node.id, f"has an HIR graph as its {name} in an MIR graph")
            try:
                verify(body)
            except VerifyError as error:
                error.add_note(f"  in {name} of %{node.id} {node.op}")
                raise


def _fail(graph: Graph, position: int, problem: str) -> NoReturn:
    low = max(0, position - 5)
    around = [
        ("> " if i == position else "  ") + _line(graph.nodes[i]) for i in range(low, min(low + 10, len(graph.nodes)))
    ]
    node = graph.nodes[position]
    raise VerifyError(f"%{node.id} {node.op}: {problem}", notes=[f"made {node.origin}", *around])


def _line(node: Node) -> str:
    """Formats a node on one line, however broken it is."""
    try:
        return " ".join(node_text(node).split())
    except GraphError as error:
        return f"%{node.id} = {node.op}(...)  # {error}"
