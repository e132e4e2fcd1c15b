"""Epilogues: fuses an elementwise region into the matmul it reads, where it works on accumulators in registers.

Needs regions (`fuse_regions`). A region joins the last matmul it reads, if it is the only reader. If all readers are
regions that can be computed together, as in the gradient of a gate, they all join and the product is never stored.
"""

from __future__ import annotations

from typing import Any

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import DROPPED, Rewriter, rebuild
from rlx.mir.fused_bodies import after_matmul, identity, is_identity, merge_bodies
from rlx.mir.report import FusionReport
from rlx.types import Size


def fuse_epilogues(graph: Graph, *, report: FusionReport | None = None) -> Graph:
    """region(matmul(x, w), ...) -> fused_matmul(x, w, ...)."""
    users, outputs = graph.users(), set(graph.outputs)
    regions = [n for n in graph.nodes if n.op == "region" and len(n.types) == 1]
    alone = {r: product for r in regions if (product := _candidate(r, users, outputs, None)) is not None}
    joined: dict[Node, Value] = {}
    together: dict[Value, list[Node]] = {}
    for value, readers in users.items():
        if is_open_matmul(value) and value not in outputs and _go_together(value, readers, alone | joined):
            together[value] = readers
            joined |= dict.fromkeys(readers, value)
    for region in regions:
        if report is not None and region not in joined:
            _candidate(region, users, outputs, report)
    plan = alone | joined  # region -> the matmul result it is fused into
    if not plan:
        return graph
    taken = {v.node for v in plan.values()}
    fused: dict[Node, Value] = {}  # region -> its result in the fused matmul

    def visit(rewriter: Rewriter, node: Node) -> Any:
        if node in taken:
            return DROPPED
        if node not in plan:
            return None
        if node not in fused:
            regions = together.get(plan[node], [node])
            fused.update(zip(regions, _fuse(rewriter, regions, plan[node], report), strict=True))
        return fused[node]

    return rebuild(graph, visit, made_by="fuse_epilogues")


def _candidate(
    region: Node, users: dict[Value, list[Node]], outputs: set[Value], report: FusionReport | None
) -> Value | None:
    matmuls = [o for o in region.operands if o is not None and is_open_matmul(o)]
    for value in sorted(matmuls, key=lambda v: -v.node.id):
        why = _why_not(region, value, users, outputs)
        if not why:
            return value
        if report is not None:
            report.miss("epilogue", region, why)
    return None


def _go_together(value: Value, readers: list[Node], taken: dict[Node, Value]) -> bool:
    """Whether all readers of a product are regions that can be computed at the position of the first."""
    first = min(reader.id for reader in readers)
    return len(readers) > 1 and all(
        r.op == "region"
        and len(r.types) == 1
        and r not in taken
        and readers.count(r) == 1
        and not _misfit(r, value)
        and all(o is None or o.node.id < first for o in r.operands)
        for r in readers
    )


def is_open_matmul(value: Value) -> bool:
    """Whether a value is the result of a matmul without an epilogue."""
    node = value.node
    if node.op in ("matmul", "grouped_matmul"):
        return node.types[0].dtype.is_float
    return node.op in ("fused_matmul", "fused_grouped") and is_identity(node.attrs["body"])


def _why_not(region: Node, value: Value, users: dict[Value, list[Node]], outputs: set[Value]) -> str:
    if value in outputs:
        return "the product is an output of the graph"
    if len(users[value]) != 1:
        return f"the product has {len(users[value])} readers"
    return _misfit(region, value)


def _misfit(region: Node, value: Value) -> str:
    """Return why a region cannot work tile by tile on a product; empty if it can."""
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
    """Whether one row stride (and one stride per batch axis) addresses an operand along [..., m, n]."""
    padded = (1,) * (len(out) - len(shape)) + tuple(shape)
    if flat:
        rows, out_rows = padded[:-1], out[:-1]
        return rows == tuple(out_rows) or all(d == 1 for d in rows)
    return True


def _fuse(rewriter: Rewriter, regions: list[Node], value: Value, report: FusionReport | None) -> tuple[Value, ...]:
    matmul = value.node
    body, read = merge_bodies(regions)
    position = read.index(value)
    head = [o for o in matmul.operands if o is not None]
    if matmul.op in ("matmul", "grouped_matmul"):
        attrs, inner = {"weights": 1, "columns": head[1].shape[-1]}, identity(value)
    else:
        attrs, inner = {k: v for k, v in matmul.attrs.items() if k != "body"}, matmul.attrs["body"]
    fused = "fused_matmul" if matmul.op in ("matmul", "fused_matmul") else "fused_grouped"
    others = [o for o in read if o != value]
    if report is not None:
        report.add("matmul epilogue", [matmul, *(n for n in body.nodes if n.op not in ("input", "const"))])
    operands = [rewriter[o] for o in (*head, *others)]
    # the matmul comes first: its stage is that of the fused node
    return rewriter.make([matmul, *regions], fused, *operands, body=after_matmul(body, position, inner), **attrs)
