"""Finds graphs whose batch entries are independent, so that a large batch can be split into smaller runs.

A graph in, a symbol out. Checked op by op: every value computed from the batch has it as its first axis, and only
there, and no op mixes entries. Ops declare when they keep entries independent: `rlx.ir.independence`.
"""

from __future__ import annotations

from rlx.ir.graph import Graph, Node, Value
from rlx.types import Dim, Size, dim, symbols_of


def independent_symbol(graph: Graph) -> str | None:
    """Return the symbol that is the first axis of all inputs and outputs, if entries along it are independent."""
    leading = {node.types[0].shape[:1] for node in graph.inputs}
    if len(leading) != 1:
        return None
    for batch in leading.pop():
        for symbol in symbols_of(batch):
            if batch == dim(symbol.name) and _is_independent(graph, batch, symbol.name):
                return symbol.name
    return None


def _is_independent(graph: Graph, batch: Size, symbol: str) -> bool:
    inputs = set(graph.inputs)
    batched: set[Value] = set()  # values with the batch as first axis
    for node in graph.nodes:
        operand_batched = [operand in batched for operand in node.operands]
        if node.op == "state" or _mentions(node, symbol, axis=1) or _depends(node, symbol):
            return False
        if not any(operand_batched) and node not in inputs and node.op != "expand":
            if _mentions(node, symbol, axis=0):
                return False  # such as an iota along the batch
            continue
        if not all(type_.shape[:1] == (batch,) for type_ in node.types):
            return False
        if node not in inputs:
            rule = node.definition.independent
            if rule is None or not rule(node, operand_batched):
                return False
        batched.update(node.results)
    return batched.issuperset(graph.outputs)


def _mentions(node: Node, symbol: str, *, axis: int) -> bool:
    """Whether the shape of a result contains the symbol at or after `axis`."""
    sizes = (size for type_ in node.types for size in type_.shape[axis:])
    return any(atom.name == symbol for size in sizes for atom in symbols_of(size))


def _depends(node: Node, symbol: str) -> bool:
    """Whether an attribute contains the symbol, except as the first of several sizes, which is the batch axis itself.

    One example is a slice of each entry, or of a table, whose start depends on the batch size.
    """
    values = (v[1:] if isinstance(v, tuple) else (v,) for v in node.attrs.values())
    sizes = [size for several in values for size in several if isinstance(size, Dim)]
    start = node.attrs["start"][:1] if node.op == "slice" else ()
    return any(atom.name == symbol for size in (*sizes, *start) for atom in symbols_of(size))
