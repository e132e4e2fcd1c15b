"""Sessions: a device and its settings, and the way from a graph to something that runs."""

from __future__ import annotations

from rlx import target as targets
from rlx.backends.base import device as find_device
from rlx.errors import GraphError
from rlx.hir.lower import lower
from rlx.ir.graph import Graph
from rlx.runtime.compiled import CompiledGraph, CpuGraph, ReferenceGraph
from rlx.runtime.plan import cached_plan
from rlx.target import Target


class Session:
    """A device, a number of threads (None: all cores) and a target (None: the best this machine runs)."""

    def __init__(self, device: str = "cpu", *, threads: int | None = None, target: str | Target | None = None) -> None:
        self.device = find_device(device)
        self.threads = threads
        self.target = targets.named(target) if isinstance(target, str) else target or targets.host()

    def compile(self, graph: Graph) -> CompiledGraph:
        """A graph ready to run on this session's device."""
        if not isinstance(graph, Graph):
            raise GraphError(f"compile: takes a Graph, found {type(graph).__name__}")
        if not graph.outputs:
            raise GraphError(f"compile: graph {graph.name!r} has no outputs", hint="call g.set_outputs([...])")
        graph.verify()
        if self.device.name == "reference":
            return ReferenceGraph(lower(graph), "reference")
        return CpuGraph(graph, cached_plan(graph, self.target), self.target, self.threads)


def compile(
    graph: Graph, device: str = "cpu", *, threads: int | None = None, target: str | Target | None = None
) -> CompiledGraph:
    """A graph ready to run: the same as `Session(device, ...).compile(graph)`."""
    return Session(device, threads=threads, target=target).compile(graph)
