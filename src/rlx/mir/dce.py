"""Dead-code elimination: drops nodes that no output needs; inputs and params stay, as the graph's interface."""

from __future__ import annotations

from rlx.ir.graph import Graph
from rlx.ir.rewrite import live_copy


def dce(graph: Graph) -> Graph:
    """Keep the nodes that outputs depend on, and every input and param."""
    return live_copy(graph, made_by="dce")
