"""Executables that walk the steps of a LIR program: sizes, the arena, and the order in which launches run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from rlx.backends.base import ArrayType, Executable, Key
from rlx.backends.reports import RunMemory
from rlx.backends.run_time_errors import negative_shape
from rlx.lir.memory import Plan, lifetimes, plan
from rlx.lir.program import ENTER, JUMP, LAUNCH, LEAVE, NEXT, Branch, Loop, Program, Step
from rlx.lir.views import View
from rlx.target import Target
from rlx.types import concrete, evaluate

Holds = Callable[[View], bool]  # reads a predicate from device memory


class ProgramExecutable(Executable):
    """A program that the host walks through. Subclasses run launches, in the order of `run_order`."""

    threads = 1
    alignment: ClassVar[int] = 1  # of buffers in the arena, in bytes

    def __init__(self, program: Program, target: Target) -> None:
        self._program, self.target = program, target
        self.symbols, self.reads = program.symbols, tuple(program.weights)
        self._weights: Mapping[str, Any] = {}
        self._lifetimes = lifetimes(program)
        self._steps = list(program.steps())
        self._edges = {(s.kind, s.number): i for i, s in enumerate(self._steps) if s.kind != LAUNCH}

    @property
    def program(self) -> Program:
        return self._program

    @property
    def weights(self) -> Mapping[str, Any]:
        return self._weights

    def bind(self, weights: Mapping[str, Any]) -> None:
        self._weights = dict(weights)

    def image(self) -> Program:
        """The program is all there is to store."""
        return self._program

    # -- sizes --
    def sizes(self, key: Key) -> dict[str, int]:
        """The values of the symbols, by name."""
        return dict(zip(self.symbols, key, strict=True))

    def outputs(self, key: Key) -> list[ArrayType]:
        sizes = self.sizes(key)
        types = [self._program.buffers[name].type for name in self._program.outputs]
        result = [(concrete(t.array_shape, sizes), t.dtype.numpy) for t in types]
        for i, (shape, _) in enumerate(result):
            if min(shape, default=0) < 0:
                raise negative_shape(i, shape)
        return result

    def plan(self, sizes: Mapping[str, int]) -> Plan:
        """Where temporary buffers are in the arena."""
        types = {x.name: self._program.buffers[x.name].type for x in self._lifetimes}
        rounded = {name: -(-evaluate(t.bytes, sizes) // self.alignment) * self.alignment for name, t in types.items()}
        return plan(self._lifetimes, rounded)

    def memory(self, key: Key) -> RunMemory:
        return RunMemory(key, self.plan(self.sizes(key)), 0)

    # -- order --
    def run_order(self, sizes: dict[str, int], holds: Holds) -> Iterator[Step]:
        """Yields the steps of a run as they happen: launches, and the edges of loops and branches.

        Keeps the step and parity of each loop in `sizes`; asks `holds` for a predicate once the steps before it are
        consumed.
        """
        position = 0
        while position < len(self._steps):
            step = self._steps[position]
            yield step
            position = position + 1 if step.kind == LAUNCH else self._follow(step, position, sizes, holds)

    def _follow(self, step: Step, position: int, sizes: dict[str, int], holds: Holds) -> int:
        """The position after an edge of a loop or branch."""
        control = self._program.controls[step.number]
        match step.kind, control:
            case "enter", Loop():
                sizes[control.symbol] = sizes[control.parity] = 0
                return position + 1 if _has_next(control, sizes) else self._edges[NEXT, step.number] + 1
            case "next", Loop():
                sizes[control.symbol] += 1
                sizes[control.parity] ^= 1
                if _has_next(control, sizes):
                    return self._edges[ENTER, step.number] + 1
            case "test", Loop(predicate=View() as predicate) if not holds(predicate):
                return self._edges[NEXT, step.number] + 1
            case "test", Branch() if not holds(control.predicate):
                return self._edges[JUMP, step.number] + 1
            case "jump", _:
                return self._edges[LEAVE, step.number]
        return position + 1


def _has_next(loop: Loop, sizes: Mapping[str, int]) -> bool:
    """Whether the loop's length allows another step."""
    return loop.length is None or sizes[loop.symbol] < evaluate(loop.length, sizes)
