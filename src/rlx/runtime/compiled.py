"""Compiled graphs: what `rlx.compile` gives. Set weights once, run many times, look at what happened.

`CompiledGraph` is the device-independent face: names, checks, weights. `CpuGraph` and `ReferenceGraph` do the work.
"""

from __future__ import annotations

import contextlib
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.cpu.executable import Executable
from rlx.backends.cpu.layout import WEIGHT
from rlx.backends.cpu.memory import release
from rlx.backends.cpu.repeat import Taken
from rlx.errors import BindError, CapabilityError, nearest
from rlx.locks import Lock
from rlx.profile import CompileProfile
from rlx.resources import require, writable
from rlx.runtime import finite
from rlx.runtime.inputs import Leaf, as_array, check_fixed, check_names, has_symbols, solve_symbols
from rlx.runtime.signature import Signature
from rlx.runtime.weights import WeightStore
from rlx.target import Target
from rlx.types import TensorType, concrete

if TYPE_CHECKING:  # reports and what they are made of are imported when one is asked for
    from rlx.ir.graph import Graph
    from rlx.runtime.dispatch import DispatchReport
    from rlx.runtime.memory_report import MemoryReport
    from rlx.runtime.plan import CompiledPlan
    from rlx.runtime.profiler import Report

Array = np.ndarray[Any, Any]
_NOTHING = contextlib.nullcontext()


