"""Kept graphs: a compiled graph from disk with its weights bound, for which nothing is built, planned or packed.

What runs is its layout; the graph it came from, and the program, are made again when somebody asks for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx import types
from rlx.backends.cpu import layout, records
from rlx.backends.cpu.executable import Executable
from rlx.backends.cpu.layout import Layout
from rlx.lir import memory
from rlx.locks import cached_property
from rlx.profile import CompileProfile
from rlx.runtime import codec, kv_cache, signature
from rlx.runtime.compiled import CompiledGraph, CpuGraph, bind_executable, later_plan
from rlx.runtime.signature import Signature
from rlx.runtime.weights import Recipe, WeightStore
from rlx.target import Target

if TYPE_CHECKING:
    from rlx.ir.graph import Graph

Array = np.ndarray[Any, Any]


@functools.cache
def kept_records() -> Mapping[str, type]:
    """The records that a kept graph is made of, by name."""
    return codec.records_of(types, memory, records, layout, signature, kv_cache)


class KeptGraph(CpuGraph):
    """A graph that was compiled and bound before. Its machine code is loaded already."""

    def __init__(
        self, of: Signature, laid_out: Layout, derived: Mapping[str, Recipe], weights: Mapping[str, Array],
        target: Target, threads: int | None, store: WeightStore, profile: CompileProfile,
        source: Callable[[], tuple[Graph, Mapping[str, Array]]],
    ) -> None:  # fmt: skip
        CompiledGraph.__init__(self, of, "cpu")
        self._source = source  # builds the graph, and says where its params are
        # Not through `self`: without a cycle, memory goes as soon as the graph does.
        self._plan = plan = later_plan(lambda: source()[0], target, profile)
        self._set_up(Executable(laid_out, lambda: plan().main, target, threads), store, profile)
        self.executable.bind(weights)
        self._kept = derived  # which of them were made of others, and how
        self._stale = False

    def lend(self, params: Mapping[str, Array]) -> None:
        """Let other graphs of these params have what was made of them."""
        if not self._params:
            weights = self.executable._weights
            for name, recipe in self._kept.items():
                if name in weights and params.keys() >= set(recipe.params):
                    self._store.adopt(recipe, params, weights[name])

    @cached_property
    def graph(self) -> Graph:
        """The graph, built again."""
        return self._source()[0]

    def _sources(self) -> Mapping[str, Array]:
        return self._params or self._source()[1]

    def set_params(self, values: Mapping[str, Any]) -> None:
        """Set weights: what was packed before is packed again, with all others as the model has them."""
        if not self._params and isinstance(values, Mapping) and not values.keys().isdisjoint(self.param_types):
            _, params = self._source()
            self._binder = bind_executable(self.plan, self.target, self.threads)
            self._derived_by = dict(zip(self.plan.derived, self.plan.recipes, strict=True))
            values = {name: params[name] for name in self.param_types} | dict(values)
        super().set_params(values)
