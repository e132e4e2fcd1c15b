"""Executables whose host walks through a LIR program: sizes, memory, the order of launches, and faults.

A subclass implements `launch`, which runs one kernel. One that does not work launch by launch, such as CUDA's, which
replays a captured graph, overrides `run` and `trace` and uses the parts: `sizes`, `outputs`, `plan`, `run_order`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import Allocator, ArrayType, Executable, Key, backend_of, bytes_of
from rlx.backends.reports import RunMemory, Trace
from rlx.backends.run_time_errors import check_sizes, fault, negative_shape
from rlx.fork_safe_locks import cached_property
from rlx.lir import program as program_records
from rlx.lir.memory import Plan, lifetimes, plan
from rlx.lir.program import ENTER, JUMP, LAUNCH, LEAVE, NEXT, Branch, Launch, Loop, Program, Step
from rlx.lir.views import View
from rlx.lir.wrong_index import strided
from rlx.target import Target
from rlx.types import concrete, evaluate

Holds = Callable[[View], bool]  # reads a predicate from device memory
Memory = Mapping[str, Any]  # the device's buffers, by their names in the program


class ProgramExecutable(Executable):
    """A program that the host walks through, from any number of threads at once. Subclasses implement `launch`.

    `allocator` is by default that of the target's backend.
    """

    threads = 1
    alignment: ClassVar[int] = 1  # of buffers in the arena, in bytes

    def __init__(self, program: Program, target: Target, allocator: Allocator | None = None) -> None:
        self._program, self.target = program, target
        self._allocator = allocator
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

    def image(self) -> Any | None:
        """The program, if the backend stores programs: if its `image_modules` include `rlx.lir.program`."""
        return self._program if program_records in backend_of(self.target).image_modules() else None

    # -- running --
    def launch(self, launch: Launch, sizes: Mapping[str, int], memory: Memory) -> int:
        """Runs a kernel and waits for it. Returns the code of the first `Check` that did not hold; 0 if all did.

        `launch.words` are in the order of `kernel.words`: views are operands, `evaluate(word, sizes)` gives the other
        integers; `sizes` include the steps of loops. `memory[view.buffer]` is the buffer of a view: temporary ones are
        parts of the arena, so they are bytes, and the view says their element type.
        """
        raise NotImplementedError(f"{type(self).__name__} implements neither launch nor run")

    def check_memory(self, needed: int) -> None:
        """Raises ResourceError if a run cannot allocate `needed` bytes; by default the allocator finds out."""

    def run(self, key: Key, inputs: Sequence[Any]) -> list[Any]:
        return self.trace(key, inputs)[0]

    def trace(self, key: Key, inputs: Sequence[Any]) -> tuple[list[Any], Trace]:
        """Checks assertions, allocates the arena and the outputs, and runs all steps. Raises the faults of kernels."""
        program, sizes = self._program, self.sizes(key)
        check_sizes(program, sizes)
        outputs, memory = self._allocate(key, inputs)
        launches, controls = np.zeros((len(program.launches), 1, 2)), np.zeros((len(program.controls), 1, 2))
        steps = {i: 0 for i, control in enumerate(program.controls) if isinstance(control, Loop)}

        def read(view: View) -> Array:
            return self._elements(view, sizes, memory)

        for step in self.run_order(sizes, lambda predicate: bool(read(predicate).reshape(-1)[0])):
            begin = time.perf_counter()
            times = (launches if step.kind == LAUNCH else controls)[step.number, 0]
            times[0] = times[0] or begin
            if step.kind == LAUNCH:
                launch = program.launches[step.number]
                code = self.launch(launch, sizes, memory)
                if code:
                    raise fault(program, launch, code, sizes, lambda word, view: read(view))
                times[1] = (times[1] or times[0]) + time.perf_counter() - begin
            elif step.kind == LEAVE:
                times[1] = begin
            elif step.kind == NEXT:
                steps[step.number] += 1
        return outputs, Trace(launches, controls, steps)

    def _allocate(self, key: Key, inputs: Sequence[Any]) -> tuple[list[Any], Memory]:
        """New outputs, and the buffers of a run by name."""
        program, allocator = self._program, self.allocator
        types, arena = self.outputs(key), self.plan(self.sizes(key))
        self.check_memory(arena.size + bytes_of(types))
        outputs = [allocator.zeros(shape, dtype) for shape, dtype in types]
        room = allocator.zeros((arena.size,), np.dtype(np.uint8))
        memory = {n: allocator.part(room, slice(at, at + arena.sizes[n])) for n, at in arena.offsets.items()}
        memory |= self._constant_buffers
        memory |= zip((*program.inputs, *program.outputs), (*inputs, *outputs), strict=True)
        return outputs, memory | {name: self._weights[name] for name in self.reads}

    def _elements(self, view: View, sizes: Mapping[str, int], memory: Memory) -> Array:
        """The elements of a view, downloaded."""
        data = self.allocator.download(memory[view.buffer]).reshape(-1).view(np.uint8)
        elements = data[: len(data) // view.dtype.size * view.dtype.size].view(view.dtype.numpy)
        return strided(elements[evaluate(view.offset, sizes) :], view, sizes)

    @property
    def allocator(self) -> Allocator:
        return self._allocator or backend_of(self.target).allocator

    @cached_property
    def _constant_buffers(self) -> Memory:
        """Constants of the program, uploaded on first use."""
        values = {name: b.value.data for name, b in self._program.buffers.items() if b.value is not None}
        return {name: self.allocator.upload(np.ascontiguousarray(data)) for name, data in values.items()}

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

    def plan(self, sizes: Mapping[str, int], joined: Collection[int] = ()) -> Plan:
        """Where temporary buffers are in the arena; `joined`: launches that run as one with the next one."""
        lives = lifetimes(self._program, joined) if joined else self._lifetimes
        types = {x.name: self._program.buffers[x.name].type for x in lives}
        rounded = {name: -(-evaluate(t.bytes, sizes) // self.alignment) * self.alignment for name, t in types.items()}
        return plan(lives, rounded)

    def units(self, key: Key) -> list[int]:
        sizes = self.sizes(key)
        return [evaluate(launch.units or 0, sizes) for launch in self._program.launches]

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
