"""The arena planner: assigns an offset to each temporary buffer, for concrete sizes.

Lifetimes count barrier phases, not launches: between two barriers threads may run ahead of each other, so buffers that
are live in the same phase never share memory. Inputs and outputs of a loop are live for the entire loop.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from rlx.fast_dataclass import dataclass

if TYPE_CHECKING:  # with cached lifetimes, planning needs no program
    from rlx.lir.program import Control, Program

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer's live phases, from the first write to the last use, both inclusive."""

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class Plan:
    """Offsets in the arena, its size, and a lower bound on the size of any plan."""

    offsets: Mapping[str, int]
    size: int
    bound: int
    sizes: Mapping[str, int] = field(repr=False)


@dataclass
class _Span:
    """The range of steps and phases of a loop or branch, both ends inclusive."""

    control: Control
    steps: list[int]
    phases: list[int]


def lifetimes(program: Program, joined: Collection[int] = ()) -> list[Lifetime]:
    """The lifetime of each arena buffer, in order of first use.

    `joined`: launches that run as one with the next one, so there is no barrier between them.
    """
    from rlx.lir.program import ARENA, LAUNCH, LEAVE, NEXT, TEST, Loop

    touched: dict[str, list[tuple[int, int]]] = {}  # (step, phase)
    spans: dict[int, _Span] = {}
    phase = 0
    for number, step in enumerate(program.steps()):
        views, barrier = [], False
        if step.kind == LAUNCH:
            launch = program.launches[step.number]
            views, barrier = launch.views(), launch.barrier and step.number not in joined
        else:
            control = program.controls[step.number]
            span = spans.setdefault(step.number, _Span(control, [number, number], [phase, phase]))
            span.steps[1], span.phases[1] = number, phase
            if step.kind == TEST and control.predicate is not None:
                views = [control.predicate]
            elif step.kind == NEXT and isinstance(control, Loop):
                barrier = control.between
            elif step.kind == LEAVE:
                barrier = control.barrier
        for view in views:
            if program.buffers[view.buffer].kind == ARENA:
                touched.setdefault(view.buffer, []).append((number, phase))
        phase += barrier
    return [_lifetime(name, at, spans.values()) for name, at in touched.items()]


def _lifetime(name: str, touched: list[tuple[int, int]], spans: Iterable[_Span]) -> Lifetime:
    first, last = touched[0][1], touched[-1][1]
    for span in spans:
        begin, end = span.steps
        inside = [phase for step, phase in touched if begin <= step <= end]
        if inside and (len(inside) < len(touched) or _lives_throughout(name, inside, span)):
            first, last = min(first, span.phases[0]), max(last, span.phases[1])
    return Lifetime(name, first, last)


def _lives_throughout(name: str, phases: list[int], span: _Span) -> bool:
    """Whether a buffer used only inside a loop or branch is live for all of it.

    True for the predicate, which a thread may still read after another has moved on, and, in a loop without a barrier
    between steps, for buffers used at the start or end of a step, where threads in different steps overlap.
    """
    from rlx.lir.program import Loop

    if span.control.predicate is not None and span.control.predicate.buffer == name:
        return True
    at_an_end = phases[0] == span.phases[0] or phases[-1] == span.phases[1]
    return isinstance(span.control, Loop) and not span.control.between and at_an_end


def plan(lives: Sequence[Lifetime], sizes: Mapping[str, int]) -> Plan:
    """The better of two cheap plans: best fit in time order, and first fit by decreasing size."""
    # A body that does not run may have negative sizes.
    rounded = {x.name: max(0, -(-sizes[x.name] // ALIGNMENT) * ALIGNMENT) for x in lives}
    bound = liveness_bound(lives, rounded)
    best = _in_time_order(lives, rounded)
    if best[1] > bound:
        best = min(best, _largest_first(lives, rounded), key=lambda p: p[1])
    return Plan(best[0], best[1], bound, rounded)


def liveness_bound(lives: Sequence[Lifetime], sizes: Mapping[str, int]) -> int:
    """The peak number of live bytes."""
    change: dict[int, int] = {}
    for x in lives:
        change[x.first] = change.get(x.first, 0) + sizes[x.name]
        change[x.last + 1] = change.get(x.last + 1, 0) - sizes[x.name]
    total = peak = 0
    for phase in sorted(change):
        total += change[phase]
        peak = max(peak, total)
    return peak


def _in_time_order(lives: Sequence[Lifetime], sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Best fit among free blocks; adjacent free blocks are merged."""
    offsets: dict[str, int] = {}
    free: list[tuple[int, int]] = []  # (offset, size), sorted
    ending: list[tuple[int, str]] = []  # (last phase, name), sorted
    top = 0
    for life in sorted(lives, key=lambda x: (x.first, -sizes[x.name])):
        while ending and ending[0][0] < life.first:
            _, name = ending.pop(0)
            _release(free, offsets[name], sizes[name])
        size = sizes[life.name]
        fitting = [block for block in free if block[1] >= size]
        if fitting:
            at, room = min(fitting, key=lambda block: (block[1], block[0]))
            free.remove((at, room))
            if room > size:
                bisect.insort(free, (at + size, room - size))
        else:
            at = top
            if free and free[-1][0] + free[-1][1] == top:  # the last free block ends at the top: extend it
                at = free.pop()[0]
            top = at + size
        offsets[life.name] = at
        bisect.insort(ending, (life.last, life.name))
    return offsets, top


def _release(free: list[tuple[int, int]], at: int, size: int) -> None:
    if size == 0:
        return
    index = bisect.bisect(free, (at, size))
    if index < len(free) and free[index][0] == at + size:
        size += free.pop(index)[1]
    if index and free[index - 1][0] + free[index - 1][1] == at:
        before = free.pop(index - 1)
        at, size = before[0], before[1] + size
    bisect.insort(free, (at, size))


def _largest_first(lives: Sequence[Lifetime], sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Place each buffer, by decreasing size, at the lowest offset that overlaps no simultaneously live buffer."""
    offsets: dict[str, int] = {}
    taken: list[list[tuple[int, int]]] = [[] for _ in range(max((x.last + 1 for x in lives), default=0))]  # by phase
    top = 0
    for life in sorted(lives, key=lambda x: (-sizes[x.name], x.first)):
        phases = taken[life.first : life.last + 1]
        size, at = sizes[life.name], 0
        for start, end in sorted({span for phase in phases for span in phase}):
            if start - at >= size:
                break
            at = max(at, end)
        offsets[life.name] = at
        top = max(top, at + size)
        for phase in phases:
            phase.append((at, at + size))
    return offsets, top
