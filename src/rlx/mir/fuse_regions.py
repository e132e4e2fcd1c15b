"""Elementwise regions: fuses connected elementwise nodes of one shape; no bare elementwise op is left."""

from __future__ import annotations

from typing import Any

from rlx.ir import registry
from rlx.ir.graph import Graph, Node
from rlx.ir.rewrite import DROPPED, Rewriter, rebuild
from rlx.mir.fused_bodies import extract
from rlx.mir.report import FusionReport


def fuse_regions(graph: Graph, *, report: FusionReport | None = None, join: bool = True) -> Graph:
    """Fuse every elementwise node into the region of its users, if they are all in one region of its shape.

    Without `join`, each node becomes a region of its own.
    """
    users, outputs = graph.users(), set(graph.outputs)
    root_of: dict[Node, Node] = {}
    for node in reversed(graph.nodes):
        if registry.ELEMENTWISE not in registry.get(node.op).traits:
            continue
        value = node[0]
        roots = {root_of.get(u, u) for u in users.get(value, ())} if join else set()
        root = next(iter(roots)) if len(roots) == 1 else None
        joins = value not in outputs and root in root_of and root is not None and root.types[0].shape == value.shape
        root_of[node] = root if joins and root is not None else node
    regions: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node in root_of:
            regions.setdefault(root_of[node], []).append(node)

    def visit(rewriter: Rewriter, node: Node) -> Any:
        if node not in root_of:
            return None
        if node not in regions:
            return DROPPED
        nodes = regions[node]
        body, operands = extract(nodes, [node[0]])
        if report is not None and len(nodes) > 1:
            report.add("elementwise region", nodes)
        return rewriter.make(node, "region", *(rewriter[o] for o in operands), body=body)

    return rebuild(graph, visit, made_by="fuse_regions")
