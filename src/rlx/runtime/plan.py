"""From a graph to programs: lowering, the MIR pipeline and scheduling, with the program cache in front of them."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlx import dims, types
from rlx.backends import cache_folder
from rlx.backends.base import backend_of
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
    from rlx.module import LirModule


@dataclass(frozen=True)
class CompiledPlan:
    """The main program, the bind program of its weights, and what the passes did."""

    main: Program
    bind: Program
    derived: list[str]
    recipes: list[Recipe]  # of the derived weights
    fusion: FusionReport
    main_text: str  # optimised MIR, for people
    bind_text: str
    origins: tuple[str, ...]  # where the nodes of the graph were built


def make_plan(graph: Graph, target: Target, profile: CompileProfile | None = None) -> CompiledPlan:
    """Compile a graph to programs, without the cache."""
    from rlx.module import plan_lir  # all passes; a plan from the cache needs none

    return planned(plan_lir(graph, target, profile or CompileProfile()), graph)


def _make_and_compile(graph: Graph, target: Target, profile: CompileProfile) -> CompiledPlan:
    """Like `make_plan`, but starts compiling kernels in the background as soon as they are known."""
    backend = backend_of(target)
    backend.start_compiler(target)
    from rlx.module import plan_lir

    lir = plan_lir(graph, target, profile)
    backend.start_compiling((lir.main, lir.bind) if lir.optimised.derived else (lir.main,), target)
    return planned(lir, graph)


def planned(lir: LirModule, graph: Graph) -> CompiledPlan:
    """What running a planned module needs; `graph` is what it was built as."""
    done = lir.optimised
    texts = done.main.text(), done.bind.text()
    return CompiledPlan(lir.main, lir.bind, done.derived, recipes(done.bind), done.report, *texts, _origins(graph))


def _origins(graph: Graph) -> tuple[str, ...]:
    return tuple(str(node.origin) for node in graph.nodes)


def cached_plan(
    graph: Graph, target: Target, profile: CompileProfile | None = None, *, run: bool = False, keys: Keys | None = None
) -> CompiledPlan:
    """The plan from the program cache, or made and stored there: not with users' ops, whose source it does not know.

    With `run`, the kernels of a plan that had to be made are being compiled when it comes. It is not stored then: what
    runs is linked from the cache the next time, and few ask for its plan.
    """
    store = cache_folder.current()
    profile = profile or CompileProfile()
    make = _make_and_compile if run else make_plan
    key = (keys or Keys.of(graph, target, profile)).plan
    if key is None:
        return make(graph, target, profile)
    data = None if profile.shows_passes else store.read("programs", key)  # what is read has no passes to tell of
    if data is not None:
        with contextlib.suppress(*program_cache.DAMAGED):  # written by something else
            moved = relocated(program_cache.unpacked(data, plan_records(), CompiledPlan), _origins(graph))
            if moved is not None:
                return moved
    plan = make(graph, target, profile)
    if not run:
        keep_plan(plan, key)
    return plan


def keep_plan(plan: CompiledPlan, key: str) -> None:
    """Store a plan in the program cache."""
    cache_folder.current().write("programs", key, program_cache.packed(plan, plan_records()))


@functools.cache
def plan_records() -> Mapping[str, type]:
    """The records that plans are made of, by name."""
    return record_json.records_of(
        dims, types, expressions, loops, kernels, views, interface, program, report, weights
    ) | {"CompiledPlan": CompiledPlan}


def relocated(plan: CompiledPlan, origins: tuple[str, ...]) -> CompiledPlan | None:
    """The plan of an equal graph that was built on other lines; None where what was one line now is several.

    Launches carry source lines to errors and reports, and those should be the lines of the graph at hand.
    """
    if plan.origins == origins:
        return plan
    places: dict[str, str] = {}
    for old, new in zip(map(source_line, plan.origins), map(source_line, origins), strict=True):
        if places.setdefault(old, new) != new:
            return None
    fusion = FusionReport(
        [replace(f, where=_moved(f.where, places)) for f in plan.fusion.fused],
        [replace(m, where=_moved(m.where, places)) for m in plan.fusion.missed],
        [replace(m, where=_moved(m.where, places)) for m in plan.fusion.separate],
    )
    main, bind = (_moved_program(p, places) for p in (plan.main, plan.bind))
    return replace(plan, main=main, bind=bind, fusion=fusion, origins=origins)


def _moved_program(program: Program, places: Mapping[str, str]) -> Program:
    launches = [replace(x, where=_moved(x.where, places)) for x in program.launches]
    assertions = [replace(a, where=_moved(a.where, places)) for a in program.assertions]
    return replace(program, launches=launches, assertions=assertions)


def _moved(where: str, places: Mapping[str, str]) -> str:
    line = source_line(where)
    return places.get(line, line) + where[len(line) :]


def source_line(origin: str) -> str:
    """The part that the user's source decides, without what lowering and passes have added."""
    return re.split(r", (?=from |by )", origin, maxsplit=1)[0]
