"""Reports missed fusions: launches that read the result of another launch, where one kernel could have computed both.

Runs last, on the graph that is scheduled, and only reports. A standalone elementwise region is a missed fusion. All
other boundaries between launches are listed as separate, with the reason: a norm after a matmul needs complete rows.
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

_RULES = "docs/looking-inside.md: What fuses"
_MANY_TIMES = "in an order of its own or more than once"
_WHY_INPUTS = {op: "in several passes over each row" for op in ("softmax", "log_softmax", "layer_norm")}
_WHY_INPUTS |= dict.fromkeys(("sum", "mean", "max", "min", "prod"), "and its loops only reduce")


def report_unfused(graph: Graph, report: FusionReport) -> None:
    """Add pairs of launches that were not fused to a report."""
    others = False  # whether a launch comes before
    for node in graph.nodes:
        if LEAF in node.definition.traits or VIEW in node.definition.traits:
            continue
        producers = [_producer(operand)[0] for operand in node.operands if operand is not None]
        if others and not any(producers):
            report.keep_separate(node, "it reads no result of another launch", _name(node))
        others = True
        for operand in dict.fromkeys(o for o in node.operands if o is not None):
            producer, views = _producer(operand)
            if producer is None:
                continue
            pair = f"{_name(producer)} -> {_name(node)}"
            if "region" in (producer.op, node.op):
                why = _why(graph, producer, node, operand, views)
                if why:
                    report.miss("elementwise", node, why, pair)
            else:
                report.keep_separate(node, _why_separate(node), pair)


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


def _why_separate(reader: Node) -> str:
    """Return why no kernel computes a node, which is not elementwise, together with the one before it."""
    if reader.op in _ROWS:
        return f"{reader.op} needs complete rows, and no kernel computes both"
    if reader.op in _MATMULS:
        return f"{_name(reader)} reads each row of its input once per tile of columns, so the rows are stored first"
    return "no kernel computes both"


def _why(graph: Graph, producer: Node, reader: Node, read: Value, views: list[str]) -> str:
    """Return why two neighbours, one of them elementwise, were not fused; empty if another pass has reported it."""
    if reader.op != "region":
        return f"{_name(reader)} reads its input from memory, {_WHY_INPUTS.get(reader.op, _MANY_TIMES)} ({_RULES})"
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
        has_epilogue = producer.op in ("fused_matmul", "fused_grouped")
        return f"{_name(producer)} {'already has an' if has_epilogue else 'supports no'} epilogue"
    return f"{producer.op} has no epilogue: matmuls alone apply elementwise ops to what they store ({_RULES})"
