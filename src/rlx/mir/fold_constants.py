"""Constant folding: evaluates nodes with constant operands at compile time (by the reference), if results are small."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import BindError, KernelError
from rlx.ir import evaluate, registry
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter, rebuild

MAX_ELEMENTS = 4096  # larger results would bloat the graph; the bind program computes them


def fold_constants(graph: Graph) -> Graph:
    """Replace nodes with constant operands by their values."""
    if not any(_is_constant(node.operands) for node in graph.nodes):
        return graph

    def visit(rewriter: Rewriter, node: Node) -> list[Value] | None:
        operands = rewriter.operands(node)
        definition = registry.get(node.op)
        if definition.traits & {registry.LEAF, registry.FUSED, registry.CONTROL} or not _is_constant(operands):
            return None
        if any(not isinstance(t.elements, int) or t.elements > MAX_ELEMENTS for t in node.types):
            return None
        arrays = [o.node.attrs["value"].data for o in operands if o is not None]
        try:
            results = evaluate.apply(node, arrays, {})
        except (BindError, KernelError):  # a size is unknown, or the op fails: left to run time
            return None
        return [rewriter.constant(node, r) for r in results]

    return rebuild(graph, visit, made_by="fold_constants")


def _is_constant(operands: Sequence[Value | None]) -> bool:
    return bool(operands) and all(o is not None and o.node.op == "const" for o in operands)
