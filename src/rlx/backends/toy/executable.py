"""The executable: a LIR program, the Python functions of its kernels, and memory. A run walks the program's steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import ArrayType, Executable, Key, bytes_of
from rlx.backends.reports import RunMemory, Trace
from rlx.backends.run_time_errors import check_sizes, fault
from rlx.backends.toy.emitter import function
from rlx.backends.toy.memory import ToyBuffer
from rlx.errors import BindError, LowerError
from rlx.free_memory import require
from rlx.lir.loops import LoopKernel
from rlx.lir.memory import Plan, lifetimes, plan
from rlx.lir.program import ENTER, JUMP, LAUNCH, LEAVE, NEXT, Branch, Launch, Loop, Program, Step
from rlx.lir.views import View
from rlx.lir.wrong_index import strided
from rlx.target import Target
from rlx.types import concrete, evaluate


class ToyExecutable(Executable):
    """Runs a program from any number of threads at once: a run changes only its own state."""

    threads = 1

    def __init__(self, program: Program, target: Target) -> None:
        for kernel in program.kernels().values():
            if not isinstance(kernel, LoopKernel):
                hint = "give the target a loop form for it, see lir/forms"
                raise LowerError(f"toy: program {program.name!r} has a kernel of kind {kernel.kind!r}", hint=hint)
            function(kernel)
        self._program, self.target = program, target
        self.symbols, self.reads = program.symbols, tuple(program.weights)
        self._lives = lifetimes(program)
        self._walk = list(program.steps())
        self._edges = {(s.kind, s.number): i for i, s in enumerate(self._walk) if s.kind != LAUNCH}
        self._weights: Mapping[str, ToyBuffer] = {}
        values = {name: b.value.data for name, b in program.buffers.items() if b.value is not None}
        self._constants = {name: np.frombuffer(data.tobytes(), np.uint8) for name, data in values.items()}

    @property
    def program(self) -> Program:
        return self._program

    @property
    def weights(self) -> Mapping[str, ToyBuffer]:
        return self._weights

    def bind(self, weights: Mapping[str, Any]) -> None:
        self._weights = dict(weights)

    def image(self) -> Program:
        """The program is all there is to store; functions are compiled again from it."""
        return self._program

    # -- sizes --
    def outputs(self, key: Key) -> list[ArrayType]:
        sizes = dict(zip(self.symbols, key, strict=True))
        types = [self._program.buffers[name].type for name in self._program.outputs]
        types_at_sizes = [(concrete(t.array_shape, sizes), t.dtype.numpy) for t in types]
        for i, (shape, _) in enumerate(types_at_sizes):
            if min(shape, default=0) < 0:
                raise BindError(f"output {i}: its shape is {shape}", hint="a symbolic size came out negative")
        return types_at_sizes

    def memory(self, key: Key) -> RunMemory:
        return RunMemory(key, self._plan(dict(zip(self.symbols, key, strict=True))), 0)

    def _plan(self, sizes: Mapping[str, int]) -> Plan:
        buffers = self._program.buffers
        return plan(self._lives, {x.name: evaluate(buffers[x.name].type.bytes, sizes) for x in self._lives})

    def units(self, key: Key) -> list[int]:
        sizes = dict(zip(self.symbols, key, strict=True))
        return [evaluate(launch.units or 0, sizes) for launch in self._program.launches]

    # -- running --
    def run(self, key: Key, inputs: Sequence[Any]) -> list[ToyBuffer]:
        return self.trace(key, inputs)[0]

    def trace(self, key: Key, inputs: Sequence[Any]) -> tuple[list[ToyBuffer], Trace]:
        program, weights = self._program, self._weights
        sizes = dict(zip(self.symbols, key, strict=True))
        check_sizes(program, sizes)
        types, arena = self.outputs(key), self._plan(sizes)
        require(f"program {program.name!r}", arena.size + bytes_of(types), "smaller inputs")
        outputs = [ToyBuffer(np.zeros(shape, dtype)) for shape, dtype in types]
        room = np.zeros(arena.size, np.uint8)
        memory = {name: room[at : at + arena.sizes[name]] for name, at in arena.offsets.items()}
        memory |= self._constants | {name: weights[name].memory for name in self.reads}
        memory |= {name: buffer.memory for name, buffer in zip(program.inputs, inputs, strict=True)}
        memory |= {name: buffer.memory for name, buffer in zip(program.outputs, outputs, strict=True)}
        run = _Run(program, memory, sizes)
        with np.errstate(all="ignore"):
            position = 0
            while position < len(self._walk):
                position = self._step(run, position)
        return outputs, Trace(run.launches, run.controls, run.steps)

    def _step(self, run: _Run, position: int) -> int:
        """Executes one step of the walk; returns the position of the next."""
        step = self._walk[position]
        if step.kind == LAUNCH:
            run.launch(step.number)
            return position + 1
        control = self._program.controls[step.number]
        run.mark(step)
        match step.kind, control:
            case "enter", Loop():
                run.enter(control)
                return position + 1 if run.has_next(control) else self._edges[NEXT, step.number] + 1
            case "next", Loop():
                run.advance(step.number, control)
                if run.has_next(control):
                    return self._edges[ENTER, step.number] + 1
            case "test", Loop() if not run.holds(control.predicate):
                return self._edges[NEXT, step.number] + 1
            case "test", Branch() if not run.holds(control.predicate):
                return self._edges[JUMP, step.number] + 1
            case "jump", _:
                return self._edges[LEAVE, step.number]
        return position + 1


class _Run:
    """One run: memory by buffer, symbol values (including loop counters), and times."""

    def __init__(self, program: Program, memory: Mapping[str, Array], sizes: dict[str, int]) -> None:
        self.program, self.memory, self.sizes = program, memory, sizes
        self.launches = np.zeros((len(program.launches), 1, 2))
        self.controls = np.zeros((len(program.controls), 1, 2))
        self.steps = {i: 0 for i, control in enumerate(program.controls) if isinstance(control, Loop)}

    def launch(self, number: int) -> None:
        launch = self.program.launches[number]
        begin = time.perf_counter()
        assert isinstance(launch.kernel, LoopKernel) and launch.units is not None, "toy targets have portable forms"
        units = evaluate(launch.units, self.sizes)
        faults: list[int] = []
        try:
            function(launch.kernel)(units, faults, *self._words(launch))
        except IndexError:  # after a fault a kernel continues, possibly with an index out of range
            if not faults:
                raise
        if faults:
            raise fault(self.program, launch, faults[0], self.sizes, self._read)
        times = self.launches[number, 0]
        times[0] = times[0] or begin
        times[1] = (times[1] or times[0]) + time.perf_counter() - begin

    def _words(self, launch: Launch) -> list[Any]:
        """Memory and offset of each view, and numbers."""
        words: list[Any] = []
        for word in launch.words:
            assert word is not None, "loops have all their operands"
            words += self.place(word) if isinstance(word, View) else [evaluate(word, self.sizes)]
        return words

    def _read(self, word: str, view: View) -> Array:
        """The elements of an operand."""
        elements, offset = self.place(view)
        return strided(elements[offset:], view, self.sizes)

    def place(self, view: View) -> tuple[Array, int]:
        """The buffer of a view as elements of its type, and the view's offset."""
        memory, size = self.memory[view.buffer], view.dtype.size
        elements = memory[: len(memory) // size * size]
        return elements.view(view.dtype.numpy), evaluate(view.offset, self.sizes)

    def holds(self, predicate: View | None) -> bool:
        assert predicate is not None
        elements, at = self.place(predicate)
        return bool(elements[at])

    # -- loops --
    def enter(self, loop: Loop) -> None:
        self.sizes[loop.symbol] = self.sizes[loop.parity] = 0

    def advance(self, number: int, loop: Loop) -> None:
        self.sizes[loop.symbol] += 1
        self.sizes[loop.parity] ^= 1
        self.steps[number] += 1

    def has_next(self, loop: Loop) -> bool:
        """Whether the loop's length allows another step."""
        return loop.length is None or self.sizes[loop.symbol] < evaluate(loop.length, self.sizes)

    def mark(self, step: Step) -> None:
        """Records when a loop or branch was first entered and last left."""
        times, now = self.controls[step.number, 0], time.perf_counter()
        times[0] = times[0] or now
        if step.kind == LEAVE:
            times[1] = now
