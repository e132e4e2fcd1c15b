"""Sessions: a device with its settings, and compiling graphs for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlx.backends.base import MAX_THREADS, Backend, available, check_tables
from rlx.backends.base import device as find_device
from rlx.errors import CapabilityError, GraphError, nearest
from rlx.fork_safe_locks import Lock, Waits
from rlx.garbage import paused
from rlx.profile import CompileProfile, Fusion, FusionPolicy
from rlx.runtime.weights import WeightStore
from rlx.target import Target

if TYPE_CHECKING:  # a session may never compile: model snapshots come with code
    from rlx.ir.graph import Graph
    from rlx.module import GraphModule, WithWeights
    from rlx.runtime.compiled import CompiledGraph, Parts
    from rlx.runtime.plan import CompiledPlan

# One thread compiles at a time: passes hold the GIL, so more threads would only take turns. Forks wait for it: a child
# could not finish the compilation.
_guard = Lock(reentrant=True, waits=Waits.COMPILE)

DEFAULT = CompileProfile(Fusion(policy=FusionPolicy.DIRECT))  # for graphs; modules may set their own policy


class Session:
    """A device, a number of threads (None: all cores) and a target (None: the best one this machine supports)."""

    def __init__(self, device: str = "cpu", *, threads: int | None = None, target: str | Target | None = None) -> None:
        self.device = find_device(device)
        self.threads = _checked_threads(threads)
        self.target = _checked_target(self.device.backend, target)
        self.weights = WeightStore(self.device.backend.allocator)  # shared by all graphs that this session compiles

    def compile(
        self, graph: Graph | GraphModule | WithWeights, *, profile: CompileProfile | None = None
    ) -> CompiledGraph:
        """Compile a graph, or a module at any level, for this session's device, as `profile` says.

        A built flow brings its profile along, and its weights, which are set.
        """
        from rlx.ir.graph import Graph

        if profile is not None and not isinstance(profile, CompileProfile):
            raise GraphError(f"compile: profile is a {type(profile).__name__}, expected a CompileProfile")
        if not isinstance(graph, Graph):
            return self._compile_module(graph, profile)
        chosen = (profile or DEFAULT).in_environment()
        with _guard, paused():
            return self._compile(_source(graph), chosen)

    def _compile_module(self, module: GraphModule | WithWeights, profile: CompileProfile | None) -> CompiledGraph:
        from rlx.module import GraphModule, WithWeights
        from rlx.runtime.plan import plan_from_lir

        if not isinstance(module, GraphModule):
            if isinstance(module, WithWeights):
                return with_weights(self.compile(module.module, profile=profile or module.profile), module)
            hint = "or a GraphModule, or a flow that is built with its weights: flow.build(params)"
            raise GraphError(f"compile: takes a Graph, found {type(module).__name__}", hint=hint)
        hir = module.as_hir()
        with _guard, paused():
            source = _source(module.into_mir() if hir is None else hir)
            lir, chosen = module.as_lir(), module.profile(profile)
            if lir is not None and profile is not None:
                raise GraphError(f"compile: module {module.name!r} is planned already, a profile comes too late")
            target = self._target(chosen.fusion.target)
            if lir is None or self.device.backend.interprets:
                return self._compile(source, chosen)
            if lir.target != target:
                mismatch = f"module {module.name!r} is planned for {lir.target.name}, this session is for {target.name}"
                raise CapabilityError(f"compile: {mismatch}", hint="plan it for this target")
            return self._compiled_graph(source, self.link(plan_from_lir(lir, source), source, target), chosen)

    def _compile(self, source: Graph, profile: CompileProfile) -> CompiledGraph:
        """Imports lazily: a cache hit loads almost none of the compiler."""
        check_tables(profile.backend.tables)
        self.device.backend.check_options(profile.backend.of(self.device.name))
        target = self._target(profile.fusion.target)
        parts = self._interpret(source, profile) or self._link_cached(source, target, profile)
        return self._compiled_graph(source, parts, profile)

    def _interpret(self, source: Graph, profile: CompileProfile) -> Parts | None:
        """The parts of a graph on a device that interprets MIR; None on other devices."""
        backend = self.device.backend
        if not backend.interprets:
            return None
        from rlx.hir.lower import lower
        from rlx.mir.pipeline import rounded
        from rlx.runtime.compiled import Parts

        graph = rounded(lower(source, profile.fusion.policy), profile)
        return Parts(backend.interpret(graph), lambda: graph, None)

    def _link_cached(self, source: Graph, target: Target, profile: CompileProfile) -> Parts:
        """The parts of a graph from the compile cache, or compiled now and stored there."""
        from rlx.runtime import compile_cache
        from rlx.runtime.program_cache import Keys

        keys = Keys.of(source, target, profile)
        parts = compile_cache.load(source, keys, self, target, profile)
        if parts is None:
            from rlx.runtime.plan import cached_plan

            plan = cached_plan(source, target, profile, run=True, keys=keys)
            parts = self.link(plan, source, target)
            compile_cache.store(parts, keys, self.device.backend)
        return parts

    def link(self, plan: CompiledPlan, source: Graph, target: Target) -> Parts:
        """Compile the programs of a plan."""
        from rlx.runtime.compiled import link
        from rlx.runtime.signature import Signature

        return link(plan, Signature.of(source), lambda: source, self.device.backend, target, self.threads)

    def _compiled_graph(
        self, source: Graph, parts: Parts | Callable[[], Parts], profile: CompileProfile
    ) -> CompiledGraph:
        """A compiled graph of this session."""
        from rlx.runtime.compiled import CompiledGraph
        from rlx.runtime.signature import Signature

        return CompiledGraph(Signature.of(source), parts, self.device, self.weights, profile)

    def compile_later(self, graph: Graph, profile: CompileProfile) -> CompiledGraph:
        """A graph that is compiled in its first run; weights can be set before."""
        source, chosen = _source(graph), profile.in_environment()

        def parts() -> Parts:
            with _guard, paused():
                return self._compile(source, chosen).parts

        return self._compiled_graph(source, parts, chosen)

    def _target(self, wanted: str) -> Target:
        """The target that a profile asks for, if this session's device has it."""
        backend = self.device.backend
        if wanted in ("auto", self.device.name) or backend.interprets:  # interpreters run graphs of any target
            return self.target
        if wanted in backend.known_targets():
            return backend.target(wanted)
        hint = nearest(wanted, ["auto", *available(), *backend.known_targets()])
        raise CapabilityError(
            f"compile: the profile is for {wanted}, the session's device is {self.device.name}", hint=hint
        )