class CompiledGraph(ABC):
    """A graph ready to run. Safe to call from several threads."""

    graph: Graph  # as it was built

    def __init__(self, signature: Signature, device: str) -> None:
        self.signature = signature
        self.name, self._limits = signature.name, signature.limits
        self.device = device
        self.input_types: dict[str, TensorType] = dict(signature.inputs)
        self._states = list(signature.states)
        self.param_types: dict[str, TensorType] = dict(signature.params)
        self._params: dict[str, Array] = {}
        self._lock = Lock(reentrant=True)
        self._stale = True
        self._sized = any(map(has_symbols, self.param_types.values()))  # whether sizes come from weights

    # -- weights -------------------------------------------------------------------------------------------------------
    def set_param(self, name: str, value: Any) -> None:
        """Set one weight. C-contiguous arrays are used in place: do not change them afterwards."""
        self.set_params({name: value})

    def set_params(self, values: Mapping[str, Any]) -> None:
        """Set several weights at once: a run in another thread has all of them or none. None is set if one is wrong."""
        if not isinstance(values, Mapping):
            raise BindError(f"params: expected a mapping from names to arrays, found {type(values).__name__}")
        checked = {name: self._checked_param(name, value) for name, value in values.items()}
        with self._lock:
            self._params.update(checked)
            self._stale = True

    def _checked_param(self, name: str, value: Any) -> Array:
        if name not in self.param_types:
            raise BindError(f"param: nothing is called {name!r}", hint=nearest(str(name), self.param_types))
        type_ = self.param_types[name]
        array = as_array("param", name, value, type_)
        check_fixed("param", name, array, type_)
        return array

    def prepare(self) -> None:
        """Make what is derived from the weights now; otherwise the first run does it."""
        self._bound()

    def _bound(self) -> None:
        """Bring derived weights up to date before a run."""
        if not self._stale:
            return
        with self._lock:
            if self._stale:
                missing = [n for n in self.param_types if n not in self._params]
                if missing:
                    shown = ", ".join(map(repr, missing[:5])) + (f" and {len(missing) - 5} more" if missing[5:] else "")
                    raise BindError(f"params: {shown} not set", hint="call set_param or set_params before run")
                self._bind()
                self._stale = False

    def _held(self) -> contextlib.AbstractContextManager[Any]:
        """What a run holds: weights that sizes come from must stay until it ends, for other sizes are other memory."""
        return self._lock if self._sized else _NOTHING

    @abstractmethod
    def _bind(self) -> None: ...

    def _sources(self) -> Mapping[str, Array]:
        """The weights as they were given, those that are still here."""
        return self._params

    # -- running -------------------------------------------------------------------------------------------------------
    @abstractmethod
    def run(self, inputs: Mapping[str, Any] | None = None, *, trace: str | Path | None = None) -> list[Array]:
        """The outputs for named inputs; they belong to the caller. `trace` writes a timeline for chrome://tracing."""

    def __call__(self, *args: Any, **inputs: Any) -> list[Array]:
        if args:
            shown = ", ".join(f"{n}=..." for n in list(self.input_types)[:5])
            hint = f"f({shown}), or f.run({{...}}) with a dict"
            raise BindError(f"inputs: {len(args)} given by position, they go by name", hint=hint)
        return self.run(inputs)

    def _check_inputs(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, int]]:
        check_names("input", inputs, list(self.input_types))
        arrays = {n: as_array("input", n, inputs[n], t) for n, t in self.input_types.items()}
        for name in self._states:
            if arrays[name] is not inputs[name] or not arrays[name].flags.writeable:
                raise BindError(f"state {name!r}: is changed in place, so it must be a contiguous, writable array")
        leaves = self._param_leaves(self.param_types)
        leaves += [Leaf(f"input {n!r}", arrays[n], t) for n, t in self.input_types.items()]
        return arrays, solve_symbols(leaves, self._limits)

    def _param_leaves(self, names: Iterable[str]) -> list[Leaf]:
        """The weights among `names` that have run-time sizes: these must agree with each other and with the inputs."""
        types = {n: self.param_types[n] for n in names}
        return [Leaf(f"param {n!r}", self._params[n], t) for n, t in types.items() if has_symbols(t)]

    def forget_rows(self) -> None:
        """Let go of what runs have read of packed tables in files.

        For each row the system maps 64 KB of a file, or a huge page: a long prompt would have all of a table in memory.
        """
        for array in self._tables():
            release(array)

    def _tables(self) -> Iterable[Array]:
        """Packed weights whose rows are looked up."""
        return ()

    @abstractmethod
    def report(self, inputs: Mapping[str, Any] | None = None) -> Report:
        """What a run does: launches, bytes, flops; with inputs (or after a run) also times."""

    def dispatch(self) -> DispatchReport:
        """What computes each node of the graph: machine code, the ops that it was decomposed into, or Python."""
        from rlx.runtime.dispatch import all_on_host

        return all_on_host(self.graph)

    def memory(self, sizes: Mapping[str, int] | None = None) -> MemoryReport:
        """Every buffer of a run with these sizes of the symbols (None: those of the last run), and when it lives."""
        raise CapabilityError(f"memory: device {self.device!r} plans none", hint="compile for device cpu")

    def page(self, path: str | Path, *, assembly: bool = False) -> Path:
        """Write a web page that shows the levels of the graph side by side; `assembly` adds the machine code."""
        raise CapabilityError(f"page: on device {self.device!r} there is only one level", hint="compile for device cpu")

    def export(self, path: str | Path, *, weights: bool = False) -> Path:
        """Write program and machine code to a file that `rlx.load_exported` runs; with `weights`, those too."""
        raise CapabilityError(f"export: device {self.device!r} has no machine code", hint="compile for device cpu")

    def __repr__(self) -> str:
        return f"<compiled {self.name!r} on {self.device}>"


class ReferenceGraph(CompiledGraph):
    """Runs the graph as built, op by op, in NumPy."""

    def __init__(self, graph: Graph, device: str) -> None:
        super().__init__(Signature.of(graph), device)
        self.graph = graph

    def _bind(self) -> None:
        pass

    def run(self, inputs: Mapping[str, Any] | None = None, *, trace: str | Path | None = None) -> list[Array]:
        if trace is not None:
            raise CapabilityError("trace: the reference device has no launches to show", hint="compile for device cpu")
        from rlx.ir import evaluate

        with self._held():
            self._bound()
            arrays, sizes = self._check_inputs({} if inputs is None else inputs)
            watched = finite.Watched(self, list(arrays.values())) if finite.watching else None
            found = evaluate.run(self.graph, {**self._params, **arrays}, sizes)
            require(f"graph {self.name!r}: its outputs", sum(a.nbytes for a in found), "smaller inputs")
            outputs = [np.array(a, order="C") for a in found]
        if watched is not None:
            watched.check(outputs)
        return outputs

    def report(self, inputs: Mapping[str, Any] | None = None) -> Report:
        from rlx.runtime.profiler import Report

        return Report(self.graph.name, self.device, threads=1)


