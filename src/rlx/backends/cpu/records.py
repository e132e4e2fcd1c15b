"""The records of a program: what the driver walks, as memory.

`Records` numbers the steps of a program and the words of their arguments, once. `fill` writes what depends on sizes and
addresses: how often loops run, and how far the addresses in them move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.backends.cpu import driver
from rlx.lir.program import ENTER, JUMP, LAUNCH, LEAVE, NEXT, TEST, Loop, Program
from rlx.lir.views import View, moving
from rlx.types import Size

Words = np.ndarray[Any, np.dtype[np.int64]]
ENDLESS = 1 << 62  # steps of a loop that only its predicate ends
GUESSED_STEPS = 16  # of such a loop, where it is weighed against others
# What decides whether threads share a loop: what a barrier costs them, and how fast one of them works, in nanoseconds.
# Measured 80 ns on a quiet machine; a busy one takes longer, while a loop on one thread is never slow for that.
BARRIER, FLOP, BYTE = 200.0, 1 / 50, 1 / 90
FUNCTION, ARGUMENTS, UNITS, FLAGS = range(driver.RECORD_WORDS)
_KINDS = {
    LAUNCH: driver.LAUNCH, ENTER: driver.ENTER, NEXT: driver.NEXT, TEST: driver.TEST, JUMP: driver.JUMP,
    LEAVE: driver.LEAVE,
}  # fmt: skip


@dataclass
class Moves:
    """Words that a loop moves: their positions, and how far, as numbers in the size table."""

    positions: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


@dataclass
class LoopPlan:
    """A loop in the records: its edges, the words that a thread copies, and those of them that move."""

    number: int  # among the loops
    loop: Loop
    outer: LoopPlan | None
    low: int  # the words of its launches are [low, high)
    enter: int  # records
    high: int = 0
    exit: int = 0
    leave: int = 0
    home: int = 0  # where its words are copied to, from the start of the private part of a thread's scratch
    inside: tuple[int, ...] = ()  # the loops around it
    linear: Moves = field(default_factory=Moves)
    alternating: Moves = field(default_factory=Moves)

    def place(self, position: int) -> int:
        """Where the copy of a word is; the first word counts the steps."""
        return self.home + 8 * (1 + position - self.low)


class Records:
    """The walk through a program, numbered: records, and the position of the first word of each."""

    def __init__(self, program: Program) -> None:
        self.walk = list(program.steps())
        self.launches = [record for record, step in enumerate(self.walk) if step.kind == LAUNCH]
        self.loops: dict[int, LoopPlan] = {}  # by number of the control
        self.symbols = {s: number for number, c in enumerate(program.controls) for s in c.symbols}
        self.starts: list[int] = []
        self.word_count = 0
        for record, step in enumerate(self.walk):
            self.starts.append(self.word_count)
            control = None if step.kind == LAUNCH else program.controls[step.number]
            if control is None:
                self.word_count += len(program.launches[step.number].kernel.words)
            elif step.kind == TEST:
                self.word_count += 1
            elif isinstance(control, Loop):
                self._edge(record, step.kind, step.number, control, step.loops)
        self.private_bytes = 0
        for plan in self.loops.values():
            plan.home = self.private_bytes
            self.private_bytes = plan.place(plan.high)
        self.work: dict[int, tuple[int, int, int]] = {}  # flops, bytes, units of launches in loops: size numbers
        self.template = np.zeros((len(self.walk), driver.RECORD_WORDS), np.int64)
        self._write(program)

    def _edge(self, record: int, kind: str, number: int, loop: Loop, inside: Sequence[int]) -> None:
        if kind == ENTER:
            outer = self.loops[inside[-1]] if inside else None
            self.loops[number] = LoopPlan(len(self.loops), loop, outer, self.word_count, record, inside=tuple(inside))
        elif kind == NEXT:
            self.loops[number].exit = record + 1
        elif kind == LEAVE:
            self.loops[number].leave, self.loops[number].high = record, self.word_count

    def _write(self, program: Program) -> None:
        """What depends on nothing: kinds, flags, where branches go. Arguments are places in the words or in a copy."""
        self.shared = [r for r, step in enumerate(self.walk) if step.kind in (LAUNCH, TEST) and not step.loops]
        self.private = [r for r, step in enumerate(self.walk) if step.kind in (LAUNCH, TEST) and step.loops]
        tests: dict[int, int] = {}  # the records at which branches test and jump
        jumps: dict[int, int] = {}
        for record, (step, row) in enumerate(zip(self.walk, self.template, strict=True)):
            row[FLAGS] = _KINDS[step.kind]
            if step.kind in (LAUNCH, TEST):
                start = self.starts[record]
                row[ARGUMENTS] = self.loops[step.loops[-1]].place(start) if step.loops else 8 * start
                row[FLAGS] |= driver.PRIVATE if step.loops else 0
            if step.kind == LAUNCH:
                row[FLAGS] |= driver.BARRIER_AFTER if program.launches[step.number].barrier else 0
                continue
            control = program.controls[step.number]
            if step.kind == LEAVE:
                row[FLAGS] |= driver.BARRIER_AFTER if control.barrier else 0
            if isinstance(control, Loop):
                plan = self.loops[step.number]
                row[FUNCTION] = {TEST: plan.exit, LEAVE: plan.enter}.get(step.kind, 0)
                if step.kind == NEXT:
                    row[FLAGS] |= driver.BARRIER_AFTER if control.between else 0
                    row[FLAGS] |= driver.ENDS if control.last < control.end else 0
            elif step.kind == TEST:
                tests[step.number] = record
            elif step.kind == JUMP:
                jumps[step.number] = record
                self.template[tests[step.number], FUNCTION] = record + 1
            else:
                self.template[jumps[step.number], FUNCTION] = record
                row[FUNCTION] = tests[step.number]

    def move(self, view: View, position: int, number: Callable[[Size], int]) -> None:
        """Note how the word moves that has the address of a view; `number` is that of a size in the table."""
        for symbol, step in moving(view.offset, self.symbols).items():
            plan = self.loops[self.symbols[symbol]]
            moves = plan.alternating if symbol == plan.loop.parity else plan.linear
            moves.positions.append(position)
            moves.steps.append(number(step * view.dtype.size))

    def weigh(self, program: Program, number: Callable[[Size], int]) -> None:
        """Note what the launches in loops do; `number` is of a size in the table."""
        for step in self.walk:
            if step.kind == LAUNCH and step.loops:
                launch = program.launches[step.number]
                self.work[step.number] = number(launch.flops), number(launch.bytes), number(launch.units)

    def solo(self, values: Sequence[int], steps: Sequence[int], threads: int) -> list[bool]:
        """Which loops one thread runs alone, because barriers would cost more than sharing the work could save."""
        saved, barriers = [0.0] * len(self.loops), [0] * len(self.loops)
        for record, step in enumerate(self.walk):
            if not step.loops:
                continue
            inner = self.loops[step.loops[-1]].number
            barriers[inner] += bool(self.template[record, FLAGS] & driver.BARRIER_AFTER)
            if step.kind == LAUNCH:
                flops, moved, units = (values[i] for i in self.work[step.number])
                alone = max(flops * FLOP, moved * BYTE)
                saved[inner] += alone - alone / max(1, min(threads, units))
            elif step.kind == LEAVE and step.number in self.loops:
                own = self.loops[step.number].number
                times = min(steps[own], GUESSED_STEPS) if steps[own] == ENDLESS else steps[own]
                saved[inner] += saved[own] * times
                barriers[inner] += barriers[own] * times
        found: list[bool] = []
        for plan in self.loops.values():
            taken = any(found[self.loops[outer].number] for outer in plan.inside)
            found.append(not taken and saved[plan.number] <= barriers[plan.number] * BARRIER)
        return found

    def block_words(self) -> int:
        """Words of the memory that `fill` writes beside the records."""
        moves = sum(len(m.positions) for plan in self.loops.values() for m in (plan.linear, plan.alternating))
        return driver.LOOP_WORDS * len(self.loops) + 2 * moves

    def fill(
        self, records: Words, blocks: Words, words: int, private: int, values: Sequence[int], steps: Sequence[int],
        solo: Sequence[bool],
    ) -> None:  # fmt: skip
        """Finish the records of an instance. `words` is an address, `private` the place of loops in a thread's scratch,
        `values` are sizes; of each loop, `steps` and `solo` say how often it runs and whether on one thread.
        """
        records[self.private, ARGUMENTS] = self.template[self.private, ARGUMENTS] + private
        base = int(blocks.ctypes.data)
        at = driver.LOOP_WORDS * len(self.loops)
        for plan, count in zip(self.loops.values(), steps, strict=True):
            first = driver.LOOP_WORDS * plan.number
            records[[plan.enter, plan.exit - 1], ARGUMENTS] = base + 8 * first
            edges = [plan.enter, plan.leave]
            records[edges, FLAGS] = self.template[edges, FLAGS] | (driver.SOLO if solo[plan.number] else 0)
            outer = plan.outer
            source = words + 8 * plan.low if outer is None else private + outer.place(plan.low)
            blocks[first : first + driver.LOOP_WORDS] = [
                count, source, int(outer is not None), private + plan.home, plan.high - plan.low, base + 8 * at,
                len(plan.linear.positions), len(plan.alternating.positions), plan.enter + 1, plan.exit, plan.leave,
            ]  # fmt: skip
            for moves in (plan.linear, plan.alternating):
                for position, size in zip(moves.positions, moves.steps, strict=True):
                    blocks[at : at + 2] = plan.place(position) - plan.home, values[size]
                    at += 2
