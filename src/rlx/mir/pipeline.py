"""The MIR pipeline: turns a graph as built into a main graph ready for scheduling and a bind graph for its weights.

`PIPELINE` lists all passes in order; `print(PIPELINE)` shows them as a table. `hoist_weights` splits the graph in two;
later passes run on both. Bodies of loops and branches go through the same passes before their enclosing graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from functools import partial
from typing import Any

from rlx.dtypes import dtype
from rlx.errors import GraphError, nearest
from rlx.fast_dataclass import dataclass
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
    """The result of the pipeline: main graph, bind graph, names of derived weights, fusion report and pass log."""

    main: Graph
    bind: Graph
    derived: list[str]
    report: FusionReport = field(default_factory=FusionReport)
    log: PassLog = field(default_factory=PassLog)

    def text(self) -> str:
        """Return the pass table with statistics, the fusion report and both graphs as text."""
        return "\n".join([PIPELINE.text(self.log), str(self.report), self.main.text(), self.bind.text()])


@dataclass(frozen=True)
class Request:
    """Input of the passes: the graph as built, and what it is compiled for.

    The graph is `certain` unless it is a body that may not run at all: then nodes that can fail are not hoisted.
    """

    graph: Graph
    profile: CompileProfile
    target: Target | None = None
    report: FusionReport | None = None
    certain: bool = True


# -- conditions: the docstring appears in the pass table as the condition of a pass -----------------------------------
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
def dispatch_options(r: Request) -> dict[str, Any]:
    return {"dispatch": r.profile.kernel_dispatch}


def precision_options(r: Request) -> dict[str, Any]:
    return {"compute": dtype(r.profile.precision.compute), "mixed": r.profile.precision.mixed == "auto"}


def target_options(r: Request) -> dict[str, Any]:
    return {"target": r.target}


def report_options(r: Request) -> dict[str, Any]:
    return {"report": r.report}


def merge_options(r: Request) -> dict[str, Any]:
    return {"report": r.report, "certain": r.certain}


def matrix_options(r: Request) -> dict[str, Any]:
    assert r.target is not None
    return merge_options(r) | {"by_rows": not r.target.prepacks}


def region_options(r: Request) -> dict[str, Any]:
    """Options of `fuse_regions`: one op per region if fusion is skipped or the backend is set to `unfuse_regions`."""
    if not fuses(r):
        return {"join": False}
    assert r.target is not None
    return {"report": r.report, "join": not r.profile.backend.of(r.target.device).get("unfuse_regions")}


def _no_options(r: Request) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Step:
    """One pass of the pipeline: the part it belongs to, when it runs, and with which options."""

    part: str
    apply: Callable[..., Any]
    when: Callable[[Request], bool] | None = None  # None: always
    options: Callable[[Request], Mapping[str, Any]] = _no_options

    @property
    def name(self) -> str:
        return self.apply.__name__


class Pipeline(tuple[Step, ...]):
    """All steps, in order."""

    def number(self, apply: Callable[..., Any]) -> int:
        """Return the number of the first step that runs a pass."""
        return next(number for number, step in enumerate(self, 1) if step.apply is apply)

    def passes(self, request: Request, *parts: str) -> list[Pass]:
        """Return the passes of these parts that apply to a request, with their options bound."""
        enabled: list[Pass] = []
        for number, step in enumerate(self, 1):
            if step.part in parts and (step.when is None or step.when(request)):
                apply = partial(step.apply, **step.options(request))
                apply.number = number  # type: ignore[attr-defined]
                enabled.append(apply)
        return enabled

    def __str__(self) -> str:
        return self.text()

    def text(self, log: PassLog | None = None) -> str:
        """Return the pass table; with a log, also each pass's statistics over all its runs (main, bind, bodies)."""
        done: dict[int, list[PassEntry]] = {}
        for entry in log.entries if log else ():
            done.setdefault(entry.number, []).append(entry)
        rows, width = [], max(len(step.name) for step in self)
        for number, step in enumerate(self, 1):
            condition = f" [{step.when.__doc__}]" if step.when else ""
            about = (step.apply.__doc__ or "").strip().split("\n")[0]
            stats = "" if log is None else f"{_summary(done.get(number, ()))}  "
            rows.append(f"{number:2} {step.part:8} {step.name:{width}} {stats}{about}{condition}")
        return "\n".join(rows)


def _summary(entries: Sequence[PassEntry]) -> str:
    if not entries:
        return f"{'not run':>44}"
    before, after, rewrites = (sum(getattr(e, key) for e in entries) for key in ("before", "after", "rewrites"))
    seconds = sum(e.seconds for e in entries)
    return f"{before:6} -> {after:6} nodes {rewrites:5} rewritten {seconds * 1e3:7.2f} ms"


