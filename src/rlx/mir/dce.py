"""Dead-code elimination: drop nodes that no output needs; inputs and params stay, they are the graph's interface."""

from __future__ import annotations

from rlx.ir.graph import Graph
from rlx.ir.rewrite import live_copy


def dce(graph: Graph) -> Graph:
    """Keep what the outputs depend on, and every input and param."""
    return live_copy(graph, made_by="dce")
