"""Linked graphs: a graph that was compiled before, from the cache: no pass runs, and no generator is imported.

What is kept is the layout of its programs and where their machine code lies. The programs themselves are read, or made
again, when somebody asks for them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from rlx.backends import cache
from rlx.backends.cpu.executable import Executable
from rlx.backends.cpu.layout import Layout
from rlx.backends.cpu.library import Homes, library
from rlx.backends.cpu.toolchain import cpu_identity
from rlx.ir.graph import Graph
from rlx.profile import CompileProfile
from rlx.runtime import program_cache
from rlx.runtime.compiled import CompiledGraph, CpuGraph, later_plan
from rlx.runtime.kept import kept_records
from rlx.runtime.signature import Signature
from rlx.runtime.weights import Recipe, WeightStore
from rlx.target import Target

KIND = "linked"  # of entries in the cache


@dataclass(frozen=True)
class Linked:
    """What a graph runs with: layouts, where their machine code lies, and how derived weights come about."""

    main: Layout
    bind: Layout | None
    derived: Mapping[str, Recipe]
    homes: Homes


@functools.cache
def _classes() -> Mapping[str, type]:
    return {**kept_records(), "Linked": Linked, "Recipe": Recipe, "Homes": Homes}


def _key(graph: Graph, target: Target, profile: CompileProfile) -> str | None:
    return program_cache.key(graph, target, profile, cpu_identity(target))  # the code depends on LLVM too


def find_linked(graph: Graph, target: Target, profile: CompileProfile) -> Linked | None:
    """What was kept of an equal graph, its machine code loaded; None where there is nothing, or some of it is lost."""
    key = None if profile.shows_passes else _key(graph, target, profile)  # what is read has no passes to tell of
    data = None if key is None else cache.current().read(KIND, key)
    if data is not None:
        with contextlib.suppress(*program_cache.DAMAGED):  # written by something else
            found = program_cache.unpacked(data, _classes(), Linked)
            return found if library(target).load(found.homes) else None
    return None


def keep_linked(compiled: CpuGraph, profile: CompileProfile) -> None:
    """Keep what `find_linked` gives."""
    main, binder = compiled.executable.layout, compiled._binder
    bind = None if binder is None else binder.layout
    key = _key(compiled.graph, compiled.target, profile)
    homes = library(compiled.target).homes(main.routines() | (set() if bind is None else bind.routines()))
    if key is None or homes is None:
        return
    linked = Linked(main, bind, compiled._derived_by, homes)
    cache.current().write(KIND, key, program_cache.packed(linked, _classes()))
    if main.scratch_of or (bind is not None and bind.scratch_of):  # a run asks its kernels how much they need
        from rlx.runtime.plan import keep_plan

        plain = program_cache.key(compiled.graph, compiled.target, profile)
        assert plain is not None
        keep_plan(compiled.plan, plain)


class LinkedGraph(CpuGraph):
    """A graph that was compiled before. Its machine code is loaded already."""

    def __init__(
        self, graph: Graph, linked: Linked, target: Target, threads: int | None, store: WeightStore,
        profile: CompileProfile,
    ) -> None:  # fmt: skip
        CompiledGraph.__init__(self, Signature.of(graph), "cpu")
        self.graph = graph
        # Not through `self`: without a cycle, the weights go as soon as the graph does.
        self._plan = plan = later_plan(lambda: graph, target, profile)
        self._set_up(Executable(linked.main, lambda: plan().main, target, threads), store, profile)
        self._derived_by = dict(linked.derived)
        self._binder = None
        if linked.bind is not None:
            self._binder = Executable(linked.bind, lambda: plan().bind, target, threads, aligned_outputs=True)