class CpuGraph(CompiledGraph):
    """Runs machine code."""

    _binder: Executable | None
    _plan: Callable[[], CompiledPlan]

    def __init__(
        self,
        graph: Graph,
        plan: CompiledPlan,
        target: Target,
        threads: int | None,
        store: WeightStore,
        profile: CompileProfile | None = None,
    ) -> None:
        super().__init__(Signature.of(graph), "cpu")
        self.graph = graph
        self._plan = lambda: plan
        self._set_up(Executable.of(plan.main, target, threads), store, profile)
        self._binder = bind_executable(plan, target, threads)
        self._derived_by = dict(zip(plan.derived, plan.recipes, strict=True))

    @property
    def plan(self) -> CompiledPlan:
        """What it was laid out from."""
        return self._plan()

    def _set_up(self, executable: Executable, store: WeightStore, profile: CompileProfile | None) -> None:
        self.profile = profile
        self._store = store
        self.target = executable.target
        self.executable = executable
        self._symbols = executable.layout.symbols
        self._leaves = [Taken(n, t.dtype.numpy, n in self._states) for n, t in self.input_types.items()]
        executable.takes = self._leaves
        self._known: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}  # input shapes -> symbol sizes
        self._last: tuple[int, ...] | None = None

    @property
    def threads(self) -> int:
        return self.executable.threads

    def _bind(self) -> None:
        weights: dict[str, Array] = dict(self._params)
        if self._binder is not None:
            made_by = list(self._derived_by.values())
            found = self._store.find(made_by, self._params)
            if found is None:
                found = self._store.share(made_by, self._params, self._derived(self._binder))
            weights |= zip(self._derived_by, found, strict=True)
        if self._sized:  # what was said of the old ones
            self._known, self._last = {}, None
        self.executable.bind({n: weights[n] for n in self.executable.layout.names[WEIGHT]})

    def _derived(self, binder: Executable) -> list[Array]:
        """What the bind program makes of the weights."""
        names = binder.layout.names[WEIGHT]
        sizes = solve_symbols(self._param_leaves(names), self._limits)
        key = tuple(sizes[s] for s in binder.layout.symbols)
        wanted = (math.prod(shape) * dtype.itemsize for shape, dtype in binder.frame(key).outputs)
        require(f"weights of {self.name!r}", sum(wanted))
        binder.bind({n: self._params[n] for n in names})
        made = binder.run(key, [])
        binder.bind({})  # lets go of the sources and of its arena
        return made

    def run(self, inputs: Mapping[str, Any] | None = None, *, trace: str | Path | None = None) -> list[Array]:
        if inputs is None:
            inputs = {}
        if not self._stale and trace is None and not finite.watching:
            repeated = self.executable.again(inputs)
            if repeated is not None:
                return repeated
        with self._held():
            return self._run(inputs, trace)

    def _run(self, inputs: Mapping[str, Any], trace: str | Path | None) -> list[Array]:
        self._bound()
        arrays, key = self._prepare(inputs)
        watched = finite.Watched(self, arrays) if finite.watching else None
        if trace is None:
            outputs = self.executable.run(key, arrays)
        else:
            from rlx.runtime.profiler import write_trace

            outputs, stamps = self.executable.trace_run(key, arrays)
            write_trace(Path(trace), self.executable, stamps, key)
        self._last = key
        if watched is not None:
            watched.check(outputs)
        return outputs

    def _prepare(self, inputs: Mapping[str, Any]) -> tuple[list[Array], tuple[int, ...]]:
        """Arrays in order and the sizes of the symbols: the quick way for shapes seen before, else all checks."""
        try:
            if len(inputs) == len(self._leaves):
                arrays, shapes = [], []
                for name, wanted, written in self._leaves:
                    array = inputs[name]
                    # NumPy's scalars look like arrays, but have no memory of their own.
                    if array.__class__ is not np.ndarray or array.dtype is not wanted:
                        raise LookupError
                    flags = array.flags
                    if not flags.c_contiguous or (written and not flags.writeable):
                        raise LookupError
                    arrays.append(array)
                    shapes.append(array.shape)
                return arrays, self._known[tuple(shapes)]
        except (LookupError, AttributeError, TypeError):
            pass
        checked, sizes = self._check_inputs(inputs)
        found = tuple(sizes[s] for s in self._symbols)
        arrays = [checked[n] for n in self.input_types]
        if len(self._known) > 4096:
            self._known.clear()
        self._known[tuple([a.shape for a in arrays])] = found
        return arrays, found

    def _tables(self) -> Iterable[Array]:
        weights = self.executable._weights  # products have theirs rearranged: what else is packed are tables
        return (weights[n] for n, t in self.param_types.items() if t.dtype.is_packed and n in weights)

    def report(self, inputs: Mapping[str, Any] | None = None) -> Report:
        from rlx.runtime.profiler import profile

        last = None if self._stale else self._last
        if inputs is None and last is not None:
            sizes = dict(zip(self._symbols, last, strict=True))
            inputs = {n: _stand_in(t, sizes) for n, t in self.input_types.items()}
        if inputs is None:
            return profile(self, None, [])
        with self._held():
            self._bound()
            arrays, key = self._prepare(inputs)
            return profile(self, key, arrays)

    def dispatch(self) -> DispatchReport:
        from rlx.runtime.dispatch import dispatch_report
        from rlx.runtime.lineage import lineage

        return dispatch_report(lineage(self.graph, self.target, self.profile))

    def memory(self, sizes: Mapping[str, int] | None = None) -> MemoryReport:
        from rlx.runtime.profiler import memory_of

        if sizes is None and self._last is None and self._symbols:
            raise BindError(f"memory: {', '.join(self._symbols)} not known yet", hint="give sizes, or run it once")
        if sizes is None:
            return memory_of(self.executable, self._last or ())
        check_names("size", sizes, list(self._symbols))
        return memory_of(self.executable, tuple(sizes[s] for s in self._symbols))

    def page(self, path: str | Path, *, assembly: bool = False) -> Path:
        from rlx.runtime.page import graph_page

        written = writable(path)
        written.write_text(graph_page(self.graph, self.target, profile=self.profile, assembly=assembly), "utf-8")
        return written

    def export(self, path: str | Path, *, weights: bool = False) -> Path:
        from rlx.runtime.export import export_graph

        return export_graph(self, path, embed=weights)


def bind_executable(plan: CompiledPlan, target: Target, threads: int | None) -> Executable | None:
    """What makes the derived weights, if there are any."""
    return Executable.of(plan.bind, target, threads, aligned_outputs=True) if plan.derived else None


def later_plan(
    graph: Callable[[], Graph], target: Target, profile: CompileProfile | None
) -> Callable[[], CompiledPlan]:
    """The plan of a graph that comes from a cache: looked for, or made again, when somebody asks for it."""

    @functools.cache
    def plan() -> CompiledPlan:
        from rlx.runtime.plan import cached_plan  # and all that programs are made of

        return cached_plan(graph(), target, profile)

    return plan


def _stand_in(type_: TensorType, sizes: Mapping[str, int]) -> Array:
    """An input to time a run with: masks of ones keep every key, indices of zero lie inside every table."""
    shape = concrete(type_.shape, sizes)
    return np.zeros(shape, type_.dtype.numpy) if type_.dtype.is_integer else np.ones(shape, type_.dtype.numpy)
