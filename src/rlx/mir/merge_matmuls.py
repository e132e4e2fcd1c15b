"""Merges matmuls that share their left operand, such as the q, k and v projections, into one wide matmul.

Moves weights to the front (`weights_to_front`); leaves slices of the product.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.dtypes import DType
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter, rebuild
from rlx.mir.report import FusionReport
from rlx.mir.weight_only_values import is_matrix, packed_rows, sides, storage_of, stored, weight_nodes
from rlx.mir.weights_to_front import weights_to_front


@dataclass(frozen=True)
class Member:
    """One matmul of a group, with its bias addition if it has one."""

    matmul: Node
    bias_add: Node | None
    bias: Value | None

    @property
    def result(self) -> Node:
        return self.bias_add or self.matmul


def merge_matmuls(
    graph: Graph, *, report: FusionReport | None = None, certain: bool = True, by_rows: bool = False
) -> Graph:
    """x @ a, x @ b, ... (each perhaps plus a bias) -> slices of x @ concatenate(a, b, ...).

    With `by_rows`, transposed weights are concatenated as they are stored: for targets that read them as strided views.
    """
    graph = weights_to_front(graph)
    weights, users, outputs = weight_nodes(graph, certain=certain), graph.users(), set(graph.outputs)
    groups: dict[tuple[Value, DType], list[Member]] = {}
    for node in graph.nodes:
        if node.op != "matmul" or not node.types[0].dtype.is_float or node in weights:
            continue  # the right operand of the next matmul may be computed from this product
        x, w = sides(node)
        if is_matrix(w, weights):
            groups.setdefault((x, storage_of(w)), []).append(_member(node, weights, users, outputs))
    merged = [members for members in groups.values() if len(members) > 1]
    if not merged:
        return graph
    first = {members[0].matmul: members for members in merged}
    parts: dict[Node, Value] = {}

    def visit(rewriter: Rewriter, node: Node) -> Any:
        if node in first:
            parts.update(_merge(rewriter, first[node], by_rows))
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


def _merge(rewriter: Rewriter, members: list[Member], by_rows: bool) -> dict[Node, Value]:
    like = members[0].matmul
    x = rewriter[sides(like)[0]]
    wide = _concat_columns(rewriter, like, [rewriter[sides(m.matmul)[1]] for m in members], by_rows)
    result = rewriter.one([m.matmul for m in members], "matmul", x, wide)
    if any(m.bias is not None for m in members):
        biases = [rewriter[m.bias] if m.bias is not None else _neutral_bias(rewriter, m.matmul) for m in members]
        bias = rewriter.one(like, "concatenate", *biases, axis=0)
        result = rewriter.one([like, *(m.result for m in members)], "add", result, bias)
    parts: dict[Node, Value] = {}
    at: Any = 0
    for m in members:
        columns = m.matmul.types[0].shape[-1]
        start = (0,) * (result.rank - 1) + (at,)
        stop = (*result.shape[:-1], at + columns)
        part = rewriter.one(m.result, "slice", result, start=start, stop=stop, step=(1,) * result.rank)
        parts[m.matmul] = parts[m.result] = part
        at = at + columns
    return parts


def _concat_columns(rewriter: Rewriter, like: Node, matrices: list[Value], by_rows: bool) -> Value:
    """Concatenate the columns of matrices that share a storage type; packed rows and 16-bit floats stay as stored."""
    rows = [r for m in matrices if (r := packed_rows(m)) is not None]
    if len(rows) < len(matrices):
        narrow = [stored(m) for m in matrices]
        if by_rows and all(n.node.op == "transpose" for n in narrow):
            sources = [source for n in narrow if (source := n.node.operands[0]) is not None]
            joined = rewriter.one(like, "concatenate", *sources, axis=0)
            joined = rewriter.one(like, "transpose", joined, axes=(1, 0))
        else:
            joined = rewriter.one(like, "concatenate", *narrow, axis=1)
        wide = matrices[0].dtype
        return joined if joined.dtype is wide else rewriter.one(like, "cast", joined, dtype=wide)
    joined = rewriter.one(like, "concatenate", *rows, axis=0)
    return rewriter.one(like, "transpose", rewriter.one(like, "dequantise", joined), axes=(1, 0))


def _neutral_bias(rewriter: Rewriter, matmul: Node) -> Value:
    """Return a bias that changes no bit: -0.0, since -0.0 + 0.0 is 0.0."""
    type_ = matmul.types[0]
    zero = rewriter.constant(matmul, np.array(-0.0, type_.dtype.numpy))
    return rewriter.one(matmul, "expand", zero, shape=(type_.shape[-1],))
