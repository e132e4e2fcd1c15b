"""The launch records of a program: the memory that the driver walks.

`Records` has the steps of a program and the words of their arguments, numbered once (`program_layout.py`). `fill`
writes what depends on sizes and addresses: trip counts of loops, and how far the addresses in them move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import numpy as np

from rlx.backends.cpu import driver
from rlx.fast_dataclass import dataclass

Words = np.ndarray[Any, np.dtype[np.int64]]
ENDLESS = 1 << 62  # steps of a loop that only its predicate ends
GUESSED_STEPS = 16  # assumed steps of such a loop in cost estimates
# Costs that decide whether threads share a loop, in nanoseconds: of a barrier, and of work on one thread. A barrier
# measured 80 ns on a quiet machine; a busy one takes longer, but that never slows down a loop on one thread.
BARRIER, FLOP, BYTE = 200.0, 1 / 50, 1 / 90
FUNCTION, ARGUMENTS, UNITS, FLAGS = range(driver.RECORD_WORDS)


@dataclass(frozen=True, slots=True)
class Mark:
    """A step of the walk: its kind in the driver's encoding, its launch or control, and the enclosing loops."""

    kind: int
    number: int
    loops: tuple[int, ...] = ()


@dataclass
class Moves:
    """Words that a loop moves: their positions, and the distance as an index in the size table."""

    positions: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


@dataclass
class LoopPlan:
    """A loop in the records: its edges, the words that each thread copies, and those of them that move."""

    number: int  # index among the loops
    outer: LoopPlan | None
    low: int  # the words of its launches are [low, high)
    enter: int  # record numbers
    high: int = 0
    exit: int = 0
    leave: int = 0
    home: int = 0  # where its words are copied to, from the start of the private part of a thread's scratch
    inside: tuple[int, ...] = ()  # the enclosing loops
    linear: Moves = field(default_factory=Moves)
    alternating: Moves = field(default_factory=Moves)

    def place(self, position: int) -> int:
        """Where the copy of a word is; the first word counts the steps."""
        return self.home + 8 * (1 + position - self.low)


@dataclass
class Records:
    """The walk through a program, numbered: records, and the position of each one's first word."""

    walk: list[Mark]
    first_words: list[int]
    word_count: int
    loops: dict[int, LoopPlan]  # by control number
    private_bytes: int  # per thread, in scratch
    template: Words  # what depends on neither sizes nor addresses: kinds, flags, branch targets
    shared: list[int]  # records whose arguments are in the shared words
    private: list[int]  # records whose arguments are in a thread's copy
    work: dict[int, tuple[int, int, int]]  # flops, bytes, units of launches in loops, as indices of sizes
    launches: list[int]  # records that are launches

    def solo(self, values: Sequence[int], steps: Sequence[int], threads: int) -> list[bool]:
        """Which loops one thread runs alone, because barriers would cost more than sharing the work saves."""
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
        solo: list[bool] = []
        for plan in self.loops.values():
            inside_solo = any(solo[self.loops[outer].number] for outer in plan.inside)
            solo.append(not inside_solo and saved[plan.number] <= barriers[plan.number] * BARRIER)
        return solo

    def block_words(self) -> int:
        """Number of words that `fill` writes besides the records."""
        moves = sum(len(m.positions) for plan in self.loops.values() for m in (plan.linear, plan.alternating))
        return driver.LOOP_WORDS * len(self.loops) + 2 * moves

    def fill(
        self, records: Words, blocks: Words, words: int, private: int, values: Sequence[int], steps: Sequence[int],
        solo: Sequence[bool],
    ) -> None:  # fmt: skip
        """Completes the records of a run context.

        `words` is an address, `private` the offset of loops in a thread's scratch, `values` are sizes; `steps` and
        `solo` give each loop's trip count and whether a single thread runs it.
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
