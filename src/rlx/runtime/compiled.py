"""Compiled graphs: what `rlx.compile` gives. Set weights once, run many times, look at what happened.

`CompiledGraph` is the device-independent face: names, checks, weights. `CpuGraph` and `ReferenceGraph` do the work.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlx.backends.cpu.executable import Executable
from rlx.errors import BindError, nearest
from rlx.ir import evaluate
from rlx.ir.graph import Graph
from rlx.runtime.inputs import as_array, check_fixed, check_names, solve_symbols
from rlx.runtime.plan import CompiledPlan
from rlx.runtime.profiler import Report, profile, write_trace
from rlx.target import Target
from rlx.types import TensorType, concrete

Array = np.ndarray[Any, Any]


class CompiledGraph(ABC):
    """A graph ready to run. Safe to call from several threads."""

    def __init__(self, graph: Graph, device: str) -> None:
        self.graph = graph
        self.device = device
        self.input_types: dict[str, TensorType] = {n.attrs["name"]: n.types[0] for n in graph.inputs}
        self.param_types: dict[str, TensorType] = {n.attrs["name"]: n.types[0] for n in graph.params}
        self._params: dict[str, Array] = {}
        self._lock = threading.Lock()
        self._stale = True

    # -- weights --------------------------------------------------------------------------------------------------------
    def set_param(self, name: str, value: Any) -> None:
        """Set one weight. C-contiguous arrays are used in place: do not change them afterwards."""
        if name not in self.param_types:
            raise BindError(f"param: nothing is called {name!r}", hint=nearest(name, self.param_types))
        type_ = self.param_types[name]
        array = as_array("param", name, value, type_)
        check_fixed("param", name, array, type_)
        with self._lock:
            self._params[name] = array
            self._stale = True

    def set_params(self, values: Mapping[str, Any]) -> None:
        """Set several weights."""
        for name, value in values.items():
            self.set_param(name, value)

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

    @abstractmethod
    def _bind(self) -> None: ...

    # -- running --------------------------------------------------------------------------------------------------------
    @abstractmethod
    def run(self, inputs: Mapping[str, Any] | None = None, *, trace: str | Path | None = None) -> list[Array]:
        """The outputs for named inputs; they belong to the caller. `trace` writes a timeline for chrome://tracing."""

    def __call__(self, **inputs: Any) -> list[Array]:
        return self.run(inputs)

    def _check_inputs(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, int]]:
        check_names("input", inputs, list(self.input_types))
        arrays = {n: as_array("input", n, inputs[n], t) for n, t in self.input_types.items()}
        return arrays, solve_symbols("input", arrays, self.input_types, self.graph.limits)

    @abstractmethod
    def report(self, inputs: Mapping[str, Any] | None = None) -> Report:
        """What a run does: launches, bytes, flops; with inputs (or after a run) also times."""

    def __repr__(self) -> str:
        return f"<compiled {self.graph.name!r} on {self.device}>"


class ReferenceGraph(CompiledGraph):
    """Runs the graph as built, op by op, in NumPy."""

    def _bind(self) -> None:
        pass

    def run(self, inputs: Mapping[str, Any] | None = None, *, trace: str | Path | None = None) -> list[Array]:
        self._bound()
        arrays, sizes = self._check_inputs(inputs or {})
        return [np.array(r) for r in evaluate.run(self.graph, {**self._params, **arrays}, sizes)]

    def report(self, inputs: Mapping[str, Any] | None = None) -> Report:
        return Report(self.graph.name, self.device, threads=1)


class CpuGraph(CompiledGraph):
    """Runs machine code."""

    def __init__(self, graph: Graph, plan: CompiledPlan, target: Target, threads: int | None) -> None:
        super().__init__(graph, "cpu")
        self.plan = plan
        self.target = target
        self.executable = Executable(plan.main, target, threads)
        self._binder = Executable(plan.bind, target, threads) if plan.derived else None
        self._symbols = plan.main.symbols
        self._names = list(self.input_types)
        self._known: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}  # input shapes -> symbol sizes
        self._dtypes = [t.dtype.numpy for t in self.input_types.values()]
        self._last: tuple[int, ...] | None = None

    @property
    def threads(self) -> int:
        return self.executable.threads

    def _bind(self) -> None:
        weights: dict[str, Array] = dict(self._params)
        if self._binder is not None:
            self._binder.bind({n: self._params[n] for n in self.plan.bind.weights})
            weights |= zip(self.plan.derived, self._binder.run((), []), strict=True)
        self.executable.bind({n: weights[n] for n in self.plan.main.weights})

    def run(self, inputs: Mapping[str, Any] | None = None, *, trace: str | Path | None = None) -> list[Array]:
        if self._stale:
            self._bound()
        arrays, key = self._prepare(inputs or {})
        self._last = key
        if trace is None:
            return self.executable.run(key, arrays)
        outputs, stamps = self.executable.trace_run(key, arrays)
        write_trace(Path(trace), self.executable, stamps)
        return outputs

    def _prepare(self, inputs: Mapping[str, Any]) -> tuple[list[Array], tuple[int, ...]]:
        """Arrays in order and the sizes of the symbols: the quick way for shapes seen before, else all checks."""
        if len(inputs) == len(self._names):
            try:
                arrays = [inputs[n] for n in self._names]
                key = self._known[tuple([a.shape for a in arrays])]
                for array, wanted in zip(arrays, self._dtypes, strict=True):
                    if array.dtype is not wanted or not array.flags.c_contiguous:
                        break
                else:
                    return arrays, key
            except (KeyError, AttributeError):
                pass
        checked, sizes = self._check_inputs(inputs)
        found = tuple(sizes[s] for s in self._symbols)
        arrays = [checked[n] for n in self._names]
        if len(self._known) > 4096:
            self._known.clear()
        self._known[tuple([a.shape for a in arrays])] = found
        return arrays, found

    def report(self, inputs: Mapping[str, Any] | None = None) -> Report:
        if inputs is not None:
            self._bound()
            arrays, key = self._prepare(inputs)
            return profile(self, key, arrays)
        if self._last is not None and not self._stale:
            sizes = dict(zip(self._symbols, self._last, strict=True))
            arrays = [np.zeros(concrete(t.shape, sizes), t.dtype.numpy) for t in self.input_types.values()]
            return profile(self, self._last, arrays)
        return profile(self, None, [])

