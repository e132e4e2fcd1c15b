"""Compiled graphs, returned by `rlx.compile`: set weights once, run many times, inspect the results.

There is one class. `Session.compile`, the compile cache, model snapshots and exports all build it from the same parts:
a signature, an executable, and the recipes of its derived weights.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import Backend, Buffer, Device, Enqueued, Executable, InputSpec, bytes_of, host_view
from rlx.errors import BindError, CapabilityError, nearest
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import Lock, cached_property
from rlx.free_memory import require, writable
from rlx.host_memory import release
from rlx.profile import CompileProfile
from rlx.runtime import nan_switch
from rlx.runtime.inputs import Leaf, as_buffer, check_fixed, check_names, has_symbols, not_set, solve_symbols
from rlx.runtime.signature import Signature
from rlx.runtime.weights import Recipe, WeightStore
from rlx.target import Target
from rlx.types import TensorType, concrete

if TYPE_CHECKING:  # reports are imported on demand
    from rlx.backends.reports import Trace
    from rlx.inspect.dispatch import DispatchReport
    from rlx.inspect.memory import MemoryReport
    from rlx.inspect.profiler import Report
    from rlx.ir.graph import Graph
    from rlx.runtime.nan_check import WatchedRun
    from rlx.runtime.plan import CompiledPlan

_NOTHING = contextlib.nullcontext()
KNOWN_SHAPES = 256  # cached combinations of input shapes: a decoder has 2 KB of each, and checks it in under 1 ms


@dataclass(frozen=True)
class Parts:
    """The executables and metadata of a compiled graph. Callables are evaluated on first use."""

    executable: Executable
    graph: Callable[[], Graph]  # as it was built
    plan: Callable[[], CompiledPlan] | None  # None on devices that interpret graphs, without LIR
    derived: Mapping[str, Recipe] = field(default_factory=dict)  # weights computed by the bind program
    binder: Callable[[], Executable] | None = None  # executable of the bind program; None if nothing is derived


class CallingConvention(Protocol):
    """How an exported function takes its arguments and returns its result."""

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]: ...

    def result(self, outputs: Sequence[Any]) -> Any: ...


@final
class CompiledGraph:
    """A graph ready to run. Safe to call from several threads."""

    def __init__(
        self, signature: Signature, parts: Parts | Callable[[], Parts], device: Device, store: WeightStore,
        profile: CompileProfile | None, *, bound: bool = False, params: Mapping[str, Any] | None = None,
        sources: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        """With `bound`, the executable already has its weights; `params` are the params among them.

        `sources` loads all params from the model's files, for graphs created without them.
        """
        self.signature = signature
        self.name, self._limits = signature.name, signature.limits
        self.device = str(device)
        self.profile = profile
        self.input_types: dict[str, TensorType] = dict(signature.inputs)
        self.param_types: dict[str, TensorType] = dict(signature.params)
        self.output_names = output_names(len(signature.outputs))  # those of a built flow are its own
        self.convention: CallingConvention | None = None  # of an exported function
        self._states = list(signature.states)
        self._load = parts if callable(parts) else (lambda: parts)
        self.allocator = device.backend.allocator  # for the memory that runs read and write
        self._store = store
        self._lock = Lock(reentrant=True)
        self._params: dict[str, Any] = dict(params or {})
        self._sources_of = sources
        self._uploaded: Callable[[str, int], None] | None = None
        self._stale = not bound
        self._sized = any(map(has_symbols, self.param_types.values()))  # whether weights determine symbol sizes
        self._inputs = input_specs(signature)
        self._known: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}  # input shapes -> symbol sizes
        self._last: tuple[int, ...] | None = None

    # -- parts ---------------------------------------------------------------------------------------------------------
    @cached_property
    def parts(self) -> Parts:
        """The executables and metadata. Compiles a lazy graph."""
        return self._load()

    @property
    def is_compiled(self) -> bool:
        """False for a lazily compiled graph until its first run."""
        return "parts" in self.__dict__

    @cached_property
    def executable(self) -> Executable:
        """The program on its device."""
        return self.parts.executable

    @cached_property
    def graph(self) -> Graph:
        """The graph, as it was built."""
        return self.parts.graph()

    @property
    def plan(self) -> CompiledPlan:
        """The programs and the fusion report."""
        if self.parts.plan is None:
            raise self._no_programs("plan")
        return self.parts.plan()

    @property
    def target(self) -> Target:
        """The target that the code was generated for."""
        return self.executable.target

    @property
    def threads(self) -> int:
        return self.executable.threads

    def _no_programs(self, feature: str) -> CapabilityError:
        return CapabilityError(f"{feature}: device {self.device!r} runs graphs op by op", hint="compile for device cpu")

    # -- weights -------------------------------------------------------------------------------------------------------
    def set_param(self, name: str, value: Any) -> None:
        """Set one weight. C-contiguous arrays are used in place: do not change them afterwards."""
        self.set_params({name: value})

    def set_params(self, values: Mapping[str, Any]) -> None:
        """Set several weights atomically: concurrent runs see all of them or none. If one is invalid, none is set."""
        if not isinstance(values, Mapping):
            raise BindError(f"params: expected a mapping from names to arrays, found {type(values).__name__}")
        if self._sources_of is not None and not self._params and not values.keys().isdisjoint(self.param_types):
            sources = self._sources_of()  # derived weights are rebuilt, so every param is needed
            values = {name: sources[name] for name in self.param_types} | dict(values)
        checked = {name: self._checked_param(name, value) for name, value in values.items()}
        with self._lock:
            self._params.update(checked)
            self._stale = True

    def _checked_param(self, name: str, value: Any) -> Any:
        if name not in self.param_types:
            raise BindError(f"param: nothing is called {name!r}", hint=nearest(str(name), self.param_types))
        type_ = self.param_types[name]
        buffer = as_buffer("param", name, value, type_, self.allocator)
        check_fixed("param", name, buffer, type_)
        return buffer

    def prepare(self, uploaded: Callable[[str, int], None] | None = None) -> None:
        """Bind weights now rather than in the first run.

        `uploaded` is called with the name and the bytes of each weight that was copied to the device.
        """
        with self._lock:
            self._uploaded = uploaded
            try:
                self._ensure_bound()
            finally:
                self._uploaded = None

    def known_params(self) -> Mapping[str, Any]:
        """The weights as they were set, or as the model's files have them; empty if neither is available."""
        return self._params or (self._sources_of() if self._sources_of is not None else {})

    def fixed_params(self) -> dict[str, Array]:
        """The params that a flow computed itself, such as RoPE tables, as far as they are set, in host memory."""
        known = self.known_params()
        return {
            name: np.asarray(self.allocator.download(known[name])) for name in sorted(self.graph.fixed & set(known))
        }

    def host_weights(self) -> dict[str, Array]:
        """All weights that the program reads, in host memory. Weights set as NumPy arrays are not copied."""
        bound = self.executable.weights
        host = {n: self._params[n] for n in bound if isinstance(self._params.get(n), np.ndarray)}
        return {n: host[n] if n in host else self.allocator.download(b) for n, b in bound.items()}

    def share_derived(self, params: Mapping[str, Any]) -> None:
        """Register the derived weights of this snapshot for other graphs with these params."""
        if not self._params:
            weights = self.executable.weights
            for name, recipe in self.parts.derived.items():
                if name in weights and params.keys() >= set(recipe.params):
                    self._store.adopt(recipe, params, weights[name])

    def _watch(self, buffers: Sequence[Any]) -> WatchedRun:
        from rlx.runtime.nan_check import WatchedRun

        return WatchedRun(self, buffers)

    def _ensure_bound(self) -> None:
        """Bring derived weights up to date before a run."""
        if not self._stale:
            return
        with self._lock:
            if self._stale:
                missing = [n for n in self.param_types if n not in self._params]
                if missing:
                    raise not_set(missing, "call set_param or set_params before run")
                self._bind()
                self._stale = False

    def _bind(self) -> None:
        weights: dict[str, Any] = dict(self._params)
        recipes = self.parts.derived
        if recipes:
            derived = self._store.find(list(recipes.values()), self._params)
            if derived is None:
                derived = self._store.share(list(recipes.values()), self._params, self._derive())
            weights |= zip(recipes, derived, strict=True)
        if self._sized:  # cached sizes belong to the old weights
            self._known, self._last = {}, None
        self.executable.bind(self._on_device(self.executable.reads, weights))

    def _on_device(self, names: Iterable[str], weights: Mapping[str, Any]) -> dict[str, Any]:
        """Weights in device memory; those of the host are uploaded, which `prepare` may report."""
        buffers: dict[str, Any] = {}
        for name in names:
            buffers[name] = self._store.on_device(weights[name], name)
            if buffers[name] is not weights[name] and self._uploaded is not None:
                self._uploaded(name, buffers[name].nbytes)
        return buffers

    def _derive(self) -> list[Any]:
        """Run the bind program."""
        assert self.parts.binder is not None
        binder = self.parts.binder()
        sizes = solve_symbols(self._param_leaves(binder.reads), self._limits)
        key = tuple(sizes[s] for s in binder.symbols)
        if self.allocator.is_host:  # other devices say what they lack
            require(f"weights of {self.name!r}", bytes_of(binder.outputs(key)))
        binder.bind(self._on_device(binder.reads, self._params))
        derived = binder.run(key, [])
        binder.bind({})  # releases the sources and its arena
        return derived

    def _run_lock(self) -> contextlib.AbstractContextManager[Any]:
        """The lock, if weights determine symbol sizes: rebinding would move the memory that a run reads."""
        return self._lock if self._sized else _NOTHING

    # -- running -------------------------------------------------------------------------------------------------------
    def run(self, inputs: Mapping[str, Any] | None = None, *, trace: str | Path | None = None) -> list[Any]:
        """Run on named inputs and return the outputs, which the caller owns. `trace` writes a timeline for chrome://tracing."""
        if inputs is None:
            inputs = {}
        if not self._stale and trace is None and not nan_switch.watching:
            repeated = self.executable.run_again(inputs)
            if repeated is not None:
                return repeated
        with self._run_lock():
            return self._run(inputs, trace)

    def enqueue(self, inputs: Mapping[str, Any], read: Sequence[int]) -> Enqueued:
        """Start a run, which may still be under way when this returns; `read()` of the result waits for it.

        `read` has the indices of the outputs that the host will ask for. All outputs can be inputs of later runs.
        """
        if not self.target.runs_behind or nan_switch.watching:
            return Enqueued(self.run(inputs), read)
        with self._run_lock():
            self._ensure_bound()
            buffers, key = self._prepare(inputs)
            self._last = key
            return self.executable.enqueue(key, buffers, read)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Run on inputs by name and return the list of outputs; an exported function is called as it was written."""
        if self.convention is not None:
            return self.convention.result(self.run(self.convention.inputs(args, inputs)))
        if args:
            shown = ", ".join(f"{n}=..." for n in list(self.input_types)[:5])
            hint = f"f({shown}), or f.run({{...}}) with a dict"
            raise BindError(f"inputs: {len(args)} given by position, they go by name", hint=hint)
        return self.run(inputs)

    def _run(self, inputs: Mapping[str, Any], trace: str | Path | None) -> list[Any]:
        if trace is not None:
            from rlx.inspect.profiler import write_trace

            outputs, times, key = self.run_timed(inputs)
            write_trace(Path(trace), self.executable, times, key)
            return outputs
        self._ensure_bound()
        buffers, key = self._prepare(inputs)
        watched = self._watch(buffers) if nan_switch.watching else None
        outputs = self.executable.run(key, buffers)
        self._last = key
        if watched is not None:
            watched.check(outputs)
        return outputs

    def run_timed(self, inputs: Mapping[str, Any]) -> tuple[list[Any], Trace, tuple[int, ...]]:
        """Run with a time stamp at each launch: returns the outputs, the times and the symbol sizes."""
        with self._run_lock():
            self._ensure_bound()
            buffers, key = self._prepare(inputs)
            watched = self._watch(buffers) if nan_switch.watching else None
            outputs, times = self.executable.trace(key, buffers)
            self._last = key
            if watched is not None:
                watched.check(outputs)
            return outputs, times, key

    def _prepare(self, inputs: Mapping[str, Any]) -> tuple[list[Any], tuple[int, ...]]:
        """Inputs in order and the symbol sizes: the fast path for known shapes, otherwise all checks."""
        prepared = self._fast_prepare(inputs)
        if prepared is not None:
            return prepared
        checked, sizes = self._check_inputs(inputs)
        key = tuple(sizes[s] for s in self.executable.symbols)
        buffers = [checked[n] for n in self.input_types]
        if len(self._known) >= KNOWN_SHAPES:
            self._known.clear()
        same: dict[tuple[int, ...], tuple[int, ...]] = {}  # most inputs of a decoder are pools of one shape
        self._known[tuple([same.setdefault(b.shape, b.shape) for b in buffers])] = key
        return buffers, key

    def _fast_prepare(self, inputs: Mapping[str, Any]) -> tuple[list[Any], tuple[int, ...]] | None:
        arrays, shapes, host, owns = [], [], self.allocator.is_host, self.allocator.owns
        try:
            if len(inputs) != len(self._inputs):
                return None
            for name, wanted, written in self._inputs:
                array = inputs[name]
                if array.dtype is not wanted and array.dtype != wanted:
                    return None
                # NumPy scalars look like arrays but own no memory.
                if array.__class__ is np.ndarray and (host or not written):
                    flags = array.flags
                    if not flags.c_contiguous or (written and not flags.writeable):
                        return None
                elif host or not owns(array):
                    return None
                arrays.append(array)
                shapes.append(array.shape)
        except (LookupError, AttributeError, TypeError):
            return None
        key = self._known.get(tuple(shapes))
        if key is None or host:
            return None if key is None else (arrays, key)
        return [array if owns(array) else self.allocator.upload(array) for array in arrays], key

    def _check_inputs(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
        check_names("input", inputs, list(self.input_types))
        buffers = {n: as_buffer("input", n, inputs[n], t, self.allocator) for n, t in self.input_types.items()}
        for name in self._states:
            buffer = buffers[name]
            if buffer is not inputs[name] or not self.allocator.owns(buffer) or not _writable(buffer):
                kind = "a contiguous, writable array" if self.allocator.is_host else f"a buffer of {self.device}"
                raise BindError(f"state {name!r}: is changed in place, so it must be {kind}")
        leaves = self._param_leaves(self.param_types)
        leaves += [Leaf(f"input {n!r}", buffers[n], t) for n, t in self.input_types.items()]
        sizes = solve_symbols(leaves, self._limits)
        owns, upload = self.allocator.owns, self.allocator.upload
        return {n: b if owns(b) else upload(b) for n, b in buffers.items()}, sizes

    def _param_leaves(self, names: Iterable[str]) -> list[Leaf]:
        """The weights among `names` with run-time sizes, which must agree with each other and with the inputs."""
        types = {n: self.param_types[n] for n in names}
        return [Leaf(f"param {n!r}", self._params[n], t) for n, t in types.items() if has_symbols(t)]

    def drop_table_pages(self) -> None:
        """Release the pages of mapped tables that runs have read rows of.

        The system maps 64 KB of a file, or a huge page, per row: a long prompt would bring a whole table into memory.
        """
        if not self.allocator.is_host:  # weights are copies in memory of the device
            return
        weights = self.executable.weights  # matmuls read derived copies, so small types left here are tables
        for name, type_ in self.param_types.items():
            stored_small = type_.dtype.is_packed or type_.dtype is not type_.dtype.wide
            if stored_small and name in weights and (table := host_view(weights[name])) is not None:
                release(table)

    def forget_rows(self) -> None:
        """Deprecated: the old name of `drop_table_pages`."""
        warnings.warn("CompiledGraph.forget_rows is now called drop_table_pages", DeprecationWarning, stacklevel=2)
        self.drop_table_pages()

    # -- looking -------------------------------------------------------------------------------------------------------
    def report(self, inputs: Mapping[str, Any] | None = None) -> Report:
        """Launches, bytes and flops of a run; with inputs, or after a run, also times."""
        from rlx.inspect.profiler import Report, profile

        if self.parts.plan is None:
            return Report(self.name, self.device, threads=1)
        last = None if self._stale else self._last
        if inputs is None and last is not None:
            sizes = dict(zip(self.executable.symbols, last, strict=True))
            inputs = self.stand_ins(sizes)
        fusion = str(self.plan.fusion)
        if inputs is None:
            return profile(self.executable, fusion, None, [])
        with self._run_lock():
            self._ensure_bound()
            arrays, key = self._prepare(inputs)
            self._last = key  # the fast path of `run` does not record it
            return profile(self.executable, fusion, key, arrays)

    def stand_ins(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Synthetic inputs of these sizes, for timing; states are in device memory."""
        inputs: dict[str, Any] = {n: stand_in(t, sizes) for n, t in self.input_types.items()}
        return inputs | {n: self.allocator.upload(inputs[n]) for n in self._states}

    def dispatch(self) -> DispatchReport:
        """Report what computes each node: machine code, the ops it was decomposed into, or Python."""
        from rlx.inspect.dispatch import all_on_host, dispatch_report
        from rlx.inspect.lineage import lineage

        if self.parts.plan is None:
            return all_on_host(self.graph)
        return dispatch_report(lineage(self.graph, self.target, self.profile))

    def memory(self, sizes: Mapping[str, int] | None = None) -> MemoryReport:
        """Every buffer of a run and its lifetime, for these symbol sizes (None: those of the last run)."""
        from rlx.inspect.profiler import memory_of

        if self.parts.plan is None:
            raise self._no_programs("memory")
        symbols = self.executable.symbols
        if sizes is None and self._last is None and symbols:
            raise BindError(f"memory: {', '.join(symbols)} not known yet", hint="give sizes, or run it once")
        if sizes is None:
            return memory_of(self.executable, self._last or ())
        check_names("size", sizes, list(symbols))
        return memory_of(self.executable, tuple(sizes[s] for s in symbols))

    def page(self, path: str | Path, *, assembly: bool = False, report: Report | None = None) -> Path:
        """Write a web page that shows the graph at HIR, MIR, LIR and machine code next to each other.

        `assembly` adds the machine code; a `report` with times colours launches by their share of the run time.
        """
        from rlx.inspect.page import graph_page

        if self.parts.plan is None:
            raise self._no_programs("page")
        written = writable(path)
        page = graph_page(self.graph, self.target, profile=self.profile, assembly=assembly, report=report)
        written.write_text(page, "utf-8")
        return written

    def export(self, path: str | Path, *, weights: bool = False) -> Path:
        """Write program, machine code and, with `weights`, the weights to a file for `rlx.load_exported`."""
        from rlx.runtime.export import export_graph

        if self.parts.plan is None:
            raise self._no_programs("export")
        return export_graph(self, path, embed=weights)

    def __repr__(self) -> str:
        return f"<compiled {self.name!r} on {self.device}>"

    def _repr_html_(self) -> str:
        from rlx.notebook import box, table  # few programs need it

        kinds = {"input": self.input_types, "param": self.param_types}
        rows = [(kind, name, str(type_)) for kind, types in kinds.items() for name, type_ in types.items()]
        named = zip(self.output_names, self.signature.outputs, strict=True)
        rows += [("output", name, str(type_)) for name, type_ in named]
        return box(repr(self)[1:-1], table(("kind", "name", "type"), rows))


