"""Reports missed fusions: launches that read the result of another launch, where one kernel could have computed both.

Runs last, on the graph that is scheduled, and only reports. A standalone elementwise region is a missed fusion.
Ops that are never fused with each other, such as a norm after a matmul, are listed as separate.
"""

from __future__ import annotations

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import LEAF, VIEW
from rlx.mir.fuse_epilogues import is_open_matmul
from rlx.mir.report import FusionReport

_MATMULS = frozenset((
    "matmul", "grouped_matmul", "integer_matmul", "fused_matmul", "fused_grouped", "conv", "conv2d", "conv_transpose",
))  # fmt: skip
# Ops that need complete rows of their input before they start.
_ROWS = frozenset((
    "rms_norm", "layer_norm", "group_norm", "residual_norm", "quantised_norm", "softmax", "log_softmax", "sum", "mean",
    "max", "min", "prod", "argmax", "argmin", "cumsum", "topk", "logsumexp", "cross_entropy",
))  # fmt: skip


def report_unfused(graph: Graph, report: FusionReport) -> None:
    """Add pairs of launches that were not fused to a report."""
    for node in graph.nodes:
        if LEAF in node.definition.traits or VIEW in node.definition.traits:
            continue
        for operand in dict.fromkeys(o for o in node.operands if o is not None):
            producer, views = _producer(operand)
            if producer is None:
                continue
            pair = f"{_name(producer)} -> {_name(node)}"
            if "region" in (producer.op, node.op):
                why = _why(graph, producer, node, operand, views)
                if why:
                    report.miss("elementwise", node, why, pair)
            elif node.op in _ROWS:
                why = f"{node.op} needs complete rows, and no kernel computes both"
                report.keep_separate(node, why, pair)


def _producer(value: Value) -> tuple[Node | None, list[str]]:
    """Return the node that computes a value (None for a leaf), and the views in between."""
    views: list[str] = []
    while VIEW in value.node.definition.traits and value.node.operands[0] is not None:
        views.append(value.node.op)
        value = value.node.operands[0]
    return (None if LEAF in value.node.definition.traits else value.node), views


def _name(node: Node) -> str:
    """Return a readable name: the op, or the ops of a region."""
    if node.op != "region":
        return {"fused_matmul": "matmul", "fused_grouped": "grouped_matmul"}.get(node.op, node.op)
    return " + ".join(n.op for n in node.attrs["body"].nodes if LEAF not in n.definition.traits)


def _why(graph: Graph, producer: Node, reader: Node, read: Value, views: list[str]) -> str:
    """Return why two neighbours, one of them elementwise, were not fused; empty if another pass has reported it."""
    if reader.op != "region":
        return f"{_name(reader)} does not fuse elementwise ops on its input"
    if producer.op == "region":
        if producer[0] in graph.outputs:
            return "the first result is an output of the graph"
        if views:
            return f"there is a {views[-1]} in between"
        if producer.types[0].shape != reader.types[0].shape:
            return f"{producer.types[0]} is broadcast to {reader.types[0]}"
        return "the first result has other readers"
    if views:
        return f"there is a {views[-1]} in between"
    if is_open_matmul(read):
        return ""  # reported by fuse_epilogues
    if producer.op in _MATMULS:
        return f"{_name(producer)} already has an epilogue, or supports none"
    return f"{producer.op} does not fuse elementwise ops on its output"
