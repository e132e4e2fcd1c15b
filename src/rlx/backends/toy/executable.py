"""The executable: a LIR program and memory. A run walks the program's steps and interprets its kernels."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import Key, bytes_of
from rlx.backends.program_executable import ProgramExecutable
from rlx.backends.reports import Trace
from rlx.backends.run_time_errors import check_sizes, fault
from rlx.backends.toy import interpreter
from rlx.backends.toy.memory import ToyBuffer
from rlx.errors import LowerError
from rlx.free_memory import require
from rlx.lir.loops import LoopKernel
from rlx.lir.program import LAUNCH, LEAVE, NEXT, Launch, Loop, Program
from rlx.lir.views import View
from rlx.lir.wrong_index import strided
from rlx.target import Target
from rlx.types import evaluate


class ToyExecutable(ProgramExecutable):
    """Runs a program from any number of threads at once: a run changes only its own state."""

    def __init__(self, program: Program, target: Target) -> None:
        super().__init__(program, target)
        for kernel in program.kernels().values():
            if not isinstance(kernel, LoopKernel):
                hint = "give the target a loop form for it, see lir/forms"
                raise LowerError(f"toy: program {program.name!r} has a kernel of kind {kernel.kind!r}", hint=hint)
        values = {name: b.value.data for name, b in program.buffers.items() if b.value is not None}
        self._constants = {name: np.frombuffer(data.tobytes(), np.uint8) for name, data in values.items()}

    def units(self, key: Key) -> list[int]:
        sizes = self.sizes(key)
        return [evaluate(launch.units or 0, sizes) for launch in self.program.launches]

    def run(self, key: Key, inputs: Sequence[Any]) -> list[ToyBuffer]:
        return self.trace(key, inputs)[0]

    def trace(self, key: Key, inputs: Sequence[Any]) -> tuple[list[ToyBuffer], Trace]:
        program, weights, sizes = self.program, self.weights, self.sizes(key)
        check_sizes(program, sizes)
        types, arena = self.outputs(key), self.plan(sizes)
        require(f"program {program.name!r}", arena.size + bytes_of(types), "smaller inputs")
        outputs = [ToyBuffer(np.zeros(shape, dtype)) for shape, dtype in types]
        room = np.zeros(arena.size, np.uint8)
        memory = {name: room[at : at + arena.sizes[name]] for name, at in arena.offsets.items()} | self._constants
        buffers = dict(zip((*program.inputs, *program.outputs), (*inputs, *outputs), strict=True))
        buffers |= {name: weights[name] for name in self.reads}
        memory |= {name: buffer.memory for name, buffer in buffers.items()}
        run = _Run(program, memory, sizes)
        launches, controls = np.zeros((len(program.launches), 1, 2)), np.zeros((len(program.controls), 1, 2))
        steps = {i: 0 for i, control in enumerate(program.controls) if isinstance(control, Loop)}
        with np.errstate(all="ignore"):
            for step in self.run_order(sizes, run.holds):
                begin = time.perf_counter()
                times = (launches if step.kind == LAUNCH else controls)[step.number, 0]
                times[0] = times[0] or begin
                if step.kind == LAUNCH:
                    run.launch(program.launches[step.number])
                    times[1] = (times[1] or times[0]) + time.perf_counter() - begin
                elif step.kind == LEAVE:
                    times[1] = begin
                elif step.kind == NEXT:
                    steps[step.number] += 1
        return outputs, Trace(launches, controls, steps)


class _Run:
    """One run: memory by buffer, and symbol values, including loop counters."""

    def __init__(self, program: Program, memory: Mapping[str, Array], sizes: Mapping[str, int]) -> None:
        self.program, self.memory, self.sizes = program, memory, sizes

    def launch(self, launch: Launch) -> None:
        kernel, faults = launch.kernel, list[int]()
        assert isinstance(kernel, LoopKernel) and launch.units is not None, "toy targets have portable forms"
        memory = [self.place(word) for word in launch.words if isinstance(word, View)]
        args = [evaluate(word, self.sizes) for word in launch.words if word is not None and not isinstance(word, View)]
        try:
            interpreter.run(kernel, evaluate(launch.units, self.sizes), memory, args, faults)
        except IndexError:  # after a fault a kernel continues, possibly with an index out of range
            if not faults:
                raise
        if faults:
            raise fault(self.program, launch, faults[0], self.sizes, self._read)

    def _read(self, word: str, view: View) -> Array:
        """The elements of an operand."""
        elements, offset = self.place(view)
        return strided(elements[offset:], view, self.sizes)

    def place(self, view: View) -> tuple[Array, int]:
        """The buffer of a view as elements of its type, and the view's offset."""
        memory, size = self.memory[view.buffer], view.dtype.size
        elements = memory[: len(memory) // size * size]
        return elements.view(view.dtype.numpy), evaluate(view.offset, self.sizes)

    def holds(self, predicate: View) -> bool:
        elements, at = self.place(predicate)
        return bool(elements[at])
