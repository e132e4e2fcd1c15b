"""Planning a program for concrete sizes: the CUDA kernels of each launch, their parameters, and where buffers are.

The plan is data: it prints, and it is made without a GPU. `Executable` gives it addresses and runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rlx.arrays import Array
from rlx.backends.cuda.generators import generator
from rlx.backends.cuda.kernel_plan import EXTRA_WORDS, AnyKernel, KernelPlan, entry
from rlx.backends.cuda.prologues import PrologueKernel, fuse_prologues
from rlx.backends.cuda.sequences import SequenceKernel, fuse_sequences
from rlx.backends.cuda.targets import CudaTarget
from rlx.lir.kernels import AttentionKernel, Kernel, MatmulKernel
from rlx.lir.loops import Check, LoopKernel, statements
from rlx.lir.program import CONST, WEIGHT, Launch, Program
from rlx.lir.views import View, offset_steps
from rlx.types import evaluate

SCRATCH, FAULT, LAUNCH_NUMBER = (-len(EXTRA_WORDS) + i for i in range(len(EXTRA_WORDS)))


@dataclass(frozen=True)
class PlannedLaunch:
    """A launch at concrete sizes: parameters without the addresses of buffers, and how they depend on loop steps."""

    number: int
    kernel: AnyKernel
    plan: KernelPlan
    words: Array  # i64; operands hold their offset in bytes
    operands: tuple[tuple[int, str], ...]  # (word, buffer)
    steps: Mapping[str, Array]  # what one step of a loop adds to the words, by loop symbol

    @property
    def fault_words(self) -> tuple[int, ...]:
        """The words that say where faults are reported."""
        match self.kernel:
            case SequenceKernel(pieces):
                lengths = [len(piece.kernel.words) + len(EXTRA_WORDS) for piece in pieces]
            case PrologueKernel(producer, _, consumer):
                lengths = [len(kernel.words) + len(EXTRA_WORDS) for kernel in (producer, consumer)]
            case kernel:
                lengths = [len(kernel.words) + len(EXTRA_WORDS)]
        return tuple(int(end) + FAULT for end in np.cumsum(lengths))

    def __str__(self) -> str:
        passes = ", ".join(
            f"{entry(self.kernel, p.variant)}<<<{'x'.join(map(str, p.grid))}, {p.threads}"
            + (f", {p.shared} B" if p.shared else "")
            + ">>>"
            for p in self.plan.passes
        )
        scratch = f"  scratch {self.plan.scratch}" if self.plan.scratch else ""
        return f"launch {self.number}: {passes}{scratch}"


def plan_launches(program: Program, sizes: Mapping[str, int], target: CudaTarget) -> list[PlannedLaunch]:
    """Plans every launch of a program."""
    symbols = program.loop_symbols()
    start = dict(sizes) | dict.fromkeys(symbols, 0)
    fixed = {name for name, buffer in program.buffers.items() if buffer.kind in (WEIGHT, CONST)}
    fixed -= {view.buffer for launch in program.launches for view in launch.views(written=True)}
    planned = [_planned(i, launch, start, symbols, fixed, target) for i, launch in enumerate(program.launches)]
    edges = (edge for control in program.controls for edge in control.edges)
    return fuse_sequences(fuse_prologues(planned, program), program.launches, edges)


def _planned(
    number: int, launch: Launch, sizes: Mapping[str, int], symbols: Iterable[str], fixed: set[str], target: CudaTarget
) -> PlannedLaunch:
    """`fixed`: buffers that no launch of the program writes."""
    kernel = launch.kernel
    words = np.zeros(len(kernel.words) + len(EXTRA_WORDS), np.int64)
    operands: list[tuple[int, str]] = []
    steps: dict[str, Array] = {}
    known: dict[str, int] = {}
    buffers: dict[str, int] = {}  # numbered from 1
    for i, (name, word) in enumerate(zip(kernel.words, launch.words, strict=True)):
        if word is None:
            continue
        if isinstance(word, View):
            operands.append((i, word.buffer))
            words[i] = evaluate(word.offset, sizes) * word.dtype.size
            buffer = buffers.setdefault(word.buffer, len(buffers) + 1)
            known[name] = -buffer if word.buffer in fixed else buffer
            for symbol, step in offset_steps(word.offset, symbols).items():
                change = steps.setdefault(symbol, np.zeros_like(words))
                change[i] = evaluate(step, sizes) * word.dtype.size
        else:
            words[i] = known[name] = evaluate(word, sizes)
    words[LAUNCH_NUMBER] = number
    plan = generator(kernel).plan(kernel, known, target)
    return PlannedLaunch(number, kernel, plan, words, tuple(operands), steps)


def can_fault(kernel: Kernel) -> bool:
    """Whether a kernel may report a fault."""
    match kernel:
        case LoopKernel():
            return any(isinstance(s, Check) for s in statements(kernel.root))
        case MatmulKernel():
            return kernel.grouped == "rows"
        case AttentionKernel():
            return kernel.cached
    return False


def variants(launches: Iterable[PlannedLaunch]) -> Iterator[tuple[AnyKernel, str, int]]:
    """Each kernel and variant once, with the most dynamic shared memory that it takes."""
    most: dict[str, tuple[AnyKernel, str, int]] = {}
    for launch in launches:
        for one in launch.plan.passes:
            name = entry(launch.kernel, one.variant)
            shared = max(one.shared, most[name][2] if name in most else 0)
            most[name] = (launch.kernel, one.variant, shared)
    yield from most.values()
