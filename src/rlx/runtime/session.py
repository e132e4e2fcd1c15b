"""Sessions: a device and its settings, and the way from a graph to something that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx import target as targets
from rlx.backends.base import MAX_THREADS
from rlx.backends.base import device as find_device
from rlx.errors import CapabilityError, GraphError
from rlx.locks import Lock, Waits
from rlx.profile import PROCESSORS, CompileProfile, Fusion, FusionPolicy
from rlx.runtime.weights import WeightStore
from rlx.target import Target

if TYPE_CHECKING:  # a session may never compile: a model that was started before comes with its code
    from rlx.ir.graph import Graph
    from rlx.module import GraphModule
    from rlx.runtime.compiled import CompiledGraph

# One thread compiles at a time: Python and LLVM are serial, so more would only take turns. Fork waits for it: a child
# has no use for half of a compilation.
_guard = Lock(reentrant=True, waits=Waits.COMPILE)

DEFAULT = CompileProfile(Fusion(policy=FusionPolicy.DIRECT))  # for graphs; modules may have a policy of their own


class Session:
    """A device, a number of threads (None: all cores) and a target (None: the best this machine runs)."""

    def __init__(self, device: str = "cpu", *, threads: int | None = None, target: str | Target | None = None) -> None:
        self.device = find_device(device)
        self.threads = _checked_threads(threads)
        self.target = _checked_target(target)
        self.weights = WeightStore()  # shared by all graphs that this session compiles

    def compile(self, graph: Graph | GraphModule, *, profile: CompileProfile | None = None) -> CompiledGraph:
        """A graph, or a module at any level, ready to run on this session's device; `profile` says how to compile."""
        from rlx.ir.graph import Graph

        if profile is not None and not isinstance(profile, CompileProfile):
            raise GraphError(f"compile: profile is a {type(profile).__name__}, expected a CompileProfile")
        if not isinstance(graph, Graph):
            return self._compile_module(graph, profile)
        chosen = (profile or DEFAULT).in_environment()
        with _guard:
            return self._compile(_source(graph), chosen)

    def _compile_module(self, module: GraphModule, profile: CompileProfile | None) -> CompiledGraph:
        from rlx.module import GraphModule
        from rlx.runtime.compiled import CpuGraph
        from rlx.runtime.plan import planned

        if not isinstance(module, GraphModule):
            raise GraphError(f"compile: takes a Graph, found {type(module).__name__}", hint="or a GraphModule")
        hir = module.as_hir()
        with _guard:
            source = _source(module.into_mir() if hir is None else hir)
            lir, chosen = module.as_lir(), module.profile(profile)
            if lir is not None and profile is not None:
                raise GraphError(f"compile: module {module.name!r} is planned already, a profile comes too late")
            target = self._target(chosen.fusion.target)
            if lir is None or self.device.name == "reference":
                return self._compile(source, chosen)
            if lir.target != target:
                found = f"module {module.name!r} is planned for {lir.target.name}, this session is for {target.name}"
                raise CapabilityError(f"compile: {found}", hint="plan it for this target")
            return CpuGraph(source, planned(lir, source), target, self.threads, self.weights, chosen)

    def _compile(self, source: Graph, profile: CompileProfile) -> CompiledGraph:
        """What is imported grows with what is to do: for a graph that was compiled before, hardly anything is."""
        target = self._target(profile.fusion.target)
        if self.device.name == "reference":
            from rlx.hir.lower import lower
            from rlx.mir.pipeline import rounded
            from rlx.runtime.compiled import ReferenceGraph

            return ReferenceGraph(rounded(lower(source, profile.fusion.policy), profile), "reference")
        from rlx.runtime.linked import LinkedGraph, find_linked, keep_linked

        linked = find_linked(source, target, profile)
        if linked is not None:
            return LinkedGraph(source, linked, target, self.threads, self.weights, profile)
        from rlx.runtime.compiled import CpuGraph
        from rlx.runtime.plan import cached_plan

        plan = cached_plan(source, target, profile, run=True)
        compiled = CpuGraph(source, plan, target, self.threads, self.weights, profile)
        keep_linked(compiled, profile)
        return compiled

    def _target(self, wanted: str) -> Target:
        """The target that a profile is for, if this session's device has it."""
        if wanted in ("auto", self.device.name) or self.device.name == "reference":  # the oracle of every device
            return self.target
        if wanted in PROCESSORS:
            return targets.named(wanted)
        raise CapabilityError(f"compile: the profile is for {wanted}, the session's device is {self.device.name}")


def _source(graph: Graph) -> Graph:
    """A copy, because the caller may go on building."""
    if not graph.outputs:
        raise GraphError(f"compile: graph {graph.name!r} has no outputs", hint="call g.set_outputs([...])")
    return graph.verify().copy()


def _checked_threads(threads: int | None) -> int | None:
    if threads is None or (isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= MAX_THREADS):
        return threads
    given = repr(threads) if not isinstance(threads, int) or abs(threads) < 1 << 64 else "a huge number"
    raise CapabilityError(f"threads: expected a number from 1 to {MAX_THREADS}, or None for all cores, found {given}")


def _checked_target(target: str | Target | None) -> Target:
    if target is None:
        return targets.host()
    if isinstance(target, str):
        return targets.named(target)
    if isinstance(target, Target) and target.arch == targets.best().arch:
        return target
    raise CapabilityError(f"target: expected one for {targets.best().arch} or its name, found {target!r}")


def compile(
    graph: Graph | GraphModule,
    device: str = "cpu",
    *,
    threads: int | None = None,
    target: str | Target | None = None,
    profile: CompileProfile | None = None,
) -> CompiledGraph:
    """A graph or module ready to run: the same as `Session(device, ...).compile(graph, profile=profile)`."""
    return Session(device, threads=threads, target=target).compile(graph, profile=profile)
