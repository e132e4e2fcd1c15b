"""Merges RoPE of adjacent heads that share a table, such as queries and keys sliced from one product."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter, rebuild
from rlx.mir.report import FusionReport


@dataclass(frozen=True)
class Cut:
    """A rope whose operand is the heads in columns [start, stop) of the last axis of `source`."""

    rope: Node
    source: Value
    start: int
    stop: int
    head_dim: int

    @property
    def heads(self) -> int:
        return (self.stop - self.start) // self.head_dim


def merge_ropes(graph: Graph, *, report: FusionReport | None = None) -> Graph:
    """rope(y[..., a:b]), rope(y[..., b:c]) -> slices of rope(y[..., a:c])."""
    groups: dict[Any, list[Cut]] = {}
    for node in graph.nodes:
        cut = _cut(node) if node.op == "rope" else None
        if cut is not None:
            key = (cut.source, cut.head_dim, node.operands[1:], node.attrs["style"])
            groups.setdefault(key, []).append(cut)
    first: dict[Node, list[Cut]] = {}
    for cuts in groups.values():
        ordered = sorted(cuts, key=lambda c: c.start)
        if len(cuts) == 1:
            continue
        if all(a.stop == b.start for a, b in itertools.pairwise(ordered)):
            first[min((c.rope for c in cuts), key=lambda n: n.id)] = ordered
        elif report is not None:
            report.miss("ropes of neighbouring heads", ordered[-1].rope, "the heads are not adjacent")
    if not first:
        return graph
    parts: dict[Node, Value] = {}

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        if node in first:
            parts.update(_merge(rewriter, node, first[node]))
            if report is not None:
                report.add("ropes of neighbouring heads", [c.rope for c in first[node]])
        return parts.get(node)

    return rebuild(graph, visit, made_by="merge_ropes")


def _cut(rope: Node) -> Cut | None:
    x = rope.operands[0]
    assert x is not None
    reshape = x.node
    if reshape.op != "reshape" or reshape.operands[0] is None or reshape.operands[0].node.op != "slice":
        return None
    piece = reshape.operands[0].node
    source = piece.operands[0]
    assert source is not None
    start, stop, head_dim = piece.attrs["start"], piece.attrs["stop"], x.shape[3]
    full_rows = all(a == 0 and b == d for a, b, d in zip(start[:-1], stop[:-1], source.shape[:-1], strict=True))
    if not (full_rows and source.rank == 3 and piece.attrs["step"] == (1, 1, 1) and x.shape[:2] == source.shape[:2]):
        return None
    if not (isinstance(start[-1], int) and isinstance(stop[-1], int) and isinstance(head_dim, int)):
        return None
    return Cut(rope, source, start[-1], stop[-1], head_dim)


def _merge(rewriter: Rewriter, like: Node, cuts: Sequence[Cut]) -> dict[Node, Value]:
    y = rewriter[cuts[0].source]
    low, high, dim = cuts[0].start, cuts[-1].stop, cuts[0].head_dim
    part = rewriter.one(like, "slice", y, start=(0, 0, low), stop=(*y.shape[:2], high), step=(1, 1, 1))
    heads = rewriter.one(like, "reshape", part, shape=(*y.shape[:2], (high - low) // dim, dim))
    tables = [rewriter[o] for o in cuts[0].rope.operands[1:] if o is not None]
    ropes = [cut.rope for cut in cuts]
    rotated = rewriter.one([like, *ropes], "rope", heads, *tables, **cuts[0].rope.attrs)
    parts, at = {}, 0
    for cut in cuts:
        stop = (*rotated.shape[:2], at + cut.heads, dim)
        parts[cut.rope] = rewriter.one(cut.rope, "slice", rotated, start=(0, 0, at, 0), stop=stop, step=(1,) * 4)
        at += cut.heads
    return parts
