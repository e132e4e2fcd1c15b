"""Runs graphs on the toy device: plans, compiles, binds weights and runs, without the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import rlx
from rlx.backends.toy import TOY, ToyBackend, ToyBuffer
from rlx.module import LirModule, plan_lir
from rlx.profile import CompileProfile
from rlx.runtime.inputs import Leaf, as_array, solve_symbols

Array = np.ndarray[Any, Any]


class OnToy:
    """A graph on the toy device."""

    def __init__(self, graph: rlx.Graph, profile: CompileProfile | None = None) -> None:
        self.backend, self.graph = ToyBackend(), graph
        self.lir: LirModule = plan_lir(graph, TOY, profile or CompileProfile())
        self.main = self.backend.compile(self.lir.main, TOY)
        self.binder = self.backend.compile(self.lir.bind, TOY, long_lived=True)
        self.leaves: list[Leaf] = []

    def set_params(self, values: Mapping[str, Any]) -> None:
        types = {n.attrs["name"]: n.types[0] for n in self.graph.params}
        arrays = {name: as_array("param", name, value, types[name]) for name, value in values.items()}
        self.leaves = [Leaf(name, arrays[name], types[name]) for name in types]
        weights: dict[str, Any] = {name: self.backend.allocator.upload(array) for name, array in arrays.items()}
        self.binder.bind({name: weights[name] for name in self.binder.reads})
        sizes = solve_symbols(self.leaves, self.graph.limits)
        derived = self.binder.run(tuple(sizes[s] for s in self.binder.symbols), [])
        weights |= zip(self.lir.optimised.derived, derived, strict=True)
        self.main.bind({name: weights[name] for name in self.main.reads})

    def prepared(self, inputs: Mapping[str, Any]) -> tuple[tuple[int, ...], list[Any]]:
        """The sizes of a run, and its inputs on the device: toy buffers as they are, arrays uploaded."""
        types = {n.attrs["name"]: n.types[0] for n in self.graph.inputs}
        buffers = {
            name: value
            if isinstance(value, ToyBuffer)
            else self.backend.allocator.upload(as_array("input", name, value, types[name]))
            for name, value in inputs.items()
        }
        leaves = [*self.leaves, *(Leaf(name, np.asarray(buffers[name]), types[name]) for name in types)]
        sizes = solve_symbols(leaves, self.graph.limits)
        return tuple(sizes[s] for s in self.main.symbols), [buffers[name] for name in self.main.program.inputs]

    def run(self, inputs: Mapping[str, Any] | None = None) -> list[Array]:
        return [np.asarray(output) for output in self.run_there(inputs or {})]

    def run_there(self, inputs: Mapping[str, Any]) -> list[ToyBuffer]:
        """The outputs where they are."""
        if self.graph.params and not self.leaves:
            self.set_params({})
        return self.main.run(*self.prepared(inputs))
