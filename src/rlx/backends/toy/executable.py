"""The executable: interprets the kernels of a program. `ProgramExecutable` does the rest of a run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlx.arrays import Array
from rlx.backends.program_executable import ProgramExecutable
from rlx.backends.toy import interpreter
from rlx.backends.toy.memory import ToyBuffer
from rlx.errors import LowerError
from rlx.free_memory import require
from rlx.lir.loops import LoopKernel
from rlx.lir.program import Launch, Program
from rlx.lir.views import View
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

    def check_memory(self, needed: int) -> None:
        require(f"program {self.program.name!r}", needed, "smaller inputs")

    def launch(self, launch: Launch, sizes: Mapping[str, int], memory: Mapping[str, ToyBuffer]) -> int:
        kernel, faults = launch.kernel, list[int]()
        assert isinstance(kernel, LoopKernel) and launch.units is not None, "toy targets have portable forms"
        operands = [_place(word, sizes, memory) for word in launch.words if isinstance(word, View)]
        args = [evaluate(word, sizes) for word in launch.words if word is not None and not isinstance(word, View)]
        try:
            with np.errstate(all="ignore"):
                interpreter.run(kernel, evaluate(launch.units, sizes), operands, args, faults)
        except IndexError:  # after a fault a kernel continues, possibly with an index out of range
            if not faults:
                raise
        return faults[0] if faults else 0


def _place(view: View, sizes: Mapping[str, int], memory: Mapping[str, ToyBuffer]) -> tuple[Array, int]:
    """The buffer of a view as elements of its type, and the view's offset."""
    data, size = memory[view.buffer].memory, view.dtype.size
    return data[: len(data) // size * size].view(view.dtype.numpy), evaluate(view.offset, sizes)