def output_names(count: int) -> list[str]:
    """The names of outputs that nobody has named."""
    return ["output", *(f"output.{i}" for i in range(1, count))][:count]


def input_specs(signature: Signature) -> list[InputSpec]:
    """Name, dtype and mutability of each input."""
    return [InputSpec(n, t.dtype.numpy, n in signature.states) for n, t in signature.inputs.items()]


def link(
    plan: CompiledPlan, signature: Signature, graph: Callable[[], Graph], backend: Backend, target: Target,
    threads: int | None,
) -> Parts:  # fmt: skip
    """Compile the programs of a plan."""
    main = backend.compile(plan.main, target, threads=threads, inputs=input_specs(signature))
    derived = dict(zip(plan.derived, plan.recipes, strict=True))
    binder = backend.compile(plan.bind, target, threads=threads, long_lived=True) if derived else None
    return Parts(main, graph, lambda: plan, derived, None if binder is None else lambda: binder)


def lazy_plan(graph: Callable[[], Graph], target: Target, profile: CompileProfile | None) -> Callable[[], CompiledPlan]:
    """The plan of a graph that came from a cache: loaded or rebuilt on demand."""

    @functools.cache
    def plan() -> CompiledPlan:
        from rlx.runtime.plan import cached_plan  # imports all of LIR

        return cached_plan(graph(), target, profile)

    return plan


def _writable(buffer: Buffer) -> bool:
    return not isinstance(buffer, np.ndarray) or buffer.flags.writeable


def stand_in(type_: TensorType, sizes: Mapping[str, int]) -> Array:
    """A synthetic input for timing: ones for floats, zeros for integers, which are valid indices of every table."""
    shape = concrete(type_.shape, sizes)
    return np.zeros(shape, type_.dtype.numpy) if type_.dtype.is_integer else np.ones(shape, type_.dtype.numpy)
