"""Common-subexpression elimination: merges equal nodes with equal operands."""

from __future__ import annotations

from typing import Any

from rlx.ir.graph import Graph, Node, Value, attr_key
from rlx.ir.registry import NAMED
from rlx.ir.rewrite import Rewriter, rebuild


def cse(graph: Graph) -> Graph:
    """Merge nodes with the same op, attributes and operands."""
    seen: dict[Any, Node] = {}
    earlier: dict[Value, Value] = {}  # results of duplicates -> the same results of the first such node
    for node in graph.nodes:
        if node.op not in NAMED:
            operands = [None if o is None else earlier.get(o, o) for o in node.operands]
            attrs = tuple((k, attr_key(v)) for k, v in sorted(node.attrs.items()))
            key = (node.op, tuple(None if o is None else (o.node.id, o.index) for o in operands), attrs, node.types)
            first = seen.setdefault(key, node)
            if first is not node:
                earlier.update(zip(node.results, first.results, strict=True))

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        duplicate = node.results and node.results[0] in earlier
        return tuple(rewriter[earlier[result]] for result in node.results) if duplicate else None

    return rebuild(graph, visit, made_by="cse") if earlier else graph
