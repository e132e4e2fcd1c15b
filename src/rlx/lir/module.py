"""Planned modules: a graph lowered, optimised and scheduled for a target, and how that prints."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.errors import FusionError
from rlx.fast_dataclass import dataclass
from rlx.hir.lower import lower
from rlx.ir.graph import Graph
from rlx.lir import memory
from rlx.lir.program import ARENA, Program
from rlx.lir.schedule import schedule
from rlx.mir.pipeline import Optimised, optimise
from rlx.profile import CompileProfile
from rlx.target import Target
from rlx.types import Size, evaluate


@dataclass(frozen=True)
class LirModule:
    """A planned module: the MIR it was planned from, the optimised graph, and the programs for a target."""

    mir: Graph
    optimised: Optimised
    main: Program
    bind: Program  # runs once when weights are set
    target: Target

    def arena(self, sizes: Mapping[str, int]) -> memory.Plan:
        """The placement of the temporary buffers for these symbol sizes."""
        lives = memory.lifetimes(self.main)
        wanted = {x.name: evaluate(self.main.buffers[x.name].type.bytes, sizes) for x in lives}
        return memory.plan(lives, wanted)

    def naive_bytes(self) -> Size:
        """Total bytes of the temporary buffers without memory sharing, as an expression over the symbols."""
        total: Size = 0
        for buffer in self.main.buffers.values():
            total = total + buffer.type.bytes if buffer.kind == ARENA else total
        return total


def plan_lir(graph: Graph, target: Target, profile: CompileProfile) -> LirModule:
    """Lower, optimise and schedule a graph according to a profile."""
    mir = lower(graph, profile.fusion.policy)
    done = optimise(mir, target, profile)
    if profile.fusion.assert_clean and done.report.missed:
        missed = done.report.missed
        hint = "rewrite the graph, or compile without fusion.assert_clean"
        raise FusionError(f"graph {graph.name!r}: {len(missed)} fusions missed", notes=map(str, missed), hint=hint)
    derived = zip(done.derived, done.bind.outputs, strict=True)
    layouts = {n: str(o.node.attrs["layout"]) for n, o in derived if o.node.op == "prepack"}
    return LirModule(mir, done, schedule(done.main, target, notes=layouts), schedule(done.bind, target), target)


# -- text -------------------------------------------------------------------------------------------------------------
def lir_lines(lir: LirModule, sizes: Mapping[str, int]) -> list[str]:
    """A planned module as text: programs, arena, fusion report, and the optimised graph."""
    program = lir.main
    launches = f"{len(program.launches)} launch{'' if len(program.launches) == 1 else 'es'}"
    lines = [
        f"lir @{program.name}: {launches} of {count_of(len(program.kernels()), 'kernel')} for {lir.target.name}",
        f"  fingerprint: {program.fingerprint()}",
        f"  arena: {_arena_text(lir, sizes)}",
        f"  derived weights: {', '.join(lir.optimised.derived) or 'none'}",
    ]
    for kind, entries in program.manifest().items():
        lines.append(f"  {kind}: {', '.join(f'{name}: {type_}' for name, type_ in entries.items()) or 'none'}")
    lines += ["", str(lir.optimised.report), "", program.text()]
    if lir.bind.launches:
        lines += ["", lir.bind.text()]
    return [*lines, "", "--- mir ---", lir.optimised.main.text(origins=True)]


def _arena_text(lir: LirModule, sizes: Mapping[str, int]) -> str:
    naive = lir.naive_bytes()
    missing = [s for s in lir.main.symbols if s not in sizes]
    if missing:
        return f"at most {naive} bytes, by {', '.join(missing)}"
    plan = lir.arena(sizes)
    return f"{plan.size} bytes (least possible {plan.bound}, {evaluate(naive, sizes)} without sharing)"


def count_of(count: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
