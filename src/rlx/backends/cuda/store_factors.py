"""Stores what only products with 16-bit weights read in the type to which they round it. LIR in, LIR out.

Matmul kernels round A in f32 to the type of their weights. Where every reader of a temporary does so, its writers
store it rounded: the same bits, half the memory traffic, and no pass that prepares A for tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlx.backends.cuda.matmul.common import multiplied
from rlx.dtypes import F32, DType
from rlx.lir.kernels import AttentionKernel, Kernel, MatmulKernel
from rlx.lir.loops import Load, LoopKernel, expressions, walk
from rlx.lir.program import ARENA, Launch, Program
from rlx.lir.views import View


def store_factors(program: Program) -> Program:
    """Before: `x: f32`, `matmul(a: f32, b: bf16)`. After, if only these read x: `x: bf16`, `matmul(a: bf16, ...)`."""
    types = _types(program)
    if not types:
        return program
    buffers = {
        name: replace(buffer, type=replace(buffer.type, dtype=types[name])) if name in types else buffer
        for name, buffer in program.buffers.items()
    }
    return replace(program, buffers=buffers, launches=[_retyped(launch, types) for launch in program.launches])


def _types(program: Program) -> dict[str, DType]:
    """The type of factors, by the name of each temporary that holds nothing else."""
    candidates = {n for n, b in program.buffers.items() if b.kind == ARENA and b.type.dtype is F32}
    candidates -= {control.predicate.buffer for control in program.controls if control.predicate is not None}
    wanted: dict[str, set[DType | None]] = {}
    for launch in program.launches:
        for name, view in _operands(launch):
            if view.buffer in candidates:
                kinds = wanted.setdefault(view.buffer, set())
                if not launch.kernel.operands()[name]:
                    kinds.add(_factor(launch.kernel, name))
                elif not _may_round(launch.kernel, name):
                    kinds.add(None)
    single = {buffer: next(iter(kinds)) for buffer, kinds in wanted.items() if len(kinds) == 1}
    return {buffer: kind for buffer, kind in single.items() if kind is not None}


def _operands(launch: Launch) -> Iterator[tuple[str, View]]:
    operands = launch.kernel.operands()
    for name, word in zip(launch.kernel.words, launch.words, strict=True):
        if name in operands and isinstance(word, View):
            yield name, word


def _factor(kernel: Kernel, name: str) -> DType | None:
    """The type to which a kernel rounds an operand in f32; None if it does not."""
    if isinstance(kernel, MatmulKernel) and name == "a" and kernel.dtype is F32 and kernel.stored is not None:
        return multiplied(kernel)
    return None


def _may_round(kernel: Kernel, name: str) -> bool:
    """Whether a kernel can store a result in another type, which is the same as rounding it afterwards."""
    if isinstance(kernel, LoopKernel):
        loads = [e for let in kernel.lets for e in walk(let.value)] + list(expressions(kernel.root))
        return not any(isinstance(e, Load) and kernel.params[e.param].name == name for e in loads)
    return isinstance(kernel, MatmulKernel) or (isinstance(kernel, AttentionKernel) and name == "out")


def _retyped(launch: Launch, types: dict[str, DType]) -> Launch:
    changed = {name: types[view.buffer] for name, view in _operands(launch) if view.buffer in types}
    if not changed:
        return launch
    kernel = launch.kernel
    if isinstance(kernel, LoopKernel):
        kernel = replace(kernel, params=tuple(replace(p, dtype=changed.get(p.name, p.dtype)) for p in kernel.params))
    elif isinstance(kernel, AttentionKernel):
        kernel = replace(kernel, result=changed["out"])
    elif isinstance(kernel, MatmulKernel):
        operands = tuple(replace(o, dtype=changed.get(o.name, o.dtype)) for o in kernel.epilogue_operands)
        kernel = replace(kernel, epilogue_operands=operands)
        if "a" in changed:
            kernel = replace(kernel, dtype=changed["a"], stored=None, sums=kernel.accumulator)
    words = tuple(
        replace(word, dtype=types[word.buffer]) if isinstance(word, View) and word.buffer in types else word
        for word in launch.words
    )
    return replace(launch, kernel=kernel, words=words)
