"""Constant folding: nodes whose operands are constants are computed now, by the reference, if the result is small."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import BindError, KernelError
from rlx.ir import evaluate, registry
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter, rebuild

LARGEST = 4096  # elements; larger results would bloat graphs and stay for the bind program


def fold_constants(graph: Graph) -> Graph:
    """Replace computed constants by their values."""
    if not any(_is_constant(node.operands) for node in graph.nodes):
        return graph

    def visit(rewriter: Rewriter, node: Node) -> list[Value] | None:
        operands = rewriter.operands(node)
        definition = registry.get(node.op)
        if definition.traits & {registry.LEAF, registry.FUSED, registry.CONTROL} or not _is_constant(operands):
            return None
        if any(not isinstance(t.elements, int) or t.elements > LARGEST for t in node.types):
            return None
        arrays = [o.node.attrs["value"].data for o in operands if o is not None]
        try:
            results = evaluate.apply(node, arrays, {})
        except (BindError, KernelError):  # a size or a fault that only run time knows
            return None
        return [rewriter.constant(node, r) for r in results]

    return rebuild(graph, visit, made_by="fold_constants")


def _is_constant(operands: Sequence[Value | None]) -> bool:
    return bool(operands) and all(o is not None and o.node.op == "const" for o in operands)