def with_weights(compiled: CompiledGraph, built: WithWeights) -> CompiledGraph:
    """Set the weights of a graph that come with it; others stay to be set."""
    compiled.output_names = list(built.output_names)
    compiled.set_params({name: built.params[name] for name in compiled.param_types if name in built.params})
    return compiled


def _source(graph: Graph) -> Graph:
    """A verified copy, because the caller may keep building."""
    if not graph.outputs:
        raise GraphError(f"compile: graph {graph.name!r} has no outputs", hint="call g.set_outputs([...])")
    return graph.verify().copy()


def _checked_threads(threads: int | None) -> int | None:
    if threads is None or (isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= MAX_THREADS):
        return threads
    shown = repr(threads) if not isinstance(threads, int) or abs(threads) < 1 << 64 else "a huge number"
    raise CapabilityError(f"threads: expected a number from 1 to {MAX_THREADS}, or None for all cores, found {shown}")


def _checked_target(backend: Backend, target: str | Target | None) -> Target:
    if target is None or isinstance(target, str):
        return backend.target(target)
    if isinstance(target, Target) and backend.accepts(target):
        return target
    raise CapabilityError(f"target: expected one of {backend.name} or its name, found {target!r}")


def compile(
    graph: Graph | GraphModule | WithWeights,
    device: str = "cpu",
    *,
    threads: int | None = None,
    target: str | Target | None = None,
    profile: CompileProfile | None = None,
) -> CompiledGraph:
    """Compile a graph, a module or a built flow: `Session(device, ...).compile(graph, profile=profile)`."""
    return Session(device, threads=threads, target=target).compile(graph, profile=profile)