PIPELINE = Pipeline(
    (
        # First passes: expand composed ops, unfuse user-made fusions, apply the requested precision.
        Step("prepare", expand, has_compositions, dispatch_options),
        Step("prepare", unfuse, has_fused),
        Step("prepare", set_precision, is_narrow, precision_options),
        Step("prepare", quantise_activations, has_int8_activations),
        Step("bodies", optimise_bodies, has_bodies),
        # Passes that simplify a graph without changing its structure.
        Step("simplify", canonicalize),
        Step("simplify", fold_constants, folds),
        Step("simplify", cse),
        Step("simplify", dce, eliminates),
        # Passes that merge matmuls and ropes, before weights are packed.
        Step("merge", patches_as_matmuls),
        Step("merge", legalize, options=target_options),
        Step("merge", widen_late),
        Step("merge", merge_gate_up, merges_gates, merge_options),
        Step("merge", merge_matmuls, fuses, matrix_options),
        Step("merge", canonicalize, fuses),
        Step("merge", merge_ropes, fuses, report_options),
        Step("merge", canonicalize, fuses),
        Step("merge", int8_matmuls, computes_int8),
        Step("merge", dce, eliminates),
        Step("split", hoist_weights),
        # Passes that fuse elementwise ops, after weights are packed.
        Step("fuse", weights_to_front),
        Step("fuse", fuse_norms, fuses, report_options),
        Step("fuse", quantise_norms, fuses, report_options),
        Step("fuse", fuse_regions, options=region_options),
        Step("fuse", fuse_epilogues, fuses, report_options),
        Step("fuse", dce, eliminates),
    )
)


BUILT_IN = PIPELINE


@contextmanager
def with_step(step: Step, *, before: str) -> Iterator[Pipeline]:
    """Compile with one more pass inside a `with` block: `step` comes before the first step called `before`.

    What is compiled inside is neither read from the cache nor written to it.
    """
    global PIPELINE
    names = [s.name for s in PIPELINE]
    if before not in names:
        raise GraphError(f"with_step: the pipeline has no step {before!r}", hint=nearest(before, names))
    outer, place = PIPELINE, names.index(before)
    PIPELINE = Pipeline((*outer[:place], step, *outer[place:]))
    try:
        yield PIPELINE
    finally:
        PIPELINE = outer


def rounded(graph: Graph, profile: CompileProfile) -> Graph:
    """Return the graph as the reference device runs it: not optimised, but with the precision of the profile."""
    if profile.precision.compute == "f32" and profile.precision.activations != "int8":
        return graph
    passes = PIPELINE.passes(Request(graph, profile), "prepare")
    if profile.precision.compute == "int8":
        passes += [patches_as_matmuls, legalize, int8_matmuls]
    return run_passes(graph, passes)


def _optimise_and_hoist(request: Request, log: PassLog) -> Hoisted:
    """Optimise bodies of loops and branches, simplify and merge the graph, and split off the bind graph.

    If a body may not run at all it is not `certain`: nodes that can fail are not hoisted out of it.
    """
    graph, profile, target = request.graph, request.profile, request.target
    assert target is not None
    # Loop bodies stay f32.
    body_profile = replace(profile, precision=Precision()) if computes_int8(request) else profile

    def body(inner: Graph, certain: bool) -> Hoisted:
        body_request = replace(request, graph=unfuse(inner), profile=body_profile, certain=certain)
        parts = _optimise_and_hoist(body_request, log)
        return replace(parts, main=run_passes(parts.main, PIPELINE.passes(body_request, "fuse"), log))

    if has_bodies(request):
        graph = timed(log, PIPELINE.number(optimise_bodies), optimise_bodies, graph, body)
    graph = run_passes(graph, PIPELINE.passes(request, "simplify", "merge"), log)
    exact = profile.precision.activations == "f32"
    return timed(
        log, PIPELINE.number(hoist_weights), hoist_weights, graph, target, certain=request.certain, exact=exact
    )


def optimise(graph: Graph, target: Target, profile: CompileProfile | None = None) -> Optimised:
    """Run the full pipeline for a target."""
    if not isinstance(target, Target):
        hint = f"rlx.backends.base.known_target({target!r}); module.plan and rlx.compile take names"
        raise GraphError(f"optimise: the target is {target!r}, expected a Target", hint=hint)
    profile = profile or CompileProfile()
    report, log = FusionReport(skipped=profile.fusion.skip), PassLog()
    dump(graph, "built")
    request = Request(graph, profile, target, report)
    graph = run_passes(graph, PIPELINE.passes(request, "prepare"), log)
    hoisted = _optimise_and_hoist(replace(request, graph=graph), log)
    for part in (hoisted.main, hoisted.bind):
        verify(part, log.typed)
        dump(part, "hoist_weights")
    main = run_passes(hoisted.main, PIPELINE.passes(request, "fuse"), log)
    bind = run_passes(hoisted.bind, PIPELINE.passes(replace(request, report=FusionReport()), "fuse"), log)
    if not profile.fusion.skip:
        report_unfused(main, report)
    log.typed.clear()  # holds the nodes of all passes
    optimised = Optimised(main, bind, hoisted.derived, report, log)
    if profile.passes.verbose:
        print(optimised.text(), file=sys.stderr)
    return optimised
