"""Planning a program for concrete sizes: the CUDA kernels of each launch, their parameters, and where buffers are.

The plan is data: it prints, and it is made without a GPU. `Executable` gives it addresses and runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from rlx.arrays import Array
from rlx.backends.cuda.chains import ChainKernel, fuse_chains
from rlx.backends.cuda.generators import generator
from rlx.backends.cuda.heads import HeadsKernel, fuse_heads
from rlx.backends.cuda.kernel_plan import EXTRA_WORDS, AnyKernel, KernelPlan, entry
from rlx.backends.cuda.prologues import PrologueKernel, fuse_prologues
from rlx.backends.cuda.sized import SizedKernel, Sizes
from rlx.backends.cuda.targets import CudaTarget
from rlx.fast_dataclass import dataclass
from rlx.lir.kernels import AttentionKernel, Kernel, MatmulKernel
from rlx.lir.loops import Check, LoopKernel, statements
from rlx.lir.program import CONST, INPUT, WEIGHT, Launch, Program
from rlx.lir.views import View, offset_steps
from rlx.types import evaluate, product

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
    sizes: Sizes = ()  # words that are constants of the code
    covers: tuple[int, ...] = ()  # launches that run as this one, if several

    @property
    def fault_words(self) -> tuple[int, ...]:
        """The words that say where faults are reported."""
        if isinstance(self.kernel, ChainKernel | PrologueKernel | HeadsKernel):
            return self.kernel.fault_words
        return (len(self.kernel.words) + len(EXTRA_WORDS) + FAULT,)

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
    fixed = {name for name, buffer in program.buffers.items() if buffer.kind in (WEIGHT, CONST, INPUT)}
    fixed -= {view.buffer for launch in program.launches for view in launch.views(written=True)}
    if symbols:  # a step of a loop follows what an earlier one wrote, wherever inputs say
        fixed -= {name for name, buffer in program.buffers.items() if buffer.kind == INPUT}
    planned = [_planned(i, launch, start, symbols, fixed, target) for i, launch in enumerate(program.launches)]
    if program.symbols:  # other sizes are those of one call, whose code is worth sharing with calls of other sizes
        planned = [replace(one, sizes=_sizes(one, program.launches[i])) for i, one in enumerate(planned)]

    def small(i: int) -> dict[str, int]:
        return fetched(program.launches[i], start, fixed)

    fused = fuse_chains(fuse_prologues(planned, program, small), program, small, target)
    fused = fuse_heads(fused, program, start, target)
    return [replace(one, kernel=SizedKernel(one.kernel, one.sizes)) if one.sizes else one for one in fused]


def _sizes(planned: PlannedLaunch, launch: Launch) -> Sizes:
    """Sizes that every run of the program has; in launches of a few rows, also those that are 1."""
    few = all(one.variant.startswith(("rows", "splits", "token")) for one in planned.plan.passes)
    constants = []
    for name, word, value in zip(launch.kernel.words, launch.words, planned.words.tolist(), strict=False):
        is_size = word is not None and not isinstance(word, View)
        if is_size and (isinstance(word, int) or (few and value == 1)):
            constants.append((name, value))
    return tuple(constants)


FETCHED = 16 << 10  # bytes of a weight up to which blocks ask for it before earlier launches have ended


def fetched(launch: Launch, sizes: Mapping[str, int], fixed: set[str]) -> dict[str, int]:
    """The bytes of small operands that no launch writes, by name: kernels may fetch them early."""
    small_operands: dict[str, int] = {}
    for name, word in zip(launch.kernel.words, launch.words, strict=True):
        if isinstance(word, View) and word.buffer in fixed and word.is_contiguous():
            size = evaluate(product(word.shape), sizes) * word.dtype.size
            if 0 < size <= FETCHED:
                small_operands[name] = size
    return small_operands


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
    return PlannedLaunch(number, kernel, _plan(kernel, known, target), words, tuple(operands), steps)


MOST_PLANS = 4096
plans: dict[tuple[object, ...], KernelPlan] = {}  # layers repeat, and so do sizes


def _plan(kernel: Kernel, known: Mapping[str, int], target: CudaTarget) -> KernelPlan:
    """The plan of a kernel for these words; the most recent ones are kept."""
    key = kernel.symbol, kernel.fingerprint, target, *known.items()
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = generator(kernel).plan(kernel, known, target)
        if len(plans) > MOST_PLANS:
            plans.pop(next(iter(plans)), None)
    return plan


def joined(launches: Iterable[PlannedLaunch]) -> frozenset[int]:
    """The launches that run as one with the next one: buffers that one of them frees are no place for the other's."""
    return frozenset(n for launch in launches if launch.covers for n in range(min(launch.covers), max(launch.covers)))


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
