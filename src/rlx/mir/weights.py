"""Which values depend on weights alone: what the bind program can compute once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlx.dtypes import DType
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import CHECKS_DATA, CHECKS_ROWS, CHECKS_SIZES, CONTROL
from rlx.types import Dim, TensorType


def weight_nodes(graph: Graph, *, certain: bool = True) -> set[Node]:
    """Params, constants and every node that depends on nothing else, run-time sizes included.

    Of a graph that may never run, one that is not `certain`, without nodes that can fail: they are not to be computed
    in advance.
    """
    found: set[Node] = set()
    known: set[str] = set()  # symbols that the weights themselves bind
    for node in graph.params:
        known |= _symbols(node.types)
    for node in graph.nodes:
        if node.op in ("param", "const") or (_is_derived(node, found, known) and (certain or not can_fail(node))):
            found.add(node)
    return found


def can_fail(node: Node) -> bool:
    """Whether run time may find a fault in its operands or sizes, or never get to its end."""
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
    """Names of the symbols in types, sizes and tuples of sizes."""
    found: set[str] = set()
    for part in parts:
        if isinstance(part, TensorType):
            found |= _symbols(part.shape)
        elif isinstance(part, tuple):
            found |= _symbols(part)
        elif isinstance(part, Dim):
            found |= {s.name for s in part.symbols()}
    return found


def packed_rows(value: Value) -> Value | None:
    """The packed tensor [..., n, k] that a weight [..., k, n] is the unpacked transpose of, if it is one."""
    if value.node.op != "transpose" or value.node.attrs["axes"] not in ((1, 0), (0, 2, 1)):
        return None
    (inner,) = value.node.operands
    assert inner is not None
    rows = inner.node.operands[0] if inner.node.op == "dequantise" else None
    return rows if rows is not None and rows.dtype.is_packed else None


def stored(value: Value) -> Value:
    """The narrow floats that a weight is widened from, since kernels widen what they load; else the weight itself."""
    inner = value.node.operands[0] if value.node.op == "cast" else None
    if inner is None or not (inner.dtype.is_float and value.dtype.is_float):
        return value
    return inner if inner.dtype.size == 2 < value.dtype.size else value


def storage_of(weight: Value) -> DType:
    """The type in which the numbers of a matrix are stored: packed, narrow, or as they are computed with."""
    rows = packed_rows(weight)
    return stored(weight).dtype if rows is None else rows.dtype


def is_matrix(value: Value, weights: set[Node]) -> bool:
    """A two-dimensional weight."""
    return value.node in weights and value.rank == 2


def sides(matmul: Node) -> tuple[Value, Value]:
    """The two factors of a matmul."""
    a, b, *_ = matmul.operands
    assert a is not None and b is not None
    return a, b
