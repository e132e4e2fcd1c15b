"""Compiles a graph to programs: lowering, the MIR pipeline and scheduling, behind the program cache."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rlx import dims, types
from rlx.backends import cache_folder
from rlx.backends.base import backend_of
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph
from rlx.lir import expressions, interface, kernels, loops, program, views
from rlx.lir.program import Program
from rlx.mir import report
from rlx.mir.report import FusionReport
from rlx.profile import CompileProfile
from rlx.runtime import program_cache, record_json, weights
from rlx.runtime.program_cache import Keys
from rlx.runtime.weights import Recipe, recipes
from rlx.target import Target

if TYPE_CHECKING:
    from rlx.lir.module import LirModule


@dataclass(frozen=True)
class CompiledPlan:
    """The main program, the bind program of its weights, and the fusion report."""

    main: Program
    bind: Program
    derived: list[str]
    recipes: list[Recipe]  # of the derived weights
    fusion: FusionReport
    main_text: str  # optimised MIR, for reports
    bind_text: str
    origins: tuple[str, ...]  # where the nodes of the graph were built

    def __repr__(self) -> str:
        counts = f"{len(self.main.launches)} launches, {len(self.bind.launches)} at bind time"
        return f"<plan of {self.main.name!r} for {self.main.target}: {counts}>"

    def __str__(self) -> str:
        """The main program as text: buffers, launches and kernels."""
        return self.main.text()


def make_plan(graph: Graph, target: Target, profile: CompileProfile | None = None) -> CompiledPlan:
    """Compile a graph to programs, bypassing the cache."""
    from rlx.lir.module import plan_lir  # imports all passes, which a cache hit does not need

    return plan_from_lir(plan_lir(graph, target, profile or CompileProfile()), graph)


def _make_and_compile(graph: Graph, target: Target, profile: CompileProfile) -> CompiledPlan:
    """Like `make_plan`, but starts compiling kernels in the background as soon as they are known."""
    backend = backend_of(target)
    backend.start_compiler(target)
    from rlx.lir.module import plan_lir

    lir = plan_lir(graph, target, profile)
    backend.start_compiling((lir.main, lir.bind) if lir.optimised.derived else (lir.main,), target)
    return plan_from_lir(lir, graph)


def plan_from_lir(lir: LirModule, graph: Graph) -> CompiledPlan:
    """The plan of a module at LIR; `graph` is its source."""
    optimised = lir.optimised
    texts = optimised.main.text(), optimised.bind.text()
    return CompiledPlan(
        lir.main, lir.bind, optimised.derived, recipes(optimised.bind), optimised.report, *texts, _origins(graph)
    )


def _origins(graph: Graph) -> tuple[str, ...]:
    return tuple(str(node.origin) for node in graph.nodes)


def cached_plan(
    graph: Graph, target: Target, profile: CompileProfile | None = None, *, run: bool = False, keys: Keys | None = None
) -> CompiledPlan:
    """The plan from the program cache; on a miss it is made and stored, except with user-defined ops (not in the key).

    With `run`, a miss also starts compiling the kernels in the background. The plan is not stored then: the next run
    loads the compiled code from the compile cache and rarely needs the plan.
    """
    store = cache_folder.current()
    profile = profile or CompileProfile()
    make = _make_and_compile if run else make_plan
    key = (keys or Keys.of(graph, target, profile)).plan
    if key is None:
        return make(graph, target, profile)
    data = None if profile.shows_passes else store.read("programs", key)  # a cached plan has no log of passes
    if data is not None:
        with contextlib.suppress(*program_cache.DAMAGED):  # a damaged entry is a miss
            plan = relocate(program_cache.unpack(data, plan_records(), CompiledPlan), _origins(graph))
            if plan is not None:
                return plan
    plan = make(graph, target, profile)
    if not run:
        store_plan(plan, key)
    return plan


def store_plan(plan: CompiledPlan, key: str) -> None:
    """Store a plan in the program cache."""
    cache_folder.current().write("programs", key, program_cache.pack(plan, plan_records()))


@functools.cache
def plan_records() -> Mapping[str, type]:
    """The record classes of plans, by name."""
    return record_json.records_of(
        dims, types, expressions, loops, kernels, views, interface, program, report, weights
    ) | {"CompiledPlan": CompiledPlan}


def relocate(plan: CompiledPlan, origins: tuple[str, ...]) -> CompiledPlan | None:
    """Replace the source lines of an equal graph's plan by `origins`; None if one old line maps to several new ones.

    Launches carry source lines for errors and reports, which should name the lines of the current graph.
    """
    if plan.origins == origins:
        return plan
    places: dict[str, str] = {}
    for old, new in zip(map(source_line, plan.origins), map(source_line, origins), strict=True):
        if places.setdefault(old, new) != new:
            return None
    fusion = replace(
        plan.fusion,
        fused=[replace(f, where=_relocate_origin(f.where, places)) for f in plan.fusion.fused],
        missed=[replace(m, where=_relocate_origin(m.where, places)) for m in plan.fusion.missed],
        separate=[replace(m, where=_relocate_origin(m.where, places)) for m in plan.fusion.separate],
    )
    main, bind = (_relocate_program(p, places) for p in (plan.main, plan.bind))
    return replace(plan, main=main, bind=bind, fusion=fusion, origins=origins)


def _relocate_program(program: Program, places: Mapping[str, str]) -> Program:
    launches = [replace(x, where=_relocate_origin(x.where, places)) for x in program.launches]
    assertions = [replace(a, where=_relocate_origin(a.where, places)) for a in program.assertions]
    return replace(program, launches=launches, assertions=assertions)


def _relocate_origin(where: str, places: Mapping[str, str]) -> str:
    line = source_line(where)
    return places.get(line, line) + where[len(line) :]


def source_line(origin: str) -> str:
    """The user's source line, without the parts that lowering and passes append."""
    return re.split(r", (?=from |by )", origin, maxsplit=1)[0]
