"""The MIR pipeline: from a graph as built to a graph that can be scheduled, and the bind graph of its weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from rlx.ir.graph import Graph
from rlx.ir.passes import Pass, PassLog, dump, run_passes
from rlx.ir.verify import verify
from rlx.mir.canonicalize import canonicalize
from rlx.mir.cse import cse
from rlx.mir.dce import dce
from rlx.mir.fold_constants import fold_constants
from rlx.mir.fuse_epilogues import fuse_epilogues
from rlx.mir.fuse_norms import fuse_norms
from rlx.mir.fuse_regions import fuse_regions
from rlx.mir.hoist_weights import hoist_weights
from rlx.mir.legalize import legalize
from rlx.mir.merge_matmuls import merge_gates, merge_matmuls
from rlx.mir.merge_ropes import merge_ropes
from rlx.mir.report import FusionReport
from rlx.mir.weights import weights_first
from rlx.target import Target


@dataclass
class Optimised:
    """What comes out of the pipeline."""

    main: Graph
    bind: Graph
    derived: list[str]
    report: FusionReport = field(default_factory=FusionReport)
    log: PassLog = field(default_factory=PassLog)


def simplify() -> tuple[Pass, ...]:
    """Passes that only make a graph smaller."""
    return (canonicalize, fold_constants, cse, dce)


def merge(report: FusionReport) -> tuple[Pass, ...]:
    """Passes that join work on whole tensors, before weights are packed."""
    return (
        legalize,
        partial(merge_gates, report=report),
        partial(merge_matmuls, report=report),
        canonicalize,
        partial(merge_ropes, report=report),
        canonicalize,
    )


def fuse(report: FusionReport) -> tuple[Pass, ...]:
    """Passes that join elementwise work, after weights are packed."""
    return (
        weights_first,
        partial(fuse_norms, report=report),
        partial(fuse_regions, report=report),
        partial(fuse_epilogues, report=report),
        dce,
    )


def optimise(graph: Graph, target: Target) -> Optimised:
    """Run the whole pipeline for a target."""
    report, log = FusionReport(), PassLog()
    dump(graph, "built")
    graph = run_passes(graph, (*simplify(), *merge(report), dce), log)
    hoisted = hoist_weights(graph, target)
    for part in (hoisted.main, hoisted.bind):
        verify(part)
        dump(part, "hoist_weights")
    main = run_passes(hoisted.main, fuse(report), log)
    bind = run_passes(hoisted.bind, fuse(FusionReport()), log)
    return Optimised(main, bind, hoisted.derived, report, log)
