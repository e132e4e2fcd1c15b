"""From a graph to programs: lowering, the MIR pipeline and scheduling, with the program cache in front of them."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass

from rlx.backends import cache
from rlx.hir.lower import lower
from rlx.ir.graph import Graph
from rlx.lir.program import Program
from rlx.lir.schedule import schedule
from rlx.mir.pipeline import optimise
from rlx.mir.report import FusionReport
from rlx.target import Target


@dataclass(frozen=True)
class CompiledPlan:
    """The main program, the bind program of its weights, and what the passes did."""

    main: Program
    bind: Program
    derived: list[str]
    fusion: FusionReport
    main_text: str  # optimised MIR, for people
    bind_text: str


def make_plan(graph: Graph, target: Target) -> CompiledPlan:
    """Compile a graph to programs, without the cache."""
    result = optimise(lower(graph), target)
    panels = {n: f"panels({o.shape[-1]})" for n, o in zip(result.derived, result.bind.outputs, strict=True) if _packed(o)}
    main = schedule(result.main, target, notes=panels)
    bind = schedule(result.bind, target)
    return CompiledPlan(main, bind, result.derived, result.report, result.main.text(), result.bind.text())


def _packed(output: object) -> bool:
    return output.node.op == "pack_panels"  # type: ignore[attr-defined, no-any-return]


def cached_plan(graph: Graph, target: Target) -> CompiledPlan:
    """The plan from the program cache, or made and stored there."""
    store = cache.current()
    if store.folder is None:
        return make_plan(graph, target)
    text = f"{graph.fingerprint()}|{graph.name}|{target.name}|{cache.source_digest()}"
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    data = store.read("programs", key)
    if data is not None:
        try:
            found = pickle.loads(data)
            if isinstance(found, CompiledPlan):
                return found
        except (pickle.UnpicklingError, AttributeError, ImportError, EOFError, TypeError):
            pass  # written by something else: make it again
    plan = make_plan(graph, target)
    store.write("programs", key, pickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL))
    return plan
