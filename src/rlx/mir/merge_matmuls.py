"""Matmuls that share their left side become one: gate and up of a gated feed-forward, then any others (QKV).

Needs weights in front (`weights_first`); leaves slices of one wide product, or a `fused_matmul` of two weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.dtypes import DType
from rlx.ir import registry
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import DROPPED, Rewriter, rebuild
from rlx.mir.bodies import extract
from rlx.mir.report import FusionReport
from rlx.mir.weights import is_matrix, packed_rows, storage_of, stored, weight_nodes, weights_first


@dataclass(frozen=True)
class Gate:
    """`f(x @ w0) * g(x @ w1)`: the product node and all nodes between it and the matmuls."""

    root: Node
    nodes: tuple[Node, ...]
    matmuls: tuple[Node, Node]


@dataclass(frozen=True)
class Member:
    """A matmul of a group, with the addition of its bias where it has one."""

    matmul: Node
    bias_add: Node | None
    bias: Value | None

    @property
    def result(self) -> Node:
        return self.bias_add or self.matmul


def merge_gates(graph: Graph, *, report: FusionReport | None = None, certain: bool = True) -> Graph:
    """silu(x @ gate) * (x @ up) -> one matmul over both weights with the product as its epilogue."""
    graph = weights_first(graph)
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
        x, first = _pair(gate.matmuls[0])
        second = _pair(gate.matmuls[1])[1]
        index = _index(gate.matmuls[0])
        if report is not None:
            report.add("gated matmul pair", [*gate.matmuls, *gate.nodes])
        return rewriter.make(
            node,
            "fused_grouped" if index else "fused_matmul",
            rewriter[x],
            rewriter[first],
            rewriter[second],
            *(rewriter[o] for o in (*index, *operands)),
            body=body,
            weights=2,
            columns=first.shape[-1],
        )

    return rebuild(graph, visit, made_by="merge_gates")


def _pair(matmul: Node) -> tuple[Value, Value]:
    a, b, *_ = matmul.operands
    assert a is not None and b is not None
    return a, b


def _index(matmul: Node) -> list[Value]:
    """The matrices that rows choose, where they do."""
    return [o for o in matmul.operands[2:] if o is not None]


def _find_gate(node: Node, weights: set[Node], users: dict[Value, list[Node]], outputs: set[Value]) -> Gate | None:
    sides = []
    for operand in node.operands:
        assert operand is not None
        side = _strip(operand, weights, users, outputs)
        if side is None:
            return None
        sides.append(side)
    (m0, chain0), (m1, chain1) = sides
    (x0, w0), (x1, w1) = _pair(m0), _pair(m1)
    if storage_of(w0) is not storage_of(w1) or _index(m0) != _index(m1):
        return None
    if m0 is m1 or x0 != x1 or w0.type != w1.type or node.types != m0.types or x0.node in weights:
        return None
    ordered = sorted([*chain0, *chain1], key=lambda n: n.id)
    return Gate(node, (*ordered, node), (m0, m1))


def _strip(
    value: Value, weights: set[Node], users: dict[Value, list[Node]], outputs: set[Value]
) -> tuple[Node, list[Node]] | None:
    """Back through elementwise nodes that only this chain uses, to the matmul at its start."""
    chain: list[Node] = []
    while True:
        if value in outputs or len(users[value]) != 1:
            return None
        node = value.node
        if node.op in ("matmul", "grouped_matmul"):
            w = _pair(node)[1]
            fits = w.node in weights if node.op == "grouped_matmul" else is_matrix(w, weights)
            return (node, chain) if fits and value.dtype.is_float else None
        if registry.ELEMENTWISE not in registry.get(node.op).traits:
            return None
        moving = [o for o in node.operands if o is not None and o.node not in weights]
        if len(moving) != 1 or moving[0].type != value.type:
            return None
        chain.append(node)
        value = moving[0]


def merge_matmuls(graph: Graph, *, report: FusionReport | None = None, certain: bool = True) -> Graph:
    """x @ a, x @ b, ... (each perhaps plus a bias) -> slices of x @ concatenate(a, b, ...)."""
    graph = weights_first(graph)
    weights, users, outputs = weight_nodes(graph, certain=certain), graph.users(), set(graph.outputs)
    groups: dict[tuple[Value, DType], list[Member]] = {}
    for node in graph.nodes:
        if node.op != "matmul" or not node.types[0].dtype.is_float or node in weights:
            continue  # a product of weights may be what the right side of the next one is made of
        x, w = _pair(node)
        if is_matrix(w, weights):
            groups.setdefault((x, storage_of(w)), []).append(_member(node, weights, users, outputs))
    merged = [members for members in groups.values() if len(members) > 1]
    if not merged:
        return graph
    first = {members[0].matmul: members for members in merged}
    parts: dict[Node, Value] = {}

    def visit(rewriter: Rewriter, node: Node) -> Any:
        if node in first:
            parts.update(_merge(rewriter, first[node]))
            if report is not None:
                report.add("matmuls that share an input", [n for m in first[node] for n in {m.matmul: 0, m.result: 0}])
        return parts.get(node)

    return rebuild(graph, visit, made_by="merge_matmuls")


def _member(matmul: Node, weights: set[Node], users: dict[Value, list[Node]], outputs: set[Value]) -> Member:
    value = matmul[0]
    using = users.get(value, [])
    if value not in outputs and len(using) == 1 and using[0].op == "add" and using[0].types == matmul.types:
        a, b = using[0].operands
        other = b if a == value else a
        if other is not None and other.node in weights and other.rank == 1 and other.shape[0] == value.shape[-1]:
            return Member(matmul, using[0], other)
    return Member(matmul, None, None)


def _merge(rewriter: Rewriter, members: list[Member]) -> dict[Node, Value]:
    like = members[0].matmul
    x = rewriter[_pair(like)[0]]
    wide = _side_by_side(rewriter, like, [rewriter[_pair(m.matmul)[1]] for m in members])
    result = rewriter.one([m.matmul for m in members], "matmul", x, wide)
    if any(m.bias is not None for m in members):
        biases = [rewriter[m.bias] if m.bias is not None else _nothing(rewriter, m.matmul) for m in members]
        bias = rewriter.one(like, "concatenate", *biases, axis=0)
        result = rewriter.one([like, *(m.result for m in members)], "add", result, bias)
    found: dict[Node, Value] = {}
    at: Any = 0
    for m in members:
        columns = m.matmul.types[0].shape[-1]
        start = (0,) * (result.rank - 1) + (at,)
        stop = (*result.shape[:-1], at + columns)
        part = rewriter.one(m.result, "slice", result, start=start, stop=stop, step=(1,) * result.rank)
        found[m.matmul] = found[m.result] = part
        at = at + columns
    return found


def _side_by_side(rewriter: Rewriter, like: Node, matrices: list[Value]) -> Value:
    """The columns of all matrices, which are stored in one type; packed rows and narrow floats are joined as stored."""
    rows = [r for m in matrices if (r := packed_rows(m)) is not None]
    if len(rows) < len(matrices):
        joined = rewriter.one(like, "concatenate", *map(stored, matrices), axis=1)
        wide = matrices[0].dtype
        return joined if joined.dtype is wide else rewriter.one(like, "cast", joined, dtype=wide)
    joined = rewriter.one(like, "concatenate", *rows, axis=0)
    return rewriter.one(like, "transpose", rewriter.one(like, "dequantise", joined), axes=(1, 0))


def _nothing(rewriter: Rewriter, matmul: Node) -> Value:
    """A bias that changes no bit: -0.0, since 0.0 would turn sums of -0.0 into 0.0."""
    type_ = matmul.types[0]
    zero = rewriter.constant(matmul, np.array(-0.0, type_.dtype.numpy))
    return rewriter.one(matmul, "expand", zero, shape=(type_.shape[-1],))
