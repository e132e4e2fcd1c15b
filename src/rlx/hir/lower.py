"""Lowering: HIR blocks become MIR ops. Every node made keeps the block it came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import rlx.hir.blocks  # noqa: F401  declares the blocks
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import HIR, MIR, RuleTable, get
from rlx.ir.rewrite import Rewriter

lowering: RuleTable[Callable[..., Value]] = RuleTable("lowering", "src/rlx/hir/lower.py")


@lowering("linear")
def _(x: Value, weight: Value, bias: Value | None, *, activation: str | None) -> Value:
    result = x @ weight
    if bias is not None:
        result = result + bias
    return getattr(result, activation)() if activation else result


@lowering("swiglu_ffn")
def _(x: Value, up: Value, gate: Value, down: Value) -> Value:
    return ((x @ gate).silu() * (x @ up)) @ down  # type: ignore[no-any-return]


@lowering("residual_rms_norm")
def _(x: Value, residual: Value, gamma: Value, beta: Value | None, *, eps: float) -> Value:
    return x.graph.rms_norm(x + residual, gamma, beta, eps=eps)  # type: ignore[no-any-return]


def lower(graph: Graph) -> Graph:
    """The MIR graph of an HIR graph; an MIR graph is returned as it is."""
    if graph.level == MIR:
        return graph
    rewriter = Rewriter(graph, "lower")
    rewriter.graph.level = MIR
    for node in graph.nodes:
        if get(node.op).level == HIR:
            results: tuple[Value, ...] = (_lower(rewriter, node),)
        else:
            results = rewriter.copy(node)
        rewriter.values.update(zip(node.results, results, strict=True))
    rewriter.graph.outputs = tuple(rewriter.values[o] for o in graph.outputs)
    return rewriter.graph


def _lower(rewriter: Rewriter, node: Node) -> Value:
    start = len(rewriter.graph)
    result = lowering[node.op](*rewriter.operands(node), **node.attrs)
    for made in rewriter.graph.nodes[start:]:
        object.__setattr__(made, "origin", replace(node.origin, source=f"%{node.id} {node.op}"))
    return result
