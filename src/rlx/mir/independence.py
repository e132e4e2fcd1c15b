"""Graphs whose batch entries have nothing to do with each other: a run of many may be cut into runs of few.

A graph in, a symbol out. That is found op by op: what is made of a batch has it as its first axis, and only there, and
no op on the way lets entries meet. Ops declare when they do not: `rlx.ir.independence`.
"""

from __future__ import annotations

from rlx.ir.graph import Graph, Node, Value
from rlx.types import Dim, Size, dim, symbols_of


def independent_symbol(graph: Graph) -> str | None:
    """The symbol that is the first axis of all inputs and outputs, if entries along it do not depend on each other."""
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
    have: set[Value] = set()  # the values that have the batch
    for node in graph.nodes:
        given = [operand in have for operand in node.operands]
        if node.op == "state" or _mentions(node, symbol, axis=1) or _depends(node, symbol):
            return False
        if not any(given) and node not in inputs and node.op != "expand":
            if _mentions(node, symbol, axis=0):
                return False  # such as numbers counted along the batch
            continue
        if not all(type_.shape[:1] == (batch,) for type_ in node.types):
            return False
        if node not in inputs:
            rule = node.definition.independent
            if rule is None or not rule(node, given):
                return False
        have.update(node.results)
    return have.issuperset(graph.outputs)


def _mentions(node: Node, symbol: str, *, axis: int) -> bool:
    """Whether the shape of a result has the symbol, from an axis on."""
    sizes = (size for type_ in node.types for size in type_.shape[axis:])
    return any(found.name == symbol for size in sizes for found in symbols_of(size))


def _depends(node: Node, symbol: str) -> bool:
    """Whether an attribute has the symbol, but for the first of several sizes: that is the batch itself, or a shape's.

    So it is with a part of each entry, or of a table, that starts where the size of the batch says.
    """
    values = (v[1:] if isinstance(v, tuple) else (v,) for v in node.attrs.values())
    sizes = [size for several in values for size in several if isinstance(size, Dim)]
    start = node.attrs["start"][:1] if node.op == "slice" else ()
    return any(found.name == symbol for size in (*sizes, *start) for found in symbols_of(size))
