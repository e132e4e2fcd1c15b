"""Common-subexpression elimination: equal nodes on equal operands become one."""

from __future__ import annotations

from typing import Any

from rlx.ir.graph import Graph, Node, Value, attr_key
from rlx.ir.rewrite import Rewriter, rebuild


def cse(graph: Graph) -> Graph:
    """Compute each thing once."""
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

    found = rebuild(graph, visit, made_by="cse")
    return found if len(found) < len(graph) else graph
