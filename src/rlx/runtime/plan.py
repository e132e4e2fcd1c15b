"""From a graph to programs: lowering, the MIR pipeline and scheduling, with the program cache in front of them."""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlx.backends import cache
from rlx.ir.graph import Graph
from rlx.lir.program import Program
from rlx.mir.report import FusionReport
from rlx.module import LirModule, plan_lir
from rlx.profile import CompileProfile
from rlx.runtime.weights import Recipe, recipes
from rlx.target import Target


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
    return planned(plan_lir(graph, target, profile or CompileProfile()), graph)


def planned(lir: LirModule, graph: Graph) -> CompiledPlan:
    """What running a planned module needs; `graph` is what it was built as."""
    done = lir.optimised
    texts = done.main.text(), done.bind.text()
    return CompiledPlan(lir.main, lir.bind, done.derived, recipes(done.bind), done.report, *texts, _origins(graph))


def _origins(graph: Graph) -> tuple[str, ...]:
    return tuple(str(node.origin) for node in graph.nodes)


def cached_plan(graph: Graph, target: Target, profile: CompileProfile | None = None) -> CompiledPlan:
    """The plan from the program cache, or made and stored there: not with users' ops, whose source it does not know."""
    store = cache.current()
    profile = profile or CompileProfile()
    if store.folder is None or not _is_builtin(graph):
        return make_plan(graph, target, profile)
    text = f"{graph.fingerprint()}|{graph.name}|{target}|{profile.key()}|{cache.source_digest()}"
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    data = None if profile.passes.verbose else store.read("programs", key)  # what is read has no passes to tell of
    if data is not None:
        try:
            found = pickle.loads(data)
            moved = relocated(found, _origins(graph)) if isinstance(found, CompiledPlan) else None
            if moved is not None:
                return moved
        except (pickle.UnpicklingError, AttributeError, ImportError, EOFError, LookupError, TypeError, ValueError):
            pass  # written by something else: make it again
    plan = make_plan(graph, target, profile)
    for program in (plan.main, plan.bind):
        program.kernels()  # so that their digests are stored too
    store.write("programs", key, pickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL))
    return plan


def _is_builtin(graph: Graph) -> bool:
    """Whether all ops are those of rlx, in bodies too."""
    return all(
        node.definition.is_builtin and all(_is_builtin(v) for v in node.attrs.values() if isinstance(v, Graph))
        for node in graph.nodes
    )


def relocated(plan: CompiledPlan, origins: tuple[str, ...]) -> CompiledPlan | None:
    """The plan of an equal graph that was built on other lines; None where what was one line now is several.

    Launches carry source lines to errors and reports, and those should be the lines of the graph at hand.
    """
    if plan.origins == origins:
        return plan
    places: dict[str, str] = {}
    for old, new in zip(map(_line, plan.origins), map(_line, origins), strict=True):
        if places.setdefault(old, new) != new:
            return None
    fusion = FusionReport(
        [replace(f, where=_moved(f.where, places)) for f in plan.fusion.fused],
        [replace(m, where=_moved(m.where, places)) for m in plan.fusion.missed],
    )
    main, bind = (_moved_program(p, places) for p in (plan.main, plan.bind))
    return replace(plan, main=main, bind=bind, fusion=fusion, origins=origins)


def _moved_program(program: Program, places: Mapping[str, str]) -> Program:
    launches = [replace(x, where=_moved(x.where, places)) for x in program.launches]
    assertions = [replace(a, where=_moved(a.where, places)) for a in program.assertions]
    return replace(program, launches=launches, assertions=assertions)


def _moved(where: str, places: Mapping[str, str]) -> str:
    line = _line(where)
    return places.get(line, line) + where[len(line) :]


def _line(origin: str) -> str:
    """The part that the user's source decides, without what lowering and passes have added."""
    return re.split(r", (?=from |by )", origin, maxsplit=1)[0]
