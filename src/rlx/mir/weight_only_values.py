"""Finds values that depend on weights alone, which the bind program can compute once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlx.dtypes import DType
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import CHECKS_DATA, CHECKS_ROWS, CHECKS_SIZES, CONTROL
from rlx.types import Dim, TensorType


def weight_nodes(graph: Graph, *, certain: bool = True) -> set[Node]:
    """Return params, constants and every node that depends on nothing else (not even on run-time sizes).

    If the graph is not `certain` to run, nodes that can fail are left out: they must not be computed in advance.
    """
    weights: set[Node] = set()
    known: set[str] = set()  # symbols bound by the shapes of params
    for node in graph.params:
        known |= _symbols(node.types)
    for node in graph.nodes:
        if node.op in ("param", "const") or (_is_derived(node, weights, known) and (certain or not can_fail(node))):
            weights.add(node)
    return weights


def can_fail(node: Node) -> bool:
    """Whether a node can raise at run time because of its operands or sizes, or may not terminate."""
    traits = node.definition.traits
    if CHECKS_DATA in traits or (CHECKS_ROWS in traits and node.operand("rows") is not None):
        return True
    if CHECKS_SIZES in traits:
        return bool(_symbols((*node.types, *node.attrs.values(), *(o.type for o in node.operands if o is not None))))
    if CONTROL in traits:
        bodies = [v for v in node.attrs.values() if isinstance(v, Graph)]
        endless = node.op == "while_loop" and node.attrs["max_steps"] is None
        return endless or any(can_fail(inner) for body in bodies for inner in body.nodes)
    return False


def _is_derived(node: Node, weights: set[Node], known: set[str]) -> bool:
    if not node.operands or not all([o is None or o.node in weights for o in node.operands]):
        return False
    return _symbols((*node.types, *node.attrs.values())) <= known


def _symbols(parts: Iterable[Any]) -> set[str]:
    """Return the names of the symbols in types, sizes and tuples of sizes."""
    names: set[str] = set()
    for part in parts:
        if isinstance(part, TensorType):
            names |= _symbols(part.shape)
        elif isinstance(part, tuple):
            names |= _symbols(part)
        elif isinstance(part, Dim):
            names |= {s.name for s in part.symbols()}
    return names


def packed_rows(value: Value) -> Value | None:
    """Return the quantised tensor [..., n, k] of which a weight [..., k, n] is the dequantised transpose, if any."""
    if value.node.op != "transpose" or value.node.attrs["axes"] not in ((1, 0), (0, 2, 1)):
        return None
    (inner,) = value.node.operands
    assert inner is not None
    rows = inner.node.operands[0] if inner.node.op == "dequantise" else None
    return rows if rows is not None and rows.dtype.is_packed else None


def stored(value: Value) -> Value:
    """Return the 16-bit floats that a weight is cast from, since kernels widen on load; else the weight itself."""
    inner = value.node.operands[0] if value.node.op == "cast" else None
    if inner is None or not (inner.dtype.is_float and value.dtype.is_float):
        return value
    return inner if inner.dtype.size == 2 < value.dtype.size else value


def storage_of(weight: Value) -> DType:
    """Return the dtype in which a matrix is stored: quantised, 16-bit, or the compute dtype."""
    rows = packed_rows(weight)
    return stored(weight).dtype if rows is None else rows.dtype


def is_matrix(value: Value, weights: set[Node]) -> bool:
    """Whether a value is a two-dimensional weight."""
    return value.node in weights and value.rank == 2


def sides(matmul: Node) -> tuple[Value, Value]:
    """Return the left and right operand of a matmul."""
    a, b, *_ = matmul.operands
    assert a is not None and b is not None
    return a, b
