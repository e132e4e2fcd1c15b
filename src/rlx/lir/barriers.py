"""Barriers: where threads wait for each other because one launch depends on another."""

from __future__ import annotations

from dataclasses import field, replace

from rlx.fast_dataclass import dataclass
from rlx.lir.program import ENTER, LAUNCH, LEAVE, NEXT, TEST, Loop, Program
from rlx.lir.views import View, offset_steps


def place_barriers(program: Program) -> None:
    """Place a barrier before each launch that conflicts with the launches since the last barrier.

    Two launches conflict if one writes what the other reads or writes. Loops and branches have barriers on both sides,
    so it does not matter whether or how often they run.
    """
    _Barriers(program).place()


@dataclass
class _Pending:
    """Memory that launches since the last barrier have touched, as (buffer, parity symbol, row).

    A carry has two rows in one buffer; each step reads one and writes the other. An empty symbol means the entire
    buffer.
    """

    read: set[tuple[str, str, int]] = field(default_factory=set)
    written: set[tuple[str, str, int]] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.read or self.written)

    def conflicts(self, other: _Pending) -> bool:
        return _overlap(self.written, other.read | other.written) or _overlap(self.read, other.written)

    def add(self, other: _Pending) -> None:
        self.read |= other.read
        self.written |= other.written

    def in_next_step(self, loop: Loop) -> _Pending:
        """The same memory as seen from the next step of a loop: the two rows of each carry swap roles."""

        def swap_rows(places: set[tuple[str, str, int]]) -> set[tuple[str, str, int]]:
            return {(b, s, 1 - row if s == loop.parity else row) for b, s, row in places}

        return _Pending(swap_rows(self.read), swap_rows(self.written))


def _overlap(a: set[tuple[str, str, int]], b: set[tuple[str, str, int]]) -> bool:
    if {x[0] for x in a}.isdisjoint(y[0] for y in b):
        return False
    return any(x[0] == y[0] and (x[1] != y[1] or x[2] == y[2]) for x in a for y in b)


class _Barriers:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.steps = list(program.steps())
        self.parities = [c.parity for c in program.controls if isinstance(c, Loop)]
        self.touches = [
            _Pending(*({self._place(v) for v in launch.views(written=side)} for side in (False, True)))
            for launch in program.launches
        ]

    def _place(self, view: View) -> tuple[str, str, int]:
        for symbol, step in offset_steps(view.offset, self.parities).items():
            leading = step if isinstance(step, int) else step.terms[0][1]
            return view.buffer, symbol, 0 if leading > 0 else 1  # a positive step: the row read; negative: written
        return view.buffer, "", 0

    def place(self) -> None:
        launches, controls = self.program.launches, self.program.controls
        pending = _Pending()
        for number, step in enumerate(self.steps):
            if step.kind == LAUNCH:
                touched = self.touches[step.number]
                if pending.conflicts(touched):
                    launches[step.number - 1] = replace(launches[step.number - 1], barrier=True)
                    pending = _Pending()
                pending.add(touched)
                continue
            control = controls[step.number]
            if step.kind in (ENTER, TEST) and pending:
                before = self.steps[number - 1].number  # always a launch: nothing is pending after a control step
                launches[before] = replace(launches[before], barrier=True)
            elif step.kind == NEXT and isinstance(control, Loop):
                between = control.predicate is not None or self._wraps(number, control, pending)
                controls[step.number] = replace(control, between=between)
            elif step.kind == LEAVE and number != len(self.steps) - 1:  # the end of the program is a barrier anyway
                controls[step.number] = replace(control, barrier=True)
            pending = _Pending()

    def _wraps(self, number: int, loop: Loop, pending: _Pending) -> bool:
        """Whether the end of one step conflicts with the beginning of the next."""
        pending = pending.in_next_step(loop)
        own = self.steps[number].number
        first = next(i for i, step in enumerate(self.steps) if step.kind == ENTER and step.number == own)
        for step in self.steps[first + 1 : number]:
            if step.kind != LAUNCH:
                return bool(pending)
            if pending.conflicts(self.touches[step.number]):
                return True
            if self.program.launches[step.number].barrier:
                return False
        return False
