"""The MIR pipeline: from a graph as built to a graph that can be scheduled, and the bind graph of its weights.

`PIPELINE` is the order of all passes, and `print(PIPELINE)` its table of contents. `hoist_weights` makes two graphs of
one; what follows runs on both. Bodies of loops and branches go through the same passes before the graph they are in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rlx.dtypes import dtype
from rlx.ir.graph import Graph
from rlx.ir.passes import Pass, PassEntry, PassLog, dump, run_passes, timed
from rlx.ir.registry import CONTROL, FUSED
from rlx.ir.verify import verify
from rlx.mir.canonicalize import canonicalize
from rlx.mir.cse import cse
from rlx.mir.dce import dce
from rlx.mir.expand import expand, has_composed
from rlx.mir.fold_constants import fold_constants
from rlx.mir.fuse_epilogues import fuse_epilogues
from rlx.mir.fuse_norms import fuse_norms
from rlx.mir.fuse_regions import fuse_regions
from rlx.mir.hoist_weights import Hoisted, hoist_weights
from rlx.mir.int8_matmuls import int8_matmuls
from rlx.mir.legalize import legalize
from rlx.mir.merge_gate_up import merge_gate_up
from rlx.mir.merge_matmuls import merge_matmuls
from rlx.mir.merge_ropes import merge_ropes
from rlx.mir.optimise_bodies import optimise_bodies
from rlx.mir.patches_as_matmuls import patches_as_matmuls
from rlx.mir.quantise_activations import quantise_activations
from rlx.mir.quantise_norms import quantise_norms
from rlx.mir.report import FusionReport
from rlx.mir.report_unfused import report_unfused
from rlx.mir.set_precision import set_precision
from rlx.mir.unfuse import unfuse
from rlx.mir.weights_to_front import weights_to_front
from rlx.mir.widen_late import widen_late
from rlx.profile import NARROW, CompileProfile, KernelDispatchConfig, Precision
from rlx.target import Target


@dataclass
class Optimised:
    """What comes out of the pipeline."""

    main: Graph
    bind: Graph
    derived: list[str]
    report: FusionReport = field(default_factory=FusionReport)
    log: PassLog = field(default_factory=PassLog)

    def text(self) -> str:
        """What the passes did and the graphs they left."""
        return "\n".join([PIPELINE.text(self.log), str(self.report), self.main.text(), self.bind.text()])


@dataclass(frozen=True)
class Request:
    """What passes are asked for: the graph as built, and for what it is compiled. `certain` as in `hoist_weights`."""

    graph: Graph
    profile: CompileProfile
    target: Target | None = None
    report: FusionReport | None = None
    certain: bool = True


# -- conditions: the docstring says in the table of contents when a pass runs -----------------------------------------
def has_compositions(r: Request) -> bool:
    """ops without a kernel"""
    dispatch = r.profile.kernel_dispatch
    return has_composed(r.graph, dispatch) or dispatch != KernelDispatchConfig()


def has_fused(r: Request) -> bool:
    """fused ops, loops, or an expanded graph"""
    return has_compositions(r) or any(n.definition.traits & {FUSED, CONTROL} for n in r.graph.nodes)


def is_narrow(r: Request) -> bool:
    """compute in 16 bits"""
    return r.profile.precision.compute in NARROW


def has_int8_activations(r: Request) -> bool:
    """int8 activations"""
    return r.profile.precision.activations == "int8"


def has_bodies(r: Request) -> bool:
    """loops or branches"""
    return any(CONTROL in node.definition.traits for node in r.graph.nodes)


def computes_int8(r: Request) -> bool:
    """compute in int8"""
    return r.profile.precision.compute == "int8"


def folds(r: Request) -> bool:
    """unless switched off"""
    return r.profile.passes.constant_folding


def eliminates(r: Request) -> bool:
    """unless switched off"""
    return r.profile.passes.dce


def fuses(r: Request) -> bool:
    """unless fusion is skipped"""
    return not r.profile.fusion.skip


def merges_gates(r: Request) -> bool:
    """unless fusion is skipped, or compute in int8"""
    return fuses(r) and not computes_int8(r)


# -- options of passes ------------------------------------------------------------------------------------------------
def dispatched(r: Request) -> dict[str, Any]:
    return {"dispatch": r.profile.kernel_dispatch}


def precision(r: Request) -> dict[str, Any]:
    return {"compute": dtype(r.profile.precision.compute), "mixed": r.profile.precision.mixed == "auto"}


def targeted(r: Request) -> dict[str, Any]:
    return {"target": r.target}


def reported(r: Request) -> dict[str, Any]:
    return {"report": r.report}


def merged(r: Request) -> dict[str, Any]:
    return {"report": r.report, "certain": r.certain}


def joined(r: Request) -> dict[str, Any]:
    """Regions are made of single ops where fusion is skipped, and not joined where the backend is asked not to."""
    if not fuses(r):
        return {"join": False}
    assert r.target is not None
    return {"report": r.report, "join": not r.profile.backend.of(r.target.device).get("unfuse_regions")}


def _plain(r: Request) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Step:
    """A pass at its place in the pipeline: its part of the pipeline, when it runs, and with which options."""

    part: str
    apply: Callable[..., Any]
    when: Callable[[Request], bool] | None = None  # always
    options: Callable[[Request], Mapping[str, Any]] = _plain

    @property
    def name(self) -> str:
        return self.apply.__name__


class Pipeline(tuple[Step, ...]):
    """All steps in order."""

    def number(self, apply: Callable[..., Any]) -> int:
        """The number of the first step that runs a pass."""
        return next(number for number, step in enumerate(self, 1) if step.apply is apply)

    def passes(self, request: Request, *parts: str) -> list[Pass]:
        """The passes of some parts that a request asks for, with their options."""
        chosen: list[Pass] = []
        for number, step in enumerate(self, 1):
            if step.part in parts and (step.when is None or step.when(request)):
                apply = partial(step.apply, **step.options(request))
                apply.number = number  # type: ignore[attr-defined]
                chosen.append(apply)
        return chosen

    def __str__(self) -> str:
        return self.text()

    def text(self, log: PassLog | None = None) -> str:
        """The table of contents; with a log also what each pass did, all its runs (main, bind, bodies) together."""
        done: dict[int, list[PassEntry]] = {}
        for entry in log.entries if log else ():
            done.setdefault(entry.number, []).append(entry)
        rows = []
        for number, step in enumerate(self, 1):
            condition = f" [{step.when.__doc__}]" if step.when else ""
            about = (step.apply.__doc__ or "").strip().split("\n")[0]
            did = "" if log is None else f"{_summary(done.get(number, ()))}  "
            rows.append(f"{number:2} {step.part:8} {step.name:18} {did}{about}{condition}")
        return "\n".join(rows)


def _summary(entries: Sequence[PassEntry]) -> str:
    if not entries:
        return f"{'not run':>44}"
    before, after, rewrites = (sum(getattr(e, key) for e in entries) for key in ("before", "after", "rewrites"))
    seconds = sum(e.seconds for e in entries)
    return f"{before:6} -> {after:6} nodes {rewrites:5} rewritten {seconds * 1e3:7.2f} ms"


PIPELINE = Pipeline(
    (
        # A graph arrives: composed and fused ops come apart, values get the precision asked for.
        Step("arrive", expand, has_compositions, dispatched),
        Step("arrive", unfuse, has_fused),
        Step("arrive", set_precision, is_narrow, precision),
        Step("arrive", quantise_activations, has_int8_activations),
        Step("bodies", optimise_bodies, has_bodies),
        # Passes that only make a graph smaller.
        Step("simplify", canonicalize),
        Step("simplify", fold_constants, folds),
        Step("simplify", cse),
        Step("simplify", dce, eliminates),
        # Passes that join work on whole tensors, before weights are packed.
        Step("merge", patches_as_matmuls),
        Step("merge", legalize, options=targeted),
        Step("merge", widen_late),
        Step("merge", merge_gate_up, merges_gates, merged),
        Step("merge", merge_matmuls, fuses, merged),
        Step("merge", canonicalize, fuses),
        Step("merge", merge_ropes, fuses, reported),
        Step("merge", canonicalize, fuses),
        Step("merge", int8_matmuls, computes_int8),
        Step("merge", dce, eliminates),
        Step("split", hoist_weights),
        # Passes that join elementwise work, after weights are packed.
        Step("fuse", weights_to_front),
        Step("fuse", fuse_norms, fuses, reported),
        Step("fuse", quantise_norms, fuses, reported),
        Step("fuse", fuse_regions, options=joined),
        Step("fuse", fuse_epilogues, fuses, reported),
        Step("fuse", dce, eliminates),
    )
)


def rounded(graph: Graph, profile: CompileProfile) -> Graph:
    """The graph as the reference device runs it: nothing is made faster, numbers have the precision of the profile."""
    if profile.precision.compute == "f32" and profile.precision.activations != "int8":
        return graph
    passes = PIPELINE.passes(Request(graph, profile), "arrive")
    if profile.precision.compute == "int8":
        passes += [patches_as_matmuls, legalize, int8_matmuls]
    return run_passes(graph, passes)


def _split(request: Request, log: PassLog) -> Hoisted:
    """The graph without what depends on weights alone, and that by itself; bodies of loops and branches are done.

    A body that may not run at all is not `certain`: nothing that can fail leaves it.
    """
    graph, profile, target = request.graph, request.profile, request.target
    assert target is not None
    # What is in a loop stays f32.
    inside = replace(profile, precision=Precision()) if computes_int8(request) else profile

    def body(inner: Graph, certain: bool) -> Hoisted:
        asked = replace(request, graph=unfuse(inner), profile=inside, certain=certain)
        parts = _split(asked, log)
        return replace(parts, main=run_passes(parts.main, PIPELINE.passes(asked, "fuse"), log))

    if has_bodies(request):
        graph = timed(log, PIPELINE.number(optimise_bodies), optimise_bodies, graph, body)
    graph = run_passes(graph, PIPELINE.passes(request, "simplify", "merge"), log)
    return timed(log, PIPELINE.number(hoist_weights), hoist_weights, graph, target, certain=request.certain)


def optimise(graph: Graph, target: Target, profile: CompileProfile | None = None) -> Optimised:
    """Run the whole pipeline for a target."""
    profile = profile or CompileProfile()
    report, log = FusionReport(), PassLog()
    dump(graph, "built")
    request = Request(graph, profile, target, report)
    graph = run_passes(graph, PIPELINE.passes(request, "arrive"), log)
    hoisted = _split(replace(request, graph=graph), log)
    for part in (hoisted.main, hoisted.bind):
        verify(part, log.typed)
        dump(part, "hoist_weights")
    main = run_passes(hoisted.main, PIPELINE.passes(request, "fuse"), log)
    bind = run_passes(hoisted.bind, PIPELINE.passes(replace(request, report=FusionReport()), "fuse"), log)
    if not profile.fusion.skip:
        report_unfused(main, report)
    log.typed.clear()  # nodes of all passes
    done = Optimised(main, bind, hoisted.derived, report, log)
    if profile.passes.verbose:
        print(done.text(), file=sys.stderr)
    return done
