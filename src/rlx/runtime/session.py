"""Sessions: a device and its settings, and the way from a graph to something that runs."""

from __future__ import annotations

import os
import threading

from rlx import target as targets
from rlx.backends.base import device as find_device
from rlx.errors import CapabilityError, GraphError
from rlx.hir.lower import lower
from rlx.ir.graph import Graph
from rlx.runtime.compiled import CompiledGraph, CpuGraph, ReferenceGraph
from rlx.runtime.plan import cached_plan
from rlx.runtime.weights import WeightStore
from rlx.target import Target

# One thread compiles at a time: Python and LLVM are serial, so more would only take turns. A fork waits for it, because
# a child could never release what another thread of its parent holds half-way (`cached_property` of Python 3.11 locks).
_guard = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_guard.release)


class Session:
    """A device, a number of threads (None: all cores) and a target (None: the best this machine runs)."""

    def __init__(self, device: str = "cpu", *, threads: int | None = None, target: str | Target | None = None) -> None:
        self.device = find_device(device)
        self.threads = _checked_threads(threads)
        self.target = _checked_target(target)
        self.weights = WeightStore()  # shared by all graphs that this session compiles

    def compile(self, graph: Graph) -> CompiledGraph:
        """A graph ready to run on this session's device."""
        if not isinstance(graph, Graph):
            raise GraphError(f"compile: takes a Graph, found {type(graph).__name__}")
        if not graph.outputs:
            raise GraphError(f"compile: graph {graph.name!r} has no outputs", hint="call g.set_outputs([...])")
        with _guard:
            graph.verify()
            if self.device.name == "reference":
                return ReferenceGraph(lower(graph), "reference")
            return CpuGraph(graph, cached_plan(graph, self.target), self.target, self.threads, self.weights)


def _checked_threads(threads: int | None) -> int | None:
    if threads is None or (isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1):
        return threads
    raise CapabilityError(f"threads: expected a number from 1, or None for all cores, found {threads!r}")


def _checked_target(target: str | Target | None) -> Target:
    if target is None:
        return targets.host()
    if isinstance(target, str):
        return targets.named(target)
    if isinstance(target, Target) and target.arch == targets.best().arch:
        return target
    raise CapabilityError(f"target: expected one for {targets.best().arch} or its name, found {target!r}")


def compile(
    graph: Graph, device: str = "cpu", *, threads: int | None = None, target: str | Target | None = None
) -> CompiledGraph:
    """A graph ready to run: the same as `Session(device, ...).compile(graph)`."""
    return Session(device, threads=threads, target=target).compile(graph)
