"""Fuses the residual addition before a norm into the norm, unless it can become a matmul epilogue instead."""

from __future__ import annotations

from rlx.ir import registry
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter, rebuild
from rlx.mir.report import FusionReport

KINDS = {"layer_norm": "layer", "rms_norm": "rms"}
MATMULS = ("matmul", "integer_matmul", "fused_matmul")


def fuse_norms(graph: Graph, *, report: FusionReport | None = None) -> Graph:
    """norm(a + b) -> residual_norm(a, b), which also returns the sum for its other readers."""
    users, outputs = graph.users(), set(graph.outputs)
    plan: dict[Node, Node] = {}  # addition -> norm
    for node in graph.nodes:
        if node.op in KINDS and node.operands[0] is not None:
            total = node.operands[0]
            why = _why_not(node, total, users, outputs, plan)
            if why is None:
                plan[total.node] = node
            elif why and report is not None:
                report.miss("residual norm", node, why)
    if not plan:
        return graph
    norms = {n: a for a, n in plan.items()}
    normed_values: dict[Node, Value] = {}

    def visit(rewriter: Rewriter, node: Node) -> Value | tuple[Value, ...] | None:
        if node in plan:
            norm = plan[node]
            a, b = (rewriter[o] for o in node.operands if o is not None)
            gamma, beta = (None if o is None else rewriter[o] for o in norm.operands[1:])
            if report is not None:
                report.add("residual norm", [node, norm])
            normed, total = rewriter.make(
                [norm, node], "residual_norm", a, b, gamma, beta, kind=KINDS[norm.op], eps=norm.attrs["eps"]
            )
            normed_values[norm] = normed
            return total
        return normed_values[node] if node in norms else None

    return rebuild(graph, visit, made_by="fuse_norms")


def _why_not(
    norm: Node, total: Value, users: dict[Value, list[Node]], outputs: set[Value], plan: dict[Node, Node]
) -> str | None:
    """Return None to fuse, an empty string if there is nothing to fuse, else the reason not to."""
    add = total.node
    if add.op != "add" or add in plan:
        return ""
    a, b = add.operands
    assert a is not None and b is not None
    if a.type != b.type or a.type != total.type:
        return ""
    if any(_can_be_epilogue(v, users, outputs) for v in (a, b)):
        return ""
    if any(o is not None and o.node.id >= add.id for o in norm.operands[1:]):
        return "its scale depends on the sum, or comes after it"
    return None


def _can_be_epilogue(value: Value, users: dict[Value, list[Node]], outputs: set[Value]) -> bool:
    """Whether the value ends an elementwise chain from a matmul, so that adding to it becomes an epilogue."""
    while value not in outputs and len(users[value]) == 1:
        node = value.node
        if node.op in MATMULS:
            return True
        if registry.ELEMENTWISE not in registry.get(node.op).traits:
            return False
        same = [o for o in node.operands if o is not None and o.shape == value.shape and len(users[o]) == 1]
        matmuls = [o for o in same if o.node.op in MATMULS] or same
        if not matmuls:
            return False
        value = matmuls[0]
    return False
