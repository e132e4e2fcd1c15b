"""The loops generator: a `LoopKernel` as LLVM IR, vectorised for the target.

`emitter` has statements, addresses and reductions, `scalars` operations on single values, `memory` vector loads and
stores, `byte_dots` the products of bytes.
"""

from __future__ import annotations

from rlx.backends.cpu.builder import Module
from rlx.backends.cpu.loops.emitter import Emitter
from rlx.backends.cpu.routine import ENTRY_ARGUMENTS, Routine
from rlx.backends.cpu.targets import CpuTarget
from rlx.lir.loops import LoopKernel


def routine(kernel: LoopKernel, target: CpuTarget) -> Routine:
    """The function of a loop kernel."""
    symbol = f"loops.{kernel.symbol}.{kernel.fingerprint}"

    def define(module: Module) -> None:
        module.define(symbol, ENTRY_ARGUMENTS, lambda b, *given: Emitter(b, kernel, target, *given).run())

    return Routine(symbol, define)
