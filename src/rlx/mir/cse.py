"""Common-subexpression elimination: merges equal nodes with equal operands."""

from __future__ import annotations

from typing import Any

from rlx.ir.graph import Graph, Node, Value, attr_key
from rlx.ir.rewrite import Rewriter, rebuild


def cse(graph: Graph) -> Graph:
    """Merge nodes with the same op, attributes and operands."""
    seen: dict[Any, tuple[Value, ...]] = {}

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node.op in ("input", "state", "param"):
            return None
        operands = rewriter.operands(node)
        attrs = tuple((k, attr_key(v)) for k, v in sorted(node.attrs.items()))
        key = (node.op, tuple(None if o is None else (o.node.id, o.index) for o in operands), attrs, node.types)
        if key not in seen:
            seen[key] = rewriter.copy(node)
        return seen[key]

    new_graph = rebuild(graph, visit, made_by="cse")
    return new_graph if len(new_graph) < len(graph) else graph
