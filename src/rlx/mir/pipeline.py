"""The MIR pipeline: from a graph as built to a graph that can be scheduled, and the bind graph of its weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rlx.dtypes import dtype
from rlx.ir.graph import Graph
from rlx.ir.passes import Pass, PassLog, dump, run_passes
from rlx.ir.registry import CONTROL, FUSED
from rlx.ir.verify import verify
from rlx.mir.canonicalize import canonicalize
from rlx.mir.control import optimise_bodies
from rlx.mir.cse import cse
from rlx.mir.dce import dce
from rlx.mir.expand import expand, has_composed
from rlx.mir.fold_constants import fold_constants
from rlx.mir.fuse_epilogues import fuse_epilogues
from rlx.mir.fuse_norms import fuse_norms, quantise_norms
from rlx.mir.fuse_regions import fuse_regions
from rlx.mir.hoist_weights import Hoisted, hoist_weights
from rlx.mir.int8 import int8_matmuls
from rlx.mir.legalize import legalize
from rlx.mir.merge_matmuls import merge_gates, merge_matmuls
from rlx.mir.merge_ropes import merge_ropes
from rlx.mir.patches_as_matmuls import patches_as_matmuls
from rlx.mir.precision import set_precision
from rlx.mir.report import FusionReport
from rlx.mir.round_activations import round_activations
from rlx.mir.unfuse import unfuse
from rlx.mir.unfused import report_unfused
from rlx.mir.weights import weights_first
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
        return "\n".join([self.log.text(), str(self.report), self.main.text(), self.bind.text()])


def arrive(graph: Graph, profile: CompileProfile) -> tuple[Pass, ...]:
    """What has to happen to a graph first: composed and fused ops come apart, values get the precision asked for."""
    passes: list[Pass] = []
    if has_composed(graph, profile.kernel_dispatch) or profile.kernel_dispatch != KernelDispatchConfig():
        passes.append(partial(expand, dispatch=profile.kernel_dispatch))
    if passes or any(n.definition.traits & {FUSED, CONTROL} for n in graph.nodes):
        passes.append(unfuse)
    if profile.precision.compute in NARROW:
        mixed = profile.precision.mixed == "auto"
        passes.append(partial(set_precision, compute=dtype(profile.precision.compute), mixed=mixed))
    if profile.precision.activations == "int8":
        passes.append(round_activations)
    return tuple(passes)


def rounded(graph: Graph, profile: CompileProfile) -> Graph:
    """The graph as the reference device runs it: nothing is made faster, numbers have the precision of the profile."""
    if profile.precision.compute == "f32" and profile.precision.activations != "int8":
        return graph
    passes = arrive(graph, profile)
    if profile.precision.compute == "int8":
        passes = (*passes, patches_as_matmuls, legalize, int8_matmuls)
    return run_passes(graph, passes)


def simplify() -> tuple[Pass, ...]:
    """Passes that only make a graph smaller."""
    return (canonicalize, fold_constants, cse, dce)


def merge(report: FusionReport, target: Target, *, gates: bool, certain: bool = True) -> tuple[Pass, ...]:
    """Passes that join work on whole tensors, before weights are packed; `certain` as in `hoist_weights`."""
    return (
        patches_as_matmuls,
        partial(legalize, target=target),
        widen_late,
        *((partial(merge_gates, report=report, certain=certain),) if gates else ()),
        partial(merge_matmuls, report=report, certain=certain),
        canonicalize,
        partial(merge_ropes, report=report),
        canonicalize,
    )


def fuse(report: FusionReport, profile: CompileProfile, target: Target) -> tuple[Pass, ...]:
    """Passes that join elementwise work, after weights are packed."""
    if profile.fusion.skip:
        return (weights_first, partial(fuse_regions, join=False), dce)
    return (
        weights_first,
        partial(fuse_norms, report=report),
        partial(quantise_norms, report=report),
        partial(fuse_regions, report=report, join=not profile.backend.of(target.device).get("unfuse_regions")),
        partial(fuse_epilogues, report=report),
        dce,
    )


def chosen(passes: Sequence[Pass], profile: CompileProfile) -> tuple[Pass, ...]:
    """The passes that a profile does not switch off."""
    off: list[Pass] = [] if profile.passes.dce else [dce]
    off += [] if profile.passes.constant_folding else [fold_constants]
    return tuple(p for p in passes if p not in off)


def split(
    graph: Graph, target: Target, profile: CompileProfile, report: FusionReport, log: PassLog, *, certain: bool = True
) -> Hoisted:
    """The graph without what depends on weights alone, and that by itself; bodies of loops and branches are done.

    A body that may not run at all is not `certain`: nothing that can fail leaves it.
    """

    int8 = profile.precision.compute == "int8"
    inside = replace(profile, precision=Precision()) if int8 else profile  # what is in a loop stays f32

    def body(inner: Graph, certain: bool) -> Hoisted:
        parts = split(unfuse(inner), target, inside, report, log, certain=certain)
        return replace(parts, main=run_passes(parts.main, chosen(fuse(report, profile, target), profile), log))

    graph = optimise_bodies(graph, body)
    merging = merge(report, target, gates=not int8, certain=certain)
    if profile.fusion.skip:
        merging = (patches_as_matmuls, partial(legalize, target=target), widen_late)
    passes = (*simplify(), *merging, *((int8_matmuls,) if int8 else ()), dce)
    return hoist_weights(run_passes(graph, chosen(passes, profile), log), target, certain=certain)


def optimise(graph: Graph, target: Target, profile: CompileProfile | None = None) -> Optimised:
    """Run the whole pipeline for a target."""
    profile = profile or CompileProfile()
    report, log = FusionReport(), PassLog()
    dump(graph, "built")
    graph = run_passes(graph, chosen(arrive(graph, profile), profile), log)
    hoisted = split(graph, target, profile, report, log)
    for part in (hoisted.main, hoisted.bind):
        verify(part, log.typed)
        dump(part, "hoist_weights")
    main = run_passes(hoisted.main, chosen(fuse(report, profile, target), profile), log)
    bind = run_passes(hoisted.bind, chosen(fuse(FusionReport(), profile, target), profile), log)
    if not profile.fusion.skip:
        report_unfused(main, report)
    log.typed.clear()  # nodes of all passes
    done = Optimised(main, bind, hoisted.derived, report, log)
    if profile.passes.verbose:
        print(done.text(), file=sys.stderr)
    return done
