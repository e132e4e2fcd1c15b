"""Expansion: ops that no kernel knows become the ops they are written with, custom functions their forward bodies.

It comes first, so that every later pass sees through them. MIR in, MIR without composed ops out, in loops too.
"""

from __future__ import annotations

from typing import Any

from rlx.errors import LowerError
from rlx.ir.compose import written_out
from rlx.ir.graph import Graph, Node, Value, attr_key
from rlx.ir.registry import COMPOSED, CONTROL
from rlx.ir.rewrite import Rewriter, inline, map_bodies, rebuild

Key = tuple[Any, ...]


def has_composed(graph: Graph) -> bool:
    """Whether there is anything to expand, in the graph or in its bodies."""
    for node in graph.nodes:
        traits = node.definition.traits
        if COMPOSED in traits:
            return True
        if CONTROL in traits and any(has_composed(v) for v in node.attrs.values() if isinstance(v, Graph)):
            return True
    return False


def expand(graph: Graph) -> Graph:
    """The graph with every composed op written out."""
    return _expand(graph, ())


def _expand(graph: Graph, inside: tuple[Key, ...]) -> Graph:
    """`inside` are the ops whose decomposition this graph is part of."""
    if not has_composed(graph):
        return graph

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if COMPOSED not in node.definition.traits:
            return None
        key = _key(node)
        if key in inside:
            path = " > ".join(k[0] for k in (*inside[inside.index(key) :], key))
            raise LowerError(f"op {node.op}: is written with itself, {path}", hint=node.definition.place)
        body = written_out(node.definition, [None if o is None else o.type for o in node.operands], node.attrs)
        operands = [o for o in rewriter.operands(node) if o is not None]
        return inline(rewriter.graph, _expand(body, (*inside, key)), operands, node.origin.by("expand"))

    return map_bodies(rebuild(graph, visit, made_by="expand"), lambda body: _expand(body, inside))


def _key(node: Node) -> Key:
    types = tuple(None if o is None else o.type for o in node.operands)
    return (node.op, types, *((k, attr_key(v)) for k, v in sorted(node.attrs.items())))
