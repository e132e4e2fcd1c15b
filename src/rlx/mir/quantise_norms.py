"""Norms take in the quantisation of their rows: what an integer matmul reads is written by the norm itself."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import DROPPED, Rewriter, rebuild
from rlx.mir.fuse_norms import KINDS
from rlx.mir.report import FusionReport


def quantise_norms(graph: Graph, *, report: FusionReport | None = None) -> Graph:
    """quantise_rows(norm(x)), or of its product by a vector -> quantised_norm(x).

    That also gives the norm to whoever else reads it.
    """
    users, outputs = graph.users(), set(graph.outputs)
    plan: dict[Node, _Quantised] = {}  # by norm, the first that quantises it
    for node in graph.nodes:
        found = _quantised_norm(node, users, outputs)
        if found is not None:
            plan.setdefault(found.norm, found)
    if not plan:
        return graph
    inside = {found.product for found in plan.values()}
    made: dict[Node, tuple[Value, ...]] = {}

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node in inside:
            return DROPPED
        if node not in plan:
            return made.get(node)
        found = plan[node]
        x, *rest = rewriter.operands(node)
        is_sum = node.op == "residual_norm"
        residual = rest.pop(0) if is_sum else None
        keep = node[0] in outputs or users[node[0]] != [found.product or found.rows]
        kind = node.attrs["kind"] if is_sum else KINDS[node.op]
        nodes = [n for n in (node, found.product, found.rows) if n is not None]
        if report is not None:
            report.add("quantised norm", nodes)
        even = None if found.even is None else rewriter[found.even]
        integers, scale, offset, *others = rewriter.make(
            nodes, "quantised_norm", x, residual, *rest, even, kind=kind, eps=node.attrs["eps"], keep=keep
        )
        made[found.rows] = integers, scale, offset
        y = others[0] if keep else integers  # which nobody reads
        return (y, others[-1]) if is_sum else (y,)

    return rebuild(graph, visit, made_by="quantise_norms")


@dataclass(frozen=True)
class _Quantised:
    """A norm, its product by a vector where it has one, and the node that makes integers of that."""

    norm: Node
    product: Node | None
    even: Value | None
    rows: Node


def _quantised_norm(node: Node, users: dict[Value, list[Node]], outputs: set[Value]) -> _Quantised | None:
    value = node.operands[0] if node.op == "quantise_rows" else None
    if value is None:
        return None
    if _is_norm(value):
        return _Quantised(value.node, None, None, node)
    if value.node.op != "mul" or users[value] != [node] or value in outputs:
        return None
    norm, even = value.node.operands
    assert norm is not None and even is not None
    if not _is_norm(norm) or norm.type != value.type or even.rank != 1 or even.shape != value.shape[-1:]:
        return None
    return _Quantised(norm.node, value.node, even, node) if even.node.id < norm.node.id else None


def _is_norm(value: Value) -> bool:
    return value.index == 0 and value.node.op in (*KINDS, "residual_norm")
