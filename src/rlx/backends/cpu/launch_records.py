"""The records of a program: what the driver walks, as memory.

`Records` has the steps of a program and the words of their arguments, numbered once (`layout.py`). `fill` writes what
depends on sizes and addresses: how often loops run, and how far the addresses in them move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.backends.cpu import driver

Words = np.ndarray[Any, np.dtype[np.int64]]
ENDLESS = 1 << 62  # steps of a loop that only its predicate ends
GUESSED_STEPS = 16  # of such a loop, where it is weighed against others
# What decides whether threads share a loop: what a barrier costs them, and how fast one of them works, in nanoseconds.
# Measured 80 ns on a quiet machine; a busy one takes longer, while a loop on one thread is never slow for that.
BARRIER, FLOP, BYTE = 200.0, 1 / 50, 1 / 90
FUNCTION, ARGUMENTS, UNITS, FLAGS = range(driver.RECORD_WORDS)


@dataclass(frozen=True, slots=True)
class Mark:
    """A step of the walk: its kind as the driver has it, the launch or control that it is of, and the loops around."""

    kind: int
    number: int
    loops: tuple[int, ...] = ()


@dataclass
class Moves:
    """Words that a loop moves: their positions, and how far, as numbers in the size table."""

    positions: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


@dataclass
class LoopPlan:
    """A loop in the records: its edges, the words that a thread copies, and those of them that move."""

    number: int  # among the loops
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


@dataclass
class Records:
    """The walk through a program, numbered: records, and the position of the first word of each."""

    walk: list[Mark]
    starts: list[int]
    word_count: int
    loops: dict[int, LoopPlan]  # by number of the control
    private_bytes: int  # of a thread's scratch
    template: Words  # what depends on nothing: kinds, flags, where branches go
    shared: list[int]  # records whose arguments are places in the words
    private: list[int]  # records whose arguments are places in a thread's copy
    work: dict[int, tuple[int, int, int]]  # flops, bytes, units of launches in loops: size numbers
    launches: list[int]  # the records that are launches

    def solo(self, values: Sequence[int], steps: Sequence[int], threads: int) -> list[bool]:
        """Which loops one thread runs alone, because barriers would cost more than sharing the work could save."""
        saved, barriers = [0.0] * len(self.loops), [0] * len(self.loops)
        for record, step in enumerate(self.walk):
            if not step.loops:
                continue
            inner = self.loops[step.loops[-1]].number
            barriers[inner] += bool(self.template[record, FLAGS] & driver.BARRIER_AFTER)
            if step.kind == driver.LAUNCH:
                flops, moved, units = (values[i] for i in self.work[step.number])
                alone = max(flops * FLOP, moved * BYTE)
                saved[inner] += alone - alone / max(1, min(threads, units))
            elif step.kind == driver.LEAVE and step.number in self.loops:
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
