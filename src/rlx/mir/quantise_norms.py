"""Fuses the quantisation of rows into the norm before it: the norm writes the input of an integer matmul directly."""

from __future__ import annotations

from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import DROPPED, Rewriter, rebuild
from rlx.mir.fuse_norms import KINDS
from rlx.mir.report import FusionReport


def quantise_norms(graph: Graph, *, report: FusionReport | None = None) -> Graph:
    """quantise_rows(norm(x)), or of its product by a vector -> quantised_norm(x).

    The fused op also returns the norm for its other readers.
    """
    users, outputs = graph.users(), set(graph.outputs)
    plan: dict[Node, _Quantised] = {}  # norm -> its first quantisation
    for node in graph.nodes:
        match = _quantised_norm(node, users, outputs)
        if match is not None:
            plan.setdefault(match.norm, match)
    if not plan:
        return graph
    products = {match.product for match in plan.values()}
    quantised: dict[Node, tuple[Value, ...]] = {}

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node in products:
            return DROPPED
        if node not in plan:
            return quantised.get(node)
        match = plan[node]
        x, *rest = rewriter.operands(node)
        is_sum = node.op == "residual_norm"
        residual = rest.pop(0) if is_sum else None
        keep = node[0] in outputs or users[node[0]] != [match.product or match.rows]
        kind = node.attrs["kind"] if is_sum else KINDS[node.op]
        nodes = [n for n in (node, match.product, match.rows) if n is not None]
        if report is not None:
            report.add("quantised norm", nodes)
        smoothing = None if match.smoothing is None else rewriter[match.smoothing]
        integers, scale, offset, *others = rewriter.make(
            nodes, "quantised_norm", x, residual, *rest, smoothing, kind=kind, eps=node.attrs["eps"], keep=keep
        )
        quantised[match.rows] = integers, scale, offset
        y = others[0] if keep else integers  # a placeholder that nothing reads
        return (y, others[-1]) if is_sum else (y,)

    return rebuild(graph, visit, made_by="quantise_norms")


@dataclass(frozen=True)
class _Quantised:
    """A norm, its product by a smoothing vector if there is one, and the node that quantises the result."""

    norm: Node
    product: Node | None
    smoothing: Value | None
    rows: Node


def _quantised_norm(node: Node, users: dict[Value, list[Node]], outputs: set[Value]) -> _Quantised | None:
    value = node.operands[0] if node.op == "quantise_rows" else None
    if value is None:
        return None
    if _is_norm(value):
        return _Quantised(value.node, None, None, node)
    if value.node.op != "mul" or users[value] != [node] or value in outputs:
        return None
    norm, smoothing = value.node.operands
    assert norm is not None and smoothing is not None
    if not _is_norm(norm) or norm.type != value.type or smoothing.rank != 1 or smoothing.shape != value.shape[-1:]:
        return None
    return _Quantised(norm.node, value.node, smoothing, node) if smoothing.node.id < norm.node.id else None


def _is_norm(value: Value) -> bool:
    return value.index == 0 and value.node.op in (*KINDS, "residual_norm")
