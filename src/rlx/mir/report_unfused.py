"""What did not fuse: launches that read what another launch made, where one kernel might have done both.

Runs last, on the graph that is scheduled, and only reports. Elementwise work that stands by itself is a missed fusion.
Ops that are never fused with each other, such as a norm after a matmul, are listed apart.
"""

from __future__ import annotations

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import LEAF, VIEW
from rlx.mir.fuse_epilogues import is_open_matmul
from rlx.mir.report import FusionReport

_MATMULS = frozenset((
    "matmul", "grouped_matmul", "integer_matmul", "fused_matmul", "fused_grouped", "conv", "conv2d", "conv_transpose",
))  # fmt: skip
# Ops that go over whole rows: what they read is complete before they start.
_ROWS = frozenset((
    "rms_norm", "layer_norm", "group_norm", "residual_norm", "quantised_norm", "softmax", "log_softmax", "sum", "mean",
    "max", "min", "prod", "argmax", "argmin", "cumsum", "topk", "logsumexp", "cross_entropy",
))  # fmt: skip


def report_unfused(graph: Graph, report: FusionReport) -> None:
    """Add what was not fused to a report."""
    for node in graph.nodes:
        if LEAF in node.definition.traits or VIEW in node.definition.traits:
            continue
        for operand in dict.fromkeys(o for o in node.operands if o is not None):
            made, seen_as = _maker(operand)
            if made is None:
                continue
            what = f"{_name(made)} -> {_name(node)}"
            if "region" in (made.op, node.op):
                why = _why(graph, made, node, operand, seen_as)
                if why:
                    report.miss("elementwise", node, why, what)
            elif node.op in _ROWS:
                why = f"{node.op} goes over whole rows, and no kernel computes both"
                report.keep_apart(node, why, what)


def _maker(value: Value) -> tuple[Node | None, list[str]]:
    """The node that computes a value, and the views between; None for a leaf."""
    views: list[str] = []
    while VIEW in value.node.definition.traits and value.node.operands[0] is not None:
        views.append(value.node.op)
        value = value.node.operands[0]
    return (None if LEAF in value.node.definition.traits else value.node), views


def _name(node: Node) -> str:
    """A node in words: what a region computes, or the op."""
    if node.op != "region":
        return {"fused_matmul": "matmul", "fused_grouped": "grouped_matmul"}.get(node.op, node.op)
    return " + ".join(n.op for n in node.attrs["body"].nodes if LEAF not in n.definition.traits)


def _why(graph: Graph, made: Node, reader: Node, read: Value, seen_as: list[str]) -> str:
    """Why two neighbours, one of them elementwise, are two launches; empty where another pass has said so."""
    if reader.op != "region":
        return f"{_name(reader)} takes in no elementwise work on what it reads"
    if made.op == "region":
        if made[0] in graph.outputs:
            return "what the first gives is an output of the graph"
        if seen_as:
            return f"a {seen_as[-1]} lies between"
        if made.types[0].shape != reader.types[0].shape:
            return f"{made.types[0]} is broadcast to {reader.types[0]}"
        return "what the first gives has other readers"
    if seen_as:
        return f"a {seen_as[-1]} lies between"
    if is_open_matmul(read):
        return ""  # said by fuse_epilogues
    if made.op in _MATMULS:
        return f"{_name(made)} has an epilogue already, or takes none"
    return f"{made.op} takes in no elementwise work on what it gives"
