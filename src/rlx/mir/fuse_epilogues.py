"""Epilogues: an elementwise region that reads a matmul becomes part of it, working on sums in registers.

Needs regions (`fuse_regions`); a region joins the last matmul it reads, if it is the only reader.
"""

from __future__ import annotations

from typing import Any

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import DROPPED, Rewriter, rebuild
from rlx.mir.bodies import after_matmul, identity, is_identity
from rlx.mir.report import FusionReport
from rlx.types import Size


def fuse_epilogues(graph: Graph, *, report: FusionReport | None = None) -> Graph:
    """region(matmul(x, w), ...) -> fused_matmul(x, w, ...)."""
    users, outputs = graph.users(), set(graph.outputs)
    plan: dict[Node, Value] = {}  # region -> the matmul result it takes in
    for node in graph.nodes:
        if node.op != "region" or len(node.types) != 1:
            continue
        found = _candidate(node, users, outputs, report)
        if found is not None:
            plan[node] = found
    taken = {v.node for v in plan.values()}

    def visit(rewriter: Rewriter, node: Node) -> Any:
        if node in taken:
            return DROPPED
        if node not in plan:
            return None
        return _fuse(rewriter, node, plan[node], report)

    return rebuild(graph, visit, made_by="fuse_epilogues")


def _candidate(
    region: Node, users: dict[Value, list[Node]], outputs: set[Value], report: FusionReport | None
) -> Value | None:
    matmuls = [o for o in region.operands if o is not None and _is_open_matmul(o)]
    for value in sorted(matmuls, key=lambda v: -v.node.id):
        why = _why_not(region, value, users, outputs)
        if not why:
            return value
        if report is not None:
            report.miss("epilogue", region, why)
    return None


def _is_open_matmul(value: Value) -> bool:
    node = value.node
    if node.op in ("matmul", "grouped_matmul"):
        return node.types[0].dtype.is_float
    return node.op in ("fused_matmul", "fused_grouped") and is_identity(node.attrs["body"])


def _why_not(region: Node, value: Value, users: dict[Value, list[Node]], outputs: set[Value]) -> str:
    if value in outputs:
        return "the product is an output of the graph"
    if len(users[value]) != 1:
        return f"the product has {len(users[value])} readers"
    if value.shape != region.types[0].shape:
        return f"the product {value.type} is broadcast to {region.types[0]}"
    flat = value.node.op != "matmul" or _right(value.node).rank == 2
    for operand in region.operands:
        if operand is not None and operand != value and not _fits(operand.shape, value.shape, flat):
            return f"operand {operand.type} cannot follow the tiles of {value.type}"
    return ""


def _right(matmul: Node) -> Value:
    b = matmul.operands[1]
    assert b is not None
    return b


def _fits(shape: tuple[Size, ...], out: tuple[Size, ...], flat: bool) -> bool:
    """Whether one row stride (and one stride a batch axis) describes an operand against [..., m, n]."""
    padded = (1,) * (len(out) - len(shape)) + tuple(shape)
    if flat:
        rows, whole = padded[:-1], out[:-1]
        return rows == tuple(whole) or all(d == 1 for d in rows)
    return True


def _fuse(rewriter: Rewriter, region: Node, value: Value, report: FusionReport | None) -> tuple[Value, ...]:
    matmul = value.node
    body: Graph = region.attrs["body"]
    position = list(region.operands).index(value)
    head = [o for o in matmul.operands if o is not None]
    if matmul.op in ("matmul", "grouped_matmul"):
        attrs, inner = {"weights": 1, "columns": head[1].shape[-1], "packed": False}, identity(value)
    else:
        attrs, inner = {k: v for k, v in matmul.attrs.items() if k != "body"}, matmul.attrs["body"]
    fused = "fused_matmul" if matmul.op in ("matmul", "fused_matmul") else "fused_grouped"
    others = [o for i, o in enumerate(region.operands) if o is not None and i != position]
    if report is not None:
        report.add("matmul epilogue", [matmul, *(n for n in body.nodes if n.op not in ("input", "const"))])
    operands = [rewriter[o] for o in (*head, *others)]
    return rewriter.make(region, fused, *operands, body=after_matmul(body, position, inner), **attrs)
