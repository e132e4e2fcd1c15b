"""Merges the gate and up projections of a gated feed-forward into one matmul with their product as its epilogue.

Moves weights to the front (`weights_to_front`); leaves a `fused_matmul` or a `fused_grouped` of two weights.
"""

from __future__ import annotations

from typing import Any

from rlx.fast_dataclass import dataclass
from rlx.ir import registry
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import DROPPED, Rewriter, rebuild
from rlx.mir.fused_bodies import extract
from rlx.mir.report import FusionReport
from rlx.mir.weight_only_values import is_matrix, sides, storage_of, weight_nodes
from rlx.mir.weights_to_front import weights_to_front


@dataclass(frozen=True)
class Gate:
    """`f(x @ w0) * g(x @ w1)`: the product node and all nodes between it and the matmuls."""

    root: Node
    nodes: tuple[Node, ...]
    matmuls: tuple[Node, Node]


def merge_gate_up(graph: Graph, *, report: FusionReport | None = None, certain: bool = True) -> Graph:
    """silu(x @ gate) * (x @ up) -> one matmul over both weights with the product as its epilogue."""
    graph = weights_to_front(graph)
    weights, users, outputs = weight_nodes(graph, certain=certain), graph.users(), set(graph.outputs)
    roots: dict[Node, Gate] = {}
    taken: set[Node] = set()
    for node in graph.nodes:
        gate = _find_gate(node, weights, users, outputs) if node.op == "mul" else None
        if gate is not None and not taken & set(gate.matmuls):
            roots[node] = gate
            taken |= set(gate.matmuls) | set(gate.nodes)
    if not roots:
        return graph

    def visit(rewriter: Rewriter, node: Node) -> Any:
        gate = roots.get(node)
        if gate is None:
            return DROPPED if node in taken else None
        body, operands = extract(gate.nodes, [node[0]], [m[0] for m in gate.matmuls])
        x, first = sides(gate.matmuls[0])
        second = sides(gate.matmuls[1])[1]
        index = _index(gate.matmuls[0])
        if report is not None:
            report.add("gated matmul pair", [*gate.matmuls, *gate.nodes])
        return rewriter.make(
            [*gate.matmuls, node],
            "fused_grouped" if index else "fused_matmul",
            rewriter[x],
            rewriter[first],
            rewriter[second],
            *(rewriter[o] for o in (*index, *operands)),
            body=body,
            weights=2,
            columns=first.shape[-1],
        )

    return rebuild(graph, visit, made_by="merge_gate_up")


def _index(matmul: Node) -> list[Value]:
    """Return the group index of a grouped matmul as a list; empty for a plain matmul."""
    return [o for o in matmul.operands[2:] if o is not None]


def _find_gate(node: Node, weights: set[Node], users: dict[Value, list[Node]], outputs: set[Value]) -> Gate | None:
    ends = []
    for operand in node.operands:
        assert operand is not None
        side = _strip(operand, weights, users, outputs)
        if side is None:
            return None
        ends.append(side)
    (m0, chain0), (m1, chain1) = ends
    (x0, w0), (x1, w1) = sides(m0), sides(m1)
    if storage_of(w0) is not storage_of(w1) or _index(m0) != _index(m1):
        return None
    if m0 is m1 or x0 != x1 or w0.type != w1.type or node.types != m0.types or x0.node in weights:
        return None
    ordered = sorted([*chain0, *chain1], key=lambda n: n.id)
    return Gate(node, (*ordered, node), (m0, m1))


def _strip(
    value: Value, weights: set[Node], users: dict[Value, list[Node]], outputs: set[Value]
) -> tuple[Node, list[Node]] | None:
    """Follow elementwise nodes used only by this chain back to the matmul at its start."""
    chain: list[Node] = []
    while True:
        if value in outputs or len(users[value]) != 1:
            return None
        node = value.node
        if node.op in ("matmul", "grouped_matmul"):
            w = sides(node)[1]
            fits = w.node in weights if node.op == "grouped_matmul" else is_matrix(w, weights)
            return (node, chain) if fits and value.dtype.is_float else None
        if registry.ELEMENTWISE not in registry.get(node.op).traits:
            return None
        inputs = [o for o in node.operands if o is not None and o.node not in weights]
        if len(inputs) != 1 or inputs[0].type != value.type:
            return None
        chain.append(node)
        value = inputs[0]
