"""Dispatches on the kind of kernel: its routines, how launches call them, their scratch, their text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlx.backends.cpu import attention, loops, matmul
from rlx.backends.cpu.builder import Module
from rlx.backends.cpu.routine import HEADER_BYTES, Call, Entry, Routine
from rlx.backends.cpu.targets import CpuTarget
from rlx.backends.cpu.toolchain import assembly
from rlx.lir.kernels import AttentionGradKernel, AttentionKernel, Kernel, MatmulKernel
from rlx.lir.loops import LoopKernel
from rlx.lir.program import Launch
from rlx.types import Size


def entry(kernel: Kernel, target: CpuTarget) -> Entry:
    """The routines of a kernel."""
    match kernel:
        case LoopKernel():
            return Entry(loops.routine(kernel, target))
        case MatmulKernel():
            return matmul.entry(kernel, target)
        case AttentionKernel():
            return attention.entry(kernel, target)
        case AttentionGradKernel():
            return attention.grad_entry(kernel, target)


def call(launch: Launch, target: CpuTarget) -> Call:
    """The argument block and the units of a launch."""
    match launch.kernel:
        case LoopKernel():
            assert launch.units is not None, "loops are launched with units"
            return Call(dict(zip(launch.kernel.words, launch.words, strict=True)), launch.units)
        case MatmulKernel():
            return matmul.call(launch, target)
        case AttentionKernel() | AttentionGradKernel():
            return attention.call(launch, target)


def scratch_bytes(kernel: Kernel, target: CpuTarget, k: int) -> int:
    """Scratch bytes per thread for a kernel; `k` is the inner size of a matmul."""
    match kernel:
        case MatmulKernel():
            return matmul.scratch_bytes(kernel, target, k)
        case AttentionKernel() | AttentionGradKernel():
            return attention.scratch_bytes(kernel, target)
        case _:
            return HEADER_BYTES


def inner_size(kernel: Kernel, words: Sequence[object]) -> Size:
    """The run-time word that scratch depends on: k of a matmul, 0 for other kernels."""
    if isinstance(kernel, MatmulKernel):
        return words[kernel.words.index("k")]  # type: ignore[return-value]
    return 0


def module_text(routines: Sequence[Routine]) -> str:
    """The LLVM IR of some routines."""
    module = Module()
    for routine in routines:
        routine.emit(module)
    return module.text()


def kernel_text(kernels: Iterable[Kernel], target: CpuTarget, *, level: str) -> str:
    """The LLVM IR or assembly of kernels, for people."""
    routines = {r.symbol: r for k in kernels for r in entry(k, target).routines()}
    text = module_text(list(routines.values()))
    return text if level == "llvm" else assembly(text, target)
